"""Predicted bytes against those of real runs."""

from __future__ import annotations

import copy
import math
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cost_model.allocator import allocated, forward_peak, recompute, state_bytes, training_peak
from plain import slow, slow_but
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from regard.attention import Attention
from regard.cost_model import cost, peak_memory
from regard.cost_model.cost import Cost
from regard.cost_model.memory import Memory, memory_of
from regard.cost_model.memory_fit import largest
from regard.cost_model.peak_memory import (
    OptimizerMemory,
    find_repeated_blocks,
    prepare_runner,
    trace_forward_memory,
    trace_optimizer_memory,
    trace_training_memory,
)
from regard.cost_model.sizes import Sizes
from regard.cost_model.trace.storages import StorageLog
from regard.errors import CostError
from regard.kernels import training
from regard.layers import MultiHeadAttention, fused_training
from regard.models import (
    GPT,
    Bert,
    BertConfig,
    DaViT,
    DaViTConfig,
    GPTConfig,
    SpatialConfig,
    SpatialTransformer,
    Transformer,
    TransformerConfig,
    ViT,
    ViTConfig,
)
from regard.patterns import Causal

# Sizes of predictions. Most come out to the kilobyte; the convolutions of a DaViT borrow memory of their own.
CLOSE = 0.02


def ids(batch: int, tokens: int) -> Tensor:
    return torch.randint(0, 499, (batch, tokens))


def gpt(**changes: Any) -> GPT:
    return GPT(GPTConfig(**{"vocab_size": 499, "context_length": 384, "dim": 192, "layers": 2, "heads": 6, **changes}))


# A model, its inputs, and the sizes by which its cost is asked for.
CASES: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]]] = {
    "gpt small": lambda: (gpt(), (ids(3, 257),), {"batch": 3, "tokens": 257}),
    "gpt large": lambda: (gpt(dim=256, heads=4), (ids(4, 384),), {"batch": 4, "tokens": 384}),
    "bert small": lambda: (
        Bert(BertConfig(vocab_size=499, context_length=256, dim=192, layers=2, heads=3)),
        (ids(3, 131),),
        {"batch": 3, "tokens": 131},
    ),
    "bert large": lambda: (
        Bert(
            BertConfig(vocab_size=499, context_length=512, dim=256, layers=2, heads=4, dropout=0.0, masked_tokens=True)
        ),
        (ids(4, 307),),
        {"batch": 4, "tokens": 307},
    ),
    "bert with dropout": lambda: (
        Bert(BertConfig(vocab_size=499, context_length=1024, dim=64, layers=2, heads=4, dropout=0.3)),
        (ids(1, 1021),),
        {"batch": 1, "tokens": 1021},
    ),
    "transformer with dropout, large": lambda: (
        Transformer(TransformerConfig(vocab_size=499, dim=64, layers=1, heads=4, hidden_dim=128, dropout=0.3)),
        (ids(1, 1021), ids(1, 769)),
        {"batch": 1, "tokens": 769, "context_tokens": 1021},
    ),
    "transformer small": lambda: (
        Transformer(TransformerConfig(vocab_size=499, dim=192, layers=1, heads=3, hidden_dim=768)),
        (ids(3, 149), ids(3, 127)),
        {"batch": 3, "tokens": 127, "context_tokens": 149},
    ),
    "transformer large": lambda: (
        Transformer(TransformerConfig(vocab_size=499, dim=256, layers=2, heads=4, hidden_dim=1024, dropout=0.0)),
        (ids(3, 311), ids(3, 257)),
        {"batch": 3, "tokens": 257, "context_tokens": 311},
    ),
    "vit small": lambda: (
        ViT(ViTConfig(image=(192, 224), dim=192, layers=2, heads=3)),
        (torch.randn(3, 3, 192, 224),),
        {"batch": 3},
    ),
    "vit large": lambda: (
        ViT(ViTConfig(image=(256, 224), patch=8, dim=192, layers=2, heads=3, pool="mean")),
        (torch.randn(2, 3, 256, 224),),
        {"batch": 2},
    ),
    "davit small": lambda: (
        DaViT(DaViTConfig(dims=(48, 96), heads=(3, 6), depths=(1, 1))),
        (torch.randn(3, 3, 160, 128),),
        {"batch": 3, "image": (160, 128)},
    ),
    "davit large": lambda: (
        DaViT(DaViTConfig(dims=(64, 128), heads=(2, 4), depths=(1, 1))),
        (torch.randn(3, 3, 224, 200),),
        {"batch": 3, "image": (224, 200)},
    ),
    "spatial small": lambda: (
        SpatialTransformer(SpatialConfig(image=(32, 24), dim=96, layers=2, heads=5, hidden_dim=128)),
        (torch.randn(3, 3, 32, 24),),
        {"batch": 3},
    ),
    "spatial large": lambda: (
        SpatialTransformer(SpatialConfig(image=(48, 32), dim=128, layers=2, dropout=0.0, attention_dropout=0.0)),
        (torch.randn(4, 3, 48, 32),),
        {"batch": 4},
    ),
}


# Every model at two sizes; the larger ones take a while.
SIZES = slow_but(("gpt small", "bert small", "vit small", "spatial small"), CASES)


@pytest.fixture(scope="module", params=SIZES)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, tuple[Tensor, ...], Memory]:
    torch.manual_seed(7)
    model, inputs, sizes = CASES[request.param]()
    return model, inputs, cost(model, **sizes).memory


# What the fused kernels of training may need beyond the layers one by one: a function keeps what it saved until all of
# its backward has run, in a feed-forward layer the hidden channels. Measured 1.03 to 1.12.
MOST_FUSED = 1.15


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers train one after the other, as they are traced."""
    monkeypatch.setattr(training, "MIN_PRODUCTS", sys.maxsize)
    monkeypatch.setattr(fused_training, "MIN_NUMBERS", sys.maxsize)


class TestPeaks:
    def test_a_forward_pass_needs_what_is_predicted(self, case) -> None:
        model, inputs, memory = case
        # Channel attention is one kernel, which needs less than its operations as they are traced: measured 8 and 9 %.
        most = 1.1 if isinstance(model, DaViT) else 1 + CLOSE
        assert 1 - CLOSE <= int(memory.peak_forward) / forward_peak(model, inputs) <= most

    def test_a_step_of_training_needs_what_is_predicted(self, case, one_by_one) -> None:
        model, inputs, memory = case
        assert int(memory.peak_training) == pytest.approx(training_peak(model, inputs), rel=CLOSE)

    def test_a_step_of_fused_training_needs_little_more(self, case) -> None:
        model, inputs, memory = case
        assert 1 - CLOSE < training_peak(model, inputs) / int(memory.peak_training) < MOST_FUSED

    @pytest.mark.parametrize(
        "name",
        ["gpt small", *(pytest.param(each, marks=pytest.mark.slow) for each in ("transformer large", "davit small"))],
    )
    def test_recomputation_needs_what_is_predicted(self, name: str, one_by_one) -> None:
        model, inputs, sizes = CASES[name]()
        memory = cost(model, **sizes).memory
        predicted = int(memory.peak_recomputed)
        twin = copy.deepcopy(model)
        recompute(find_repeated_blocks(twin))
        assert predicted == pytest.approx(training_peak(twin, inputs), rel=CLOSE)
        assert predicted < int(memory.peak_training)
        assert memory.activations_recomputed < memory.activations

    def test_activation_bytes_are_those_of_saved_tensors(self, case, one_by_one) -> None:
        model, inputs, memory = case
        assert int(memory.activations) == pytest.approx(_saved(model, inputs), rel=0.01)

    def test_dropout_of_attention_weights_needs_no_square(self) -> None:
        model = Bert(BertConfig(vocab_size=499, context_length=2048, dim=64, layers=2, heads=4, dropout=0.3))
        peaks = [int(cost(model, tokens=tokens).memory.peak_training) for tokens in (512, 1024, 2048)]
        assert peaks[2] - peaks[1] == pytest.approx(2 * (peaks[1] - peaks[0]), rel=0.01)
        assert peaks[2] < 4 * 4 * 2048**2  # the weights of one layer

    def test_transient_and_resident_are_the_peak(self, case) -> None:
        model, inputs, memory = case
        resident = sum(each.nbytes for each in (*model.parameters(), *model.buffers(), *inputs))
        for step in ("forward", "training"):
            assert memory.transient(step) + resident == memory.peak(step)


class Held:
    """A tensor that autograd has saved, in something that dies when autograd lets it go."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _saved(model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """Bytes that autograd holds after a forward pass, beside parameters and inputs."""
    model.train()
    before = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers(), *inputs)}
    seen: weakref.WeakSet[Held] = weakref.WeakSet()

    def keep(tensor: Tensor) -> Held:
        held = Held(tensor.detach())
        seen.add(held)
        return held

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda held: held.tensor):
        made = model(*inputs)
    graph = [each.grad_fn for each in tree_leaves(made) if isinstance(each, Tensor)]
    storages = {held.tensor.untyped_storage().data_ptr(): held.tensor.untyped_storage().nbytes() for held in seen}
    assert graph
    return sum(size for place, size in storages.items() if place not in before)


class TestHook:
    def test_it_sees_every_byte(self) -> None:
        def run() -> Tensor:
            first = torch.empty(1000)
            second = torch.empty(500)
            del first
            return second + 1

        seen = allocated(run)
        assert (seen.peak, seen.left) == (4000 + 2000, 2000)

    def test_a_prediction_that_frees_nothing_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The twin that proves the tests above can fail."""
        model, inputs, sizes = CASES["gpt small"]()
        # Forgotten but for its address, which may be the next one's.
        monkeypatch.setattr(StorageLog, "_release", lambda self, address: self._watched.pop(address))
        assert int(cost(model, **sizes).memory.peak_forward) > 1.1 * forward_peak(model, inputs)

    def test_a_prediction_by_the_long_way_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Under a dispatch mode the activation of a feed-forward layer takes a second tensor."""
        model, inputs, sizes = CASES["gpt small"]()
        monkeypatch.setattr(peak_memory, "max_gemv_rows", lambda dtype: 1 << 40)
        assert int(cost(model, **sizes).memory.peak_forward) > 1.1 * forward_peak(model, inputs)


class TestOptimizers:
    @pytest.mark.parametrize(
        ("name", "make"),
        [
            ("adamw", torch.optim.AdamW),
            ("adam", torch.optim.Adam),
            ("sgd", lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
            ("momentum", lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)),
            ("adafactor", torch.optim.Adafactor),
            (torch.optim.RMSprop, torch.optim.RMSprop),
        ],
    )
    def test_its_state_is_what_a_step_leaves(self, name: Any, make: Callable[..., torch.optim.Optimizer]) -> None:
        model = gpt(dim=48)
        memory = cost(model, tokens=7).memory.using(optimizer=name)
        optimizer = make(model.parameters())
        model(ids(1, 7)).mean().backward()
        optimizer.step()
        assert memory.optimizer_state == state_bytes(optimizer)
        traced = trace_optimizer_memory(model, None, name)
        assert traced.state == pytest.approx(state_bytes(optimizer), abs=4)
        assert traced.scratch == pytest.approx(allocated(optimizer.step).peak, rel=0.02, abs=64)

    def test_only_what_learns_has_gradients_and_state(self) -> None:
        model = gpt(dim=48)
        model.blocks[0].requires_grad_(False)
        learned = sum(each.nbytes for each in model.parameters() if each.requires_grad)
        memory = cost(model, tokens=7).memory.using(optimizer="momentum")
        assert memory.gradients == memory.optimizer_state == learned
        assert memory.parameters > memory.gradients

    def test_an_unknown_one_is_refused(self) -> None:
        with pytest.raises(CostError, match="no optimizer 'lion'"):
            cost(gpt(), tokens=7).memory.using(optimizer="lion")


class TestCache:
    @pytest.mark.parametrize("changes", [{}, {"kv_heads": 2}, {"dim": 96, "layers": 3}])
    def test_a_token_takes_what_a_real_cache_grows_by(self, changes: dict[str, Any]) -> None:
        model = gpt(**changes).eval()
        memory = cost(model, batch=3, tokens=29).memory
        held = [_cache_bytes(model, 3, tokens) for tokens in (29, 30)]
        assert memory.cache == held[0]
        assert memory.cache_per_token == held[1] - held[0]

    def test_a_window_stops_growing(self) -> None:
        model = gpt(window=11).eval()
        memory = cost(model, batch=3, tokens=29).memory
        assert memory.cache_per_token == 0
        assert memory.cache == _cache_bytes(model, 3, 29) == _cache_bytes(model, 3, 30)
        assert memory.at(tokens=7).cache == _cache_bytes(model, 3, 7)
        assert memory.at(tokens=7).cache_per_token > 0

    def test_linear_attention_keeps_sums(self) -> None:
        layer = MultiHeadAttention(24, 3, attention=Attention(pattern=Causal(), feature_map="elu1"))
        memory = cost(layer, batch=2, tokens=13).memory
        cache = layer.new_cache()
        with torch.no_grad():
            layer(torch.randn(2, 13, 24), cache=cache)
        assert memory.cache_per_token == 0
        assert memory.cache == cache.state.sums.nbytes + cache.state.norm.nbytes
        assert memory.longest(1 << 20, "decode") == math.inf

    @pytest.mark.slow
    def test_a_translator_also_keeps_the_other_text(self) -> None:
        model = Transformer(TransformerConfig(vocab_size=499, dim=48, layers=2, heads=3, hidden_dim=64)).eval()
        memory = cost(model, batch=2, tokens=8, context_tokens=17).memory
        with torch.no_grad():
            kept = model.prefill(ids(2, 17), capacity=7)[1]
        crosses = sum(tensor.nbytes for cross in kept.cross_layers for tensor in (cross.key, cross.value))
        assert memory.cache == crosses + sum(cache.bytes for cache in kept.layers)

    def test_what_does_not_decode_has_none(self) -> None:
        memory = cost(Bert(BertConfig(vocab_size=499, dim=48, layers=1, heads=3)), tokens=7).memory
        assert memory.cache_per_token == memory.cache == 0
        with pytest.raises(CostError, match="Nothing here decodes"):
            memory.peak("decode")


def _cache_bytes(model: GPT, batch: int, tokens: int) -> int:
    held = model.new_cache(tokens)
    with torch.no_grad():
        model(ids(batch, tokens), cache=held)
    return sum(cache.bytes for cache in held.layers)


@pytest.fixture(scope="module")
def of_a_long_text() -> Memory:
    return cost(gpt(dim=24, layers=1, heads=2, context_length=100_000, position="rotary"), tokens=16).memory


class TestWhatFits:
    @pytest.mark.parametrize("step", ["training", *slow("forward", "recomputed", "decode")])
    def test_the_longest_fits_and_one_more_does_not(self, of_a_long_text: Memory, step: str) -> None:
        memory = of_a_long_text
        limit = 2 << 20
        most = memory.longest(limit, step)
        assert isinstance(most, int)
        assert memory.at(tokens=most).peak(step) <= limit < memory.at(tokens=most + 1).peak(step)

    def test_no_text_is_longer_than_the_model_can_read(self) -> None:
        memory = cost(gpt(dim=24, layers=1, heads=2), tokens=16).memory
        assert memory.longest(24 << 30) == 384
        assert memory.longest(1 << 10) == 0

    @pytest.mark.slow
    def test_the_largest_batch(self) -> None:
        model = SpatialTransformer(SpatialConfig(image=(8, 12), dim=16, layers=1, heads=3, hidden_dim=24))
        memory = cost(model).memory
        most = memory.largest(4 << 20, "batch", "training")
        assert memory.at(batch=most).peak_training <= 4 << 20 < memory.at(batch=most + 1).peak_training

    @pytest.mark.parametrize("limit", [999, 1000, 1007, 1008, 123_456, 10**9 + 7])
    @pytest.mark.parametrize(("linear", "square"), [(8, 0), (8, 3), (0, 5)])
    @pytest.mark.parametrize("most", [None, 1, 63, 5000])
    def test_the_search_is_exact(self, limit: int, linear: int, square: int, most: int | None) -> None:
        def needed(n: int) -> int:
            assert n >= 1
            return max(1000, 992 + linear * n + square * n * n)

        found = largest(needed, limit, most)
        assert found == 0 or needed(int(found)) <= limit
        assert found == most or needed(int(found) + 1) > limit


class TestTheModule:
    def test_nothing_of_it_changes(self) -> None:
        model = gpt(dim=48, dropout=0.1).eval()
        tokens = ids(2, 31)
        before = {name: each.clone() for name, each in model.state_dict().items()}
        inside = {name: set(vars(part)) for name, part in model.named_modules()}
        with torch.no_grad():
            expected = model(tokens)
        state = torch.get_rng_state()
        str(cost(model, batch=2, tokens=31).memory)
        assert torch.equal(torch.get_rng_state(), state)
        assert not model.training
        assert {name: set(vars(part)) for name, part in model.named_modules()} == inside
        assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
        assert all(type(each) is nn.Parameter and each.grad is None for each in model.parameters())
        with torch.no_grad():
            assert torch.equal(model(tokens), expected)

    def test_one_without_memory_is_predicted_all_the_same(self) -> None:
        with torch.device("meta"):
            on_meta = gpt()
        memory, other = cost(on_meta, tokens=31).memory, cost(gpt(), tokens=31).memory
        assert memory.peak_forward == other.peak_forward
        assert memory.peak_training == other.peak_training

    def test_a_third_party_module_with_inputs(self) -> None:
        sequential = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
        x = torch.randn(2048, 256)
        memory = memory_of(Cost("sequential", [], {}), sequential, Sizes(inputs=(x,)))
        assert int(memory.peak_forward) == pytest.approx(forward_peak(sequential, (x,)), rel=1e-3)
        assert int(memory.peak_training) == pytest.approx(training_peak(sequential, (x,)), rel=1e-3)
        with pytest.raises(CostError, match="cannot be changed"):
            memory.largest(1 << 30)

    def test_linear_attention_can_be_followed(self) -> None:
        layer = MultiHeadAttention(64, 4, attention=Attention(pattern=Causal(), feature_map="elu1"))
        x = torch.randn(4, 512, 64)
        # Under a dispatch mode one tensor more is made: the prediction is a little too large.
        measured = forward_peak(layer, (x,))
        runner = prepare_runner(layer, Sizes(inputs=(x,)), x.dtype)
        assert measured <= trace_forward_memory(runner).peak <= 1.3 * measured

    def test_half_as_wide_numbers_take_half(self) -> None:
        wide, narrow = (cost(gpt(), tokens=31, dtype=dtype).memory for dtype in (torch.float32, torch.bfloat16))
        assert wide.parameters == 2 * narrow.parameters
        assert wide.cache_per_token == 2 * narrow.cache_per_token
        assert narrow.peak_forward < 0.7 * int(wide.peak_forward)

    def test_a_loss_of_its_own(self) -> None:
        memory = cost(gpt(dim=48), batch=2, tokens=31).memory
        entropy = memory.using(loss="cross_entropy")
        assert entropy.peak_training > memory.peak_training or entropy.activations == memory.activations
        own = memory.using(loss=lambda logits: logits.square().sum())
        assert own.peak_training >= memory.peak_training
        with pytest.raises(CostError, match="no loss 'hinge'"):
            int(memory.using(loss="hinge").peak_training)


class TestShown:
    def test_without_sizes_there_are_formulas(self) -> None:
        memory = cost(gpt()).memory
        assert str(memory.cache_per_token.formula) == "8*B*G*L*d"
        with pytest.raises(CostError, match="nothing says how large tokens is"):
            int(memory.peak_forward)
        assert memory.to_dict()["quantities"]["parameters"]["value"] == int(memory.parameters)
        assert "peak_forward" not in memory.to_dict()["quantities"]

    def test_a_table_has_every_quantity(self) -> None:
        shown = str(cost(gpt(dim=24, layers=1, heads=2), tokens=13).memory)
        for name in ("parameters", "gradients", "optimizer state", "activations", "cache per token", "peak training"):
            assert name in shown

    def test_a_part_has_no_peak(self) -> None:
        part = next(iter(cost(gpt(), tokens=7).by_part().values()))
        assert part.memory.parameters == 4 * part.parameters
        with pytest.raises(CostError, match="cannot be run alone"):
            int(part.memory.peak_forward)

    def test_too_long_a_text_is_refused_as_the_model_does(self) -> None:
        with pytest.raises(CostError, match="The text is longer than the context"):
            cost(gpt(), tokens=385)
        with pytest.raises(CostError, match="The text is longer than the context"):
            cost(gpt(), tokens=384, step="decode")
        assert cost(gpt(position="rotary"), tokens=383, step="decode").macs > 0

    def test_unknown_steps_are_refused(self) -> None:
        with pytest.raises(CostError, match="no peak of a step 'sideways'"):
            cost(gpt(), tokens=7).memory.peak("sideways")


def test_blocks_are_found_in_every_model() -> None:
    found = {name: len(find_repeated_blocks(make()[0])) for name, make in CASES.items()}
    assert found["gpt large"] == found["bert large"] == found["vit large"] == found["spatial large"] == 2
    assert found["transformer large"] == found["davit large"] == 4  # encoder and decoder; two stages of two blocks


def test_a_step_without_an_optimizer() -> None:
    layer = nn.Linear(4, 3)
    runner = prepare_runner(layer, Sizes(inputs=(torch.randn(5, 4),)), torch.float32)
    traced = trace_training_memory(runner, OptimizerMemory())
    assert traced.optimizer_state == 0
    assert traced.transient > 0
