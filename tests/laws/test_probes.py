"""Probes: properties of a subject that are found by running it."""

from __future__ import annotations

import pytest
from plain import Layer, Words, alibi, blocks, both_ways_alibi, both_ways_window, causal, full, rotary, window

from regard.adapters import adapt
from regard.adapters.rng import Rng
from regard.laws.probes import (
    counts_positions,
    draw_other_content,
    ignores_order,
    is_causal,
    owes_left_padding,
    takes_length,
)


@pytest.mark.parametrize(
    ("target", "expected"),
    [(causal, True), (window, True), (alibi, True), (rotary, True), (full, False), (both_ways_window, False)],
)
def test_causality_shows_in_a_short_sequence(target, expected):
    assert is_causal(adapt(target, "operator")) is expected


def test_only_absolute_positions_show_in_repeated_tokens():
    assert not any(counts_positions(adapt(target, "operator")) for target in (full, rotary, both_ways_alibi, window))
    assert counts_positions(adapt(Words(False), "model"))


@pytest.mark.parametrize(
    ("target", "expected"), [(full, True), (blocks, False), (both_ways_window, False), (causal, False)]
)
def test_two_orders_stand_for_all(target, expected):
    subject = adapt(target, "operator")
    assert ignores_order(subject, subject.draw(1, 5, Rng(3))) is expected


@pytest.mark.parametrize(
    ("target", "kind", "expected"),
    [
        (full, "operator", True),
        (rotary, "operator", True),
        (both_ways_alibi, "operator", True),
        (blocks, "operator", False),
        (Layer(blocks), "layer", False),
        (Layer(window), "layer", True),
        (Words(), "model", True),
        (Words(False), "model", False),
    ],
)
def test_left_padding_is_required_of_shift_invariant_subjects(target, kind, expected):
    subject = adapt(target, kind)
    assert owes_left_padding(subject, subject.draw(1, 7, Rng(5)), 2) is expected


def test_left_padding_is_required_where_it_is_declared():
    subject = adapt(Words(False), "model", left=True)
    assert owes_left_padding(subject, subject.draw(1, 7, Rng(5)), 2)


def test_other_content_is_other_at_every_token():
    subject = adapt(Words(), "model", vocab_size=2)
    x = subject.draw(3, 17, Rng(1))
    assert (draw_other_content(subject, x, Rng(2)) != x).all()


def test_lengths_beyond_the_table_are_not_taken():
    subject = adapt(Words(), "model", max_length=11)
    assert [takes_length(subject, tokens) for tokens in (0, 1, 11, 12)] == [False, True, True, False]
