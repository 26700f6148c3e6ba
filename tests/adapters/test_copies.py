"""A copy of a target shares no mutable state with it, and is otherwise equal."""

from __future__ import annotations

import copy
import functools
import pickle

import torch
from torch import nn

from regard.adapters import copies
from regard.adapters.deepcopy import deepcopy

SEEN: list = []
COUNT = 0


@functools.lru_cache
def remembered(number):
    return [number]


def helper(x):
    global COUNT
    COUNT += 1
    SEEN.append(COUNT)
    remembered(3).append(COUNT)
    return x


def asks_a_helper(x):
    return helper(x), SEEN, remembered(3)


def counter():
    count = 0

    def step():
        nonlocal count
        count += 1
        return count

    def ask():
        return step(), count

    return ask


class Base(nn.Module):
    store: dict = {}  # noqa: RUF012
    last = None

    def forward(self, x):
        type(self).store[len(self.store)] = x
        Base.last = x
        SEEN.append(x)
        return x + len(self.store)


class Derived(Base):
    def forward(self, x):
        if not isinstance(self, Derived) or type(self) is not Derived:
            raise TypeError
        return super(Derived, self).forward(super().forward(x))  # noqa: UP008


class Failing(Base):
    def forward(self, x):
        super().forward(x)
        raise RuntimeError("no")


def test_functions_that_call_each_other_are_copied_together():
    other = copies.copy_target(asks_a_helper)
    _, seen, cached = other(0)
    other(0)
    assert (seen, cached) == ([1, 2], [3, 1, 2])
    assert SEEN == []
    assert COUNT == 0
    assert remembered(3) == [3]


def test_functions_in_a_closure_go_on_sharing_its_names():
    first = counter()
    other = copies.copy_target(first)
    assert [other(), other(), first()] == [(1, 1), (2, 2), (1, 1)]


def test_a_copy_of_a_module_has_its_own_class_state():
    module = Derived()
    one, two = copies.copy_target(module), copies.copy_target(module)
    zero = torch.zeros(())
    assert type(one) is Derived
    assert [float(each(zero)) for each in (one, one, two)] == [3.0, 7.0, 3.0]
    assert Base.store == {}
    assert Base.last is None
    assert SEEN == []
    # A copy of a copy goes on from where that one is, apart from it.
    three = copy.deepcopy(one)
    assert [float(each(zero)) for each in (three, one)] == [11.0, 11.0]


def test_what_was_there_comes_back_after_a_failure():
    module = copies.copy_target(Failing())
    for _ in range(2):
        try:
            module(torch.zeros(()))
        except RuntimeError:
            assert Base.store == {}
            assert SEEN == []


def test_a_module_without_such_state_gets_no_hooks():
    other = copies.copy_target(nn.TransformerEncoderLayer(8, 2, 16))
    assert not other._forward_hooks
    assert pickle.loads(pickle.dumps(other)).linear1.in_features == 8


def test_a_deep_copy_shares_no_container_and_keeps_shared_ones_shared():
    layer = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True)
    layer.first = layer.second = {}
    layer.self_attn.register_forward_hook(lambda *_: None)
    other = deepcopy(layer)
    assert other.first is other.second
    for mine, theirs in zip(layer.modules(), other.modules(), strict=True):
        assert list(vars(mine)) == list(vars(theirs))
        for name, value in vars(mine).items():
            if isinstance(value, dict | set):
                assert type(vars(theirs)[name]) is type(value)
                assert vars(theirs)[name] is not value, name
                assert len(vars(theirs)[name]) == len(value), name


def test_an_empty_container_that_two_modules_share_is_one_container_in_the_copy():
    pair = nn.ModuleList([nn.Linear(2, 3), nn.Linear(2, 3)])
    pair[0].store = pair[1].store = set()
    other = deepcopy(pair)
    assert other[0].store is other[1].store
    assert other[0].store is not pair[0].store
