"""Dropout of attention weights: one mask for every backend, drawn again in backward, seeded by torch's generator."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from agreement import refused
from catalog import BETAS, GRID, LENGTHS, PATTERNS, TILED, TOKENS, assert_agree, biases, bounds, fits, results, tensors
from plain import slow_but
from torch import nn
from torch.utils.checkpoint import checkpoint

from regard import (
    BackendError,
    Causal,
    Full,
    Mask,
    Padding,
    Quadratic,
    Window,
    attend,
    explain,
    weights,
)
from regard.dropout import Dropout, draw_seed, find_threshold, keep_scale, philox
from regard.errors import InputError

BACKENDS = ["reference", *TILED]
SEED = 0x1234_5678_9ABC_DEF0
# Published with the generator: Random123, tests/kat_vectors, philox4x32 with 10 rounds. Counter, key, result.
PUBLISHED = [
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, -1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0_A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def one_philox(counter, seed):
    """The generator in Python's whole numbers."""
    x0, x1, x2, x3 = counter
    key0, key1 = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    for _ in range(10):
        product0, product1 = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1 = product1 >> 32 ^ x1 ^ key0, product1 & 0xFFFFFFFF
        x2, x3 = product0 >> 32 ^ x3 ^ key1, product0 & 0xFFFFFFFF
        key0, key1 = key0 + 0x9E3779B9 & 0xFFFFFFFF, key1 + 0xBB67AE85 & 0xFFFFFFFF
    return x0, x1, x2, x3


def one_kept(probability, seed, row, query, key):
    """Whether the weight of one pair is kept, by the definition."""
    word = one_philox((key // 8, query, row & 0xFFFFFFFF, row >> 32), seed)[key % 8 // 2]
    return (word >> 16 * (key % 2) & 0xFFFF) >= round(65536 * probability)


def mask_of(backend, shape, probability=0.3, seed=SEED, dtype=torch.float32, **words):
    """Which weights `(batch, head, query, key)` a backend keeps, read from the output: values are unit vectors."""
    batch, heads, queries, keys = shape
    query, key = torch.zeros(batch, heads, queries, 1, dtype=dtype), torch.zeros(batch, heads, keys, 1, dtype=dtype)
    value = torch.eye(keys, dtype=dtype).expand(batch, heads, -1, -1)
    return attend(query, key, value, dropout=probability, dropout_seed=seed, backend=backend, **words) > 0


# The generator and the mask


@pytest.mark.parametrize(("counter", "seed", "expected"), PUBLISHED)
def test_the_generator_gives_the_published_numbers(counter, seed, expected):
    found = philox(tuple(torch.tensor(word) for word in counter), torch.tensor(seed))
    assert tuple(int(word) for word in found) == expected
    assert one_philox(counter, seed) == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_mask_is_the_one_of_the_definition(backend):
    shape = (2, 3, 5, 19)
    found = mask_of(backend, shape)
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, shape)).tolist():
        assert bool(found[b, h, i, j]) == one_kept(0.3, SEED, 3 * b + h, i, j)


def test_rows_beyond_32_bits_have_masks_of_their_own():
    row, query, block = torch.tensor([1, 1 + (5 << 32)])[:, None], torch.arange(3), torch.tensor(2)
    found = Dropout(0.5, torch.tensor(7)).factors(row, query, block, torch.float64)
    expected = [
        [[2.0 * one_kept(0.5, 7, r, i, 16 + j) for j in range(8)] for i in range(3)] for r in (1, 1 + (5 << 32))
    ]
    assert found.tolist() == expected
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("backend", TILED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "pattern", [Full(), Causal(), Window(7, 9, step=3), Window(3, 3) | Causal(), Padding([83, 41])], ids=str
)
def test_every_tiling_has_the_same_mask(backend, dtype, pattern):
    # 83 queries and keys: tiles of every height with a rest, key blocks cut by the tiles.
    shape = (2, 3, 83, 83)
    mask, allowed_pairs = mask_of("reference", shape), pattern.matrix(83, 83)
    allowed_pairs = allowed_pairs[:, None] if allowed_pairs.ndim == 3 else allowed_pairs
    assert torch.equal(mask_of(backend, shape, dtype=dtype, pattern=pattern), mask & allowed_pairs)


@pytest.mark.parametrize("backend", TILED)
def test_a_mask_of_heads_and_shared_keys_do_not_change_which_weights_are_dropped(backend):
    allowed = torch.rand(2, 4, 13, 21, generator=torch.Generator().manual_seed(0)) < 0.7
    found = mask_of(backend, (2, 4, 13, 21), pattern=Mask(allowed))
    assert torch.equal(found, mask_of("reference", (2, 4, 13, 21)) & allowed)
    query, key = torch.zeros(2, 4, 13, 1), torch.zeros(2, 2, 21, 1)
    value = torch.eye(21).expand(2, 2, -1, -1)
    shared = attend(query, key, value, dropout=0.3, dropout_seed=SEED, backend=backend)
    assert torch.equal(shared > 0, mask_of("reference", (2, 4, 13, 21)))


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.937])
def test_the_dropped_share_is_the_probability_and_neighbours_are_independent(probability):
    kept = mask_of("reference", (3, 5, 64, 512), probability).double()

    def assert_frequency(events, expected):
        """Within five standard deviations of a binomial: once in 1.7 million."""
        spread = math.sqrt(expected * (1 - expected) / events.numel())
        assert abs(float(events.mean()) - expected) < 5 * spread

    share = 1 - probability
    assert_frequency(kept, share)
    for axis in range(4):
        ends = kept.narrow(axis, 1, kept.shape[axis] - 1), kept.narrow(axis, 0, kept.shape[axis] - 1)
        assert_frequency(ends[0] * ends[1], share * share)
    for distance in (2, 4, 8):  # words and blocks of the generator
        assert_frequency(kept[..., distance:] * kept[..., :-distance], share * share)
    assert_frequency(kept * mask_of("reference", (3, 5, 64, 512), probability, SEED + 1).double(), share * share)
    for part in kept.flatten(0, 1):  # every head of every batch row
        assert_frequency(part, share)


def test_probabilities_are_rounded_to_the_nearest_of_65536_and_so_is_the_scale():
    assert [find_threshold(p) for p in (0.5, 0.1, 1e-9, 1 - 1e-9)] == [32768, 6554, 0, 65535]
    for probability in (0.1, 0.25, 0.9):
        assert abs(find_threshold(probability) / 65536 - probability) <= 2**-17
        assert keep_scale(probability) * (1 - find_threshold(probability) / 65536) == pytest.approx(1, abs=1e-15)
    inputs = tensors((7, 11))
    assert torch.equal(attend(*inputs, dropout=1e-9), attend(*inputs, backend="native" if len(TILED) > 1 else "auto"))


@pytest.mark.parametrize("backend", slow_but(BACKENDS[-1:], BACKENDS))
def test_the_mean_over_seeds_is_attention_without_dropout(backend):
    query, key, value = (tensor.detach() for tensor in tensors((5, 13)))
    runs = 2000
    with torch.no_grad():
        drawn = torch.stack(
            [attend(query, key, value, dropout=0.2, dropout_seed=n, backend=backend) for n in range(runs)]
        )
    error = drawn.std(0) / math.sqrt(runs)
    worst = ((drawn.mean(0) - attend(query, key, value)).abs() / error).max()
    assert float(worst) < 5.5  # of 210 numbers: once in a hundred thousand


# Agreement with the reference, output and gradients


def dropped(backend, dtype, lengths, *, kv_heads=3, bias=None, scale=None, pattern=None, probability=0.3):
    inputs = tensors(lengths, kv_heads=kv_heads, dtype=dtype)
    bias = copy.deepcopy(bias.to(dtype) if isinstance(bias, nn.Module) else bias)
    if isinstance(bias, torch.Tensor):
        bias = bias.to(dtype).requires_grad_()
    return results(
        attend,
        *inputs,
        dropout=probability,
        dropout_seed=SEED,
        backend=backend,
        bias=bias,
        scale=scale,
        pattern=pattern,
    )


def assert_equals_reference(backend, dtype, lengths, **words):
    expected = dropped("reference", torch.float64, lengths, **words)
    found = dropped(backend, dtype, lengths, **words)
    query, key, value = tensors(lengths, kv_heads=words.get("kv_heads", 3))
    # What is kept is multiplied by 1 / (1 - p), weights and their gradients alike.
    limits = bounds(query, key, value, words.get("scale"), dtype)
    assert_agree(found, expected, {name: limit * keep_scale(0.3) for name, limit in limits.items()})


@pytest.mark.parametrize("backend", TILED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_every_pattern_equals_the_reference_forward_and_backward(backend, dtype, pattern):
    number = PATTERNS.index(pattern) % len(LENGTHS)
    lengths = LENGTHS[number] if fits(pattern, LENGTHS[number]) else (TOKENS, TOKENS)
    assert_equals_reference(backend, dtype, lengths, pattern=pattern, kv_heads=(1, 3)[number % 2])


@pytest.mark.parametrize("backend", TILED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bias", [*biases(3, 5), "tensor", "tensor of a batch row", "tensor of a key"])
def test_every_bias_and_its_gradient_equal_the_reference(backend, dtype, bias):
    shapes = {"tensor": (3, TOKENS, TOKENS), "tensor of a batch row": (2, 1, TOKENS, 1), "tensor of a key": (TOKENS,)}
    made = torch.randn(shapes[bias], generator=torch.Generator().manual_seed(1)).double() if bias in shapes else None
    made = biases(3, 5)[bias] if made is None else made
    if backend == "native" and bias == "transformer-xl":
        with refused(BackendError, "tabulate"):
            dropped(backend, dtype, (TOKENS, TOKENS), bias=made)
        return
    for pattern in (Causal(), Padding([TOKENS, 9])):
        assert_equals_reference(backend, dtype, (TOKENS, TOKENS), bias=made, pattern=pattern, kv_heads=1)


@pytest.mark.parametrize("backend", TILED)
@pytest.mark.parametrize("scale", BETAS)
def test_every_scale_equals_the_reference(backend, scale):
    if backend == "native" and scale is not None and math.isinf(scale):
        with refused(BackendError, "hard attention"):
            dropped(backend, torch.float64, (11, TOKENS), scale=scale)
        return
    for bias in (None, biases(3, 5)["table"]):
        assert_equals_reference(backend, torch.float64, (11, TOKENS), scale=scale, bias=bias)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hard_attention_drops_its_winner(backend):
    if backend == "native":
        pytest.skip("native has no hard attention")
    query = key = torch.eye(6)[None]
    output = attend(query, key, key, scale=math.inf, dropout=0.5, dropout_seed=3, backend=backend)[0]
    kept = mask_of(backend, (1, 1, 6, 6), 0.5, 3)[0, 0].diagonal()
    assert 0 < int(kept.sum()) < 6
    assert torch.equal(output, torch.diag(2.0 * kept))


@pytest.mark.parametrize("backend", BACKENDS)
def test_odd_sizes_one_token_and_nothing_at_all(backend):
    for lengths in ((1, 1), (1, 9), (17, 1), (3, 0), (0, 3)):
        query, key, value = tensors(lengths)
        output = attend(query, key, value, dropout=0.4, dropout_seed=5, backend=backend)
        expected = weights(query, key, dropout=0.4, dropout_seed=5) @ value
        assert torch.allclose(output, expected, rtol=0, atol=1e-12)
        output.sum().backward()
        assert all(bool(torch.isfinite(tensor.grad).all()) for tensor in (query, key, value))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_that_sees_nothing_or_loses_everything_yields_zeros(backend):
    query, key, value = tensors((TOKENS, TOKENS))
    output = attend(query, key, value, pattern=Padding([TOKENS, 0]), dropout=0.9999, dropout_seed=1, backend=backend)
    assert not bool(output[1].any())
    lost = ~mask_of(backend, (2, 3, TOKENS, TOKENS), 0.9999, 1)[0].any(-1)
    assert bool(lost.any())
    assert not bool(output[0][lost].any())
    grads = torch.autograd.grad(output, (query, key, value), torch.ones_like(output))
    assert all(bool(torch.isfinite(grad).all()) and not bool(grad[1].any()) for grad in grads)
    assert not bool(grads[0][0][lost].any())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dropped_value_that_is_nan_still_shows(backend):
    query, key, value = (tensor.detach() for tensor in tensors((9, 9)))
    value[0, 1, 4, 2] = torch.nan
    output = attend(query, key, value, pattern=Causal(), dropout=0.5, dropout_seed=2, backend=backend)
    hurt = torch.zeros_like(output, dtype=torch.bool)
    hurt[0, 1, 4:, 2] = True
    assert torch.equal(torch.isnan(output), hurt)
    clean = attend(query, key, value.nan_to_num(), pattern=Causal(), dropout=0.5, dropout_seed=2, backend=backend)
    assert torch.allclose(output[~hurt], clean[~hurt], rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_those_of_finite_differences(backend):
    inputs = tensors((4, 6), batch=1, heads=2, kv_heads=1, dim=3, value_dim=2)
    bias = torch.randn(2, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()

    def function(query, key, value, bias):
        return attend(query, key, value, bias=bias, dropout=0.4, dropout_seed=9, backend=backend)

    assert torch.autograd.gradcheck(function, (*inputs, bias))


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_drops_the_same_weights(backend):
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(mask_of(backend, (1, 2, 9, 17), dtype=dtype), mask_of("reference", (1, 2, 9, 17)))


# Seeds


@pytest.mark.parametrize("backend", BACKENDS)
def test_torchs_generator_decides_and_is_left_alone_without_dropout(backend):
    inputs = [tensor.detach() for tensor in tensors((7, 11))]

    def draw(**words):
        return attend(*inputs, dropout=0.3, backend=backend, **words)

    torch.manual_seed(4)
    first, second = draw(), draw()
    assert not torch.equal(first, second)
    torch.manual_seed(4)
    assert torch.equal(draw(), first)
    torch.manual_seed(4)
    assert torch.equal(attend(*inputs, dropout=0.3, dropout_seed=draw_seed(), backend=backend), first)
    before = torch.get_rng_state()
    assert torch.equal(draw(dropout_seed=5), draw(dropout_seed=torch.tensor(5)))
    assert torch.equal(attend(*inputs, dropout=0.0, backend=backend), attend(*inputs, backend=backend))
    explain(*inputs, dropout=0.3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_replays_the_mask(reentrant):
    query, key, value = tensors((7, 11))

    def function(query, key, value):
        return attend(query, key, value, dropout=0.3)

    torch.manual_seed(0)
    plain = torch.autograd.grad(function(query, key, value).sum(), (query, key, value))
    torch.manual_seed(0)
    output = checkpoint(function, query, key, value, use_reentrant=reentrant, preserve_rng_state=True)
    output.sum().backward()
    assert all(torch.equal(tensor.grad, grad) for tensor, grad in zip((query, key, value), plain, strict=True))


@pytest.mark.parametrize("pattern", [None, Causal()])
def test_the_weights_are_those_that_attend_uses(pattern):
    query, key, value = tensors((TOKENS, TOKENS))
    square = weights(query, key, pattern=pattern, dropout=0.3, dropout_seed=6)
    output = attend(query, key, value, pattern=pattern, dropout=0.3, dropout_seed=6)
    assert torch.allclose(square @ value, output, rtol=0, atol=1e-12)
    plain = weights(query, key, pattern=pattern)
    kept = square > 0
    assert torch.allclose(square[kept], plain[kept] * keep_scale(0.3), rtol=1e-14, atol=0)


# What is refused


@pytest.mark.parametrize("probability", [-0.1, 1, 1.0, 2.0, math.nan, True, "0.1", None])
def test_what_is_no_probability_below_one_is_refused(probability):
    with refused(InputError, "0 <= dropout < 1", f"dropout={probability}"):
        attend(*tensors((3, 5)), dropout=probability)


@pytest.mark.parametrize("seed", [1.5, True, 2**63, "7", torch.tensor(1.0), torch.tensor([1, 2])])
def test_what_is_no_seed_is_refused(seed):
    with refused(InputError, "64 bits"):
        attend(*tensors((3, 5)), dropout=0.1, dropout_seed=seed)


def test_linear_attention_refuses_dropout():
    with refused(BackendError, "feature_map", "dropout=0.1", "no weights"):
        attend(*tensors((5, 5)), feature_map="elu1", dropout=0.1)


def test_backends_that_cannot_say_why_and_auto_takes_one_that_can():
    inputs = tensors((TOKENS, TOKENS))
    told = explain(*inputs, dropout=0.1)
    assert told.backend in BACKENDS
    assert "dropout 0.1" in str(told)
    assert {name for name, reason in told.reasons.items() if "dropout" in reason} == {"sdpa", "flex", "positional"}
    for backend, word in (("sdpa", "mask of its own"), ("flex", "softmax"), ("positional", "single weights")):
        with refused(BackendError, word):
            attend(*inputs, dropout=0.1, backend=backend)
    uniform = explain(*inputs, scale=0.0, dropout=0.1)
    assert uniform.backend in BACKENDS
    position = attend(*inputs, scale=0, bias=Quadratic(3, GRID).double(), dropout=0.1, dropout_seed=1)
    assert position.shape == (2, 3, TOKENS, 7)


# torch's machinery


@pytest.mark.parametrize("backend", slow_but(["auto"], ["reference", "auto"]))
def test_compiled_attention_drops_by_the_given_seed(backend):
    torch._dynamo.reset()
    inputs = tensors((TOKENS, TOKENS))

    def function(query, key, value, seed):
        return attend(query, key, value, pattern=Causal(), dropout=0.3, dropout_seed=seed, backend=backend)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for seed in (3, 4):
        found, expected = (
            results(lambda q, k, v, run=run, seed=seed: run(q, k, v, torch.tensor(seed)), *inputs)
            for run in (compiled, function)
        )
        for mine, truth in zip(found, expected, strict=True):
            assert torch.allclose(mine, truth, rtol=0, atol=1e-12)


def test_compiled_attention_draws_a_new_seed_in_every_call():
    torch._dynamo.reset()
    inputs = [tensor.detach() for tensor in tensors((TOKENS, TOKENS))]
    compiled = torch.compile(lambda q, k, v: attend(q, k, v, dropout=0.3), fullgraph=True, backend="aot_eager")
    assert not torch.equal(compiled(*inputs), compiled(*inputs))


def test_an_exported_attention_draws_its_seeds():
    class Dropping(nn.Module):
        def forward(self, query, key, value):
            return attend(query, key, value, dropout=0.3)

    inputs = tuple(tensor.detach() for tensor in tensors((TOKENS, TOKENS)))
    exported = torch.export.export(Dropping(), inputs).module()
    torch.manual_seed(0)
    first, second = exported(*inputs), exported(*inputs)
    torch.manual_seed(0)
    assert torch.equal(attend(*inputs, dropout=0.3), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap_follows_its_own_rule_for_randomness(backend):
    query, key, value = (tensor.detach().expand(4, -1, -1, -1, -1).clone() for tensor in tensors((5, 9)))

    def function(query, key, value):
        return attend(query, key, value, dropout=0.4, backend=backend)

    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(function)(query, key, value)
    torch.manual_seed(0)
    same = torch.vmap(function, randomness="same")(query, key, value)
    assert all(torch.equal(sample, same[0]) for sample in same)
    torch.manual_seed(0)
    assert torch.allclose(function(query[0], key[0], value[0]), same[0], rtol=0, atol=1e-12)
    different = torch.vmap(function, randomness="different")(query, key, value)
    assert not any(torch.equal(sample, different[0]) for sample in different[1:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_each_sample_by_torch_func(backend):
    query, key, value = (tensor.detach() for tensor in tensors((5, 9), batch=3))

    def loss(query, key, value):
        return attend(query, key, value, dropout=0.4, dropout_seed=8, backend=backend).square().sum()

    found = torch.vmap(torch.func.grad(loss, (0, 1, 2)))(query, key, value)
    for number in range(3):
        expected = torch.func.grad(loss, (0, 1, 2))(query[number], key[number], value[number])
        for mine, truth in zip(found, expected, strict=True):
            assert torch.allclose(mine[number], truth, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pattern", [Full(), Causal() & Window(5, 0), Padding([TOKENS, 9])], ids=str)
def test_fake_tensors_pass_forward_and_backward_and_are_not_cached(backend, pattern):
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):  # plans are real
        inputs = [torch.empty(2, 3, TOKENS, 5, requires_grad=True) for _ in range(3)]
        output = attend(*inputs, pattern=pattern, dropout=0.3, backend=backend)
        output.sum().backward()
    assert output.shape == (2, 3, TOKENS, 5)
    assert all(tensor.grad.shape == tensor.shape for tensor in inputs)
    real = attend(*tensors((TOKENS, TOKENS)), pattern=pattern, dropout=0.3, dropout_seed=1, backend=backend)
    assert bool(torch.isfinite(real).all())
