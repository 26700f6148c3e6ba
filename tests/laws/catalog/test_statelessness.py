"""L22: earlier and concurrent calls do not change an output."""

from __future__ import annotations

import functools
import math
import threading

import pytest
import torch
from caches import RIGHT, Filled
from plain import slow
from third_party_attention import Layer, causal, fused, naive
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
        pytest.param(causal, "operator", marks=pytest.mark.slow),
        pytest.param(fused, "operator", marks=pytest.mark.slow),
        pytest.param(Layer(), "layer", marks=pytest.mark.slow),
        (Growing(), "layer"),
        pytest.param(Locked(), "layer", marks=pytest.mark.slow),
        pytest.param(nn.MultiheadAttention(12, 3, batch_first=True), None, marks=pytest.mark.slow),
        pytest.param(nn.TransformerEncoderLayer(12, 4, 20, batch_first=True), None, marks=pytest.mark.slow),
        pytest.param(*RIGHT["filled"], marks=pytest.mark.slow),
        pytest.param(*RIGHT["inside"], marks=pytest.mark.slow),
        pytest.param(*RIGHT["model"], marks=pytest.mark.slow),
    ],
    ids=["naive", "causal", "fused", "layer", "growing", "locked", "torch", "encoder", "filled", "inside", "model"],
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
def test_layers_with_state_are_found(target):
    assert (
        check(target, kind="layer", claims=["statelessness"], fast=True).verdicts["statelessness"].outcome == "broken"
    )


@pytest.mark.parametrize("target", [memo, changed_value], ids=lambda target: target.__name__)
def test_operators_with_state_are_found(target):
    assert (
        check(target, kind="operator", claims=["statelessness"], fast=True).verdicts["statelessness"].outcome
        == "broken"
    )


def test_a_race_shows_every_time():
    verdict = check(OnTheModule(), kind="layer", claims=["statelessness"], seed=1, fast=True).verdicts["statelessness"]
    assert verdict.counterexample is not None
    assert verdict.counterexample.changed == "another call at the same time"


def triangle(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


BY_KEYS: dict = {}


def mask_of_the_first_queries(query, key, value, mask=None):
    """The triangle is kept for a number of keys, whatever the queries were."""
    queries, keys = query.shape[-2], key.shape[-2]
    if keys not in BY_KEYS or len(BY_KEYS[keys]) < queries:
        BY_KEYS[keys] = triangle(queries, keys)
    seen = BY_KEYS[keys][:queries]
    return naive(query, key, value, seen if mask is None else seen & mask)


def writes_the_mask(query, key, value, mask=None):
    seen = triangle(query.shape[-2], key.shape[-2])
    if mask is not None and mask.shape[-2:] == seen.shape:
        mask &= seen
        seen = mask
    elif mask is not None:
        seen = seen & mask
    return naive(query, key, value, seen)


BY_SHAPE: dict = {}
LAST = None


@functools.lru_cache
def first_of_its_kind(shape):
    return []


class Stored(Layer):
    """The first mask of each shape serves all later ones, wherever it is kept."""

    def forward(self, x, mask=None):
        return super().forward(x, mask if mask is None else self.kept(mask))


class OnTheClass(Stored):
    store: dict = {}  # noqa: RUF012

    def kept(self, mask):
        return type(self).store.setdefault(mask.shape, mask)


class OnTheClassByName(Stored):
    store: dict = {}  # noqa: RUF012

    def kept(self, mask):
        return OnTheClassByName.store.setdefault(mask.shape, mask)


class SetOnTheClass(Stored):
    last = None

    def kept(self, mask):
        if self.last is None or self.last.shape != mask.shape:
            type(self).last = mask
        return self.last


class AtTheTopOfTheFile(Stored):
    def kept(self, mask):
        return BY_SHAPE.setdefault(mask.shape, mask)


class SetInTheFile(Stored):
    def kept(self, mask):
        global LAST
        if LAST is None or LAST.shape != mask.shape:
            LAST = mask
        return LAST


class InACache(Stored):
    def kept(self, mask):
        held = first_of_its_kind(mask.shape)
        held[:] = held or [mask]
        return held[0]


class RightlyOnTheClass(Layer):
    """A table for each length, shared by all instances, which depends on nothing else."""

    tables: dict = {}  # noqa: RUF012
    calls = 0

    def forward(self, x, mask=None):
        RightlyOnTheClass.calls += 1
        tokens = x.shape[1]
        if tokens not in self.tables:
            self.tables[tokens] = torch.arange(tokens, dtype=torch.float64).cos()
        return super().forward(x + self.tables[tokens][:, None].to(x), mask)


class Dropping(Layer):
    """Random, but without state."""

    def forward(self, x, mask=None):
        return super().forward(nn.functional.dropout(x, 0.3), mask)


def fast(target, kind, seed=0):
    return check(target, kind=kind, claims=["statelessness"], fast=True, seed=seed).verdicts["statelessness"].outcome


@pytest.mark.parametrize("target", [mask_of_the_first_queries, writes_the_mask], ids=lambda target: target.__name__)
def test_operators_are_called_with_other_query_lengths_and_pair_masks(target):
    assert fast(target, "operator") == "broken"


@pytest.mark.parametrize(
    "kind",
    [OnTheClass, SetInTheFile, InACache, *slow(OnTheClassByName, SetOnTheClass, AtTheTopOfTheFile)],
    ids=lambda kind: kind.__name__,
)
def test_what_all_instances_share_is_found(kind):
    for _ in range(2):  # what the first check left behind hides nothing from the second
        assert fast(kind(), "layer") == "broken"


@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
def test_a_table_on_the_class_may_be_shared(seed):
    assert fast(RightlyOnTheClass(), "layer", seed) == "holds"


def test_chance_is_no_memory():
    assert fast(Dropping(), "layer") == "holds"
