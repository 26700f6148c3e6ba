"""Which other sizes were tried beside the smallest counterexample, and what was seen there."""

from __future__ import annotations

from collections.abc import Callable

from regard.laws.law import Case, Law


def describe_sizes(law: Law, case: Case, breaks: Callable[[Case], bool | None]) -> dict[str, str]:
    """For each size of the case, the sizes at which the law was seen to break and to hold, all else equal.

    `breaks` runs a case: True if the law breaks, False if it holds, None if the subject refuses to run it. Two larger
    sizes are tried, the next smaller one, and the smallest.
    """
    remarks = {}
    for name, floor in law.smallest.items():
        value = case.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        outcomes: dict[int, bool] = {value: True}
        for size in dict.fromkeys((value + 1, value + 2, value - 1, floor)):
            candidate = {**case, name: size}
            if size < floor or size in outcomes or not law.possible(candidate):
                continue
            if (outcome := breaks(candidate)) is not None:
                outcomes[size] = outcome
        if len(outcomes) > 1:
            remarks[name] = _describe_outcomes(outcomes)
    return remarks


def _describe_outcomes(outcomes: dict[int, bool]) -> str:
    fails = [str(size) for size in sorted(outcomes) if outcomes[size]]
    holds = [str(size) for size in sorted(outcomes) if not outcomes[size]]
    if not holds:
        return f"fails at every size tried: {', '.join(fails)}"
    return f"fails at {', '.join(fails)}; holds at {', '.join(holds)}"
