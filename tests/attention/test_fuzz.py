"""Thousands of random attentions against a dense oracle; see tests/operator_cases.py for how to run more."""

import os

import operator_cases
import pytest
import torch
from operator_cases import BACKENDS
from operator_draws import FAMILIES, Case
from operator_faults import FAULTS
from plain import long, slow

FIRST = int(os.environ.get("REGARD_CASES_SEED", "0"))


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("part", [0, *slow(*range(1, 8))])
def test_every_backend_agrees_with_the_dense_oracle(part):
    _, compared = operator_cases.run(FIRST + 250 * part, 250)
    _were_really_compared(compared, 250)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *long(*range(1, 20))])
def test_every_backend_agrees_with_the_dense_oracle_on_many_more(part):
    _, compared = operator_cases.run(FIRST + 1_000_000 + 1000 * part, 1000)
    _were_really_compared(compared, 1000)


@pytest.mark.parametrize("count", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_flex_agrees_with_the_dense_oracle(count):
    """Few: it traces every pattern, which takes longer than all other backends together."""
    compared = 0
    for seed in range(100 * count):
        compared += operator_cases.check(Case(seed), ("flex",))["flex"]
        if compared == count:
            break
    assert compared == count


def _were_really_compared(compared, cases):
    """A backend that refuses everything agrees with everything."""
    for backend in BACKENDS:
        assert compared[backend] >= cases // 20, compared
        assert compared[f"{backend}, not finite"] >= cases // 125, compared
        # What is chosen by itself is the chosen backend bit by bit, whose gradients are compared.
        assert backend == "auto" or compared[f"{backend}, gradient"] >= cases // 25, compared


def test_scores_of_1e30_that_do_not_overflow_have_gradients():
    """The backward pass once added such a score up in another order, which moved it by 1e24, its weight to infinity."""
    case = Case(503380)
    assert float(case.inputs["key"].leaf.abs().max()) > 1e29, "the draws have changed: find another seed"
    operator_cases.run(503380, 1)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_in_a_thousand_cases(name, monkeypatch):
    backend, place, attribute, fault = FAULTS[name]
    monkeypatch.setattr(place, attribute, fault)
    with pytest.raises(AssertionError, match=f"{backend}: "):
        operator_cases.run(0, 1000, backends=(backend,))


def test_the_cases_have_every_kind_of_input():
    """A generator that quietly stopped drawing something would prove nothing about it."""
    cases = [Case(seed) for seed in range(400)]
    kinds = {type(part).__name__ for case in cases for part in _leaves(case.pattern)}
    assert len(kinds) == 15
    assert {case.scale for case in cases} >= {None, 0.0, float("inf"), -float("inf"), -0.7, 20.0}
    assert {case.family for case in cases} == set(FAMILIES)
    assert {len(case.batch) for case in cases} == {0, 1, 2, 3}
    assert {case.dtype for case in cases} == {torch.float64, torch.float32, torch.bfloat16}
    assert {type(case.bias).__name__ for case in cases} == {
        *("NoneType", "Input", "Alibi", "RelativeTable", "RowColumn", "Quadratic", "Gaussian", "Shift", "TransformerXL")
    }
    for size in ("queries", "keys", "dim", "value_dim", "rows"):
        assert any(not getattr(case, size) for case in cases), size
    planted = [case for case in cases if any(not torch.isfinite(i.leaf).all() for i in case.inputs.values())]
    assert len(planted) > 60


def _leaves(pattern):
    parts = [getattr(pattern, name) for name in ("left", "right", "pattern") if hasattr(pattern, name)]
    parts = [part for part in parts if hasattr(part, "matrix")]
    return [leaf for part in parts for leaf in _leaves(part)] if parts else [pattern]
