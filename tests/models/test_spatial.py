"""Cordonnier's transformer against the published formulas, pair by pair, and against the published counts."""

import math

import pytest
import torch
from agreement import refused
from plain import slow_but
from torch.utils.flop_counter import FlopCounterMode

from regard.biases import quadratic_encoding
from regard.errors import ConfigError, InputError
from regard.models.spatial import POSITIONS, SpatialConfig, SpatialHeads, SpatialTransformer

GRID = (3, 5)
DIM = 10
HEADS = 7


def make(position, *, dtype=torch.float64, **words):
    torch.manual_seed(5)
    sizes = dict(image=(6, 10), channels=2, dim=DIM, layers=2, heads=HEADS, hidden_dim=11, classes=13) | words
    model = SpatialTransformer(SpatialConfig(position=position, **sizes)).to(dtype)
    with torch.no_grad():  # norms and biases that do nothing would hide mistakes
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def images(dtype=torch.float64, batch=3):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(batch, 2, 6, 10, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.fixture(autouse=True)
def one_thread():
    """Everything here is small: a second thread would only be waited for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# The published formulas, written out: one score at a time, nothing shared with the model but its numbers.


def score(position, p, layer, head, query, key, x):
    """The score of one pair of tokens, `(batch,)`; query and key are (row, column)."""
    name = f"blocks.{layer}.attention.position."
    delta = torch.tensor([key[0] - query[0], key[1] - query[1]], dtype=x.dtype)
    if position == "quadratic":
        alpha = p[name + "spread"][head] ** 2 / 2
        return (-alpha * ((delta - p[name + "centre"][head]) ** 2).sum()).expand(len(x))
    if position == "gaussian":
        root = p[name + "root"][head]
        off = delta - p[name + "centre"][head]
        return (-torch.einsum("i,ij,j->", off, root @ root.T, off) / 2).expand(len(x))
    row = p[name + "row"][key[0] - query[0] + GRID[0] - 1]
    column = p[name + "column"][key[1] - query[1] + GRID[1] - 1]
    if position == "learned":
        by_row = torch.einsum("d,d->", p[name + "row_head"][head], row)
        return (by_row + torch.einsum("d,d->", p[name + "column_head"][head], column)).expand(len(x))
    mine = slice(head * DIM, (head + 1) * DIM)
    name = f"blocks.{layer}.attention."
    q = x[:, query[0], query[1]] @ p[name + "query.weight"][mine].T + p[name + "query.bias"][mine]
    k = x[:, key[0], key[1]] @ p[name + "key.weight"][mine].T + p[name + "key.bias"][mine]
    by_content = torch.einsum("bd,bd->b", q, k)
    return (by_content + torch.einsum("bd,d->b", q, torch.cat((row, column)))) / math.sqrt(DIM)


def attention_square(position, p, layer, x):
    """All weights, `(batch, head, query row, query column, key row, key column)`."""
    cells = [(row, column) for row in range(GRID[0]) for column in range(GRID[1])]
    flat = [score(position, p, layer, head, q, k, x) for head in range(HEADS) for q in cells for k in cells]
    exponentials = torch.stack(flat, 1).reshape(len(x), HEADS, *GRID, *GRID).exp()
    return exponentials / exponentials.sum((-1, -2), keepdim=True)


def norm(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-12).sqrt() * weight + bias


def logits(position, p, image):
    batch = len(image)
    pixels = image.reshape(batch, 2, GRID[0], 2, GRID[1], 2)
    x = pixels.permute(0, 2, 4, 1, 3, 5).reshape(batch, *GRID, 8) @ p["embedding.weight"].T + p["embedding.bias"]
    for layer in range(2):
        name = f"blocks.{layer}."
        weight = attention_square(position, p, layer, x)
        attended = torch.einsum("bhrckl,bkld->brchd", weight, x).reshape(batch, *GRID, HEADS * DIM)
        a = attended @ p[name + "attention.value.weight"].T + p[name + "attention.value.bias"]
        a = a @ p[name + "dense.weight"].T + p[name + "dense.bias"]
        x = norm(x + a, p[name + "attention_norm.weight"], p[name + "attention_norm.bias"])
        hidden = x @ p[name + "inner.weight"].T + p[name + "inner.bias"]
        hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
        out = hidden @ p[name + "outer.weight"].T + p[name + "outer.bias"]
        x = norm(x + out, p[name + "norm.weight"], p[name + "norm.bias"])
    return x.sum((1, 2)) / math.prod(GRID) @ p["classifier.weight"].T + p["classifier.bias"]


def outcome(compute, image, parameters):
    out = compute(image)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).cos().to(out.dtype)
    return [out, *torch.autograd.grad(out, [image, *parameters.values()], upstream)]


@pytest.mark.parametrize("position", slow_but(("quadratic", "content"), POSITIONS))
def test_the_model_is_the_published_formulas_forward_and_backward(position):
    model, image = make(position), images()
    parameters = dict(model.named_parameters())
    found = outcome(model, image, parameters)
    expected = outcome(lambda image: logits(position, parameters, image), image, parameters)
    for name, mine, truth in zip(["logits", "image", *parameters], found, expected, strict=True):
        assert torch.allclose(mine, truth, rtol=1e-10, atol=1e-10), name
        # A key's bias adds the same to all scores of a query: it has no gradient. Everything else must have one.
        assert truth.abs().max() > 1e-6 or name.endswith("key.bias")


@pytest.mark.parametrize("position", POSITIONS)
def test_in_float32_the_model_stays_within_its_rounding(position):
    model = make(position)
    truth = model(images())
    found = model.float()(images(torch.float32))
    # Each of the layers' sums of n terms loses at most n units in the last place of what it adds up; normalised
    # tokens are of size one, and the Lipschitz constant of a block is below ten at these sizes.
    terms = 2 * (HEADS * DIM + DIM + DIM + 11 + math.prod(GRID))
    assert (found - truth).abs().max() < torch.finfo(torch.float32).eps * terms * 10 * truth.abs().max()


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("image", [(2, 2), (2, 14), (10, 2)])
def test_one_token_and_single_rows_and_columns_work(position, image):
    model = make(position, image=image)
    x = torch.randn(2, 2, *image, dtype=torch.float64)
    attention = model.blocks[0].attention
    x = model.embedding(torch.nn.functional.pixel_unshuffle(x, 2).permute(0, 2, 3, 1))
    slow = attention.value((attention.weights(x) @ x.flatten(1, 2)[:, None]).transpose(1, 2).reshape(*x.shape[:3], -1))
    assert torch.allclose(attention(x), slow, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("position", POSITIONS)
def test_every_layer_may_have_another_number_of_heads(position, tmp_path):
    model = make(position, heads=(3, 7), dtype=torch.float32)
    assert [block.attention.heads for block in model.blocks] == [3, 7]
    model.save_pretrained(tmp_path)
    again = SpatialTransformer.from_pretrained(tmp_path)
    assert again.config == model.config
    assert again.config.layer_heads == (3, 7)
    image = images(torch.float32)
    assert torch.equal(again(image), model(image))
    assert make(position, heads=(7, 7)).config.layer_heads == make(position).config.layer_heads
    for wrong in ((3,), (3, 7, 5), (3, 0)):
        with refused(ConfigError, "at least one head"):
            make(position, heads=wrong)


@pytest.mark.parametrize("position", POSITIONS)
def test_the_weights_of_every_query_sum_to_one(position):
    model, x = make(position), torch.randn(2, *GRID, DIM, dtype=torch.float64)
    weight = model.blocks[1].attention.weights(x)
    assert weight.shape == (2 if position == "content" else 1, HEADS, 15, 15)
    assert bool((weight > 0).all())
    assert torch.allclose(weight.sum(-1), torch.ones_like(weight[..., 0]), rtol=0, atol=4e-16 * 15)


@pytest.mark.parametrize(
    ("position", "heads", "count"),
    [
        ("quadratic", 9, 12_086_844),
        ("gaussian", 9, 12_087_006),
        ("learned", 9, 12_278_682),
        ("content", 9, 29_484_282),
        ("quadratic", 16, 18_806_970),
    ],
)
def test_the_parameters_are_as_many_as_the_authors_had(position, heads, count):
    with torch.device("meta"):
        model = SpatialTransformer(SpatialConfig(position=position, heads=heads))
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_the_products_are_those_of_the_linear_layers_and_of_a_separable_attention():
    with torch.device("meta"):
        model = SpatialTransformer(SpatialConfig()).eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.empty(1, 3, 32, 32))
    layer = 3600 * 400 + 400 * 400 + 2 * 400 * 512
    linear = 256 * (12 * 400 + 6 * layer) + 4000
    assert 2 * linear == 6_175_956_800  # published as 6.2 billion
    assert counter.get_total_flops() == 2 * (linear + 176_947_200)


def test_heads_start_where_the_authors_let_them_start():
    torch.manual_seed(3)
    heads = 4000
    bias = SpatialHeads(SpatialConfig(dim=2, heads=heads)).position
    centre, alpha = bias.centre.detach(), bias.alpha.detach()
    # Five standard errors of a mean, std / sqrt(n), and of a standard deviation, std / sqrt(2 n).
    assert abs(float(centre.mean())) < 5 * 2 / math.sqrt(2 * heads)
    assert abs(float(centre.std()) - 2) < 5 * 2 / math.sqrt(4 * heads)
    assert abs(float(alpha.mean()) - 0.5) < 5 * 0.01 / math.sqrt(heads) + 1e-4
    assert abs(float(alpha.std()) - 0.01) < 5 * 0.01 / math.sqrt(2 * heads) + 1e-4
    root = SpatialHeads(SpatialConfig("gaussian", dim=2, heads=heads)).position.root.detach()
    assert abs(float((root - torch.eye(2)).std()) - 0.01) < 5 * 0.01 / math.sqrt(8 * heads)


def test_the_quadratic_encoding_and_the_completed_square_are_one_attention():
    attention = make("quadratic").blocks[0].attention
    centre, alpha = attention.position.centre.detach(), attention.position.alpha.detach()
    token = torch.arange(15)
    down, across = (token // 5)[None] - (token // 5)[:, None], (token % 5)[None] - (token % 5)[:, None]
    # v = -alpha (1, -2 centre_1, -2 centre_2) meets r = (|delta|^2, delta_1, delta_2).
    v = -alpha[:, None] * torch.cat((torch.ones(HEADS, 1, dtype=torch.float64), -2 * centre), 1)
    encoded = torch.einsum("qkf,hf->hqk", quadratic_encoding(down, across).double(), v)
    inner = down * centre[:, :1, None] + across * centre[:, 1:, None]
    closed = -alpha[:, None, None] * (down**2 + across**2 - 2 * inner)
    assert torch.allclose(encoded, closed, rtol=0, atol=1e-12)
    completed = -alpha[:, None, None] * ((down - centre[:, :1, None]) ** 2 + (across - centre[:, 1:, None]) ** 2)
    square = alpha * centre.square().sum(1)
    assert torch.allclose(completed, closed - square[:, None, None], rtol=0, atol=1e-12)
    weight = attention.weights(torch.zeros(1, *GRID, DIM, dtype=torch.float64))[0].detach()
    assert torch.allclose(closed.softmax(-1), weight, rtol=0, atol=1e-12)
    assert torch.allclose(completed.softmax(-1), weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("position", POSITIONS)
def test_dropping_weights_takes_the_square_and_nothing_else_changes(position):
    x = torch.randn(2, *GRID, DIM, dtype=torch.float64)
    gentle = make(position, attention_dropout=1e-14).blocks[0].attention
    assert torch.allclose(gentle.train()(x), gentle.eval()(x), rtol=1e-12, atol=1e-12)
    rough = make(position, attention_dropout=0.5).blocks[0].attention
    assert torch.equal(rough.eval()(x), gentle.eval()(x))
    torch.manual_seed(0)
    with torch.no_grad():
        drawn = torch.stack([rough.train()(x) for _ in range(200)])
    error = drawn.std(0) / math.sqrt(200)
    assert not torch.equal(drawn[0], drawn[1])
    twins = rough.train()(x[:1].expand(2, -1, -1, -1))
    assert not torch.equal(twins[0], twins[1])
    assert bool(((drawn.mean(0) - rough.eval()(x)).abs() < 6 * error).all())


def test_a_nine_head_layer_with_hard_centres_is_a_convolution_inside_the_image():
    attention = SpatialHeads(SpatialConfig(image=(10, 14), dim=3, heads=9)).double().eval()
    taps = [(row, column) for row in (-1, 0, 1) for column in (-1, 0, 1)]
    with torch.no_grad():
        attention.position.centre.copy_(torch.tensor(taps))
        attention.position.spread.fill_(math.sqrt(2 * 40.0))
    x = torch.randn(2, 5, 7, 3, dtype=torch.float64)
    kernel = attention.value.weight.reshape(3, 3, 3, 3).permute(0, 3, 1, 2)  # out, tap row, tap column, in
    convolved = torch.nn.functional.conv2d(x.permute(0, 3, 1, 2), kernel, attention.value.bias)
    # Leak 1.7e-17 for each head at alpha = 40.
    assert torch.allclose(attention(x)[:, 1:-1, 1:-1], convolved.permute(0, 2, 3, 1), rtol=0, atol=1e-13)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="known are 'quadratic'"):
        SpatialConfig(position="sinusoidal")
    with pytest.raises(ConfigError, match="whole patches"):
        SpatialConfig(image=(32, 31))
    with pytest.raises(ConfigError, match="an even dim"):
        SpatialConfig(position="content", dim=7)
    with pytest.raises(InputError, match="images of shape"):
        make("learned")(torch.zeros(1, 2, 10, 6, dtype=torch.float64))
    for dtype, word in ((torch.uint8, "floating-point"), (torch.float32, "different precisions")):
        with refused(InputError, word, str(dtype)):
            make("learned")(torch.zeros(1, 2, 6, 10, dtype=dtype))


def test_a_configuration_comes_back_from_its_dictionary():
    config = SpatialConfig("learned", image=(6, 10), heads=5)
    assert SpatialConfig.from_dict(config.to_dict()) == config
