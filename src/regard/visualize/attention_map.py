"""What the heads of each layer look at while a model runs: rows of weights are made when they are asked for."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.adapters.huggingface_attention import is_huggingface
from regard.errors import InputError
from regard.layers.modes import eval_mode
from regard.layers.multihead import MultiHeadAttention
from regard.layers.profiles import HeadProfile
from regard.layers.spatial import SpatialAttention
from regard.layers.tables import TableAttention
from regard.patterns import Padding
from regard.visualize.failures import explaining_failures
from regard.visualize.inputs import read_inputs
from regard.visualize.labels import layer_titles

# Queries whose rows are made at once, where many are asked for.
AT_ONCE = 256
MOST_PIXELS = 4096


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """What the heads of one layer look at, for one text or image.

    Only the rows that are asked for are made: of `n` queries and `m` keys, `rows([3])` takes memory for `m` weights of
    each head, never for `n m`.

    Attributes:
        name: of the module.
        queries, keys: how many there are.
        rows: from places of queries to their weights, `(head, place, key)`.
        title: of the layer in a picture, with the index that chooses it.
    """

    name: str
    queries: int
    keys: int
    rows: Callable[[Sequence[int]], Tensor]
    title: str = "layer 0"

    def pooled(self, cell: int) -> Tensor:
        """The largest weight in each tile of `cell` by `cell` pairs, `(head, tile, tile)`, a few rows at a time."""
        step = max(cell, AT_ONCE // cell * cell)
        parts = []
        for start in range(0, self.queries, step):
            rows = self.rows(range(start, min(start + step, self.queries)))
            parts += [_largest(rows[:, first : first + cell].amax(1), cell) for first in range(0, rows.shape[1], cell)]
        return torch.stack(parts, 1)


def attention_maps(model: nn.Module, *inputs: Any, **words: Any) -> list[AttentionMap]:
    """What every attention of a model sees while it reads one input, in the order in which they run.

        >>> from regard.models import GPT, GPTConfig
        >>> from regard.visualize.attention_map import attention_maps
        >>> model = GPT(GPTConfig(vocab_size=11, context_length=16, dim=8, layers=2, heads=2))
        >>> first, second = attention_maps(model, torch.tensor([[1, 2, 3, 4]]))
        >>> first.name, round(first.rows([2])[0].sum().item(), 5), second.keys
        ('blocks.0.attention', 1.0, 4)

    Inputs are those of `show`: one tensor, array or list with or without a batch, or a dict of the model's keywords; or
    the model's own arguments. The model runs once, in eval mode: hooks see what reaches each attention. Modules of
    Regard, of torch (`nn.MultiheadAttention`) and of timm are known by what they are; Hugging Face's are asked in their
    own way (`regard.visualize.third_party`).
    """
    from regard.visualize import third_party

    if not isinstance(model, nn.Module):
        raise InputError(
            f"{type(model).__name__} is no model.",
            asked=f"attention_maps({type(model).__name__}, ...)",
            because="attentions are found in the modules of a torch.nn.Module, and watched while it runs",
            instead="attention_maps(model, tokens)",
        )
    inputs, words = read_inputs(model, inputs, words)
    with explaining_failures(model, inputs, words):
        if is_huggingface(model):
            found = third_party.read_hugging_face(model, inputs, words)
        else:
            found = _run_hooked(model, inputs, words)
    if not found:
        raise InputError(
            f"Nothing in {type(model).__name__} is known to attend.",
            asked=f"show({type(model).__name__}, ...)",
            found=", ".join(sorted({type(module).__name__ for module in model.modules()})[:12]),
            because="weights are made again from the queries and keys of attentions that are known: those of Regard,\n"
            "torch.nn.MultiheadAttention, timm's Attention and Hugging Face's",
            instead="the layer by itself, or HeadProfile.observed(weights, grid) if you have the weights",
        )
    titles = layer_titles([attention.name for attention in found])
    return [
        replace(attention, name=name, title=title)
        for attention, name, title in zip(found, _unique_names(found), titles, strict=True)
    ]


def _unique_names(found: list[AttentionMap]) -> list[str]:
    """The names of the layers; a module that runs several times (layers that share weights) has its run beside it."""
    names: list[str] = []
    for attention in found:
        runs = sum(name == attention.name or name.startswith(f"{attention.name} (run ") for name in names)
        names.append(f"{attention.name} (run {runs})" if runs else attention.name)
    return names


def _run_hooked(model: nn.Module, inputs: tuple, words: dict) -> list[AttentionMap]:
    found: list[AttentionMap] = []
    hooks = []
    for name, module in model.named_modules():
        reader = _find_reader(module)
        if reader is not None and not _inside(name, [other for other, _ in hooks]):
            hooks.append((name, module.register_forward_pre_hook(_hook(name, reader, found), with_kwargs=True)))
    try:
        with eval_mode(model), torch.no_grad():
            model(*inputs, **words)
    finally:
        for _, hook in hooks:
            hook.remove()
    return found


def _inside(name: str, others: list[str]) -> bool:
    """Whether one of the modules that are watched already holds this one."""
    return any(name.startswith(f"{other}.") or other == "" for other in others)


def _hook(name: str, reader: Callable[..., AttentionMap], found: list[AttentionMap]) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: tuple, words: dict) -> None:
        found.append(reader(name, module, inputs, words))

    return hook


def _find_reader(module: nn.Module) -> Callable[..., AttentionMap] | None:
    """Who reads a module of this kind; None for modules that do not attend."""
    from regard.visualize import third_party

    if isinstance(module, MultiHeadAttention):
        return _multihead
    if isinstance(module, SpatialAttention):
        return _converted
    if isinstance(module, TableAttention):
        return _table
    if callable(getattr(module, "head_profile", None)):
        return _by_position
    return third_party.find_reader(module)


# Ours


def _multihead(name: str, layer: MultiHeadAttention, inputs: tuple, words: dict) -> AttentionMap:
    given = inspect.signature(layer.forward).bind(*inputs, **words).arguments
    x, context, pattern = given["x"], given.get("context"), given.get("pattern")
    if given.get("cache") is not None or given.get("values") is not None:
        raise InputError(
            "A step of decoding cannot be shown.",
            asked=f"{name} with a cache, or with values of their own",
            because="the keys are not those of what goes in",
            instead="the whole text at once: show(model, tokens)",
        )
    if given.get("lengths") is not None:
        hidden = Padding(given["lengths"], side="left")
        pattern = hidden if pattern is None else pattern & hidden
    x = x if x.ndim > 2 else x[None]
    check_single(x)
    rotation = given.get("rotation")

    @torch.no_grad()
    def rows(queries: Sequence[int]) -> Tensor:
        found = layer.weights(x, context, pattern=pattern, rotation=rotation, queries=list(queries))
        return found.flatten(0, -4)[0]

    return AttentionMap(name, x.shape[-2], (x if context is None else context).shape[-2], rows)


def _by_position(name: str, layer: nn.Module, inputs: tuple, words: dict) -> AttentionMap:
    """A layer whose heads look by position; where they look by content as well, it has its own weights."""
    answer: Any = layer
    try:
        profile = answer.head_profile()
    except InputError:
        x = inputs[0] if inputs else next(iter(words.values()))
        check_single(x)
        with torch.no_grad():
            square = answer.weights(x)[0]  # (head, query, key)
        return AttentionMap(name, square.shape[1], square.shape[2], lambda queries: square[:, list(queries)])
    count = profile.grid[0] * profile.grid[1]

    def rows(queries: Sequence[int]) -> Tensor:
        return torch.stack([grid_weights(profile, divmod(query, profile.grid[1])).flatten(1) for query in queries], 1)

    return AttentionMap(name, count, count, rows)


def _converted(name: str, layer: SpatialAttention, inputs: tuple, words: dict) -> AttentionMap:
    """A convolution that became attention, channels first; what lies beyond the edges is no place of the image."""
    image = inputs[0]
    size = tuple(image.shape[-layer.axes :])
    check_single(image if image.ndim == layer.axes + 2 else image[None])
    count = math.prod(size)
    if count > MOST_PIXELS:
        raise InputError(
            "The image is too large to be looked at by a converted convolution.",
            asked=f"{name} on {' x '.join(map(str, size))} pixels",
            because=f"its weights are made for all pairs at once, of up to {MOST_PIXELS} pixels",
            instead="a smaller image; or show(layer), which needs none",
        )
    with torch.no_grad():
        square = layer.weights(size)[..., :count]
    return AttentionMap(name, square.shape[1], count, lambda queries: square[:, list(queries)])


def _table(name: str, layer: TableAttention, inputs: tuple, words: dict) -> AttentionMap:
    raise InputError(
        f"{type(layer).__name__} cannot be watched on an image.",
        asked=f"{name or 'the layer'} on an image",
        because="it adds up its tables before it meets the image, and has no weights of its own at the edges",
        instead="show(layer), which needs no image",
    )


def grid_weights(profile: HeadProfile, place: tuple[int, int]) -> Tensor:
    """What the query at a place of the grid sees of the grid, `(head, row, column)`: the part of the endless image.

    >>> from regard.layers.profiles import head_profile
    >>> from regard.visualize.attention_map import grid_weights
    >>> grid_weights(head_profile(Quadratic(1, grid=(2, 3), centre=[[0, 1]], alpha=200.0)), (1, 0))[0].tolist()
    [[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    rows, columns = profile.grid
    row, column = place
    scores = profile.scores[:, rows - 1 - row : 2 * rows - 1 - row, columns - 1 - column : 2 * columns - 1 - column]
    flat = scores.flatten(1)
    blind = flat.amax(-1, keepdim=True) == -torch.inf
    return flat.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0).view_as(scores)


def check_single(x: Tensor) -> None:
    """Refuse a batch: a picture shows one."""
    if x.ndim > 2 and x.shape[0] != 1:
        raise InputError(
            "One text or image is shown at a time.",
            asked=f"a batch {tuple(x.shape)}",
            because="every one of them is looked at differently",
            instead="images[:1], or a loop over them",
        )


def _largest(rows: Tensor, cell: int) -> Tensor:
    """The largest of each `cell` columns, `(head, tile)`."""
    return torch.stack([piece.amax(-1) for piece in rows.split(cell, -1)], -1)
