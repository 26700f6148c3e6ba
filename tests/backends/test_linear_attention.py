"""Linear attention: its three forms agree with each other and with the reference."""

import math

import pytest
import torch
from plain import slow

import regard
from regard import Causal, Full, LinearState, Padding, Window, attend, step
from regard.errors import BackendError, CalculusError, ShapeError
from regard.features import Elu1, FavorPlus, FeatureMap, Relu, Taylor2

MAPS = [Elu1(), Relu(), Taylor2(), FavorPlus(features=11), torch.sigmoid]
PATTERNS = [
    Full(),
    Causal(),
    Padding([3, 5]),
    Padding([0, 4], side="left"),
    Causal() & Padding([2, 5]),
    Padding([3, 1]) & (Full() & (Causal() & Padding([4, 5], side="left"))),
    Causal() & ~Full(),
    Padding([3, 1]) | ~Padding([2, 4]),
]


def tensors(queries=7, keys=7, *, batch=2, heads=6, kv_heads=3, dim=3, value_dim=2, seed=5, dtype=torch.float64):
    torch.manual_seed(seed)
    shapes = ((heads, queries, dim), (kv_heads, keys, dim), (kv_heads, keys, value_dim))
    return [torch.randn(batch, *shape, dtype=dtype) for shape in shapes]


def assert_same(actual, expected, bound=1e-12):
    torch.testing.assert_close(actual, expected, rtol=0, atol=bound, equal_nan=True)


def assert_agrees(q, k, v, bound=1e-12, **fields):
    expected = attend(q, k, v, backend="reference", **fields)
    assert_same(attend(q, k, v, backend="linear", **fields), expected, bound)


@pytest.mark.parametrize("lengths", [(5, 5), (3, 7), (11, 5), (1, 7), (1, 5), (137, 149), (149, 137)])
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize("phi", MAPS, ids=lambda phi: getattr(phi, "__name__", repr(phi)))
def test_it_equals_the_reference(phi, pattern, lengths):
    assert_agrees(*tensors(*lengths), pattern=pattern, feature_map=phi)


@pytest.mark.parametrize("pattern", [Full(), Causal(), Causal() & Padding([0, 0])], ids=repr)
def test_without_keys_there_are_zeros(pattern):
    q, k, v = tensors(5, 0)
    q[0] = torch.nan
    output = attend(q, k, v, pattern=pattern, feature_map="elu1", backend="linear")
    assert output.shape == (2, 6, 5, 2)
    assert (output == 0).all()


@pytest.mark.parametrize("pattern", [Full(), Causal(), Padding([2, 7])], ids=repr)
@pytest.mark.parametrize("scale", [0, 0.3, -2.0, 5.0])
@pytest.mark.parametrize("phi", ["relu", "taylor2"])
def test_beta_means_what_it_means_in_the_reference(phi, scale, pattern):
    assert_agrees(*tensors(), pattern=pattern, feature_map=phi, scale=scale)


@pytest.mark.parametrize("heads", [(1, 1), (5, 1), (6, 2), (3, 3)])
@pytest.mark.parametrize("pattern", [Full(), Causal()], ids=repr)
def test_grouped_heads_share_their_keys(pattern, heads):
    q, k, v = tensors(71, 67, heads=heads[0], kv_heads=heads[1], value_dim=5)
    assert_agrees(q, k, v, pattern=pattern, feature_map="taylor2")


def test_auto_selects_it_and_reports_why_not_the_others():
    found = regard.explain(*tensors(), feature_map="elu1", pattern=Causal())
    assert found.backend == "linear"
    assert "feature map" in found.reasons["sdpa"]


# The three forms


@pytest.mark.parametrize("chunk", [1, 3, 64, 1000])
def test_the_size_of_a_chunk_changes_nothing(monkeypatch, chunk):
    monkeypatch.setattr("regard.kernels.linear_attention.CHUNK", chunk)
    assert_agrees(*tensors(131, 131), pattern=Causal(), feature_map="taylor2")


@pytest.mark.parametrize("phi", MAPS, ids=lambda phi: getattr(phi, "__name__", repr(phi)))
def test_token_by_token_and_chunk_by_chunk_are_the_same(phi):
    q, k, v = tensors(67, 67)
    whole = attend(q, k, v, pattern=Causal(), feature_map=phi, backend="linear")
    state, outputs = None, []
    for token in range(67):
        now = slice(token, token + 1)
        output, state = step(q[:, :, now], k[:, :, now], v[:, :, now], state, feature_map=phi)
        outputs.append(output)
    assert_same(torch.cat(outputs, 2), whole)


def test_the_dense_form_is_the_last_step_of_the_recurrence():
    q, k, v = tensors(13, 13)
    dense = attend(q, k, v, feature_map="taylor2", backend="linear")
    _, state = step(q[:, :, :12], k[:, :, :12], v[:, :, :12], feature_map="taylor2")
    last, _ = step(q[:, :, 12:], k[:, :, 12:], v[:, :, 12:], state, feature_map="taylor2")
    assert_same(last, dense[:, :, 12:])


@pytest.mark.parametrize("cuts", [(5, 7), (1, 130), (64, 65)])
def test_a_prompt_is_a_step_too(cuts):
    q, k, v = tensors(131, 131)
    whole, end = step(q, k, v, feature_map="elu1", scale=0.7)
    state, outputs = None, []
    for begin, stop in zip((0, *cuts), (*cuts, 131), strict=True):
        now = slice(begin, stop)
        output, state = step(q[:, :, now], k[:, :, now], v[:, :, now], state, feature_map="elu1", scale=0.7)
        outputs.append(output)
    assert_same(torch.cat(outputs, 2), whole)
    assert_same(whole, attend(q, k, v, pattern=Causal(), feature_map="elu1", scale=0.7, backend="reference"))
    assert_same(state.sums, end.sums)
    assert_same(state.norm, end.norm)


def test_the_state_never_grows_and_follows_the_batch():
    q, k, v = (tensor[:, None] for tensor in tensors(3, 3))
    _, early = step(q, k, v, feature_map="taylor2")
    _, late = step(*(tensor.repeat(1, 1, 1, 37, 1) for tensor in (q, k, v)), early, feature_map="taylor2")
    features = 1 + 3 + 3 * 4 // 2
    for state in (early, late):
        assert state.sums.shape == (2, 1, 3, features, 2)
        assert state.norm.shape == (2, 1, 3, features)
    swapped = late.reorder(torch.tensor([1, 0, 0]))
    assert_same(swapped.sums, late.sums[[1, 0, 0]], 0)
    assert_same(swapped.norm, late.norm[[1, 0, 0]], 0)


def test_a_step_without_tokens_leaves_the_state_as_it_is():
    q, k, v = tensors(7, 7)
    _, state = step(q, k, v, feature_map="elu1")
    output, after = step(q[:, :, :0], k[:, :, :0], v[:, :, :0], state, feature_map="elu1")
    assert output.shape == (2, 6, 0, 2)
    assert_same(after.sums, state.sums, 0)
    assert_same(after.norm, state.norm, 0)


def test_two_keys_by_hand():
    # phi(x) = x + 1: kernels (1 + 1) * (0 + 1) = 2 and 2 * (2 + 1) = 6, so the weights are 1/4 and 3/4.
    q = torch.tensor([1.0, 1.0]).reshape(1, 2, 1)
    k = torch.tensor([0.0, 2.0]).reshape(1, 2, 1)
    v = torch.tensor([4.0, 8.0]).reshape(1, 2, 1)
    assert attend(q, k, v, feature_map="elu1", backend="linear").flatten().tolist() == [7.0, 7.0]
    causal = attend(q, k, v, feature_map="elu1", pattern=Causal(), backend="linear")
    assert causal.flatten().tolist() == [4.0, 7.0]


# What it costs, and what it approximates


@pytest.mark.parametrize(
    ("tokens", "linear_macs", "softmax_macs"), [(256, 2129920, 8388608), (4096, 34078720, 2147483648)]
)
def test_the_cost_grows_with_the_tokens_and_not_with_their_square(tokens, linear_macs, softmax_macs):
    x = torch.zeros(1, 1, tokens, 64)
    assert regard.explain(x, x, x, feature_map="elu1").macs == linear_macs == 2 * tokens * 64 * (64 + 1)
    assert regard.explain(x, x, x).macs == softmax_macs


def test_it_breaks_even_at_one_token_more_than_there_are_numbers():
    def costs(tokens):
        x = torch.zeros(1, 1, tokens, 13)
        return regard.explain(x, x, x, feature_map="elu1").macs, regard.explain(x, x, x).macs

    assert costs(14)[0] == costs(14)[1]
    assert costs(13)[0] > costs(13)[1]
    assert costs(15)[0] < costs(15)[1]


def test_taylor_features_are_close_to_softmax_for_small_scores():
    q, k, v = tensors(17, 19, heads=3)
    q, k = 0.3 * q, 0.3 * k
    largest = (q @ k.mT).abs().max().item() / math.sqrt(3)
    bound = largest**3 * math.exp(largest) / 6
    error = (attend(q, k, v, feature_map="taylor2") - attend(q, k, v)).abs().max()
    # Weights off by a relative e move a weighted mean by at most 2 e / (1 - e) times the largest value.
    assert 0 < error <= 2 * bound / (1 - bound) * v.abs().max()
    assert bound < 0.1


@pytest.mark.parametrize("pattern", [Full(), Causal()], ids=repr)
def test_memory_is_linear_in_the_tokens(pattern):
    x = torch.zeros(1, 1, 20011, 5)  # the square would hold 400 million numbers
    with torch.profiler.profile(profile_memory=True) as profile:
        attend(x, x, x, pattern=pattern, feature_map="elu1", backend="linear")
    assert max(event.self_cpu_memory_usage for event in profile.key_averages()) < 20011 * 4 * 1000


# Padding


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("causal", [False, True])
def test_padding_is_in_neither_sum(causal, side):
    q, k, v = tensors(7, 7)
    lengths = [3, 5]
    pattern = Padding(lengths, side=side) & Causal() if causal else Padding(lengths, side=side)
    output = attend(q, k, v, pattern=pattern, feature_map="elu1", backend="linear")
    for row, length in enumerate(lengths):
        real = slice(0, length) if side == "right" else slice(7 - length, 7)
        alone = [tensor[row : row + 1, :, real] for tensor in (q, k, v)]
        short = attend(*alone, pattern=Causal() if causal else Full(), feature_map="elu1", backend="reference")
        assert_same(output[row : row + 1, :, real], short)


def test_hiding_the_values_alone_would_be_wrong():
    # The twin of the test above: padded keys left in the normaliser make every output too small.
    q, k, v = tensors(7, 7)
    hidden = v * (torch.arange(7) < 3)[:, None]
    wrong = attend(q, k, hidden, feature_map="elu1", backend="linear")
    right = attend(q, k, v, pattern=Padding([3, 3]), feature_map="elu1", backend="linear")
    assert (wrong.abs() < right.abs()).all()


# What is not finite


def spoil(tensor, place):
    spoiled = tensor.clone()
    spoiled[place] = torch.tensor([torch.nan, torch.inf], dtype=tensor.dtype)[
        torch.arange(spoiled[place].numel()) % 2
    ].reshape(spoiled[place].shape)
    return spoiled


@pytest.mark.parametrize("phi", ["elu1", "relu", "taylor2"])
@pytest.mark.parametrize("scale", [None, 0])
@pytest.mark.parametrize(
    "pattern", [Full(), Causal(), Padding([3, 5]), Causal() & Padding([3, 5], side="left")], ids=repr
)
def test_nan_spoils_exactly_what_saw_it(pattern, scale, phi):
    for lengths in [(7, 7), (3, 7), (11, 7)]:
        q, k, v = tensors(*lengths)
        fields = {"pattern": pattern, "scale": scale, "feature_map": phi}
        assert_agrees(q, spoil(k, (0, 1, 4)), spoil(v, (1, 2, 3, slice(1))), **fields)
        assert_agrees(q, spoil(k, (0, slice(None), 6)), spoil(v, (0, 0, 2)), **fields)


@pytest.mark.parametrize("hide", ["future", "padding"])
def test_hidden_nan_leaks_neither_forward_nor_backward(hide):
    def run(spoiled):
        q, k, v = tensors(7, 7)
        if spoiled:
            k[:, :, 5:], v[:, :, 5:] = torch.nan, torch.inf
        leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
        pattern = Causal() if hide == "future" else Padding([5, 5])
        output = attend(*leaves, pattern=pattern, feature_map="elu1", backend="linear")[:, :, :5]
        return output, torch.autograd.grad(output.square().sum(), leaves)

    output, gradients = run(True)
    clean, clean_gradients = run(False)
    assert_same(output, clean)
    for found, expected in zip(gradients, clean_gradients, strict=True):
        assert_same(found, expected)


def test_a_padded_key_with_infinite_slope_sends_no_gradient():
    q, k, v = tensors(5, 5)
    k[:, :, 3:] = 1e300
    k.requires_grad_()
    output = attend(q, k, v, pattern=Padding([3, 3]), feature_map="taylor2", backend="linear")
    output.sum().backward()
    assert torch.isfinite(k.grad).all()
    assert (k.grad[:, :, 3:] == 0).all()


def test_a_step_keeps_non_finite_values_in_its_state():
    q, k, v = tensors(7, 7)
    k[0, 1, 2, 0], v[1, 2, 3, 1] = -torch.inf, torch.inf
    whole = attend(q, k, v, pattern=Causal(), feature_map="elu1", backend="reference")
    for cut in (1, 3, 4, 6):
        first, state = step(q[:, :, :cut], k[:, :, :cut], v[:, :, :cut], feature_map="elu1")
        second, _ = step(q[:, :, cut:], k[:, :, cut:], v[:, :, cut:], state, feature_map="elu1")
        assert_same(torch.cat((first, second), 2), whole)


# Gradients, transforms, precision


@pytest.mark.parametrize(
    "pattern", [Full(), Causal(), Padding([2, 5]), Causal() & Padding([0, 3], side="left")], ids=repr
)
@pytest.mark.parametrize("lengths", [(2, 5), *slow((5, 5), (7, 5))])
def test_gradients_agree_with_finite_differences(monkeypatch, lengths, pattern):
    monkeypatch.setattr("regard.kernels.linear_attention.CHUNK", 2)
    inputs = [tensor.requires_grad_() for tensor in tensors(*lengths, heads=2, kv_heads=1)]

    def run(q, k, v):
        return attend(q, k, v, pattern=pattern, feature_map="elu1", backend="linear")

    assert torch.autograd.gradcheck(run, inputs)
    if lengths == (2, 5):
        assert torch.autograd.gradgradcheck(run, inputs)


def test_gradients_flow_through_the_state():
    q, k, v = tensors(5, 5, heads=2, kv_heads=1)

    def run(q, k, v):
        first, state = step(q[:, :, :3], k[:, :, :3], v[:, :, :3], feature_map="taylor2")
        second, _ = step(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], state, feature_map="taylor2")
        return torch.cat((first, second), 2)

    assert torch.autograd.gradcheck(run, [tensor.requires_grad_() for tensor in (q, k, v)])


@pytest.mark.parametrize("pattern", [Full(), Causal(), Causal() & Padding([3, 5])], ids=repr)
def test_it_can_be_mapped_differentiated_and_compiled(pattern):
    def run(q, k, v):
        return attend(q, k, v, pattern=pattern, feature_map="elu1", backend="linear")

    q, k, v = (torch.stack([x, -x, 2 * x]) for x in tensors(7, 5))
    expected = torch.stack([run(*each) for each in zip(q, k, v, strict=True)])
    assert_same(torch.func.vmap(run)(q, k, v), expected)
    loss = torch.func.vmap(torch.func.grad(lambda *x: run(*x).square().sum(), argnums=(0, 1, 2)))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.stack([run(*each) for each in zip(*leaves, strict=True)]).square().sum().backward()
    for found, leaf in zip(loss(q, k, v), leaves, strict=True):
        assert_same(found, leaf.grad)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert_same(compiled(q[0], k[0], v[0]), expected[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pattern", [Full(), Causal()], ids=repr)
def test_half_precision_is_computed_in_float32(pattern, dtype):
    q, k, v = tensors(1009, 1009, batch=1, heads=1, kv_heads=1, dtype=dtype)
    fields = {"pattern": pattern, "feature_map": "elu1"}
    output = attend(q, k, v, backend="linear", **fields)
    exact = attend(q.double(), k.double(), v.double(), backend="reference", **fields)
    assert output.dtype == dtype
    # One rounding of the output; the sums themselves are good to float32.
    assert ((output.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 1e-6).all()
    stepped, state = step(q, k, v, feature_map="elu1")
    assert stepped.dtype == dtype
    assert state.sums.dtype == state.norm.dtype == torch.float32


def test_autocast_lowers_nothing_inside_a_step():
    q, k, v = tensors(7, 7, dtype=torch.float32)
    plain, _ = step(q, k, v, feature_map="favor+")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, state = step(q, k, v, feature_map="favor+")
    assert_same(output, plain, 0)
    assert state.sums.dtype == torch.float32


# What it refuses


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "needs a feature map"),
        ({"feature_map": "elu1", "pattern": Window(3, 0)}, "Window"),
        ({"feature_map": "elu1", "pattern": Causal() | Padding([3, 5])}, "Or"),
        ({"feature_map": "elu1", "pattern": Causal() & ~Window(3, 5)}, "Not"),
    ],
)
def test_refusals_have_four_parts(fields, words):
    with pytest.raises(BackendError) as caught:
        attend(*tensors(), backend="linear", **fields)
    error = caught.value
    assert words in error.because
    assert all((error.headline, error.asked, error.because, error.instead))


def test_other_patterns_still_run_on_the_reference():
    assert regard.explain(*tensors(), feature_map="elu1", pattern=Window(3, 0)).backend == "reference"


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((7, 3), (2, 7, 3), (2, 7, 3)), "head axis"),
        (((2, 7, 3), (2, 7, 5), (2, 7, 3)), "dot product"),
        (((3, 2, 7, 3), (2, 7, 3), (2, 7, 3)), "batch"),
        (((2, 5, 3), (2, 7, 3), (2, 7, 3)), "one query, one key and one value"),
        (((5, 7, 3), (2, 7, 3), (2, 7, 3)), "multiple"),
    ],
)
def test_tensors_that_make_no_step_are_refused(shapes, words):
    with pytest.raises(ShapeError) as caught:
        step(*(torch.zeros(shape) for shape in shapes), feature_map="elu1")
    error = caught.value
    assert words in error.because
    assert all((error.headline, error.asked, error.because, error.instead))


def test_a_step_refuses_mixed_dtypes_foreign_states_hard_limits_and_unknown_maps():
    q, k, v = tensors(1, 1)
    with pytest.raises(ShapeError, match="one floating-point dtype"):
        step(q, k.float(), v, feature_map="elu1")
    _, state = step(q, k, v, feature_map="taylor2")
    with pytest.raises(ShapeError, match=r"found .*\(2, 3, 3, 2\)"):
        step(q, k, v, state, feature_map="elu1")
    with pytest.raises(ShapeError, match="another attention"):
        step(q, k, v, LinearState(state.sums, state.norm[..., :1]), feature_map="taylor2")
    with pytest.raises(CalculusError, match="hard limit"):
        step(q, k, v, feature_map="elu1", scale=math.inf)
    with pytest.raises(CalculusError, match="no such feature map"):
        step(q, k, v, feature_map="nothing")


def test_beta_defaults_to_the_same_number_in_step_and_attend():
    class Doubled(FeatureMap):
        approximates_exp = True

        def __call__(self, x):
            return (2 * x).exp()

    q, k, v = tensors(5, 5)
    for phi in (Doubled(), Elu1()):
        assert_same(
            step(q, k, v, feature_map=phi)[0],
            attend(q, k, v, pattern=Causal(), feature_map=phi, backend="reference"),
        )
