"""The operator: every backend with every pattern, bias, scale and feature map, output and gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
from record import Record, draw, run_backward
from torch import Tensor, nn

import regard
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
    Neighborhood,
    Padding,
    Quadratic,
    Random,
    RelativeTable,
    RowColumn,
    Segments,
    Selected,
    Shift,
    Strided,
    TransformerXL,
    Where,
    Window,
    attend,
    weights,
)
from regard.backends import BACKENDS
from regard.calculus import separable_weights, softmax
from regard.layers import IncrementalAttention

TOKENS, GRID, ROWS, HEADS, DIM = 35, (5, 7), 2, 2, 5
NAMES = [backend.name for backend in BACKENDS if backend.name != "flex"]  # which needs a GPU
DTYPES = {"f32": torch.float32, "f64": torch.float64}
SCALES = [0.0, -0.7, 2.3, math.inf, -math.inf]
FEATURES: dict[str, Any] = {name: name for name in ("elu1", "relu", "taylor2", "favor+")} | {"callable": torch.exp}
LENGTHS = [(TOKENS, TOKENS), (11, TOKENS), (1, TOKENS), (41, TOKENS), (1, 1)]

PATTERNS = {
    "full": Full(),
    "causal": Causal(),
    "window": Window(3, 2),
    "window self": Window(0, 0),
    "window wide": Window(50, 3),
    "dilated": Window(3, 1, step=4),
    "strided": Strided(3),
    "first": First(2),
    "selected": Selected([4, 17, 33]),
    "random": Random(2, 5),
    "random blocks": Random(2, 1, block=4),
    "random fixed": Random(1, 2, block=3, tokens=60),
    "blocks": Blocks(6),
    "segments": Segments((torch.arange(TOKENS) // 8).expand(ROWS, TOKENS)),
    "segments mixed": Segments((torch.arange(ROWS * TOKENS) * 7 // 3 % 4 - 1).reshape(ROWS, TOKENS)),
    "padding": Padding([TOKENS, 9]),
    "padding left, an empty row": Padding([0, 31], side="left"),
    "neighborhood": Neighborhood(GRID, 1),
    "neighborhood shift": Neighborhood(GRID, (1, 2), edges="shift"),
    "neighborhood dilated": Neighborhood(GRID, (0, 1), step=2),
    "grid window": GridWindow(GRID, (2, 3), shift=1),
    "grid stride": GridStride(GRID, (2, 3)),
    "axial": Axial(GRID),
    "neighborhood after 3": Neighborhood((4, 8), 1, start=3),
    "where": Where(lambda i, j: (i + j) % 3 != 1),
    "causal & window": Causal() & Window(4, 0),
    "window | first | random": Window(2, 2) | First(1) | Random(1, 3, block=5),
    "sparse transformer": Causal() & (Window(2, 0) | Strided(5)),
    "not causal": ~Causal(),
    "ring": Window(9, 9) & ~Window(2, 2),
    "causal & padding": Causal() & Padding([TOKENS, 20]),
    "causal & axial": Causal() & Axial(GRID),
    "first | neighborhood": First(2) | Neighborhood((3, 11), 1, start=2),
    "blocks | segments": Blocks(6) | Segments((torch.arange(TOKENS) // 9).expand(ROWS, TOKENS)),
    "nothing": ~(Full() | Causal()),
}
FEW = ("full", "causal", "dilated", "neighborhood", "causal & padding", "window | first | random")


def make_biases() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {
        "alibi": Alibi(HEADS),
        "table": RelativeTable(HEADS, distance=6, generator=generator),
        "grid table": RelativeTable(HEADS, grid=GRID, generator=generator),
        "row column": RowColumn(HEADS, GRID, generator=generator),
        "quadratic": Quadratic(HEADS, generator=generator),
        "grid quadratic": Quadratic(HEADS, GRID, generator=generator),
        "gaussian": Gaussian(HEADS, GRID, generator=generator),
        "transformer-xl": TransformerXL(HEADS, DIM, generator=generator),
        "shift": Shift(HEADS, [[0, 1], [-1, 0]], GRID),
        "tensor": draw(HEADS, TOKENS, TOKENS, seed=8),
    }


def record_attention(record: Record) -> None:
    def run(name: str, lengths=(TOKENS, TOKENS), backends=NAMES, dtypes=DTYPES, kv_heads=1, dim=DIM, **words) -> None:
        for backend in backends:
            for label, dtype in dtypes.items():
                where = f"attention/{backend} {label} {lengths[0]}x{lengths[1]} {name}"
                tensors = _make_inputs(lengths, dtype, kv_heads, dim)
                given = dict(words)
                inputs = list(zip(("query", "key", "value"), tensors, strict=True))
                bias = given.get("bias")
                if isinstance(bias, nn.Module):
                    bias.to(dtype)
                    inputs += [(f"bias {key}", parameter) for key, parameter in bias.named_parameters()]
                elif isinstance(bias, Tensor):
                    bias = given["bias"] = bias.to(dtype)[..., -lengths[0] :, :].clone().requires_grad_()
                    inputs.append(("bias", bias))
                with record.case(where):
                    call = lambda: attend(*tensors, backend=backend, **given)  # noqa: B023, E731
                    record.add(where, run_backward(call, inputs))
                    with torch.no_grad():  # some backends run otherwise where no gradient is needed
                        record.add(f"{where} inference", call())

    softmaxes = [name for name in NAMES if name not in ("linear", "positional")]
    for name, pattern in PATTERNS.items():
        for lengths in LENGTHS:
            rows = pattern.rows is not None and lengths[1] != TOKENS
            if not rows:
                run(name, lengths, softmaxes, pattern=pattern)
    for name in FEW:
        pattern = PATTERNS[name]
        for label, bias in make_biases().items():
            run(f"{name}, {label}", backends=softmaxes, pattern=pattern, bias=bias)
            run(f"{name}, {label}, by position", backends=NAMES, pattern=pattern, bias=bias, scale=0.0)
        for scale in SCALES:
            run(f"{name}, scale {scale}", backends=softmaxes, pattern=pattern, scale=scale)
            run(f"{name}, alibi, scale {scale}", backends=softmaxes, pattern=pattern, scale=scale, bias=Alibi(HEADS))
        for label, features in FEATURES.items():
            for lengths in LENGTHS[:3]:
                words = {"pattern": pattern, "feature_map": features}
                run(f"{name}, {label}", lengths, ["linear", "reference"], **words)
        # Long enough for several tiles, and for the vectors of the kernels.
        if name not in ("neighborhood", "causal & padding"):
            run(f"{name}, long", (300, 517), softmaxes, {"f32": torch.float32}, 2, 19, pattern=pattern)
            run(f"{name}, half", (67, 67), softmaxes, {"bf16": torch.bfloat16, "f16": torch.float16}, pattern=pattern)
    _record_weights_and_steps(record)


def _make_inputs(lengths: tuple[int, int], dtype: torch.dtype, kv_heads: int, dim: int) -> list[Tensor]:
    shapes = [(ROWS, HEADS, lengths[0], dim), (ROWS, kv_heads, lengths[1], dim), (ROWS, kv_heads, lengths[1], dim + 2)]
    return [draw(*shape, seed=seed, dtype=dtype).requires_grad_() for seed, shape in enumerate(shapes)]


def _record_weights_and_steps(record: Record) -> None:
    query, key, value = (tensor.detach() for tensor in _make_inputs((TOKENS, TOKENS), torch.float32, 1, DIM))
    for name in FEW:
        record.add(f"weights/{name}", weights(query, key, pattern=PATTERNS[name]))
        plan = regard.plan(PATTERNS[name], 1000 if PATTERNS[name].rows is None and "neighbor" not in name else TOKENS)
        record.add(f"plan/{name}", {"pairs": plan.pairs, "area": plan.area, "tiles": plan.tiles})
    for name, pattern in PATTERNS.items():
        record.add(f"plan/{name} matrix", regard.plan(pattern, TOKENS).matrix())
        record.add(f"plan/{name} mask", pattern.matrix(TOKENS))
    running = IncrementalAttention()
    for start in range(0, 9, 3):
        part = slice(start, start + 3)
        record.add(
            f"steps/incremental {start}", running.append(query[..., part, :], key[..., part, :], value[..., part, :])
        )
    for label in ("elu1", "relu", "taylor2", "favor+"):
        state = None
        for token in range(4):
            at = [tensor[..., token : token + 1, :] for tensor in (query, key, value)]
            with record.case(f"steps/{label} {token}"):
                output, state = regard.step(*at, state, feature_map=label)
                record.add(f"steps/{label} {token}", output)
    for beta in (0.0, 0.5, -2.0, math.inf):
        record.add(f"calculus/softmax {beta}", softmax(draw(4, 9, dtype=torch.float64), beta))
    rows, columns = draw(3, 5, 5, dtype=torch.float64), draw(3, 7, 7, dtype=torch.float64)
    with record.case("calculus/separable"):
        record.add("calculus/separable", separable_weights(rows, columns))
