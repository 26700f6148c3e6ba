"""Wrong values that break no law are found by comparison with a reference implementation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.adapters.third_party_imports import import_quietly
from regard.cli import main
from regard.errors import InputError, LawViolation
from regard.laws import assert_laws, check
from regard.laws.reference import copy_parameters


def with_biases(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, slopes: Tensor) -> Tensor:
    back = torch.arange(query.shape[-2])[:, None] + key.shape[-2] - query.shape[-2] - torch.arange(key.shape[-2])
    scores = query @ key.mT / query.shape[-1] ** 0.5 - slopes.to(query.dtype)[:, None, None] * back
    visible = back >= 0 if mask is None else (back >= 0) & mask
    return scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num() @ value


def powers_only(query, key, value, mask=None):
    """The series for a power of two, used for any number of heads, as ALiBi does not."""
    heads = query.shape[1]
    return with_biases(query, key, value, mask, 2.0 ** (-8 * torch.arange(1, heads + 1) / heads))


def as_in_bloom(query, key, value, mask=None):
    """Slopes as transformers has them for BLOOM."""
    bloom = import_quietly("transformers.models.bloom.modeling_bloom")
    ones = torch.ones(1, 2, dtype=torch.long)
    slopes = bloom.build_alibi_tensor(ones, query.shape[1], torch.float64)[:, 0, 1]
    return with_biases(query, key, value, mask, slopes)


def plain(query, key, value, mask=None):
    return F.scaled_dot_product_attention(query, key, value, mask)


def written_out(query, key, value, mask=None):
    scores = query @ key.mT / query.shape[-1] ** 0.5
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ value


# docs/laws.md has the same comparison with an implementation that takes less time to import.
@pytest.mark.slow
def test_lawful_slopes_that_are_wrong_are_seen_beside_another_implementation_only():
    claims = ["causality", "relative-position", "batch-independence", "padding"]
    assert check(powers_only, claims=claims, fast=True).ok
    report = check(powers_only, claims=["causality"], reference=as_in_bloom, fast=True)
    assert [verdict.slug for verdict in report.failed] == ["reference"]
    counterexample = report.verdicts["reference"].counterexample
    assert counterexample is not None
    assert counterexample.case["keys"] == 2  # a single key has the weight one, whatever its bias
    assert "holds at 1" in counterexample.remarks["keys"]
    replay = report.replay(report.verdicts["reference"])
    again = eval(replay, {"check": check, "target": powers_only, "reference": as_in_bloom})
    assert [str(said) for said in again.violations] == [str(said) for said in report.violations]


@pytest.mark.slow
def test_slopes_that_are_right_for_a_power_of_two_are_wrong_for_other_numbers_of_heads():
    report = check(powers_only, claims=["causality"], heads=4, reference=as_in_bloom, fast=True)
    counterexample = report.verdicts["reference"].counterexample
    assert counterexample is not None
    assert counterexample.case["heads"] == 3


def test_equivalent_implementations_agree_in_values_and_gradients():
    report = check(written_out, only=["reference"], reference=plain)
    assert report.ok
    assert report.verdicts["reference"].outcome == "holds"
    assert report.verdicts["reference"].cases > 50


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_gradients_are_compared():
    report = check(lambda q, k, v: Backward.apply(plain(q, k, v)), kind="operator", only=["reference"], reference=plain)
    counterexample = report.verdicts["reference"].counterexample
    assert counterexample is not None
    assert counterexample.place.startswith("gradient of")


def test_masks_are_compared():
    report = check(lambda q, k, v, mask=None: plain(q, k, v), kind="operator", only=["reference"], reference=plain)
    counterexample = report.verdicts["reference"].counterexample
    assert counterexample is not None
    assert counterexample.case["mask"] != "none"


def test_a_difference_of_long_sequences_alone_is_found():
    def cut(q, k, v):
        return plain(q, k[:, :, -128:], v[:, :, -128:])

    report = check(cut, kind="operator", only=["reference"], reference=plain, fast=True)
    counterexample = report.verdicts["reference"].counterexample
    assert counterexample is not None
    assert counterexample.case["keys"] > 128


class Layer(nn.Module):
    def __init__(self, factor: float = 1.0):
        super().__init__()
        self.maps = nn.Linear(7, 21)
        self.register_buffer("factor", torch.tensor(factor))

    def forward(self, x, mask=None):
        query, key, value = self.maps(x).chunk(3, -1)
        return written_out(query * self.factor, key, value, None if mask is None else mask[:, None])


def test_weights_are_used_as_they_are_given():
    target, other = Layer(), Layer()
    assert "reference" in check(target, claims=["determinism"], reference=other, fast=True).failed
    other.load_state_dict(target.state_dict())
    assert check(target, claims=["determinism"], reference=other, fast=True).ok
    with pytest.raises(LawViolation, match="reference - the values are not those"):
        assert_laws(target, claims=["determinism"], reference=Layer())


def test_parameters_are_copied_and_tables_are_not():
    target, other = Layer(), Layer(3.0)
    assert copy_parameters(target, other)
    assert torch.equal(target.maps.weight, other.maps.weight)
    assert float(other.factor) == 3.0
    assert not copy_parameters(target, nn.Linear(7, 21))
    assert not copy_parameters(target, plain)


def test_a_reference_that_cannot_be_called_as_the_target_is_is_refused():
    with pytest.raises(InputError, match="does not run as an operator"):
        check(plain, kind="operator", claims=["determinism"], reference=lambda a: a)
    with pytest.raises(InputError, match="no reference to compare with"):
        check(plain, kind="operator", only=["reference"])


MODULE = """
import torch
import torch.nn.functional as F

def right(query, key, value):
    return F.scaled_dot_product_attention(query, key, value)

def wrong(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, scale=1.0)
"""


def test_the_command_compares_with_a_reference(tmp_path, monkeypatch, capsys):
    (tmp_path / "two_scales_to_check.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    words = ["check", "two_scales_to_check.py:wrong", "--claims", "determinism", "--fast"]
    assert main(words) == 0
    assert "--reference module:object" in capsys.readouterr().out
    assert main([*words, "--reference", "two_scales_to_check.py:right"]) == 1
    out = capsys.readouterr().out
    assert "REF reference" in out
    assert "--reference two_scales_to_check.py:right --fast --law reference" in out
    words = ["check", "two_scales_to_check.py:right", "--reference", "two_scales_to_check.py:right", "--fast"]
    assert main([*words, "--law", "reference"]) == 0


def test_an_input_without_a_gradient_differs_from_a_reference_that_has_one():
    def plain(q, k, v):
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

    def detached(q, k, v):
        return plain(q, k.detach(), v)

    verdict = check(detached, kind="operator", claims=["shape"], reference=plain, only=["reference"], fast=True).failed[
        0
    ]
    assert verdict.counterexample is not None
    assert verdict.counterexample.case["compare"] == "gradients"
