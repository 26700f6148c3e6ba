"""Which biases are a score along rows plus one along columns."""

import pytest
import torch

from regard import Alibi, Gaussian, Quadratic, RelativeTable, RowColumn
from regard.biases import axis_scores, distances, table_scores

HEADS, GRID = 3, (5, 7)
STRAIGHT = torch.tensor([[[0.7, 0.0], [0.0, 1.3]], [[0.0, 0.4], [-0.9, 0.0]], [[0.0, 0.0], [0.0, 0.2]]])


@pytest.mark.parametrize(
    "make",
    [
        lambda: Quadratic(HEADS, GRID),
        lambda: RowColumn(HEADS, GRID),
        lambda: Gaussian(HEADS, GRID, root=STRAIGHT).requires_grad_(False),
    ],
    ids=["quadratic", "row column", "straight gaussian"],
)
def test_the_two_scores_add_up_to_the_score_of_every_pair(make):
    torch.manual_seed(2)
    bias = make().double()
    rows, columns = axis_scores(bias)
    together = rows[:, :, None, :, None] + columns[:, None, :, None, :]
    token = torch.arange(35)
    expected = bias.scores(token[:, None], token)
    assert torch.allclose(together.reshape(HEADS, 35, 35), expected, rtol=1e-14, atol=1e-14)


def test_a_sum_over_rows_and_columns_is_found_only_where_there_is_one():
    assert axis_scores(Gaussian(HEADS, GRID).requires_grad_(False)) is None
    assert axis_scores(RelativeTable(HEADS, grid=GRID)) is None
    assert axis_scores(Quadratic(HEADS)) is None
    assert axis_scores(Alibi(HEADS)) is None

    class Steeper(Quadratic):
        def scores(self, query_position, key_position):
            return 2 * super().scores(query_position, key_position)

    assert axis_scores(Steeper(HEADS, GRID)) is None


def test_a_gaussian_whose_slant_may_be_learned_is_not_taken_apart():
    bias = Gaussian(HEADS, GRID, root=STRAIGHT)
    assert axis_scores(bias) is None  # the slope in the slant is not zero, and the two axes do not know it
    with torch.no_grad():
        assert axis_scores(bias) is not None
    bias.root.requires_grad_(False)
    assert axis_scores(bias) is not None


def test_a_table_is_read_by_key_minus_query():
    assert distances(3).tolist() == [[0, 1, 2], [-1, 0, 1], [-2, -1, 0]]
    table = torch.tensor([[-2.0, -1.0, 0.0, 1.0, 2.0]])
    assert torch.equal(table_scores(table)[0], distances(3).float())
