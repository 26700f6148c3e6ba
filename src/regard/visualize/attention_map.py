"""Attention maps of a model on one input; rows of weights are computed on demand."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
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
from regard.layers.windows import WindowAttention
from regard.patterns import Padding
from regard.visualize.inputs import Inputs, explaining_failures, read_inputs
from regard.visualize.labels import layer_titles

QUERIES_AT_ONCE = 256  # rows computed at once where many are needed
MOST_PIXELS = 4096


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """The attention weights of one layer on one text or image.

    Only requested rows are computed: with `n` queries and `m` keys, `rows([3])` takes memory for `m` weights of each
    head, never for `n m`.

    Attributes:
        name: of the module.
        queries, keys: query length and key length.
        rows: function from query positions to their weights, `(head, position, key)`.
        title: of the layer in a picture, with the index that selects it.
        grid: rows and columns of the tokens, for layers on a grid of their own.
    """

    name: str
    queries: int
    keys: int
    rows: Callable[[Sequence[int]], Tensor]
    title: str = "layer 0"
    grid: tuple[int, int] | None = None

    def pooled(self, cell: int) -> Tensor:
        """Max pooling over tiles of `cell` by `cell` pairs, `(head, tile, tile)`, a few rows at a time."""
        step = max(cell, QUERIES_AT_ONCE // cell * cell)
        parts = []
        for start in range(0, self.queries, step):
            rows = self.rows(range(start, min(start + step, self.queries)))
            parts += [_max_pool(rows[:, first : first + cell].amax(1), cell) for first in range(0, rows.shape[1], cell)]
        return torch.stack(parts, 1)


def attention_maps(model: nn.Module, *inputs: Any, **keywords: Any) -> list[AttentionMap]:
    """The attention map of every attention layer of a model on one input, in the order in which they run.

        >>> from regard.models import GPT, GPTConfig
        >>> from regard.visualize.attention_map import attention_maps
        >>> model = GPT(GPTConfig(vocab_size=11, context_length=16, dim=8, layers=2, heads=2))
        >>> first, second = attention_maps(model, torch.tensor([[1, 2, 3, 4]]))
        >>> first.name, round(first.rows([2])[0].sum().item(), 5), second.keys
        ('blocks.0.attention', 1.0, 4)

    Inputs are those of `show`: one tensor, array or list with or without a batch, or a dict of the model's keywords; or
    the model's own arguments. The model runs once, in eval mode, with forward hooks on the attention modules of
    Regard, torch (`nn.MultiheadAttention`) and timm; Hugging Face models return their weights themselves
    (`regard.visualize.third_party`).
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{type(model).__name__} is not a module.",
            asked=f"attention_maps({type(model).__name__}, ...)",
            because="attention layers are found among the submodules of a torch.nn.Module",
            instead="attention_maps(model, tokens)",
        )
    return read_attention(model, inputs, keywords)[1]


def read_attention(
    model: nn.Module, positional: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[Inputs, list[AttentionMap]]:
    """The inputs as the model takes them, and its attention maps."""
    inputs, found = _run_model(model, read_inputs(model, positional, keywords))
    if not found:
        raise InputError(
            f"No attention layer was found in {type(model).__name__}.",
            asked=f"show({type(model).__name__}, ...)",
            found=", ".join(sorted({type(module).__name__ for module in model.modules()})[:12]),
            because="weights are recomputed from the queries and keys of known attention layers: those of Regard,\n"
            "torch.nn.MultiheadAttention, timm's Attention and Hugging Face's",
            instead="the layer by itself, or HeadProfile.observed(weights, grid) if you have the weights",
        )
    titles = layer_titles([attention.name for attention in found])
    return inputs, [
        replace(attention, name=name, title=title)
        for attention, name, title in zip(found, _unique_names(found), titles, strict=True)
    ]


def _run_model(model: nn.Module, readings: list[Inputs]) -> tuple[Inputs, list[AttentionMap]]:
    """The first reading of the arguments on which the model runs; without one, our own refusal is raised first."""
    from regard.visualize import third_party

    run = third_party.read_hugging_face if is_huggingface(model) else _run_hooked
    failures = []
    for inputs in readings:
        try:
            with explaining_failures(model, inputs):
                return inputs, run(model, *inputs)
        except InputError as failure:
            failures.append(failure)
    raise next((failure for failure in failures if failure.__cause__ is None), failures[0])


def _unique_names(found: list[AttentionMap]) -> list[str]:
    """The names of the layers; a module that runs several times (shared weights) has the number of the run."""
    names: list[str] = []
    for attention in found:
        runs = sum(name == attention.name or name.startswith(f"{attention.name} (run ") for name in names)
        names.append(f"{attention.name} (run {runs})" if runs else attention.name)
    return names


def _run_hooked(model: nn.Module, inputs: tuple, keywords: dict) -> list[AttentionMap]:
    found: list[AttentionMap] = []
    hooks = []
    for name, module in model.named_modules():
        reader = _find_reader(module)
        if reader is not None and not _is_inside(name, [other for other, _ in hooks]):
            hooks.append((name, module.register_forward_pre_hook(_make_hook(name, reader, found), with_kwargs=True)))
    try:
        with eval_mode(model), torch.no_grad():
            model(*inputs, **keywords)
    finally:
        for _, hook in hooks:
            hook.remove()
    return found


def _is_inside(name: str, others: list[str]) -> bool:
    """Whether a module is a submodule of one of the others."""
    return any(name.startswith(f"{other}.") or other == "" for other in others)


def _make_hook(name: str, reader: Callable[..., AttentionMap], found: list[AttentionMap]) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: tuple, keywords: dict) -> None:
        found.append(reader(name, module, inputs, keywords))

    return hook


def _find_reader(module: nn.Module) -> Callable[..., AttentionMap] | None:
    """The function that reads the attention of a module; None for other modules."""
    from regard.visualize import third_party

    if isinstance(module, MultiHeadAttention):
        return _read_multihead
    if isinstance(module, SpatialAttention):
        return _read_converted
    if isinstance(module, WindowAttention):
        return _read_windows
    if isinstance(module, TableAttention):
        return _refuse_table
    if callable(getattr(module, "head_profile", None)):
        return _read_positional
    return third_party.find_reader(module)


# Layers of Regard


def _read_multihead(name: str, layer: MultiHeadAttention, inputs: tuple, keywords: dict) -> AttentionMap:
    given = inspect.signature(layer.forward).bind(*inputs, **keywords).arguments
    x, context, pattern = given["x"], given.get("context"), given.get("pattern")
    if given.get("cache") is not None or given.get("values") is not None:
        raise InputError(
            "A decode step cannot be shown.",
            asked=f"{name} with a cache, or with values",
            because="its keys are not those of the input",
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


def _read_positional(name: str, layer: nn.Module, inputs: tuple, keywords: dict) -> AttentionMap:
    """A layer with positional heads; where they depend on content too, its own `weights`."""
    answer: Any = layer
    try:
        profile = answer.head_profile()
    except InputError:
        x = inputs[0] if inputs else next(iter(keywords.values()))
        check_single(x)
        with torch.no_grad():
            square = answer.weights(x)[0]  # (head, query, key)
        return AttentionMap(name, square.shape[1], square.shape[2], lambda queries: square[:, list(queries)])
    count = profile.grid[0] * profile.grid[1]

    def rows(queries: Sequence[int]) -> Tensor:
        return torch.stack([grid_weights(profile, divmod(query, profile.grid[1])).flatten(1) for query in queries], 1)

    return AttentionMap(name, count, count, rows)


def _read_converted(name: str, layer: SpatialAttention, inputs: tuple, keywords: dict) -> AttentionMap:
    """A converted convolution, channels first; padding is not part of the map."""
    image = inputs[0]
    size = tuple(image.shape[-layer.axes :])
    check_single(image if image.ndim == layer.axes + 2 else image[None])
    count = math.prod(size)
    if count > MOST_PIXELS:
        raise InputError(
            "The image is too large for a converted convolution.",
            asked=f"{name} on {' x '.join(map(str, size))} pixels",
            because=f"its weights are computed for all pairs at once, of up to {MOST_PIXELS} pixels",
            instead="a smaller image; or show(layer), which needs none",
        )
    with torch.no_grad():
        square = layer.weights(size)[..., :count]
    return AttentionMap(name, square.shape[1], count, lambda queries: square[:, list(queries)])


def _read_windows(name: str, layer: WindowAttention, inputs: tuple, keywords: dict) -> AttentionMap:
    """A layer with windows on a grid, channels last; the weight of padding is missing in a row."""
    grid: Tensor = inputs[0] if inputs else keywords["grid"]
    check_single(grid)
    size = (grid.shape[1], grid.shape[2])

    @torch.no_grad()
    def rows(queries: Sequence[int]) -> Tensor:
        return layer.weights(grid, list(queries))[0]

    return AttentionMap(name, math.prod(size), math.prod(size), rows, grid=size)


def _refuse_table(name: str, layer: TableAttention, inputs: tuple, keywords: dict) -> AttentionMap:
    raise InputError(
        f"{type(layer).__name__} has no attention map on an image.",
        asked=f"{name or 'the layer'} on an image",
        because="it sums its tables before they meet the image, without weights of its own at the borders",
        instead="show(layer), which needs no image",
    )


def grid_weights(profile: HeadProfile, position: tuple[int, int]) -> Tensor:
    """Attention weights over the grid of the query at a position, `(head, row, column)`: a softmax inside the borders.

    >>> from regard.layers.profiles import head_profile
    >>> from regard.visualize.attention_map import grid_weights
    >>> grid_weights(head_profile(Quadratic(1, grid=(2, 3), centre=[[0, 1]], alpha=200.0)), (1, 0))[0].tolist()
    [[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    rows, columns = profile.grid
    row, column = position
    scores = profile.scores[:, rows - 1 - row : 2 * rows - 1 - row, columns - 1 - column : 2 * columns - 1 - column]
    flat = scores.flatten(1)
    unseen = flat.amax(-1, keepdim=True) == -torch.inf
    return flat.masked_fill(unseen, 0).softmax(-1).masked_fill(unseen, 0).view_as(scores)


def check_single(x: Tensor) -> None:
    """Raise for a batch of several."""
    if x.ndim > 2 and x.shape[0] != 1:
        raise InputError(
            "One text or image is shown at a time.",
            asked=f"a batch {tuple(x.shape)}",
            because="a picture shows one attention map",
            instead="images[:1], or a loop over them",
        )


def _max_pool(rows: Tensor, cell: int) -> Tensor:
    """The largest of each `cell` columns, `(head, tile)`."""
    return torch.stack([piece.amax(-1) for piece in rows.split(cell, -1)], -1)
