"""The cost of a bare description: `cost(Attention(...), tokens=..., dim=...)`.

    scores[i, j] = query[i] . key[j],    weights = softmax(scores),    output[i] = sum_j weights[i, j] value[j]

Every allowed pair costs d multiply-adds for its score, one exponential, and e multiply-adds for its value; in backward
each of the two products has two of its own, one for each operand. With a feature map no pair is computed: see
`linear_attention.py`. The limits of temperature cost less: see `_count_uniform` and `_count_hard`.

Whose work is counted is a matter of `RunMode.backend`:

- `None`, the mathematics: exactly the pairs of the pattern.
- `"reference"`: the whole square, as the reference executes it.
- `"native"` and `"blocked"`: the tiles of the plan that this backend runs, and the scores again in backward.
- `"positional"`: rows and columns separately, for attention by position alone; see `positional.py`.

Queries and keys come in scaled: scale belongs to the projection before, and costs nothing here.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import sympy
from torch import Tensor

from regard.attention import Attention
from regard.biases.base import Bias
from regard.cost_model import depth
from regard.cost_model.attention.bias import count_bias, is_learned
from regard.cost_model.attention.executed_work import (
    check_backend,
    count_mean_products,
    count_saved_by_limit,
    find_executed_pairs,
)
from regard.cost_model.attention.linear_attention import count_linear_attention, count_saved_by_mean
from regard.cost_model.attention.pairs import AllowedPairs, count_allowed_pairs, find_longest_row
from regard.cost_model.attention.positional import count_positional, count_saved_by_positional
from regard.cost_model.attention.shape import Shape
from regard.cost_model.cost_part import ZERO, CostPart, PassCost
from regard.cost_model.run_mode import RunMode
from regard.cost_model.sizes import Breakdown, Sizes
from regard.cost_model.symbols import size_symbol
from regard.errors import CostError
from regard.features import FeatureMap
from regard.features import feature_map as resolve_features
from regard.patterns import Full, Pattern


def count_description(attention: Attention, sizes: Sizes, mode: RunMode) -> Breakdown:
    """The cost of a description at these sizes."""
    shape = find_shape(attention, sizes, mode)
    return count_attention(attention, shape, mode)


def count_attention(attention: Attention, shape: Shape, mode: RunMode) -> Breakdown:
    """Parts, numbers and remarks of an attention of any sizes: of a description, or of the attention inside a layer."""
    pattern = Full() if attention.pattern is None else attention.pattern
    features = None if attention.feature_map is None else resolve_features(attention.feature_map)
    uniform = attention.scale == 0 and attention.bias is None
    hard = attention.scale is not None and math.isinf(attention.scale)
    check_backend(mode.backend, attention.bias, hard)
    if features is not None and (attention.bias is not None or hard):
        raise CostError(
            "A feature map leaves no scores to work on.",
            asked=_describe(attention),
            because="linear attention multiplies features; it has no exponent to add a bias to or to sharpen",
            instead="either the feature map or " + ("a hard limit" if hard else "a bias"),
        )
    if mode.backend == "positional":
        made = count_positional(attention, pattern, shape, mode)
    elif features is not None and not (uniform and mode.backend in (None, "reference")):
        made = count_linear_attention(features, pattern, shape, mode, uniform)
    elif uniform and mode.backend != "native":
        made = _count_uniform(pattern, shape, mode, features)
    elif hard:
        made = _count_hard(pattern, attention.bias, shape, mode)
    else:
        made = _count_softmax(pattern, attention, shape, mode)
    parts = made.parts
    if mode.step == "decode":  # has no backward pass
        parts = [dataclasses.replace(part, saved=ZERO) for part in parts]
    notes = made.notes
    if mode.backend == "reference" and (features is None or uniform):
        notes = (
            *notes,
            "saved activations: of the backend that `auto` chooses; the reference saves its squares as well",
        )
    return Breakdown(parts, {**shape.values, **made.values}, notes, _describe(attention))


# Sizes


def find_shape(attention: Attention, sizes: Sizes, mode: RunMode) -> Shape:
    """Symbols for what a description leaves open. Sizes that follow from others get no symbol of their own."""
    pattern, bias = attention.pattern, attention.bias
    rows = None if pattern is None else pattern.rows
    if rows is not None and sizes.batch not in (1, rows):
        raise CostError(
            "The pattern was made for another batch.",
            asked=f"batch={sizes.batch}",
            found=f"a pattern for {rows} batch rows",
            because="Padding and Segments describe every batch row",
            instead=f"batch={rows}",
        )
    tokens = sizes.tokens if sizes.tokens is not None else _find_token_count(pattern, sizes, mode)
    own_heads = bias.heads if isinstance(bias, Bias) else 1
    if own_heads == 1 and pattern is not None:
        own_heads = pattern.heads or 1
    numbers = {
        "B": sizes.batch if rows is None else rows,
        "N": tokens,
        "M": sizes.keys,
        "H": sizes.heads or own_heads,
        "G": sizes.kv_heads,
        "d": sizes.dim if sizes.dim is not None else getattr(bias, "dim", None),
        "e": sizes.value_dim,
    }
    values = {size_symbol(name): number for name, number in numbers.items() if number is not None}
    _check_heads(numbers, own_heads)
    queries, keys = size_symbol("N"), size_symbol("N" if sizes.keys is None else "M")
    if mode.step == "decode":
        if sizes.keys is not None:
            raise CostError(
                "A decoding step has no keys of its own.",
                asked=f'step="decode", keys={sizes.keys}',
                because="the new token sees those before it and itself: keys = tokens + 1",
                instead=f'step="decode", tokens={sizes.keys - 1}',
            )
        queries, keys = sympy.Integer(1), size_symbol("N") + 1
    return Shape(
        batch=size_symbol("B"),
        queries=queries,
        keys=keys,
        heads=size_symbol("H"),
        kv_heads=size_symbol("H" if sizes.kv_heads is None else "G"),
        dim=size_symbol("d"),
        value_dim=size_symbol("d" if sizes.value_dim is None else "e"),
        values=values,
    )


def _find_token_count(pattern: Pattern | None, sizes: Sizes, mode: RunMode) -> int | None:
    if sizes.image is not None:
        return sizes.image[0] * sizes.image[1]
    return None if mode.step == "decode" or pattern is None else pattern.fixed_length


def _check_heads(numbers: dict[str, int | None], own_heads: int) -> None:
    heads, kv_heads = numbers["H"] or 1, numbers["G"] or numbers["H"] or 1
    if heads % kv_heads:
        raise CostError(
            "Heads cannot be shared evenly.",
            asked=f"heads={heads}, kv_heads={kv_heads}",
            because="every key head serves equally many query heads",
            instead=f"heads={max(1, heads // kv_heads) * kv_heads}, kv_heads={kv_heads}",
        )
    if own_heads not in (1, heads):
        raise CostError(
            "The bias or the pattern was made for another number of heads.",
            asked=f"heads={heads}",
            found=f"one with {own_heads} heads",
            because="every head needs its own",
            instead=f"heads={own_heads}",
        )


def _describe(attention: Attention) -> str:
    given = []
    for each in dataclasses.fields(attention):
        value = getattr(attention, each.name)
        if value is not None:
            shown = f"<tensor {tuple(value.shape)}>" if isinstance(value, Tensor) else " ".join(repr(value).split())
            given.append(f"{each.name}={shown}")
    return f"Attention({', '.join(given)})"


# Softmax


def _count_softmax(pattern: Pattern, attention: Attention, shape: Shape, mode: RunMode) -> Breakdown:
    """Scores, their softmax, and the weighted sums of values."""
    item, fused = mode.item, mode.backend in ("native", "blocked")
    allowed = count_allowed_pairs(pattern, shape)
    executed = find_executed_pairs(pattern, shape, mode, allowed)
    met, area = shape.heads * allowed.formula, shape.heads * executed.area
    row = find_longest_row(pattern, shape.keys, shape.values)
    wide = mode.wide  # half-precision inputs leave their results in float32
    column = row if shape.queries == shape.keys else sympy.Max(row, shape.queries)
    # Without content (scale = 0 and a bias) a score is no product; backends multiply by zero all the same.
    silent = attention.scale == 0
    forward = ZERO if silent and mode.backend is None else area * shape.dim
    fixed = silent and not fused and not is_learned(attention.bias)  # weights that are not learned have no gradient
    back = 2 * area * shape.dim if not silent or mode.backend == "native" else ZERO
    back += area * shape.dim if fused else ZERO
    square = ZERO if fused else area
    # The kernels read half precision as it is; `blocked`, which runs biases that read content, makes wide copies.
    copies = mode.item < wide and isinstance(attention.bias, Bias) and not attention.bias.relative

    def held(numbers: sympy.Expr) -> sympy.Expr:
        return wide * numbers if copies else item * shape.given(numbers)

    inner = depth.inner(shape.dim, mode.serial)
    scores = CostPart(
        "scores",
        forward=PassCost(macs=forward, bytes=item * (shape.query + shape.key + square), depth=inner),
        backward=PassCost(
            macs=back,
            bytes=item * (2 * shape.query + 2 * shape.key + square),
            depth=depth.inner(column, mode.serial),
        ),
        saved=held(shape.query + shape.key),
        pairs=met,
    )
    softmax = CostPart(
        "softmax",
        forward=PassCost(
            exponentials=area,
            bytes=item * 2 * square if not fused else wide * shape.rows,
            depth=depth.softmax(row, stable=mode.stable, serial=mode.serial),
        ),
        backward=PassCost(
            exponentials=area if fused else ZERO,
            bytes=item * 3 * square if not fused else wide * shape.rows,
            depth=depth.inner(row, mode.serial) + 2,
        ),
        saved=wide * shape.rows,
    )
    values = CostPart(
        "values",
        forward=PassCost(
            macs=area * shape.value_dim,
            bytes=item * (square + shape.value + shape.output),
            depth=depth.inner(row, mode.serial),
        ),
        backward=PassCost(
            macs=(1 if fixed else 2) * area * shape.value_dim,
            bytes=item * (2 * square + 2 * shape.value + (2 if fused else 1) * shape.output),
            depth=depth.inner(shape.value_dim, mode.serial),
        ),
        saved=held(shape.value) + wide * shape.output,
    )
    parts = [scores, *count_bias(attention.bias, shape, mode, met, area), softmax, values]
    if silent and (saved := count_saved_by_positional(attention, pattern, shape, mode)) is not None:
        parts = [dataclasses.replace(part, saved=saved if part is values else ZERO) for part in parts]
    return Breakdown(parts, {**allowed.values, **executed.values}, (*allowed.notes, *executed.notes))


# Limits of temperature


def _count_uniform(pattern: Pattern, shape: Shape, mode: RunMode, features: FeatureMap | None) -> Breakdown:
    """scale = 0: the mean of what is visible. There are no scores, no exponentials, and no gradient but that of values.

    The mathematics needs sums. Where queries share them, each value is added once (an addition counts as the
    multiply-add of a product with a matrix of ones): M e for each key head, and 2 N e more for a window, whose running
    sums are taken apart again. Any other pattern adds up its pairs, P e, as do these where pairs are fewer. The
    reference multiplies the whole square of weights; `blocked` multiplies with sums over 1, 2, 4, ... neighbours.
    With a feature map another backend runs and saves other tensors.
    """
    item = mode.item
    allowed = count_allowed_pairs(pattern, shape)
    row = find_longest_row(pattern, shape.keys, shape.values)
    steps = depth.total(row, mode.serial) + 1
    notes = allowed.notes
    if mode.backend == "reference":
        products = shape.batch * shape.heads * shape.queries * shape.keys * shape.value_dim
    elif mode.backend == "blocked":
        products, remarks = count_mean_products(pattern, shape)
        notes = (*notes, *remarks)
    else:
        products = shape.kv_heads * _count_additions(pattern, shape, mode, allowed) * shape.value_dim
    saved_bytes, remarks = count_saved_by_limit("uniform", pattern, shape, mode)
    if features is not None:
        saved_bytes, remarks = count_saved_by_mean(pattern, shape, mode), ()
    part = CostPart(
        "values",
        forward=PassCost(macs=products, bytes=item * (shape.value + shape.output), depth=steps),
        backward=PassCost(macs=products, bytes=item * (shape.value + shape.output), depth=steps),
        saved=saved_bytes,
        pairs=shape.heads * allowed.formula,
    )
    return Breakdown([part], allowed.values, (*notes, *remarks))


def _count_additions(pattern: Pattern, shape: Shape, mode: RunMode, allowed: AllowedPairs) -> sympy.Expr:
    """Additions of one channel: running ones, where there are any and they are fewer, or one for each pair."""
    reads = pattern._running_sum_reads
    if reads is None or (reads and mode.step == "decode"):
        return allowed.formula
    running = shape.batch * (sympy.Integer(1) if mode.step == "decode" else shape.keys + reads * shape.queries)
    known = dataclasses.replace(shape, values={**shape.values, **allowed.values}).number(allowed.formula)
    least = shape.number(running)
    return allowed.formula if known is not None and least is not None and known < least else running


def _count_hard(pattern: Pattern, bias: Any, shape: Shape, mode: RunMode) -> Breakdown:
    """scale = inf: the output is the best key's value. The scores are a search, which has no gradient.

    Ties, which share their values, are not counted. The reference multiplies weights of zero and one.
    """
    item, square = mode.item, mode.backend == "reference"
    allowed = count_allowed_pairs(pattern, shape)
    executed = find_executed_pairs(pattern, shape, mode, allowed)
    met, area = shape.heads * allowed.formula, shape.heads * executed.area
    row = find_longest_row(pattern, shape.keys, shape.values)
    saved_bytes, remarks = count_saved_by_limit("hard", pattern, shape, mode)
    scores = CostPart(
        "scores",
        forward=PassCost(
            macs=area * shape.dim,
            bytes=item * (shape.query + shape.key + (area if square else ZERO)),
            depth=depth.inner(shape.dim, mode.serial),
        ),
        pairs=met,
    )
    choice = CostPart(
        "softmax",
        forward=PassCost(exponentials=area if square else ZERO, depth=depth.total(row, mode.serial)),
    )
    products = area * shape.value_dim if square else ZERO
    values = CostPart(
        "values",
        forward=PassCost(macs=products, bytes=item * 2 * shape.output, depth=sympy.Integer(1)),
        backward=PassCost(
            macs=products * (2 if is_learned(bias) else 1),
            bytes=item * (shape.output + shape.value),
            depth=sympy.Integer(1),
        ),
        saved=saved_bytes,
    )
    parts = [scores, *count_bias(bias, shape, mode, met, area), choice, values]
    notes = (*allowed.notes, *executed.notes, *remarks, "hard attention: counted without ties")
    return Breakdown(parts, {**allowed.values, **executed.values}, notes)


__all__ = ["Shape", "count_attention", "count_description", "find_shape"]
