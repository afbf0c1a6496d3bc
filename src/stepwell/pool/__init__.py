"""The DataPool on Ray: a named, detached actor around pool/rules/pool.py, and the clients that reach it."""
