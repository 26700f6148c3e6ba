"""The dropout of the C++ kernels: the mask of the scalar twin on every instruction set, for any threads and tiles."""

import os
import subprocess
import sys

import pytest
import torch
from catalog import TOKENS, tensors

from regard import Causal, Full, Padding, Window, attend

SEEDS = [0, -1, 0x1234_5678_9ABC_DEF0]


def unit_vectors(queries, keys, **words):
    """The weights after dropout: queries and keys are equal, values are unit vectors."""
    zeros = torch.zeros(2, 3, queries, 1), torch.zeros(2, 3, keys, 1)
    return attend(*zeros, torch.eye(keys).expand(2, 3, -1, -1), backend="native", dropout=0.4, **words)


def test_every_instruction_set_drops_the_same(kernels, using):
    for seed in SEEDS:
        mine = unit_vectors(TOKENS, 2 * TOKENS, dropout_seed=seed) > 0
        with using("scalar"):
            assert torch.equal(mine, unit_vectors(TOKENS, 2 * TOKENS, dropout_seed=seed) > 0)


@pytest.mark.parametrize("pattern", [Full(), Causal(), Window(9, 4), Padding([150, 40, 97])], ids=str)
def test_any_number_of_threads_gives_the_same_bits(threads, segments, pattern):
    def run():
        query, key, value = tensors((150, 150), batch=3, heads=4, kv_heads=2, dim=13, value_dim=6, dtype=torch.float32)
        output = attend(query, key, value, pattern=pattern, dropout=0.3, dropout_seed=5, backend="native")
        return [output, *torch.autograd.grad(output, (query, key, value), torch.ones_like(output))]

    threads(1)
    alone = run()
    for number in (2, 3, 7):
        threads(number)
        assert all(torch.equal(one, other) for one, other in zip(run(), alone, strict=True))


MEASURED = """
import sys, torch
from regard.layers import MultiHeadAttention

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def step(tokens):
    layer(torch.randn(1, tokens, 256, requires_grad=True)).square().sum().backward()

layer = MultiHeadAttention(256, 4, dropout=float(sys.argv[1])).train()
step(64)
before = status("VmRSS")
with open("/proc/self/clear_refs", "w") as peaks:
    peaks.write("5")  # the peak begins anew
step(2048)
print(status("VmHWM") - before)
"""


def measure_growth(dropout):
    """By how many bytes a training step over 2,048 tokens grows a process of its own."""
    # Every large block is mapped and unmapped by itself, so that the memory of a process is what is in use.
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(dropout)], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc as Linux does")
def test_training_with_dropout_takes_no_more_memory_than_without():
    without, dropped = measure_growth(0.0), measure_growth(0.1)
    square = 4 * 4 * 2048**2  # four heads in float32: built, it would be kept at least once
    assert without < square / 2
    assert dropped <= 1.1 * without, f"{dropped / without:.3f} times the memory of {without / 1e6:.1f} MB"
