"""What linear attention costs: features instead of exponentials, and sums that all queries share.

    output_n = phi(q_n)^T [sum_m phi(k_m) v_m^T] / phi(q_n)^T [sum_m phi(k_m)]

Each key adds `phi(k) v^T` and `phi(k)` to the sums, r (e + 1) multiply-adds for each of G key heads; each query reads
them, r (e + 1) for each of H heads. With one size for all that is 2 N d^2 + 2 N d, so that it beats softmax attention,
2 N^2 d, from N = d + 1 on (Prince, problem 12.10). A causal pattern costs the same: the sums grow token by token, and a
decoding step is one of these. No pair of tokens is computed.

The C++ kernel counts as what it computes; plain torch (`backend="blocked"`) works in chunks of 64 tokens, whose own
squares come on top. A pattern that gives every query keys of its own leaves no sums to share: its pairs are computed,
and the reference, which runs them, saves its squares.
"""

from __future__ import annotations

import dataclasses

import sympy

from regard.cost_model import depth
from regard.cost_model.attention.pairs import count_allowed_pairs, find_longest_row
from regard.cost_model.attention.shape import Shape
from regard.cost_model.cost_part import ZERO, CostPart, PassCost
from regard.cost_model.run_mode import RunMode
from regard.cost_model.sizes import Breakdown
from regard.cost_model.symbols import size_symbol
from regard.features import Elu1, FavorPlus, FeatureMap, Relu, Taylor2
from regard.kernels.linear_attention import CHUNK
from regard.patterns import Pattern


def count_linear_attention(
    features: FeatureMap, pattern: Pattern, shape: Shape, mode: RunMode, uniform: bool = False
) -> Breakdown:
    """The parts of a linear attention; a mean (`uniform`) has one feature, which is one."""
    width, values, notes = _find_feature_dim(features, shape)
    if uniform:
        width, values, notes = sympy.Integer(1), {}, ()
    pairwise = mode.backend == "reference" or not shares_sums(pattern)
    made = _count_features(features, width, shape, mode, pairwise) if not uniform else []
    if pairwise:
        more = _count_pairwise(pattern, width, shape, mode)
    else:
        causal, padded = is_causal(pattern), hides_keys(pattern)
        fused = causal and isinstance(features, Elu1) and not uniform and not padded
        more = _count_state(width, pattern, shape, mode, new_features=not fused)
        if uniform and not causal:  # ones have no gradient
            more = more._replace(parts=[_halve_backward(part) for part in more.parts])
        if fused:  # the kernel makes these features as it reads
            made = [dataclasses.replace(part, saved=ZERO) for part in made]
        if padded:
            hidden = shape.batch * shape.keys  # which keys are real
            if isinstance(features, Relu):  # its results are saved for its derivative, and once more without the hidden
                hidden += mode.wide * shape.batch * shape.kv_heads * shape.keys * width
            made = [dataclasses.replace(part, saved=part.saved + hidden) for part in made]
    if uniform:
        saved_bytes = [*[ZERO] * (len(more.parts) - 1), count_saved_by_mean(pattern, shape, mode)]
        more = more._replace(
            parts=[dataclasses.replace(part, saved=each) for part, each in zip(more.parts, saved_bytes, strict=True)]
        )
    return Breakdown([*made, *more.parts], {**values, **more.values}, (*notes, *more.notes))


def shares_sums(pattern: Pattern | None) -> bool:
    """Whether queries can share their sums over keys."""
    return pattern is None or all(each.is_causal or each.is_key_padding for each in pattern._split_intersection())


def is_causal(pattern: Pattern | None) -> bool:
    """Whether a pattern is causal, or joins a causal one with others."""
    return pattern is not None and any(each.is_causal for each in pattern._split_intersection())


def hides_keys(pattern: Pattern | None) -> bool:
    """Whether a pattern hides the same keys from all queries, as padding does, or joins one that does with others."""
    return pattern is not None and any(
        each.is_key_padding and not each.is_full for each in pattern._split_intersection()
    )


def _find_feature_dim(features: FeatureMap, shape: Shape) -> tuple[sympy.Expr, dict, tuple[str, ...]]:
    """How many features a vector has: d itself, a formula of d, or a number with a symbol."""
    if isinstance(features, Elu1 | Relu):
        return shape.dim, {}, ()
    if isinstance(features, Taylor2):
        return 1 + shape.dim + shape.dim * (shape.dim + 1) / 2, {}, ()
    symbol = size_symbol("r")
    if isinstance(features, FavorPlus):
        return symbol, {symbol: features.features}, ()
    notes = ("features: products inside a function of your own are not counted",)
    dim = shape.number(shape.dim)
    return symbol, {} if dim is None else {symbol: features.width(dim)}, notes


def _count_features(
    features: FeatureMap, width: sympy.Expr, shape: Shape, mode: RunMode, pairwise: bool
) -> list[CostPart]:
    """The maps of queries and keys. Only random features are a product: with directions that are not learned.

    What is saved beside the features is what each map's derivative needs.
    """
    vectors = shape.batch * (shape.heads * shape.queries + shape.kv_heads * shape.keys)
    # The reference repeats the keys of grouped heads first, and it is what runs pairs.
    mapped = shape.batch * shape.heads * (shape.queries + shape.keys) if pairwise else vectors
    if mode.step == "decode":
        vectors = shape.batch * (shape.heads + shape.kv_heads)
    elif mode.backend is not None:
        vectors = mapped
    numbers, item = vectors * shape.dim, mode.item
    random = isinstance(features, FavorPlus)
    products = numbers * width if random else ZERO
    saved_bytes, wide, read = ZERO, mode.wide, mapped * shape.dim
    if isinstance(features, Elu1):
        saved_bytes = (2 * wide + 1) * read  # the scaled numbers, their exponentials, and which were positive
    elif isinstance(features, Taylor2):
        couples = shape.dim * (shape.dim - 1) / 2
        saved_bytes = wide * (read + 2 * mapped * couples) + 2 * 16 * couples  # and the places of both, 16 bytes each
    elif random:
        saved_bytes = wide * (read + mapped * width)
    steps = depth.inner(shape.dim, mode.serial) + 2 if random else sympy.Integer(1)
    moved = item * (numbers + vectors * width)
    return [
        CostPart(
            "features",
            forward=PassCost(macs=products, bytes=moved, depth=steps),
            backward=PassCost(macs=products, bytes=2 * moved, depth=steps),
            saved=sympy.expand(saved_bytes),
        )
    ]


def _halve_backward(part: CostPart) -> CostPart:
    half = sympy.Rational(1, 2)
    return dataclasses.replace(part, backward=dataclasses.replace(part.backward, macs=part.backward.macs * half))


def _count_state(width: sympy.Expr, pattern: Pattern, shape: Shape, mode: RunMode, new_features: bool) -> Breakdown:
    """The state, and how queries read it."""
    item, columns, causal = mode.item, shape.value_dim + 1, is_causal(pattern)
    decode = mode.step == "decode"
    new = sympy.Integer(1) if decode else shape.keys
    met, queried = shape.batch * shape.kv_heads * new, _count_seeing_rows(shape) if causal else shape.rows
    held = shape.batch * shape.kv_heads * width * columns
    grow, read, own = met * width * columns, queried * width * columns, ZERO
    notes: tuple[str, ...] = ()
    back = 3 if causal and mode.backend == "native" else 2
    if causal and mode.backend == "blocked" and not decode:
        grow, read, own, notes = _count_chunks(width, columns, shape)
    add = sympy.Integer(2) if decode else depth.inner(shape.keys, mode.serial)
    state_saved, readout_saved = _count_saved(width, shape, mode, causal, new_features)
    state = CostPart(
        "state",
        forward=PassCost(macs=grow, bytes=item * (met * (width + shape.value_dim) + held), depth=add),
        backward=PassCost(macs=back * grow, bytes=item * (2 * met * (width + shape.value_dim) + held), depth=add),
        saved=state_saved,
    )
    readout = CostPart(
        "readout",
        forward=PassCost(
            macs=read + own,
            bytes=item * (queried * width + held + queried * shape.value_dim),
            depth=depth.inner(width, mode.serial) + 1,
        ),
        backward=PassCost(
            macs=back * (read + own),
            bytes=item * (2 * queried * width + 2 * held + queried * shape.value_dim),
            depth=depth.inner(columns, mode.serial) + 2,
        ),
        saved=readout_saved + _count_flags(pattern, shape),
    )
    return Breakdown([state, readout], {}, notes)


def _count_saved(
    width: sympy.Expr, shape: Shape, mode: RunMode, causal: bool, new: bool
) -> tuple[sympy.Expr, sympy.Expr]:
    """Bytes of the two parts. The causal kernel saves its inputs, its output and its normalisers; over all keys at
    once torch saves features, values with their column of ones, the state, and what was divided."""
    wide, columns = mode.wide, shape.value_dim + 1
    keys = shape.batch * shape.kv_heads * shape.keys
    if causal:
        # elu1 is made inside the kernel, which saves queries and keys themselves; other features are new tensors.
        key, query = (keys * width, shape.rows * width) if new else (shape.key, shape.query)
        key, query = (key, query) if new else (_count_input(key, shape, mode), _count_input(query, shape, mode))
        state = wide * (key + _count_input(shape.value, shape, mode)) + _count_first_state(width, shape, mode, new)
        return state, wide * (query + _count_seeing_rows(shape) * columns)
    held = shape.batch * shape.kv_heads * width * columns
    state = wide * (keys * width + keys * columns + held)
    return state, wide * (shape.rows * width + shape.rows * columns + shape.rows) + shape.rows


def _count_input(numbers: sympy.Expr, shape: Shape, mode: RunMode) -> sympy.Expr:
    """Numbers of query, key or value that the kernel saves: as they came, or a copy if they had to be widened."""
    return shape.given(numbers) if mode.item == mode.wide else numbers


def count_saved_by_mean(pattern: Pattern, shape: Shape, mode: RunMode) -> sympy.Expr:
    """Bytes that a mean given as a feature map saves: its only feature is one, and has no gradient."""
    wide, columns = mode.wide, shape.value_dim + 1
    if not shares_sums(pattern):  # the reference: weights, and which values and outputs are finite
        return shape.heads * shape.batch * shape.keys * (shape.value_dim + wide * shape.queries) + shape.output
    ones, marks = wide * (shape.batch * shape.kv_heads * shape.keys + shape.rows), _count_flags(pattern, shape)
    if is_causal(pattern):
        first = ZERO if _find_lead(shape) == 0 else shape.batch * shape.kv_heads * columns
        return (
            ones + wide * (_count_input(shape.value, shape, mode) + first + _count_seeing_rows(shape) * columns) + marks
        )
    return ones + wide * (shape.rows * columns + shape.rows) + shape.rows + marks


def _count_flags(pattern: Pattern, shape: Shape) -> sympy.Expr:
    """Bytes that say which queries see anything: one for all, or for each row; behind causal padding, each query."""
    if hides_keys(pattern):
        return shape.batch * (shape.queries if is_causal(pattern) else 1)
    return ZERO if is_causal(pattern) else sympy.Integer(1)


def _find_lead(shape: Shape) -> sympy.Expr:
    """Keys before the first query of a causal pattern, whose last query sits on the last key."""
    if shape.keys == shape.queries:
        return ZERO
    known = shape.number(shape.keys - shape.queries)
    if known is None:
        return sympy.Max(0, shape.keys - shape.queries)
    return shape.keys - shape.queries if known > 0 else ZERO


def _count_seeing_queries(shape: Shape) -> sympy.Expr:
    """Queries of a causal pattern that see a key: the last ones, if there are more of them than of keys."""
    if shape.keys == shape.queries:
        return shape.queries
    known = shape.number(shape.keys - shape.queries)
    if known is None:
        return sympy.Min(shape.queries, shape.keys)
    return shape.keys if known < 0 else shape.queries


def _count_seeing_rows(shape: Shape) -> sympy.Expr:
    """The same over all heads and rows of the batch."""
    return shape.batch * shape.heads * _count_seeing_queries(shape)


def _count_first_state(width: sympy.Expr, shape: Shape, mode: RunMode, new: bool) -> sympy.Expr:
    """Keys before the first query make a first state, in torch: their columns, that state, and elu1's own tensors."""
    lead = _find_lead(shape)
    if lead == 0:
        return ZERO
    early = shape.batch * shape.kv_heads * lead
    columns = shape.value_dim + 1
    saved_bytes = mode.wide * (early * columns + shape.batch * shape.kv_heads * width * columns)
    return saved_bytes if new else saved_bytes + (3 * mode.wide + 1) * early * width


def _count_chunks(width: sympy.Expr, columns: sympy.Expr, shape: Shape) -> tuple:
    """Growing, reading, and the squares inside chunks, of texts filled up to whole chunks."""
    heads, kv_heads = shape.batch * shape.heads, shape.batch * shape.kv_heads
    lengths = shape.lengths
    short = lengths is not None and min(lengths) < CHUNK
    queries = _count_seeing_queries(shape)
    size = queries if short else sympy.Integer(CHUNK)
    filled = queries if short else CHUNK * sympy.ceiling(queries / CHUNK)
    grow = kv_heads * (filled + _find_lead(shape)) * width * columns
    own = heads * filled * size * (width + columns)
    notes = () if lengths is not None else (f"blocked: chunks of {CHUNK} tokens, for N >= {CHUNK}",)
    return grow, heads * filled * width * columns, own, notes


def _count_pairwise(pattern: Pattern, width: sympy.Expr, shape: Shape, mode: RunMode) -> Breakdown:
    """Products of features for each pair: of the pattern for the mathematics, of the whole square in the reference,
    which is also what runs where no sums can be shared.

    It saves features, kernels and weights; and marks of one byte: which pairs are allowed, which rows are empty,
    and which queries, keys, values and outputs are finite. Keys and values are repeated for the heads that share them.
    """
    item, wide = mode.item, mode.wide
    keys = shape.batch * shape.heads * shape.keys
    square = keys * shape.queries
    allowed = count_allowed_pairs(pattern, shape)
    area = allowed.formula if mode.backend is None else shape.batch * shape.queries * shape.keys
    row, area = find_longest_row(pattern, shape.keys, shape.values), shape.heads * area
    queried, met = shape.rows * width, shape.batch * shape.kv_heads * shape.keys * width
    scores = CostPart(
        "scores",
        forward=PassCost(macs=area * width, bytes=item * (queried + met + area), depth=depth.inner(width, mode.serial)),
        backward=PassCost(
            macs=2 * area * width, bytes=item * (2 * queried + 2 * met + area), depth=depth.inner(row, mode.serial)
        ),
        saved=wide * (queried + keys * width) + (shape.rows + keys) * shape.dim + square,
        pairs=shape.heads * allowed.formula,
    )
    steps = depth.total(row, mode.serial) + 1
    norm = CostPart(
        "softmax",
        forward=PassCost(bytes=2 * item * area, depth=steps),
        backward=PassCost(bytes=3 * item * area, depth=steps),
        saved=wide * (square + shape.rows) + shape.rows,
    )
    sums = CostPart(
        "values",
        forward=PassCost(
            macs=area * shape.value_dim,
            bytes=item * (area + shape.value + shape.output),
            depth=depth.inner(row, mode.serial),
        ),
        backward=PassCost(
            macs=2 * area * shape.value_dim,
            bytes=item * (2 * area + 2 * shape.value + shape.output),
            depth=depth.inner(shape.value_dim, mode.serial),
        ),
        saved=(wide + 1) * keys * shape.value_dim + wide * square + shape.output,
    )
    return Breakdown([scores, norm, sums], allowed.values, allowed.notes)


__all__ = ["count_linear_attention", "count_saved_by_mean", "hides_keys", "is_causal", "shares_sums"]
