"""The layers that train in one function each: gradients by finite differences and by plain torch, twice where asked."""

import pytest
import torch
import torch.nn.functional as F

from regard.kernels import training
from regard.kernels.training import FeedForwardKind, NormKind

LAYER, RMS = NormKind(1e-5, True), NormKind(1e-6, False)


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    monkeypatch.setattr(training, "MIN_PRODUCTS", 0)


def draw(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_()


def feed_forward_tensors(norm, dtype=torch.float64):
    weights = [draw(11, 7, dtype=dtype), draw(11, dtype=dtype), draw(7, 11, dtype=dtype), draw(7, dtype=dtype)]
    last = (
        [] if norm is None else [draw(7, seed=1, dtype=dtype), draw(7, seed=2, dtype=dtype) if norm is LAYER else None]
    )
    return [draw(2, 3, 7, dtype=dtype), *weights, *last]


def run_feed_forward(kind):
    def run(x, inner, inner_bias, outer, outer_bias, weight=None, bias=None):
        return training.feed_forward(x, (inner, inner_bias), (outer, outer_bias), kind, (weight, bias))

    return run


KINDS = [
    FeedForwardKind(name, norm, residual)
    for name in training.PLAIN
    for norm in (None, LAYER, RMS)
    for residual in (False, True)
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_feed_forward_layer_has_the_gradients_of_finite_differences_and_of_torch(kind):
    tensors = feed_forward_tensors(kind.norm)
    assert torch.autograd.gradcheck(run_feed_forward(kind), tensors)
    made = run_feed_forward(kind)(*tensors)
    wanted = training._plain_feed_forward(kind)(*tensors, *[None] * (7 - len(tensors)))
    torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12)
    asked = [tensor for tensor in tensors if tensor is not None]
    grad = torch.linspace(-1, 1, made.numel(), dtype=made.dtype).view(made.shape).cos()
    pairs = zip(torch.autograd.grad(made, asked, grad), torch.autograd.grad(wanted, asked, grad), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("norm", [None, LAYER, RMS], ids=str)
def test_a_feed_forward_layer_can_be_differentiated_twice(norm):
    kind = FeedForwardKind("gelu_tanh", norm, True)
    assert torch.autograd.gradgradcheck(run_feed_forward(kind), feed_forward_tensors(norm))


def test_a_linear_layer_has_first_and_second_derivatives():
    tensors = draw(3, 2, 7), draw(5, 7), draw(5), draw(3, 2, 5)
    torch.testing.assert_close(training.linear(*tensors), F.linear(*tensors[:3]) + tensors[3])
    assert torch.autograd.gradcheck(training.linear, tensors)
    assert torch.autograd.gradgradcheck(training.linear, tensors)


@pytest.mark.parametrize("kind", [LAYER, RMS], ids=str)
def test_a_norm_adds_the_gradient_of_the_residual(kind):
    bias = draw(13, seed=1) if kind is LAYER else None

    def run(x, weight):
        normed, residual = training.norm_with_residual(x, weight, bias, kind)
        return normed.sin() + residual.cos()

    assert torch.autograd.gradcheck(run, (draw(3, 5, 13), draw(13)))
    assert torch.autograd.gradgradcheck(run, (draw(3, 5, 13), draw(13)))


@pytest.mark.parametrize("used", [0, 1], ids=["norm only", "residual only"])
def test_a_norm_of_which_one_output_is_used_has_its_gradient(used):
    x, weight = draw(3, 5, 13), draw(13)
    (made,) = torch.autograd.grad(training.norm_with_residual(x, weight, None, RMS)[used].sin().sum(), x)
    wanted = F.rms_norm(x, (13,), weight, 1e-6) if used == 0 else x
    torch.testing.assert_close(made, torch.autograd.grad(wanted.sin().sum(), x)[0])


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
def test_heads_of_a_joint_projection_have_the_gradients_of_torch(batch):
    widths, heads = (12, 6, 10), (4, 2, 2)
    x, weight, bias = draw(*batch, 5, 7), draw(28, 7), draw(28)

    def run(x, weight, bias):
        return training.project_heads(x, weight, bias, widths, heads)

    for mine, theirs in zip(
        run(x, weight, bias), training.split_heads(F.linear(x, weight, bias), widths, heads), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
    assert torch.autograd.gradcheck(run, (x, weight, bias))
    assert torch.autograd.gradgradcheck(run, (x, weight, bias))


def test_gradients_that_are_side_by_side_are_not_copied():
    joint, like = torch.randn(2, 5, 28), torch.randn(2, 5, 7)
    widths, heads = (12, 6, 10), (4, 2, 2)
    parts = training.split_heads(joint, widths, heads)
    found = training.find_joint(parts, (2, 5, 28), widths, like)
    assert found.data_ptr() == joint.data_ptr()
    assert torch.equal(found, joint)
    for crooked in ((parts[0], parts[1], parts[2].clone()), (parts[0], None, parts[2])):
        copied = training.find_joint(crooked, (2, 5, 28), widths, like)
        expected = joint.clone()
        if crooked[1] is None:
            expected[..., 12:18] = 0
        assert copied.data_ptr() != joint.data_ptr()
        assert torch.equal(copied, expected)


def test_gradients_in_another_order_are_copied():
    joint = torch.randn(2, 5, 36)
    query, key, value = training.split_heads(joint, (12, 12, 12), (4, 4, 4))
    found = training.find_joint((query, value, key), (2, 5, 36), (12, 12, 12), joint)
    assert torch.equal(found, torch.cat((joint[..., :12], joint[..., 24:], joint[..., 12:24]), -1))


@pytest.mark.parametrize("frozen", range(7))
def test_frozen_tensors_get_no_gradient_and_the_others_theirs(frozen):
    kind, tensors = FeedForwardKind("gelu", LAYER, True), feed_forward_tensors(LAYER)
    everything = torch.autograd.grad(run_feed_forward(kind)(*tensors).sin().sum(), tensors)
    tensors[frozen] = tensors[frozen].detach()
    run_feed_forward(kind)(*tensors).sin().sum().backward()
    for number, (tensor, wanted) in enumerate(zip(tensors, everything, strict=True)):
        if number == frozen:
            assert tensor.grad is None
        else:
            assert torch.equal(tensor.grad, wanted)


def test_an_input_changed_in_place_before_backward_is_refused():
    tensors = feed_forward_tensors(LAYER)
    output = run_feed_forward(FeedForwardKind("gelu", LAYER, True))(*tensors)
    with torch.no_grad():
        tensors[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_backward_runs_twice_where_the_graph_is_kept():
    tensors = feed_forward_tensors(LAYER)
    output = run_feed_forward(FeedForwardKind("gelu", LAYER, True))(*tensors)
    first = torch.autograd.grad(output.sum(), tensors, retain_graph=True)
    for mine, again in zip(first, torch.autograd.grad(output.sum(), tensors), strict=True):
        assert torch.equal(mine, again)


@pytest.mark.parametrize("stride", ["expanded", "transposed", "every other"])
def test_gradients_and_inputs_may_lie_anywhere_in_memory(stride):
    x, weight = draw(6, 8), draw(5, 8)
    shapes = {
        "expanded": lambda t: t[:1].expand(6, -1),
        "transposed": lambda t: t.detach().T.contiguous().T,
        "every other": lambda t: t.repeat_interleave(2, 0)[::2],
    }
    read = shapes[stride](x)
    grad = shapes[stride](draw(6, 5).detach())
    mine = torch.autograd.grad(training.linear(read, weight, None), weight, grad)[0]
    torch.testing.assert_close(mine, grad.T @ read.detach())


def test_what_the_kernels_cannot_train_is_told():
    x, weight = draw(4, 8), draw(5, 8)
    assert training.can_train(x, weight)
    assert not training.can_train(x.detach(), weight.detach())
    assert not training.can_train(x.half(), weight.half())
    assert not training.can_train(x.float(), weight)
    assert not training.can_train(x, draw(8, 5).T)
    assert not training.can_train(x, weight, draw(10)[::2])
    assert not training.can_train(x[0], weight)
    with torch.no_grad():
        assert not training.can_train(x, weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert not training.can_train(x, weight)
    seen = []
    torch.func.vmap(lambda row: seen.append(training.can_train(row, weight)) or row)(x[None])
    assert seen == [False]
