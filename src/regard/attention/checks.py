"""From what a user wrote to a request a backend can trust: every check of the operator, in four parts each."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from regard.attention.description import Attention
from regard.attention.folded_heads import fold_heads
from regard.attention.masks import (
    add_mask,
    broadcasts_to,
    is_mask,
    refuse_mask_as_bias,
    refuse_mask_as_pattern,
    warn_of_mask,
)
from regard.autocast import is_autocast_enabled
from regard.backends.base import Request
from regard.biases.base import Bias
from regard.dropout import Dropout, draw_seed
from regard.errors import BackendError, BiasError, InputError, PatternError, ShapeError
from regard.features import FeatureMap
from regard.features import feature_map as resolve_features
from regard.patterns import Full, Lengths, Pattern
from regard.patterns.submatrix import SequencePart

Layout = Literal["rows", "columns"]


def to_rows(layout: Layout, *tensors: Tensor) -> tuple[Tensor, ...]:
    if layout not in ("rows", "columns"):
        raise ShapeError(
            "There are two layouts.",
            asked=f"layout={layout!r}",
            because="tokens are either rows (*batch, head, token, dim) or columns (*batch, head, dim, token)",
            instead='layout="rows" or layout="columns"',
        )
    return tuple(tensor.transpose(-1, -2) if layout == "columns" and tensor.ndim > 1 else tensor for tensor in tensors)


def make_request(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention: Attention | None,
    mask: Tensor | None,
    fields: dict,
    dropout: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    part: SequencePart | None = None,
) -> tuple[Request, tuple[int, ...]]:
    """Everything checked and brought into one shape, and the shape the output has to leave in.

    part: which tokens of the sequence that the description speaks of the tensors hold, where they do not hold all.
    """
    if attention is not None and not isinstance(attention, Attention):
        raise ShapeError(
            "The fourth argument is the whole description.",
            asked=f"attend(query, key, value, {type(attention).__name__}(...))",
            because="only an Attention describes everything at once",
            instead="pattern=..., bias=... by name, or Attention(pattern=...)",
        )
    given = {name: field for name, field in fields.items() if field is not None}
    described = dataclasses.replace(attention or Attention(), **given)
    _check_tensors(query, key, value)
    batch = _common_batch(query, key, value)
    heads = query.shape[-3]
    lengths = Lengths(query.shape[-2], key.shape[-2]) if part is None else part.whole
    square = (*batch, heads, query.shape[-2], lengths.keys)
    if mask is not None:
        described = add_mask(described, mask, square, query.dtype)
    pattern = Full() if described.pattern is None else described.pattern
    _check_description(described, pattern, batch, heads)
    pattern.lengths(*lengths)
    if part is not None and pattern.heads is not None and getattr(described.bias, "needs_content", False):
        raise BackendError(
            "A bias that reads keys is not cut over processes together with a pattern that differs between heads.",
            asked=f"{pattern!r} with {described.bias!r}",
            because="heads with masks of their own take a bias as scores, and other processes have the keys",
            instead="a bias of positions alone, or the same pattern for all heads",
        )
    features = None if described.feature_map is None else resolve_features(described.feature_map)
    _check_features(features, described)
    flat = [_one_batch_axis(x, batch) for x in (query, key, value)]
    request = Request(
        *flat,
        pattern=pattern,
        scale=_choose_scale(described.scale, query.shape[-1], features),
        bias=_check_bias(described.bias, square),
        feature_map=features,
        dropout=_make_dropout(dropout, dropout_seed, features),
    )
    return fold_heads(request, part), (*square[:-1], value.shape[-1])


def _one_batch_axis(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    if len(batch) == 1 and x.ndim == 4 and x.shape[0] == batch[0]:
        return x  # as most tensors come, and a view would cost as much as a small attention
    return x.expand(*batch, *x.shape[-3:]).reshape(math.prod(batch), *x.shape[-3:])


def _choose_scale(scale: float | None, dim: int, features: FeatureMap | None) -> float:
    if scale is not None:
        return float(scale)
    if features is not None and not features.approximates_exp:
        return 1.0
    # The size of a head is a constant, also for what traces with sizes that vary.
    return 1 / math.sqrt(operator.index(dim)) if dim else 1.0


def _shapes(*tensors: Tensor) -> str:
    names = ("query", "key", "value")
    return "  ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in zip(names, tensors, strict=True))


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    def refuse(because: str, instead: str) -> None:
        raise ShapeError(
            "These tensors do not make an attention.",
            asked=_shapes(query, key, value) + "      # (*batch, head, token, dim)",
            because=because,
            instead=instead,
        )

    if not all(isinstance(tensor, Tensor) for tensor in (query, key, value)):
        kinds = ", ".join(type(tensor).__name__ for tensor in (query, key, value))
        raise ShapeError(
            "Attention is between tensors.",
            asked=f"query, key and value of types {kinds}",
            because="only torch tensors can be multiplied here",
            instead="torch.as_tensor(x) for what you have",
        )
    if min(query.ndim, key.ndim, value.ndim) < 3:
        refuse("a tensor without a head axis", "x[None] for one head: (1, token, dim)")
    if query.shape[-1] != key.shape[-1]:
        refuse(
            f"the dot product needs equal head dims, and query and key have {query.shape[-1]} and {key.shape[-1]}",
            "projections of the same size for query and key",
        )
    if key.shape[-2] != value.shape[-2] or key.shape[-3] != value.shape[-3]:
        refuse(
            "every key needs its value: their heads and tokens must be the same",
            "key and value from the same tokens and heads",
        )
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        refuse(
            f"{heads} query heads cannot share {kv_heads} key heads evenly",
            "a number of query heads that is a multiple of the number of key heads",
        )
    dtypes = {tensor.dtype for tensor in (query, key, value)}
    if len(dtypes) > 1 and not is_autocast_enabled(query.device):
        refuse(f"their dtypes differ: {', '.join(sorted(map(str, dtypes)))}", "one dtype for all three, by x.to(dtype)")
    if not all(dtype.is_floating_point for dtype in dtypes):
        refuse(f"attention needs floating-point numbers, not {query.dtype}", "x.float()")
    if len({tensor.device for tensor in (query, key, value)}) > 1:
        refuse("they live on different devices", "one device for all three, by x.to(device)")


def _common_batch(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    if query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        return tuple(query.shape[:-3])
    try:
        return tuple(torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3]))
    except RuntimeError:
        raise ShapeError(
            "The batches do not fit together.",
            asked=_shapes(query, key, value) + "      # (*batch, head, token, dim)",
            because="the axes before the heads must be equal, or 1",
            instead="the same batch for query, key and value",
        ) from None


def _check_description(described: Attention, pattern: Pattern, batch: tuple[int, ...], heads: int) -> None:
    if not isinstance(pattern, Pattern):
        kind = isinstance(pattern, type) and issubclass(pattern, Pattern)
        if is_mask(pattern):
            raise refuse_mask_as_pattern(pattern)
        raise PatternError(
            "pattern is not a pattern.",
            asked=f"pattern={pattern.__name__ if isinstance(pattern, type) else type(pattern).__name__}",
            because="that is the class, not a pattern of it" if kind else "it is not made of patterns",
            instead=f"{pattern.__name__}(...), with brackets"
            if kind
            else "Causal(), say; read_pattern(text) for text; Where(lambda i, j: j < i) for a rule of your own",
        )
    if pattern.rows is not None and pattern.rows != math.prod(batch):
        raise ShapeError(
            "The pattern was made for another batch.",
            asked=f"a pattern for {pattern.rows} batch rows",
            found=f"a batch of {tuple(batch)}, {math.prod(batch)} rows",
            because="Padding, Segments and Mask describe every batch row",
            instead="one length, one row of ids or one mask for each batch row; tensors are (*batch, head, token, dim)",
        )
    if pattern.heads is not None and pattern.heads != heads:
        raise ShapeError(
            "The pattern was made for another number of heads.",
            asked=f"{pattern!r} for {pattern.heads} heads",
            found=f"{heads} query heads",
            because="a mask (..., head, query, key) has one entry for each head",
            instead=f"a mask for {heads} heads, or 1 on that axis; mask[:, None] if it is (batch, query, key)",
        )
    number = isinstance(described.scale, int | float) and not isinstance(described.scale, bool)
    if described.scale is not None and (not number or math.isnan(described.scale)):
        raise ShapeError(
            "scale is not a number.",
            asked=f"scale={described.scale}",
            because="scale is one Python number; every real one and both infinities have a meaning, NaN has none",
            instead="scale=None for 1/sqrt(dim); to learn a temperature, multiply the query by it",
        )


def _check_features(features: FeatureMap | None, described: Attention) -> None:
    if features is None:
        return
    if described.bias is not None or (described.scale is not None and math.isinf(described.scale)):
        what = "a bias" if described.bias is not None else "a hard limit"
        raise BackendError(
            "A feature map leaves no scores to work on.",
            asked=f"feature_map={features!r} with {what}",
            because="linear attention multiplies features; it has no exponent to add a bias to or to sharpen",
            instead="either the feature map or " + what,
        )


def _make_dropout(probability: float, seed: int | Tensor | None, features: FeatureMap | None) -> Dropout | None:
    number = isinstance(probability, int | float) and not isinstance(probability, bool)
    if not number or not 0 <= probability < 1:
        raise InputError(
            "dropout is not a probability.",
            asked=f"dropout={probability}",
            because="it is the probability of dropping an attention weight, and those that are kept are divided by "
            "1 - dropout",
            instead="0 <= dropout < 1",
        )
    if probability == 0:
        return None
    if features is not None:
        raise BackendError(
            "Linear attention has no weights to drop.",
            asked=f"feature_map={features!r} with dropout={probability}",
            because="it multiplies features with sums over keys, and never computes the weight of a pair",
            instead="dropout=0 here, and torch.nn.functional.dropout on the output; or attention without a feature map",
        )
    if seed is None:
        return Dropout(float(probability), draw_seed())
    whole = isinstance(seed, Tensor) and seed.dtype == torch.int64 and seed.ndim == 0
    if isinstance(seed, int | np.integer) and not isinstance(seed, bool) and -(2**63) <= seed < 2**63:
        return Dropout(float(probability), torch.tensor(int(seed), device="cpu"))
    if not whole:
        raise InputError(
            "dropout_seed is not a seed.",
            asked=f"dropout_seed={seed!r}",
            because="a seed is one whole number of 64 bits",
            instead="an int from -2**63 to 2**63 - 1, an int64 tensor of shape (), or None to draw one from torch's "
            "generator",
        )
    assert isinstance(seed, Tensor)
    return Dropout(float(probability), seed)


def _check_bias(bias: Bias | Tensor | None, square: tuple[int, ...]) -> Bias | Tensor | None:
    *batch, heads, _, _ = square
    if isinstance(bias, Tensor):
        if not bias.dtype.is_floating_point:
            raise refuse_mask_as_bias(bias, square)
        if not broadcasts_to(bias, square):
            raise BiasError(
                "The bias does not fit the scores.",
                asked=f"a bias of shape {tuple(bias.shape)} and {bias.dtype}",
                found=f"scores of shape {square}",
                because="a bias is added to the scores, so it must broadcast to their shape",
                instead="a bias of shape (head, query, key) or smaller; bias[:, None] if it has batch and no head axis",
            )
        warn_of_mask(bias, square[-1])
        if math.prod(bias.shape[:-3]) > 1:
            bias = bias.expand(*batch, *bias.shape[-3:]).reshape(math.prod(batch), *bias.shape[-3:])
        return bias.reshape(math.prod(bias.shape[:-3]), *(1,) * (3 - bias.ndim), *bias.shape[-3:])
    if isinstance(bias, np.ndarray) and bias.dtype.kind in "biu":
        raise refuse_mask_as_bias(bias, square)
    if bias is not None and not isinstance(bias, Bias):
        raise BiasError(
            "bias is not a bias.",
            asked=f"bias={type(bias).__name__}",
            because="scores can be added by a tensor or by an object from regard.biases",
            instead="torch.as_tensor(bias) for an array or a list; Alibi(heads), say, for a rule",
        )
    if bias is not None and bias.heads not in (1, heads):
        raise BiasError(
            "The bias was made for another number of heads.",
            asked=f"{bias!r} with {bias.heads} heads",
            found=f"{heads} query heads",
            because="every head needs its own bias",
            instead=f"{type(bias).__name__}(heads={heads}, ...)",
        )
    return bias
