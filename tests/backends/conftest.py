"""The tests of this folder plan small sizes as large ones are planned."""

from general_plans import general_plans

__all__ = ["general_plans"]
