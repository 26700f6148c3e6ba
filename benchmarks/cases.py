"""The table: what is measured, against whom, and how many times faster we want to be at least."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import flex, peers
from benchmarks.peers import Form
from regard import Causal, First, Full, Neighborhood, Pattern, Random, Strided, Window, attend

FLEX = "FlexAttention"
SIMPLE = "simple"  # a form that a user writes first; it is shown, and no ratio is taken against it


@dataclass(frozen=True)
class Peer:
    """One competitor. Peers of one group are alternatives: the fastest of them counts."""

    name: str
    group: str
    form: Form


@dataclass(frozen=True, eq=False)
class Case:
    """One attention on one shape.

    Attributes:
        shape: batch, heads, tokens, dim.
        bars: for each group of peers the ratio, their time over ours, that we want at least. A group without a bar is
            measured and shown all the same.
        make_peers: prepares the competitors, outside the timing.
    """

    name: str
    shape: tuple[int, int, int, int]
    pattern: Pattern
    bars: Mapping[str, float]
    make_peers: Callable[[], list[Peer]]
    backward: bool = False
    feature_map: str | None = None
    _made: list[Peer] = field(default_factory=list)

    @property
    def peers(self) -> list[Peer]:
        """Made once: a second run of the table must not compile again."""
        if not self._made:
            self._made.extend(self.make_peers())
        return self._made

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, key, value and the gradient that comes from above."""
        torch.manual_seed(0)
        query, key, value, grad_output = (torch.randn(self.shape) for _ in range(4))
        # Only where gradients are wanted: FlexAttention refuses tensors that could have one.
        return *(tensor.requires_grad_(self.backward) for tensor in (query, key, value)), grad_output

    def attend(self, query: Tensor, key: Tensor, value: Tensor, backend: str) -> Tensor:
        """Ours. Linear attention has a backend of its own."""
        if self.feature_map is None:
            return attend(query, key, value, pattern=self.pattern, backend=backend)
        named = backend if backend == "reference" else "linear"
        return attend(query, key, value, pattern=self.pattern, feature_map=self.feature_map, scale=1.0, backend=named)

    @property
    def about(self) -> str:
        batch, heads, tokens, dim = self.shape
        return f"{self.pattern!r}, batch {batch}, {heads} heads, {tokens} tokens, dim {dim}"

    @property
    def gflop(self) -> float:
        """Useful operations: four per allowed pair, head and dimension; backward adds two and a half times that.

        Linear attention: update and readout of a state of dim x dim for every token; backward as much again and a half.
        """
        batch, heads, tokens, dim = self.shape
        if self.feature_map is not None:
            return (10 if self.backward else 4) * batch * heads * tokens * dim**2 / 1e9
        return (3.5 if self.backward else 1) * 4 * dim * batch * heads * self.pattern.pairs(tokens) / 1e9


def _forward_and_training(
    name: str, shape: tuple, pattern: Pattern, make: Callable, bars: tuple, **options
) -> list[Case]:
    """The forward case and the case with gradients; `make(backward)` gives the peers."""
    forward, both = bars
    return [
        Case(f"{name} forward", shape, pattern, forward, lambda: make(False), **options),
        Case(f"{name} f+b", shape, pattern, both, lambda: make(True), backward=True, **options),
    ]


def _format_shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _dense_cases() -> list[Case]:
    def make(backward: bool) -> list[Peer]:
        return [Peer("SDPA", "SDPA", scaled_dot_product_attention)]

    shapes = {(1, 8, 2048, 64): 1.0, (8, 8, 256, 64): 1.2, (64, 3, 197, 64): 1.4}
    return [
        case
        for shape, bar in shapes.items()
        for case in _forward_and_training(
            f"dense {_format_shape(shape)}", shape, Full(), make, ({"SDPA": bar}, {"SDPA": 1.0})
        )
    ]


def _causal_cases() -> list[Case]:
    def make(backward: bool) -> list[Peer]:
        return [Peer("SDPA is_causal", "SDPA", peers.causal_sdpa)]

    return [
        case
        for shape in ((1, 8, 512, 64), (8, 8, 256, 64), (16, 6, 256, 64))
        for case in _forward_and_training(
            f"causal {_format_shape(shape)}", shape, Causal(), make, ({"SDPA": 2.0}, {"SDPA": 1.6})
        )
    ]


def _small_window_cases() -> list[Case]:
    def make(backward: bool) -> list[Peer]:
        return [
            Peer("SDPA", "best torch", scaled_dot_product_attention),
            Peer("bmm + softmax + bmm", "best torch", peers.three_steps),
        ]

    shape, bar = (256, 3, 49, 32), {"best torch": 1.3}
    return _forward_and_training(f"windows {_format_shape(shape)}", shape, Full(), make, (bar, bar))


def _flex_peers(tokens: int, mask_mod: flex.MaskMod) -> list[Peer]:
    """Blocks of 128 are torch's default; smaller ones can be twice as fast where a pattern is finer than that."""
    forms = {block: flex.compiled_flex(tokens, mask_mod, block=block) for block in (128, 64)}
    return [Peer(f"FlexAttention, blocks of {block}", FLEX, form) for block, form in forms.items()]


def _window_cases(tokens: int) -> list[Case]:
    reach, pattern, chunked = 128, Window(128, 128), "chunked SDPA"

    def make(backward: bool) -> list[Peer]:
        made = [
            *(Peer(f"chunked SDPA, {n}", chunked, peers.chunked_window(tokens, reach, n)) for n in (64, 128, 256)),
            Peer("chunked SDPA, 128 joined", chunked, peers.chunked_window(tokens, reach, 128, joined=True)),
        ]
        if not backward:
            made += _flex_peers(tokens, flex.window(reach))
        if tokens <= 4096:  # the dense square takes seconds beyond that
            made.append(Peer("SDPA, mask", SIMPLE, peers.masked_sdpa(pattern, tokens)))
        return made

    bars = ({FLEX: 3.0, chunked: 2.2}, {chunked: 1.8})
    return _forward_and_training(f"Window(128, 128) {tokens} tokens", (1, 8, tokens, 64), pattern, make, bars)


def _sparse_cases() -> list[Case]:
    """Patterns inside blocks against FlexAttention; the careful torch form beside it has no bar and is shown."""
    tokens, careful = 4096, "careful torch"
    dilated, strided, random = Window(32, 32, step=4), Causal() & Strided(64), Random(3, 0, block=64)
    big_bird = Window(96, 96) | First(64) | random

    def make_dilated() -> list[Peer]:
        inner = {chunk: peers.chunked_window(tokens // 4, 32, chunk) for chunk in (32, 64)}
        return [
            *_flex_peers(tokens, flex.dilated(32, 4)),
            *(Peer(f"residues, chunks of {n}", careful, peers.by_residue(4, form)) for n, form in inner.items()),
            Peer("SDPA, mask", SIMPLE, peers.masked_sdpa(dilated, tokens)),
        ]

    def make_strided() -> list[Peer]:
        return [
            *_flex_peers(tokens, flex.causal_strided(64)),
            Peer("residues, causal SDPA", careful, peers.by_residue(64, peers.causal_sdpa)),
            Peer("SDPA, mask", SIMPLE, peers.masked_sdpa(strided, tokens)),
        ]

    def make_big_bird() -> list[Peer]:
        return [
            *_flex_peers(tokens, flex.big_bird(96, 64, random, tokens)),
            Peer("gathered blocks, SDPA", careful, peers.gathered_blocks(big_bird, random, tokens, 96)),
            Peer("SDPA, mask", SIMPLE, peers.masked_sdpa(big_bird, tokens)),
        ]

    named = {
        "dilated Window(32, 32, step=4)": (dilated, make_dilated),
        "Causal & Strided(64)": (strided, make_strided),
        "BigBird": (big_bird, make_big_bird),
    }
    shape = (1, 8, tokens, 64)
    return [
        Case(f"{name} {tokens} tokens forward", shape, pattern, {FLEX: 4.0}, make)
        for name, (pattern, make) in named.items()
    ]


def _neighborhood_cases() -> list[Case]:
    side, tiled = 56, "tiled SDPA"
    pattern = Neighborhood((side, side), 3)

    def make(backward: bool) -> list[Peer]:
        forms = {tile: peers.tiled_neighborhood(side, 3, tile) for tile in (4, 7, 8)}
        unions = {tile: f"{tile}x{tile} tiles on {tile + 6}x{tile + 6}" for tile in forms}
        made = [Peer(f"{unions[tile]}, SDPA", tiled, form) for tile, form in forms.items()]
        return [*made, Peer("SDPA, mask", SIMPLE, peers.masked_sdpa(pattern, side**2))]

    return _forward_and_training(
        "Neighborhood 7x7 on 56x56", (1, 4, side**2, 32), pattern, make, ({tiled: 2.5}, {tiled: 2.5})
    )


def _linear_cases(tokens: int) -> list[Case]:
    chunked = "chunked torch"

    def make(backward: bool) -> list[Peer]:
        made = []
        for piece in sorted({tokens, 4096, 1024}, reverse=True):
            in_pieces = f" in pieces of {piece}" if piece < tokens else ""
            for chunk in (64, 128):
                made.append(Peer(f"chunks of {chunk}{in_pieces}", chunked, peers.chunked_linear(chunk, piece)))
        if tokens <= 4096:
            made.append(Peer("whole square", SIMPLE, peers.square_linear))
        return made

    bar, shape = {chunked: 3.0}, (1, 8, tokens, 64)
    return _forward_and_training(
        f"linear causal elu1 {tokens} tokens", shape, Causal(), make, (bar, bar), feature_map="elu1"
    )


def table() -> list[Case]:
    """Every case, in the order in which they run."""
    return [
        *_dense_cases(),
        *_causal_cases(),
        *_small_window_cases(),
        *_window_cases(4096),
        *_window_cases(16384),
        *_sparse_cases(),
        *_neighborhood_cases(),
        *_linear_cases(4096),
        *_linear_cases(16384),
    ]
