"""Compiled FlexAttention: torch's own answer to sparse patterns. Forward only, its CPU kernel has no backward."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.peers import Form
from regard import Random

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
COMPILERS = ("c++", "g++", "clang++", "clang")


def missing() -> str | None:
    """Why FlexAttention cannot be compiled here, or `None` when it can."""
    if not any(map(shutil.which, COMPILERS)):
        return f"no compiler: none of {', '.join(COMPILERS)} is installed"
    return None


def compiled_flex(tokens: int, mask_mod: MaskMod, *, block: int = 128) -> Form:
    """FlexAttention compiled for one mask and one length; the first call compiles, so that one is never timed."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Every mask and length is a program of its own, and beyond the usual limit of 8 torch would stop compiling.
    torch._dynamo.config.recompile_limit = 64
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    masks = []

    def form(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not masks:
            masks.append(create_block_mask(mask_mod, None, None, tokens, tokens, device="cpu", BLOCK_SIZE=block))
        return compiled(query, key, value, block_mask=masks[0])

    return form


# Masks one pair at a time, written so that the whole mask never needs a square of integers where that can be avoided.


def window(reach: int) -> MaskMod:
    return lambda batch, head, i, j: (j >= i - reach) & (j <= i + reach)


def dilated(reach: int, step: int) -> MaskMod:
    return lambda batch, head, i, j: (j >= i - reach * step) & (j <= i + reach * step) & ((i - j) % step == 0)


def causal_strided(step: int) -> MaskMod:
    return lambda batch, head, i, j: (j <= i) & ((i - j) % step == 0)


def big_bird(reach: int, first: int, random: Random, tokens: int) -> MaskMod:
    size = random.block
    blocks = -(-tokens // size)
    number = torch.arange(blocks)
    drawn = torch.zeros(blocks, blocks, dtype=torch.bool)
    drawn[number[:, None], torch.from_numpy(random.drawn(number.numpy(), tokens))] = True

    def mask_mod(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = (j >= i - reach) & (j <= i + reach)
        return near | (i < first) | (j < first) | drawn[i // size, j // size]

    return mask_mod
