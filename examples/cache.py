"""Decode token by token with a cache, and get what one run over the whole sequence gives.

Unequal lengths align at the end: one new query sits on the newest key. So the same pattern serves a prompt, a
step and a training run, and a window tells how many keys a cache has to keep.
"""

from __future__ import annotations

import torch

from regard import Alibi, Attention, Causal, First, Window, attend

TOKENS, PROMPT, HEADS, KEY_HEADS, DIM = 41, 23, 4, 2, 16


def main() -> None:
    torch.manual_seed(0)
    query = torch.randn(1, HEADS, TOKENS, DIM)
    key, value = torch.randn(2, 1, KEY_HEADS, TOKENS, DIM)  # grouped heads: two query heads share a key head
    pattern = Causal() & (First(2) | Window(7, 0))
    attention = Attention(pattern, bias=Alibi(HEADS))

    whole = attend(query, key, value, attention)

    pieces = [attend(query[:, :, :PROMPT], key[:, :, :PROMPT], value[:, :, :PROMPT], attention)]
    for now in range(PROMPT, TOKENS):
        past = slice(0, now + 1)  # everything in the cache, the new token included
        pieces.append(attend(query[:, :, now : now + 1], key[:, :, past], value[:, :, past], attention))
    stepped = torch.cat(pieces, dim=2)

    torch.testing.assert_close(stepped, whole)
    print(f"a prompt of {PROMPT} tokens and {TOKENS - PROMPT} steps agree with one run over {TOKENS} tokens")
    print(f"largest difference {float((stepped - whole).abs().max()):.1e}")
    print("\nwhat the last three queries see of 24 keys:")
    print(pattern.draw(3, 24))


if __name__ == "__main__":
    main()
