"""The parts that most of these tests attack."""

from tests.integration.conftest import engine, pool

__all__ = ["engine", "pool"]
