"""A user's pattern with nothing but its definition has every feature of the built-in ones."""

from dataclasses import dataclass

import pytest
import torch
from catalog import TILED, assert_agree, bounds, results, tensors

from regard import Alibi, Attention, Causal, Padding, Pattern, attend, cost, plan
from regard.backends.base import Request
from regard.kernels.key_intervals import find_key_intervals
from regard.layers import KVCache, MultiHeadAttention
from regard.patterns import Lengths


@dataclass(frozen=True, repr=False)
class Logarithmic(Pattern):
    """The keys `offset + 1, 2, 4, 8, ...` places away on both sides."""

    offset: int = 0

    def _allows(self, i, j, row, lengths):
        away = (i - j).abs() + self.offset
        return (away & (away - 1)) == 0


@dataclass(frozen=True, repr=False)
class Recent(Pattern):
    """The last keys there are: what a query sees changes as tokens are appended."""

    count: int

    def _allows(self, i, j, row, lengths):
        return (j >= lengths.keys - self.count) & (i >= 0)


@dataclass(frozen=True, repr=False)
class Near(Pattern):
    """One interval of keys for each query."""

    def _allows(self, i, j, row, lengths):
        return (j - i // 2).abs() < 4


OWN = [Logarithmic(), Logarithmic(2), Recent(5), Near(), Causal() & Logarithmic(), ~Near(), Near() | Padding([35, 9])]


@pytest.mark.parametrize("lengths", [(35, 35), (1, 35), (11, 35), (300, 300)], ids=str)
@pytest.mark.parametrize("pattern", OWN, ids=repr)
def test_it_is_planned_and_counted(pattern, lengths):
    pattern = pattern if lengths[1] == 35 or pattern.rows is None else Near()
    truth = pattern.matrix(*lengths)
    planned = plan(pattern, *lengths)
    assert torch.equal(planned.matrix().bool().reshape(truth.shape), truth)
    assert pattern.pairs(*lengths) == planned.pairs == int(truth.sum())


def test_its_plan_leaves_out_hidden_keys():
    planned = plan(Near(), 300)
    assert planned.area < 300 * 300 / 3


@pytest.mark.parametrize("backend", ["auto", *TILED])
@pytest.mark.parametrize("pattern", OWN, ids=repr)
def test_every_backend_runs_it(pattern, backend):
    for lengths in ((35, 35), (3, 35)):
        inputs = tensors(lengths)
        expected = results(attend, *inputs, pattern=pattern, backend="reference")
        found = results(attend, *inputs, pattern=pattern, backend=backend)
        assert_agree(found, expected, bounds(*inputs, None, torch.float64))


@pytest.mark.parametrize("pattern", OWN, ids=repr)
def test_few_queries_get_the_decode_kernel_where_their_keys_are_neighbours(pattern):
    for lengths in (Lengths(1, 35), Lengths(4, 35), Lengths(2, 3000)):
        if pattern.rows is not None and lengths.keys != 35:
            continue
        mask = pattern.matrix(*lengths).reshape(-1, *lengths)
        together = all(
            len(row.unique_consecutive()) <= 1 + int(not row[0]) + int(not row[-1]) for row in mask.flatten(0, 1)
        )
        found = find_key_intervals(pattern, lengths)
        if found is not None:
            j = torch.arange(lengths.keys)
            assert torch.equal((j >= found[0][..., None]) & (j < found[1][..., None]), mask)
        assert together or found is None
    assert find_key_intervals(Near(), Lengths(1, 35)) is not None


@pytest.mark.parametrize("bias", [None, Alibi(3)], ids=["plain", "alibi"])
@pytest.mark.parametrize("pattern", [Logarithmic(), Near()], ids=repr)
def test_behind_causal_it_decodes_from_a_cache(pattern, bias):
    layer = MultiHeadAttention(12, heads=3, attention=Attention(pattern=Causal() & pattern, bias=bias)).double().eval()
    x = torch.randn(2, 23, 12, dtype=torch.float64)
    with torch.no_grad():
        cache = layer.new_cache()
        assert isinstance(cache, KVCache)
        steps = [layer(x[:, :5], cache=cache), *(layer(x[:, n : n + 1], cache=cache) for n in range(5, 23))]
        torch.testing.assert_close(torch.cat(steps, 1), layer(x))


def test_without_a_past_there_is_no_cache():
    assert not Logarithmic().supports_kv_cache  # it sees later keys
    assert not (Causal() & Recent(5)).supports_kv_cache  # it reads the number of keys, which was found by a trial
    assert (Causal() & Logarithmic()).supports_kv_cache


def test_conservative_results_are_right():
    for pattern in OWN:
        assert not pattern.is_full
        assert not pattern.is_causal
        assert pattern.sliding_window is None
        assert not pattern.is_shift_invariant()
        assert pattern.reach is None
        assert pattern.max_keys_per_query is None
        assert not pattern.is_key_padding


def test_it_has_a_cost_and_a_picture():
    exact = int(Logarithmic().matrix(35).sum())
    counted = cost(Attention(pattern=Logarithmic()), tokens=35, dim=7, heads=2)
    assert int(counted.macs) == 2 * 2 * 7 * exact
    assert f"P = {exact}" in str(counted)
    assert "P" in str(cost(Attention(pattern=Logarithmic()), dim=7).macs.formula)
    assert str(Near().draw(4)) == "████\n████\n████\n████"
    assert repr(Logarithmic(offset=2)) == "Logarithmic(offset=2)"
    assert "dense" not in str(Request(*tensors((3, 3)), Logarithmic(), 1.0).describe())
