"""Linear attention is a recurrence: the same numbers from a whole run and from a state of fixed size.

A feature map replaces the exponential by an inner product. Then the past fits into two sums, and a token
costs the same however long the past is.
"""

from __future__ import annotations

import torch

from regard import Causal, attend, step

TOKENS, HEADS, DIM = 61, 3, 16


def main() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, HEADS, TOKENS, DIM)
    query, key = query / 2, key / 2
    exact = attend(query, key, value, pattern=Causal())

    print("feature map   whole run - steps   whole run - softmax   numbers in the state")
    for name in ("elu1", "relu", "taylor2", "favor+"):
        whole = attend(query, key, value, pattern=Causal(), feature_map=name)
        state, outputs = None, []
        for now in range(TOKENS):
            token = (tensor[:, :, now : now + 1] for tensor in (query, key, value))
            output, state = step(*token, state, feature_map=name)
            outputs.append(output)
        stepped = torch.cat(outputs, dim=2)
        torch.testing.assert_close(stepped, whole, rtol=1e-4, atol=1e-4)
        size = 0 if state is None else state.sums.numel() + state.norm.numel()
        apart, away = float((stepped - whole).abs().max()), float((whole - exact).abs().mean())
        print(f"{name:<12}  {apart:>17.1e}  {away:>20.3f}  {size:>21,}")
    print("\ntaylor2 and favor+ approximate the softmax; elu1 and relu are kernels of their own.")


if __name__ == "__main__":
    main()
