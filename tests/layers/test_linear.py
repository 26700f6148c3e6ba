"""torch's linear layer and ours are one layer; few rows take gemv and many gemm, for inference only."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from regard.kernels import library
from regard.layers import linear
from regard.layers.feedforward import FeedForward
from regard.layers.linear import (
    ACTIVATIONS,
    GEMV_ROWS,
    HUGE_PAGE,
    MIN_PRODUCTS,
    MIN_WEIGHTS,
    Linear,
    max_gemv_rows,
    use_huge_pages,
)

INSIDE, OUTSIDE = 397, 379  # enough weights for the kernels
assert INSIDE * OUTSIDE >= MIN_WEIGHTS
MANY_ROWS = 53
assert MANY_ROWS > GEMV_ROWS
DTYPES = [torch.float32, torch.float64]
native = pytest.mark.skipif(library.missing() is not None, reason="there are no native kernels")
with_huge_pages = pytest.mark.skipif(not hasattr(linear.mmap, "MADV_HUGEPAGE"), reason="there are no huge pages here")


def twins(bias=True, dtype=torch.float32, inside=INSIDE, outside=OUTSIDE):
    """Ours and torch's, made from the same seed."""
    made = []
    for kind in (Linear, nn.Linear):
        torch.manual_seed(3)
        made.append(kind(inside, outside, bias=bias, dtype=dtype))
    return made


def rows(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(dtype)


def assert_same_up_to_rounding(found, layer, x):
    """Both round at most `in + 2` times a sum of these sizes."""
    bias = None if layer.bias is None else layer.bias.detach().abs().double()
    size = F.linear(x.detach().abs().double(), layer.weight.detach().abs().double(), bias)
    limit = 2 * torch.finfo(found.dtype).eps * (layer.in_features + 2) * size
    truth = F.linear(x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())
    assert found.shape == truth.shape
    assert ((found.double() - truth).abs() <= limit).all()


def note(monkeypatch, name):
    called, genuine = [], getattr(linear, name)

    def noted(x, weight, bias, *activation):
        called.append((*x.shape, *activation))
        return genuine(x, weight, bias, *activation)

    monkeypatch.setattr(linear, name, noted)
    return called


@pytest.fixture
def gemv_calls(monkeypatch):
    """The shapes that gemv was called with."""
    return note(monkeypatch, "run_gemv")


@pytest.fixture
def gemm_calls(monkeypatch):
    """The shapes and activations that gemm was called with."""
    return note(monkeypatch, "run_gemm")


# The same layer


@pytest.mark.parametrize("bias", [True, False])
def test_parameters_names_and_first_numbers_are_torchs(bias):
    ours, torchs = twins(bias)
    assert list(ours.state_dict()) == list(torchs.state_dict())
    for mine, other in zip(ours.parameters(), torchs.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert repr(ours) == repr(torchs)
    ours.load_state_dict(torchs.state_dict())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_results_are_torchs_up_to_rounding(dtype, bias):
    ours, torchs = twins(bias, dtype)
    for shape in [
        (1,),
        (0, 1),
        (2, 3),
        (1, GEMV_ROWS),
        (GEMV_ROWS + 1,),
        (max_gemv_rows(dtype) + 1,),
        (MANY_ROWS,),
        (3, MANY_ROWS),
        (),
    ]:
        x = rows(*shape, INSIDE, dtype=dtype)
        assert ours(x).shape == torchs(x).shape
        assert_same_up_to_rounding(ours(x), torchs, x)
    assert_same_up_to_rounding(ours(input=x), torchs, x)


@torch.no_grad()
def test_the_bound_can_be_broken():
    ours, torchs = twins()
    ours.weight[5, 7] += 1e-3
    x = rows(2, INSIDE)
    with pytest.raises(AssertionError):
        assert_same_up_to_rounding(ours(x), torchs, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_torchs_to_the_bit(dtype, gemv_calls):
    ours, torchs = twins(dtype=dtype)
    grads = []
    for layer in (ours, torchs):
        x = rows(3, INSIDE, dtype=dtype).requires_grad_()
        layer(x).square().sum().backward()
        grads.append([x.grad, layer.weight.grad, layer.bias.grad])
    assert not gemv_calls
    for mine, other in zip(*grads, strict=True):
        assert torch.equal(mine, other)
    frozen = ours.requires_grad_(False)
    x = rows(3, INSIDE, dtype=dtype).requires_grad_()
    frozen(x).sum().backward()
    assert x.grad is not None


@torch.no_grad()
def test_errors_are_torchs():
    ours, torchs = twins()
    for x in (rows(2, INSIDE - 1), rows(2, INSIDE).double()):
        told = []
        for layer in (ours, torchs):
            with pytest.raises(RuntimeError) as caught:
                layer(x)
            told.append(str(caught.value))
        assert told[0] == told[1]


# Who takes the kernel


@native
def test_few_rows_without_gradient_take_the_kernel(gemv_calls):
    ours, _ = twins()
    x = rows(2, 3, INSIDE)
    with torch.no_grad():
        ours(x)
    with torch.inference_mode():
        ours(x)
    ours.requires_grad_(False)(x)
    assert gemv_calls == [(2, 3, INSIDE)] * 3
    ours.double()(x.double())
    assert len(gemv_calls) == 4


@native
def test_many_rows_without_gradient_take_the_other_kernel(gemv_calls, gemm_calls):
    ours, torchs = twins()
    x = rows(2, MANY_ROWS, INSIDE)
    with torch.no_grad():
        ours(x)
    ours.requires_grad_(False)(x[1])
    torchs.bias.detach().zero_()
    assert_same_up_to_rounding(linear.linear(x, ours.weight), torchs, x)
    assert gemm_calls == [(*shape, INSIDE, None, None) for shape in ((2, MANY_ROWS), (MANY_ROWS,), (2, MANY_ROWS))]
    # Few weights, but many multiply-adds.
    small = Linear(7, 5).requires_grad_(False)
    for count in (MIN_PRODUCTS // 35, MIN_PRODUCTS // 35 + 1):
        small(rows(count, 7))
    assert gemm_calls[3:] == [(MIN_PRODUCTS // 35 + 1, 7, None, None)]
    assert not gemv_calls


@torch.no_grad()
def test_others_take_torchs_product(gemv_calls, gemm_calls):
    ours, _ = twins()
    x = rows(2, INSIDE)
    Linear(7, 5)(rows(2, 7))
    Linear(7, 5)(rows(MANY_ROWS, 7))
    Linear(INSIDE, OUTSIDE, dtype=torch.float64)(rows(MANY_ROWS, INSIDE, dtype=torch.float64))
    Linear(INSIDE, OUTSIDE, dtype=torch.bfloat16)(x.bfloat16())
    assert ours.to("meta")(x.to("meta")).shape == (2, OUTSIDE)
    assert not gemv_calls
    assert not gemm_calls


@native
@torch.no_grad()
def test_an_activation_is_that_of_torch_by_either_kernel(gemv_calls, gemm_calls):
    ours, torchs = twins()
    for count in (2, MANY_ROWS):
        x = rows(count, INSIDE)
        size = F.linear(x.abs(), ours.weight.abs(), ours.bias.abs())
        for name, activation in ACTIVATIONS.items():
            # Sums are those of both layers, and an activation is nowhere steeper than 1.13.
            limit = 1.13 * 2 * torch.finfo(x.dtype).eps * (INSIDE + 4) * size
            found = linear.linear(x, ours.weight, ours.bias, name)
            assert ((found - activation(torchs(x))).abs() <= limit).all(), (count, name)
    assert len(gemv_calls) == len(ACTIVATIONS)
    assert gemm_calls == [(MANY_ROWS, INSIDE, name, None) for name in ACTIVATIONS]


# Fused with an activation


def hooked(layer, where, calls):
    if where == "all modules":
        return nn.modules.module.register_module_forward_hook(lambda module, x, y: calls.append((module, y)))
    return layer.inner.register_forward_hook(lambda module, x, y: calls.append((module, y)))


@native
@pytest.mark.parametrize("activation", [*ACTIVATIONS, "silu", "geglu"])
@torch.no_grad()
def test_a_feed_forward_layer_fuses_its_activation(gemm_calls, activation):
    layer, x = FeedForward(INSIDE, OUTSIDE, activation), rows(MANY_ROWS, INSIDE)
    layer(x)
    assert gemm_calls[0] == (MANY_ROWS, INSIDE, activation if activation in ACTIVATIONS else None, None)
    assert len(gemm_calls) == 2


@pytest.mark.parametrize("where", ["behind", "all modules"])
@torch.no_grad()
def test_a_hook_on_the_inner_layer_gets_the_pre_activation(where, gemm_calls):
    layer, x, calls = FeedForward(INSIDE, OUTSIDE, "relu"), rows(MANY_ROWS, INSIDE), []
    plain = layer(x)
    handle = hooked(layer, where, calls)
    try:
        found = layer(x)
    finally:
        handle.remove()
    (inner,) = (made for module, made in calls if module is layer.inner)
    assert (inner < 0).any()
    assert torch.equal(inner, layer.inner(x))
    assert torch.equal(found, plain)
    assert ("relu" in {called[-2] for called in gemm_calls}) == (library.missing() is None)


@torch.no_grad()
def test_a_hook_before_the_inner_layer_changes_its_input():
    layer, x = FeedForward(INSIDE, OUTSIDE, "relu"), rows(MANY_ROWS, INSIDE)
    expected = layer(2 * x)
    with layer.inner.register_forward_pre_hook(lambda module, given: (2 * given[0],)):
        found = layer(x)
    assert torch.equal(found, expected)
    assert (layer(x) - expected).abs().max() > 1e-3


@torch.no_grad()
def test_an_inner_layer_of_another_class_is_called_itself(gemm_calls):
    class Doubled(Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    layer, x = FeedForward(INSIDE, OUTSIDE, "relu"), rows(MANY_ROWS, INSIDE)
    inner = Doubled(INSIDE, OUTSIDE)
    inner.load_state_dict(layer.inner.state_dict())
    expected = layer.outer(2 * layer.inner(x).relu())
    layer.inner = inner
    assert (layer(x) - expected).abs().max() <= 1e-5
    layer.inner = nn.Linear(INSIDE, OUTSIDE)
    gemm_calls.clear()
    layer(x)
    assert {called[-2] for called in gemm_calls} <= {None}
    layer.inner = Linear(INSIDE, OUTSIDE)
    layer.inner.forward = lambda x: x.new_zeros(*x.shape[:-1], OUTSIDE)
    assert torch.equal(layer(x), layer.outer.bias.expand(MANY_ROWS, -1))


@torch.no_grad()
def test_another_activation_function_is_used():
    layer, x = FeedForward(INSIDE, OUTSIDE), rows(MANY_ROWS, INSIDE)
    layer.activation_fn = torch.sin
    assert torch.equal(layer(x), layer.outer(torch.sin(layer.inner(x))))


@torch.no_grad()
def test_under_autocast_it_is_torchs_layer(gemv_calls):
    ours, torchs = twins()
    x = rows(2, INSIDE)
    with torch.autocast("cpu", torch.bfloat16):
        found = ours(x)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, torchs(x))
    assert not gemv_calls


@torch.no_grad()
def test_torch_function_modes_see_torchs_linear(gemv_calls):
    ours, _ = twins()
    calls = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            calls.append(function)
            return function(*args, **(kwargs or {}))

    with Watch():
        ours(rows(2, INSIDE))
    assert F.linear in calls
    assert not gemv_calls


@torch.no_grad()
def test_operations_are_counted_as_torchs(gemv_calls):
    ours, torchs = twins()
    counted = []
    for layer in (ours, torchs):
        with FlopCounterMode(display=False) as counter:
            layer(rows(2, INSIDE))
        counted.append(counter.get_total_flops())
    assert counted == [2 * 2 * INSIDE * OUTSIDE] * 2
    assert not gemv_calls


class Marked(torch.Tensor):
    """A tensor of another kind: it must reach torch, which knows what to do with it."""


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@torch.no_grad()
def test_tensors_of_other_kinds_reach_torch(gemv_calls):
    ours, torchs = twins()
    found = ours(rows(2, INSIDE).as_subclass(Marked))
    assert type(found) is Marked
    sparse = ours.weight.detach().to_sparse_csr()
    assert F.linear(rows(2, INSIDE), sparse).shape == (2, OUTSIDE)
    ours.weight = nn.Parameter(sparse, requires_grad=False)
    assert_same_up_to_rounding(ours(rows(2, INSIDE)), torchs, rows(2, INSIDE))
    assert not gemv_calls


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_gradients_are_torchs(gemv_calls):
    ours, torchs = twins()
    x = rows(2, INSIDE)
    with torch.no_grad():
        found = torch.func.jvp(ours, (x,), (x,))
        expected = torch.func.jvp(torchs, (x,), (x,))
    assert torch.equal(found[1], expected[1])
    assert not gemv_calls


# Compiled, exported, mapped


@torch.no_grad()
def test_it_compiles_into_one_graph():
    ours, torchs = twins()
    x = rows(2, INSIDE)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), torchs(x))


def test_it_compiles_with_its_gradient():
    ours, torchs = twins()
    torch.compile(ours, fullgraph=True, backend="aot_eager")(rows(2, INSIDE)).sum().backward()
    torchs(rows(2, INSIDE)).sum().backward()
    assert torch.equal(ours.weight.grad, torchs.weight.grad)


@torch.no_grad()
def test_it_can_be_exported():
    ours, torchs = twins()
    x = rows(2, INSIDE)
    exported = torch.export.export(ours, (x,))
    assert any("linear" in str(node.target) for node in exported.graph.nodes)
    assert torch.equal(exported.module()(x), torchs(x))


@pytest.mark.filterwarnings("ignore:.torch.jit")
@torch.no_grad()
def test_it_can_be_scripted_and_traced():
    ours, torchs = twins()
    x = rows(2, INSIDE)
    assert torch.equal(torch.jit.script(ours)(x), torchs(x))
    assert torch.equal(torch.jit.trace(ours, (x,))(x), torchs(x))


@torch.no_grad()
def test_it_can_be_mapped():
    ours, torchs = twins()
    x = rows(5, 2, INSIDE)
    assert_same_up_to_rounding(torch.func.vmap(ours)(x), torchs, x)
    stacked = {name: torch.stack([value, -value]) for name, value in ours.state_dict().items()}
    found = torch.func.vmap(lambda state: torch.func.functional_call(ours, state, (x[0],)))(stacked)
    assert_same_up_to_rounding(found[0], torchs, x[0])


# Settled


def tied():
    torch.manual_seed(5)
    embedding, first, second = nn.Embedding(773, 1031), Linear(1031, 773, bias=False), Linear(773, 1031)
    first.weight = embedding.weight
    return nn.ModuleList([embedding, first, second, Linear(7, 5)])


@with_huge_pages
def test_settling_keeps_bits_objects_and_ties():
    model = tied()
    before = {name: (value, value.detach().clone()) for name, value in model.named_parameters()}
    small = model[3].weight.data_ptr()
    assert use_huge_pages(model) == model[1].weight.nbytes + model[2].weight.nbytes
    for name, value in model.named_parameters():
        same, numbers = before[name]
        assert value is same
        assert torch.equal(value, numbers)
        assert value.requires_grad
    assert model[0].weight is model[1].weight
    assert model[1].weight.data_ptr() % HUGE_PAGE == 0
    assert model[3].weight.data_ptr() == small


@with_huge_pages
def test_settling_again_moves_nothing():
    model = tied()
    use_huge_pages(model)
    places = [value.data_ptr() for value in model.parameters()]
    assert use_huge_pages(model) == 0
    assert places == [value.data_ptr() for value in model.parameters()]


@with_huge_pages
def test_parameters_that_share_memory_still_do():
    one, other, part = Linear(1031, 773, bias=False), Linear(1031, 773, bias=False), Linear(1031, 700, bias=False)
    other.weight = nn.Parameter(one.weight.detach())
    assert other.weight is not one.weight
    assert use_huge_pages(nn.ModuleList([one, other])) == one.weight.nbytes
    assert one.weight.data_ptr() == other.weight.data_ptr()
    one = Linear(1031, 773, bias=False)
    part.weight = nn.Parameter(one.weight.detach()[13:713])
    assert use_huge_pages(nn.ModuleList([one, part])) == 0
    with torch.no_grad():
        one.weight[13, 0] = 41.0
    assert part.weight[0, 0] == 41.0


@with_huge_pages
def test_weights_on_huge_pages_train_copy_and_are_saved_without_a_byte_more():
    model = tied()
    moved = use_huge_pages(model)
    kept = copy.deepcopy(model)
    assert torch.equal(kept[2].weight, model[2].weight)
    file = io.BytesIO()
    torch.save(model[1].state_dict(), file)
    assert file.tell() < model[1].weight.nbytes + 10_000
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["weight"], model[1].weight)
    step = torch.optim.SGD(model[1:3].parameters(), lr=0.1)
    model[2](model[1](rows(3, 1031))).sum().backward()
    step.step()
    assert not torch.equal(kept[2].weight, model[2].weight)
    assert moved > 0


@with_huge_pages
@torch.no_grad()
def test_settling_changes_no_result():
    layer, x = Linear(1031, 773), rows(2, 1031)
    expected = layer(x)
    use_huge_pages(layer)
    assert torch.equal(layer(x), expected)


def test_what_cannot_be_moved_is_left_alone():
    half = Linear(1031, 773, dtype=torch.float64, device="meta")
    with torch.inference_mode():
        frozen = Linear(1031, 773)
    assert use_huge_pages(nn.ModuleList([half, frozen, nn.Linear(3, 2)])) == 0
    assert use_huge_pages(nn.Identity()) == 0
