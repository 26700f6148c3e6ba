"""Windows, blocks and shifts that let one pair too many, or one too few, interact."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from zoo.exhibit import Exhibit, given, report

from regard.patterns import Blocks, Causal, Where, Window


def places(rows, columns):
    return torch.arange(columns - rows, columns)[:, None], torch.arange(columns)[None, :]


def sliding(q, k, v, window=5):
    """Itself and the four keys before it."""
    i, j = places(q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(j <= i) & (i - j < window))


def sliding_inclusive(q, k, v, window=5):
    i, j = places(q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(j <= i) & (i - j <= window))


def sliding_or_flash(q, k, v, flash=False):
    return sliding(q, k, v)


def sliding_or_flash_inclusive(q, k, v, flash=False):
    """window_size=(left, right) is inclusive there."""
    return sliding_inclusive(q, k, v) if flash else sliding(q, k, v)


# WI3: one setting for layers of two kinds


def stack(swa_types, window=5):
    """The attention of the last layer of a model whose layers alternate."""

    def full_attention_layer(q, k, v):
        i, j = places(q.shape[2], k.shape[2])
        mask = j <= i
        if swa_types[-1] == "standard":
            mask = mask & (i - j < window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return full_attention_layer


# WI4: a branch that ignores the window


def mistral(q, k, v, use_sdpa=False):
    i, j = places(q.shape[2], k.shape[2])
    mask = (j <= i) & (i - j < 7)
    if use_sdpa:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(~mask, -1e30).softmax(-1) @ v


def mistral_without_flash(q, k, v, use_sdpa=True):
    i, j = places(q.shape[2], k.shape[2])
    if use_sdpa:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=j <= i)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(~((j <= i) & (i - j < 7)), -1e30).softmax(-1) @ v


# PA9: shifted windows over a row that does not divide


def _square(q, k):
    if q.shape[2] != k.shape[2]:
        raise ValueError("as many queries as keys are needed")


def _windows(x, size):
    return x.unflatten(2, (-1, size))


def _shifted(q, k, v, size, shift, pad_first):
    _square(q, k)
    n = q.shape[2]
    extra = -n % size
    token = torch.arange(n)
    fill = (0, 0, 0, extra)
    if pad_first:
        q, k, v = (F.pad(x, fill).roll(-shift, 2) for x in (q, k, v))
        token = F.pad(token, (0, extra), value=-1).roll(-shift)
    else:
        q, k, v = (F.pad(x.roll(-shift, 2), fill) for x in (q, k, v))
        token = F.pad(token.roll(-shift), (0, extra), value=-1)
    place = torch.arange(n + extra)
    # The last window holds the end and, behind it, what was rolled around from the start.
    region = torch.where(place < n + extra - size, 0, torch.where(place < n + extra - shift, 1, 2))
    region, owner = region.view(-1, size), token.view(-1, size)
    allowed = (region[:, :, None] == region[:, None, :]) & (owner[:, None, :] >= 0)
    allowed = allowed | torch.eye(size, dtype=torch.bool)
    out = F.scaled_dot_product_attention(*(_windows(x, size) for x in (q, k, v)), attn_mask=allowed).flatten(2, 3)
    return out.roll(shift, 2)[:, :, :n] if pad_first else out[:, :, :n].roll(shift, 2)


def shifted_windows(q, k, v):
    return _shifted(q, k, v, 4, 2, pad_first=True)


def shifted_windows_padded_late(q, k, v):
    return _shifted(q, k, v, 4, 2, pad_first=False)


def same_shifted_window(i, j):
    return (i + 2) // 4 == (j + 2) // 4


# LA3: a list of blocks to visit


def _visited(q, k, v, block, visits):
    """Documents of `block` tokens, each block of queries with the blocks of keys that it visits."""
    _square(q, k)
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for r in range(0, q.shape[2], block):
        columns = torch.cat([torch.arange(c, min(c + block, k.shape[2])) for c in visits(r)])
        scores = q[:, :, r : r + block] @ k[:, :, columns].mT / math.sqrt(q.shape[-1])
        out[:, :, r : r + block] = scores.softmax(-1) @ v[:, :, columns]
    return out


def own_block(q, k, v):
    return _visited(q, k, v, 16, lambda r: [r])


def own_block_and_a_stale_one(q, k, v):
    """The list of blocks is not cleared where there are more than two: the one before is visited again."""
    return _visited(q, k, v, 16, lambda r: [r - 16, r] if r >= 32 else [r])


# Our own


def banded_by_chunks(q, k, v, radius=3, chunk=8, slack=0):
    """A band around the diagonal, computed chunk by chunk with its neighbours."""
    _square(q, k)
    n = k.shape[2]
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for r in range(0, n, chunk):
        i = torch.arange(r, min(r + chunk, n))
        j = torch.arange(max(0, r - radius), min(n, r + chunk + radius))
        near = (j[None, :] - i[:, None]).abs() <= radius
        if slack and r >= 2 * chunk:
            near[0, 0] = False  # an off-by-one at the seam
        scores = (q[:, :, i] @ k[:, :, j].mT / math.sqrt(q.shape[-1])).masked_fill(~near, -1e30)
        out[:, :, i] = scores.softmax(-1) @ v[:, :, j]
    return out


def banded(q, k, v):
    return banded_by_chunks(q, k, v)


def banded_with_a_seam(q, k, v):
    return banded_by_chunks(q, k, v, slack=1)


EXHIBITS = [
    Exhibit(
        "WI1",
        report("huggingface/transformers/issues/39408"),
        "A window of five lets six keys be seen.",
        "operator",
        given(sliding_inclusive),
        given(sliding),
        ("support",),
        ("support", "causality"),
        {"pattern": Window(4, 0)},
    ),
    Exhibit(
        "WI1-flash",
        report("huggingface/transformers/issues/39408"),
        "The flash path counts the window otherwise than the eager one.",
        "operator",
        given(sliding_or_flash_inclusive),
        given(sliding_or_flash),
        ("paths",),
        ("support", "paths"),
        {"pattern": Window(4, 0)},
    ),
    Exhibit(
        "WI3",
        report("ggml-org/llama.cpp/pull/15811"),
        "The window of some layers is applied to all of them.",
        "operator",
        lambda: stack(["standard", "standard"]),
        lambda: stack(["standard", "none"]),
        ("support",),
        ("support", "causality"),
        {"pattern": Causal()},
    ),
    Exhibit(
        "WI4",
        report("unslothai/unsloth/pull/8253"),
        "The window is never handed to the branch that runs when flash is absent.",
        "operator",
        given(mistral_without_flash),
        given(mistral),
        ("support", "paths"),
        ("support", "paths", "causality"),
        {"pattern": Window(6, 0)},
    ),
    Exhibit(
        "PA9",
        report("huggingface/pytorch-image-models/issues/2438"),
        "Padding comes after the shift, so both ends of the row meet in one window.",
        "operator",
        given(shifted_windows_padded_late),
        given(shifted_windows),
        ("support",),
        ("support", "batch-independence"),
        {"pattern": Where(same_shifted_window)},
    ),
    Exhibit(
        "LA3",
        report("pytorch/pytorch/issues/141126"),
        "From the third block on, a block that the mask does not name is visited.",
        "operator",
        given(own_block_and_a_stale_one),
        given(own_block),
        ("support",),
        ("support", "batch-independence"),
        {"pattern": Blocks(16)},
    ),
    Exhibit(
        "L8-seam",
        "",
        "At the seam of two chunks one pair of the band is lost.",
        "operator",
        given(banded_with_a_seam),
        given(banded),
        ("support",),
        ("support", "batch-independence"),
        {"pattern": Window(3, 3)},
    ),
]
