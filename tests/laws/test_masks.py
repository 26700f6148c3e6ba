"""Masks that trials use."""

from __future__ import annotations

import pytest
from plain import full

from regard.adapters import adapt
from regard.adapters.rng import Rng
from regard.laws.masks import SIDES, pair_mask, token_mask


@pytest.mark.parametrize("side", SIDES)
def test_rows_hide_unequal_numbers_of_tokens_and_never_all(side):
    mask = token_mask(side, 4, 11, 6, Rng(1))
    assert (~mask).sum(1).tolist() == [6, 0, 3, 2]
    assert token_mask(side, 3, 2, 9, Rng(1)).any(1).all()


def test_sides_are_where_they_say():
    assert token_mask("left", 1, 5, 2, Rng(1)).tolist() == [[False, False, True, True, True]]
    assert token_mask("right", 1, 5, 2, Rng(1)).tolist() == [[True, True, True, False, False]]
    assert token_mask("interior", 1, 5, 2, Rng(1)).tolist() == [[True, False, False, True, True]]
    assert token_mask("row", 2, 3, 1, Rng(1)).tolist() == [[True, True, False], [False] * 3]
    assert token_mask("same", 3, 5, 2, Rng(1)).sum(1).tolist() == [3, 3, 3]
    assert token_mask("single", 3, 5, 2, Rng(1)).sum(1).tolist() == [1, 1, 1]


@pytest.mark.parametrize(("queries", "keys"), [(3, 7), (7, 3), (5, 5), (1, 2)])
def test_every_query_of_a_random_mask_sees_a_key(queries, keys):
    subject = adapt(full, "operator")
    for shape, sizes in (("shared", (1, 1)), ("pairs", (2, 1)), ("heads", (2, subject.heads))):
        mask = pair_mask(subject, shape, 2, queries, keys, Rng(1))
        assert mask.shape == (*sizes, queries, keys)
        assert mask.any(-1).all()
