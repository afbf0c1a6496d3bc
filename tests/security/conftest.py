"""The parts that most of these tests attack."""

from rig.fixtures import engine, pool

__all__ = ["engine", "pool"]
