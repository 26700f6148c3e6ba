"""A convolution is attention (Cordonnier, Loukas and Jaggi, ICLR 2020, theorem 1), and a network of them is one too.

Each tap of a kernel becomes a head that attends to one fixed offset; its values are multiplied by the tap.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard import attention_to_conv, conv_to_attention
from regard.convert import convert_network, restore_network, steepness

ROWS, COLUMNS = 7, 11


def apart(mine: Tensor, theirs: Tensor) -> str:
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    return f"{float((mine - theirs).abs().max()):.1e}"


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 5, kernel_size=3, stride=2, padding=1)
    image = torch.randn(2, 3, ROWS, COLUMNS)

    heads = conv_to_attention(conv)
    print(f"{heads.heads} heads that pick a pixel each:        apart by {apart(heads(image), conv(image))}")

    soft = conv_to_attention(conv, exact=False, tolerance=1e-6)
    width = f"alpha = {soft.alpha[0]:.0f} >= {steepness(1e-6, null=True):.2f}"
    print(f"soft heads, {width}:  apart by {apart(soft(image), conv(image))}")

    back = attention_to_conv(heads).conv
    print(f"and back, {back}: apart by {apart(back(image), conv(image))}")

    edges = nn.Conv2d(1, 1, kernel_size=5, padding=2)
    few = conv_to_attention(edges, heads="minimal")
    print(
        f"5 x 5 taps of one channel in {few.heads} heads:    apart by {apart(few(image[:, :1]), edges(image[:, :1]))}"
    )

    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )
    logits = network(image)
    attentive = convert_network(network)
    print(f"a network of convolutions, as attention: apart by {apart(attentive(image), logits)}")
    print(f"and restored:                            apart by {apart(restore_network(attentive)(image), logits)}")


if __name__ == "__main__":
    main()
