"""Processes for these tests."""

from tests.distributed.processes import four, two

__all__ = ["four", "two"]
