"""Options about a target are applied or refused with a reason, and the target itself is not modified."""

from __future__ import annotations

import threading

import pytest
import torch
from agreement import refused
from torch import nn

from regard.adapters import adapt
from regard.adapters.rng import Rng
from regard.errors import InputError
from regard.laws import check
from regard.patterns import Causal, Window


def plain(q, k, v, mask=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1) @ v


class Keeping(nn.Module):
    """Keeps its weights with their history, and a lock: neither can be copied by Python's own means."""

    def __init__(self):
        super().__init__()
        self.inner, self.drop, self.lock = nn.Linear(6, 18), nn.Dropout(0.1), threading.Lock()

    def forward(self, x, mask=None):
        with self.lock:
            q, k, v = self.inner(x).chunk(3, -1)
            scores = q @ k.mT / 6**0.5
            if mask is not None:
                scores = scores.masked_fill(~mask[:, None, :], -torch.inf)
            self.weights = self.drop(scores.softmax(-1))
            return self.weights @ v


@pytest.mark.slow
def test_a_module_that_cannot_be_copied_is_judged_rightly_and_left_as_it_was():
    module = Keeping().train()
    module(torch.randn(2, 3, 6)).sum().backward()
    weights, gradient = module.weights, module.inner.weight.grad.clone()
    report = check(module, claims=["padding", "determinism", "paths", "statelessness", "gradients"], fast=True)
    assert report.ok, report
    assert module.training
    assert module.drop.p == 0.1
    assert module.weights is weights
    assert torch.equal(module.inner.weight.grad, gradient)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mask": "show"}, ("mask='show'", 'mask="hide"')),
        ({"empty": "none"}, ("empty='none'", 'empty="mean"')),
        ({"align": "middle"}, ("align='middle'", 'align="start"')),
        ({"layout": "rows"}, ("layout='rows'", 'layout="tokens"')),
        ({"scale": "x"}, ("scale='x'", "a number")),
        ({"left": "no"}, ("left='no'", "left=True")),
        ({"pattern": 3}, ("pattern=3", "Causal()")),
        ({"heads": 0}, ("heads=0", "at least one")),
        ({"heads": 4, "kv_heads": 3}, ("does not run as an operator",)),
        ({"claims": []}, ("no law is named",)),
    ],
)
def test_a_word_that_means_nothing_is_refused(options, words):
    with refused(InputError, *words):
        check(plain, **({"claims": ["scale"]} | options))


def test_a_pattern_may_be_given_as_text():
    assert adapt(plain, pattern="Causal() & Window(3, 0)").conventions.pattern == Causal() & Window(3, 0)


def test_an_additive_mask_is_given_as_numbers():
    def additive(x, mask=None):
        scores = x @ x.mT / x.shape[-1] ** 0.5
        return (scores if mask is None else scores + mask[:, None, :]).softmax(-1) @ x

    assert check(additive, kind="layer", mask="additive", claims=["padding"], fast=True).ok
    assert not check(additive, kind="layer", claims=["padding"], fast=True).ok


def test_a_mask_over_keys_is_found_out():
    def layer(x, mask=None):
        heads = x[:, None].expand(-1, 3, -1, -1)
        return plain(heads, heads, heads, mask).mean(1)

    subject = adapt(layer, "layer", channels=4)
    assert subject.form is not None
    assert subject.form.broadcast
    assert check(layer, kind="layer", channels=4, claims=["padding"], fast=True).ok


def test_a_mask_that_is_always_refused_breaks_the_law_that_is_claimed():
    def layer(x, mask=None):
        if mask is not None:
            raise RuntimeError("masks come next year")
        return x @ x.mT @ x

    verdict = check(layer, kind="layer", claims=["padding"]).verdicts[0]
    assert verdict.outcome == "broken"
    assert "masks come next year" in verdict.reason


def test_a_wrapper_keeps_its_mask():
    inner = Keeping()

    class Wrapper(nn.Module):
        def forward(self, x, **words):
            return inner(x, **words)

    assert "mask" in adapt(Wrapper(), "layer", channels=6).abilities


def test_abilities_of_a_target_may_be_given():
    assert "gradients" not in adapt(plain, gradients=False).abilities
    adapter = adapt(Keeping(), "layer", weights=lambda module, x, mask: (module(x, mask), module.weights)[1][:, None])
    assert adapter.weights(adapter.draw(2, 5, Rng(0)))[0].shape == (2, 1, 5, 5)


def test_a_named_output_is_preferred_to_weights_beside_it():
    subject = adapt(lambda x: {"weights": x @ x.mT, "out": x * 1}, "layer", channels=4)
    assert subject.run(torch.ones(2, 3, 4)).shape == (2, 3, 4)
