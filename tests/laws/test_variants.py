"""The search beyond the usual sizes and precisions, and its verdicts on subjects that refuse them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from regard.adapters import adapt
from regard.adapters.rng import Rng
from regard.laws import check
from regard.laws.arguments import expect_unwritten, record_arguments
from regard.laws.compare import compare
from regard.laws.half_precision import expect_like_native, make_nearly_equal_tokens
from regard.laws.search import find_views
from regard.laws.variants import LONG, LONGER, half_precisions, head_sizes, is_half, long_lengths


def attention(q, k, v, mask=None):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1) @ v


class Layer(nn.Module):
    def __init__(self, dim=12, heads=3):
        super().__init__()
        self.dim, self.heads = dim, heads
        self.qkv = nn.Linear(dim, 3 * dim)

    def attend(self, q, k, v, mask):
        return attention(q, k, v, mask)

    def forward(self, x, mask=None):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.attend(q, k, v, None if mask is None else mask[:, None, None]).transpose(1, 2).flatten(2)


class Fussy(Layer):
    """As FlexAttention on a processor: no gradients, no dispatch modes, no float64."""

    def attend(self, q, k, v, mask):
        if q.requires_grad or _get_current_dispatch_mode() is not None or q.dtype == torch.float64:
            raise NotImplementedError("there was no rule registered")
        return super().attend(q, k, v, mask)


class Hopeless(Layer):
    """Runs once, and refuses from then on."""

    runs = 0

    def attend(self, q, k, v, mask):
        Hopeless.runs += 1
        if Hopeless.runs > 8:
            raise NotImplementedError("not again")
        return super().attend(q, k, v, mask)


def test_a_case_in_half_precision_is_run_in_half_precision_alone():
    subject = adapt(Layer())
    (view,) = find_views(subject, {"tokens": 5, "dtype": "bfloat16"})
    assert view.dtype == torch.bfloat16
    assert is_half(view)
    assert [view.dtype for view in find_views(subject, {"tokens": 5})] == [torch.float64, torch.float32]


def test_a_case_with_wide_heads_is_drawn_with_wide_heads():
    subject = adapt(attention)
    for view in find_views(subject, {"num_heads": 2, "head_dim": 80}):
        assert view.draw(1, 3, Rng(0)).shape == (1, 3, 3 * 2 * 80)
        assert view.run(view.draw(1, 3, Rng(0))).shape == (1, 3, 2, 80)
    assert subject.dim == 8


def test_groups_of_heads_are_kept_by_wide_heads():
    subject = adapt(attention, "operator", heads=6, kv_heads=6)
    subject.kv_heads = 2
    assert head_sizes(adapt(attention))[0]["head_dim"] > 64
    (first, *_) = find_views(subject, {"num_heads": 6, "head_dim": 80})
    assert first.kv_heads == 2


def test_a_subject_that_came_in_half_precision_has_no_half_precision_variant():
    assert half_precisions(adapt(Layer().to(torch.bfloat16))) == []
    assert set(half_precisions(adapt(Layer()))) == {"bfloat16", "float16"}


def test_long_lengths_are_those_that_a_subject_takes_and_can_afford():
    subject = adapt(Layer())
    assert long_lengths(subject, True, LONG, LONGER) == [LONG, LONGER]
    subject.max_length = 700
    assert long_lengths(subject, True, LONG, LONGER) == [LONG]
    subject.max_length = 300
    assert long_lengths(subject, True, LONG, LONGER) == [300]
    subject.max_length = 64
    assert long_lengths(subject, True, LONG, LONGER) == []
    assert long_lengths(adapt(Layer(1536, 3), channels=1536), True, LONG) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torchs_own_attention_in_half_precision_is_its_float32_within_a_third_of_the_bound(dtype):
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(24, 3, 40, batch_first=True, norm_first=True), 3, enable_nested_tensor=False
    )
    for target in (F.scaled_dot_product_attention, nn.MultiheadAttention(24, 3, batch_first=True), encoder):
        subject = adapt(target)
        half = subject.at(dtype)
        assert half is not None
        x = subject.draw(2, 7, Rng(0))
        output, exact = half.run(x.to(dtype)).float(), subject.run(x.to(dtype).float())
        assert float((output - exact).detach().abs().max()) > 0  # it is another computation
        for observation in expect_like_native(subject, half, x, None, None, Rng(1), ""):
            assert compare(observation, 1e-7, 64.0).ratio == 0
        wrong = lambda x, mask=None, run=half.run: run(x, mask) * 1.25  # noqa: E731
        half.run = wrong
        assert any(
            compare(observation, 1e-7, 64.0).ratio > 1
            for observation in expect_like_native(subject, half, x, None, None, Rng(1), "")
        )


def test_nearly_equal_keys_weigh_about_the_same_and_have_two_kinds_of_values():
    subject = adapt(attention)
    query, key, value = subject.parted(make_nearly_equal_tokens(subject, subject.draw(1, 41, Rng(0)), Rng(1)))
    weights = (query @ key.mT / math.sqrt(subject.dim)).softmax(-1)
    assert float(weights.max() / weights.min()) < 1.3
    first, second = value[:, :, :20].mean(2), value[:, :, 20:].mean(2)
    assert float((first - second).abs().max()) > 1


def test_a_mask_that_is_handed_over_in_another_form_is_watched_as_well():
    class Writes(Layer):
        def forward(self, x, key_padding_mask=None):
            if key_padding_mask is not None:
                key_padding_mask[:] = False
            return super().forward(x)

    subject = adapt(Writes())
    mask = torch.tensor([[True, False, True]])
    with record_arguments(subject) as arguments:
        subject.run(subject.draw(1, 3, Rng(0)), mask)
    assert mask.tolist() == [[True, False, True]]
    (observation,) = expect_unwritten(arguments)
    assert observation.output == "key_padding_mask"


def test_a_layer_that_refuses_gradients_modes_and_float64_gets_verdicts():
    report = check(Fussy(), fast=True, claims=["shape", "padding", "statelessness", "gradients"])
    assert {v.slug: v.outcome for v in report.verdicts} == {
        "shape": "holds",
        "padding": "holds",
        "statelessness": "holds",
        "gradients": "not applicable",
    }
    assert "requires a gradient" in report.verdicts["gradients"].reason


def test_no_law_ends_in_an_error_of_the_subject():
    laws = ["causality", "padding", "row-stochasticity", "support", "table-precision"]
    report = check(Hopeless(), fast=True, claims=laws)
    assert [verdict.slug for verdict in report.verdicts] == laws
    assert "not again" in report.verdicts["padding"].reason


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_flex_attention_gets_verdicts():
    flex = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention

    class Flex(Layer):
        def attend(self, q, k, v, mask):
            return flex(q, k, v)

        def forward(self, x):
            return super().forward(x)

    report = check(Flex(), fast=True, claims=["batch-independence", "determinism"])
    assert [verdict.outcome for verdict in report.verdicts] == ["holds", "holds"]
