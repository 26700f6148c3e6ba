"""The lower bound on made-up machines, so that every number is known beforehand; no test asserts a time."""

import dataclasses
import json

import pytest
import sympy
import torch

from regard.cost_model import Cost
from regard.cost_model.cost_part import CostPart, PassCost
from regard.cost_model.machine import Machine
from regard.cost_model.roofline import duration, predict
from regard.cost_model.run_mode import RunMode
from regard.cost_model.symbols import size_symbols
from regard.errors import CostError

N, D = size_symbols("N D")
MACHINE = Machine("made up", threads=1, peak=1e9, bandwidth=1e8, peak_double=5e8)  # balance 10 operations a byte


def work(macs, moved):
    return PassCost(macs=sympy.sympify(macs), bytes=sympy.sympify(moved))


PARTS = [
    CostPart("block.product", forward=work(N * D * 50, N * D), backward=work(N * D * 100, 2 * N * D)),
    CostPart("block.norm", forward=work(0, 3 * N * D)),
    CostPart("head", forward=work(N * D, 40 * N * D)),
]


def made(step="forward", dtype=torch.float32, parts=PARTS, **values):
    return Cost("made up", parts, {N: 1000, D: 100, **values}, RunMode(step, None, dtype))


def test_each_part_takes_the_larger_of_its_two_times():
    predicted = predict(made(), MACHINE)
    product, norm, head = predicted.parts
    # 1e5 numbers: 1e7 operations on 1e5 bytes; none on 3e5; 2e5 on 4e6.
    assert (product.compute, product.memory) == pytest.approx((1e-2, 1e-3))
    assert (norm.compute, norm.memory) == pytest.approx((0, 3e-3))
    assert (head.compute, head.memory) == pytest.approx((2e-4, 4e-2))
    assert [part.seconds for part in predicted.parts] == pytest.approx([1e-2, 3e-3, 4e-2])
    assert [part.bound for part in predicted.parts] == ["compute", "memory", "memory"]
    assert [part.intensity for part in predicted.parts] == pytest.approx([100, 0, 0.05])
    assert predicted.seconds == pytest.approx(5.3e-2)
    assert predicted.bound == "memory"


def test_what_is_bound_by_what_changes_at_the_balance_of_the_machine():
    part = CostPart("product", forward=work(5 * N * D, N * D))  # ten operations a byte
    for bandwidth, bound in ((0.99e8, "memory"), (1.01e8, "compute")):
        machine = dataclasses.replace(MACHINE, bandwidth=bandwidth)
        assert predict(made(parts=[part]), machine).bound == bound
        assert (machine.balance > 10) == (bound == "memory")


@pytest.mark.parametrize(("step", "seconds"), [("forward", 1e-2), ("backward", 2e-2), ("training", 3e-2)])
def test_the_requested_step_is_predicted(step, seconds):
    assert predict(made(step), MACHINE).parts[0].seconds == pytest.approx(seconds)


def test_double_precision_has_its_own_peak():
    assert predict(made(dtype=torch.float64), MACHINE).parts[0].compute == pytest.approx(2e-2)
    assert predict(made(dtype=torch.bfloat16), MACHINE).parts[0].compute == pytest.approx(1e-2)


def test_what_fits_the_cache_altogether_comes_from_there():
    moved = 44 * 10**5
    for cache, bandwidth in ((moved, 4e8), (moved - 1, 1e8)):
        machine = dataclasses.replace(MACHINE, cache=cache, cache_bandwidth=4e8)
        assert predict(made(), machine).total.memory == pytest.approx(moved / bandwidth)


def test_parts_are_grouped_without_losing_time():
    predicted = predict(made(), MACHINE)
    block = predicted.grouped(1)["block"]
    assert list(predicted.grouped(1)) == ["block", "head"]
    # A norm that waits for memory does not run while a product computes.
    assert block.seconds == pytest.approx(1.3e-2) != max(block.compute, block.memory)
    assert block.bound == "compute"
    assert sum(part.seconds for part in predicted.grouped(1).values()) == pytest.approx(predicted.seconds)


def test_several_parts_wait_for_what_takes_most_of_their_time():
    """Bytes that move while something is computed are not waited for."""
    product = CostPart("block.product", forward=work(25 * N * D, 4.9 * N * D))
    norm = CostPart("block.norm", forward=work(0, 4 * N * D))
    block = predict(made(parts=[product, norm]), MACHINE).grouped(1)["block"]
    assert (block.compute, block.memory) == pytest.approx((5e-3, 8.9e-3))
    assert block.bound == "compute"


def test_a_size_without_a_number_has_no_time():
    cost = Cost("made up", PARTS, {N: 1000}, RunMode())
    with pytest.raises(CostError, match="how large D is"):
        predict(cost, MACHINE)


def test_nothing_takes_no_time():
    predicted = predict(made(parts=[]), MACHINE)
    assert predicted.seconds == 0
    assert predicted.intensity == float("inf")
    assert "at least -" in str(predicted)


def test_the_table_says_it_is_a_lower_bound():
    shown = str(made().roofline(MACHINE))
    assert shown.splitlines()[0] == "made up takes at least 53 ms, and waits for memory."
    rows = {line.split()[0]: line.split() for line in shown.splitlines()[4:] if line}
    assert rows["block.product"][-3:] == ["ms", "19%", "compute"]
    assert rows["head"][-4:] == ["40", "ms", "75%", "memory"]
    assert rows["all"][-2:] == ["100%", "memory"]
    assert str(MACHINE) in shown


def test_a_long_table_shows_coarser_parts():
    parts = [dataclasses.replace(PARTS[0], name=f"block{n % 4}.part{n}") for n in range(40)]
    predicted = predict(made(parts=parts), MACHINE)
    assert "part7" not in str(predicted)
    assert "block3" in str(predicted)
    assert "part7" in predicted.table(levels=2)


def test_everything_can_be_written_down():
    plain = predict(made(), MACHINE).to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["bound"] == "memory"
    assert plain["parts"]["block.product"]["intensity"] == pytest.approx(100)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "-"), (1.2345, "1.23 s"), (0.9996, "1 s"), (0.5, "500 ms"), (1e-3, "1 ms"), (9.996e-4, "1 ms"),
     (3.14159e-6, "3.14 us"), (2e-9, "2 ns"), (12345.0, "12,345 s")],
)  # fmt: skip
def test_times_have_three_digits_and_a_unit(seconds, shown):
    assert duration(seconds) == shown
