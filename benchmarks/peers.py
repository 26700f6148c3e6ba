"""The best plain-torch forms of a sliding window, as a careful user would write them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention


def masked_sdpa(query: Tensor, key: Tensor, value: Tensor, reach: int) -> Tensor:
    """Dense SDPA with a boolean mask: simple, and it skips nothing."""
    place = torch.arange(query.shape[-2])
    mask = (place[:, None] - place).abs() <= reach
    return scaled_dot_product_attention(query, key, value, attn_mask=mask)


def chunked_sdpa(query: Tensor, key: Tensor, value: Tensor, reach: int, chunk: int) -> Tensor:
    """Chunks of queries against their unfolded neighbourhood of keys, one masked SDPA for all chunks."""
    batch, heads, tokens, dim = query.shape
    chunks = tokens // chunk
    width = chunk + 2 * reach
    keys = pad(key, (0, 0, reach, reach)).unfold(2, width, chunk).transpose(-1, -2)
    values = pad(value, (0, 0, reach, reach)).unfold(2, width, chunk).transpose(-1, -2)
    i, j = torch.arange(chunk)[:, None], torch.arange(width)
    place = torch.arange(chunks)[:, None] * chunk - reach + j
    mask = ((j >= i) & (j <= i + 2 * reach))[None] & ((place >= 0) & (place < tokens))[:, None]
    queries = query.reshape(batch, heads, chunks, chunk, dim)
    mask = mask.expand(batch * heads, chunks, chunk, width)
    output = scaled_dot_product_attention(
        queries.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1), attn_mask=mask
    )
    return output.reshape(batch, heads, tokens, dim)
