"""Any pattern, any shape, any bias: the kernels agree with the reference in float64, values and gradients."""

import copy
import math
from dataclasses import dataclass

import pytest
import torch
from catalog import assert_agree, bounds, fits, results, share_grids
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from regard import (
    Alibi,
    Axial,
    Blocks,
    Causal,
    First,
    Full,
    GridStride,
    GridWindow,
    Neighborhood,
    Padding,
    Pattern,
    Random,
    RelativeTable,
    Segments,
    Selected,
    Strided,
    Where,
    Window,
    attend,
)

few = st.integers(0, 12)
some = st.integers(1, 9)


def neighborhood(grid: tuple[int, int], radius: int, step: int, shift: bool) -> Pattern:
    """Shifted at the edges only where it fits its grid."""
    shift = shift and (2 * radius + 1) * step <= min(grid)
    return Neighborhood(grid, radius, step, edges="shift" if shift else "clip")


def leaves(keys: int, batch: int) -> st.SearchStrategy[Pattern]:
    """One pattern of every kind, for so many keys and batch rows."""
    counts = st.lists(st.integers(0, keys), min_size=batch, max_size=batch)
    ids = st.lists(st.lists(st.integers(-1, 3), min_size=keys, max_size=keys), min_size=batch, max_size=batch)
    grid = st.tuples(some, few).map(lambda pair: ((math.ceil(keys / pair[0]), pair[0]), pair[1]))
    shape = st.tuples(some, some)
    return st.one_of(
        st.sampled_from([Full(), Causal()]),
        st.builds(Window, few, few, some),
        st.builds(Strided, some),
        st.builds(First, some),
        st.builds(Selected, st.lists(st.integers(0, keys - 1), min_size=1, max_size=4, unique=True)),
        st.builds(Random, some, few, some),
        st.builds(Blocks, some),
        st.builds(Padding, counts, st.sampled_from(["left", "right"])),
        ids.map(lambda rows: Segments(torch.tensor(rows))) if keys <= 80 else st.just(Blocks(7)),
        st.tuples(grid, some, some, st.booleans()).map(lambda a: neighborhood(a[0][0], *a[1:])),
        st.tuples(grid, shape).map(lambda a: GridWindow(a[0][0], a[1], start=a[0][1])),
        st.tuples(grid, shape).map(lambda a: GridStride(a[0][0], a[1], start=a[0][1])),
        grid.map(lambda pair: Axial(pair[0], start=pair[1])),
        some.map(lambda n: Where(lambda i, j: (i + j) % 5 != n)),
    )


def expressions(keys: int, batch: int) -> st.SearchStrategy[Pattern]:
    def combine(inner):
        pair = st.tuples(inner, inner).filter(share_grids)
        return st.one_of(pair.map(lambda p: p[0] & p[1]), pair.map(lambda p: p[0] | p[1]), inner.map(lambda p: ~p))

    return st.recursive(leaves(keys, batch), combine, max_leaves=4)


@dataclass
class Case:
    """One attention, with its numbers told by a seed."""

    pattern: Pattern
    lengths: tuple[int, int]
    batch: int
    kv_heads: int
    group: int
    dim: int
    value_dim: int
    scale: float | None
    bias: str
    dtype: torch.dtype
    seed: int

    def inputs(self):
        generator = torch.Generator().manual_seed(self.seed)
        queries, keys = self.lengths
        shapes = [
            (self.batch, self.kv_heads * self.group, queries, self.dim),
            (self.batch, self.kv_heads, keys, self.dim),
            (self.batch, self.kv_heads, keys, self.value_dim),
        ]
        return [torch.randn(shape, generator=generator, dtype=self.dtype).requires_grad_() for shape in shapes]

    def made_bias(self):
        generator = torch.Generator().manual_seed(self.seed + 1)
        queries, keys = self.lengths
        heads = self.kv_heads * self.group
        square = (self.batch, heads, queries, keys)
        if self.bias.startswith("tensor"):
            shape = [size if kept == "x" else 1 for size, kept in zip(square, self.bias[-4:], strict=True)]
            return torch.randn(shape, generator=generator, dtype=self.dtype).requires_grad_()
        made = {
            "none": lambda: None,
            "alibi": lambda: Alibi(heads, dtype=self.dtype),
            "table": lambda: RelativeTable(heads, distance=5, generator=generator, dtype=self.dtype),
            "one table": lambda: RelativeTable(1, distance=3, generator=generator, dtype=self.dtype),
            "grid": lambda: RelativeTable(heads, grid=(3, 7), start=2, generator=generator, dtype=self.dtype),
        }
        return made[self.bias]()


@st.composite
def cases(draw, shortest=1, longest=80, widest=70) -> Case:
    lengths = (draw(st.integers(shortest, longest)), draw(st.integers(shortest, longest)))
    batch = draw(st.integers(1, 3))
    pattern = draw(expressions(lengths[1], batch))
    assume(fits(pattern, lengths))
    return Case(
        pattern=pattern,
        lengths=lengths,
        batch=batch,
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        dim=draw(st.integers(1, widest)),
        value_dim=draw(st.integers(1, widest)),
        scale=draw(st.sampled_from([None, None, 0.0, -0.7, 1.3, 30.0, -30.0])),
        bias=draw(
            st.sampled_from(["none", "none", "alibi", "table", "one table", "grid"])
            | st.text("x1", min_size=4, max_size=4).map("tensor ".__add__)
        ),
        dtype=draw(st.sampled_from([torch.float32, torch.float64])),
        seed=draw(st.integers(0, 1000)),
    )


def doubled(bias):
    if bias is None:
        return None
    return bias.detach().double().requires_grad_() if isinstance(bias, torch.Tensor) else copy.deepcopy(bias).double()


def largest_score(bias, lengths):
    if bias is None:
        return 0.0
    if not isinstance(bias, torch.Tensor):
        bias = bias.scores(torch.arange(lengths[0])[:, None] + lengths[1] - lengths[0], torch.arange(lengths[1]))
    return float(bias.detach().abs().max())


def assert_case_agrees(case: Case, tested=attend):
    inputs, bias = case.inputs(), case.made_bias()
    words = dict(pattern=case.pattern, scale=case.scale)
    found = results(tested, *inputs, bias=bias, backend="native", **words)
    truth = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = results(attend, *truth, bias=doubled(bias), backend="reference", **words)
    assert_agree(found, expected, bounds(*truth, case.scale, case.dtype, largest_score(bias, case.lengths)))


quietly = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
)


@settings(quietly, max_examples=80)
@given(cases())
def test_any_attention_agrees(case):
    assert_case_agrees(case)


@settings(quietly, max_examples=40)
@given(cases(widest=20))
def narrow_cases_agree(case):
    assert_case_agrees(case)


def test_any_attention_agrees_in_many_segments(small_segments):
    with small_segments():
        narrow_cases_agree()


@pytest.mark.slow
@settings(quietly, max_examples=15)
@given(cases(shortest=200, longest=700, widest=20))
def test_any_attention_agrees_over_several_blocks_of_keys(case):
    assert_case_agrees(case)


@pytest.mark.slow
@settings(quietly, max_examples=600)
@given(cases())
def test_very_many_attentions_agree(case):
    assert_case_agrees(case)


@pytest.mark.slow
@settings(quietly, max_examples=60)
@given(cases(shortest=200, longest=1100))
def test_many_long_attentions_agree(case):
    assert_case_agrees(case)


def test_the_agreement_of_a_case_can_fail():
    case = Case(Causal(), (40, 40), 2, 1, 2, 9, 7, None, "table", torch.float32, 3)
    assert_case_agrees(case)

    def forgetful(*tensors, pattern, **words):
        return attend(*tensors, pattern=pattern & Window(38, 0), **words)

    with pytest.raises(AssertionError, match="off by"):
        assert_case_agrees(case, forgetful)
