"""A decode step of a whole model in one call, against its modules one after the other, its scalar twin, and bits."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regard.kernels import library
from regard.models import GPT, GPTConfig, Transformer, TransformerConfig
from regard.models.native_decode import NativeDecoder, find_decoder, run_native_step

VOCAB, STEPS = 131, 9
LLAMA = {"kv_heads": 2, "hidden_dim": 37, "head_dim": 6}
CONFIGS = {
    "gpt2": GPTConfig(vocab_size=VOCAB, context_length=400, dim=33, layers=3, heads=3),
    "llama": GPTConfig.llama(vocab_size=VOCAB, context_length=400, dim=29, layers=2, heads=6, **LLAMA),
    "window": GPTConfig.llama(vocab_size=VOCAB, context_length=400, dim=24, layers=2, heads=4, window=5, bias=True),
    "alibi": GPTConfig(
        vocab_size=VOCAB, dim=28, layers=2, heads=7, position="alibi", window=6, window_layers=(1,), norm="rms"
    ),
    "sinusoidal": GPTConfig(
        vocab_size=VOCAB, dim=24, layers=2, heads=3, position="sinusoidal", feed_forward="geglu", tie_embeddings=False
    ),
    "reglu": GPTConfig(vocab_size=VOCAB, dim=24, layers=1, heads=3, position="none", feed_forward="reglu"),
    "silu": GPTConfig(vocab_size=VOCAB, dim=17, layers=1, heads=1, feed_forward="silu", attention_bias="qkv"),
    "hidden": GPTConfig(vocab_size=VOCAB, dim=24, layers=1, heads=3, feed_forward="gelu", logits=False),
}
ENCODERS = {
    "pre": {"order": "pre", "activation": "gelu"},
    "post": {"order": "post", "activation": "relu"},
    "post with a last norm": {"order": "post", "final_norm": True, "activation": "swiglu", "shared": False},
}


@pytest.fixture(params=["best", "plain", "scalar"])
def chosen(request, using):
    with using(library.name() if request.param == "best" else request.param):
        yield request.param


def make(name):
    torch.manual_seed(7)
    if name in CONFIGS:
        model = GPT(CONFIGS[name])
    else:
        sizes = {"vocab_size": VOCAB, "dim": 26, "layers": 2, "heads": 2, "hidden_dim": 31}
        model = Transformer(TransformerConfig(**sizes, **ENCODERS[name]))
    with torch.no_grad():  # initial norms and biases would hide a mistake
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    return model.eval().requires_grad_(False)


def tokens(rows, count, seed=0):
    return torch.randint(VOCAB, (rows, count), generator=torch.Generator().manual_seed(seed))


def run_modules(model, step, cache):
    """The step without the native call."""
    if isinstance(model, GPT):
        return model(step, cache=cache, last_only=True)[:, 0]
    return model.output(model.decode(step, None, encoder_pattern=cache.encoder_padding, cache=cache))[:, -1]


def get_logits(made):
    assert made is not None
    return made


@pytest.mark.parametrize("lengths", [None, [11, 4, 7]], ids=["even", "padded"])
@pytest.mark.parametrize("name", [*CONFIGS, *ENCODERS])
def test_the_native_step_computes_what_the_modules_compute(chosen, name, lengths, threads):
    threads(1)
    model = make(name)
    with torch.no_grad():
        real = None if lengths is None else torch.tensor(lengths)
        native, plain = (model.prefill(tokens(3, 11), real, STEPS + 1)[1] for _ in range(2))
        assert isinstance(find_decoder(model), NativeDecoder)
        for number in range(STEPS):
            step = tokens(3, 1, seed=number)
            made, expected = get_logits(run_native_step(model, step, native)), run_modules(model, step, plain)
            torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
            assert (native.length, native.lengths) == (plain.length, plain.lengths)
            if number == 4:  # as a beam search does
                for cache in (native, plain):
                    cache.reorder(torch.tensor([2, 0, 2]))
        for mine, other in zip(native.layers, plain.layers, strict=True):
            assert (mine.held, mine.real) == (other.held, other.real)


@pytest.mark.parametrize("name", ["gpt2", "window", "alibi", "post"])
def test_the_bits_of_a_row_depend_neither_on_the_batch_nor_on_threads(kernels, name, threads):
    model, results = make(name), []
    with torch.no_grad():
        threads(1)
        filled = model.prefill(tokens(1, 290 if name == "gpt2" else 13), None, 5)[1]
        for rows, count in [(1, 1), (1, 2), (2, 2), (3, 1), (4, 3), (5, 2)]:
            threads(count)
            cache = copy.deepcopy(filled)
            cache.reorder(torch.zeros(rows, dtype=torch.int64))
            found = [get_logits(run_native_step(model, tokens(1, 1, n).expand(rows, 1), cache)) for n in range(4)]
            results.append(torch.stack(found))
    for made in results:
        for row in range(made.shape[1]):
            assert torch.equal(made[:, row], results[0][:, 0])


def test_many_threads_share_a_larger_model(kernels, threads):
    torch.manual_seed(3)
    model = GPT(GPTConfig.llama(vocab_size=3001, context_length=64, dim=256, layers=2, heads=4, kv_heads=2)).eval()
    results = []
    with torch.no_grad():
        filled = model.prefill(tokens(2, 7), None, 5)[1]
        expected = run_modules(model, tokens(2, 1), copy.deepcopy(filled))
        for count in (1, 2, 3, 5):
            threads(count)
            results.append(get_logits(run_native_step(model, tokens(2, 1), copy.deepcopy(filled))))
            torch.testing.assert_close(results[-1], expected, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(made, results[0]) for made in results)


def test_a_native_step_leaves_what_is_not_finite_to_the_modules(kernels):
    model = make("gpt2")
    with torch.no_grad():
        cache = model.prefill(tokens(2, 5), None, 4)[1]
        cache.layers[1]._storage[1][0, 1, 2, 3] = torch.inf
        assert run_native_step(model, tokens(2, 1), cache) is None
        assert cache.length == 5
        model.decode_step(tokens(2, 1), cache)
        assert cache.length == 6


# Any model


@st.composite
def models(draw):
    """A GPT of any form that has a native step, its weights' format, and the lengths of its prompts."""
    heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    position = draw(st.sampled_from(["learned", "rotary", "alibi", "sinusoidal", "none"]))
    head_dim = draw(st.integers(1, 9)) * (2 if position in ("rotary", "sinusoidal") else 1)
    layers = draw(st.integers(1, 3))
    window = draw(st.none() | st.integers(0, 9))
    config = GPTConfig(
        vocab_size=draw(st.integers(2, 140)),
        context_length=64,
        dim=heads * head_dim,
        layers=layers,
        heads=heads,
        kv_heads=draw(st.sampled_from([count for count in (1, 2, 3, heads) if heads % count == 0])),
        hidden_dim=draw(st.integers(1, 71)),
        position=position,
        norm=draw(st.sampled_from(["layer", "rms"])),
        feed_forward=draw(st.sampled_from(["gelu", "gelu_tanh", "relu", "silu", "swiglu", "geglu", "reglu"])),
        bias=draw(st.booleans()),
        tie_embeddings=draw(st.booleans()),
        window=window,
        window_layers=None if window is None else tuple(sorted(draw(st.sets(st.integers(0, layers - 1), min_size=1)))),
    )
    lengths = draw(st.lists(st.integers(1, 21), min_size=1, max_size=9))
    return config, draw(st.sampled_from(["float32", "bf16", "int8", "int4", "q4_0"])), lengths


def assert_step_agrees(config, word, lengths):
    torch.manual_seed(11)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        model.eval().requires_grad_(False)
        if word != "float32":
            model.quantize(word)
        assert isinstance(find_decoder(model), NativeDecoder)
        rows, longest = len(lengths), max(lengths)
        prompt = torch.randint(config.vocab_size, (rows, longest), generator=torch.Generator().manual_seed(1))
        native, plain = (model.prefill(prompt, torch.tensor(lengths), 4)[1] for _ in range(2))
        for number in range(3):
            step = prompt[:, :1] if number == 0 else torch.full((rows, 1), number % config.vocab_size)
            made, expected = get_logits(run_native_step(model, step, native)), run_modules(model, step, plain)
            if word in ("float32", "bf16"):
                torch.testing.assert_close(made, expected, rtol=2e-4, atol=2e-4 * float(expected.abs().max()))
            else:  # a number just between two of 8 bits may be rounded to the other: a step of 1 / 127, in a few groups
                assert (made - expected).norm() <= 0.04 * expected.norm() + 1e-6


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], max_examples=60, deadline=None)
@given(models())
def test_the_native_step_of_any_model_computes_what_its_modules_compute(case):
    assert_step_agrees(*case)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], max_examples=800, deadline=None)
@given(models())
def test_the_native_step_of_very_many_models_computes_what_their_modules_compute(case):
    assert_step_agrees(*case)
