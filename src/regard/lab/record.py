"""Every attention of one run of a model, kept as queries, keys and values: `record_run`."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard.adapters import attention_readers
from regard.adapters.attention_readers import AttentionRows
from regard.adapters.huggingface_attention import is_huggingface, record_attention
from regard.errors import InputError
from regard.lab.layer_heads import DescribedHeads, LayerHeads
from regard.layers.modes import eval_mode
from regard.layers.multihead import MultiHeadAttention
from regard.layers.windows import WindowAttention
from regard.models.spatial import SpatialHeads
from regard.patterns import Padding
from regard.visualize.attention_map import AttentionMap, attention_maps

# Words in the names of modules that attend from one sequence to another.
CROSS = re.compile(r"cross|encoder_attn|encdec|enc_dec|multihead_attn", re.IGNORECASE)
CAUSAL_PROBE = 17  # rows that are looked at to see whether a layer without a description is causal


class TooLarge(InputError):
    """What a run would hold is more than the memory that it may take."""


def record_run(
    model: nn.Module,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    check: Callable[[], None] = lambda: None,
    most_bytes: int | None = None,
) -> list[LayerHeads]:
    """The heads of every attention layer, in the order in which they run.

    check: called before every layer; raises to end the run.
    most_bytes: of what is held; more is refused with `TooLarge`.
    """
    guards = [
        module.register_forward_pre_hook(lambda *_: check())
        for name, module in model.named_modules()
        if not name.count(".") or name.rpartition(".")[2].isdigit()
    ]
    try:
        if is_huggingface(model):
            found = [_from_rows(rows) for rows in record_attention(model, arguments, dict(keywords))]
        else:
            found = _run_hooked(model, arguments, keywords, most_bytes)
    finally:
        for guard in guards:
            guard.remove()
    if not found:
        found = [_from_map(each) for each in attention_maps(model, *arguments, **keywords)]
    _check_memory(found, most_bytes)
    return _name_streams(found)


def _check_memory(found: list[LayerHeads], most_bytes: int | None) -> None:
    held = sum(layer.bytes for layer in found)
    if most_bytes is not None and held > most_bytes:
        raise TooLarge(
            "The input is too long for the memory of the lab.",
            asked=f"the queries, keys and values of {found[0].queries:,} tokens",
            found=f"{held >> 20:,} MB in {len(found)} layers and more, and the limit is {most_bytes >> 20:,} MB",
            because="rows of weights are computed from them when they are asked for",
            instead="a shorter input, or regard lab --memory with more megabytes",
        )


# Our layers, torch's and timm's


def _run_hooked(
    model: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any], most_bytes: int | None
) -> list[LayerHeads]:
    found: list[LayerHeads | AttentionRows] = []
    hooks: list[tuple[str, Any]] = []

    def make_hook(name: str, read: Callable[..., LayerHeads | AttentionRows]) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple, words: dict) -> None:
            found.append(read(name, module, inputs, words))
            _check_memory([layer for layer in found if isinstance(layer, LayerHeads)], most_bytes)

        return hook

    try:
        for name, module in model.named_modules():
            read = _find_reader(module)
            inside = any(name.startswith(f"{other}.") or other == "" for other, _ in hooks)
            if read is not None and not inside:
                hooks.append((name, module.register_forward_pre_hook(make_hook(name, read), with_kwargs=True)))
        if hooks:
            with eval_mode(model), torch.no_grad():
                model(*arguments, **keywords)
    finally:
        for _, hook in hooks:
            hook.remove()
    # Afterwards: the rows of torch's layers come from the layers themselves, which would meet the hooks again.
    return [layer if isinstance(layer, LayerHeads) else _from_rows(layer) for layer in found]


def _find_reader(module: nn.Module) -> Callable[..., LayerHeads | AttentionRows] | None:
    if isinstance(module, MultiHeadAttention):
        return _read_multihead
    if isinstance(module, WindowAttention):
        return _read_windows
    if isinstance(module, SpatialHeads):
        return _read_spatial
    return attention_readers.find_reader(module)


def _read_multihead(name: str, layer: MultiHeadAttention, inputs: tuple, keywords: dict) -> LayerHeads:
    given = inspect.signature(layer.forward).bind(*inputs, **keywords).arguments
    x: Tensor = given["x"]
    context, pattern = given.get("context"), given.get("pattern")
    if given.get("lengths") is not None:
        hidden = Padding(given["lengths"], side="left")
        pattern = hidden if pattern is None else pattern & hidden
    x = x if x.ndim > 2 else x[None]
    context = context if context is None or context.ndim > 2 else context[None]
    with torch.no_grad():
        projected = layer.project_heads(
            x, context, given.get("values"), pattern=pattern, rotation=given.get("rotation")
        )
    # A copy of its own, so that what is kept is what is counted: the projections are views of one another.
    query, key, value = (part.flatten(0, -4)[0].clone() for part in projected[:3])
    rows = DescribedHeads(query, key, projected[3])
    return LayerHeads(
        name,
        "self" if context is None else "cross",
        query.shape[0],
        query.shape[1],
        key.shape[1],
        rows.all_rows,
        rows.one_head_rows,
        value,
        None if layer.attention.feature_map is not None else layer.output.weight,
        causal=context is None and rows.is_causal,
        tensors=(query, key),
    )


def _read_windows(name: str, layer: WindowAttention, inputs: tuple, keywords: dict) -> LayerHeads:
    grid: Tensor = inputs[0] if inputs else keywords["grid"]
    size = (int(grid.shape[1]), int(grid.shape[2]))
    count = size[0] * size[1]
    with torch.no_grad():
        value = layer.qkv(grid)[0].flatten(0, 1).unflatten(-1, (3, layer.heads, -1))[:, 2].transpose(0, 1).clone()

    def rows(queries: Any) -> Tensor:
        return layer.weights(grid, list(queries))[0]

    return LayerHeads(
        name,
        "self",
        layer.heads,
        count,
        count,
        rows,
        value=value,
        output=layer.proj.weight,
        grid=size,
        tensors=(grid,),
    )


def _read_spatial(name: str, layer: SpatialHeads, inputs: tuple, keywords: dict) -> LayerHeads:
    x: Tensor = inputs[0] if inputs else keywords["x"]
    with torch.no_grad():
        square = layer.weights(x)[0]  # of at most some thousand tokens: the layer's own tables are as large
        value = x.flatten(1, 2).clone()  # one value head, which all heads share
    heads, queries, keys = square.shape
    return LayerHeads(
        name,
        "self",
        heads,
        queries,
        keys,
        lambda queries: square[:, list(queries)],
        lambda queries, head: square[head : head + 1, list(queries)],
        value,
        layer.value.weight,
        layer.grid,
        tensors=(square,),
    )


# Layers that others read


def _from_rows(found: AttentionRows) -> LayerHeads:
    single = found.head_rows
    heads = found.rows([0]).shape[1]
    value = None if found.value is None else found.value[0].clone()
    layer = LayerHeads(
        found.name,
        "cross" if CROSS.search(found.name) else "self",
        heads,
        found.queries,
        found.keys,
        lambda queries: found.rows(queries)[0],
        None if single is None else lambda queries, head: single(queries, head)[0],
        value,
        found.output,
        tensors=_find_held_tensors(found),
    )
    return dataclasses.replace(layer, causal=layer.stream == "self" and _is_causal(layer))


def _find_held_tensors(found: AttentionRows) -> tuple[Tensor, ...]:
    """The tensors that the functions of a record hold."""
    held: list[Tensor] = [found.query]
    for function in (found.rows, found.head_rows):
        cells = getattr(function, "__closure__", None) or ()
        held += [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, Tensor)]
        owner = getattr(function, "__self__", None)
        held += [part for part in vars(owner).values() if isinstance(part, Tensor)] if owner is not None else []
    return tuple(held)


def _from_map(found: AttentionMap) -> LayerHeads:
    heads = found.rows([0]).shape[0]
    return LayerHeads(found.name, "self", heads, found.queries, found.keys, found.rows, grid=found.grid)


def _is_causal(layer: LayerHeads) -> bool:
    """Whether no weight of some rows lies after its query."""
    if layer.queries != layer.keys or layer.queries < 2:
        return False
    places = sorted({round(i * (layer.queries - 2) / (CAUSAL_PROBE - 1)) for i in range(CAUSAL_PROBE)})
    rows = layer.rows(places)
    return all(not bool(rows[:, n, place + 1 :].any()) for n, place in enumerate(places))


def _name_streams(found: list[LayerHeads]) -> list[LayerHeads]:
    """In an encoder-decoder, attention of a sequence to itself belongs to the encoder or to the decoder."""
    if not any(layer.stream == "cross" for layer in found):
        return found
    named = []
    for layer in found:
        stream = layer.stream
        if stream == "self":
            stream = "decoder" if "decoder" in layer.name else "encoder"
        named.append(dataclasses.replace(layer, stream=stream))
    return named
