"""gemv and gemm against the definition in float64, their scalar twins, and bits."""

import functools
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from regard.errors import BackendError
from regard.kernels import library
from regard.kernels.linear import ACTIVATIONS, gemm, gemv

# Less than a vector, one, one and a bit; pieces of channels that are alike, and some that are not.
INSIDE = [1, 7, 8, 9, 31, 769]
# Outputs that fill no block or panel, one, one and a bit, and many with a rest.
OUTSIDE = [1, 3, 7, 16, 19, 131]
ROWS = {gemv: range(21), gemm: [1, 5, 6, 7, 53]}
DTYPES = [torch.float64, torch.float32]


def activate(x, activation):
    """The definitions, in the precision of their argument."""
    if activation == "relu":
        return x.clamp(min=0)
    if activation == "gelu":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    if activation == "gelu_tanh":
        return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x


@pytest.fixture(autouse=True)
def one_thread(threads):
    """Tensors this small only make threads wait for one another; the tests of threads ask for more themselves."""
    threads(1)


@pytest.fixture(params=[gemv, gemm], ids=["gemv", "gemm"])
def linear(request):
    return request.param


@pytest.fixture(params=["best", "plain", "scalar"])
def chosen(request, using):
    """The kernels of this machine, those of any machine, and the scalar twins."""
    with using(library.name() if request.param == "best" else request.param):
        yield request.param


def problem(rows, inside, outside, dtype=torch.float32, seed=0):
    make = torch.Generator().manual_seed(seed)
    shapes = (rows, inside), (outside, inside), (outside,)
    return [torch.randn(shape, generator=make, dtype=torch.float64).to(dtype) for shape in shapes]


def assert_linear(made, x, weight, bias, activation=None):
    """Products and sums are rounded once; an activation is nowhere steeper than 1.13 and adds 2 eps |argument|."""
    x, weight = x.double(), weight.double()
    bias = torch.zeros(len(weight), dtype=torch.float64) if bias is None else bias.double()
    size = F.linear(x.abs(), weight.abs(), bias.abs())
    eps = torch.finfo(made.dtype).eps
    limit = eps * (weight.shape[1] + 2) * size
    if activation is not None:
        limit = 1.13 * limit + 2 * eps * size
    # The truth itself is rounded where it is float64 too.
    if made.dtype == torch.float64:
        limit = 2 * limit
    truth = activate(F.linear(x, weight, bias), activation)
    assert made.shape == truth.shape
    excess = ((made.double() - truth).abs() - limit).max() if made.numel() else torch.tensor(0.0)
    assert excess <= 0, f"beyond the bound by {float(excess):.3g}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inside", INSIDE)
def test_it_is_what_it_is_defined_as(chosen, linear, inside, dtype):
    for rows in ROWS[linear]:
        for outside in OUTSIDE:
            x, weight, bias = problem(rows, inside, outside, dtype, seed=rows)
            for activation in ACTIVATIONS if linear is gemm else ():
                assert_linear(gemm(x, weight, bias, activation), x, weight, bias, activation)
            assert_linear(linear(x, weight, bias), x, weight, bias)
            assert_linear(linear(x, weight), x, weight, None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_is_added_after_the_activation(chosen, dtype):
    for rows, inside, outside in ((1, 31, 7), (7, 769, 19), (53, 8, 131), (13, 1033, 64)):
        x, weight, bias = problem(rows, inside, outside, dtype)
        wide = torch.randn(rows, outside + 3, generator=torch.Generator().manual_seed(9), dtype=dtype)
        for residual in (wide[:, 3:], wide[:, 3:].contiguous(), wide.T.contiguous().T[:, 3:]):
            for activation in ACTIVATIONS:
                made = gemm(x, weight, bias, activation, residual)
                exact = gemm(x, weight, bias, activation).double() + residual.double()
                assert ((made - exact).abs() <= 2 * torch.finfo(dtype).eps * (1 + exact.abs())).all()


def test_a_residual_of_another_shape_or_dtype_is_refused():
    x, weight, bias = problem(7, 5, 3)
    for residual in (torch.zeros(7, 5), torch.zeros(3), torch.zeros(7, 3).double()):
        with pytest.raises(BackendError, match="residual"):
            gemm(x, weight, bias, None, residual)


def test_mapped_residuals_join_mapped_rows():
    x, weight, bias = problem(7, 5, 3)
    xs, residuals = torch.randn(4, 7, 5), torch.randn(7, 4, 3)
    call = torch.ops.regard.gemm
    mapped = torch.vmap(lambda x, r: call(x, weight, bias, "relu", r), in_dims=(0, 1))(xs, residuals)
    each = torch.stack([gemm(a, weight, bias, "relu", b) for a, b in zip(xs, residuals.unbind(1), strict=True)])
    assert torch.equal(mapped, each)
    mapped = torch.vmap(lambda r: call(x, weight, bias, None, r), in_dims=1)(residuals)
    assert torch.equal(mapped, torch.stack([gemm(x, weight, bias, None, b) for b in residuals.unbind(1)]))
    mapped = torch.vmap(lambda b: call(x, weight, b, None, residuals[:, 0]))(torch.randn(4, 3).contiguous())
    assert mapped.shape == (4, 7, 3)


def test_a_residual_passes_the_checks_of_an_operator():
    x, weight, bias = problem(7, 5, 3)
    opcheck(torch.ops.regard.gemm, (x, weight, bias, "gelu", torch.randn(7, 3)), raise_exception=True)


def test_the_bound_can_be_broken():
    x, weight, bias = problem(31, 31, 5)
    moved = weight.roll(1, 0)
    for wrong in (gemv(x, moved, bias), gemm(x, moved, bias), gemm(x, weight, bias, "relu")):
        with pytest.raises(AssertionError, match="beyond the bound"):
            assert_linear(wrong, x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors_equal_their_scalar_twins(using, kernels, dtype):
    """The twin sums in float64: exact for integers this small, and so must be the vectors."""
    sizes = [
        (1, 133, 29),
        (2, 31, 17),
        (13, 31, 17),
        (4, 8, 5),
        (7, 65, 13),
        (101, 65, 67),
        (19, 257, 3),
        (19, 1033, 3),
    ]
    for rows, inside, outside in sizes:
        x, weight, bias = ((8 * tensor).round() for tensor in problem(rows, inside, outside, dtype))
        found = gemv(x, weight, bias), gemm(x, weight, bias), gemm(x, weight, bias, "relu")
        with using("scalar"):
            expected = gemv(x, weight, bias), gemm(x, weight, bias), gemm(x, weight, bias, "relu")
        assert all(map(torch.equal, found, expected))


def test_many_outputs_are_all_written_and_nothing_else(kernels, threads):
    threads(2)
    for rows in (1, 3):
        x, weight, bias = problem(rows, 5, 50257 // 7)
        assert_linear(gemv(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("inside", [97, 1543])
def test_all_is_written_whatever_the_blocks(kernels, threads, inside):
    """Many blocks of rows, pieces of channels, groups of panels and parts of rows."""
    for count in (1, 2):
        threads(count)
        x, weight, bias = problem(1571, inside, 59)
        assert_linear(gemm(x, weight, bias, "relu"), x, weight, bias, "relu")
        x, weight, bias = problem(47, inside, 1031)
        assert_linear(gemm(x, weight, bias), x, weight, bias)


def test_one_output_by_hand(linear):
    x, weight = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[4.0, 5.0, 6.0], [-1.0, 0.5, 0.0]])
    assert linear(x, weight, torch.tensor([0.25, -10.0])).tolist() == [[32.25, -10.0]]
    assert gemm(x, weight, torch.tensor([0.25, -10.0]), "relu").tolist() == [[32.25, 0.0]]


# Activations


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_an_activation_errs_by_less_than_two_roundings_of_its_argument(kernels, activation):
    x = torch.cat([torch.linspace(-9, 9, 180_001), torch.linspace(-0.1, 0.1, 5_001), torch.tensor([1e-30, -300.0])])
    found = gemm(x[:, None], torch.ones(1, 1), None, activation)[:, 0].double()
    wrong = (found - activate(x.double(), activation)).abs()
    assert (wrong <= 2 * torch.finfo(torch.float32).eps * x.double().abs()).all()
    # And the other way round: the two are different functions.
    other = (found - activate(x.double(), {"gelu": "gelu_tanh", "gelu_tanh": "gelu"}[activation])).abs()
    assert not (other <= 2 * torch.finfo(torch.float32).eps * x.double().abs()).all()


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_an_activation_ends_where_its_argument_or_nothing_is_left(kernels, activation):
    x = torch.tensor([[-1e30], [-50.0], [0.0], [50.0], [1e30]])
    assert gemm(x, torch.ones(1, 1), None, activation).flatten().tolist() == [0, 0, 0, 50.0, x[-1].item()]


# Bits


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rows_beside_a_row_change_no_bit_of_it(kernels, linear, dtype):
    for inside, outside, activation in [(769, 37, None), (64, 8, "gelu"), (9, 35, "gelu_tanh"), (9, 5, None)]:
        x, weight, bias = problem(20, inside, outside, dtype)
        fused = (activation,) if linear is gemm else ()
        alone = torch.cat([linear(row, weight, bias, *fused) for row in x.split(1)])
        for rows in range(1, 21):
            assert torch.equal(linear(x[:rows], weight, bias, *fused), alone[:rows]), rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_the_outputs_beside_an_output_change_no_bit(kernels, threads, linear, dtype):
    for rows, outside in (
        ((1, 1021), (2, 1021), (5, 1021), (16, 1021)) if linear is gemv else ((5, 331), (131, 331), (1049, 331))
    ):
        x, weight, bias = problem(rows, 511, outside, dtype)
        fused = ("relu",) if linear is gemm else ()
        threads(1)
        expected = linear(x, weight, bias, *fused)
        for count in (2, 3, 7):
            threads(count)
            assert torch.equal(linear(x, weight, bias, *fused), expected), (rows, count)
        assert torch.equal(linear(x, weight[300:311], bias[300:311], *fused), expected[:, 300:311])


# Strides and sizes


@pytest.mark.parametrize("rows", [7, 29])
def test_strides_are_read_in_place_and_change_no_bit(kernels, linear, rows):
    wide = torch.randn(rows, 90, generator=torch.Generator().manual_seed(1))
    weights = torch.randn(29, 70, generator=torch.Generator().manual_seed(2))
    bias = torch.randn(58, generator=torch.Generator().manual_seed(3))[::2]
    x, weight = wide[::2, 13:54], weights[:, 5:46]
    expected = linear(x.contiguous(), weight.contiguous(), bias.contiguous())
    assert torch.equal(linear(x, weight, bias), expected)
    by_column = x.mT.contiguous().mT, weight.mT.contiguous().mT
    assert torch.equal(linear(*by_column, bias), expected)
    assert torch.equal(linear(x[:1].expand(11, -1), weight, bias), expected[:1].expand(11, -1))
    assert torch.equal(linear(x, weight[:1].expand(37, -1)), linear(x, weight[:1]).expand(-1, 37))
    flipped = torch.randn(41, 3, generator=torch.Generator().manual_seed(4)).mT
    assert_linear(linear(flipped, weight, bias), flipped, weight, bias)


def test_leading_axes_stay(linear):
    x, weight, bias = problem(30, 11, 13)
    expected = linear(x, weight, bias)
    assert torch.equal(linear(x.reshape(2, 3, 5, 11), weight, bias), expected.reshape(2, 3, 5, 13))
    assert torch.equal(linear(x[0], weight, bias), expected[0])
    crossed = x.reshape(2, 15, 11).transpose(0, 1)
    assert torch.equal(linear(crossed, weight, bias), expected.reshape(2, 15, 13).transpose(0, 1))


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0), (0, 0, 0), (7, 0, 19)])
def test_nothing_is_a_size_too(chosen, linear, shape):
    x, weight, bias = problem(*shape)
    result = linear(x, weight, bias)
    assert torch.equal(result, F.linear(x, weight, bias))
    assert torch.equal(gemm(x, weight, bias, "relu"), F.linear(x, weight, bias).relu())
    assert linear(x.reshape(1, *x.shape), weight).shape == (1, *result.shape)


# NaN and infinities


@pytest.mark.parametrize("activation", ["gemv", *ACTIVATIONS])
@pytest.mark.parametrize("inside", [5, 9, 67])
def test_what_is_not_finite_passes_as_it_does_in_torch(chosen, inside, activation):
    x, weight, bias = problem(17, inside, 23)
    weight = weight.abs() + 0.1  # an infinity times a number keeps its sign
    x[0, inside - 1], x[1, 0], x[2, inside // 2] = math.nan, math.inf, -math.inf
    weight[3, inside - 1], weight[4, 0], weight[5, inside // 2] = math.inf, math.nan, -math.inf
    bias[6], bias[7] = math.inf, math.nan
    found = gemv(x, weight, bias) if activation == "gemv" else gemm(x, weight, bias, activation)
    expected = activate(F.linear(x, weight, bias), activation)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())
    assert torch.equal(found[found.isinf()], expected[expected.isinf()])


# As an operator


def test_the_operators_are_what_torch_expects():
    for bias, activation in ((True, "gelu"), (False, None)):
        x, weight, shift = problem(7, 11, 7)
        opcheck(torch.ops.regard.gemv.default, (x, weight, shift if bias else None))
        opcheck(torch.ops.regard.gemm.default, (x, weight, shift if bias else None, activation))


@pytest.mark.parametrize("call", [gemv, functools.partial(gemm, activation="relu")], ids=["gemv", "gemm"])
def test_samples_and_layers_can_be_mapped(call):
    x, weight, bias = problem(6, 11, 7)
    expected = call(x, weight, bias)
    rows = torch.func.vmap(lambda row: call(row, weight, bias))(x)
    assert torch.equal(rows, expected)
    columns = torch.func.vmap(lambda row: call(row, weight, bias), in_dims=1)(x.mT)
    assert torch.equal(columns, expected)
    layers = torch.stack([weight, weight.flip(0)]), torch.stack([bias, bias.flip(0)])
    found = torch.func.vmap(lambda w, b: call(x, w, b))(*layers)
    assert torch.equal(found, torch.stack([expected, expected.flip(1)]))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_there_is_no_gradient_and_it_raises(linear):
    x, weight, bias = problem(2, 3, 5)
    with pytest.raises(BackendError, match="no gradient"):
        linear(x, weight.requires_grad_(), bias).sum().backward()
    with forward_ad.dual_level(), pytest.raises(BackendError, match="no gradient"):
        linear(forward_ad.make_dual(x, x), weight, bias)


def test_operations_are_counted(linear):
    x, weight, bias = problem(3, 11, 7)
    with FlopCounterMode(display=False) as counter:
        linear(x, weight, bias)
    assert counter.get_total_flops() == 2 * 3 * 11 * 7


def test_it_compiles(linear):
    x, weight, bias = problem(3, 11, 7)
    fused = ("gelu",) if linear is gemm else ()
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight, bias, *fused), linear(x, weight, bias, *fused))


def test_tensors_that_do_not_fit_are_refused():
    x, weight, bias = problem(3, 11, 7)
    for wrong in [
        (x[:, :5], weight, bias),
        (x, weight, bias[:1]),
        (x.double(), weight, bias),
        (x.half(), weight.half(), None),
        (x, weight[0], None),
    ]:
        for operator in (torch.ops.regard.gemv, torch.ops.regard.gemm):
            with pytest.raises(BackendError, match=r"do not make a linear layer"):
                operator(*wrong)
    with pytest.raises(BackendError, match=r"do not make a linear layer"):
        torch.ops.regard.gemm(x, weight, bias, "swish")


# Memory

GUARDED = """
import ctypes, mmap
import torch
from regard.kernels import library, linear
from regard.kernels.linear import gemm, gemv

libc = ctypes.CDLL(None)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
kept = []

def placed(tensor, at_end):
    # Guard pages without access surround the numbers, which are at one end of their own pages.
    page = mmap.PAGESIZE
    pages = -(-tensor.nbytes // page) * page
    memory = mmap.mmap(-1, pages + 2 * page)
    view = (ctypes.c_char * len(memory)).from_buffer(memory)
    kept.append(view)
    for place in (0, page + pages):
        assert libc.mprotect(ctypes.addressof(view) + place, page, 0) == 0
    start = page + (pages - tensor.nbytes if at_end else 0)
    inside = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
    return inside.reshape(tensor.shape).copy_(tensor)

torch.set_num_threads(1)
for name in ("plain", library.name()):
    library.use(name)
    for dtype in (torch.float32, torch.float64):
        for inside in (1, 5, 8, 9, 16, 31, 700):
            for rows in (1, 2, 3, 5, 6, 7, 13):
                for outside in (1, 9, 16, 35):
                    for at_end in (False, True):
                        # The output lies so too.
                        linear.empty_output = lambda *shape, dtype: placed(torch.zeros(shape, dtype=dtype), at_end)
                        shapes = (rows, inside), (outside, inside), (outside,)
                        x, weight, bias = (placed(torch.randn(s, dtype=dtype), at_end) for s in shapes)
                        found, expected = gemm(x, weight, bias, "relu"), x @ weight.mT + bias
                        assert torch.allclose(found, expected.relu(), atol=1e-3)
                        assert torch.allclose(gemv(x, weight, bias), expected, atol=1e-3)
                    kept.clear()
print("touched nothing else")
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guards pages as Linux does")
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer guards memory itself")
def test_no_number_outside_of_the_tensors_is_touched():
    done = subprocess.run([sys.executable, "-W", "error", "-c", GUARDED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "touched nothing else" in done.stdout
