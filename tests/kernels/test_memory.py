"""Memory grows with the tokens, not with their square; no number outside of a tensor is read; odd shapes are right."""

import os
import subprocess
import sys

import pytest
import torch
from catalog import assert_agree, bounds, results

from regard import Causal, First, RelativeTable, Window, attend
from regard.kernels import library

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc and guards pages as Linux does")
# Tensors, gradients, and what the plan keeps: a linear way needs about 2.5 kB for each token of 64 channels.
BYTES_A_TOKEN = 12_000


def python(program: str) -> str:
    """What a program prints in a Python of its own."""
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


MEASURED = """
import torch
from regard import Causal, RelativeTable, Window, attend

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def train(tokens, backend):
    query, key, value = (torch.randn(1, 1, tokens, 64, requires_grad=True) for _ in range(3))
    attend(query, key, value, pattern=Window(128, 128), backend=backend).sum().backward()

def growth(tokens, backend):
    train(300, backend)
    with open("/proc/self/clear_refs", "w") as peaks:
        peaks.write("5")  # the peak begins anew
    before = status("VmRSS")
    train(tokens, backend)
    return status("VmHWM") - before

bias = RelativeTable(2, distance=8)
inputs = [torch.randn(2, 2, 150, 64, requires_grad=True) for _ in range(3)]
broken = [inputs[0], inputs[1], inputs[2].detach().clone()]
broken[2][0, 0, 7] = torch.nan

def again_and_again():
    for number in range(50):
        output = attend(*(broken if number % 5 == 0 else inputs), pattern=Causal(), bias=bias, backend="native")
        output.sum().backward()

again_and_again()
before = status("VmRSS")
again_and_again()
again_and_again()
leaked = status("VmRSS") - before
print(leaked, growth(1 << 15, "native"), growth(1 << 11, "reference"))
"""


@pytest.fixture(scope="module")
def measured() -> dict[str, int]:
    """Bytes that a hundred calls leave behind, and that two backends need at their peak."""
    if "asan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("a sanitizer keeps freed memory for a while")
    if (reason := library.missing()) is not None:
        pytest.skip(f"there are no native kernels: {reason}")
    return dict(zip(("leaked", "native", "reference"), map(int, python(MEASURED).split()), strict=True))


@on_linux
@pytest.mark.slow
def test_the_memory_of_a_window_grows_with_the_tokens(measured):
    assert measured["native"] < BYTES_A_TOKEN * (1 << 15)


@on_linux
@pytest.mark.slow
def test_the_measure_of_memory_can_fail(measured):
    assert measured["reference"] > BYTES_A_TOKEN * (1 << 11)


@on_linux
@pytest.mark.slow
def test_calling_again_and_again_keeps_no_memory(measured):
    """A hundred calls write 60 MB of outputs and gradients; one in ten that stays would show."""
    assert measured["leaked"] < 6e6


GUARD = """
import ctypes, mmap

libc = ctypes.CDLL(None)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
kept = []

def guarded(size, at_end):
    # Guard pages without access surround the bytes, which are at one end of their own pages.
    page = mmap.PAGESIZE
    pages = -(-size // page) * page
    memory = mmap.mmap(-1, pages + 2 * page)
    view = (ctypes.c_char * len(memory)).from_buffer(memory)
    kept.append(view)
    for place in (0, page + pages):
        assert libc.mprotect(ctypes.addressof(view) + place, page, 0) == 0
    return memory, page + (pages - size if at_end else 0)
"""
GUARDED = (
    GUARD
    + """
import torch
from regard import Causal, First, RelativeTable, Window
from regard.kernels import library
from regard.kernels.bias_table import make_bias_table
from regard.kernels.program import program
from regard.kernels.softmax import Score, attention
from regard.patterns import Lengths

def placed(tensor, at_end):
    memory, start = guarded(tensor.numel() * tensor.element_size(), at_end)
    inside = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start).reshape(tensor.shape)
    return inside.copy_(tensor.detach())

def attend(tokens, dim, value_dim, dtype, pattern, at_end):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    lengths = Lengths(tokens, tokens)
    shapes = (2, 2, tokens, dim), (2, 1, tokens, dim), (2, 1, tokens, value_dim)
    inputs = [placed(torch.randn(shape).to(dtype), at_end).requires_grad_() for shape in shapes]
    bias = placed(torch.randn(1, 2, tokens, tokens, dtype=wide), at_end).requires_grad_()
    relative = RelativeTable(2, distance=2, dtype=wide)
    table, *codes = (placed(part, at_end) for part in make_bias_table(relative, lengths))
    made = program(pattern, lengths, library.lanes(wide))
    words, masks = placed(made.words, at_end), placed(made.masks, at_end)
    for score in (
        Score(None, None, None, None, words, masks, 0.5),
        Score(None, None, None, bias, words, masks, 0.5),
        Score(table.requires_grad_(), *codes, None, words, masks, 0.5),
    ):
        output, _ = attention(*inputs, score)
        output.backward(placed(torch.ones_like(output), at_end))
        assert output.isfinite().all()

for shape in [(1, 1, 1), (3, 5, 2), (25, 7, 9), (33, 8, 16), (70, 33, 3)]:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for pattern in (Causal(), Window(2, 2, step=3) | First(1)):
            for at_end in (False, True):
                attend(*shape, dtype, pattern, at_end)
print("read nothing else")
"""
)
BEYOND = (
    GUARD
    + """
for at_end, beyond in ((True, 20), (False, -4)):
    memory, start = guarded(20, at_end)
    address = ctypes.addressof(kept[-1]) + start
    ctypes.c_float.from_address(address).value
print("so far so good", flush=True)
ctypes.c_float.from_address(address + beyond).value
"""
)


@on_linux
def test_no_number_outside_of_the_tensors_is_read():
    assert "read nothing else" in python(GUARDED)


@on_linux
def test_a_guarded_page_stops_a_read_outside():
    with pytest.raises(AssertionError, match=r"exit (-\d+|1)\s+so far so good"):
        python(BEYOND)


ODD = {
    "one token": (1, 1, 1, 1, 3, 5),
    "one dim": (2, 2, 2, 17, 1, 1),
    "one value": (2, 2, 1, 17, 9, 1),
    "300 dims": (1, 2, 1, 30, 300, 300),
    "five heads": (3, 5, 5, 19, 7, 6),
    "fifteen heads on three": (1, 15, 3, 19, 4, 6),
    "many rows": (37, 1, 1, 5, 3, 2),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_shapes_are_right(name):
    batch, heads, kv_heads, tokens, dim, value_dim = ODD[name]
    generator = torch.Generator().manual_seed(1)
    shapes = [(batch, heads, tokens, dim), (batch, kv_heads, tokens, dim), (batch, kv_heads, tokens, value_dim)]
    for dtype in (torch.float32, torch.float64):
        inputs = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]
        truth = [tensor.detach().double().requires_grad_() for tensor in inputs]
        for pattern in (Causal(), Window(2, 2, step=3) | First(1)):
            for bias in (None, RelativeTable(heads, distance=2, dtype=dtype)):
                words = dict(pattern=pattern, bias=bias)
                found = results(attend, *inputs, backend="native", **words)
                expected = results(attend, *truth, backend="reference", **words)
                assert_agree(found, expected, bounds(*truth, None, dtype, 16.0))


def test_a_slice_of_a_larger_tensor_is_read_in_place():
    """Query, key and value out of one projection: rows with gaps between them, nothing copied."""
    packed = torch.randn(2, 33, 3, 4, 8, generator=torch.Generator().manual_seed(2)).requires_grad_()
    query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
    found = results(attend, query, key, value, pattern=Causal(), backend="native")
    dense = [tensor.detach().contiguous().requires_grad_() for tensor in (query, key, value)]
    for mine, truth in zip(found, results(attend, *dense, pattern=Causal(), backend="native"), strict=True):
        assert torch.equal(mine, truth)


def test_a_channel_axis_of_nothing_is_the_mean():
    """Without channels every score is zero."""
    query, key = torch.zeros(1, 2, 9, 0), torch.zeros(1, 2, 9, 0)
    value = torch.randn(1, 2, 9, 4, generator=torch.Generator().manual_seed(3))
    found, expected = (
        attend(query, key, value, pattern=Causal(), scale=1.0, backend=backend) for backend in ("native", "reference")
    )
    assert torch.allclose(found, expected, atol=1e-6)
    assert attend(query, key, value[..., :0], pattern=Causal(), scale=1.0, backend="native").shape == (1, 2, 9, 0)
