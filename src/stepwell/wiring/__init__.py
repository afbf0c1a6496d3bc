"""Builds each process from its settings: one module per command, which imports only the rooms that its process uses.

What imports Ray is imported inside the functions that use it: a gateway does not, and Ray takes much memory.
"""
