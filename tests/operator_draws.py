"""Random attentions: sizes, strides, dtypes, patterns, biases, and non-finite values."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard import (
    Alibi,
    Attention,
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
    Pattern,
    PatternError,
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
)
from regard.attention.checks import make_request
from regard.backends import Request
from regard.biases import Bias

DTYPES = (torch.float64, torch.float64, torch.float32, torch.float32, torch.bfloat16)
# What a case is drawn for, and how often: drawn freely, hardly any attention is one that `sdpa` (dense), `linear`
# (features) or `positional` (positions) accepts, or that `native` decodes (few).
FAMILIES = {"any": 50, "dense": 14, "features": 14, "positions": 12, "few": 10}
BETAS = {
    "any": (None, None, None, None, 0.0, 0.0, math.inf, -math.inf, -0.7, 2.3, 20.0),
    "dense": (None, None, 0.3, 2.3, 20.0),
    "features": (None, None, 0.0, -0.7, 2.3),
    "positions": (0.0, 0.0, 0.0, None, -0.7),
    "few": (None, None, 0.0, -0.7, 20.0),
}
DEPTHS = {"any": (0, 0, 0, 1, 1, 2), "dense": (0,), "features": (0, 1, 1), "positions": (0, 0, 1), "few": (0, 0, 1, 1)}
BAD = (math.nan, math.inf, -math.inf)
FEATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "elu1": lambda x: torch.where(x > 0, x + 1, torch.where(x > 0, 0.0, x).exp()),
    "softplus": torch.nn.functional.softplus,
}


def _odd_sum(i: Tensor, j: Tensor) -> Tensor:
    return (i + 2 * j) % 5 != 1


def _not_near(i: Tensor, j: Tensor) -> Tensor:
    return (i - j).abs() != 2


@dataclass
class Input:
    """A leaf, and the view of it that is handed over."""

    leaf: Tensor
    view: Callable[[Tensor], Tensor]
    copies: int = 1  # how often an entry of the leaf may stand in the view
    learns: bool = False

    def plant(self, rng: random.Random, count: int) -> None:
        """Entries that are not finite."""
        flat = self.leaf.view(-1)
        for _ in range(count if len(flat) else 0):
            flat[rng.randrange(len(flat))] = rng.choice(BAD)

    def ready(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """A fresh leaf and its view, in another dtype if one is given."""
        leaf = self.leaf.detach().to(dtype or self.leaf.dtype, copy=True).requires_grad_(self.learns)
        return leaf, self.view(leaf)


@dataclass
class Case:
    """One attention, with everything that was drawn for it."""

    seed: int
    words: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.dtype = rng.choice(DTYPES)
        sizes = [0, 1, 1, 2, 3, 5] if rng.random() < 0.15 else [1, 2, 3]
        self.family = rng.choices(tuple(FAMILIES), tuple(FAMILIES.values()))[0]
        self.batch = tuple(rng.choice(sizes) for _ in range(rng.choice((0, 1, 1, 1, 2, 3))))
        self.kv_heads, group = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 1, 2, 3))
        self.heads = self.kv_heads * group
        self._draw_sizes()
        self.scale = rng.choice(BETAS[self.family])
        self.pattern = self._draw_pattern()
        self.features = None
        if self.family == "features" or (self.family == "any" and rng.random() < 0.05 and not self._hard):
            self.features = rng.choice(list(FEATURES))
        self.draw = self._whole_numbers if self._hard else self._normal
        self.inputs = {
            "query": self._draw_input((*self.batch, self.heads, self.queries, self.dim), broadcasts=False),
            "key": self._draw_input((*self.batch, self.kv_heads, self.keys, self.dim)),
            "value": self._draw_input((*self.batch, self.kv_heads, self.keys, self.value_dim)),
        }
        self.bias = None if self.features or self.family == "few" else self._draw_bias()
        if isinstance(self.bias, Input):
            self.inputs["bias"] = self.bias
        self._plant()
        self.layout = rng.choice(("rows", "rows", "rows", "columns"))
        self.whole = rng.random() < 0.2  # as one Attention, not as keywords
        self.upstream_seed = rng.randrange(1 << 30)

    def _draw_sizes(self) -> None:
        rng = self.rng
        lengths = (0, 1, 1, 2, 3, 5, 7, 11, 17, 29)
        self.queries, self.keys = rng.choice(lengths), rng.choice(lengths)
        if rng.random() < 0.5:
            self.queries = self.keys
        self.dim, self.value_dim = rng.choice((0, 1, 2, 3, 5, 8)), rng.choice((0, 1, 2, 3, 4, 7))
        if self.family != "any" or rng.random() < 0.9:
            self.dim, self.value_dim = max(self.dim, 1), max(self.value_dim, 1)
        if self.family != "any":
            self.queries, self.keys = max(self.queries, 1), max(self.keys, 1)
        columns = rng.randint(1, 5)
        self.grid = (max(1, math.ceil(self.keys / columns)), columns)
        self.image = self.family == "positions" and rng.random() < 0.6
        if self.image:  # all tokens are on the grid
            self.queries = self.keys = math.prod(self.grid)
        if self.family == "few":
            self.queries = rng.randint(1, 4)

    @property
    def _hard(self) -> bool:
        return self.scale is not None and math.isinf(self.scale)

    @property
    def rows(self) -> int:
        return math.prod(self.batch)

    # Numbers

    def _normal(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def _whole_numbers(self, shape: tuple[int, ...]) -> Tensor:
        """Products without rounding: ties are ties."""
        return torch.randint(-2, 3, shape, generator=self.generator).double()

    def _draw_input(self, shape: tuple[int, ...], broadcasts: bool = True) -> Input:
        """A tensor that is seen in this shape, through strides of any kind, or may be broadcast to it."""
        rng, learns = self.rng, self.rng.random() < (0.1 if self.family == "few" else 0.5)
        batch = len(self.batch)
        # An axis of the batch may be 1 or missing, for the operator to broadcast.
        if broadcasts and batch and rng.random() < 0.2:
            kept = rng.randint(0, batch)
            shape = (*(1 if rng.random() < 0.5 else size for size in shape[batch - kept : batch]), *shape[batch:])
        made = lambda s: self.draw(s).to(self.dtype)  # noqa: E731
        kind = rng.choice(("plain", "plain", "transposed", "heads last", "every second", "channels", "expanded"))
        if kind == "transposed":
            return Input(made((*shape[:-2], shape[-1], shape[-2])), lambda x: x.mT, 1, learns)
        if kind == "heads last":
            turned = (*shape[:-3], shape[-2], shape[-3], shape[-1])
            return Input(made(turned), lambda x: x.transpose(-2, -3), 1, learns)
        if kind == "every second":
            return Input(made((*shape[:-2], 2 * shape[-2], shape[-1])), lambda x: x[..., ::2, :], 1, learns)
        if kind == "channels":
            last = shape[-1]
            return Input(made((*shape[:-1], last + 3)), lambda x: x[..., 1 : last + 1], 1, learns)
        if kind == "expanded":
            axis = rng.randrange(len(shape))
            base = tuple(1 if n == axis else size for n, size in enumerate(shape))
            return Input(made(base), lambda x: x.expand(shape), max(1, shape[axis]), learns)
        return Input(made(shape), lambda x: x, 1, learns)

    # Descriptions

    def _draw_pattern(self) -> Pattern:
        for _ in range(20):
            try:
                pattern = self._expression(self.rng.choice(DEPTHS[self.family]))
                pattern.lengths(self.queries, self.keys)
            except PatternError:
                continue
            return pattern
        return Full()

    def _expression(self, depth: int) -> Pattern:
        if not depth:
            return self._leaf()
        kind = "&" if self.family in ("features", "few") else self.rng.choice("&&||~")
        left = self._expression(depth - 1)
        if kind == "~":
            return ~left
        right = self._expression(self.rng.randrange(depth))
        return left & right if kind == "&" else left | right

    def _leaf(self) -> Pattern:
        rng, keys = self.rng, self.keys
        some = lambda top=7: rng.randint(1, top)  # noqa: E731
        few = lambda top=6: rng.randint(0, top)  # noqa: E731
        kind = rng.choice(self._kinds())
        if kind < 2:
            return Full()
        if kind < 4:
            return Causal()
        if kind < 6:
            return Window(few(), few(), step=rng.choice((1, 1, 2, 3, 147)))
        simple = {
            6: lambda: Strided(some()),
            7: lambda: First(few(4)),
            8: lambda: Selected(sorted({rng.randrange(keys) for _ in range(some(3))}) if keys else []),
            9: lambda: Random(few(3), few(), block=some(4), tokens=rng.choice((None, 40))),
            10: lambda: Blocks(some()),
            11: lambda: Where(rng.choice((_odd_sum, _not_near))),
            12: lambda: Padding([rng.randint(0, keys) for _ in range(self.rows)], side=rng.choice(("left", "right"))),
            13: lambda: Segments([[rng.randint(-1, 2) for _ in range(keys)] for _ in range(self.rows)]),
        }
        if kind in simple:
            if kind in (12, 13) and not self.rows:
                return Full()
            return simple[kind]()
        grid, start = self.grid, 0 if self.family == "positions" else rng.choice((0, 0, 0, 1, 3))
        both = lambda low: rng.choice((rng.randint(low, 3), (rng.randint(low, 3), rng.randint(low, 3))))  # noqa: E731
        if kind < 16:
            edges = "clip" if self.family == "positions" else rng.choice(("clip", "shift"))
            return Neighborhood(grid, both(0), step=some(2), edges=edges, start=start)
        if kind == 16:
            return GridWindow(grid, both(1), shift=both(0), start=start)
        return GridStride(grid, both(1), start=start) if kind == 17 else Axial(grid, start=start)

    def _kinds(self) -> tuple[int, ...]:
        """Which patterns a family may draw: those that its backend accepts."""
        if self.family == "dense":
            return (0, 2) if self.queries == self.keys else (0,)
        if self.family == "features":
            return (0, 2, 2, 12) if self.rows else (0, 2)
        if self.family == "few":
            return (0, 2, 2, 4, 4, 7, 12) if self.rows else (0, 2, 4, 7)
        if self.family == "positions":
            if self.scale != 0:
                return (0,)
            return (0, 0, 0, 14, 17, 18) if self.image else (0, 0, 2, 4, 6)
        return tuple(range(19))

    def _draw_bias(self) -> Input | Bias | None:
        rng = self.rng
        if self.family != "positions" and rng.random() < 0.45:
            return None
        if self.family == "dense" or (self.family == "any" and rng.random() < 0.5):
            dtype = self.dtype if self.family == "dense" or rng.random() < 0.8 else torch.float32
            shape = [*self.batch, self.heads, self.queries, self.keys]
            shape = [1 if rng.random() < 0.2 else size for size in shape]
            shape = tuple(
                shape[rng.choice((0, len(self.batch), len(self.batch), len(self.batch) + 1, len(shape) - 1)) :]
            )
            return self._bias_input(shape, dtype)
        heads = rng.choice((1, self.heads))
        square = self.queries == self.keys
        grid = self.grid
        hills = (
            lambda: Quadratic(heads, grid if self.image else None, generator=self.generator),
            lambda: Gaussian(heads, grid if self.image else None, generator=self.generator),
        )
        on_a_line = (
            lambda: Alibi(heads),
            lambda: RelativeTable(heads, distance=rng.randint(1, 6), generator=self.generator),
            lambda: Quadratic(heads, generator=self.generator),
            lambda: Gaussian(heads, generator=self.generator),
            lambda: Shift(heads, [[rng.randint(-3, 3)] for _ in range(heads)]),
        )
        on_a_grid = (
            lambda: RelativeTable(heads, grid=grid, generator=self.generator),
            lambda: RowColumn(heads, grid, generator=self.generator),
            lambda: Quadratic(heads, grid if square else None, generator=self.generator),
            lambda: Gaussian(heads, grid, generator=self.generator),
        )
        others = (
            lambda: RelativeTable(heads, grid=grid, start=1, generator=self.generator),
            lambda: TransformerXL(self.heads, max(1, self.dim), generator=self.generator),
        )
        choices: tuple[Callable[[], Bias], ...] = (*on_a_line, *on_a_grid, *others)
        if self.family == "positions":
            choices = hills if self.scale != 0 else on_a_grid if self.image else on_a_line
        made = rng.choice(choices)
        bias = made()
        if isinstance(bias, TransformerXL) and not self.dim:
            return None
        for parameter in bias.parameters():
            parameter.requires_grad_(rng.random() < 0.7)
        dtype = torch.float32 if self.dtype == torch.bfloat16 else self.dtype
        return bias.to(dtype)

    def _bias_input(self, shape: tuple[int, ...], dtype: torch.dtype) -> Input:
        rng, learns = self.rng, self.rng.random() < 0.6
        kind = rng.choice(("plain", "transposed", "transposed", "expanded", "every second"))
        made = lambda s: self._normal(s).to(dtype)  # noqa: E731
        if kind == "transposed" and len(shape) > 1:
            one, other = rng.sample(range(len(shape)), 2)
            turned = list(shape)
            turned[one], turned[other] = turned[other], turned[one]
            return Input(made(tuple(turned)), lambda x: x.transpose(one, other), 1, learns)
        if kind == "expanded" and shape:
            axis = rng.randrange(len(shape))
            base = tuple(1 if n == axis else size for n, size in enumerate(shape))
            return Input(made(base), lambda x: x.expand(shape), max(1, shape[axis]), learns)
        if kind == "every second" and shape:
            return Input(made((*shape[:-1], 2 * shape[-1])), lambda x: x[..., ::2], 1, learns)
        return Input(made(shape), lambda x: x, 1, learns)

    def _plant(self) -> None:
        """NaN, infinities and numbers whose products overflow."""
        rng = self.rng
        fate = rng.random()
        if fate < 0.25:
            for name in rng.sample(sorted(self.inputs), rng.randint(1, len(self.inputs))):
                self.inputs[name].plant(rng, rng.choice((1, 1, 2, 4)))
        if "bias" in self.inputs and rng.random() < 0.3:
            leaf = self.inputs["bias"].leaf
            leaf.masked_fill_(torch.rand(leaf.shape, generator=self.generator) < rng.choice((0.1, 0.5, 1.0)), -math.inf)
        if 0.25 < fate < 0.32 and self.dim and not self._hard and not self.features:
            huge = 1e200 if self.dtype == torch.float64 else 1e30
            for name in ("query", "key"):
                given = self.inputs[name]
                channel = given.view(given.leaf)[..., 0]
                drawn = torch.randint(-2, 3, channel.shape, generator=self.generator)
                with torch.no_grad():
                    channel.copy_(torch.where(drawn.abs() > 1, drawn.sign() * huge, 0.0)) if _is_dense(
                        channel
                    ) else None

    # Running

    def call(self, inputs: dict[str, Tensor], backend: str) -> Tensor:
        query, key, value = (
            inputs[name].transpose(-1, -2) if self.layout == "columns" else inputs[name]
            for name in ("query", "key", "value")
        )
        fields, how = self._fields(inputs), dict(backend=backend, layout=self.layout)
        if self.whole:
            output = attend(query, key, value, Attention(**fields), **how)
        else:
            output = attend(query, key, value, **fields, **how)
        return output.transpose(-1, -2) if self.layout == "columns" else output

    def request(self, inputs: dict[str, Tensor]) -> Request:
        """What the backends are asked."""
        return make_request(inputs["query"], inputs["key"], inputs["value"], None, None, self._fields(inputs))[0]

    def _fields(self, inputs: dict[str, Tensor]) -> dict:
        bias = inputs.get("bias", self.bias if isinstance(self.bias, Bias) else None)
        feature_map = FEATURES[self.features] if self.features == "softplus" else self.features
        return dict(pattern=self.pattern, scale=self.scale, bias=bias, feature_map=feature_map)

    def __str__(self) -> str:
        shapes = "  ".join(f"{name} {tuple(given.view(given.leaf).shape)}" for name, given in self.inputs.items())
        bias = "tensor" if isinstance(self.bias, Input) else self.bias
        learn = [name for name, given in self.inputs.items() if given.learns]
        lines = [
            f"{self.pattern!r} | scale {self.scale} | bias {bias} | features {self.features}",
            f"{shapes} | {self.dtype} | {self.layout} | learn {learn}",
            f"replay: PYTHONPATH=tests python -m operator_cases --seed {self.seed} --cases 1",
        ]
        return "\n  ".join(lines)


def _is_dense(view: Tensor) -> bool:
    """Whether entries of a view are not one and the same number."""
    return all(stride or size <= 1 for size, stride in zip(view.shape, view.stride(), strict=True))
