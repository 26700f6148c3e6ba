"""Running things to see how long they take. No test says how long: only that the right thing ran, and left no trace."""

import copy

import pytest
import torch
from torch import nn

from regard import Attention, Causal, Window, attend
from regard.cost_model import measuring
from regard.cost_model.machine import Machine
from regard.cost_model.measuring import compare, measure
from regard.errors import CostError
from regard.layers import FeedForward, MultiHeadAttention, PatchEmbedding, TransformerBlock
from regard.models import GPT, Bert, BertConfig, GPTConfig, Transformer, TransformerConfig, ViT, ViTConfig

STEPS = ("forward", "backward", "training")
QUICK = {"seconds": 0.0}


def gpt(**changes):
    return GPT(GPTConfig(**{"vocab_size": 11, "context_length": 16, "dim": 8, "layers": 2, "heads": 2, **changes}))


def masked(pattern=Causal()):  # noqa: B008
    return MultiHeadAttention(8, 2, attention=Attention(pattern=pattern))


MODULES = {
    "gpt": (gpt, {"tokens": 7}),
    "gpt with dropout": (lambda: gpt(dropout=0.5), {"tokens": 7}),
    "bert": (lambda: Bert(BertConfig(vocab_size=11, context_length=16, dim=8, layers=1, heads=2)), {"tokens": 7}),
    "vit": (lambda: ViT(ViTConfig(image=(8, 12), patch=4, dim=8, layers=1, heads=2)), {}),
    "attention": (masked, {"tokens": 7}),
    "block": (lambda: TransformerBlock(masked(), FeedForward(8, 16)), {"tokens": 7}),
    "linear": (lambda: nn.Linear(3, 5), {"tokens": 7}),
    "patches": (lambda: PatchEmbedding(3, 8, 4), {"image": (8, 12)}),
    "torch's attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), {"tokens": 7}),
    "batch norm": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), {"image": (8, 12)}),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_runs_and_stays_what_it_was(name, step):
    build, sizes = MODULES[name]
    module = build().train()
    next(iter(module.modules())).eval()
    for part in list(module.modules())[1::2]:
        part.training = True
    modes = [part.training for part in module.modules()]
    state, random = copy.deepcopy(module.state_dict()), torch.random.get_rng_state()
    found = measure(module, step=step, batch=2, **sizes, **QUICK)
    assert found.repeats >= 3
    assert 0 < found.low <= found.median <= found.high
    assert modes == [part.training for part in module.modules()]
    assert all(parameter.grad is None and parameter.requires_grad for parameter in module.parameters())
    assert all(torch.equal(now, then) for now, then in zip(module.state_dict().values(), state.values(), strict=True))
    assert torch.equal(random, torch.random.get_rng_state())


def test_a_module_that_fails_is_in_its_old_mode_afterwards():
    class Broken(nn.Linear):
        def forward(self, x):
            raise ZeroDivisionError

    module = Broken(3, 5).train()
    with pytest.raises(ZeroDivisionError):
        measure(module, tokens=7, **QUICK)
    assert module.training


class Spy(nn.Module):
    """Notes what it is given, and whether gradients are asked for."""

    def __init__(self):
        super().__init__()
        self.inner, self.seen = nn.Linear(3, 5), []

    def forward(self, x):
        self.seen.append(
            (tuple(x.shape), torch.is_grad_enabled(), x.requires_grad, self.training, float(x.detach().std()))
        )
        return {"out": [self.inner(x)], "nothing": None}


@pytest.mark.parametrize("step", STEPS)
def test_the_requested_step_runs(step):
    module, slopes = Spy(), []
    module.inner.weight.register_hook(lambda slope: slopes.append(slope.abs().sum()))
    measure(module, step=step, batch=2, tokens=7, **QUICK)
    shapes, enabled, learns, training, deviations = zip(*module.seen, strict=True)
    assert set(shapes) == {(2, 7, 3)}
    assert set(enabled) == {step != "forward"}
    assert all(learns)  # tokens inside a network have a gradient
    assert set(training) == {False}
    assert min(deviations) > 0.3  # random numbers, not zeros
    assert bool(slopes) == (step != "forward")
    if slopes:
        assert min(slopes) > 0


def test_inputs_can_be_given():
    module = Spy()
    measure(module, inputs=torch.ones(4, 3), **QUICK)
    assert {seen[0] for seen in module.seen} == {(4, 3)}
    measure(module, inputs={"x": torch.ones(5, 3)}, **QUICK)
    assert module.seen[-1][0] == (5, 3)


def test_a_function_can_be_measured():
    assert measure(lambda x: x @ x, inputs=torch.ones(4, 4), **QUICK).repeats >= 3


# Descriptions


@pytest.mark.parametrize("step", [*STEPS, "decode"])
def test_a_description_is_attended_with_the_given_sizes(step, monkeypatch):
    seen = []

    def noted(query, key, value, attention, backend):
        seen.append(
            (tuple(query.shape), tuple(key.shape), tuple(value.shape), query.dtype, query.requires_grad, backend)
        )
        return attend(query, key, value, attention, backend=backend)

    monkeypatch.setattr(measuring, "attend", noted)
    sizes = {"batch": 2, "heads": 6, "kv_heads": 3, "tokens": 7, "dim": 5, "value_dim": 4}
    words = {"backend": "reference", "dtype": torch.float64, **QUICK}
    measure(Attention(pattern=Causal()), step=step, **sizes, **words)
    queries, keys = (1, 8) if step == "decode" else (7, 7)
    expected = (2, 6, queries, 5), (2, 3, keys, 5), (2, 3, keys, 4), torch.float64
    assert set(seen) == {(*expected, step in ("backward", "training"), "reference")}


def test_a_description_with_features_decodes_from_a_sum():
    described = Attention(pattern=Causal(), feature_map="elu1")
    assert measure(described, step="decode", tokens=7, dim=5, **QUICK).repeats >= 3


# One token more

DECODERS = {
    "gpt": lambda: gpt(),
    "gpt of few keys": lambda: gpt(heads=4, kv_heads=2, position="rotary"),
    "gpt with a window": lambda: gpt(window=3),
    "attention": masked,
    "window": lambda: masked(Window(3, 0)),
    "sums": lambda: MultiHeadAttention(8, 2, attention=Attention(pattern=Causal(), feature_map="elu1")),
    "block": lambda: TransformerBlock(masked(), FeedForward(8, 16)),
}


@pytest.mark.parametrize("name", DECODERS)
def test_every_decoding_step_comes_after_the_same_past(name, monkeypatch):
    module, lengths = DECODERS[name](), []
    if isinstance(module, GPT):  # a model decodes by one native call, which runs none of its layers
        step = GPT.decode_step

        def noted_step(self, tokens, cache):
            lengths.append((len(tokens), cache.length))
            return step(self, tokens, cache)

        monkeypatch.setattr(GPT, "decode_step", noted_step)
    attention = next(part for part in module.modules() if isinstance(part, MultiHeadAttention))
    attend = MultiHeadAttention._attend  # what a block calls, whether or not it adds the residual in the same pass

    def noted(self, x, context, values, pattern, cache, *others):
        if self is attention and x.shape[1] == 1 and not isinstance(module, GPT):
            lengths.append((x.shape[0], cache.length))
        return attend(self, x, context, values, pattern, cache, *others)

    monkeypatch.setattr(MultiHeadAttention, "_attend", noted)
    measure(module, step="decode", batch=2, tokens=9, **QUICK)
    assert set(lengths) == {(2, 9)}
    assert len(lengths) >= 5  # warmed up, and three runs


def test_a_translation_is_continued():
    sizes = {"vocab_size": 11, "context_length": 16, "dim": 8, "heads": 2}
    names = TransformerConfig.__dataclass_fields__
    model = Transformer(TransformerConfig(**{name: size for name, size in sizes.items() if name in names}))
    for tokens in (1, 5):
        assert measure(model, step="decode", tokens=tokens, context_tokens=7, **QUICK).repeats >= 3
    with pytest.raises(CostError, match="The size context_tokens is not given"):
        measure(model, step="decode", tokens=5, **QUICK)


# What cannot be run

REFUSED = {
    "no such step": (lambda: measure(nn.Linear(3, 5), step="sideways", tokens=7), "no step 'sideways'"),
    "no size": (lambda: measure(nn.Linear(3, 5)), "The size tokens is not given"),
    "no size of a description": (lambda: measure(Attention(), tokens=7), "The size dim is not given"),
    "no size to decode": (lambda: measure(gpt(), step="decode"), "The size tokens is not given"),
    "no size of an image": (lambda: measure(PatchEmbedding(3, 8, 4)), "The size image is not given"),
    "nothing to decode": (lambda: measure(nn.Linear(3, 5), step="decode", tokens=7), "A Linear has no decoding step"),
    "nothing learns": (lambda: measure(gpt().requires_grad_(False), step="training", tokens=7), "no backward pass"),
    "other numbers": (lambda: measure(nn.Linear(3, 5), dtype=torch.float64, tokens=7), "measured as it is"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_is_refused_in_words(name):
    run, words = REFUSED[name]
    with pytest.raises(CostError, match=words):
        run()


# Predicted beside measured


@pytest.mark.parametrize("step", [*STEPS, "decode"])
def test_predicted_stands_beside_measured(step):
    machine = Machine("made up", threads=1, peak=1e9, bandwidth=1e9)
    both = compare(Attention(pattern=Causal()), machine=machine, step=step, tokens=20, dim=8, heads=2, **QUICK)
    assert both.ratio == both.measured.median / both.predicted.seconds > 0
    assert both.flops_per_second == pytest.approx(both.predicted.total.flops / both.measured.median)
    lines = str(both).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["predicted", "measured", "ratio"]
    assert "at least" in lines[1]
