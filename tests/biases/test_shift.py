"""Every head attends to exactly one offset: the limit of a Gaussian, and the values beyond the edges."""

import pytest
import torch
from catalog import TILED

from regard import BiasError, Quadratic, Shift, attend

GRID = (5, 7)
STEPS = [[0, 0], [1, -2], [-3, 1], [9, -20]]
EVERYWHERE = ["reference", "positional", *TILED]


def run(bias, backend, *, dtype=torch.float64, kv_heads=1, tokens=35, dim=3):
    """What the heads see, of values that name their place, and the gradient of the values."""
    generator = torch.Generator().manual_seed(5)
    value = torch.randn(2, kv_heads, tokens, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    nothing = value.detach()[..., :1] * 0
    queries = nothing.expand(-1, kv_heads, -1, -1).repeat_interleave(bias.heads // kv_heads, dim=1)
    output = attend(queries, nothing, value, scale=0, bias=bias, backend=backend)
    (gradient,) = torch.autograd.grad((output * torch.arange(output.numel()).reshape(output.shape).cos()).sum(), value)
    return value.detach(), output.detach(), gradient


@pytest.mark.parametrize("edges", ["replicate", "zeros", "circular", "reflect"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_every_backend_copies_the_shifted_value(edges, kv_heads):
    if edges == "reflect":
        steps = [[0, 0], [1, -2], [-3, 1], [4, -6]]
    bias = Shift(4, STEPS if edges != "reflect" else steps, GRID, edges)
    _, truth, slope = run(bias, "reference", kv_heads=kv_heads)
    for backend in EVERYWHERE:
        if backend == "native" and edges != "zeros":
            continue  # a shift with a found edge is no function of relative position
        _, output, gradient = run(bias, backend, kv_heads=kv_heads)
        assert torch.equal(output, truth)
        assert torch.allclose(gradient, slope, rtol=0, atol=35 * 2.0**-52)  # sums over queries, in another order


@pytest.mark.parametrize("edges", ["replicate", "circular", "reflect", "zeros"])
def test_the_shifted_image_is_the_padded_one(edges):
    value, output, _ = run(Shift(1, [[2, -1]], GRID, edges), "positional")
    image = value.reshape(2, *GRID, 3).permute(0, 3, 1, 2)
    mode = {"zeros": "constant"}.get(edges, edges)
    padded = torch.nn.functional.pad(image, (2, 2, 2, 2), mode=mode)
    moved = padded[:, :, 4 : 4 + GRID[0], 1 : 1 + GRID[1]]
    assert torch.equal(output[:, 0].reshape(2, *GRID, 3), moved.permute(0, 2, 3, 1))


def test_it_is_the_limit_of_a_steep_hill():
    steep = Quadratic(4, GRID, centre=STEPS, alpha=2000.0)
    _, limit, _ = run(Shift(4, STEPS, GRID), "positional")
    _, near, _ = run(steep, "reference")
    assert torch.equal(near, limit)


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_a_head_that_sees_nothing_yields_zeros_without_a_gradient(backend):
    bias = Shift(2, [[5, 0], [0, 1]], GRID, "zeros")
    value, output, gradient = run(bias, backend)
    assert not output[:, 0].any()
    assert not output[:, 1].reshape(2, *GRID, 3)[:, :, -1].any()
    assert not gradient.reshape(2, *GRID, 3)[:, :, 0].any()  # no query attends to the first column
    assert torch.equal(output[:, 1, :6], value[:, 0, 1:7])


@pytest.mark.parametrize("backend", ["reference", "positional", "blocked"])
@pytest.mark.parametrize("what", [torch.nan, torch.inf])
def test_nan_outside_the_shift_does_not_spread(backend, what):
    value = torch.randn(1, 1, 35, 3)
    value[0, 0, 8, 1] = what
    nothing = torch.zeros(1, 1, 35, 1)
    output = attend(nothing, nothing, value, scale=0, bias=Shift(1, [[0, 1]], GRID), backend=backend)
    assert torch.equal(output.isnan().nonzero(), torch.tensor([[0, 0, 7, 1]]))
    assert torch.equal(output[0, 0, 8], value[0, 0, 9])


def test_values_are_copied_bit_by_bit_in_every_dtype():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        value, output, _ = run(Shift(1, [[1, 1]], GRID), "positional", dtype=dtype)
        assert output.dtype == dtype
        assert torch.equal(output[0, 0, 0], value[0, 0, 8])


@pytest.mark.parametrize("lengths", [(11, 11), (5, 11), (11, 5)])
def test_along_a_line_the_last_query_sits_on_the_last_key(lengths):
    query, key, value = (
        torch.zeros(1, 2, lengths[0], 1),
        torch.zeros(1, 2, lengths[1], 1),
        torch.randn(1, 2, lengths[1], 3),
    )
    bias = Shift(2, [[-1], [2]])
    truth = attend(query, key, value, scale=0, bias=bias, backend="reference")
    for backend in EVERYWHERE:
        assert torch.equal(attend(query, key, value, scale=0, bias=bias, backend=backend), truth)
    assert torch.equal(truth[0, 0, -1], value[0, 0, -2])


@pytest.mark.parametrize(
    ("words", "because"),
    [
        (dict(steps=[[0, 1.5]], grid=GRID), "integer"),
        (dict(steps=[[0, 1, 2]], grid=GRID), "integer"),
        (dict(steps=[[0, 1]], grid=GRID, edges="wrap"), "defines what is there"),
        (dict(steps=[[1]], edges="replicate"), "end of a sequence"),
        (dict(steps="far", grid=GRID), "integer"),
    ],
)
def test_what_cannot_be_is_refused(words, because):
    with pytest.raises(BiasError, match=because):
        Shift(1, **words)
