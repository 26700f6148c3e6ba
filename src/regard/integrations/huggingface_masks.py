"""The mask functions of Hugging Face transformers as patterns.

A model of transformers describes its mask by a function of four indices, composed of few kinds; it is true where

    causal                 key <= query
    sliding window         key > query - window;  |query - key| <= window where it is bidirectional
    chunked                (key - left) // chunk == (query - left) // chunk      left: padding tokens before the row
    packed, blockwise      id[query] == id[key];  and id >= 0 where it is blockwise
    padding                attention_mask[key]
    and, or                of several

Each kind is recognised by its code, and is compared with its pattern at small lengths when it is first met, so that
another version of the library cannot change its meaning unnoticed. What is not recognised is evaluated, and becomes a
`Mask`.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.integrations.pattern_mask import PatternMask, is_jit_traced
from regard.patterns import Blocks, Causal, Full, Lengths, Mask, Padding, Pattern, Segments, Window


class UnknownMask(Exception):
    """A mask function, or lengths, for which there is no pattern; the text says why."""


class Layout(NamedTuple):
    """Where queries and keys of one call sit.

    Attributes:
        batch: rows.
        queries: their number.
        keys: how many are used: later ones are hidden from all queries.
        key_offset: the absolute position of the first key.
        aligned: whether the last query sits on the last used key, as patterns have it.
    """

    batch: int
    queries: int
    keys: int
    key_offset: int
    aligned: bool


def make_pattern_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of a model with `attn_implementation="regard"`: arguments as `masking_utils.sdpa_mask` takes them.

    `None` where the one query of a decode step sees all keys. Elsewhere a `PatternMask`, also where a bidirectional
    mask hides nothing: without one, a layer that does not say whether it is causal would count as such. Under
    torch.compile, in torch.jit.trace and with fake tensors it is the dense mask, since there are no values to look at.
    """
    library: Any = sys.modules["transformers.masking_utils"]
    function: Callable = library.causal_mask_function if mask_function is None else mask_function
    dense_arguments = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": function,
        "attention_mask": attention_mask,
        "allow_is_bidirectional_skip": allow_is_bidirectional_skip,
        **kwargs,
    }
    if is_jit_traced() or library.is_tracing(attention_mask) or library.is_tracing(q_offset):
        return library.sdpa_mask(**dense_arguments, allow_is_causal_skip=False)
    if torch.device(kwargs.get("device", "cpu")).type != "cpu":
        return library.sdpa_mask(**dense_arguments, allow_is_causal_skip=allow_is_causal_skip)
    first_query = int(q_offset)
    padding = library.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:batch_size, kv_offset : kv_offset + kv_length]
    local = kwargs.get("local_size")
    is_local = local is not None and kv_length >= local
    is_open = not is_local and (padding is None or bool(padding.all()))
    sees_all = allow_is_causal_skip and q_length == 1 and first_query + 1 - kv_offset == kv_length
    if is_open and sees_all:
        return None
    shape = (batch_size, 1, q_length, kv_length)
    try:
        return _translate(function, padding, shape, first_query, kv_offset)
    except UnknownMask as reason:
        _explain_once(str(reason))
        dense = library.sdpa_mask(**dense_arguments, allow_is_causal_skip=False)
        return PatternMask(Mask(dense), shape, kv_length, key_offset=kv_offset)  # type: ignore[call-overload]


def _translate(
    mask_function: Callable, padding: Tensor | None, shape: tuple[int, ...], first_query: int, key_offset: int
) -> PatternMask:
    batch, _, queries, keys = shape
    used = first_query + queries - key_offset
    layout = Layout(batch, queries, keys, key_offset, aligned=used == keys)
    pattern = find_pattern(mask_function, layout._replace(aligned=True))
    if used != keys and not pattern.is_key_padding:
        # A static cache has free slots behind the newest token.
        if not 0 < used < keys or not pattern._hides_future:
            raise UnknownMask(f"{queries} queries from position {first_query} on do not end where {keys} keys end")
        layout = layout._replace(keys=used)
        pattern = find_pattern(mask_function, layout)
    padded = Full() if padding is None else find_padding(padding[:, : layout.keys])
    joined = pattern if padded.is_full else padded if pattern.is_full else pattern & padded
    return PatternMask(joined, shape, layout.keys, padded, key_offset)


def find_pattern(mask_function: Callable, layout: Layout) -> Pattern:
    """The pattern with the pairs of a mask function; raises `UnknownMask` where there is none."""
    library: Any = sys.modules["transformers.masking_utils"]
    if mask_function is library.causal_mask_function:
        return Causal()
    if mask_function is library.bidirectional_mask_function:
        return Full()
    code: Any = getattr(mask_function, "__code__", None)
    kind = _list_kinds().get(code)
    if kind is None or mask_function.__closure__ is None:
        name = f"{getattr(mask_function, '__module__', '')}.{getattr(mask_function, '__qualname__', mask_function)}"
        raise UnknownMask(f"the mask function {name} is none of masking_utils")
    enclosed = {
        name: cell.cell_contents for name, cell in zip(code.co_freevars, mask_function.__closure__, strict=True)
    }
    return kind(layout=layout, **enclosed)


def find_padding(visible: Tensor) -> Pattern:
    """The pattern of a 2-D attention mask `(batch, key)` of booleans: `Padding` on one side, or a mask of keys."""
    counts, keys = visible.sum(-1), visible.shape[-1]
    if bool((counts == keys).all()):
        return Full()
    place = torch.arange(keys, device=visible.device)
    if torch.equal(visible, place < counts[:, None]):
        return Padding(counts)
    if torch.equal(visible, place >= keys - counts[:, None]):
        return Padding(counts, side="left")
    return Mask(visible[:, None, None])


# The kinds; arguments have the names that the closures of masking_utils give them


def _make_window(layout: Layout, sliding_window: int) -> Pattern:
    return Window(sliding_window - 1, max(layout.keys, layout.queries))


def _make_bidirectional_window(layout: Layout, sliding_window: int) -> Pattern:
    return Window(sliding_window, sliding_window)


def _make_chunks(layout: Layout, chunk_size: int, left_padding: Tensor) -> Pattern:
    start = left_padding.to("cpu") - layout.key_offset
    if not bool((start % chunk_size).any()):
        return Blocks(chunk_size)
    chunk = torch.div(torch.arange(layout.keys) - start[:, None], chunk_size, rounding_mode="floor")
    return Segments(chunk - chunk.min())


def _make_packed(layout: Layout, packed_sequence_mask: Tensor) -> Pattern:
    ids = _cut_table(packed_sequence_mask, layout)
    return Segments(ids - ids.min())


def _make_blockwise(layout: Layout, block_sequence_ids: Tensor) -> Pattern:
    return Segments(_cut_table(block_sequence_ids, layout))


def _make_key_mask(layout: Layout, padding_mask: Tensor) -> Pattern:
    return find_padding(_cut_table(padding_mask.bool(), layout))


def _cut_table(table: Tensor, layout: Layout) -> Tensor:
    """The entries of a table `(batch, absolute position)` that belong to the keys."""
    cut = table[:, layout.key_offset : layout.key_offset + layout.keys]
    if cut.shape[1] != layout.keys or cut.shape[0] not in (1, layout.batch):
        raise UnknownMask(f"a table of shape {tuple(table.shape)} has no entry for each of {layout.keys} keys")
    return cut.expand(layout.batch, -1)


def _intersect(layout: Layout, mask_functions: tuple[Callable, ...]) -> Pattern:
    pattern: Pattern = Full()
    for part in (find_pattern(function, layout) for function in mask_functions):
        pattern = part if pattern.is_full else pattern if part.is_full else (pattern & part)._simplify()
    return pattern


def _unite(layout: Layout, mask_functions: tuple[Callable, ...]) -> Pattern:
    first, *others = (find_pattern(function, layout) for function in mask_functions)
    return functools.reduce(lambda left, right: left | right, others, first)


def _shift(layout: Layout, mask_function: Callable, q_offset: int, kv_offset: int) -> Pattern:
    if int(q_offset) != int(kv_offset):
        raise UnknownMask("queries and keys are shifted by different offsets")
    return find_pattern(mask_function, layout._replace(key_offset=layout.key_offset + int(kv_offset)))


@functools.lru_cache(1)
def _list_kinds() -> dict[Any, Callable[..., Pattern]]:
    """The maker of the pattern for the code of each kind of mask function, of those that mean what is written here."""
    library: Any = sys.modules["transformers.masking_utils"]
    ids = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 2, 2]])
    examples = [
        ("sliding_window_overlay", (3,), _make_window),
        ("sliding_window_bidirectional_overlay", (2,), _make_bidirectional_window),
        ("chunked_overlay", (3, torch.tensor([0, 2])), _make_chunks),
        ("blockwise_overlay", (ids - 1,), _make_blockwise),
        ("padding_mask_function", (ids > 0,), _make_key_mask),
        ("packed_sequence_mask_function", (ids,), _make_packed),
        ("and_masks", (library.causal_mask_function, library.bidirectional_mask_function), _intersect),
        ("or_masks", (library.causal_mask_function, library.bidirectional_mask_function), _unite),
        ("add_offsets_to_mask_function", (library.causal_mask_function, 2, 2), _shift),
    ]
    kinds: dict[Any, Callable[..., Pattern]] = {}
    for name, arguments, maker in examples:
        build = getattr(library, name, None)
        if build is not None:
            function = build(*arguments)
            kinds[function.__code__] = maker
            if not _is_equal(function, maker, kinds):
                del kinds[function.__code__]
    return kinds


def _is_equal(function: Any, maker: Callable[..., Pattern], kinds: dict) -> bool:
    """Whether a mask function and its pattern allow the same pairs of 4 queries and 7 keys in two rows."""
    enclosed = {n: c.cell_contents for n, c in zip(function.__code__.co_freevars, function.__closure__, strict=True)}
    layout = Layout(2, 4, 7, 0, aligned=True)
    try:
        # The parts of a composed function are the plain ones, which need no kinds.
        pattern = maker(layout=layout, **enclosed)
    except (TypeError, UnknownMask):  # another closure than the one that is known
        return False
    row, i, j = torch.arange(2)[:, None, None], torch.arange(3, 7)[:, None], torch.arange(7)
    expected = torch.as_tensor(function(row, 0, i, j)).expand(2, 4, 7)
    return torch.equal(pattern.matrix(*Lengths(4, 7)).expand(2, 4, 7), expected)


_explained: set[str] = set()


def _explain_once(reason: str) -> None:
    """Say once for each reason that a mask is dense."""
    if reason not in _explained:
        _explained.add(reason)
        warnings.warn(
            f"A mask of this model has no pattern, because {reason}. It is evaluated for every pair of a query and a "
            "key and used as Mask(...): the result is the same, memory and planning grow with the square.",
            stacklevel=3,
        )
