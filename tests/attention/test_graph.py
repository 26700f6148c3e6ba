"""Whatever requires a gradient is in the graph of the output, even where its gradient is zero."""

import itertools
import math

import pytest
import torch
from catalog import biases, make_bias

from regard import Attention, BackendError, Causal, Full, Padding, RelativeTable, Window, attend, step, weights
from regard.backends import BACKENDS
from regard.layers import MultiHeadAttention

NAMES = [backend.name for backend in BACKENDS if backend.name != "flex"]  # without gradients on a CPU


def tensors(queries=5, keys=5, dim=4, batch=2):
    return [torch.randn(batch, 3, tokens, dim, dtype=torch.float64) for tokens in (queries, keys, keys)]


def assert_in_graph(output, *inputs):
    assert output.requires_grad
    grads = torch.autograd.grad(output, inputs, torch.randn_like(output), allow_unused=True)
    for tensor, grad in zip(inputs, grads, strict=True):
        assert grad is not None
        assert grad.shape == tensor.shape
        assert bool(torch.isfinite(grad).all())


CASES = {
    "plain": dict(),
    "no queries": dict(sizes=dict(queries=0)),
    "no keys": dict(sizes=dict(keys=0)),
    "no batch": dict(sizes=dict(batch=0)),
    "no channels": dict(sizes=dict(dim=0)),
    "nothing visible": dict(pattern=~Full()),
    "nothing real": dict(pattern=Padding([0, 0])),
    "mean": dict(scale=0.0),
    "hard": dict(scale=math.inf),
    "hard, the worst": dict(scale=-math.inf, pattern=Window(1, 0)),
    "linear": dict(feature_map="elu1", pattern=Causal()),
    "linear mean": dict(feature_map="elu1", scale=0.0),
    "linear, no keys": dict(feature_map="elu1", sizes=dict(keys=0)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["auto", *NAMES])
def test_every_subset_of_inputs_that_require_a_gradient_gets_one(backend, case):
    words = dict(CASES[case])
    sizes = words.pop("sizes", {})
    for learn in itertools.product([False, True], repeat=4):
        inputs = [t.requires_grad_(wanted) for t, wanted in zip(tensors(**sizes), learn, strict=False)]
        bias = None
        if "feature_map" not in words:
            bias = RelativeTable(3, distance=2, dtype=torch.float64).requires_grad_(learn[3])
        try:
            output = attend(*inputs, bias=bias, backend=backend, **words)
        except BackendError:
            pytest.skip(f"{backend} refuses")
        wanted = [t for t in (*inputs, *(() if bias is None else bias.parameters())) if t.requires_grad]
        assert output.requires_grad == bool(wanted)
        if wanted:
            assert_in_graph(output, *wanted)
        with torch.no_grad():
            assert not attend(*inputs, bias=bias, backend=backend, **words).requires_grad


@pytest.mark.parametrize("name", [name for name in biases(3, 4) if name != "none"])
def test_every_parameter_of_every_bias_is_in_the_graph_when_there_are_no_tokens(name):
    bias = make_bias(name, 3, 4)
    query, key, value = tensors(queries=0)
    learned = list(bias.parameters())
    if learned:
        assert_in_graph(attend(query, key, value, bias=bias), *learned)


def test_weights_and_steps_are_in_the_graph_as_well():
    for words in (dict(scale=0.0), dict(pattern=~Full()), dict(scale=math.inf)):
        query, key, _ = (tensor.requires_grad_() for tensor in tensors())
        assert_in_graph(weights(query, key, **words), query, key)
    for scale in (0.0, None):
        query, key, value = (tensor.requires_grad_() for tensor in tensors())
        assert_in_graph(step(query, key, value, feature_map="elu1", scale=scale)[0], query, key, value)
    query, key, value = (tensor.requires_grad_() for tensor in tensors(queries=0, keys=0))
    assert_in_graph(step(query, key, value, feature_map="elu1")[0], query, key, value)


def test_a_layer_that_sees_nothing_still_trains():
    layer = MultiHeadAttention(6, 3, attention=Attention(pattern=~Full()))
    layer(torch.randn(2, 5, 6)).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_the_numbers_of_an_output_are_the_same_bits_with_and_without_a_graph():
    query, key, value = tensors()
    value[:, :, ::2] = -0.0
    for words in (dict(scale=0.0), dict(scale=math.inf), dict(pattern=~Full())):
        plain = attend(query, key, value, **words)
        taped = attend(query.clone().requires_grad_(), key, value, **words).detach()
        assert torch.equal(plain, taped)
        assert torch.equal(plain.signbit(), taped.signbit())


# torch looks at `.grad` of what comes out between two graphs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("words", [dict(scale=0.0), dict(pattern=~Full()), dict()], ids=str)
def test_transforms_give_the_zeros_too(words):
    query, key, value = tensors()

    def loss(query):
        return attend(query, key[0], value[0], **words).sum()

    single = torch.func.grad(loss)(query[0])
    mapped = torch.func.vmap(torch.func.grad(loss))(query)
    assert single.shape == query.shape[1:]
    torch.testing.assert_close(mapped[0], single)
    if words:
        assert not mapped.any()
    compiled = torch.compile(loss, backend="eager")
    leaf = query[0].clone().requires_grad_()
    compiled(leaf).backward()
    assert leaf.grad is not None


@pytest.mark.parametrize("scale", [None, math.inf, 0.0], ids=str)
@pytest.mark.parametrize("backend", ["auto", "reference", "blocked", "native", "sdpa"])
def test_a_bias_with_any_strides_learns_what_a_dense_one_learns(backend, scale):
    """What is written into a copy is lost: gradients are held against those of a contiguous twin."""
    query, key, value = tensors()
    if scale == math.inf:
        query = torch.zeros_like(query)  # all keys tie, so that the bias decides
    views = {
        "transposed": (torch.randn(3, 5, 5), lambda x: x.mT),
        "heads last": (torch.randn(5, 5, 3), lambda x: x.permute(2, 0, 1)),
        "expanded": (torch.randn(3, 1, 5), lambda x: x.expand(3, 5, 5)),
        "every second": (torch.randn(3, 5, 10), lambda x: x[..., ::2]),
        "batch last": (torch.randn(3, 5, 5, 2), lambda x: x.permute(3, 0, 1, 2)),
    }
    for name, (base, view) in views.items():
        grads = []
        for dense in (False, True):
            leaf = base.double().requires_grad_()
            bias = view(leaf).contiguous() if dense else view(leaf)
            try:
                output = attend(query, key, value, bias=bias, scale=scale, backend=backend)
            except BackendError:
                pytest.skip(f"{backend} refuses")
            grads.append(torch.autograd.grad(output, leaf, value)[0])
        assert float(grads[1].abs().max()) > 1e-3
        torch.testing.assert_close(*grads, msg=lambda text, name=name: f"{name}: {text}")
