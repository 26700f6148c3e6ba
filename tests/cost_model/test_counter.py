"""The counter that judges the formulas, judged itself: by hand and by torch's own counter."""

from __future__ import annotations

import pytest
import torch
from cost_model.counting import Counter, count, measure_saved_bytes, reference_only
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard.layers import MultiHeadAttention


def counted(run, *shapes: tuple[int, ...], backward: bool = False) -> tuple[int, int]:
    """Our count of a run, and torch's."""
    tensors = [torch.randn(shape, requires_grad=backward) for shape in shapes]
    ours, theirs = Counter(), FlopCounterMode(display=False)
    if not backward:
        with theirs, ours:
            run(*tensors)
        return ours.macs, theirs.get_total_flops() // 2
    result = run(*tensors).sum()
    with theirs, ours:
        result.backward()
    return ours.macs, theirs.get_total_flops() // 2


HAND = {
    # name: (run, shapes, multiply-adds by hand)
    "mm": (torch.mm, [(3, 5), (5, 7)], 3 * 5 * 7),
    "bmm": (torch.bmm, [(2, 3, 5), (2, 5, 7)], 2 * 3 * 5 * 7),
    "addmm": (torch.addmm, [(7,), (3, 5), (5, 7)], 3 * 5 * 7),
    "baddbmm": (torch.baddbmm, [(2, 3, 7), (2, 3, 5), (2, 5, 7)], 2 * 3 * 5 * 7),
    "matmul, broadcast": (torch.matmul, [(2, 11, 3, 5), (11, 5, 7)], 2 * 11 * 3 * 5 * 7),
    "einsum": (lambda x, y: torch.einsum("bhik,bhjk->bhij", x, y), [(2, 3, 5, 7), (2, 3, 11, 7)], 2 * 3 * 5 * 11 * 7),
    "linear on three axes": (functional.linear, [(2, 3, 5), (7, 5), (7,)], 2 * 3 * 5 * 7),
    # 13 - 3 + 1 = 11 and 17 - 3 + 1 = 15 places, each a sum over 2 channels and 3 x 3 pixels, for 5 channels
    "convolution": (functional.conv2d, [(2, 2, 13, 17), (5, 2, 3, 3)], 2 * 5 * 11 * 15 * 2 * 9),
    # (13 + 2 - 3) // 2 + 1 = 7 and (17 + 2 - 3) // 2 + 1 = 9 places
    "convolution with a stride": (
        lambda x, w: functional.conv2d(x, w, stride=2, padding=1),
        [(2, 2, 13, 17), (5, 2, 3, 3)],
        2 * 5 * 7 * 9 * 2 * 9,
    ),
    # a kernel of 3 with holes of 1 is 5 wide: 9 and 13 places
    "convolution with holes": (
        lambda x, w: functional.conv2d(x, w, dilation=2),
        [(2, 2, 13, 17), (5, 2, 3, 3)],
        2 * 5 * 9 * 13 * 2 * 9,
    ),
    "convolution in groups": (
        lambda x, w: functional.conv2d(x, w, groups=3),
        [(2, 6, 13, 17), (9, 2, 3, 3)],
        2 * 9 * 11 * 15 * 2 * 9,
    ),
    "convolution of each channel": (
        lambda x, w: functional.conv2d(x, w, padding=1, groups=6),
        [(2, 6, 13, 17), (6, 1, 3, 3)],
        2 * 6 * 13 * 17 * 9,
    ),
    "convolution along one axis": (functional.conv1d, [(2, 3, 13), (5, 3, 4)], 2 * 5 * 10 * 3 * 4),
    # every number of the input is spread over 5 channels and 3 x 3 places
    "transposed convolution": (
        lambda x, w: functional.conv_transpose2d(x, w, stride=2),
        [(2, 2, 7, 11), (2, 5, 3, 3)],
        2 * 2 * 7 * 11 * 5 * 9,
    ),
}


@pytest.mark.parametrize("name", HAND)
def test_the_counter_counts_as_the_hand_does(name: str) -> None:
    run, shapes, expected = HAND[name]
    ours, theirs = counted(run, *shapes)
    assert ours == expected
    assert theirs == expected


@pytest.mark.parametrize("name", HAND)
def test_backward_is_two_products_for_each(name: str) -> None:
    run, shapes, expected = HAND[name]
    ours, theirs = counted(run, *shapes, backward=True)
    assert ours == 2 * expected
    if "groups" not in name and "each channel" not in name:  # torch's counter ignores groups in backward
        assert theirs == 2 * expected


def test_a_vector_is_a_thin_matrix() -> None:
    with Counter() as counter:
        torch.mv(torch.ones(3, 5), torch.ones(5)), torch.dot(torch.ones(7), torch.ones(7))
        torch.addmv(torch.ones(3), torch.ones(3, 5), torch.ones(5))
        torch.addbmm(torch.ones(3, 7), torch.ones(2, 3, 5), torch.ones(2, 5, 7))
    assert counter.by_operation == {"mv": 15, "dot": 7, "addmv": 15, "addbmm": 2 * 3 * 5 * 7}


def test_an_input_that_is_not_learned_has_no_product_backward() -> None:
    layer, tokens = nn.Linear(5, 7), torch.randn(2, 3, 5)
    assert count(layer, tokens, backward=True).macs == 2 * (2 * 3 * 5 * 7)
    assert count(layer, tokens, backward=True, learns_input=False).macs == 2 * 3 * 5 * 7


def test_only_one_dtype_is_counted_on_request() -> None:
    with Counter(only=torch.float64) as counter:
        torch.ones(3, 5) @ torch.ones(5, 7)
        torch.ones(3, 5, dtype=torch.float64) @ torch.ones(5, 2, dtype=torch.float64)
        torch.ones(3).exp(), torch.ones(11, dtype=torch.float64).softmax(0)
    assert (counter.macs, counter.exponentials) == (3 * 5 * 2, 11)


def test_what_hides_its_products_is_refused() -> None:
    query = torch.randn(1, 2, 8, 4)
    with pytest.raises(AssertionError, match="hides"), Counter():
        functional.scaled_dot_product_attention(query, query, query)
    with pytest.raises(AssertionError, match="hides"), Counter():
        regard.attend(query, query, query)
    with pytest.raises(AssertionError, match="hides"), Counter():
        torch.cdist(query, query)


def test_the_reference_computes_the_whole_square() -> None:
    query, key, value = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 11, 7), torch.randn(2, 3, 11, 13)
    with reference_only(), Counter(only=torch.float64) as counter:
        regard.attend(query.double(), key.double(), value.double(), pattern=regard.Causal())
    assert counter.macs == 2 * 3 * 5 * 11 * (7 + 13)
    assert counter.exponentials == 2 * 3 * 5 * 11


def test_multi_head_attention_by_hand() -> None:
    layer, tokens = MultiHeadAttention(12, 3), torch.randn(2, 5, 12)
    forward = 2 * 5 * 12 * 36 + 2 * 3 * 5 * 5 * (4 + 4) + 2 * 5 * 12 * 12
    assert count(layer, tokens).macs == forward
    assert count(layer, tokens, backward=True).macs == 2 * forward


def test_saved_bytes_of_a_line_of_layers() -> None:
    """The first product keeps its input, which was given; relu keeps its result, which the second product reads."""
    layers = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    assert measure_saved_bytes(layers, torch.randn(2, 11, 5)) == 4 * 2 * 11 * 7
    with_gelu = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))  # gelu keeps what came before it
    assert measure_saved_bytes(with_gelu, torch.randn(2, 11, 5)) == 2 * 4 * 2 * 11 * 7


def test_saved_bytes_leave_out_what_is_cached() -> None:
    """Query, key and value lie in one tensor. The kernel keeps them, its output and the log of its sums; the product
    after it reads that output where it is. Words and masks of the pattern outlive every run."""
    layer = MultiHeadAttention(12, 3, attention=regard.Attention(pattern=regard.Causal()))
    assert measure_saved_bytes(layer, torch.randn(2, 16, 12)) == 4 * 2 * 16 * (36 + 12 + 3)
