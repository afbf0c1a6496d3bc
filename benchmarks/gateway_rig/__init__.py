"""What the gateway's benchmarks are made of: an engine, a load, and the gateways that are compared.

Each is a process of its own on loopback, started by `processes.py` and driven over HTTP or by lines of JSON.
"""
