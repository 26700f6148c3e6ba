"""Learned tables agree with Swin's index, and row plus column separates."""

from __future__ import annotations

import torch

from regard.biases import RelativeTable, RowColumn


def swin_index(rows: int, columns: int) -> torch.Tensor:
    """`relative_position_index` as in the Swin repository: query minus key."""
    coordinates = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")).flatten(1)
    relative = (coordinates[:, :, None] - coordinates[:, None, :]).permute(1, 2, 0).contiguous()
    relative[:, :, 0] += rows - 1
    relative[:, :, 1] += columns - 1
    relative[:, :, 0] *= 2 * columns - 1
    return relative.sum(-1)


def test_a_swin_table_becomes_ours_by_the_documented_flip():
    rows, columns, heads = 3, 5, 2
    swin = torch.randn((2 * rows - 1) * (2 * columns - 1), heads, generator=torch.Generator().manual_seed(0))
    expected = swin[swin_index(rows, columns)].permute(2, 0, 1)
    bias = RelativeTable(heads, grid=(rows, columns))
    with torch.no_grad():
        bias.table.copy_(swin.T.reshape(heads, 2 * rows - 1, 2 * columns - 1).flip(1, 2))
    token = torch.arange(rows * columns)
    assert torch.equal(bias.scores(token[:, None], token), expected)
    with torch.no_grad():  # without the flip it is another table
        bias.table.copy_(swin.T.reshape(heads, 2 * rows - 1, 2 * columns - 1))
    assert not torch.equal(bias.scores(token[:, None], token), expected)


def test_farther_keys_share_one_entry_on_each_side():
    bias = RelativeTable(1, distance=2)
    row = bias.scores(torch.tensor(10), torch.arange(21))[0]
    assert torch.equal(row, bias.table[0, [0] * 8 + [0, 1, 2, 3, 4] + [4] * 8])


def test_every_entry_of_a_table_on_a_grid_is_used_and_gets_a_gradient():
    for bias in (RelativeTable(2, grid=(3, 5)), RowColumn(2, (3, 5)), RelativeTable(2, distance=7)):
        token = torch.arange(15)
        bias.scores(token[:, None], token).sum().backward()
        assert all(bool((parameter.grad > 0).all()) for parameter in bias.parameters())


def test_row_plus_column_makes_softmax_a_product_of_two():
    rows, columns = 3, 5
    bias = RowColumn(2, (rows, columns), dtype=torch.float64)
    token = torch.arange(rows * columns)
    weights = bias.scores(token[:, None], token).softmax(-1)
    row, column = torch.arange(rows), torch.arange(columns)
    by_row = bias.row[:, row - row[:, None] + rows - 1].softmax(-1)
    by_column = bias.column[:, column - column[:, None] + columns - 1].softmax(-1)
    product = torch.einsum("hab,hcd->hacbd", by_row, by_column).reshape(2, rows * columns, rows * columns)
    torch.testing.assert_close(weights, product, rtol=0, atol=1e-15)


def test_tables_start_as_narrow_normals():
    generator = torch.Generator().manual_seed(0)
    for bias in (
        RelativeTable(64, distance=100, generator=generator),
        RowColumn(64, (50, 53), generator=generator),
    ):
        values = torch.cat([parameter.flatten() for parameter in bias.parameters()])
        # mean and standard deviation of n normals are off by about std / sqrt(n) and std / sqrt(2 n)
        assert abs(values.mean().item()) < 5 * 0.02 / len(values) ** 0.5
        assert abs(values.std().item() - 0.02) < 5 * 0.02 / (2 * len(values)) ** 0.5
