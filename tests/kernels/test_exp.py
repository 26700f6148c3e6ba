"""The vector `2^x` and `log2`: accurate over the range of a softmax, and NaN is preserved."""

import mpmath
import numpy as np
import pytest
import torch

from regard import Causal
from regard.kernels import library
from regard.kernels.program import program
from regard.kernels.softmax import Score, attention
from regard.patterns import Lengths

DTYPES = {"float32": (np.float32, torch.float32, -126), "float64": (np.float64, torch.float64, -1022)}
ULPS = 2


def exp2(x: np.ndarray) -> np.ndarray:
    x = np.ascontiguousarray(x)
    answer = np.full_like(x, 7)
    kind = library.DTYPE_CODES[torch.from_numpy(x).dtype]
    library.native.regard_exp2(kind, x.ctypes.data, answer.ctypes.data, x.size)
    return answer


def hard_points(number, lowest: int) -> np.ndarray:
    """Whole and half numbers, where the rounding to a whole number turns over, and four neighbours on each side."""
    points = [np.arange(2 * lowest, 1, dtype=number) / 2]
    for towards in (-np.inf, np.inf):
        near = points[0]
        for _ in range(4):
            near = np.nextafter(near, number(towards), dtype=number)
            points.append(near)
    points.append(-np.exp2(np.arange(lowest, 0, dtype=number)))  # so close to zero that the answer is nearly one
    every = np.concatenate(points)
    return every[(every >= lowest) & (every <= 0)]


def ulps_off(found: np.ndarray, x: np.ndarray) -> float:
    """How far from 2^x in units of the last place, against many digits."""
    if x.dtype == np.float32:
        exact = np.exp2(x.astype(np.float64))
        return float(np.max(np.abs(found.astype(np.float64) - exact) / np.spacing(exact.astype(np.float32))))
    with mpmath.workprec(120):
        exact = [mpmath.power(2, mpmath.mpf(float(one))) for one in x]
        unit = np.spacing(np.array([float(one) for one in exact]))
        return max(float(abs(mpmath.mpf(float(f)) - e) / float(u)) for f, e, u in zip(found, exact, unit, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_right_to_two_ulps_over_all_scores_that_count(kernels, dtype):
    number, _, lowest = DTYPES[dtype]
    generator = np.random.default_rng(5)
    count = 200_000 if dtype == "float32" else 2_000
    hard = hard_points(number, lowest)
    hard = hard if dtype == "float32" else generator.choice(hard, 4_000, replace=False)
    some = np.concatenate([generator.uniform(lowest, 0, count), generator.uniform(-2, 0, count)]).astype(number)
    x = np.concatenate([hard, some])
    assert ulps_off(exp2(x), x) <= ULPS


def test_the_measure_of_ulps_can_fail():
    for number, _, lowest in DTYPES.values():
        x = np.linspace(lowest, 0, 100).astype(number)
        nudged = np.exp2(x) * number(1 + 4 * np.finfo(number).eps)
        assert ulps_off(nudged, x) > ULPS


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_numbers_are_exact(kernels, dtype):
    number, _, lowest = DTYPES[dtype]
    x = np.arange(lowest, 1, dtype=number)
    assert np.array_equal(exp2(x), np.exp2(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_below_the_normal_numbers_it_fades_to_zero(kernels, dtype):
    """Never negative, never as much as the smallest normal number, and nothing at all from one power further down."""
    number, _, lowest = DTYPES[dtype]
    fading = exp2(np.nextafter(np.linspace(lowest, lowest - 1, 1001).astype(number), number(-np.inf), dtype=number))
    assert (fading >= 0).all()
    assert (fading < np.exp2(number(lowest))).all()
    gone = exp2(np.array([lowest - 1, lowest - 1.5, 10 * lowest, np.finfo(number).min, -np.inf], dtype=number))
    assert not gone.any()
    assert not np.signbit(gone).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_little_above_zero_is_right_too(kernels, dtype):
    """A score may exceed its own log-sum-exp by a rounding."""
    number, _, _ = DTYPES[dtype]
    x = np.linspace(0, 4, 501).astype(number)
    assert ulps_off(exp2(x), x) <= ULPS


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_nan_whatever_its_bits(kernels, dtype):
    """Uninitialised memory holds any NaN, not only the one that arithmetic makes: 0xff...ff, say."""
    number, _, _ = DTYPES[dtype]
    whole, width = (np.uint32, 23) if dtype == "float32" else (np.uint64, 52)
    payloads = [1, 3, 255, 511, 4095, (1 << (width - 1)) + 1, (1 << width) - 1, 1 << (width - 1)]
    exponent = (1 << (8 * number().itemsize - 1 - width)) - 1
    bits = [(sign << (8 * number().itemsize - 1)) | (exponent << width) | low for sign in (0, 1) for low in payloads]
    x = np.array(bits, dtype=whole).view(number)
    assert np.isnan(x).all()
    lost = ~np.isnan(exp2(x))
    assert not lost.any(), [hex(word) for word, gone in zip(bits, lost, strict=True) if gone]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_count_is_filled_and_nothing_beyond_it(kernels, dtype):
    number, tensor_dtype, _ = DTYPES[dtype]
    for count in range(2 * library.lanes(tensor_dtype) + 2):
        x = np.linspace(-3, 0, count + 1).astype(number)
        answer = np.full(count + 1, 7, dtype=number)
        library.native.regard_exp2(library.DTYPE_CODES[tensor_dtype], x.ctypes.data, answer.ctypes.data, count)
        assert np.allclose(answer[:count], np.exp2(x[:count]))
        assert answer[count] == 7


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_logarithm_of_a_sum_is_right_to_the_last_places(kernels, dtype):
    """Where all scores are zero, the log-sum-exp of query n is log(n + 1)."""
    _, number, _ = DTYPES[dtype]
    tokens = 3000
    zeros = torch.zeros(1, 1, tokens, 1, dtype=number)
    made = program(Causal(), Lengths(tokens, tokens), library.lanes(number))
    _, sums = attention(zeros, zeros, zeros, Score(None, None, None, None, made.words, made.masks, 1.0))
    exact = torch.arange(1, tokens + 1, dtype=torch.float64).log()
    off = (sums.double().flatten() - exact).abs() / (torch.finfo(number).eps * exact.clamp(min=1))
    assert float(off.max()) <= 2
