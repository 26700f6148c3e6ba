"""The steepness of hard heads, the centres of soft heads, added content scores, and peak memory."""

import math
import sys

import pytest
import torch

from regard import Gaussian, Quadratic, RelativeTable, RowColumn, Shift, TransformerXL, attend
from regard.backends.positional import position_features
from regard.kernels import library

# 1 - theta(alpha)^-n with theta(alpha) = sum over integers j of exp(-alpha j^2), for lines and for planes
LEAKS = {
    0.5: (0.601057721733, 0.840845058611),
    1.0: (0.435868773781, 0.681755959605),
    2.0: (0.213429292958, 0.381306522824),
    4.0: (0.0353370534729, 0.0694253995976),
    8.0: (6.7047541694e-4, 1.34050129659e-3),
    12.0: (1.22882737e-5, 2.45763964e-5),
    16.0: (2.25070299e-7, 4.50140547e-7),
}
# The least alpha of a plane whose leak is at most the key.
LEAST = {1e-1: 3.61022571, 1e-2: 5.98392997, 1e-3: 8.29329930, 1e-4: 10.59655973, 1e-6: 15.20180417}


def mean(bias, value, backend="positional", **words):
    """Each head's mean of values `(token, channel)`, `(head, token, channel)`."""
    nothing = value.new_zeros(1, bias.heads, len(value), 1)
    return attend(nothing, nothing[:, :1], value[None, None], scale=0, bias=bias, backend=backend, **words)[0]


def leak(alpha, grid):
    """What a head that attends to the middle of an image sees of everything else."""
    place = grid[0] // 2 * grid[1] + grid[1] // 2
    value = torch.ones(grid[0] * grid[1], 1, dtype=torch.float64)
    value[place] = 0
    bias = Quadratic(1, grid, centre=[[0, 0]], alpha=alpha, dtype=torch.float64)
    return mean(bias, value)[0, place, 0].item()


@pytest.mark.parametrize("alpha", LEAKS)
def test_the_leakage_of_a_soft_head_follows_the_theta_function(alpha):
    line, plane = LEAKS[alpha]
    assert leak(alpha, (1, 41)) == pytest.approx(line, rel=1e-7, abs=1e-13)
    assert leak(alpha, (31, 41)) == pytest.approx(plane, rel=1e-7, abs=1e-13)


@pytest.mark.parametrize("bound", LEAST)
def test_the_least_alpha_for_a_leak_is_exact_and_below_its_safe_bound(bound):
    assert leak(LEAST[bound], (21, 23)) == pytest.approx(bound, rel=1e-6)
    assert LEAST[bound] < math.log(4 / bound)


def test_edges_and_corners_leak_less():
    grid = (21, 23)
    bias = Quadratic(1, grid, centre=[[0, 0]], alpha=4.0, dtype=torch.float64)
    found = []
    for place in (10 * 23 + 11, 10 * 23, 0):
        value = torch.ones(21 * 23, 1, dtype=torch.float64)
        value[place] = 0
        found.append(mean(bias, value)[0, place, 0].item())
    assert found == pytest.approx([0.06943, 0.05269, 0.03565], abs=5e-6)


def test_in_single_precision_104_is_bit_by_bit_a_copy_and_88_is_not():
    grid, place = (5, 7), 17
    value = torch.zeros(35, 1)
    value[place] = 1.0
    spike = {
        alpha: mean(Quadratic(1, grid, centre=[[0, 0]], alpha=alpha), value)[0, :, 0].detach()
        for alpha in (104.0, 88.0)
    }
    assert set(spike[104.0].tolist()) == {0.0, 1.0}
    assert torch.equal(spike[104.0], mean(Shift(1, [[0, 0]], grid), value)[0, :, 0])
    # e^-88 is a number below the smallest normal one; where such numbers are flushed to zero there is nothing to see
    if torch.tensor(-88.0).exp() > 0:
        assert 0 < spike[88.0][place + 1] < 1e-37


@pytest.mark.parametrize("backend", ["positional", "reference"])
def test_half_way_between_two_positions_weights_are_shared_at_any_steepness(backend):
    value = torch.arange(7.0, dtype=torch.float64)[:, None]
    for alpha in (0.5, 40.0, 5000.0):
        bias = Quadratic(1, (1, 7), centre=[[0, 0.5]], alpha=alpha, dtype=torch.float64)
        weight = mean(bias, torch.eye(7, dtype=torch.float64), backend)[0]
        assert torch.allclose(weight[3, 3], weight[3, 4], rtol=1e-12)
        if alpha > 1000:
            assert torch.allclose(mean(bias, value, backend)[0, :6, 0], value[:6, 0] + 0.5)


def test_a_head_attends_to_its_centre_only_while_it_is_soft():
    """Moments of a discrete normal distribution: the centre and 1 / (2 alpha) up to alpha 1/2, and not beyond."""
    place = torch.arange(61, dtype=torch.float64)
    value = torch.stack((place, place.square()), -1)

    def moments(alpha, centre):
        bias = Quadratic(1, (1, 61), centre=[[0, centre]], alpha=alpha, dtype=torch.float64)
        first, second = mean(bias, value)[0, 30].tolist()
        return first - 30, second - first**2

    for centre in (0.0, 0.25, 1.7):
        mean_, variance = moments(0.5, centre)
        assert mean_ == pytest.approx(centre, abs=2.2e-7)
        assert variance == pytest.approx(1.0, abs=2e-6)
    assert moments(2.0, 0.25)[0] == pytest.approx(0.2274, abs=5e-5)


def test_the_quadratic_encoding_of_four_terms_is_the_completed_square():
    """`v . r` with `v = -alpha (1, -2 c_1, -2 c_2)` and `r = (|delta|^2, delta_1, delta_2)` differs by a constant."""
    from regard.biases import quadratic_encoding

    alpha, centre = 0.7, (1.3, -0.6)
    four = TransformerXL(1, 3, quadratic_encoding, grid=(5, 7), scale=1.0, dtype=torch.float64)
    with torch.no_grad():
        four.projection.copy_(torch.eye(3)[None])
        four.u.zero_()
        four.v.copy_(-alpha * torch.tensor([[1.0, -2 * centre[0], -2 * centre[1]]], dtype=torch.float64))
    square = Quadratic(1, (5, 7), centre=[centre], alpha=alpha, dtype=torch.float64)
    value = torch.randn(35, 3, dtype=torch.float64)
    nothing = torch.zeros(1, 1, 35, 3, dtype=torch.float64)
    expected = attend(nothing, nothing, value[None, None], scale=0, bias=four, backend="reference")[0]
    assert torch.allclose(mean(square, value), expected, rtol=0, atol=1e-12)


def compared(bias, lengths, dtype, kv_heads=2, scale=0.4):
    """Output and gradients with content, by features and by the reference in float64."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, 4, lengths[0], 5), (2, kv_heads, lengths[1], 5), (2, kv_heads, lengths[1], 7)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    for backend, precision in (("positional", dtype), ("reference", torch.float64)):
        tensors, hill = [tensor.to(precision).requires_grad_() for tensor in made], bias.to(precision)
        output = attend(*tensors, scale=scale, bias=hill, backend=backend)
        grad_output = torch.arange(output.numel()).reshape(output.shape).cos().to(precision)
        slopes = torch.autograd.grad(output, [*tensors, *hill.parameters()], grad_output)
        yield [part.detach().double() for part in (output, *slopes)]


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", [Quadratic, Gaussian])
@pytest.mark.parametrize(
    ("grid", "lengths"), [((5, 7), (35, 35)), ((5, 7), (11, 35)), (None, (13, 17)), (None, (17, 13))]
)
def test_a_hill_added_to_content_is_ordinary_attention_with_more_features(
    kind, grid, lengths, dtype, kernels, monkeypatch
):
    if kernels and library.missing() is not None:
        pytest.skip(f"no kernels: {library.missing()}")
    monkeypatch.setattr(position_features, "_has_kernels", lambda query: kernels)
    bias = kind(4, grid, generator=torch.Generator().manual_seed(1))
    found, truth = compared(bias, lengths, dtype)
    # Terms of up to 2 alpha |place| |key| cancel: 2 x 0.5 x 17 x 9. Gradients are sums over 35 queries of 7 channels.
    eps = torch.finfo(dtype).eps
    for mine, theirs in zip(found, truth, strict=True):
        assert (mine - theirs).abs().max() <= 8 * 153 * eps * max(1.0, float(theirs.abs().max())) * 4


@pytest.mark.parametrize("kernels", [True, False])
def test_with_content_what_is_not_a_number_is_seen_by_all(kernels, monkeypatch):
    if kernels and library.missing() is not None:
        pytest.skip(f"no kernels: {library.missing()}")
    monkeypatch.setattr(position_features, "_has_kernels", lambda query: kernels)
    bias = Quadratic(2, (3, 5))
    for which in range(3):
        tensors = list(torch.randn(3, 1, 2, 15, 4).unbind())
        tensors[which][0, 1, 6, 2] = torch.nan
        words = dict(scale=0.3, bias=bias)
        found = attend(*tensors, backend="positional", **words)
        assert torch.equal(found.isnan(), attend(*tensors, backend="reference", **words).isnan())


PEAK = """
import torch
from regard import Gaussian, Quadratic, RelativeTable, attend

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def train(kind, rows, columns):
    line = kind is RelativeTable
    bias = kind(3, 64) if line else kind(3, (rows, columns), centre=[[0, 1], [2, 0], [-1, -3]])
    value = torch.randn(1, 1, rows * columns, 8, requires_grad=True)
    nothing = torch.zeros(1, 3, rows * columns, 1)
    attend(nothing, nothing[:, :1], value, scale=0, bias=bias, backend="positional").sum().backward()

for kind, size in ((Quadratic, (127, 131)), (Gaussian, (127, 131)), (RelativeTable, (1, 4999))):
    train(kind, 7, 5)
    with open("/proc/self/clear_refs", "w") as peaks:
        peaks.write("5")
    before = status("VmRSS")
    train(kind, *size)
    print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc as Linux does")
def test_memory_grows_with_the_pixels_and_not_with_their_square():
    import subprocess

    done = subprocess.run([sys.executable, "-W", "error", "-c", PEAK], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for grown in map(int, done.stdout.split()):
        # On the grids 3 heads of 8 channels are 96 bytes a pixel; the square would be 3.3 GB, that of the line 300 MB.
        # Transforms hold four times the pixels in twice the precision, of a bounded number of channels.
        assert grown < 100 * 2**20, grown


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself
@pytest.mark.parametrize("kind", [Quadratic, RelativeTable])
def test_torch_compile_sees_through_two_softmaxes_and_takes_a_ratio_as_one_step(kind):
    bias = kind(2, grid=(3, 5))
    value, nothing = torch.randn(1, 2, 15, 3), torch.zeros(1, 2, 15, 1)

    @torch.compile(backend="eager", fullgraph=kind is Quadratic)
    def compiled(value):
        return 2 * attend(nothing, nothing, value, scale=0, bias=bias, backend="positional")

    expected = 2 * attend(nothing, nothing, value, scale=0, bias=bias, backend="positional")
    assert torch.equal(compiled(value), expected)


@pytest.mark.parametrize("backend", ["positional", "reference"])
def test_minus_infinity_in_learned_tables_hides_and_may_empty_a_row(backend):
    bias = RowColumn(1, (3, 5), dtype=torch.float64)
    with torch.no_grad():
        bias.row[0, 2:] = -torch.inf  # only rows above are seen: the first row sees nothing
    value = torch.randn(15, 2, dtype=torch.float64)
    value[14] = torch.nan  # no query attends to the last
    output = mean(bias, value, backend)[0]
    assert not output[:5].any()
    assert output.isfinite().all()
    assert torch.allclose(output, mean(bias, value, "reference")[0], rtol=0, atol=1e-13)
