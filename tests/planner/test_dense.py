"""Small attentions are planned from the dense mask, as exactly as large ones by boxes."""

import importlib

import pytest
import torch
from catalog import LENGTHS, PATTERNS, TOKENS, fits

from regard import Causal, Padding, Strided, Window, plan
from regard.patterns import Lengths
from regard.planner import make_plans
from regard.planner.build import LEAF
from regard.planner.dense import MOST_PAIRS, is_small


@pytest.fixture(autouse=True)
def _plans_off_the_square(monkeypatch, general_plans):
    monkeypatch.setattr(importlib.import_module("regard.planner.dense"), "MOST_PAIRS", MOST_PAIRS)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_a_small_plan_rebuilds_its_pattern(pattern):
    for queries, keys in [*LENGTHS, (0, TOKENS), (3, 0), (1, 1)]:
        if not fits(pattern, (queries, keys)):
            continue
        expected = pattern.matrix(queries, keys).long()
        for made in make_plans(pattern, pattern.lengths(queries, keys), (4, 16, 128)):
            assert torch.equal(made.matrix(), expected if expected.ndim == 3 else expected[None]), (queries, keys)
            assert made.pairs == int(expected.sum())


@pytest.mark.parametrize("lengths", [(35, 35), (7, 35), (35, 7), (1, 1)])
@pytest.mark.parametrize("pattern", [Causal() & Window(5, 0) | Window(0, 1), Causal(), Window(30, 30)], ids=str)
def test_runs_hold_the_keys_that_some_query_sees_and_long_runs_that_all_see_are_whole(pattern, lengths):
    (made,) = make_plans(pattern, Lengths(*lengths), (8,))
    (part,) = made.parts
    assert part.square is not None
    for tile in range(part.tiles):
        mask = pattern.matrix(*lengths)[part.queries(tile)]
        assert part.keys(tile).tolist() == mask.any(0).nonzero().flatten().tolist()
        every = mask.all(0).nonzero().flatten()
        whole = part.keys(tile, whole=True).tolist()
        assert whole == (every.tolist() if len(every) >= LEAF or mask.all(0).equal(mask.any(0)) else [])


def test_only_small_squares_in_natural_order_are_evaluated():
    assert is_small(Causal(), Lengths(128, 128))
    assert not is_small(Causal(), Lengths(128, 129))
    assert not is_small(Padding([3, 128]), Lengths(128, 128))  # two squares
    assert not is_small(Strided(3), Lengths(9, 9))  # sorting makes it dense
    assert plan(Causal(), 129).parts[0].square is None
