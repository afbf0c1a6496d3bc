from rig.fixtures import engine, pool

__all__ = ["engine", "pool"]
