"""Whatever the sizes: formulas are what modules have and do, counted independently."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cost_model.cases import EVERYTHING, LAYERS, MODELS, Case, attentions, gpts
from cost_model.counting import count, measure_saved_bytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regard.cost_model import cost

QUICK = settings(
    max_examples=2,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
THOROUGH, SEVERAL = settings(QUICK, max_examples=60), settings(QUICK, max_examples=8)

# Models of two stacks or of four stages take a minute each.
LONG = ("transformer", "davit", "spatial")
everything = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] if kind in LONG else []) for kind in EVERYTHING]
)


Check = Callable[[Case], None]


def drawn(data: st.DataObject, kind: str) -> Case:
    torch.manual_seed(0)
    return data.draw(EVERYTHING[kind], label=kind)


def check_parameters(case: Case) -> None:
    assert cost(case.target).parameters == sum(parameter.numel() for parameter in case.module.parameters())


def check_forward(case: Case) -> None:
    counted = count(case.module, *case.inputs, **case.kwargs)
    found = cost(case.target, backend="reference", **case.sizes)
    assert found.macs == counted.macs
    assert found.flops == 2 * counted.macs
    if case.full:
        assert cost(case.target, **case.sizes).macs == counted.macs
    elif case.described is None or case.described.feature_map is None:
        # Features are made for long texts: below d + 1 tokens the square, which the reference multiplies, is less.
        assert cost(case.target, **case.sizes).macs <= counted.macs


def check_backward(case: Case) -> None:
    counted = count(case.module, *case.inputs, backward=True, **case.kwargs).macs
    found = cost(case.target, step="backward", backend="reference", **case.sizes)
    assert found.macs == counted
    if case.full:
        assert cost(case.target, step="backward", **case.sizes).macs == counted
    forward = cost(case.target, backend="reference", **case.sizes)
    assert cost(case.target, step="training", backend="reference", **case.sizes).macs == forward.macs + counted


def check_saved_bytes(case: Case) -> None:
    assert cost(case.target, **case.sizes).activation_bytes == measure_saved_bytes(
        case.module, *case.inputs, **case.kwargs
    )


def check_algebra(case: Case) -> None:
    whole = cost(case.target, **case.sizes)
    nothing, once = whole - whole, whole.ratio(whole)
    parts = [whole.by_part(levels).values() for levels in (None, 1)]
    for name in ("parameters", "macs", "bytes", "activation_bytes", "pairs"):
        total = whole.quantity(name).value
        for found in parts:
            assert sum(part.quantity(name).value for part in found) == total
        assert nothing.quantity(name) == 0
        if total:
            assert once[name] == 1
    if not case.any_batch:
        return
    # The formula with the numbers of another batch is the cost of another batch.
    batch = {"batch": whole.values[next(symbol for symbol in whole.values if str(symbol) == "B")] + 1}
    assert whole.at(**batch).macs == cost(case.target, **case.sizes | batch).macs


@pytest.mark.slow
@everything
@pytest.mark.parametrize(
    "check",
    [
        check_parameters,
        check_forward,
        pytest.param(check_backward, marks=pytest.mark.long),
        check_saved_bytes,
        pytest.param(check_algebra, marks=pytest.mark.long),
    ],
)
@QUICK
@given(data=st.data())
def test_costs_are_those_of_the_module_and_of_its_runs(kind: str, check: Check, data: st.DataObject) -> None:
    check(drawn(data, kind))


@pytest.mark.slow
@settings(QUICK, max_examples=3)
@given(case=gpts())
def test_one_more_word_is_a_step_with_a_memory(case: Case) -> None:
    """A GPT that has read `tokens` words, and reads one more."""
    model, words = case.module.eval(), case.inputs[0]
    if words.shape[1] == model.config.context_length:
        words = words[:, :-1]
    if not words.shape[1]:
        return
    double = model.double()
    with torch.no_grad():
        cache = double.new_cache()
        double(words, cache=cache)
        counted = count(double, words[:, :1], cache=cache).macs
    sizes = {"batch": words.shape[0], "tokens": words.shape[1]}
    assert cost(model, step="decode", backend="reference", **sizes).macs == counted


@pytest.mark.slow
@settings(QUICK, max_examples=3)
@given(case=attentions(), tokens=st.integers(1, 40))
def test_a_formula_holds_at_other_lengths(case: Case, tokens: int) -> None:
    sizes = case.sizes | {"tokens": tokens}
    known = cost(case.target, backend="reference", **case.sizes)
    assert known.at(tokens=tokens).macs == cost(case.target, backend="reference", **sizes).macs


def check_everything(case: Case) -> None:
    check_parameters(case)
    check_forward(case)
    check_backward(case)
    check_saved_bytes(case)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYERS)
@THOROUGH
@given(data=st.data())
def test_many_sizes_of_layers(kind: str, data: st.DataObject) -> None:
    check_everything(drawn(data, kind))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", MODELS)
@SEVERAL
@given(data=st.data())
def test_many_sizes_of_models(kind: str, data: st.DataObject) -> None:
    check_everything(drawn(data, kind))
