"""The kernels as torch operators: tracing, vmap, FLOP counts, export, gradients, and what is refused."""

import contextlib
import math

import pytest
import torch
from catalog import assert_agree, bounds, results, tensors
from plain import slow
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from regard import Alibi, Causal, First, Full, Padding, Quadratic, RelativeTable, Window, attend
from regard.errors import BackendError
from regard.kernels import library
from regard.kernels.program import program
from regard.kernels.softmax import Score, attention
from regard.patterns import Lengths

TOKENS = 13
BATCH, HEADS, KV_HEADS, DIM, VALUE_DIM = 2, 4, 2, 3, 5
SHAPE = dict(batch=BATCH, heads=HEADS, kv_heads=KV_HEADS, dim=DIM, value_dim=VALUE_DIM)
SEED = torch.tensor(5)  # of dropout
TWO_PARTS = Window(2, 2, step=3) | First(1)
# torch's own forward-mode machinery, and what it looks at where a graph is cut, warn about themselves.
jit_is_old = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
looks_at_grad = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def made(dtype=torch.float32, seed=0, **other):
    return tensors((TOKENS, TOKENS), dtype=dtype, seed=seed, **{**SHAPE, **other})


def plain(dtype=torch.float32, seed=0, **other):
    return [tensor.detach() for tensor in made(dtype, seed, **other)]


def run(query, key, value, pattern=Causal(), **words):  # noqa: B008
    return attend(query, key, value, pattern=pattern, backend="native", **words)


def score(pattern, *, table=False, bias=False, dtype=torch.float32):
    """The arguments of the operators after query, key and value."""
    generator = torch.Generator().manual_seed(4)
    words = program(pattern, Lengths(TOKENS, TOKENS), library.lanes(dtype))
    code = torch.arange(TOKENS, dtype=torch.int32)
    return Score(
        torch.randn(HEADS, 2 * TOKENS - 1, dtype=dtype, generator=generator) if table else None,
        code + TOKENS - 1 if table else None,
        code if table else None,
        torch.randn(1, HEADS, TOKENS, TOKENS, dtype=dtype, generator=generator) if bias else None,
        words.words,
        words.masks,
        0.6,
    )


# What torch checks of every operator


@pytest.mark.parametrize("bias", [True, *slow(False)])
@pytest.mark.parametrize("table", [True, *slow(False)])
def test_the_forward_operator_passes_torchs_own_checks(table, bias):
    score_arguments = score(Causal(), table=table, bias=bias)
    score_arguments = score_arguments._replace(
        table=score_arguments.table.requires_grad_() if table else None,
        bias=score_arguments.bias.requires_grad_() if bias else None,
    )
    torch.library.opcheck(torch.ops.regard.attention.default, (*made(), *score_arguments))
    torch.library.opcheck(torch.ops.regard.attention.default, (*plain(), *score(TWO_PARTS)))
    torch.library.opcheck(
        torch.ops.regard.attention.default, (*made(), *score_arguments._replace(dropout=0.3, seed=SEED))
    )


@pytest.mark.parametrize("bias", [True, *slow(False)])
@pytest.mark.parametrize("table", [True, *slow(False)])
def test_the_backward_operator_passes_torchs_own_checks(table, bias):
    for pattern in (Causal(), TWO_PARTS):
        inputs, score_arguments = plain(), score(pattern, table=table, bias=bias)
        score_arguments = score_arguments._replace(dropout=0.3, seed=SEED) if pattern is TWO_PARTS else score_arguments
        output, sums = attention(*inputs, score_arguments)
        sample = (torch.ones_like(output), *inputs, *score_arguments, output, sums, table, bias)
        torch.library.opcheck(torch.ops.regard.attention_backward.default, sample)


def test_nothing_that_is_saved_or_given_is_written_to():
    inputs = made()
    bias = RelativeTable(HEADS, distance=3)
    kept = [*inputs, bias.table, *score(TWO_PARTS)[4:6]]
    before = [tensor.detach().clone() for tensor in kept]
    output = run(*inputs, pattern=TWO_PARTS, bias=bias)
    first = output.detach().clone()
    grad_output = torch.ones_like(output)
    twice = [torch.autograd.grad(output, [*inputs, bias.table], grad_output, retain_graph=True) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*twice, strict=True))
    assert torch.equal(output, first)
    assert bool((grad_output == 1).all())
    assert all(torch.equal(tensor.detach(), old) for tensor, old in zip(kept, before, strict=True))


# Compiled and exported


@looks_at_grad
@pytest.mark.parametrize("bias", ["tensor", "table", *slow("none", "alibi", "grid")])
def test_one_graph_holds_the_attention_and_its_gradients(bias):
    torch._dynamo.reset()
    inputs = made()
    chosen = {
        "none": None,
        "tensor": torch.randn(HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(1)).requires_grad_(),
        "table": RelativeTable(HEADS, distance=3),
        "alibi": Alibi(HEADS),
        "grid": RelativeTable(HEADS, grid=(3, 4), start=1),
    }[bias]

    def twice(q, k, v, bias=None):
        return run(q * 1.5, k, v, bias=bias) * 2

    compiled = torch.compile(twice, backend="aot_eager", fullgraph=True)
    found, expected = (results(each, *inputs, bias=chosen) for each in (compiled, twice))
    assert_agree(found, expected, bounds(*inputs, 1.5, torch.float32))


@looks_at_grad
def test_a_compiled_attention_follows_new_lengths_and_batches():
    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for batch, tokens in ((2, 9), (3, 9), (5, 9), (5, 11), (4, 17)):
        inputs = tensors((tokens, tokens), **{**SHAPE, "batch": batch}, dtype=torch.float32)
        for mine, truth in zip(results(compiled, *inputs), results(run, *inputs), strict=True):
            assert torch.equal(mine, truth)


@looks_at_grad
def test_a_compiled_attention_notices_other_kernels(using):
    torch._dynamo.reset()
    inputs = plain()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    wide = compiled(*inputs)
    with using("plain"):
        narrow = compiled(*inputs)
        assert torch.equal(narrow, run(*inputs))
    assert torch.equal(compiled(*inputs), wide)


@pytest.mark.slow
@looks_at_grad
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_compiles_the_attention_among_its_neighbours():
    torch._dynamo.reset()
    inputs = made()

    def among(q, k, v, **words):
        return run(q.sin(), k + 1, v * 2).relu()

    found, expected = (results(each, *inputs) for each in (torch.compile(among, fullgraph=True), among))
    assert_agree(found, expected, bounds(*inputs, None, torch.float32))


class Model(torch.nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.bias = bias

    def forward(self, query, key, value):
        return run(query, key, value, bias=self.bias)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("bias", ["none", "table"])
def test_an_exported_attention_takes_any_batch(bias, strict):
    model = Model(None if bias == "none" else RelativeTable(HEADS, distance=3))
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(
        model, tuple(plain()), dynamic_shapes=({0: batch}, {0: batch}, {0: batch}), strict=strict
    )
    for rows in (1, 2, 7):
        inputs = plain(batch=rows)
        assert torch.equal(exported.module()(*inputs), model(*inputs))


def test_a_program_for_wider_vectors_is_refused_with_a_reason(using):
    """As happens when a program was exported on another machine."""
    inputs = plain()
    score_arguments = score(Causal())
    with using("plain"):
        if score_arguments.words[1] <= 3 * library.lanes(torch.float32):
            pytest.skip("this machine has no wider vectors than the plain ones")
        with pytest.raises(BackendError, match=r"wider vectors[\s\S]*export it again here"):
            attention(*inputs, score_arguments)


# Transforms of torch.func


def test_vmap_of_every_argument_equals_a_loop():
    samples = [plain(torch.float64, seed) for seed in range(3)]
    stacked = [torch.stack([sample[n] for sample in samples]) for n in range(3)]
    tables = torch.randn(3, HEADS, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    bias = RelativeTable(HEADS, distance=3).double()

    def biased(q, k, v, table):
        def attended(*inputs):
            return run(*inputs, bias=bias)

        with torch.no_grad():
            return torch.func.functional_call(_Holder(attended, bias), {"bias.table": table}, (q, k, v))

    together = torch.func.vmap(biased)(*stacked, tables)
    for number, sample in enumerate(samples):
        assert torch.equal(together[number], biased(*sample, tables[number]))
    swapped = torch.func.vmap(run, in_dims=(2, None, None))(stacked[0].movedim(0, 2), *samples[0][1:])
    assert torch.equal(swapped[1], run(samples[1][0], *samples[0][1:]))


class _Holder(torch.nn.Module):
    """Gives functional_call the parameters of a bias."""

    def __init__(self, attended, bias):
        super().__init__()
        self.attended, self.bias = attended, bias

    def forward(self, *inputs):
        return self.attended(*inputs)


def test_jacobians_equal_those_of_the_reference():
    inputs = [tensor.detach() for tensor in tensors((5, 5), batch=1, heads=2, kv_heads=1, dim=2, value_dim=3)]

    def by(backend):
        return lambda *x: attend(*x, pattern=Window(2, 1), backend=backend)

    found, expected = (torch.func.jacrev(by(name), argnums=(0, 1, 2))(*inputs) for name in ("native", "reference"))
    for mine, truth in zip(found, expected, strict=True):
        assert float((mine - truth).abs().max()) < 1e-12


@pytest.mark.parametrize("kind", ["table", "tensor"])
def test_per_sample_gradients_of_a_bias_equal_a_loop(kind):
    """One sample's derivative of the bias never meets another's."""
    samples = [plain(torch.float64, seed) for seed in range(3)]
    stacked = [torch.stack([sample[n] for sample in samples]) for n in range(3)]
    module = RelativeTable(HEADS, distance=3).double()
    learned = module.table.detach().clone() if kind == "table" else torch.zeros(HEADS, TOKENS, TOKENS).double()

    def loss(learned, q, k, v):
        if kind == "tensor":
            return run(q, k, v, bias=learned).sin().sum()
        holder = _Holder(lambda *x: run(*x, bias=module), module)
        return torch.func.functional_call(holder, {"bias.table": learned}, (q, k, v)).sin().sum()

    together = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2, 3)), in_dims=(None, 0, 0, 0))(learned, *stacked)
    for number, sample in enumerate(samples):
        apart = torch.func.grad(loss, argnums=(0, 1, 2, 3))(learned, *sample)
        for mine, truth in zip(together, apart, strict=True):
            assert float((mine[number] - truth).abs().max()) < 1e-12
    assert float((together[0][0] - together[0][1]).abs().max()) > 1e-3


# What it does not do, it says


@jit_is_old
@pytest.mark.parametrize("which", ["query", "key", "value", "bias"])
def test_forward_mode_is_refused_and_never_silently_zero(which):
    inputs = dict(zip(("query", "key", "value"), plain(), strict=True), bias=torch.zeros(TOKENS, TOKENS))

    def run_with(tensor):
        return run(**{**inputs, which: tensor})

    tangent = torch.ones_like(inputs[which])
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        run_with(forward_ad.make_dual(inputs[which], tangent))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        run_with(forward_ad.make_dual(inputs[which].clone().requires_grad_(), tangent))
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(run_with, (inputs[which],), (tangent,))


@jit_is_old
def test_forward_mode_over_backward_is_refused_too():
    query, key, value = made()
    output = run(query, key, value)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        torch.autograd.grad(output, query, forward_ad.make_dual(torch.ones_like(output), torch.ones_like(output)))


class Marked(torch.Tensor):
    """A tensor of another class, as libraries make them."""


def compiled_run(*inputs):
    torch._dynamo.reset()
    return torch.compile(run, backend="aot_eager", fullgraph=True)(*inputs)


@looks_at_grad
@pytest.mark.parametrize("way", ["plain", "counted", "subclass", "compiled"])
def test_a_second_derivative_is_refused_on_every_path(way):
    """A gradient that pretends to be constant would train the wrong thing without a word."""
    query, key, value = made()
    query = query.detach().as_subclass(Marked).requires_grad_() if way == "subclass" else query
    attended = compiled_run if way == "compiled" else run
    with FlopCounterMode(display=False) if way == "counted" else contextlib.nullcontext():
        (derivative,) = torch.autograd.grad(attended(query, key, value).sum(), query, create_graph=True)
        loss = derivative.sin().sum()
    refusal = "does not currently support double backward" if way == "compiled" else "once, not twice"
    with pytest.raises(RuntimeError if way == "compiled" else BackendError, match=refusal):
        torch.autograd.grad(loss, key)


# What it costs


@pytest.mark.parametrize("pattern", [Causal(), TWO_PARTS, Padding([TOKENS, 4]), Full()], ids=str)
def test_the_flop_counter_counts_the_allowed_pairs(pattern):
    matrix = pattern.matrix(TOKENS, TOKENS)
    pairs = int(matrix.expand(BATCH, -1, -1).sum())
    for bias in (None, RelativeTable(HEADS, distance=3)):
        inputs = made()
        counter = FlopCounterMode(display=False)
        with counter:
            output = run(*inputs, pattern=pattern, bias=bias)
        assert counter.get_total_flops() == 2 * (DIM + VALUE_DIM) * pairs * HEADS
        with counter:
            output.sum().backward()
        assert counter.get_total_flops() == 2 * (3 * DIM + 2 * VALUE_DIM) * pairs * HEADS
        with counter:
            run(*inputs, pattern=pattern, bias=bias).sum().backward()
        assert counter.get_total_flops() == 2 * (4 * DIM + 3 * VALUE_DIM) * pairs * HEADS


# Tensors of every make


def test_autocast_computes_in_float32_and_returns_what_came():
    inputs = plain()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(run(*inputs), run(*plain()))
        halves = [tensor.bfloat16() for tensor in inputs]
        assert run(*halves).dtype == torch.bfloat16
        mixed = run(halves[0], halves[1], inputs[2])
    assert mixed.dtype == torch.float32
    assert torch.equal(mixed, run(halves[0].float(), halves[1].float(), inputs[2]))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_what_ran_without_gradients_can_be_trained_afterwards(mode):
    """What is remembered between calls must not be an inference tensor."""
    program.cache_clear()
    bias = RelativeTable(HEADS, distance=3)
    with mode():
        inside = run(*made(), bias=bias)
    assert not inside.requires_grad
    inputs = made()
    output = run(*inputs, bias=bias)
    output.sum().backward()
    assert torch.equal(output.detach(), inside)
    assert bias.table.grad is not None


def unusual(tensor):
    """The same numbers, elsewhere in memory."""
    padded = torch.nn.functional.pad(tensor, (2, 3, 1, 4))
    return {
        "tokens before heads": tensor.transpose(1, 2).contiguous().transpose(1, 2),
        "gaps between rows": padded[..., 1:-4, 2:-3],
        "strided last axis": torch.stack([tensor, tensor + 1], -1)[..., 0],
        "columns": tensor.mT.contiguous().mT,
        "not aligned": torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].reshape(tensor.shape),
    }


@pytest.mark.parametrize("name", unusual(torch.zeros(1, 1, 1, 1)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides_change_no_bit(name, dtype):
    inputs = plain(dtype)
    for pattern in (Causal(), TWO_PARTS):
        expected = results(run, *(x.clone().requires_grad_() for x in inputs), pattern=pattern)
        turned = [unusual(tensor)[name].detach().requires_grad_() for tensor in inputs]
        assert name == "not aligned" or not turned[0].is_contiguous()
        for mine, truth in zip(results(run, *turned, pattern=pattern), expected, strict=True):
            assert torch.equal(mine, truth)


def test_expanded_tensors_are_read_where_they_are():
    query, key, value = plain()
    wide = [tensor[:1, :1].expand(BATCH, heads, -1, -1) for tensor, heads in ((query, HEADS), (key, 2), (value, 2))]
    assert torch.equal(run(*wide), run(*(tensor.contiguous() for tensor in wide)))
    one = [x[:1, :1, :1].expand(-1, -1, TOKENS, -1) for x in (query, key, value)]
    assert torch.equal(run(*one), run(*(tensor.contiguous() for tensor in one)))
    grad_output = torch.ones(()).expand(BATCH, HEADS, TOKENS, VALUE_DIM)
    inputs = made()
    grads = [torch.autograd.grad(run(*inputs), inputs, up) for up in (grad_output, grad_output.contiguous())]
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_a_bias_may_have_any_strides_and_learns_through_them():
    inputs = plain(torch.float64)
    square = torch.randn(HEADS, TOKENS, TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    shapes = {
        "turned": square.mT,
        "one for all": square[:1].expand(HEADS, -1, -1),
        "same for every query": square[:, :1].expand(-1, TOKENS, -1),
        "every second": torch.stack([square, square], -1).flatten(-2)[..., ::2],
    }
    for name, bias in shapes.items():
        mine, truth = bias.detach().requires_grad_(), bias.contiguous().clone().requires_grad_()
        outputs = [run(*inputs, bias=each) for each in (mine, truth)]
        assert torch.equal(*outputs), name
        grads = [torch.autograd.grad(o.sin().sum(), b)[0] for o, b in zip(outputs, (mine, truth), strict=True)]
        assert torch.equal(*grads), name


def test_parameters_and_tensors_of_other_classes_are_tensors():
    query, key, value = plain()
    expected = run(query, key, value)
    assert torch.equal(run(torch.nn.Parameter(query), key, value).detach(), expected)
    marked = run(query.as_subclass(Marked), key, value)
    assert torch.equal(marked.as_subclass(torch.Tensor), expected)
    leaf = query.clone().as_subclass(Marked).requires_grad_()
    run(leaf, key, value).sum().backward()
    twin = query.clone().requires_grad_()
    run(twin, key, value).sum().backward()
    assert torch.equal(leaf.grad.as_subclass(torch.Tensor), twin.grad)


def test_operators_have_fake_implementations():
    """Fake tensors carry shapes only: this is how torch plans memory."""
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            inputs = [mode.from_tensor(tensor) for tensor in plain(dtype)]
            output = run(*inputs)
            assert output.shape == (BATCH, HEADS, TOKENS, VALUE_DIM)
            assert output.dtype == dtype
    with pytest.raises(BackendError, match="its kernels run on the CPU, and the tensors are on meta"):
        run(*(tensor.to("meta") for tensor in plain()))


def test_a_second_call_after_other_kernels_were_chosen_is_right(using):
    inputs = made(torch.float64)
    expected = results(attend, *inputs, pattern=TWO_PARTS, backend="reference")
    limits = bounds(*inputs, None, torch.float64)
    for name in (library.name(), "plain", "scalar", library.name()):
        with using(name):
            assert_agree(results(run, *inputs, pattern=TWO_PARTS), expected, limits)


def test_kernels_that_do_not_exist_are_refused():
    before = library.name()
    with pytest.raises(ValueError, match="there are no kernels 'abacus' on this machine"):
        library.use("abacus")
    assert library.name() == before


def test_a_learned_bias_of_every_kind_trains_through_the_operator():
    """A step along the gradient lowers the loss, whatever parameters stand between the bias and its table."""
    inputs = plain()
    for bias in (RelativeTable(HEADS, distance=3), Quadratic(HEADS)):
        losses = []
        for _ in range(2):
            loss = run(*inputs, bias=bias).square().sum()
            grads = torch.autograd.grad(loss, list(bias.parameters()))
            with torch.no_grad():
                for parameter, grad in zip(bias.parameters(), grads, strict=True):
                    parameter -= 1e-3 * grad
            losses.append(loss.item())
        assert losses[1] < losses[0]
        assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("queries", [TOKENS, 1])
def test_what_torch_jit_traces_holds_the_kernel_and_not_its_memory(queries):
    first, second = ([x.detach() for x in tensors((queries, TOKENS), seed=seed)] for seed in (1, 2))
    traced = torch.jit.trace(lambda *x: attend(*x, pattern=Causal(), backend="native"), first, check_trace=False)
    expected = attend(*second, pattern=Causal(), backend="native")
    assert torch.allclose(traced(*second), expected, rtol=0, atol=1e-12)


def test_a_sign_that_torch_only_noted_down_is_read():
    query, key, value = (x.detach() for x in tensors((TOKENS, TOKENS)))
    bias = torch.randn(TOKENS, TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = attend(-query, key, value, bias=-bias, backend="native")
    found = attend(torch._neg_view(query), key, value, bias=torch._neg_view(bias), backend="native")
    assert torch.equal(found, expected)


def test_a_mapped_attention_can_be_compiled():
    torch._dynamo.reset()
    stacked = [torch.stack([tensors((TOKENS, TOKENS), seed=seed)[n].detach() for seed in range(3)]) for n in range(3)]
    mapped = torch.func.vmap(lambda q, k, v: attend(q, k, v, pattern=Causal(), backend="native"))
    compiled = torch.compile(mapped, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(*stacked), mapped(*stacked), rtol=0, atol=1e-12)
