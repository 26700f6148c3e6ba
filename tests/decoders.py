"""The smallest decoder, with any kind of positions, and ways to split its text into chunks."""

import itertools

import torch

from regard import (
    Alibi,
    Attention,
    Causal,
    Quadratic,
    RegardError,
    RelativeTable,
    TransformerXL,
)
from regard.layers import (
    AttentionSizes,
    LearnedPositions,
    MultiHeadAttention,
    Rotary,
    SinusoidalPositions,
)

F64 = torch.float64


# What the requirements ask of step by step against all at once.
TOLERANCE = {F64: 1e-12, torch.float32: 1e-5}


SIZES = AttentionSizes(13, heads=6, kv_heads=2, key=4, value=5, output=11)


POSITIONS = ["none", "sinusoidal", "learned", "halves", "pairs", "alibi", "table", "quadratic", "transformer-xl"]


def random(*shape, seed=0, dtype=F64):
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Decoder(torch.nn.Module):
    """Tokens, their positions, one attention: the smallest thing that decodes."""

    def __init__(self, position="none", pattern=None, *, dtype=F64, sizes=SIZES, **words):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        heads, dim = sizes.heads, sizes.key
        bias = {
            "alibi": lambda: Alibi(heads),
            "table": lambda: RelativeTable(heads, distance=6, generator=generator),
            "quadratic": lambda: Quadratic(heads, generator=generator),
            "transformer-xl": lambda: TransformerXL(heads, dim, generator=generator),
        }.get(position, lambda: None)()
        rotary = Rotary(dim, 100.0, position) if position in ("halves", "pairs") else None
        self.added = None
        if position == "sinusoidal":
            self.added = SinusoidalPositions(sizes.input - sizes.input % 2)
        if position == "learned":
            self.added = LearnedPositions(200, sizes.input)
        pattern = Causal() if pattern is None else pattern
        described = Attention(pattern=pattern, bias=bias, **words)
        self.attention = MultiHeadAttention(sizes, attention=described, rotary=rotary)
        self.to(dtype).eval()
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.copy_(random(*parameter.shape, seed=100 + index) * 0.4)

    def with_positions(self, x, positions):
        if isinstance(self.added, SinusoidalPositions):
            table = self.added(positions, x.dtype)
            return x + torch.nn.functional.pad(table, (0, x.shape[-1] - table.shape[-1]))
        return x if self.added is None else x + self.added(positions)

    @torch.no_grad()
    def whole(self, x, pattern=None):
        return self.attention(self.with_positions(x, torch.arange(x.shape[1])), pattern=pattern)

    @torch.no_grad()
    def step(self, x, cache, pattern=None, lengths=None):
        placed = self.with_positions(x, cache.positions(x.shape[1], lengths))
        return self.attention(placed, cache=cache, pattern=pattern, lengths=lengths)

    def decode(self, x, chunks, cache, pattern_at=None):
        assert sum(chunks) == x.shape[1]
        outputs, done = [], 0
        for chunk in x.split(chunks, dim=1):
            done += chunk.shape[1]
            outputs.append(self.step(chunk, cache, pattern_at and pattern_at(done)))
        return torch.cat(outputs, 1)


def splits(total, seed=0):
    """Ways to cut a text: at once, one by one, a little and then much, and at random."""
    generator = torch.Generator().manual_seed(seed)
    cuts = [[total], [1] * total, [1, 2, total - 3], [total - 2, 1, 1]]
    for _ in range(2):
        places = torch.randperm(total - 1, generator=generator)[:5].add(1).sort().values.tolist()
        cuts.append([b - a for a, b in itertools.pairwise([0, *places, total])])
    return cuts


def assert_close(found, expected, dtype=F64):
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= TOLERANCE[dtype]


def assert_four_parts(error: RegardError):
    assert isinstance(error, RegardError)
    assert error.headline.endswith(".")
    assert error.asked
    assert error.because
    assert error.instead
