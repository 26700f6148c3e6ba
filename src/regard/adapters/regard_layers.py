"""Regard's operator and layers, whose claims follow from their descriptions."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from regard.adapters import regard_models
from regard.adapters.base import Adapter, Conventions, Variant
from regard.adapters.example_inputs import ExampleInputs, InputSpec, activations
from regard.adapters.known_layer import MODULE_CLAIMS, GridLayer, KnownLayer, conventions_of, other_sequence
from regard.adapters.mask_patterns import is_padding, pattern_of_mask
from regard.adapters.operator import OperatorAdapter
from regard.adapters.regard_cache import RegardCache
from regard.adapters.rng import Rng
from regard.attention import Attention, attend
from regard.biases import Bias
from regard.errors import BackendError, InputError
from regard.layers import (
    ChannelAttention,
    GridAttention,
    GridPositions,
    IncrementalAttention,
    LearnedPositions,
    MultiHeadAttention,
    PatchEmbedding,
    SinusoidalPositions,
    TransformerBlock,
    WindowAttention,
)
from regard.layers.block import BlockList
from regard.layers.cache_requirements import is_shift_invariant
from regard.layers.projections import Projections
from regard.patterns import Full, GridWindow, Mask, Pattern

CONTEXT = 5  # tokens of the other text
GRID = 64  # rows and columns of an example image


def pattern_of(attention: Attention) -> Pattern:
    return Full() if attention.pattern is None else attention.pattern


def recognise(target: Any, kind: str | None, name: str, options: dict[str, Any]) -> Adapter | None:
    """The adapter of Regard's operator, layers and models, or None."""
    if kind in (None, "operator"):
        described = _find_description(target)
        if described is not None:
            return _adapt_operator(described, name, options)
        if isinstance(target, IncrementalAttention):
            return _adapt_incremental(target, name, options)
    if isinstance(target, MultiHeadAttention):
        return _adapt_attention(target, name, options)
    if isinstance(target, TransformerBlock | BlockList):
        return _adapt_blocks(target, name, options)
    if isinstance(target, GridAttention | WindowAttention):
        return _adapt_grid(target, name, options)
    if isinstance(target, ChannelAttention):
        claims = [*MODULE_CLAIMS, "paths", "permutation"]
        adapter = KnownLayer(target, name, conventions_of(options), channels=target.dim, claims=claims)
        adapter.declared = "Regard's channel attention"
        return adapter
    return regard_models.recognise(target, name, options)


# The operator


class AttentionModule(nn.Module):
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


class RegardOperator(OperatorAdapter):
    """`attend` with a description. A mask becomes a pattern, joined to the description's own."""

    def __init__(self, target: AttentionModule, name: str, conventions: Conventions, **sizes: int) -> None:
        self.fixed = fixed_length(target.attention.pattern, target.attention.bias)
        self.example_tokens = self.example_tokens if self.fixed is None else self.fixed
        super().__init__(target, name, conventions, **sizes)
        if self._takes_masks():
            self.abilities.add("mask")
        if self.fixed is not None:
            self.min_length = self.max_length = self.fixed
            self.abilities.discard("lengths")

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        if mask is None:
            return self.target(query, key, value)
        mask = mask.reshape(*(1,) * (4 - mask.ndim), *mask.shape)
        if mask.shape[-1] != key.shape[2]:
            mask = mask.expand(-1, -1, -1, key.shape[2])
        pattern = pattern_of_mask(mask[:, 0], query.shape[0], query.shape[2]) if mask.shape[1] == 1 else Mask(mask)
        return self.target(query, key, value, pattern)

    def _takes_masks(self) -> bool:
        """Whether the backend runs every mask; a named backend may support some patterns only."""
        tokens = self.example_tokens
        mask = torch.ones(2, 1, tokens, tokens, dtype=torch.bool)
        mask[..., 1] = False
        mask[:, :, -1, 1] = True  # no mask of whole keys, which linear attention runs, too
        try:
            self.attend(*self.tensors(Rng(0, "mask"), 2, tokens, tokens), mask)
        except BackendError:
            return False
        return True

    def variants(self) -> dict[str, Variant]:
        other = AttentionModule(self.target.attention, "reference").to(self.dtype)
        return {} if self.target.backend == "reference" else {"the definition": self._run_with_target(other)}

    def _run_with_target(self, target: AttentionModule) -> Variant:
        def variant(x: Tensor, mask: Tensor | None = None) -> Tensor:
            twin = RegardOperator.__new__(RegardOperator)
            twin.__dict__ = {**self.__dict__, "target": target}
            return twin.run(x, mask)

        return variant


def _find_description(target: Any) -> AttentionModule | None:
    if isinstance(target, AttentionModule):
        return target
    if isinstance(target, Attention):
        return AttentionModule(target)
    settings: dict[str, Any] = {}
    while isinstance(target, functools.partial):
        settings = {**target.keywords, **settings}
        target = target.func
    if target is not attend or settings.get("layout", "rows") != "rows":
        return None
    attention = settings.get("attention") or Attention()
    names = {field.name for field in dataclasses.fields(Attention)}
    given = {key: value for key, value in settings.items() if key in names and value is not None}
    return AttentionModule(dataclasses.replace(attention, **given), settings.get("backend", "auto"))


def _adapt_operator(target: AttentionModule, name: str, options: dict[str, Any]) -> Adapter:
    attention = target.attention
    if attention.pattern is not None and attention.pattern.rows is not None:
        raise InputError(
            "this description fixes the batch size.",
            asked=repr(attention.pattern),
            because=f"it is for {attention.pattern.rows} rows, and a law chooses its own",
            instead="the description without the padding or the segments of one batch; the laws give masks themselves",
        )
    own: dict[str, Any] = {"pattern": pattern_of(attention), "scale": attention.scale}
    sizes = ("heads", "kv_heads", "dim", "value_dim")
    given = {key: options[key] for key in sizes if key in options}
    adapter = RegardOperator(target.eval(), name, conventions_of(options, **own), **given)
    adapter.claims = tuple(_list_claims(attention, adapter.fixed is None))
    adapter.declared = f"Regard's attend, {attention}" + ("" if target.backend == "auto" else f" on {target.backend}")
    return adapter


def _list_claims(attention: Attention, any_length: bool) -> list[str]:
    """What a description promises."""
    pattern, bias = attention.pattern, attention.bias
    soft = attention.feature_map is None and (attention.scale is None or math.isfinite(attention.scale))
    claims = [*MODULE_CLAIMS, "paths", "padding", "masked-values", "empty-rows", "row-stochasticity"]
    if any_length and bias is None and (pattern is None or pattern.is_shift_invariant()):
        claims.append("alignment")
    if soft:
        claims += ["support", "range"]
        if attention.scale is None and bias is None:
            claims += ["scale", "jacobian"] if pattern is None else ["jacobian"]
    elif attention.feature_map is None:
        claims.remove("gradients")  # a hard choice has none
    if pattern is not None and pattern.supports_kv_cache:
        claims.append("causality")
    if pattern is None and bias is None:
        claims.append("permutation")
    if bias is None:
        claims.append("head-groups")
    return claims


class IncrementalAdapter(OperatorAdapter):
    """An `IncrementalAttention`: tokens come in two pieces, and a token in between is removed again."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        running = IncrementalAttention(self.conventions.scale)
        half = query.shape[2] // 2
        for part in (slice(0, half), slice(0, 1), slice(half, None)):
            running.append(query[:, :, part], key[:, :, part], value[:, :, part])
        return running.remove(half)


def _adapt_incremental(target: IncrementalAttention, name: str, options: dict[str, Any]) -> Adapter:
    conventions = conventions_of(options, scale=target.scale)
    adapter = IncrementalAdapter(target, name, conventions)
    adapter.claims = (*MODULE_CLAIMS, "row-stochasticity", "permutation", "range", "jacobian")
    adapter.declared = "Regard's incremental attention"
    return adapter


# Layers


class MultiHeadAdapter(KnownLayer):
    """`MultiHeadAttention`, with the mask as a pattern, or as lengths where it is padding on the left."""

    can = ("aligned", "float", "lengths", "gradients", "mask")

    def call(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        if mask is not None:
            more["pattern"] = pattern_of_mask(mask[:, None], x.shape[0], x.shape[1])
        return self.target(x, **more)

    def weights(self, x: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        pattern = None if mask is None else pattern_of_mask(mask[:, None], x.shape[0], x.shape[1])
        return [self.target.weights(x, pattern=pattern)]

    def variants(self) -> dict[str, Variant]:
        return {"lengths of the rows": self._run_with_lengths, "the sum over heads": self._run_by_heads}

    def _run_with_lengths(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None or not is_padding(mask, "left"):
            return self.run(x, mask)
        return self.target(x, lengths=mask.sum(-1))

    def _run_by_heads(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        pattern = None if mask is None else pattern_of_mask(mask[:, None], x.shape[0], x.shape[1])
        output = self.target.head_contributions(x, pattern=pattern).sum(0)
        return output if self.target.output.bias is None else output + self.target.output.bias


class BlocksAdapter(KnownLayer):
    """One block or several, perhaps with another text that stays the same."""

    can = ("aligned", "float", "lengths", "gradients", "mask")

    def call(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        if mask is not None:
            more["pattern"] = pattern_of_mask(mask[:, None], x.shape[0], x.shape[1])
        caches = more.pop("cache", None)
        for index, block in enumerate(blocks_of(self.target)):
            if block.cross is not None:
                more["context"] = other_sequence(self, x.shape[0], CONTEXT, block.cross.sizes.context)
            x = block(x, cache=None if caches is None else caches[index], **more)
        return x

    def new_cache(self) -> list:
        return [block.attention.new_cache() for block in blocks_of(self.target)]


class GridAdapter(GridLayer):
    """Regard's layers on a grid, which also return their weights."""

    def weights(self, x: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        if isinstance(self.target, WindowAttention):
            return super().weights(x, mask)
        return [self.target.weights(x.unflatten(1, self.grid)).flatten(-2).flatten(-3, -2)]

    def variants(self) -> dict[str, Variant]:
        return {} if isinstance(self.target, WindowAttention) else {"place by place": self._run_with_queries_at}

    def _run_with_queries_at(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        rows, columns = torch.arange(self.grid[0])[:, None], torch.arange(self.grid[1])
        return self.target.at(x.unflatten(1, self.grid), rows, columns).flatten(1, 2)


def _adapt_attention(target: MultiHeadAttention, name: str, options: dict[str, Any]) -> Adapter | None:
    sizes, attention = target.sizes, target.attention
    if sizes.context != sizes.input or sizes.values != sizes.input:
        return None  # it cannot read itself
    claims = _list_layer_claims([target])
    adapter = MultiHeadAdapter(target, name, _find_conventions([target], options), channels=sizes.input, claims=claims)
    _fix_length(adapter, attention)
    if "cache" in claims:
        adapter.caching = RegardCache(adapter)
        adapter.abilities.add("cache")
    adapter.declared = f"Regard's multi-head attention, {attention}"
    return adapter


def _adapt_blocks(target: Any, name: str, options: dict[str, Any]) -> Adapter:
    attentions = [block.attention for block in blocks_of(target)]
    claims = [claim for claim in _list_layer_claims(attentions) if claim not in ("row-stochasticity", "range", "scale")]
    if len(attentions) > 1 and "support" in claims:
        claims.remove("support")  # what two layers see is more than what one does
    channels = attentions[0].sizes.input
    adapter = BlocksAdapter(target, name, _find_conventions(attentions, options), channels=channels, claims=claims)
    _fix_length(adapter, attentions[0].attention)
    if "cache" in claims and all(block.cross is None for block in blocks_of(target)):
        adapter.caching = RegardCache(adapter)
        adapter.abilities.add("cache")
    adapter.declared = (
        "Regard's block" if isinstance(target, TransformerBlock) else f"{len(attentions)} of Regard's blocks"
    )
    return adapter


def _adapt_grid(target: Any, name: str, options: dict[str, Any]) -> Adapter:
    claims = [*MODULE_CLAIMS, "paths"]
    if isinstance(target, WindowAttention):
        down, across = target.window
        grid = (2 * down + 1, across + max(1, across // 2))  # no whole number of windows
        conventions = conventions_of(options, pattern=GridWindow(grid, target.window))
        adapter = GridAdapter(target, name, conventions, channels=target.dim, claims=[*claims, "support"], grid=grid)
    else:
        attention = target.attention.attention
        grid = _find_grid(attention.pattern) or _find_grid(attention.bias) or (3, 5)
        claims += ["row-stochasticity", "support"]
        if attention.pattern is None and attention.bias is None:
            claims.append("permutation")
        conventions = conventions_of(options, pattern=pattern_of(attention))
        width = target.attention.sizes.input
        adapter = GridAdapter(target, name, conventions, channels=width, claims=claims, grid=grid)
    adapter.declared = f"Regard's attention on a grid of {grid[0]} x {grid[1]}"
    return adapter


def blocks_of(target: Any) -> list[TransformerBlock]:
    return [target] if isinstance(target, TransformerBlock) else list(target)


def _find_conventions(attentions: list[MultiHeadAttention], options: dict[str, Any]) -> Conventions:
    pattern = pattern_of(attentions[0].attention)
    moves = all(pattern_of(each.attention).is_shift_invariant() for each in attentions)
    return conventions_of(options, pattern=pattern if len(attentions) == 1 else None, left=None if moves else False)


def _list_layer_claims(attentions: list[MultiHeadAttention]) -> list[str]:
    claims = [*MODULE_CLAIMS, "paths", "padding", "masked-values", "empty-rows", "row-stochasticity", "support"]
    patterns = [each.attention.pattern for each in attentions]
    if any(each.attention.feature_map is not None for each in attentions):
        claims.remove("support")  # features may have weights of zero anywhere
    if all(pattern is not None and pattern.supports_kv_cache for pattern in patterns):
        claims += ["causality", "cache", "cache-algebra"]
    plain = all(each.attention.bias is None and each.rotary is None for each in attentions)
    if plain and all(pattern is None for pattern in patterns):
        claims.append("permutation")
    if all(
        is_shift_invariant(each.attention.bias) and pattern_of(each.attention).is_shift_invariant()
        for each in attentions
    ):
        claims.append("relative-position")
    if any(each.sizes.kv_heads < each.sizes.heads for each in attentions):
        claims.append("head-groups")
    return claims


def _fix_length(adapter: KnownLayer, attention: Attention) -> None:
    fixed = fixed_length(attention.pattern, attention.bias)
    if fixed is not None:
        adapter.min_length = adapter.max_length = fixed
        adapter.abilities.discard("lengths")


def fixed_length(*parts: Pattern | Bias | Tensor | None) -> int | None:
    """The one number of tokens that a pattern or a bias is made for, or None."""
    for part in parts:
        grid, found = getattr(part, "grid", None), None
        if isinstance(part, Pattern):
            found = part.fixed_length
        elif grid is not None:
            found = grid[0] * grid[1]
        elif isinstance(part, Tensor) and part.ndim > 1 and part.shape[-1] > 1:
            found = part.shape[-1]
        if found is not None:
            return found
    return None


def _find_grid(part: Any) -> tuple[int, int] | None:
    grid = getattr(part, "grid", None)
    if grid is not None:
        return grid
    inner = (getattr(part, field, None) for field in ("left", "right", "pattern"))
    return next((found for each in inner if isinstance(each, Pattern) and (found := _find_grid(each))), None)


# Example inputs


def fill_inputs(module: nn.Module, inputs: ExampleInputs) -> bool:
    """Example inputs of attentions and blocks."""
    if isinstance(module, GridAttention | WindowAttention):
        channels = module.dim if isinstance(module, WindowAttention) else module.attention.sizes.input
        inputs.args = (inputs.image(GRID, channels, channels_last=True),)
        inputs.steps["R"], inputs.steps["W"] = getattr(module, "window", (1, 1))
    elif isinstance(module, MultiHeadAttention):
        sizes = module.sizes
        inputs.args = (activations(sizes.input),)
        if "M" in inputs.known or "T" in inputs.known or sizes.context != sizes.input:
            symbol = "T" if "T" in inputs.known else "M"
            inputs.args += (activations(sizes.context, symbol=symbol),)
            if sizes.values != sizes.context:
                inputs.args += (activations(sizes.values, symbol=symbol),)
    elif isinstance(module, TransformerBlock):
        inputs.args = (activations(module.attention.sizes.input),)
        if module.cross is not None:
            inputs.kwargs["context"] = activations(module.cross.sizes.context, symbol="T")
    elif isinstance(module, ChannelAttention):
        inputs.args = (activations(module.dim),)
    else:
        _fill_simple_inputs(module, inputs)
    return bool(inputs.args or inputs.kwargs)


def _fill_simple_inputs(module: nn.Module, inputs: ExampleInputs) -> None:
    """Example inputs of projections, patches and positions."""
    if isinstance(module, Projections):
        sizes, other = module.sizes, "M" in inputs.known or module.sizes.context != module.sizes.input
        inputs.args = (activations(sizes.input),)
        inputs.args += (activations(sizes.context, symbol="M"),) if other else ()
        inputs.args += (activations(sizes.values, symbol="M"),) if sizes.values != sizes.context else ()
    elif isinstance(module, PatchEmbedding):
        inputs.args = (inputs.image(14 * module.stride, module.channels),)
        inputs.steps["R"] = inputs.steps["W"] = module.stride
    elif isinstance(module, LearnedPositions | SinusoidalPositions):
        inputs.limit(len(module.weight) if isinstance(module, LearnedPositions) else None)
        inputs.args = (InputSpec(("N",), torch.int64),)
    elif isinstance(module, GridPositions):
        image = (inputs.sizes["R"], inputs.sizes["W"])
        is_resized = {"R", "W"} <= inputs.known and image != module.grid
        inputs.kwargs["grid"] = image if is_resized else None
        inputs.numbers |= {"R", "W"}


__all__ = ["fill_inputs", "recognise"]
