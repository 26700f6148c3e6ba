"""A linear layer for few rows: the kernel against the definition in float64, its twins, and its bits."""

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
from regard.kernels.few import few_linear

# Less than a vector, one, one and a bit, several and a bit; outputs that fill no block, some, and many with a rest.
INSIDE = [1, 7, 8, 9, 31, 769]
OUTSIDE = [1, 3, 5, 131]
DTYPES = [torch.float64, torch.float32]


@pytest.fixture(autouse=True)
def one_thread(threads):
    """Tensors this small only make threads wait for one another; the tests of threads ask for more themselves."""
    threads(1)


@pytest.fixture(params=["best", "plain", "scalar"])
def chosen(request, using):
    """The kernels of this machine, those of any machine, and the scalar twins."""
    with using(library.name() if request.param == "best" else request.param):
        yield request.param


def problem(rows, inside, outside, dtype=torch.float32, seed=0):
    make = torch.Generator().manual_seed(seed)
    shapes = (rows, inside), (outside, inside), (outside,)
    return [torch.randn(shape, generator=make, dtype=torch.float64).to(dtype) for shape in shapes]


def assert_linear(made, x, weight, bias):
    """Each product and each addition is rounded once: a bound on sums in whatever order."""
    x, weight = x.double(), weight.double()
    bias = torch.zeros(len(weight), dtype=torch.float64) if bias is None else bias.double()
    size = F.linear(x.abs(), weight.abs(), bias.abs())
    limit = torch.finfo(made.dtype).eps * (weight.shape[1] + 2) * size
    # The truth itself is rounded where it is float64 too.
    if made.dtype == torch.float64:
        limit = 2 * limit
    truth = F.linear(x, weight, bias)
    assert made.shape == truth.shape
    excess = ((made.double() - truth).abs() - limit).max() if made.numel() else torch.tensor(0.0)
    assert excess <= 0, f"beyond the bound by {float(excess):.3g}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inside", INSIDE)
def test_it_is_what_it_is_defined_as(chosen, inside, dtype):
    for rows in range(21):
        for outside in OUTSIDE:
            x, weight, bias = problem(rows, inside, outside, dtype, seed=rows)
            assert_linear(few_linear(x, weight, bias), x, weight, bias)
            assert_linear(few_linear(x, weight), x, weight, None)


def test_the_bound_can_be_broken():
    x, weight, bias = problem(3, 31, 5)
    moved = few_linear(x, weight.roll(1, 0), bias)
    with pytest.raises(AssertionError, match="beyond the bound"):
        assert_linear(moved, x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors_equal_their_scalar_twins(using, kernels, dtype):
    """The twin sums in float64: exact for integers this small, and so must be the vectors."""
    for rows, inside, outside in [(1, 133, 29), (2, 31, 17), (4, 8, 5), (7, 65, 13), (19, 257, 3)]:
        x, weight, bias = ((8 * tensor).round() for tensor in problem(rows, inside, outside, dtype))
        found = few_linear(x, weight, bias)
        with using("scalar"):
            assert torch.equal(found, few_linear(x, weight, bias))


def test_many_outputs_are_all_written_and_nothing_else(kernels, threads):
    threads(2)
    for rows in (1, 3):
        x, weight, bias = problem(rows, 5, 50257 // 7)
        assert_linear(few_linear(x, weight, bias), x, weight, bias)


def test_one_output_by_hand():
    x, weight = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[4.0, 5.0, 6.0], [-1.0, 0.5, 0.0]])
    assert few_linear(x, weight, torch.tensor([0.25, 10.0])).tolist() == [[32.25, 10.0]]


# Bits


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rows_beside_a_row_change_no_bit_of_it(kernels, dtype):
    for inside, outside in [(769, 37), (64, 8), (9, 5)]:
        x, weight, bias = problem(20, inside, outside, dtype)
        alone = torch.cat([few_linear(row, weight, bias) for row in x.split(1)])
        for rows in range(1, 21):
            assert torch.equal(few_linear(x[:rows], weight, bias), alone[:rows]), rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_the_outputs_beside_an_output_change_no_bit(kernels, threads, dtype):
    for rows in (1, 2, 5, 16):
        x, weight, bias = problem(rows, 511, 1021, dtype)
        threads(1)
        expected = few_linear(x, weight, bias)
        for count in (2, 3, 7):
            threads(count)
            assert torch.equal(few_linear(x, weight, bias), expected), (rows, count)
        assert torch.equal(few_linear(x, weight[300:311], bias[300:311]), expected[:, 300:311])


# Strides and sizes


def test_strides_are_read_in_place_and_change_no_bit(kernels):
    wide = torch.randn(7, 90, generator=torch.Generator().manual_seed(1))
    weights = torch.randn(29, 70, generator=torch.Generator().manual_seed(2))
    bias = torch.randn(58, generator=torch.Generator().manual_seed(3))[::2]
    x, weight = wide[::2, 13:54], weights[:, 5:46]
    expected = few_linear(x.contiguous(), weight.contiguous(), bias.contiguous())
    assert torch.equal(few_linear(x, weight, bias), expected)
    by_column = x.mT.contiguous().mT, weight.mT.contiguous().mT
    assert torch.equal(few_linear(*by_column, bias), expected)
    assert torch.equal(few_linear(x[:1].expand(4, -1), weight, bias), expected[:1].expand(4, -1))
    flipped = torch.randn(41, 3, generator=torch.Generator().manual_seed(4)).mT
    assert_linear(few_linear(flipped, weight, bias), flipped, weight, bias)


def test_leading_axes_stay():
    x, weight, bias = problem(30, 11, 13)
    expected = few_linear(x, weight, bias)
    assert torch.equal(few_linear(x.reshape(2, 3, 5, 11), weight, bias), expected.reshape(2, 3, 5, 13))
    assert torch.equal(few_linear(x[0], weight, bias), expected[0])
    crossed = x.reshape(2, 15, 11).transpose(0, 1)
    assert torch.equal(few_linear(crossed, weight, bias), expected.reshape(2, 15, 13).transpose(0, 1))


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0), (0, 0, 0)])
def test_nothing_is_a_size_too(chosen, shape):
    x, weight, bias = problem(*shape)
    made = few_linear(x, weight, bias)
    assert torch.equal(made, F.linear(x, weight, bias))
    assert few_linear(x.reshape(1, *x.shape), weight).shape == (1, *made.shape)


# What is not finite


@pytest.mark.parametrize("inside", [5, 9, 67])
def test_what_is_not_finite_passes_as_it_does_in_torch(chosen, inside):
    x, weight, bias = problem(5, inside, 13)
    weight = weight.abs() + 0.1  # an infinity times a number keeps its sign
    x[0, inside - 1], x[1, 0], x[2, inside // 2] = math.nan, math.inf, -math.inf
    weight[3, inside - 1], weight[4, 0], weight[5, inside // 2] = math.inf, math.nan, -math.inf
    bias[6], bias[7] = math.inf, math.nan
    found, expected = few_linear(x, weight, bias), F.linear(x, weight, bias)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[found.isinf()], expected[expected.isinf()])
    assert torch.equal(found.isinf(), expected.isinf())


# As an operator


def test_the_operator_is_what_torch_expects():
    for bias in (True, False):
        x, weight, shift = problem(3, 11, 7)
        opcheck(torch.ops.regard.few_linear.default, (x, weight, shift if bias else None))


def test_samples_and_layers_can_be_mapped():
    x, weight, bias = problem(6, 11, 7)
    expected = few_linear(x, weight, bias)
    rows = torch.func.vmap(lambda row: few_linear(row, weight, bias))(x)
    assert torch.equal(rows, expected)
    columns = torch.func.vmap(lambda row: few_linear(row, weight, bias), in_dims=1)(x.mT)
    assert torch.equal(columns, expected)
    layers = torch.stack([weight, weight.flip(0)]), torch.stack([bias, bias.flip(0)])
    found = torch.func.vmap(lambda w, b: few_linear(x, w, b))(*layers)
    assert torch.equal(found, torch.stack([expected, expected.flip(1)]))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_there_is_no_gradient_and_it_says_so():
    x, weight, bias = problem(2, 3, 5)
    with pytest.raises(BackendError, match="no gradient"):
        few_linear(x, weight.requires_grad_(), bias).sum().backward()
    with forward_ad.dual_level(), pytest.raises(BackendError, match="no gradient"):
        few_linear(forward_ad.make_dual(x, x), weight, bias)


def test_operations_are_counted():
    x, weight, bias = problem(3, 11, 7)
    with FlopCounterMode(display=False) as counter:
        few_linear(x, weight, bias)
    assert counter.get_total_flops() == 2 * 3 * 11 * 7


def test_it_compiles():
    x, weight, bias = problem(3, 11, 7)
    compiled = torch.compile(few_linear, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight, bias), few_linear(x, weight, bias))


def test_tensors_that_do_not_fit_are_refused():
    x, weight, bias = problem(3, 11, 7)
    for wrong in [
        (x[:, :5], weight, bias),
        (x, weight, bias[:1]),
        (x.double(), weight, bias),
        (x.half(), weight.half(), None),
        (x, weight[0], None),
    ]:
        with pytest.raises(BackendError, match=r"do not make a linear layer"):
            torch.ops.regard.few_linear(*wrong)


# Memory

GUARDED = """
import ctypes, mmap
import torch
from regard.kernels import library
from regard.kernels.few import few_linear

libc = ctypes.CDLL(None)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
kept = []

def placed(tensor, at_end):
    # Pages that nobody may touch stand before and behind the numbers, which lie at one end of their own pages.
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
        for inside in (1, 5, 8, 9, 16, 31):
            for rows in (1, 2, 3, 7):
                for outside in (1, 9):
                    for at_end in (False, True):
                        shapes = (rows, inside), (outside, inside), (outside,)
                        x, weight, bias = (placed(torch.randn(s, dtype=dtype), at_end) for s in shapes)
                        assert torch.allclose(few_linear(x, weight, bias), x @ weight.mT + bias, atol=1e-4)
                    kept.clear()
print("read nothing else")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guards pages as Linux does")
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer guards memory itself")
def test_no_number_outside_of_the_tensors_is_read():
    done = subprocess.run([sys.executable, "-W", "error", "-c", GUARDED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "read nothing else" in done.stdout
