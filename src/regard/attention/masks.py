"""Masks: joined to the pattern, and refused with advice where a pattern or a bias belongs."""

from __future__ import annotations

import math
import warnings
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.attention.description import Attention
from regard.biases.base import Bias
from regard.errors import BiasError, MaskWarning, PatternError, ShapeError
from regard.kernels.eager import is_traced
from regard.patterns import Mask

SAMPLED = 64  # rows and columns of a bias that are inspected

_last_sampled: weakref.ref[Tensor] | None = None


def broadcasts_to(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a tensor broadcasts to this very shape."""
    try:
        return torch.broadcast_shapes(tensor.shape, shape) == shape
    except RuntimeError:
        return False


def is_mask(value: object) -> bool:
    """Whether this is a tensor or an array, or lists as deep as (query, key) that could be one."""
    return isinstance(value, Tensor | np.ndarray) or (
        isinstance(value, list) and bool(value) and isinstance(value[0], list | np.ndarray)
    )


def _describe(mask: Any) -> str:
    if isinstance(mask, list):
        return f"a list of {len(mask)} rows"
    kind = "a tensor" if isinstance(mask, Tensor) else "an array"
    return f"{kind} of shape {tuple(mask.shape)} and {mask.dtype}"


def _advice(mask: Any) -> str:
    made = "mask" if isinstance(mask, Tensor) else "torch.as_tensor(mask)"
    made = made if isinstance(mask, Tensor) and mask.dtype == torch.bool else f"{made}.bool()"
    shapes = "(True where a query may see a key; any shape that broadcasts to the scores)"
    return "\n".join([f"mask={made}", shapes, "or pattern=Padding(lengths) for padded batch rows"])


def refuse_mask_as_pattern(mask: Any) -> PatternError:
    return PatternError(
        "A tensor is not a pattern.",
        asked=f"pattern={_describe(mask)}",
        because="a pattern is a rule, and a tensor of booleans has an argument of its own",
        instead=_advice(mask),
    )


def refuse_mask_as_bias(mask: Any, square: tuple[int, ...]) -> BiasError:
    return BiasError(
        "A mask is not a bias.",
        asked=f"bias={_describe(mask)}",
        found=f"scores of shape {square}",
        because="a bias is added to the scores, so it is floating point; adding True would mean a score of one more",
        instead=_advice(mask),
    )


def add_mask(described: Attention, mask: object, square: tuple[int, ...], dtype: torch.dtype) -> Attention:
    """The description with a boolean mask joined to its pattern; `square` is the shape of the scores.

    Where torch compiles, a mask has no values that could be planned: there it hides pairs as a bias of minus infinity.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        added = isinstance(mask, Tensor) and mask.dtype.is_floating_point
        raise ShapeError(
            "mask is not a boolean tensor.",
            asked=f"mask={_describe(mask) if is_mask(mask) else type(mask).__name__}",
            because="True means that a query may see a key, and False that it may not",
            instead="bias=mask if it is added to the scores; mask=mask > 0 if its ones may see"
            if added
            else "mask=torch.as_tensor(mask).bool()",
        )
    *batch, _, _, _ = square
    if not broadcasts_to(mask, square):
        raise ShapeError(
            "The mask does not fit the scores.",
            asked=f"mask={_describe(mask)}",
            found=f"scores of shape {square}",
            because="a mask broadcasts to (*batch, head, query, key)",
            instead="mask[:, None] if it is (batch, query, key); mask[:, None, None] if it is (batch, key)",
        )
    if torch.compiler.is_compiling() and not isinstance(described.bias, Bias) and described.feature_map is None:
        bias = torch.zeros((), dtype=dtype, device=mask.device) if described.bias is None else described.bias
        return replace(described, bias=torch.where(mask, bias, -torch.inf))
    mask = mask.reshape(*(1,) * (2 - mask.ndim), *mask.shape)
    if math.prod(mask.shape[:-3]) > 1:
        mask = mask.expand(*batch, *mask.shape[-3:])
    pattern = Mask(mask)
    return replace(described, pattern=pattern if described.pattern is None else described.pattern & pattern)


def warn_of_mask(bias: Tensor, keys: int) -> None:
    """Warn if a bias looks like a mask of zeros and ones, which hides nothing when it is added to the scores.

    A sample is inspected, once for each tensor; parameters, traced tensors and other devices are not read.
    """
    global _last_sampled
    if bias.requires_grad or keys < 2 or not bias.ndim or bias.shape[-1] != keys or not bias.is_cpu:
        return
    if _last_sampled is not None and _last_sampled() is bias:
        return
    if is_traced() or type(bias) not in (Tensor, torch.nn.Parameter):
        return
    _last_sampled = weakref.ref(bias)
    sample = bias
    while sample.ndim > 2:
        if not len(sample):
            return
        sample = sample[0]
    steps = [max(1, size // SAMPLED) for size in sample.shape]
    sample = sample[:: steps[0]] if sample.ndim == 1 else sample[:: steps[0], :: steps[1]]
    ones = int((sample == 1).sum())
    if 0 < ones < sample.numel() and int((sample == 0).sum()) == sample.numel() - ones:
        warnings.warn(
            f"bias {tuple(bias.shape)} consists of zeros and ones, as a mask does, but a bias is added to the scores: "
            "0 hides nothing. To hide pairs: mask=mask.bool(). "
            "If the scores are meant: warnings.simplefilter('ignore', regard.MaskWarning).",
            MaskWarning,
            stacklevel=5,
        )
