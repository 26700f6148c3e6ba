"""Shared test cases: one small instance of every pattern, bias and backend, and the tolerance of results."""

from __future__ import annotations

import copy
import functools
import math

import torch

from regard import (
    Alibi,
    Axial,
    Blocks,
    Causal,
    First,
    Full,
    Gaussian,
    GridStride,
    GridWindow,
    Mask,
    Neighborhood,
    Padding,
    PatternError,
    Quadratic,
    Random,
    RelativeTable,
    RowColumn,
    Segments,
    Selected,
    Strided,
    TransformerXL,
    Where,
    Window,
)
from regard.backends.base import bias_tensors
from regard.kernels import library
from regard.patterns import And, Not, Or

# The backends that run every soft pattern; without a compiler there is one less.
TILED = ["blocked"] + (["native"] if library.missing() is None else [])
TOKENS = 35  # 5 x 7: not a power of two, not square, not a multiple of any tile
GRID = (5, 7)
ROWS = 2
_generator = torch.Generator().manual_seed(11)


def _odd_sum(i, j):
    return (i + j) % 3 != 1


def _random_mask(*shape):
    """A mask whose third row, where it has several, hides everything."""
    mask = torch.rand(shape, generator=_generator) < 0.6
    mask[..., 2 : shape[-2], :] &= torch.arange(2, max(shape[-2], 2))[:, None] > 2
    return mask


LEAVES = [
    Full(),
    Causal(),
    Window(3, 2),
    Window(0, 0),
    Window(50, 3),
    Window(3, 1, step=4),
    Strided(3),
    First(2),
    Selected([4, 17, 33]),
    Random(2, 5),
    Random(2, 1, block=4),
    Random(1, 2, block=3, tokens=60),
    Blocks(6),
    Segments((torch.arange(TOKENS) // 8).expand(ROWS, TOKENS)),
    Segments(torch.randint(-1, 3, (ROWS, TOKENS), generator=_generator)),
    Padding([TOKENS, 9]),
    Padding([0, 31], side="left"),
    Neighborhood(GRID, 1),
    Neighborhood(GRID, (1, 2), edges="shift"),
    Neighborhood(GRID, (0, 1), step=2),
    Neighborhood(GRID, (0, 1), step=2, edges="shift"),
    GridWindow(GRID, (2, 3), shift=1),
    GridStride(GRID, (2, 3)),
    Axial(GRID),
    Neighborhood((4, 8), 1, start=3),
    Mask(_random_mask(TOKENS, TOKENS)),
    Mask(_random_mask(ROWS, 1, 1, TOKENS)),
    Where(_odd_sum),
]
EXPRESSIONS = [
    Causal() & Window(4, 0),
    Window(2, 2) | First(1) | Random(1, 3, block=5),
    Causal() & (Window(2, 0) | Strided(5)),
    ~Causal(),
    Window(9, 9) & ~Window(2, 2),
    Causal() & Padding([TOKENS, 20]),
    Causal() & Axial(GRID),
    First(2) | Neighborhood((3, 11), 1, start=2),
    Blocks(6) | Segments((torch.arange(TOKENS) // 9).expand(ROWS, TOKENS)),
    ~(Full() | Causal()),
]
PATTERNS = LEAVES + EXPRESSIONS
LENGTHS = [(TOKENS, TOKENS), (11, TOKENS), (1, TOKENS), (41, TOKENS)]
BETAS = [None, 0.0, -0.7, 2.3, math.inf, -math.inf]


def fits(pattern, lengths):
    """Whether a pattern accepts these lengths."""
    try:
        pattern.lengths(*lengths)
    except PatternError:
        return False
    return True


def share_grids(pair):
    """Whether two patterns may be joined: one that lays the same tokens on another grid is refused."""
    left, right = pair
    try:
        left & right
    except PatternError as error:
        if "disagree about the grid" not in str(error):
            raise
        return False
    return True


def as_of(pattern, tokens):
    """The pattern when only the first `tokens` of all `TOKENS` had arrived: facts about rows grow with the tokens."""
    if isinstance(pattern, And):
        return as_of(pattern.left, tokens) & as_of(pattern.right, tokens)
    if isinstance(pattern, Or):
        return as_of(pattern.left, tokens) | as_of(pattern.right, tokens)
    if isinstance(pattern, Not):
        return ~as_of(pattern.pattern, tokens)
    if isinstance(pattern, Segments):
        return Segments(pattern.ids[:, :tokens])
    if isinstance(pattern, Mask):
        return Mask(torch.from_numpy(pattern._bits[..., :tokens, :tokens].copy()))
    if isinstance(pattern, Padding) and pattern.side == "left":
        return Padding([max(count - (TOKENS - tokens), 0) for count in pattern.counts], side="left")
    if isinstance(pattern, Padding):
        return Padding([min(count, tokens) for count in pattern.counts])
    return pattern


def make_bias(name: str, heads: int, dim: int, dtype=torch.float64):
    """One of `biases`, ready to learn: a copy, as building all of them for thousands of cells takes minutes."""
    return copy.deepcopy(biases(heads, dim, dtype)[name])


@functools.cache
def biases(heads: int, dim: int, dtype=torch.float64) -> dict:
    """One of each bias, for sequences of `TOKENS` tokens."""
    generator = torch.Generator().manual_seed(3)
    made = {
        "none": None,
        "alibi": Alibi(heads),
        "table": RelativeTable(heads, distance=6, generator=generator),
        "grid table": RelativeTable(heads, grid=GRID, generator=generator),
        "row column": RowColumn(heads, GRID, generator=generator),
        "quadratic": Quadratic(heads, generator=generator),
        "grid quadratic": Quadratic(heads, GRID, generator=generator),
        "gaussian": Gaussian(heads, GRID, generator=generator),
        "transformer-xl": TransformerXL(heads, dim, generator=generator),
    }
    return {name: bias if bias is None else bias.to(dtype) for name, bias in made.items()}


def tensors(lengths, *, batch=ROWS, heads=3, kv_heads=3, dim=5, value_dim=7, dtype=torch.float64, seed=0):
    """Random query, key and value that ask for gradients; the same numbers whatever the dtype."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (batch, heads, lengths[0], dim),
        (batch, kv_heads, lengths[1], dim),
        (batch, kv_heads, lengths[1], value_dim),
    ]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.to(dtype).requires_grad_() for tensor in made]


def results(attend, query, key, value, **words):
    """Output and gradients of query, key, value and of the bias, for a fixed grad_output."""
    inputs = [query, key, value, *bias_tensors(words.get("bias"))]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    output = attend(query, key, value, **words)
    grad_output = (
        torch.linspace(-1, 1, output.numel(), dtype=torch.float64).reshape(output.shape).cos().to(output.dtype)
    )
    if not output.requires_grad:
        return [output, *(torch.zeros_like(tensor) for tensor in wanted)]
    grads = torch.autograd.grad(output, wanted, grad_output, allow_unused=True)
    return [output, *(torch.zeros_like(t) if g is None else g for t, g in zip(wanted, grads, strict=True))]


def bounds(query, key, value, scale, dtype, extra_scores=8.0):
    """How far rounding can move the output and the gradients, for a grad_output of at most 1.

    A score is a sum of `dim` products: it moves by at most `eps (dim + 2) |score|`, with `|score|` bounded by the
    largest entries (`extra_scores` covers the bias). A weight moves by twice that relative to itself, plus one rounding
    for each key it is normalised over: `relative`. The gradient of a score, `weight * (grad_output . value - delta)`,
    is at most `weight * 2 * reach` and inherits twice that error. Weights sum to one over keys; over queries they sum
    to at most the number of queries.
    """
    eps = torch.finfo(dtype).eps
    dim, keys, queries = query.shape[-1], key.shape[-2], query.shape[-2] * max(1, query.shape[1] // key.shape[1])
    scale = dim**-0.5 if scale is None else (1.0 if math.isinf(scale) else abs(scale))
    q, k, v = (float(tensor.detach().abs().max()) if tensor.numel() else 1.0 for tensor in (query, key, value))
    score = scale * dim * q * k + extra_scores
    relative = eps * (2 * (dim + 2) * score + keys + 8)
    reach = 2 * value.shape[-1] * v
    derivative = 4 * relative * reach
    content = 1 + scale  # a bias that reads content adds terms of the size of the content score
    return {
        "output": relative * v,
        "query": derivative * content * k,
        "key": derivative * content * q * queries,
        "value": relative * queries,
        "bias": derivative * queries * query.shape[0] * query.shape[1] * (1 + q) * (1 + k) * dim,
    }


def assert_agree(found, expected, limits):
    """Every tensor within its bound of the float64 truth, and finite where that is."""
    names = ["output", "query", "key", "value"] + ["bias"] * len(expected)
    for name, mine, truth in zip(names, found, expected, strict=False):
        assert mine.shape == truth.shape
        difference = (mine.detach().double() - truth.detach().double()).abs()
        assert bool((difference <= limits[name]).all()), (
            f"{name} is off by {float(difference.max()):.3g}, bound {limits[name]:.3g}"
        )
