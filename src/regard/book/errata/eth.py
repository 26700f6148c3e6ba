"""Errata of an assignment on self-attention and convolution, after Cordonnier, Loukas and Jaggi (ICLR 2020)."""

from __future__ import annotations

from collections.abc import Iterator

import sympy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.book.errata.erratum import Trial, erratum
from regard.convert import conv_to_attention

DOUBLE = torch.float64


@erratum(
    "eth-b1:third-entry",
    "ETH b1, solution",
    "garbled",
    claim="The query's vector is $(1, -2\\Delta_1, -2\\Delta_1)$.",
    correction=(
        "Its third entry is $-2\\Delta_2$: $-\\alpha\\lVert\\delta - \\Delta\\rVert^2 + "
        "\\alpha\\lVert\\Delta\\rVert^2$ is then its product with $(\\lVert\\delta\\rVert^2, \\delta_1, "
        "\\delta_2)$."
    ),
)
def _third_entry() -> Iterator[Trial]:
    for first, second in ((1, 1), (1, 2), (-3, 2)):
        centre, offset = torch.tensor((first, second), dtype=DOUBLE), torch.tensor((2.0, 5.0), dtype=DOUBLE)
        features = torch.tensor((29.0, 2.0, 5.0), dtype=DOUBLE)
        computed = -((offset - centre) ** 2).sum() + (centre**2).sum()
        vectors = [torch.tensor((1.0, -2.0 * first, -2.0 * last), dtype=DOUBLE) for last in (first, second)]
        yield Trial(
            f"centre ({first}, {second}), offset (2, 5)",
            *_order(-(vectors[0] @ features), computed, -(vectors[1] @ features)),
        )


def _order(claimed: Tensor, computed: Tensor, corrected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return claimed, computed, corrected


@erratum(
    "eth-b2:order",
    "ETH b2, solution",
    "wrong",
    claim="$4(2D(2D-1) + D - 1)$ operations for a score are $O(D^3)$, and $O(N^2 D^3)$ for the matrix.",
    correction="$16D^2 - 4D - 4$ is of degree 2: $O(D^2)$ for a score. (Counted exactly, a score takes $16D^2 - 1$.)",
)
def _order_of_growth() -> Iterator[Trial]:
    dim = sympy.Symbol("D", positive=True)
    operations = 4 * (2 * dim * (2 * dim - 1) + dim - 1)
    degree = int(sympy.Poly(operations, dim).degree())
    growth = sympy.limit(sympy.log(operations.subs(dim, 2 * dim) / operations, 2), dim, sympy.oo)
    yield Trial("degree of 4(2D(2D - 1) + D - 1) in D", 3, degree, int(growth))


@erratum(
    "eth-b2:naive",
    "ETH b2, solution",
    "incomplete",
    claim="Absolute positions cost $O(N^2 D^2)$.",
    correction=(
        "Only if queries and keys are computed again for each pair; computed once, $4D^2 N + 2DN^2$ suffice: "
        "$O(ND^2 + N^2 D)$."
    ),
)
def _naive() -> Iterator[Trial]:
    from regard.cost_model import textbook

    for side in (2, 4, 8):
        dim, tokens = 8, side * side
        table = textbook.encoding((side, side), dim)
        computed = int(table["queries and keys made once"].value)
        yield Trial(
            f"N = {tokens}, D = {dim}: operations",
            16 * dim**2 * tokens**2,
            computed,
            4 * dim**2 * tokens + 2 * dim * tokens**2,
        )


def _sum_heads(image: Tensor, kernel: Tensor, sign: int) -> Tensor:
    """Heads that copy the pixel at `query + sign * offset`, each with the matrix of its tap."""
    padded = F.pad(image, (1, 1, 1, 1))
    height, width = image.shape[-2:]
    total = torch.zeros(1, kernel.shape[0], height, width, dtype=DOUBLE)
    for row in (-1, 0, 1):
        for column in (-1, 0, 1):
            top, left = 1 + sign * row, 1 + sign * column
            shifted = padded[..., top : top + height, left : left + width]
            total += torch.einsum("oi,bihw->bohw", kernel[:, :, row + 1, column + 1], shifted)
    return total


@erratum(
    "eth-c2:kernel-flip",
    "ETH c2, solution, equations 8 and 9",
    "wrong",
    claim="$\\sum_h Z_{q-f(h)} W^{(h)} = \\sum_h Z_{q+f(h)} W^{(h)}$ by symmetry of the offsets.",
    correction=(
        "Symmetry of the set allows only relabelling: the head at $f(h)$ takes the matrix of $-f(h)$, which flips "
        "the kernel;"
        " or offsets are key minus query, and nothing is flipped."
    ),
)
def _kernel_flip() -> Iterator[Trial]:
    for size in (2, 3, 6):
        conv = nn.Conv2d(2, 2, 3, padding=1, bias=False).to(DOUBLE)
        image = torch.randn(1, 2, size, size, dtype=DOUBLE)
        with torch.no_grad():
            claimed = _sum_heads(image, conv.weight, sign=-1)
            yield Trial(f"an image of {size} x {size}", claimed, conv(image), conv_to_attention(conv)(image))


@erratum(
    "eth-c2:indices",
    "ETH c2, solution",
    "garbled",
    claim=(
        'The step is called "9 to 10", and $W^{f^{-1}(h)}$ and $W_{f(h)}$ are written with an $h$ that is '
        "bound nowhere."
    ),
    correction=(
        "It is the step from 8 to 9, and the matrix is $W^{(f^{-1}(\\Delta))}$: $f^{-1}$ takes offsets, not "
        "numbers of heads."
    ),
)
def _indices() -> Iterator[Trial]:
    for side in (1, 3, 5):
        reach = side // 2
        offsets = [(row, column) for row in range(-reach, reach + 1) for column in range(-reach, reach + 1)]
        head_of = {offset: head for head, offset in enumerate(offsets)}
        by_head = all(head in head_of for head in range(len(offsets)))
        by_offset = all(offset in head_of for offset in offsets)
        yield Trial(
            f"K = {side}: the inverse is defined on (heads, offsets)", (True, True), (by_head, by_offset), (False, True)
        )


@erratum(
    "eth-c2:rank",
    "ETH c2, solution",
    "incomplete",
    claim="Heads of any width $D_o$ express any convolution.",
    correction=(
        "Each tap's matrix must have rank at most $D_o$; and $K$ must be odd, or the offsets are not symmetric."
    ),
)
def _rank() -> Iterator[Trial]:
    from regard.errors import RegardError

    for channels, width in ((1, 1), (2, 1), (3, 2)):
        conv = nn.Conv2d(channels, channels, 3, padding=1).to(DOUBLE)
        image = torch.randn(1, channels, 4, 4, dtype=DOUBLE)
        try:
            with torch.no_grad():
                possible = torch.allclose(conv_to_attention(conv, head_dim=width)(image), conv(image))
        except RegardError:
            possible = False
        ranks = torch.linalg.matrix_rank(conv.weight.detach().permute(2, 3, 0, 1))
        yield Trial(f"{channels} channels, heads of {width}: possible", True, possible, bool((ranks <= width).all()))


@erratum(
    "eth-d1:inside",
    "ETH d1, solution",
    "incomplete",
    claim="The weight of the pixel at the head's offset tends to 1, always.",
    correction=(
        "Only if that pixel is inside the image and the offset is an integer. Outside, the nearest pixel wins; "
        "half offsets split equally."
    ),
)
def _inside() -> Iterator[Trial]:
    steep = 400.0
    for offset, size in ((0.0, 3), (1.0, 3), (0.5, 4)):
        places = torch.arange(size, dtype=DOUBLE)
        weights = (-steep * (places - places[:, None] - offset) ** 2).softmax(1)
        wanted = places[:, None] + offset
        claimed = ((places - wanted).abs() < 1e-9).double()
        nearest = (places - wanted).abs()
        best = (nearest <= nearest.min(1, keepdim=True).values + 1e-9).double()
        case = f"{size} pixels in a row, offset {offset:g}"
        yield Trial(case, claimed, weights, best / best.sum(1, keepdim=True))


@erratum(
    "eth-e1:dilation",
    "ETH e1, solution",
    "incomplete",
    claim="Padding by $\\lfloor K/2 \\rfloor$ keeps the size of the image.",
    correction=(
        "With a dilation of $d$ the padding is $d\\lfloor K/2 \\rfloor$, and for even $K$ the output is cropped by $d$."
    ),
)
def _dilation() -> Iterator[Trial]:
    for kernel, dilation in ((3, 1), (2, 1), (3, 2), (5, 3)):
        padding = kernel // 2
        image = torch.zeros(1, 1, 17, dtype=DOUBLE)
        size = F.conv1d(image, torch.ones(1, 1, kernel, dtype=DOUBLE), padding=padding, dilation=dilation).shape[-1]
        right = F.conv1d(image, torch.ones(1, 1, kernel, dtype=DOUBLE), padding=dilation * padding, dilation=dilation)
        kept = right[..., : 17 if kernel % 2 else right.shape[-1] - dilation].shape[-1]
        case = f"K = {kernel}, d = {dilation}: (size with this padding, size with the right one)"
        yield Trial(case, (17, 17), (size, kept), (17 + 2 * padding - dilation * (kernel - 1), 17))


@erratum(
    "eth-e3:pooling",
    "ETH e3, solution",
    "wrong",
    claim="A convolution with stride is attention followed by a pooling layer.",
    correction="It is attention at every second query: subsampling. Average or maximum pooling changes the values.",
)
def _pooling() -> Iterator[Trial]:
    for size in (4, 6):
        conv = nn.Conv2d(1, 1, 3, padding=1, stride=2).to(DOUBLE)
        image = torch.randn(1, 1, size, size, dtype=DOUBLE)
        with torch.no_grad():
            dense = F.conv2d(image, conv.weight, conv.bias, padding=1)
            yield Trial(
                f"an image of {size} x {size}, stride 2",
                F.avg_pool2d(dense, 2),
                conv(image),
                conv_to_attention(conv)(image),
            )


@erratum(
    "eth-q2:grid",
    "ETH, question 2",
    "incomplete",
    claim="Heads that have learned a convolution must have their centres on the grid of its kernel.",
    correction=(
        "Soft heads off the grid span the same filters: nine Gaussian heads at other centres express every 3 x 3 "
        "kernel after"
        " mixing. Only the effective kernel $\\sum_h a_h(\\delta) W^{(h)}$ can be identified."
    ),
)
def _grid() -> Iterator[Trial]:
    offsets = torch.cartesian_prod(*(torch.arange(-1, 2, dtype=DOUBLE),) * 2)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        centres = offsets + 0.8 * (torch.rand(9, 2, generator=generator, dtype=DOUBLE) - 0.5)
        heads = torch.exp(-2 * torch.cdist(centres, offsets) ** 2)
        kernel = torch.randn(9, generator=generator, dtype=DOUBLE)
        mixture = torch.linalg.solve(heads.T, kernel)
        error = float((heads.T @ mixture - kernel).abs().max())
        nearest = float(torch.cdist(centres, offsets).min(1).values.max())
        case = f"nine heads up to {nearest:.2f} pixels off the grid (seed {seed}): any kernel can be expressed"
        yield Trial(case, False, error < 1e-9, bool(torch.linalg.matrix_rank(heads) == 9))
