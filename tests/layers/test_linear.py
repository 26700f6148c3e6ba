"""torch's linear layer and ours are one layer; few rows take the kernel, and only when nobody looks on."""

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
from regard.layers.linear import FEWEST_WEIGHTS, LARGE_PAGE, MOST_ROWS, Linear, settle

INSIDE, OUTSIDE = 397, 379  # enough weights for the kernel
assert INSIDE * OUTSIDE >= FEWEST_WEIGHTS
DTYPES = [torch.float32, torch.float64]
native = pytest.mark.skipif(library.missing() is not None, reason="there are no native kernels")
on_large_pages = pytest.mark.skipif(not hasattr(linear.mmap, "MADV_HUGEPAGE"), reason="there are no large pages here")


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


@pytest.fixture
def calls(monkeypatch):
    """The shapes that the kernel was asked for."""
    asked = []

    def noted(x, weight, bias):
        asked.append(tuple(x.shape))
        return genuine(x, weight, bias)

    genuine = linear.run_few
    monkeypatch.setattr(linear, "run_few", noted)
    return asked


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
    for shape in [(1,), (0, 1), (2, 3), (1, MOST_ROWS), (MOST_ROWS + 1,), ()]:
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
def test_gradients_are_torchs_to_the_bit(dtype, calls):
    ours, torchs = twins(dtype=dtype)
    grads = []
    for layer in (ours, torchs):
        x = rows(3, INSIDE, dtype=dtype).requires_grad_()
        layer(x).square().sum().backward()
        grads.append([x.grad, layer.weight.grad, layer.bias.grad])
    assert not calls
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
def test_few_rows_without_gradient_take_the_kernel(calls):
    ours, _ = twins()
    x = rows(2, 3, INSIDE)
    with torch.no_grad():
        ours(x)
    with torch.inference_mode():
        ours(x)
    ours.requires_grad_(False)(x)
    assert calls == [(2, 3, INSIDE)] * 3
    ours.double()(x.double())
    assert len(calls) == 4


@torch.no_grad()
def test_others_take_torchs_product(calls):
    ours, _ = twins()
    x = rows(2, INSIDE)
    ours(rows(MOST_ROWS + 1, INSIDE))
    Linear(7, 5)(rows(2, 7))
    Linear(INSIDE, OUTSIDE, dtype=torch.bfloat16)(x.bfloat16())
    assert ours.to("meta")(x.to("meta")).shape == (2, OUTSIDE)
    assert not calls


@torch.no_grad()
def test_under_autocast_it_is_torchs_layer(calls):
    ours, torchs = twins()
    x = rows(2, INSIDE)
    with torch.autocast("cpu", torch.bfloat16):
        found = ours(x)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, torchs(x))
    assert not calls


@torch.no_grad()
def test_who_overrides_functions_sees_torchs_layer(calls):
    ours, _ = twins()
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Watch():
        ours(rows(2, INSIDE))
    assert F.linear in seen
    assert not calls


@torch.no_grad()
def test_operations_are_counted_as_torchs(calls):
    ours, torchs = twins()
    counted = []
    for layer in (ours, torchs):
        with FlopCounterMode(display=False) as counter:
            layer(rows(2, INSIDE))
        counted.append(counter.get_total_flops())
    assert counted == [2 * 2 * INSIDE * OUTSIDE] * 2
    assert not calls


class Marked(torch.Tensor):
    """A tensor of another kind: it must reach torch, which knows what to do with it."""


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@torch.no_grad()
def test_tensors_of_other_kinds_reach_torch(calls):
    ours, torchs = twins()
    found = ours(rows(2, INSIDE).as_subclass(Marked))
    assert type(found) is Marked
    sparse = ours.weight.detach().to_sparse_csr()
    assert F.linear(rows(2, INSIDE), sparse).shape == (2, OUTSIDE)
    ours.weight = nn.Parameter(sparse, requires_grad=False)
    assert_same_up_to_rounding(ours(rows(2, INSIDE)), torchs, rows(2, INSIDE))
    assert not calls


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_gradients_are_torchs(calls):
    ours, torchs = twins()
    x = rows(2, INSIDE)
    with torch.no_grad():
        found = torch.func.jvp(ours, (x,), (x,))
        expected = torch.func.jvp(torchs, (x,), (x,))
    assert torch.equal(found[1], expected[1])
    assert not calls


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


@on_large_pages
def test_settling_keeps_bits_objects_and_ties():
    model = tied()
    before = {name: (value, value.detach().clone()) for name, value in model.named_parameters()}
    small = model[3].weight.data_ptr()
    assert settle(model) == model[1].weight.nbytes + model[2].weight.nbytes
    for name, value in model.named_parameters():
        same, numbers = before[name]
        assert value is same
        assert torch.equal(value, numbers)
        assert value.requires_grad
    assert model[0].weight is model[1].weight
    assert model[1].weight.data_ptr() % LARGE_PAGE == 0
    assert model[3].weight.data_ptr() == small


@on_large_pages
def test_settling_again_moves_nothing():
    model = tied()
    settle(model)
    places = [value.data_ptr() for value in model.parameters()]
    assert settle(model) == 0
    assert places == [value.data_ptr() for value in model.parameters()]


@on_large_pages
def test_parameters_that_share_memory_still_do():
    one, other, part = Linear(1031, 773, bias=False), Linear(1031, 773, bias=False), Linear(1031, 700, bias=False)
    other.weight = nn.Parameter(one.weight.detach())
    assert other.weight is not one.weight
    assert settle(nn.ModuleList([one, other])) == one.weight.nbytes
    assert one.weight.data_ptr() == other.weight.data_ptr()
    one = Linear(1031, 773, bias=False)
    part.weight = nn.Parameter(one.weight.detach()[13:713])
    assert settle(nn.ModuleList([one, part])) == 0
    with torch.no_grad():
        one.weight[13, 0] = 41.0
    assert part.weight[0, 0] == 41.0


@on_large_pages
def test_what_is_settled_learns_copies_and_is_saved_without_a_byte_more():
    model = tied()
    moved = settle(model)
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


@on_large_pages
@torch.no_grad()
def test_settling_changes_no_result():
    layer, x = Linear(1031, 773), rows(2, 1031)
    expected = layer(x)
    settle(layer)
    assert torch.equal(layer(x), expected)


def test_what_cannot_be_moved_is_left_alone():
    half = Linear(1031, 773, dtype=torch.float64, device="meta")
    with torch.inference_mode():
        frozen = Linear(1031, 773)
    assert settle(nn.ModuleList([half, frozen, nn.Linear(3, 2)])) == 0
    assert settle(nn.Identity()) == 0
