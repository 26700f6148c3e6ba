"""Nine heads are a 3 x 3 convolution (Cordonnier, Loukas and Jaggi, ICLR 2020, theorem 1).

Each head looks at one pixel, a fixed step away from its own. `beta=0` switches content off, so that the bias
alone decides; the convolution's kernel sits in the heads' values.
"""

from __future__ import annotations

import torch
from torch.nn.functional import conv2d

from regard import Quadratic, attend

ROWS, COLUMNS, CHANNELS, OUT = 7, 11, 3, 5


def main() -> None:
    torch.manual_seed(0)
    image = torch.randn(CHANNELS, ROWS, COLUMNS)
    kernel = torch.randn(OUT, CHANNELS, 3, 3)

    steps = [(row, column) for row in (-1, 0, 1) for column in (-1, 0, 1)]
    bias = Quadratic(len(steps), grid=(ROWS, COLUMNS), centre=steps, alpha=200.0)

    pixels = image.flatten(1).T  # token, channel
    maps = torch.stack([kernel[:, :, 1 + row, 1 + column].T for row, column in steps])
    values = pixels @ maps  # head, token, out
    nothing = torch.zeros(len(steps), ROWS * COLUMNS, 1)
    output = attend(nothing, nothing, values, beta=0, bias=bias).sum(0).T.reshape(OUT, ROWS, COLUMNS)

    # Inside the image the two are the same. At the border a head whose pixel lies outside takes the nearest.
    expected = conv2d(image[None], kernel)[0]
    torch.testing.assert_close(output[:, 1:-1, 1:-1], expected)
    difference = float((output[:, 1:-1, 1:-1] - expected).detach().abs().max())
    print(f"{len(steps)} heads and a 3 x 3 convolution: largest difference {difference:.1e}")


if __name__ == "__main__":
    main()
