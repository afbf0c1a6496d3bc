from rig.fixtures import engine, pool, two

__all__ = ["engine", "pool", "two"]
