"""Attention by position alone equals attention over all pairs, values and gradients, wherever heads are centred."""

import copy
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import pytest
import torch
from catalog import BETAS, PATTERNS, TOKENS, fits
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import (
    Alibi,
    Axial,
    BackendError,
    Causal,
    Full,
    Gaussian,
    GridStride,
    Neighborhood,
    Quadratic,
    RelativeTable,
    RowColumn,
    Shift,
    Strided,
    TransformerXL,
    Window,
    attend,
    explain,
)
from regard.backends import choose, find
from regard.backends.base import Request, bias_tensors
from regard.backends.positional import ratio
from regard.backends.positional.costs import choose_method
from regard.backends.positional.relative_layout import RelativeLayout

PRODUCTS = ("band", "slabs", "transform")
GRIDS = [(5, 7), (11, 13), (1, 7), (7, 1), (1, 1)]


@contextmanager
def only(product):
    """The ratio is computed by this method, whatever its cost; "cheapest" leaves the choice to the costs."""
    constants = {"TAP": "band", "PRODUCT": "slabs", "POINT": "transform"}
    costs = (
        {} if product == "cheapest" else {name: 0.0 if method == product else 1e9 for name, method in constants.items()}
    )
    with patch.multiple(ratio, **costs) if costs else nullcontext():
        yield


def inputs(lengths, heads, kv_heads, dtype, channels=5, batch=2):
    generator = torch.Generator().manual_seed(1)
    shapes = [(batch, heads, lengths[0], 3), (batch, kv_heads, lengths[1], 3), (batch, kv_heads, lengths[1], channels)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def results(bias, lengths, *, backend, dtype, kv_heads=None, heads=None, pattern=None, channels=5):
    """Output and the gradients of value and bias."""
    heads = bias.heads if heads is None else heads
    query, key, value = inputs(lengths, heads, heads if kv_heads is None else kv_heads, dtype, channels)
    value.requires_grad_()
    learned = [value, *(tensor for tensor in bias_tensors(bias) if tensor.requires_grad)]
    output = attend(query, key, value, scale=0, bias=bias, pattern=pattern, backend=backend)
    grad_output = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).cos().reshape(output.shape).to(dtype)
    computed_grads = torch.autograd.grad(output, learned, grad_output, allow_unused=True)
    return [
        output.detach(),
        *(torch.zeros_like(t) if s is None else s for t, s in zip(learned, computed_grads, strict=True)),
    ]


def largest_score(bias, lengths):
    position = torch.arange(lengths[0]) + lengths[1] - lengths[0]
    scores = bias.scores(position[:, None], torch.arange(lengths[1])).detach()
    return float(scores[scores > -torch.inf].abs().max()) if (scores > -torch.inf).any() else 0.0


def assert_agrees(bias, lengths, *, dtype=torch.float64, **words):
    """Within the rounding of the scores and of the sums, of the reference in float64.

    A score of size `s` is off by a few `eps s`, and so is, relatively, a weight; a sum adds `eps` for each key. A
    gradient of a score is a weight times values of up to 4, summed over queries, channels and batch; centres and roots
    multiply it by computed_grads of the score, which are at most about its size and the grid's.
    """
    found = results(bias, lengths, backend="positional", dtype=dtype, **words)
    truth = results(copy.deepcopy(bias).double(), lengths, backend="reference", dtype=torch.float64, **words)
    score = largest_score(bias, lengths)
    eps = torch.finfo(dtype).eps
    relative = eps * (8 * score + lengths[1] + 8)
    rows = lengths[0] * found[0].shape[1] * 2 * 4
    bounds = [relative * 4, relative * 4 * rows] + [relative * 64 * rows * (1 + score) * (1 + score**0.5)] * len(found)
    for name, mine, theirs, bound in zip(["output", "value", *["bias"] * 9], found, truth, bounds, strict=False):
        apart = float((mine.double() - theirs).abs().max())
        assert apart <= bound, f"{name}: {apart:.2e} apart, bound {bound:.2e}"


def make(kind, heads, grid, dtype=torch.float64, **words):
    return kind(heads, grid=grid, generator=torch.Generator().manual_seed(7), **words).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("kind", [Quadratic, RowColumn, Gaussian, RelativeTable])
def test_every_bias_on_every_grid_agrees_with_all_pairs(kind, grid, dtype):
    tokens = grid[0] * grid[1]
    for heads, kv_heads in ((1, 1), (6, 2), (3, 1)):
        bias = make(kind, heads, grid, dtype)
        if kind in (RelativeTable, RowColumn):
            with torch.no_grad():
                for parameter in bias.parameters():
                    parameter.mul_(150)
        assert_agrees(bias, (tokens, tokens), dtype=dtype, kv_heads=kv_heads)
        assert_agrees(bias.requires_grad_(False), (tokens, tokens), dtype=dtype, kv_heads=kv_heads)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("lengths", [(35, 35), (11, 35), (41, 35), (1, 35), (35, 1)])
@pytest.mark.parametrize("make_bias", [Quadratic, Gaussian, Alibi, lambda heads: RelativeTable(heads, distance=6)])
def test_along_a_line_lengths_may_differ(make_bias, lengths, dtype):
    torch.manual_seed(3)
    bias = make_bias(3).to(dtype)
    for pattern in (Full(), Causal(), Window(3, 2), ~Causal(), Window(9, 9) & ~Window(1, 1), Strided(3)):
        assert_agrees(bias, lengths, dtype=dtype, pattern=pattern)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", [Quadratic, Gaussian, RelativeTable, RowColumn])
@pytest.mark.parametrize(
    "pattern",
    [
        Neighborhood((5, 7), 1),
        Neighborhood((5, 7), (1, 2), step=2),
        ~Neighborhood((5, 7), 1),
        Axial((5, 7)),
        GridStride((5, 7), (2, 3)) | Neighborhood((5, 7), 1),
        Neighborhood((5, 7), 2) & ~Neighborhood((5, 7), 0),
    ],
    ids=str,
)
def test_patterns_by_relative_position_are_the_support_of_the_table(kind, pattern, dtype):
    assert_agrees(make(kind, 3, (5, 7), dtype), (35, 35), dtype=dtype, pattern=pattern, kv_heads=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", [Quadratic, Gaussian])
@pytest.mark.parametrize("far", [0, 1, 10])
@pytest.mark.parametrize("alpha", [0.0, 0.01, 0.5, 30.0, 1e4])
@pytest.mark.parametrize("product", ["slabs", "transform"])
def test_heads_centred_far_outside_the_image_are_as_precise_as_others(kind, far, alpha, dtype, product):
    grid, heads = (11, 13), 3
    centre = [[far * 11.3, -far * 13.6], [-far * 10.9, 0.25], [0.0, far * 12.0]]
    words = dict(centre=centre, alpha=alpha)
    if kind is Gaussian:
        root = alpha**0.5 * torch.tensor(
            [[[1.0, 0.0], [0.6, 0.8]], [[0.5, 0.5], [0.0, 1.1]], [[1.0, -0.3], [0.0, 0.2]]]
        )
        words = dict(centre=centre, root=root)
    bias = kind(heads, grid, **words).to(dtype)
    with only(product):
        assert_agrees(bias, (143, 143), dtype=dtype, kv_heads=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("grid", [None, (5, 7)])
def test_heads_that_have_lost_sight_of_the_image_stay_where_they_are(grid, dtype):
    # From so far away one pixel has all weight: nothing changes when a head moves. The gradient of a score is 2e4, and
    # would multiply what rounding leaves of gradients that cancel.
    axes = 1 if grid is None else 2
    bias = Gaussian(3, grid=grid, centre=[[5e3] * axes, [-7e3] * axes, [3e3] * axes], dtype=dtype)
    _, _, *computed_grads = results(bias, (35, 35), backend="positional", dtype=dtype)
    assert len(computed_grads) == 2
    assert all(float(derivative.abs().max()) == 0 for derivative in computed_grads)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 13),
    columns=st.integers(1, 13),
    heads=st.sampled_from([1, 2, 9]),
    shared=st.booleans(),
    single=st.booleans(),
    spread=st.sampled_from([0.0, 0.3, 3.0, 30.0, 300.0]),
    far=st.floats(0, 130),
    support=st.sampled_from(["all", "near", "far", "none"]),
    which=st.sampled_from(["table", "gaussian", "quadratic", "rowcolumn"]),
    product=st.sampled_from(["cheapest", *PRODUCTS]),
    seed=st.integers(0, 1000),
)
def test_any_relative_score_agrees_with_all_pairs(
    rows, columns, heads, shared, single, spread, far, support, which, product, seed
):
    grid, dtype = (rows, columns), torch.float32 if single else torch.float64
    generator = torch.Generator().manual_seed(seed)
    if which == "table":
        bias = RelativeTable(heads, grid=grid, generator=generator).double()
    elif which == "rowcolumn":
        bias = RowColumn(heads, grid, generator=generator).double()
    else:
        centre = far * torch.randn(heads, 2, generator=generator)
        kind = Gaussian if which == "gaussian" else Quadratic
        bias = kind(heads, grid, centre, generator=generator).double()
    with torch.no_grad():
        for name, parameter in bias.named_parameters():
            if name != "centre":
                parameter.mul_(spread * (50 if which in ("table", "rowcolumn") else 0.1))
    near = Neighborhood(grid, 1)
    pattern = {"all": Full(), "near": near, "far": ~near, "none": near & ~near}[support]
    lengths = (rows * columns,) * 2
    with only(product):
        assert_agrees(bias.to(dtype), lengths, dtype=dtype, kv_heads=1 if shared else heads, pattern=pattern)


def test_the_agreement_can_fail():
    bias = make(Gaussian, 3, (5, 7))
    twisted = copy.deepcopy(bias)
    with torch.no_grad():
        twisted.root[0, 0, 1] += 1e-9
    mine = results(bias, (35, 35), backend="positional", dtype=torch.float64)[0]
    theirs = results(twisted, (35, 35), backend="reference", dtype=torch.float64)[0]
    assert (mine - theirs).abs().max() > 1e-11


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_band_slabs_and_a_transform_are_the_same_sum(product, monkeypatch):
    monkeypatch.setattr(ratio, "TRANSFORM_BUDGET", 3000)  # a few channels at a time
    monkeypatch.setattr(ratio, "ROWS_BUDGET", 500)
    for dtype in (torch.float64, torch.float32):
        for bias in (make(Gaussian, 6, (5, 7), dtype), make(RelativeTable, 6, (5, 7), dtype)):
            for pattern in (Full(), Neighborhood((5, 7), 1)):
                with only(product):
                    assert_agrees(bias, (35, 35), dtype=dtype, kv_heads=2, pattern=pattern)
        for lengths in ((41, 35), (11, 35), (35, 1)):
            with only(product):
                assert_agrees(Alibi(3), lengths, dtype=dtype, pattern=Window(4, 1))
    table = torch.zeros(2, 9 * 13, dtype=torch.float64)
    with only(product):
        chosen = type(ratio.RatioPlan(table, RelativeLayout((5, 7), (5, 7)), torch.float64).product).__name__
    assert chosen == {"band": "Band", "slabs": "Slabs", "transform": "Spectrum"}[product]


def test_slabs_take_channels_and_batch_rows_in_pieces(monkeypatch):
    monkeypatch.setattr(
        ratio, "SLABS_BUDGET", 3 * 9 * 7 * 7
    )  # the matrix fits, and 12 planes of the outputs of 3 heads
    with only("slabs"):
        for channels in (5, 13, 29):
            assert_agrees(make(Gaussian, 3, (5, 7)), (35, 35), kv_heads=1, channels=channels)


def test_slabs_are_made_only_while_they_are_small():
    assert ratio.slabs_fit(RelativeLayout((32, 32), (32, 32)), 9)
    assert not ratio.slabs_fit(RelativeLayout((112, 112), (112, 112)), 9)
    assert not ratio.slabs_fit(RelativeLayout((1, 4096), (1, 4096)), 1)  # along a line they would be the square


def test_without_the_direct_rows_a_peak_outside_the_image_would_lose_all_digits(monkeypatch):
    """The twin: the transform alone is far from the truth where nothing of a head's peak is left."""
    monkeypatch.setattr(ratio, "TAP", 1e9)
    monkeypatch.setattr(ratio, "PRODUCT", 1e9)
    bias = Gaussian(1, (11, 13), centre=[[16.0, 0.0]], root=[[[1.1, 0.0], [0.3, 1.0]]])
    truth = results(copy.deepcopy(bias).double(), (143, 143), backend="reference", dtype=torch.float64)[0]
    apart = []
    for safety in (ratio.SAFETY, 0.0):
        monkeypatch.setattr(ratio, "SAFETY", safety)
        mine = results(bias, (143, 143), backend="positional", dtype=torch.float32)[0]
        apart.append(float((mine.double() - truth).nan_to_num(1e9).abs().max()))
    assert apart[0] < 1e-4
    assert apart[1] > 0.1


def test_gradients_are_right_by_finite_differences():
    generator = torch.Generator().manual_seed(2)
    value = torch.randn(1, 1, 6, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    nothing = torch.zeros(1, 2, 6, 1, dtype=torch.float64)
    for kind in (Quadratic, Gaussian, RelativeTable, RowColumn):
        bias = make(kind, 2, (2, 3))
        names = [name for name, _ in bias.named_parameters()]

        def attention(value, *parameters, bias=bias, names=names):
            changed = copy.copy(bias)
            changed._parameters = dict(zip(names, parameters, strict=True))
            return attend(nothing, nothing[:, :1], value, scale=0, bias=changed, backend="positional")

        assert torch.autograd.gradcheck(attention, [value, *bias.parameters()])


def test_only_sums_over_rows_and_columns_are_taken_apart():
    """Taken apart, a slanted hill would come out as another attention altogether."""
    query, key, value = inputs((35, 35), 1, 1, torch.float64)

    def taken(bias):
        return choose_method(Request(query, key, value, Full(), 0.0, bias))

    slanted = Gaussian(1, (5, 7), centre=[[0, 0]], root=[[[1.0, 0.0], [0.9, 0.4]]]).double().requires_grad_(False)
    straight = Gaussian(1, (5, 7), centre=[[0, 0]], root=[[[1.2, 0.0], [0.0, 0.4]]]).requires_grad_(False)
    assert taken(slanted) == "ratio"
    assert taken(straight) == "separable"
    assert taken(Quadratic(1, (5, 7))) == "separable"
    assert taken(RowColumn(1, (5, 7))) == "separable"
    assert taken(RelativeTable(1, grid=(5, 7))) == "ratio"
    wrong = copy.deepcopy(slanted)
    wrong.root.copy_(torch.diag_embed(slanted.precision.diagonal(dim1=1, dim2=2).sqrt()))
    right = attend(query, key, value, scale=0, bias=slanted, backend="positional")
    assert torch.allclose(right, attend(query, key, value, scale=0, bias=slanted, backend="reference"), atol=1e-13)
    assert (attend(query, key, value, scale=0, bias=wrong, backend="positional") - right).abs().max() > 0.3


def test_rows_and_columns_are_not_exchanged():
    """The same picture read by columns is another picture: only a grid that is not square can tell."""
    bias = Quadratic(1, (5, 7), centre=[[1, 0]], alpha=200.0)
    value = torch.arange(35.0).reshape(1, 1, 35, 1)
    nothing = torch.zeros(1, 1, 35, 1)
    output = attend(nothing, nothing, value, scale=0, bias=bias, backend="positional").reshape(5, 7)
    assert torch.equal(output[:4], torch.arange(7.0, 35.0).reshape(4, 7))
    assert torch.equal(output[4], output[3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    query, key, value = inputs((35, 35), 3, 1, dtype)
    for kind in (Quadratic, Gaussian, RelativeTable):
        bias = make(kind, 3, (5, 7), torch.float32)
        output = attend(query, key, value, scale=0, bias=bias, backend="positional")
        truth = attend(
            *(tensor.double() for tensor in (query, key, value)), scale=0, bias=bias.double(), backend="reference"
        )
        assert output.dtype == dtype
        assert (output.double() - truth).abs().max() <= torch.finfo(dtype).eps * truth.abs().max()


@pytest.mark.parametrize("pattern", [None, Neighborhood((5, 7), 1)], ids=str)
@pytest.mark.parametrize("kind", [Quadratic, Gaussian])
@pytest.mark.parametrize("what", ["value", "key", "query"])
def test_what_is_not_a_number_is_seen_where_the_reference_sees_it(kind, what, pattern):
    tensors = dict(zip(("query", "key", "value"), inputs((35, 35), 3, 3, torch.float64), strict=True))
    tensors[what][0, 1, 9, 2] = torch.nan
    tensors[what][1, 0, 30, 0] = torch.inf
    bias = make(kind, 3, (5, 7))
    words = dict(scale=0, bias=bias, pattern=pattern)
    truth = attend(**tensors, backend="reference", **words)
    found = attend(**tensors, backend="positional", **words)
    assert torch.equal(found.isnan(), truth.isnan())
    assert torch.allclose(found, truth, rtol=0, atol=1e-13, equal_nan=True)


def test_a_sample_of_its_own_is_batched_by_vmap():
    bias = make(Gaussian, 2, (3, 5))
    value, nothing = torch.randn(4, 1, 2, 15, 3, dtype=torch.float64), torch.zeros(1, 2, 15, 1, dtype=torch.float64)

    def loss(parameters, value):
        def call(query, key, value):
            return attend(query, key, value, scale=0, bias=bias, backend="positional")

        held = [(tensor, parameters[name]) for name, tensor in bias.named_parameters()]
        for name, (_, mine) in zip(list(parameters), held, strict=True):
            bias._parameters[name] = mine
        try:
            return call(nothing, nothing, value).square().sum()
        finally:
            for name, (kept, _) in zip(list(parameters), held, strict=True):
                bias._parameters[name] = kept

    parameters = {name: tensor.detach() for name, tensor in bias.named_parameters()}
    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, value)
    for number in range(4):
        truth = torch.func.grad(loss)(parameters, value[number])
        for name, derivative in truth.items():
            assert torch.allclose(found[name][number], derivative, rtol=1e-10, atol=1e-12)


def test_second_derivatives_of_a_ratio_are_refused_with_a_reason():
    bias = make(Gaussian, 1, (3, 5))
    value = torch.randn(1, 1, 15, 2, dtype=torch.float64, requires_grad=True)
    nothing = torch.zeros(1, 1, 15, 1, dtype=torch.float64)
    output = attend(nothing, nothing, value, scale=0, bias=bias, backend="positional")
    (derivative,) = torch.autograd.grad(output.square().sum(), value, create_graph=True)
    with pytest.raises(BackendError, match="once, not twice"):
        derivative.sum().backward()


def test_no_visible_keys_give_zeros_and_no_queries_give_an_empty_output():
    for lengths in ((0, 5), (7, 0), (0, 0)):
        query, key, value = inputs(lengths, 2, 2, torch.float64)
        output = attend(query, key, value.requires_grad_(), scale=0, bias=Alibi(2), backend="positional")
        assert output.shape == (2, 2, lengths[0], 5)
        assert not output.any()
        output.sum().backward()


REFUSED = [
    (dict(scale=0), "needs a positional bias"),
    (dict(scale=0, bias=torch.zeros(35, 35)), "a tensor has a score for each pair"),
    (dict(scale=0, bias=TransformerXL(3, 3)), "more than relative position"),
    (dict(scale=float("inf"), bias=Alibi(3)), "needs content scores"),
    (dict(scale=0, bias=Quadratic(3, (5, 8))), "the 5 x 8 tokens of the grid and nothing else"),
    (dict(scale=0, bias=Quadratic(3, (17, 2), start=1)), "the 17 x 2 tokens of the grid and nothing else"),
    (dict(scale=0, bias=Quadratic(3, (5, 7)), pattern=Causal()), "is not a function of relative position"),
    (dict(scale=0, bias=Alibi(3), pattern=Neighborhood((5, 7), 1)), "on a line"),
    (
        dict(scale=0, bias=Quadratic(3, (5, 7)), pattern=Neighborhood((5, 7), 1, edges="shift")),
        r"edges='shift'\) is not a function of relative position",
    ),
    (dict(scale=0, bias=Shift(3, [[0, 1]] * 3, (5, 7)), pattern=Axial((5, 7))), "no pattern but Full"),
    (dict(scale=1.0, bias=Alibi(3)), "not an inner product of position features"),
    (dict(scale=1.0, bias=Quadratic(3), pattern=Causal()), "it takes no pattern"),
    (dict(feature_map="elu1"), "feature map"),
]


@pytest.mark.parametrize(("words", "because"), REFUSED, ids=[because for _, because in REFUSED])
def test_what_it_cannot_run_is_refused_with_a_reason(words, because):
    query, key, value = inputs((35, 35), 3, 3, torch.float32)
    with pytest.raises(BackendError, match=because):
        attend(query, key, value, backend="positional", **words)


def test_patterns_are_taken_exactly_when_their_mask_depends_on_differences():
    query, key, value = inputs((TOKENS, TOKENS), 3, 3, torch.float32)
    line, grid = RelativeTable(3, distance=6), RelativeTable(3, grid=(5, 7))
    for pattern in PATTERNS:
        if not fits(pattern, (TOKENS, TOKENS)) or pattern.rows is not None:
            continue
        mask = pattern.matrix(TOKENS)
        same_step = all(
            bool((mask.diagonal(step) == mask.diagonal(step)[0]).all()) for step in range(-TOKENS + 1, TOKENS)
        )
        taken = find("positional").refuse(Request(query, key, value, pattern, 0.0, line)) is None
        assert not taken or same_step, pattern
        if find("positional").refuse(Request(query, key, value, pattern, 0.0, grid)) is None:
            entry, allowed = _grid_entries(), mask
            for code in entry.unique():
                here = allowed[entry == code]
                assert bool((here == here[0]).all()), pattern


def _grid_entries():
    token = torch.arange(35)
    row, column = token // 7, token % 7
    return (row - row[:, None]) * 100 + (column - column[:, None])


def test_auto_selects_it_where_it_is_faster_and_reports_why():
    nothing, value = torch.zeros(1, 9, 1024, 1), torch.zeros(1, 1, 1024, 64)
    big = explain(nothing, nothing[:, :1], value, scale=0, bias=Quadratic(9, (32, 32)))
    assert big.backend == "positional"
    assert big.macs == 9 * 64 * 1024 * 64
    assert "16.0 times fewer" in str(big)
    small = Request(nothing[:, :, :35], nothing[:, :1, :35], value[:, :, :35], Full(), 0.0, Gaussian(9, (5, 7)))
    if find("native").refuse(small) is None:
        assert choose(small).name == "native"
        assert "so few pairs" in find("positional").reluctance(small)
    for scale in BETAS:
        plain = Request(nothing, nothing[:, :1], value, Full(), 0.3 if scale is None else scale)
        assert find("positional").refuse(plain) is not None
