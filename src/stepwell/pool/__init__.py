"""The DataPool on Ray: a named, detached actor around core/pool.py, and the clients that reach it."""
