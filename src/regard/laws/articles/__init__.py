"""Every law, in the order of their numbers. A new law is one file here and one line below."""

import importlib

from regard.laws.law import Law

_FILES = """causality alignment cache padding masked_values empty_rows row_stochasticity support permutation
batch_independence paths determinism gradients scale relative_position head_groups range_law cache_algebra cost_law
table_precision jacobian statelessness shape""".split()


def _found():
    for name in _FILES:
        try:
            module = importlib.import_module(f"regard.laws.articles.{name}")
        except ModuleNotFoundError:
            continue
        for value in vars(module).values():
            if (
                isinstance(value, type)
                and issubclass(value, Law)
                and value is not Law
                and value.__module__ == module.__name__
            ):
                yield value()


LAWS: tuple[Law, ...] = tuple(_found())

__all__ = ["LAWS"]
