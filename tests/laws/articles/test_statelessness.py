"""Statelessness: what was asked before, or is asked at the same time, changes no answer."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from caches import RIGHT, Filled
from strangers import Layer, causal, fused, naive
from torch import nn

from regard.laws import check


class Growing(Layer):
    """Keeps a table that grows with the longest input, and is the same for all."""

    def __init__(self):
        super().__init__()
        self.table = torch.zeros(0)

    def forward(self, x, mask=None):
        if len(self.table) < x.shape[1]:
            self.table = torch.arange(x.shape[1], dtype=torch.float64).cos()
        return super().forward(x + self.table[: x.shape[1], None].to(x), mask)


LOCK = threading.Lock()


class Locked(Layer):
    def forward(self, x, mask=None):
        with LOCK:
            return super().forward(x, mask)


class FirstMask(Layer):
    """Keeps the causal mask of its first call; longer inputs see everything."""

    seen = None

    def forward(self, x, mask=None):
        query, key, value = self.split(x)
        if self.seen is None:
            self.seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = query @ key.mT
        if x.shape[1] <= len(self.seen):
            scores = scores.masked_fill(~self.seen[: x.shape[1], : x.shape[1]], -1e30)
        return self.merge(scores.softmax(-1) @ value)


class KeptByShape(Layer):
    kept = None

    def forward(self, x, mask=None):
        query, key, value = self.split(x)
        if self.kept is None or self.kept[0].shape != key.shape:
            self.kept = (key, value)
        return self.merge(self.weights(query, self.kept[0], mask) @ self.kept[1])


class OnTheModule(Layer):
    """Keys and values pass over attributes of the module: two threads meet there."""

    def forward(self, x, mask=None):
        query, self.key, self.value = self.split(x)
        weights = self.weights(query, self.key, mask)
        return self.merge(weights @ self.value)


class Longest(Layer):
    longest = 0

    def forward(self, x, mask=None):
        self.longest = max(self.longest, x.shape[1])
        return super().forward(x * math.log(2 + self.longest), mask)


class Sticky(Layer):
    last = None

    def forward(self, x, mask=None):
        self.last = mask if mask is not None else self.last
        fits = self.last is not None and self.last.shape == x.shape[:2]
        return super().forward(x, self.last if fits else mask)


class SharedPool(nn.Module):
    """Every cache is the same one."""

    pool: dict = {}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.layer = Filled()

    def forward(self, x, cache=None):
        if cache is None:
            return self.layer(x)
        if not cache:
            SharedPool.pool.clear()
            cache["started"] = True
        return self.layer(x, SharedPool.pool)


MEMO: dict = {}


def memo(query, key, value, mask=None):
    """The first mask of each shape serves all later ones."""
    if mask is not None:
        mask = MEMO.setdefault(tuple(query.shape), mask)
    return naive(query, key, value, mask)


def changed_value(query, key, value, mask=None):
    output = naive(query, key, value, mask)
    value.mul_(1.01)
    return output


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (naive, "operator"),
        (causal, "operator"),
        (fused, "operator"),
        (Layer(), "layer"),
        (Growing(), "layer"),
        (Locked(), "layer"),
        (nn.MultiheadAttention(12, 3, batch_first=True), None),
        RIGHT["filled"],
        RIGHT["inside"],
        RIGHT["model"],
    ],
    ids=["naive", "causal", "fused", "layer", "growing", "locked", "torch", "filled", "inside", "model"],
)
def test_the_right_ones_keep_nothing_that_matters(target, kind):
    verdict = check(target, kind=kind, claims=["statelessness"], seed=4, fast=True).verdicts["statelessness"]
    assert verdict.outcome == "holds"
    assert verdict.refused == 0


@pytest.mark.parametrize(
    "target",
    [FirstMask(), KeptByShape(), OnTheModule(), Longest(), Sticky(), SharedPool()],
    ids=lambda target: type(target).__name__,
)
def test_layers_that_remember_are_found(target):
    assert check(target, kind="layer", claims=["statelessness"]).verdicts["statelessness"].outcome == "broken"


@pytest.mark.parametrize("target", [memo, changed_value], ids=lambda target: target.__name__)
def test_operators_that_remember_are_found(target):
    assert check(target, kind="operator", claims=["statelessness"]).verdicts["statelessness"].outcome == "broken"


def test_a_race_shows_every_time():
    verdict = check(OnTheModule(), kind="layer", claims=["statelessness"], seed=1).verdicts["statelessness"]
    assert verdict.witness is not None
    assert verdict.witness.changed == "another call at the same time"
