"""L14: the scale is the declared one, observed from outside or inside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from weighing import Layer, causal, outcome_of, plain, scores_of

outcome = outcome_of("scale")


def with_beta(rule):
    def core(q, k, v, mask=None):
        return scores_of(q, k, mask, rule(q)).softmax(-1).nan_to_num(0.0) @ v

    return core


FAULTS = {
    "none": lambda q: 1.0,
    "twice": lambda q: 1 / q.shape[-1],
    "of the whole width": lambda q: (q.shape[1] * q.shape[-1]) ** -0.5,
    "minus for power": lambda q: q.shape[-1] - 0.5,
    "of heads of 64": lambda q: 0.125,
}


def alibi(q, k, v, mask=None):
    distance = torch.arange(q.shape[-2])[:, None] + k.shape[-2] - q.shape[-2] - torch.arange(k.shape[-2])
    return (scores_of(q, k, mask) - 0.25 * distance.abs()).softmax(-1).nan_to_num(0.0) @ v


def linear(q, k, v, mask=None):
    weights = (torch.nn.functional.elu(q) + 1) @ (torch.nn.functional.elu(k) + 1).mT
    return weights / weights.sum(-1, keepdim=True) @ v


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("core", [plain, causal, alibi], ids=lambda core: core.__name__)
def test_the_root_of_the_head_size_holds(core, seed: int) -> None:
    assert outcome(core, seed=seed) == "holds"
    assert outcome(Layer(core), "layer", seed) == "holds"


@pytest.mark.parametrize("fault", FAULTS)
def test_another_beta_is_broken(fault: str) -> None:
    assert outcome(with_beta(FAULTS[fault])) == "broken"
    assert outcome(Layer(with_beta(FAULTS[fault])), "layer") == "broken"


def test_a_declared_beta_is_the_one_to_have() -> None:
    assert outcome(with_beta(lambda q: 0.7), scale=0.7) == "holds"
    assert outcome(plain, scale=0.7) == "broken"


def test_a_query_that_was_scaled_before_counts() -> None:
    class Scaled(Layer):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            q, k, v = (project(x).unflatten(-1, (-1, 4)).transpose(1, 2) for project in (self.q, self.k, self.v))
            return self.core(q / 2, k, v).transpose(1, 2).flatten(2)

    assert outcome(Scaled(with_beta(lambda q: 1.0)), "layer") == "holds"
    assert outcome(Scaled(plain), "layer") == "broken"


def test_sums_of_features_have_no_beta() -> None:
    assert outcome(linear) == "not applicable"


SOMETIMES = {
    "of the values": lambda q, k, v: v.shape[-1] ** -0.5,
    "of one query": lambda q, k, v: q.shape[-1] ** -0.5 * (1 + (q.shape[-2] == 1)),
    "of fewer queries": lambda q, k, v: q.shape[-1] ** -0.5 * (1 + (q.shape[-2] < k.shape[-2])),
    "of many keys": lambda q, k, v: q.shape[-1] ** -0.5 * (1 + (k.shape[-2] > 32)),
}


@pytest.mark.parametrize("fault", SOMETIMES)
def test_a_beta_that_depends_on_other_sizes_is_broken(fault: str) -> None:
    def core(q, k, v, mask=None):
        return scores_of(q, k, mask, SOMETIMES[fault](q, k, v)).softmax(-1).nan_to_num(0.0) @ v

    assert outcome(core) == "broken"


def test_the_requested_value_dim_is_used() -> None:
    def core(q, k, v, mask=None):
        return scores_of(q, k, mask, 1.0 if v.shape[-1] == 7 else None).softmax(-1) @ v

    assert outcome(core, value_dim=7) == "broken"
    assert outcome(plain, value_dim=7) == "holds"


def grouped(factor: float, tile: bool = False):
    def core(q, k, v, mask=None):
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat(1, group, 1, 1) if tile else x.repeat_interleave(group, 1) for x in (k, v))
        return plain(q * (factor if group > 1 else 1.0), k, v, mask)

    return core


def test_another_beta_for_fewer_key_heads_is_broken() -> None:
    assert outcome(grouped(2.0), claims=["head-groups"]) == "broken"
    assert outcome(grouped(1.0), claims=["head-groups"]) == "holds"
    assert outcome(grouped(1.0, tile=True), claims=["head-groups"]) == "holds"  # wrong, but not in its scale


@pytest.mark.parametrize("align", ["start", "end"])
def test_rotations_from_either_end_hold(align: str) -> None:
    def turned(x: Tensor, first: int) -> Tensor:
        angles = (first + torch.arange(x.shape[-2]))[:, None] * torch.tensor([1.0, 0.1]).repeat(x.shape[-1] // 4)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        left, right = x.chunk(2, -1)
        return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)

    def core(q, k, v, mask=None):
        first = 0 if align == "start" else k.shape[-2] - q.shape[-2]
        return plain(turned(q, first), turned(k, 0), v, mask)

    assert outcome(core) == "holds"


def test_weights_that_fade_into_nothing_hold() -> None:
    def steep(q, k, v, mask=None):
        distance = torch.arange(q.shape[-2])[:, None] + k.shape[-2] - q.shape[-2] - torch.arange(k.shape[-2])
        return (scores_of(q, k, mask) - 2.0 * distance.abs()).softmax(-1).nan_to_num(0.0) @ v

    assert outcome(steep) == "holds"


def test_a_module_is_called_with_its_declared_head_dim() -> None:
    class Fixed(nn.Module):
        head_dim = 16

        def forward(self, q, k, v, mask=None):
            return with_beta(lambda q: 0.25)(q, k, v, mask)

    assert outcome(Fixed()) == "holds"
