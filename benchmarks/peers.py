"""The best plain-torch forms of attention, as a careful user would write them.

Each function here prepares what does not depend on the numbers, above all the masks, and returns a form: a function of
query, key and value. Masks are float, 0 or -inf: torch turns a boolean mask into one at every call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import elu, pad, scaled_dot_product_attention

from regard import Pattern, Random

Form = Callable[[Tensor, Tensor, Tensor], Tensor]


# Dense


def causal_sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def three_steps(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Product, softmax, product: for tiny windows it can be faster than the fused kernel."""
    batch, heads, _, dim = query.shape
    query, key, value = (tensor.flatten(0, 1) for tensor in (query, key, value))
    # beta=0 leaves the first argument unread, and alpha scales inside the product.
    scores = torch.baddbmm(query.new_zeros(1), query, key.mT, beta=0, alpha=dim**-0.5)
    return (scores.softmax(-1) @ value).unflatten(0, (batch, heads))


def masked_sdpa(pattern: Pattern, tokens: int) -> Form:
    """Dense SDPA with the pattern as a mask: simple, and it skips nothing."""
    mask = _to_additive_mask(pattern.matrix(tokens))
    return lambda query, key, value: scaled_dot_product_attention(query, key, value, attn_mask=mask)


def _to_additive_mask(allowed: Tensor) -> Tensor:
    return torch.zeros(allowed.shape).masked_fill_(~allowed, -torch.inf)


# Windows over a sequence


def chunked_window(tokens: int, reach: int, chunk: int, *, joined: bool = False) -> Form:
    """Chunks of queries against their neighbourhood of keys, one masked SDPA for all chunks.

    Neighbourhoods overlap: they are windows onto one padded tensor, or copies joined from whole chunks, whose gradient
    is cheaper.
    """
    chunks, width = tokens // chunk, chunk + 2 * reach
    assert tokens % chunk == 0
    assert not joined or 2 * reach % chunk == 0
    i, j = torch.arange(chunk)[:, None], torch.arange(width)
    place = torch.arange(chunks)[:, None] * chunk - reach + j
    mask = _to_additive_mask(((j >= i) & (j <= i + 2 * reach)) & ((place >= 0) & (place < tokens))[:, None])

    def neighbours(tensor: Tensor) -> Tensor:
        tensor = pad(tensor.flatten(0, 1), (0, 0, reach, reach))
        if not joined:
            return tensor.unfold(1, width, chunk).transpose(-1, -2)
        whole = tensor.unflatten(1, (-1, chunk))
        return torch.cat([whole[:, first : first + chunks] for first in range(width // chunk)], dim=2)

    def form(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        queries = query.flatten(0, 1).unflatten(1, (chunks, chunk))
        expanded_mask = mask.expand(queries.shape[0], -1, -1, -1)
        output = scaled_dot_product_attention(queries, neighbours(key), neighbours(value), attn_mask=expanded_mask)
        return output.reshape(query.shape)

    return form


def by_residue(step: int, inner: Form) -> Form:
    """Tokens that are `step` apart become sequences of their own, as extra heads."""

    def split(tensor: Tensor) -> Tensor:
        return tensor.unflatten(2, (-1, step)).transpose(2, 3).flatten(1, 2)

    def form(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = inner(split(query), split(key), split(value))
        return output.unflatten(1, (-1, step)).transpose(2, 3).flatten(2, 3)

    return form


def gathered_blocks(pattern: Pattern, random: Random, tokens: int, reach: int) -> Form:
    """`Window | First | Random` in blocks: the first block of queries is dense, the others gather their key blocks.

    A block that is gathered twice is hidden the second time.
    """
    size = random.block
    blocks, side = tokens // size, -(-reach // size)
    assert tokens % size == 0
    number = torch.arange(1, blocks)
    near = number[:, None] + torch.arange(-side, side + 1)
    drawn = torch.from_numpy(random.drawn(number.numpy(), tokens))
    index = torch.cat((torch.zeros(blocks - 1, 1, dtype=torch.long), near, drawn), dim=1)  # (query block, place)
    earlier = (index[:, :, None] == index[:, None, :]).tril(-1).any(-1)
    real = (index >= 0) & (index < blocks) & ~earlier
    index = index.clamp(0, blocks - 1)
    i = number[:, None] * size + torch.arange(size)
    j = (index[..., None] * size + torch.arange(size)).flatten(1)
    allowed = pattern.allows(i[:, :, None], j[:, None, :], keys=tokens) & real.repeat_interleave(size, 1)[:, None]
    mask = _to_additive_mask(allowed)

    def gather(tensor: Tensor) -> Tensor:
        return tensor.flatten(0, 1).unflatten(1, (blocks, size))[:, index].flatten(2, 3)

    def form(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        top = scaled_dot_product_attention(query[:, :, :size], key, value)
        queries = query[:, :, size:].flatten(0, 1).unflatten(1, (-1, size))
        expanded_mask = mask.expand(queries.shape[0], -1, -1, -1)
        rest = scaled_dot_product_attention(queries, gather(key), gather(value), attn_mask=expanded_mask)
        return torch.cat((top, rest.flatten(1, 2).unflatten(0, query.shape[:2])), dim=2)

    return form


# Neighbourhoods on a grid


def tiled_neighborhood(side: int, radius: int, tile: int) -> Form:
    """Square tiles of queries against the union of their neighbourhoods, one masked SDPA for all tiles."""
    tiles, width = side // tile, tile + 2 * radius
    assert side % tile == 0
    first = torch.arange(tiles)[:, None] * tile
    query_at = (first + torch.arange(tile))[:, :, None]
    key_at = (first - radius + torch.arange(width))[:, None, :]
    near = ((query_at - key_at).abs() <= radius) & (key_at >= 0) & (key_at < side)  # (tile, query, key) along one axis
    both = near[:, None, :, None, :, None] & near[None, :, None, :, None, :]
    mask = _to_additive_mask(both.reshape(tiles**2, tile**2, width**2))

    def cut(query: Tensor) -> Tensor:
        pieces = query.flatten(0, 1).unflatten(1, (tiles, tile, tiles, tile))
        return pieces.transpose(2, 3).reshape(-1, tiles**2, tile**2, query.shape[-1])

    def unions(tensor: Tensor) -> Tensor:
        image = pad(tensor.flatten(0, 1).unflatten(1, (side, side)), (0, 0, radius, radius, radius, radius))
        pieces = image.unfold(1, width, tile).unfold(2, width, tile)  # (head, tile, tile, dim, row, column)
        return pieces.permute(0, 1, 2, 4, 5, 3).reshape(-1, tiles**2, width**2, tensor.shape[-1])

    def form(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        queries = cut(query)
        expanded_mask = mask.expand(queries.shape[0], -1, -1, -1)
        output = scaled_dot_product_attention(queries, unions(key), unions(value), attn_mask=expanded_mask)
        return output.unflatten(2, (tile, tile)).unflatten(1, (tiles, tiles)).transpose(2, 3).reshape(query.shape)

    return form


# Causal linear attention


def chunked_linear(chunk: int, piece: int) -> Form:
    """Chunks meet the sums of all chunks before them and their own triangle.

    Pieces of `piece` tokens hand their sums on: a long sequence then makes no temporaries so large that the allocator
    gives them back at every call.
    """
    triangle = torch.ones(chunk, chunk).tril()

    def form(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tokens, dim = query.shape[-2:]
        heads = query.shape[0] * query.shape[1]
        sums, norms = torch.zeros(heads, 1, dim, dim), torch.zeros(heads, 1, dim)
        outputs = []
        for first in range(0, tokens, piece):
            part = slice(first, first + piece)
            queries = (elu(query[:, :, part]) + 1).reshape(-1, chunk, dim)
            keys = (elu(key[:, :, part]) + 1).reshape(-1, chunk, dim)
            values = value[:, :, part].reshape(-1, chunk, dim)
            sums = torch.cat((sums, (keys.mT @ values).unflatten(0, (heads, -1))), dim=1).cumsum(1)
            norms = torch.cat((norms, keys.sum(1).unflatten(0, (heads, -1))), dim=1).cumsum(1)
            own = (queries @ keys.mT) * triangle
            above = torch.baddbmm(own @ values, queries, sums[:, :-1].flatten(0, 1))
            below = own.sum(-1, keepdim=True) + queries @ norms[:, :-1].flatten(0, 1)[..., None]
            outputs.append((above / below).reshape(*query.shape[:2], -1, dim))
            sums, norms = sums[:, -1:], norms[:, -1:]
        return torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]

    return form


def square_linear(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal linear attention over the whole square, as the formula reads."""
    weight = ((elu(query) + 1) @ (elu(key) + 1).mT).tril()
    return weight @ value / weight.sum(-1, keepdim=True)
