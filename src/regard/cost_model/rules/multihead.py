"""What multi-head attention costs: the projections, the attention itself, and the matrix that joins the heads."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from regard.attention import Attention
from regard.cost_model.asked import Asked, Counted
from regard.cost_model.letters import Values, letter
from regard.cost_model.part import ZERO, Part, Work
from regard.cost_model.rules import pieces
from regard.cost_model.rules.attention import counted
from regard.cost_model.rules.linear_attention import hides_keys, is_causal, shares
from regard.cost_model.rules.pieces import Found
from regard.cost_model.rules.reading import Numbers, Reading
from regard.cost_model.rules.shape import Shape
from regard.cost_model.setting import Setting
from regard.errors import CacheError
from regard.features import Elu1, Relu
from regard.features import feature_map as resolve_features
from regard.layers.multihead import MultiHeadAttention
from regard.layers.projections import AttentionSizes, Projections
from regard.layers.rotary import Rotary


@dataclass(frozen=True)
class Names:
    """The sizes of a multi-head attention as letters; one that follows from others, as in most layers, has none."""

    input: Any
    heads: Any
    kv_heads: Any
    key: Any
    value: Any
    context: Any
    values: Any
    output: Any
    numbers: Numbers

    @staticmethod
    def of(sizes: AttentionSizes, width: sympy.Symbol) -> Names:
        found: Numbers = {width: sizes.input}

        def named(name: str, number: int, same: bool, otherwise: Any) -> Any:
            if same:
                return otherwise
            found[letter(name)] = number
            return letter(name)

        heads = named("H", sizes.heads, False, None)
        key = named("d", sizes.key, sizes.key * sizes.heads == sizes.input, width / heads)
        context = named("X", sizes.context, sizes.context == sizes.input, width)
        return Names(
            width,
            heads,
            named("G", sizes.kv_heads, sizes.kv_heads == sizes.heads, heads),
            key,
            named("e", sizes.value, sizes.value == sizes.key, key),
            context,
            named("Y", sizes.values, sizes.values == sizes.context, context),
            named("O", sizes.output, sizes.output == sizes.input, width),
            found,
        )


@dataclass(frozen=True)
class Looking:
    """What an attention looks at.

    Attributes:
        keys: how many tokens each row looks at, in letters.
        values: the numbers of these letters.
        other: whether they belong to another text than the one that asks.
        cached: whether keys and values of that other text are there already.
    """

    keys: Any
    values: Values
    other: bool = False
    cached: bool = False


def projections_rule(layer: Projections, asked: Asked, setting: Setting) -> Counted:
    reading, names = Reading.of(asked, setting), Names.of(layer.sizes, letter("D"))
    looking = _another(asked, reading) if _is_other(layer.sizes, asked) else Looking(reading.tokens, {})
    part = projections_part(layer, setting, reading, looking, names, keeps=False)
    return reading.counted("Projections", Found([part], {**names.numbers, **looking.values}))


def multi_head_rule(layer: MultiHeadAttention, asked: Asked, setting: Setting) -> Counted:
    reading = Reading.of(asked, setting)
    looking = _another(asked, reading) if _is_other(layer.sizes, asked) else looking_at(layer, reading)
    found = multi_head_parts(layer, setting, reading, looking, letter("D"), keeps=False)
    return reading.counted("MultiHeadAttention", found)


def _is_other(sizes: AttentionSizes, asked: Asked) -> bool:
    """Another text is looked at where its length is given, or where its tokens have other channels."""
    return asked.keys is not None or sizes.context != sizes.input


def _another(asked: Asked, reading: Reading) -> Looking:
    keys = letter("M")
    return Looking(keys, {} if asked.keys is None else {keys: asked.keys}, other=True, cached=reading.past is not None)


def looking_at(layer: MultiHeadAttention, reading: Reading) -> Looking:
    """All tokens of the text itself; in a decoding step those that the layer's cache returns, the newest included."""
    if reading.past is None:
        return Looking(reading.tokens, reading.values)
    window = _window(layer)
    held = reading.past if window is None else sympy.Min(reading.past, window)
    return Looking(held + 1, reading.values)


def _window(layer: MultiHeadAttention) -> int | None:
    """How many tokens the layer's own cache remembers, if not all."""
    try:
        return getattr(layer.new_cache(), "window", None)
    except CacheError:  # it has none: the new token looks at all others
        return None


def multi_head_parts(
    layer: MultiHeadAttention,
    setting: Setting,
    reading: Reading,
    looking: Looking,
    width: sympy.Symbol,
    *,
    keeps: bool = True,
    makes_rotation: bool = True,
) -> Found:
    """Projections, the attention itself, and the matrix that joins the heads.

    keeps: whether the tokens that ask are kept by this layer. Those of another text are not: they are one tensor for
    all layers.
    makes_rotation: False where a model makes it once for all its layers.
    """
    names = Names.of(layer.sizes, width)
    shape = Shape(
        batch=reading.batch,
        queries=reading.tokens,
        keys=looking.keys,
        heads=names.heads,
        kv_heads=names.kv_heads,
        dim=names.key,
        value_dim=names.value,
        values={**reading.values, **looking.values, **names.numbers},
        keeps=False,
    )
    parts = []
    if layer.rotary is not None and makes_rotation:
        parts.append(rotation_part(layer.rotary, setting, reading.tokens, layer.rotary.dim))
    made = projections_part(layer.projections, setting, reading, looking, names, keeps=keeps)
    held = _held(layer, looking, shape) + _spread(layer, shape)
    parts.append(dataclasses.replace(made, kept=made.kept + setting.item * held))
    if layer.rotary is not None:
        parts.append(pieces.elementwise("rotary", setting, shape.query + shape.key, steps=2))
    attended = counted(layer.attention, shape, setting)
    parts += attended.parts
    # Heads come out one below the other and are copied side by side, unless there is only one, or one token, or one
    # channel in each: then the matrix reads, and keeps, the tensor that the attention has kept.
    sizes = layer.sizes
    copied = sizes.heads > 1 and reading.count != 1 and (sizes.value > 1 or shape.number(reading.batch) != 1)
    joined = names.heads * names.value
    if copied:
        parts.append(pieces.copying("join", setting, shape.output))
    bias = "o" in layer.letters
    keeps = copied or not _keeps_output(layer.attention, shape)
    parts.append(pieces.linear("output", setting, reading.rows, joined, names.output, bias=bias, keeps=keeps))
    return Found(parts, {**names.numbers, **looking.values, **attended.values}, attended.notes)


def _asks(attention: Attention) -> bool:
    """Whether queries and keys are learned from: a plain mean reads neither, and a choice has no gradient."""
    return attention.scale is None or not (
        math.isinf(attention.scale) or (attention.scale == 0 and attention.bias is None)
    )


def _held(layer: MultiHeadAttention, looking: Looking, shape: Shape) -> Any:
    """Numbers of the queries, keys and values that stay in memory.

    Those that were made by one product are views of one tensor, and who keeps one of them keeps all. Rotary positions
    make new queries and keys, by products with constants that keep none of the old; yet the values hold these, too.
    """
    kept, joint = _kept_inputs(layer), layer.projections.joint
    alone = {"q": shape.query, "k": shape.key, "v": shape.value}
    if not kept:
        return ZERO
    if looking.other:
        biases = layer.projections.biases()
        together = joint and (biases[1] is None) == (biases[2] is None)
        groups = ["q", "kv"] if together else ["q", "k", "v"]
        return sum(alone[name] for group in groups if set(group) & set(kept) for name in group)
    if layer.rotary is None:
        return sum(alone.values()) if joint else sum(alone[name] for name in kept)
    turned = sum((alone[name] for name in kept if name != "v"), ZERO)
    return turned + ((sum(alone.values()) if joint else shape.value) if "v" in kept else ZERO)


def _kept_inputs(layer: MultiHeadAttention) -> str:
    """Which of query, key and value an attention keeps as they came.

    A feature map keeps what it made of queries and keys; the kernel for causal sums makes elu1's itself. A mean keeps
    none of its values, a choice keeps them unless it had to repeat them for heads that share them.
    """
    attention = layer.attention
    if attention.feature_map is not None:
        if not is_causal(attention.pattern):
            return ""
        fused = type(resolve_features(attention.feature_map)) is Elu1 and not hides_keys(attention.pattern)
        return "qkv" if fused and _asks(attention) else "v"
    if attention.scale == 0 and attention.bias is None:
        return ""
    hard = attention.scale is not None and math.isinf(attention.scale)
    return "qkv" if not hard else "v" if layer.sizes.group == 1 else ""


def _keeps_output(attention: Attention, shape: Shape) -> bool:
    """Whether what the attention keeps of its output is the tensor that leaves it: the kernels do so."""
    if attention.feature_map is not None:
        plain = is_causal(attention.pattern) and not hides_keys(attention.pattern)
        return (
            plain and shape.queries == shape.keys and _asks(attention)
        )  # a mean is joined to the graph of its queries
    if attention.scale == 0 and attention.bias is None:
        return False
    return attention.scale is None or not math.isinf(attention.scale)


def _spread(layer: MultiHeadAttention, shape: Shape) -> Any:
    """Numbers of relu's features that are kept twice over all keys: as relu made them, heads side by side in each
    token, and as the product with the sums wants them, one head below the other. Padding counts keys twice already."""
    attention, sizes = layer.attention, layer.sizes
    turned = layer.rotary is not None and sizes.key > 2  # copied already; two channels turn where they are
    if attention.feature_map is None or turned or is_causal(attention.pattern):
        return ZERO
    if type(resolve_features(attention.feature_map)) is not Relu or not _asks(attention):
        return ZERO
    several = shape.number(shape.batch) != 1
    queries = shape.number(shape.queries) != 1 and (sizes.group > 1 or (several and sizes.heads > 1))
    keys = shape.number(shape.keys) != 1 and several and sizes.kv_heads > 1
    # Pairs have their keys repeated for the heads that share them, which is a copy for everybody.
    keys = keys and not hides_keys(attention.pattern) and (sizes.group == 1 or shares(attention.pattern))
    return (shape.query if queries else ZERO) + (shape.key if keys else ZERO)


def projections_part(
    layer: Projections, setting: Setting, reading: Reading, looking: Looking, names: Names, *, keeps: bool
) -> Part:
    """Queries, keys and values: three products that run at once, or one where they read the same tokens."""
    widths = (names.heads * names.key, names.kv_heads * names.key, names.kv_heads * names.value)
    biased = [width if name in layer.letters else 0 for name, width in zip("qkv", widths, strict=True)]
    if not looking.other and layer.joint:
        return pieces.linear(
            "projections", setting, reading.rows, names.input, sum(widths), bias=sum(biased), keeps=keeps
        )
    others = reading.rows if not looking.other else reading.batch * looking.keys
    made = [
        pieces.linear("q", setting, reading.rows, names.input, widths[0], bias=biased[0], keeps=keeps),
        pieces.linear("k", setting, others, names.context, widths[1], bias=biased[1], keeps=False),
        pieces.linear("v", setting, others, names.values, widths[2], bias=biased[2], keeps=False),
    ]
    if looking.cached:
        made[1:] = [pieces.resting(part) for part in made[1:]]
    return pieces.beside("projections", *made)


def rotation_part(rotary: Rotary, setting: Setting, tokens: Any, dim: Any) -> Part:
    """Cosines and sines of all positions, at least in float32: made once in a run, and kept by every turn.

    They are ready long before the first layer has made what they turn, so they are not on the longest path.
    """
    table = max(setting.item, torch.float32.itemsize) * tokens * dim
    return Part("rotation", forward=Work(bytes=table), kept=table)


RULES = {MultiHeadAttention: multi_head_rule, Projections: projections_rule}
