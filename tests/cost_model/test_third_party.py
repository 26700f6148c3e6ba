"""Third-party models, traced with fake tensors, against derivations by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from cost_model import derivations, third_party_models
from cost_model.counting import in_input_sizes
from cost_model.derivations import Derived
from cost_model.test_derivations import RANDOM
from plain import long
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from regard.cost_model import Cost, cost

Question = tuple[dict[str, Any], Derived]


def text(derive: Callable[..., Derived], batch: int, tokens: int) -> Question:
    return {"batch": batch, "tokens": tokens}, derive(batch, tokens)


def translation(batch: int, context: int, tokens: int) -> Question:
    return {"batch": batch, "context_tokens": context, "tokens": tokens}, derivations.t5(batch, context, tokens)


def image(derive: Callable[..., Derived], batch: int, rows: int, columns: int) -> Question:
    return {"batch": batch, "image": (rows, columns)}, derive(batch, (rows, columns))


# The published sizes: BERT-base, GPT-2, T5-small, ViT-B/16, DaViT-tiny, Swin-T.
QUESTIONS: dict[str, list[Question]] = {
    "bert": [text(derivations.bert, 1, 128), text(derivations.bert, 3, 512)],
    "gpt2": [text(derivations.gpt2, 1, 1024), text(derivations.gpt2, 2, 17)],
    "t5": [translation(1, 512, 128), translation(2, 19, 7)],
    "vit": [image(derivations.vit, 1, 224, 224), image(derivations.vit, 5, 224, 224)],
    "davit": [image(derivations.davit, 1, 224, 224), image(derivations.davit, 2, 230, 311)],
    "swin": [image(derivations.swin, 1, 224, 224), image(derivations.swin, 3, 224, 224)],
}
each = pytest.mark.parametrize("name", QUESTIONS)
# Of four stages, or of two stacks: what takes long, and is left to the slow tests.
LONG = ("t5", "davit", "swin")
quickly = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in QUESTIONS]
)


@cache
def model(name: str, eager: bool = True) -> nn.Module:
    """The published size, with shapes and no numbers."""
    return getattr(third_party_models, name)(eager=eager, device="meta")


@cache
def price(name: str) -> Cost:
    """The first question, which takes a while. Images that have one size, and two texts, are given as tensors: then no
    runs look for letters that are not there, or that one layer shows as well."""
    sizes = QUESTIONS[name][0][0]
    if "image" in sizes:
        return cost(
            model(name), inputs={"x": third_party_models.picture(sizes["batch"], sizes["image"], device="meta")}
        )
    if name == "t5":
        lengths = {"input_ids": sizes["context_tokens"], "decoder_input_ids": sizes["tokens"]}
        words = {key: third_party_models.words(sizes["batch"], count, "meta") for key, count in lengths.items()}
        return cost(model(name), inputs={**words, "use_cache": False})
    return cost(model(name), **sizes)


# At full size


@quickly
def test_a_published_model_costs_what_the_hand_derived(name: str) -> None:
    derived = QUESTIONS[name][0][1]
    assert price(name).parameters == derived.parameters
    assert 4 * price(name).parameters == derived.bytes
    assert price(name).macs == derived.forward
    assert price(name).flops == 2 * derived.forward
    assert price(name).exponentials == derived.weights


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_its_formula_is_right_for_other_texts(name: str) -> None:
    """Letters for the sizes of the input: the formula itself with other numbers, not another run."""
    other, derived = QUESTIONS[name][1]
    letters = {"batch": "B", "tokens": "N", "context_tokens": "T"}
    numbers = {letters[key]: number for key, number in other.items()}
    if name == "t5":
        formula = cost(third_party_models.t5(device="meta", layers=1), **QUESTIONS[name][0][0]).macs
        derived = derivations.t5(*other.values(), layers=1)
    else:
        formula = price(name).macs
    formula = in_input_sizes(formula)
    assert {str(symbol) for symbol in formula.free_symbols} == set(numbers)
    assert formula.subs({symbol: numbers[str(symbol)] for symbol in formula.free_symbols}) == derived.forward


@pytest.mark.parametrize("name", ["vit", "davit", "swin"])
def test_its_formula_is_right_for_another_batch(name: str) -> None:
    quantity = price(name).macs
    (batch,) = (symbol for symbol in in_input_sizes(quantity).free_symbols if str(symbol) == "B")
    derived = getattr(derivations, name)(7, QUESTIONS[name][0][0]["image"])
    assert quantity.at({batch: 7}) == derived.forward


@each
def test_its_parts_add_up_to_the_whole(name: str) -> None:
    derived = QUESTIONS[name][0][1]
    for levels in (1, 2):
        parts = price(name).by_part(levels).values()
        assert sum(int(part.macs) for part in parts) == derived.forward
        assert sum(int(part.parameters) for part in parts) == derived.parameters


# Small ones, of random sizes


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *long(1)])
@each
def test_a_random_model_costs_what_the_hand_derived(name: str, seed: int) -> None:
    small, inputs, derived = RANDOM[name](random.Random(f"{name} {seed}"))
    found = cost(small, step="training", inputs=inputs)
    assert found.parameters == derived.parameters
    assert found.macs == derived.forward + derived.backward


@quickly
def test_fused_attention_is_seen_too(name: str) -> None:
    """As the libraries build it: scores and sums inside one operation, of which the reference computes the square."""
    sizes: dict[str, Any] = {"bert": {"layers": 1}, "gpt2": {"layers": 1}, "t5": {"layers": 1}, "vit": {"layers": 1}}
    sizes |= {"davit": {"depths": (1, 1, 1, 1)}, "swin": {"depths": (1, 1, 1, 1)}}
    question = QUESTIONS[name][0][0]
    given = {"batch": 1, "context": 512, "tokens": 128} if name == "t5" else question
    derived = getattr(derivations, name)(**given, **sizes[name])
    fused = getattr(third_party_models, name)(eager=False, device="meta", **sizes[name])
    assert cost(fused, backend="reference", **question).macs == derived.forward


def test_a_fused_causal_attention_needs_the_triangle() -> None:
    sizes = {"batch": 2, "tokens": 17}
    fused = third_party_models.gpt2(eager=False, device="meta", layers=1)
    assert cost(fused, **sizes).macs == derivations.gpt2(**sizes, layers=1, triangle=True).forward
    assert cost(fused, backend="reference", **sizes).macs == derivations.gpt2(**sizes, layers=1).forward


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (5, 11), (11, 5), (1, 3)])
def test_torchs_causal_attention_begins_at_the_first_key(queries: int, keys: int) -> None:
    def attention(query: Tensor, key: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, key, is_causal=True)

    pairs = int(torch.ones(queries, keys).tril().sum())
    inputs = [(2, 3, queries, 8), (2, 3, keys, 8)]
    found = cost(attention, inputs=inputs)
    assert found.pairs == 2 * 3 * pairs
    assert found.macs == 2 * 2 * 3 * pairs * 8
    assert (
        cost(attention, inputs=[(2, 3, queries, 8), (2, 3, keys, 8)], backend="reference").pairs == 6 * queries * keys
    )


@pytest.mark.parametrize("causal", [False, True])
def test_the_backward_pass_of_a_fused_attention(causal: bool) -> None:
    """Two products for each of the two forward; kernels compute the scores once more."""

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=causal)

    query, key, value = (torch.randn(2, 3, 7, dim, requires_grad=True) for dim in (8, 8, 8))
    pairs = 2 * 3 * (7 * 8 // 2 if causal else 7 * 7)
    inputs = {"inputs": [query, key, value]}
    assert cost(attention, step="backward", **inputs).macs == pairs * (2 * 8 + 2 * 8)
    assert cost(attention, step="training", **inputs).macs == pairs * 3 * (8 + 8)
    again = cost(attention, step="backward", backend="native", **inputs)
    assert again.macs == 2 * 3 * 7 * 7 * (3 * 8 + 2 * 8)


# The rest at full size


@pytest.mark.slow
@pytest.mark.long
@each
def test_both_ways_and_other_sizes(name: str) -> None:
    (sizes, derived), (other, another) = QUESTIONS[name]
    assert cost(model(name), step="backward", **sizes).macs == derived.backward
    assert cost(model(name), step="training", **sizes).macs == derived.forward + derived.backward
    assert cost(model(name), **sizes).macs == derived.forward
    assert cost(model(name), **other).macs == another.forward


@pytest.mark.slow
@each
def test_a_published_model_as_it_comes(name: str) -> None:
    for sizes, derived in QUESTIONS[name]:
        fused = cost(model(name, eager=False), backend="reference", **sizes)
        assert (fused.parameters, fused.macs) == (derived.parameters, derived.forward)
