"""Tensor parallelism: the heads of attention and the hidden channels of feed-forward layers over several processes.

    attention      process r has the heads r H/P to (r + 1) H/P: their rows of W^q, W^k, W^v, their columns of W^o and
                   their part of a bias
    feed-forward   process r has F/P hidden channels: their rows of W1 and their columns of W2

Each process computes its part of a sum, and an all-reduce adds them up: two forward and two backward for each block.
Norms, embeddings and the output are the same on all. Source: Shoeybi et al., Megatron-LM (2019), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from regard.biases import Bias
from regard.errors import ConfigError
from regard.layers import AttentionSizes, FeedForward, MultiHeadAttention
from regard.layers.linear import Linear
from regard.models.parallelize import list_units


@dataclass(frozen=True)
class Split:
    """How a parameter lies over processes: each section along an axis is cut into equal parts, one for each.

    The rows of a joint projection are sections of queries, keys and values.
    """

    dim: int
    sections: tuple[int, ...]

    def take(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """The part of one process."""
        parts = [section.chunk(size, self.dim)[rank] for section in whole.split(self.sections, self.dim)]
        return torch.cat(parts, self.dim).contiguous()

    def join(self, parts: list[Tensor]) -> Tensor:
        """The whole from the parts of all processes, in their order."""
        lengths = [section // len(parts) for section in self.sections]
        sections = zip(*(part.split(lengths, self.dim) for part in parts), strict=True)
        return torch.cat([piece for section in sections for piece in section], self.dim)


class _Copy(torch.autograd.Function):
    """Before a split layer: the gradients of the parts are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    """After a split layer: the parts are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class SummedLinear(Linear):
    """A linear layer that has some of its inputs: its output is summed over the processes, then its bias is added."""

    group: Any

    def forward(self, input: Tensor) -> Tensor:
        total = _Sum.apply(functional.linear(input, self.weight), self.group)
        return total if self.bias is None else total + self.bias


def split_model(model: nn.Module, group: Any) -> dict[str, Split]:
    """Leave this process its part of every block, in place; how each parameter was split, by name."""
    size = dist.get_world_size(group)
    splits: dict[str, Split] = {}
    cut: set[int] = set()
    names = {id(module): name for name, module in model.named_modules()}
    for unit in list_units(model):
        for module in list(unit.modules()):
            name = names.get(id(module), "")
            if isinstance(module, MultiHeadAttention):
                _check_heads(module, size)
                found = _split_attention(module, group)
                bias = module.attention.bias
                if isinstance(bias, Bias) and id(bias) not in cut:  # layers may share it
                    cut.add(id(bias))
                    found |= _split_bias(bias, module.sizes.heads, group)
            elif isinstance(module, FeedForward):
                found = _split_feed_forward(module, group)
            else:
                continue
            splits |= {f"{name}.{each}": split for each, split in found.items()}
    if not splits:
        raise ConfigError(
            f"A {type(model).__name__} has no layer to split.",
            asked=f"a {type(model).__name__} over {size} processes",
            because="heads of MultiHeadAttention and hidden channels of FeedForward are split",
            instead="data parallel or sharded training",
        )
    return splits


def _check_heads(layer: MultiHeadAttention, size: int) -> None:
    sizes, bias = layer.sizes, layer.attention.bias
    reason = ""
    if sizes.heads % size or sizes.kv_heads % size:
        reason = f"{sizes.heads} heads and {sizes.kv_heads} key heads cannot be shared evenly"
    elif bias is not None and getattr(bias, "heads", 2) > 1 and not getattr(bias, "heads_first", False):
        reason = "its bias differs between heads, and how to cut it is not known"
    elif layer.attention.pattern is not None and layer.attention.pattern.heads is not None:
        reason = "its pattern differs between heads"
    if reason:
        raise ConfigError(
            f"This attention cannot be split over {size} processes.",
            asked=repr(sizes),
            because=reason,
            instead=f"a multiple of {size} heads without biases of their own, or fewer processes",
        )


def _split_attention(layer: MultiHeadAttention, group: Any) -> dict[str, Split]:
    whole, size = layer.sizes, dist.get_world_size(group)
    projections = layer.projections
    splits = {}
    if projections.joint:
        splits["projections.weight"] = Split(0, projections.widths)
    else:
        for name, width in zip(("query", "key", "value"), projections.widths, strict=True):
            splits[f"projections.{name}_weight"] = Split(0, (width,))
    if projections.bias is not None:
        widths = zip("qkv", projections.widths, strict=True)
        splits["projections.bias"] = Split(0, tuple(width for letter, width in widths if letter in projections.letters))
    splits["output.weight"] = Split(1, (layer.output.in_features,))
    _take_parts(layer, splits, group)
    layer.sizes = projections.sizes = AttentionSizes(
        whole.input, whole.heads // size, whole.kv_heads // size, whole.key, whole.value, whole.context, whole.values,
        whole.output,
    )  # fmt: skip
    projections.widths = tuple(width // size for width in projections.widths)  # type: ignore[assignment]
    _sum_output(layer.output, group)
    layer.register_forward_pre_hook(_make_copy(group))
    return splits


def _split_bias(bias: Bias, part: int, group: Any) -> dict[str, Split]:
    """Leave a process the scores of its heads, so many; the gradients of a bias that all heads share are summed."""
    rank, whole = dist.get_rank(group), bias.heads
    if whole == 1:
        for parameter in bias.parameters():
            parameter.register_hook(partial(_sum_gradient, group))
        return {}
    return {f"score_bias.{name}": Split(0, (whole,)) for name in bias.keep_heads(rank * part, (rank + 1) * part)}


def _sum_gradient(group: Any, gradient: Tensor) -> Tensor:
    total = gradient.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _split_feed_forward(layer: FeedForward, group: Any) -> dict[str, Split]:
    hidden, size = layer.outer.in_features, dist.get_world_size(group)
    if hidden % size:
        raise ConfigError(
            f"{hidden} hidden channels cannot be shared by {size} processes.",
            asked=repr(layer),
            because="each has equally many",
            instead=f"hidden_dim={-(-hidden // size) * size}, or fewer processes",
        )
    sections = (hidden, hidden) if layer.gated else (hidden,)
    splits = {"inner.weight": Split(0, sections), "outer.weight": Split(1, (hidden,))}
    if layer.inner.bias is not None:
        splits["inner.bias"] = Split(0, sections)
    _take_parts(layer, splits, group)
    layer.inner.out_features //= size
    _sum_output(layer.outer, group)
    layer.register_forward_pre_hook(_make_copy(group))
    return splits


def _take_parts(layer: nn.Module, splits: dict[str, Split], group: Any) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for name, split in splits.items():
        owner, _, last = name.rpartition(".")
        module = layer.get_submodule(owner)
        whole: nn.Parameter = getattr(module, last)
        setattr(module, last, nn.Parameter(split.take(whole.detach(), rank, size), whole.requires_grad))


def _sum_output(layer: nn.Linear, group: Any) -> None:
    layer.in_features //= dist.get_world_size(group)
    layer.__class__ = SummedLinear
    layer.group = group  # type: ignore[assignment]


def _make_copy(group: Any) -> Any:
    def copy_inputs(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(_Copy.apply(each, group) if isinstance(each, Tensor) else each for each in inputs)

    return copy_inputs
