"""Regard's own operator and layers: what their description says is what they claim."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import Attention, attend
from regard.biases import Bias
from regard.errors import BackendError, InputError
from regard.laws.law import Dice
from regard.laws.subjects import ours_models
from regard.laws.subjects.base import Conventions, Subject, Way
from regard.laws.subjects.known import SOBER, GridLayer, KnownLayer, companion, conventions_of
from regard.laws.subjects.operator import SIZES, Operator
from regard.laws.subjects.remembering import Remembering
from regard.laws.subjects.seen import is_padding, seen
from regard.layers import Block, ChannelAttention, GridAttention, MultiHeadAttention, RunningAttention, WindowAttention
from regard.layers.block import Stack
from regard.patterns import Full, GridWindow, Pattern, Segments, has_past, shiftable

CONTEXT = 5  # tokens of the other text


def recognise(target: Any, kind: str | None, name: str, options: dict[str, Any]) -> Subject | None:
    """The subject of something that is Regard's, or None."""
    if kind in (None, "operator"):
        described = _described(target)
        if described is not None:
            return _operator(described, name, options)
        if isinstance(target, RunningAttention):
            return _running(target, name, options)
    if isinstance(target, MultiHeadAttention):
        return _attention(target, name, options)
    if isinstance(target, Block | Stack):
        return _blocks(target, name, options)
    if isinstance(target, GridAttention | WindowAttention):
        return _grid(target, name, options)
    if isinstance(target, ChannelAttention):
        claims = [*SOBER, "paths", "permutation"]
        subject = KnownLayer(target, name, conventions_of(options), channels=target.dim, claims=claims)
        subject.declared = "Regard's channel attention"
        return subject
    return ours_models.recognise(target, name, options)


# The operator


class Described(nn.Module):
    """A description with a backend, as a module: so its bias can be had in another precision."""

    def __init__(self, attention: Attention, backend: str = "auto") -> None:
        super().__init__()
        self.attention, self.backend = attention, backend
        if isinstance(attention.bias, Tensor):
            self.register_buffer("bias", attention.bias.detach())
        else:
            self.bias = attention.bias

    def forward(self, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern | None = None) -> Tensor:
        own = self.attention.pattern
        whole = pattern if own is None or pattern is None else own & pattern
        described = dataclasses.replace(self.attention, pattern=own if pattern is None else whole, bias=self.bias)
        return attend(query, key, value, described, backend=self.backend)


class Ours(Operator):
    """`attend` with a description. A mask becomes a pattern, joined to the description's own."""

    def __init__(self, target: Described, name: str, conventions: Conventions, **sizes: int) -> None:
        self.fixed = fixed_length(target.attention.pattern, target.attention.bias)
        super().__init__(target, name, conventions, **sizes)
        if self._takes_masks():
            self.abilities.add("mask")
        if self.fixed is not None:
            self.shortest = self.longest = self.fixed
            self.abilities.discard("lengths")

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        if mask is None:
            return self.target(query, key, value)
        mask = mask.reshape(*(1,) * (4 - mask.ndim), *mask.shape)
        if mask.shape[-1] != key.shape[2]:
            mask = mask.expand(-1, -1, -1, key.shape[2])
        of_heads = [self.target(query, key, value, seen(one, query.shape[0], query.shape[2])) for one in mask.unbind(1)]
        if len(of_heads) == 1:
            return of_heads[0]
        # A pattern has no heads: each is taken from a run in which all of them have its mask.
        return torch.stack([output[:, head] for head, output in enumerate(of_heads)], 1)

    def _takes_masks(self) -> bool:
        """Whether the backend runs every mask; one that was named may know some patterns only."""
        tokens = 5 if self.fixed is None else self.fixed
        mask = torch.ones(2, 1, 1, tokens, dtype=torch.bool)
        mask[..., 1] = False
        try:
            self.attend(*self.tensors(Dice(0, "mask"), 2, tokens, tokens), mask)
        except BackendError:
            return False
        return True

    def ways(self) -> dict[str, Way]:
        other = Described(self.target.attention, "reference").to(self.dtype)
        return {} if self.target.backend == "reference" else {"the definition": self._like(other)}

    def _like(self, target: Described) -> Way:
        def way(x: Tensor, mask: Tensor | None = None) -> Tensor:
            twin = Ours.__new__(Ours)
            twin.__dict__ = {**self.__dict__, "target": target}
            return twin.run(x, mask)

        return way

    def _sizes(self, heads: int | None, dim: int | None) -> tuple[int, int]:
        tokens = 5 if self.fixed is None else self.fixed
        failure: Exception | None = None
        for self.heads, self.dim in dict.fromkeys((heads or own, dim or size) for own, size in SIZES):
            self.kv_heads, self.value_dim = self.heads, self.dim
            try:
                self.attend(*self.tensors(Dice(0, "sizes"), 2, tokens, tokens))
                return self.heads, self.dim
            except Exception as reason:  # a bias may want other heads, a feature map other sizes
                failure = failure or reason
        raise InputError(
            f"{self.name} does not run.",
            asked=f"attend with {self.target.attention} on {self.target.backend!r}",
            found=f"{type(failure).__name__}: {failure}",
            because="a law has to call it before it can judge it",
            instead="heads= and dim= that fit its bias",
        ) from failure


def _described(target: Any) -> Described | None:
    if isinstance(target, Described):
        return target
    if isinstance(target, Attention):
        return Described(target)
    settings: dict[str, Any] = {}
    while isinstance(target, functools.partial):
        settings = {**target.keywords, **settings}
        target = target.func
    if target is not attend or settings.get("layout", "rows") != "rows":
        return None
    attention = settings.get("attention") or Attention()
    names = {field.name for field in dataclasses.fields(Attention)}
    given = {key: value for key, value in settings.items() if key in names and value is not None}
    return Described(dataclasses.replace(attention, **given), settings.get("backend", "auto"))


def _operator(target: Described, name: str, options: dict[str, Any]) -> Subject:
    attention = target.attention
    if attention.pattern is not None and attention.pattern.rows is not None:
        raise InputError(
            "this description knows its batch.",
            asked=repr(attention.pattern),
            because=f"it is for {attention.pattern.rows} rows, and a law chooses its own",
            instead="the description without the padding or the segments of one batch; the laws give masks themselves",
        )
    own: dict[str, Any] = {"pattern": attention.pattern or Full(), "beta": attention.beta}
    sizes = ("heads", "kv_heads", "dim", "value_dim")
    given = {key: options[key] for key in sizes if key in options}
    subject = Ours(target.eval(), name, conventions_of(options, **own), **given)
    subject.claims = tuple(_claims(attention, subject.fixed is None))
    subject.declared = f"Regard's attend, {attention}" + ("" if target.backend == "auto" else f" on {target.backend}")
    return subject


def _claims(attention: Attention, any_length: bool) -> list[str]:
    """What a description promises."""
    pattern, bias = attention.pattern, attention.bias
    soft = attention.feature_map is None and (attention.beta is None or math.isfinite(attention.beta))
    claims = [*SOBER, "paths", "padding", "masked-values", "empty-rows", "row-stochasticity"]
    if any_length and bias is None and (pattern is None or shiftable(pattern)):
        claims.append("alignment")
    if soft:
        claims += ["support", "range"]
        if attention.beta is None and bias is None:
            claims += ["scale", "jacobian"] if pattern is None else ["jacobian"]
    elif attention.feature_map is None:
        claims.remove("gradients")  # a hard choice has none
    if pattern is not None and has_past(pattern):
        claims.append("causality")
    if pattern is None and bias is None:
        claims.append("permutation")
    if bias is None:
        claims.append("head-groups")
    return claims


class Running(Operator):
    """A `RunningAttention`: tokens come in two pieces, with a stranger between them who leaves again."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        running = RunningAttention(self.conventions.beta)
        half = query.shape[2] // 2
        for part in (slice(0, half), slice(0, 1), slice(half, None)):
            running.append(query[:, :, part], key[:, :, part], value[:, :, part])
        return running.remove(half)


def _running(target: RunningAttention, name: str, options: dict[str, Any]) -> Subject:
    conventions = conventions_of(options, beta=target.beta)
    subject = Running(target, name, conventions)
    subject.claims = (*SOBER, "row-stochasticity", "permutation", "range", "jacobian")
    subject.declared = "Regard's running attention"
    return subject


# Layers


class MultiHead(KnownLayer):
    """`MultiHeadAttention`, with the mask as a pattern, or as lengths where it is padding on the left."""

    can = ("aligned", "float", "lengths", "gradients", "mask")

    def call(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        if mask is not None:
            more["pattern"] = seen(mask[:, None], x.shape[0], x.shape[1])
        return self.target(x, **more)

    def weights(self, x: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        pattern = None if mask is None else seen(mask[:, None], x.shape[0], x.shape[1])
        return [self.target.weights(x, pattern=pattern)]

    def ways(self) -> dict[str, Way]:
        return {"lengths of the rows": self._by_lengths, "the sum over heads": self._by_heads}

    def _by_lengths(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None or not is_padding(mask, "left"):
            return self.run(x, mask)
        return self.target(x, lengths=mask.sum(-1))

    def _by_heads(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        pattern = None if mask is None else seen(mask[:, None], x.shape[0], x.shape[1])
        output = self.target.head_contributions(x, pattern=pattern).sum(0)
        return output if self.target.output.bias is None else output + self.target.output.bias


class Blocks(KnownLayer):
    """One block or several, perhaps with another text that stays the same."""

    can = ("aligned", "float", "lengths", "gradients", "mask")

    def call(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        if mask is not None:
            more["pattern"] = seen(mask[:, None], x.shape[0], x.shape[1])
        caches = more.pop("cache", None)
        for index, block in enumerate(blocks_of(self.target)):
            if block.cross is not None:
                more["context"] = companion(self, x.shape[0], CONTEXT, block.cross.sizes.context)
            x = block(x, cache=None if caches is None else caches[index], **more)
        return x

    def new_cache(self) -> list:
        return [block.attention.new_cache() for block in blocks_of(self.target)]


class Grid(GridLayer):
    """Ours on a grid, which also know their weights."""

    def weights(self, x: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        if isinstance(self.target, WindowAttention):
            return super().weights(x, mask)
        return [self.target.weights(x.unflatten(1, self.grid)).flatten(-2).flatten(-3, -2)]

    def ways(self) -> dict[str, Way]:
        return {} if isinstance(self.target, WindowAttention) else {"place by place": self._at}

    def _at(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        rows, columns = torch.arange(self.grid[0])[:, None], torch.arange(self.grid[1])
        return self.target.at(x.unflatten(1, self.grid), rows, columns).flatten(1, 2)


def _attention(target: MultiHeadAttention, name: str, options: dict[str, Any]) -> Subject | None:
    sizes, attention = target.sizes, target.attention
    if sizes.context != sizes.input or sizes.values != sizes.input:
        return None  # it cannot read itself
    claims = _layer_claims([target])
    subject = MultiHead(target, name, _conventions([target], options), channels=sizes.input, claims=claims)
    _settle(subject, attention)
    if "cache" in claims:
        subject.caching = Remembering(subject)
        subject.abilities.add("cache")
    subject.declared = f"Regard's multi-head attention, {attention}"
    return subject


def _blocks(target: Any, name: str, options: dict[str, Any]) -> Subject:
    attentions = [block.attention for block in blocks_of(target)]
    claims = [claim for claim in _layer_claims(attentions) if claim not in ("row-stochasticity", "range", "scale")]
    if len(attentions) > 1 and "support" in claims:
        claims.remove("support")  # what two layers see is more than what one does
    channels = attentions[0].sizes.input
    subject = Blocks(target, name, _conventions(attentions, options), channels=channels, claims=claims)
    _settle(subject, attentions[0].attention)
    if "cache" in claims and all(block.cross is None for block in blocks_of(target)):
        subject.caching = Remembering(subject)
        subject.abilities.add("cache")
    subject.declared = "Regard's block" if isinstance(target, Block) else f"{len(attentions)} of Regard's blocks"
    return subject


def _grid(target: Any, name: str, options: dict[str, Any]) -> Subject:
    claims = [*SOBER, "paths"]
    if isinstance(target, WindowAttention):
        down, across = target.window
        grid = (2 * down + 1, across + max(1, across // 2))  # no whole number of windows
        conventions = conventions_of(options, pattern=GridWindow(grid, target.window))
        subject = Grid(target, name, conventions, channels=target.dim, claims=[*claims, "support"], grid=grid)
    else:
        attention = target.attention.attention
        grid = _grid_of(attention.pattern) or _grid_of(attention.bias) or (3, 5)
        claims += ["row-stochasticity", "support"]
        if attention.pattern is None and attention.bias is None:
            claims.append("permutation")
        conventions = conventions_of(options, pattern=attention.pattern or Full())
        width = target.attention.sizes.input
        subject = Grid(target, name, conventions, channels=width, claims=claims, grid=grid)
    subject.declared = f"Regard's attention on a grid of {grid[0]} x {grid[1]}"
    return subject


def blocks_of(target: Any) -> list[Block]:
    return [target] if isinstance(target, Block) else list(target)


def _conventions(attentions: list[MultiHeadAttention], options: dict[str, Any]) -> Conventions:
    pattern = attentions[0].attention.pattern or Full()
    moves = all(shiftable(each.attention.pattern or Full()) for each in attentions)
    return conventions_of(options, pattern=pattern if len(attentions) == 1 else None, left=None if moves else False)


def _layer_claims(attentions: list[MultiHeadAttention]) -> list[str]:
    claims = [*SOBER, "paths", "padding", "masked-values", "empty-rows", "row-stochasticity", "support"]
    patterns = [each.attention.pattern for each in attentions]
    if any(each.attention.feature_map is not None for each in attentions):
        claims.remove("support")  # features may have weights of zero anywhere
    if all(pattern is not None and has_past(pattern) for pattern in patterns):
        claims += ["causality", "cache", "cache-algebra"]
    plain = all(each.attention.bias is None and each.rotary is None for each in attentions)
    if plain and all(pattern is None for pattern in patterns):
        claims.append("permutation")
    if all(each._bias_moves() and shiftable(each.attention.pattern or Full()) for each in attentions):
        claims.append("relative-position")
    if any(each.sizes.kv_heads < each.sizes.heads for each in attentions):
        claims.append("head-groups")
    return claims


def _settle(subject: KnownLayer, attention: Attention) -> None:
    fixed = fixed_length(attention.pattern, attention.bias)
    if fixed is not None:
        subject.shortest = subject.longest = fixed
        subject.abilities.discard("lengths")


def fixed_length(*parts: Pattern | Bias | Tensor | None) -> int | None:
    """The one number of tokens that a pattern or a bias is made for, or None."""
    for part in parts:
        grid = _grid_of(part)
        if grid is not None:
            return grid[0] * grid[1]
        if isinstance(part, Tensor) and part.ndim > 1 and part.shape[-1] > 1:
            return part.shape[-1]
        if isinstance(part, Segments):
            return part.ids.shape[1]
        inner = [getattr(part, field, None) for field in ("left", "right", "pattern")]
        found = (
            fixed_length(*(each for each in inner if isinstance(each, Pattern))) if isinstance(part, Pattern) else None
        )
        if found is not None:
            return found
    return None


def _grid_of(part: Any) -> tuple[int, int] | None:
    grid = getattr(part, "grid", None)
    if grid is not None:
        return grid
    inner = (getattr(part, field, None) for field in ("left", "right", "pattern"))
    return next((found for each in inner if isinstance(each, Pattern) and (found := _grid_of(each))), None)


__all__ = ["recognise"]
