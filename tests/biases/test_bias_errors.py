"""Errors of biases state what was asked, what was found, why it cannot be, and what to do instead."""

from __future__ import annotations

import pytest
import torch

from regard.biases import Alibi, Gaussian, Quadratic, RelativeTable, RowColumn, TransformerXL
from regard.errors import BiasError

IMPOSSIBLE = {
    "no heads": lambda: Alibi(0),
    "half a head": lambda: Quadratic(1.5),
    "heads as a truth value": lambda: Gaussian(True),
    "too few slopes": lambda: Alibi(3, slopes=[0.5, 0.25]),
    "slopes that are not finite": lambda: Alibi(1, slopes=[float("inf")]),
    "neither distance nor grid": lambda: RelativeTable(2),
    "both distance and grid": lambda: RelativeTable(2, distance=3, grid=(3, 5)),
    "no distance": lambda: RelativeTable(2, distance=0),
    "start without a grid": lambda: RelativeTable(2, distance=3, start=1),
    "start before the beginning": lambda: RowColumn(2, (3, 5), start=-1),
    "no grid": lambda: RowColumn(2, None),
    "a grid with one axis": lambda: RowColumn(2, (15,)),
    "a grid with a number": lambda: RowColumn(2, 15),
    "a grid with three axes": lambda: Quadratic(2, (3, 5, 7)),
    "an empty grid": lambda: Gaussian(2, (0, 5)),
    "a grid of fractions": lambda: RelativeTable(2, grid=(3.0, 5.0)),
    "centres for another grid": lambda: Quadratic(2, (3, 5), centre=[[0], [0]]),
    "ragged centres": lambda: Quadratic(2, (3, 5), centre=[[0, 1], [0]]),
    "centres for other heads": lambda: Gaussian(2, centre=torch.zeros(3, 1)),
    "alpha for other heads": lambda: Quadratic(2, alpha=[1, 2, 3]),
    "negative alpha": lambda: Quadratic(2, alpha=-1),
    "infinite alpha": lambda: Quadratic(2, alpha=float("inf")),
    "a root that is not square": lambda: Gaussian(2, (3, 5), root=torch.ones(2, 2)),
    "no dim": lambda: TransformerXL(2, 0),
    "an encoding without features": lambda: TransformerXL(2, 3, lambda delta: delta),
    "scores without content": lambda: TransformerXL(2, 3).scores(torch.arange(2), torch.arange(2)),
    "a score without content": lambda: TransformerXL(2, 3).score(*torch.arange(3)),
}


@pytest.mark.parametrize("build", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_an_impossible_bias_is_refused_in_four_parts(build):
    with pytest.raises(BiasError) as caught:
        build()
    labels = [line.split()[0] for line in str(caught.value).split("\n")[1:]]
    assert labels == ["asked", "found", "because", "instead"]


def test_the_error_about_a_wrong_centre_reads_well():
    with pytest.raises(BiasError) as caught:
        Quadratic(2, grid=(3, 5), centre=[[0], [0]])
    assert str(caught.value) == (
        "Quadratic cannot be built.\n"
        "  asked    centre of shape (2, 1)\n"
        "  found    (head, axis) = (2, 2)\n"
        "  because  centre has one number for each head and axis\n"
        "  instead  centre of shape (2, 2)"
    )


def test_the_error_about_distance_and_grid_reads_well():
    with pytest.raises(BiasError) as caught:
        RelativeTable(2)
    assert str(caught.value) == (
        "RelativeTable cannot be built.\n"
        "  asked    distance=None, grid=None\n"
        "  found    neither of them\n"
        "  because  the table lies along a line (distance) or on a grid (grid), and its shape follows\n"
        "  instead  distance=128 for a sequence, or grid=(14, 14) for an image"
    )


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ((1, 2, 5, 4), (1, 2, 5, 4)),
        ((1, 3, 5, 7), (1, 3, 5, 7)),
        ((1, 2, 5, 7), (1, 1, 5, 7)),
        ((5, 7), (5, 7)),
    ],
)
def test_content_that_does_not_fit_is_refused(query, key):
    token = torch.arange(5)
    with pytest.raises(BiasError, match="does not fit") as caught:
        TransformerXL(2, 7).content_scores(token, token, torch.zeros(query), torch.zeros(key))
    assert str(query) in str(caught.value)
