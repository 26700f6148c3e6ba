"""Processes for tests of costs on several devices."""

from tests.distributed.processes import four, two

__all__ = ["four", "two"]
