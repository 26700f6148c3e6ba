"""The four-term relative score against dense sums and closed forms."""

from __future__ import annotations

import pytest
import torch

from regard.biases import Quadratic, TransformerXL, quadratic_encoding
from regard.calculus import sinusoidal

BATCH, HEADS, DIM = 2, 3, 5


def content(tokens: int, *tile: int, heads: int = HEADS, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, heads, *tile, tokens, DIM, dtype=torch.float64, generator=generator)


def dense(bias, queries, keys, query, key):
    """The three terms with `r` written out for every pair, one position at a time."""
    rows = []
    for i in queries.tolist():
        row = []
        for j in keys.tolist():
            if bias.grid is None:
                encoded = bias.encoding(torch.tensor(j - i)).double()
            else:
                columns = bias.grid[1]
                (a, b), (c, d) = divmod(i - bias.start, columns), divmod(j - bias.start, columns)
                encoded = bias.encoding(torch.tensor(c - a), torch.tensor(d - b)).double()
                inside = all(0 <= p - bias.start < bias.grid[0] * columns for p in (i, j))
                encoded = encoded * inside
            row.append(bias.projection @ encoded)
        rows.append(torch.stack(row))
    r = torch.stack(rows)  # query key head dim
    content_position = torch.einsum("bhqd,qkhd->bhqk", query, r)
    global_content = torch.einsum("hd,bhkd->bhk", bias.u, key)[:, :, None]
    global_position = torch.einsum("hd,qkhd->hqk", bias.v, r)
    return bias.scale * (content_position + global_content + global_position)


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"scale": 0.3},
        {"encoding": quadratic_encoding},
        {"grid": (3, 7)},
        {"grid": (3, 7), "start": 2, "encoding": quadratic_encoding},
    ],
    ids=lambda keywords: " ".join(keywords) or "plain",
)
def test_scores_equal_the_dense_sum(keywords):
    bias = TransformerXL(HEADS, DIM, **keywords, dtype=torch.float64)
    queries, keys = torch.arange(-2, 17), torch.arange(25)
    query, key = content(19), content(25, seed=1)
    found = bias.content_scores(queries, keys, query, key)
    torch.testing.assert_close(found, dense(bias, queries, keys, query, key), rtol=0, atol=1e-12)


def test_tiles_equal_the_whole_even_where_their_positions_are_scattered():
    bias = TransformerXL(HEADS, DIM, grid=(5, 7), dtype=torch.float64)
    token = torch.arange(35)
    query, key = content(35), content(35, seed=1)
    whole = bias.content_scores(token, token, query, key)
    rows = torch.tensor([[0, 1, 2], [31, 5, 9]])
    columns = torch.tensor([[3, 4, 5, 6, 7], [30, 3, 3, 17, 8]])
    tiles = bias.content_scores(rows, columns, query[:, :, rows], key[:, :, columns])
    assert tiles.shape == (BATCH, HEADS, 2, 3, 5)
    torch.testing.assert_close(tiles, whole[:, :, rows[:, :, None], columns[:, None, :]], rtol=0, atol=1e-13)


def test_the_quadratic_encoding_turns_the_four_terms_into_the_closed_form():
    heads, grid, scale = 4, (5, 7), 0.6
    generator = torch.Generator().manual_seed(2)
    alpha = torch.rand(heads, dtype=torch.float64, generator=generator) + 0.5
    centre = 2 * torch.randn(heads, 2, dtype=torch.float64, generator=generator)
    bias = TransformerXL(heads, 3, quadratic_encoding, grid=grid, scale=1.0, dtype=torch.float64)
    v = -alpha[:, None] * torch.cat([torch.ones(heads, 1, dtype=torch.float64), -2 * centre], dim=1)
    with torch.no_grad():
        bias.projection.copy_(torch.eye(3))
        bias.v.copy_(v)
    token = torch.arange(35)
    row = (token // 7)[None, :] - (token // 7)[:, None]
    column = (token % 7)[None, :] - (token % 7)[:, None]
    first, second = centre[:, :1, None], centre[:, 1:, None]
    closed = -alpha[:, None, None] * (row**2 + column**2 - 2 * row * first - 2 * column * second)

    nothing = torch.zeros(1, heads, 35, 3, dtype=torch.float64)  # W_q = W_k = 0
    found = scale * nothing @ nothing.mT + bias.content_scores(token, token, nothing, nothing)
    torch.testing.assert_close(found[0], closed, rtol=0, atol=1e-12)
    quadratic = Quadratic(heads, grid, centre, alpha, dtype=torch.float64).scores(token[:, None], token)
    torch.testing.assert_close(found[0].softmax(-1), quadratic.softmax(-1), rtol=0, atol=1e-12)

    assert not (scale * nothing @ nothing.mT).any()
    with torch.no_grad():
        bias.v.zero_()  # leaves content-position and global content, with u still random
    assert bias.u.any()
    assert not bias.content_scores(token, token, nothing, nothing).any()


def test_the_encoding_is_evaluated_at_distinct_deltas_only():
    evaluated = []

    def counting(*along):
        evaluated.append(along[0].numel())
        return quadratic_encoding(*along)

    rows, columns = torch.arange(40, 51), torch.arange(30, 43)
    for grid, most in ((None, 11 + 13 - 1), ((7, 11), 2 * (11 + 13 - 1))):
        bias = TransformerXL(HEADS, DIM, counting, grid=grid, dtype=torch.float64)
        evaluated.clear()
        bias.content_scores(rows, columns, content(11), content(13))
        assert len(evaluated) == 1
        assert evaluated[0] <= most < 11 * 13


def test_gradients_in_parameters_queries_and_keys_are_right():
    bias = TransformerXL(2, DIM, quadratic_encoding, grid=(2, 5), start=1, dtype=torch.float64)
    names = [name for name, _ in bias.named_parameters()]
    queries, keys = torch.tensor([[0, 3], [8, 4]]), torch.tensor([[1, 2, 9], [5, 11, 3]])

    def scores(query, key, *values):
        state = dict(zip(names, values, strict=True))
        bound = {name: getattr(bias, name) for name in names}
        for name in names:
            delattr(bias, name)
            setattr(bias, name, state[name])
        try:
            return bias.content_scores(queries, keys, query, key)
        finally:
            for name in names:
                delattr(bias, name)
                setattr(bias, name, bound[name])

    inputs = (content(2, 2, heads=2), content(3, 2, heads=2, seed=1), *bias.parameters())
    assert torch.autograd.gradcheck(scores, tuple(x.detach().clone().requires_grad_() for x in inputs))


def test_learned_encodings_are_part_of_the_bias():
    class Table(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.entries = torch.nn.Embedding(9, 4)

        def forward(self, delta):
            return self.entries(delta.clamp(-4, 4) + 4)

    bias = TransformerXL(HEADS, DIM, Table())
    token = torch.arange(7)
    bias.content_scores(token, token, content(7).float(), content(7).float()).square().sum().backward()
    assert bias.encoding.entries.weight.grad.abs().sum() > 0


def test_one_head_fits_any_number_and_float32_parameters_serve_float64_content():
    bias = TransformerXL(1, DIM)
    token = torch.arange(7)
    query, key = content(7), content(7, seed=1)
    found = bias.content_scores(token, token, query, key)
    assert found.dtype == torch.float64
    for head in range(HEADS):
        single = bias.content_scores(token, token, query[:, [head]], key[:, [head]])
        torch.testing.assert_close(found[:, [head]], single, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_no_keys_give_an_empty_output(queries, keys):
    bias = TransformerXL(HEADS, DIM, dtype=torch.float64)
    found = bias.content_scores(torch.arange(queries), torch.arange(keys), content(queries), content(keys))
    assert found.shape == (BATCH, HEADS, queries, keys)


def test_a_published_projection_fits_after_interleaving_and_negating_the_sines():
    bias = TransformerXL(HEADS, 2, scale=1.0, dtype=torch.float64)
    features = HEADS * 2
    theirs = torch.randn(HEADS, 2, features, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    sines, cosines = theirs[..., : features // 2], theirs[..., features // 2 :]
    with torch.no_grad():
        bias.projection.copy_(torch.stack((-sines, cosines), dim=-1).flatten(-2))
        bias.u.zero_()
    distance = 3  # the query is three positions behind the key
    speeds = 10000.0 ** (-torch.arange(0, features, 2, dtype=torch.float64) / features)
    encoding = torch.cat([(distance * speeds).sin(), (distance * speeds).cos()])
    expected = torch.einsum("hd,hdf,f->h", bias.v, theirs, encoding)
    nothing = torch.zeros(1, HEADS, 1, 2, dtype=torch.float64)
    found = bias.content_scores(torch.tensor([7]), torch.tensor([4]), nothing, nothing)
    torch.testing.assert_close(found.flatten(), expected, rtol=1e-12, atol=1e-15)


def test_the_default_encoding_has_rows_before_columns_on_a_grid():
    bias = TransformerXL(2, 4, grid=(3, 5))
    row, column = torch.tensor([1, -2]), torch.tensor([4, 3])
    expected = torch.cat([sinusoidal(row, 4), sinusoidal(column, 4)], dim=-1)
    torch.testing.assert_close(bias.encoding(row, column).float(), expected, rtol=0, atol=0)
    assert repr(bias) == "TransformerXL(heads=2, dim=4, grid=(3, 5))"
    assert repr(TransformerXL(2, 4, quadratic_encoding, scale=1.0)) == (
        "TransformerXL(heads=2, dim=4, encoding=quadratic_encoding, scale=1.0)"
    )
