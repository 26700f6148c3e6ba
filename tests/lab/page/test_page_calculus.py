"""The page's own arithmetic, run in a real browser, beside `regard.calculus` and `regard.attend`."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from regard import Causal, Full, Quadratic, attend, calculus
from regard.render.components import component_names

IMPORT = "async ([name, given]) => { const all = await import('/components/calculus.js'); return all[name](...given); }"


@pytest.fixture(scope="module")
def compute(browser, lab):
    """A function of calculus.js on plain numbers; infinities travel as words."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{lab}#play?figure=scale")

    def compute(name, *given):
        return page.evaluate(IMPORT, [name, list(given)])

    yield compute
    context.close()


def assert_close(found, expected, tolerance=1e-13):
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64), torch.as_tensor(expected).double(), rtol=tolerance, atol=1e-15
    )


ROWS = {
    "one": [0.7],
    "usual": [2.0, 1.0, 0.5, 0.0, -1.0],
    "ties": [3.0, 1.0, 3.0],
    "saturated": [900.0, -3.0, 0.0, 5.0],
    "small": [1e-9, 0.0, -1e-9],
}
BETAS = [0.0, 1.0, 0.25, 7.5, -2.0]


@pytest.mark.parametrize("row", sorted(ROWS))
def test_softmax_entropy_and_jacobian_are_those_of_the_calculus(compute, row):
    scores = torch.tensor(ROWS[row], dtype=torch.float64)
    for beta in BETAS:
        assert_close(compute("softmax", ROWS[row], beta), calculus.softmax(scores, beta))
        assert_close(compute("entropy", ROWS[row], beta), calculus.entropy(scores, beta), 1e-11)
        assert_close(compute("entropySlope", ROWS[row], beta), calculus.entropy_slope(scores, beta), 1e-11)
        assert_close(compute("logsumexp", ROWS[row], beta), calculus.logsumexp(scores, beta))
        assert_close(compute("jacobian", ROWS[row], beta), calculus.jacobian(scores, beta), 1e-12)


def test_softmax_in_its_limits(compute):
    scores = torch.tensor(ROWS["ties"], dtype=torch.float64)
    for beta in (math.inf, -math.inf):
        assert_close(compute("softmax", ROWS["ties"], beta), calculus.softmax(scores, beta))
        assert_close(compute("entropy", ROWS["ties"], beta), calculus.entropy(scores, beta))
    hidden = [-math.inf, 1.0, 2.0]
    for beta in BETAS:
        assert_close(
            compute("softmax", hidden, beta), calculus.softmax(torch.tensor(hidden, dtype=torch.float64), beta)
        )
    assert compute("softmax", [-math.inf, -math.inf], 1) == [0, 0]
    assert compute("softmax", [], 1) == []


def test_a_comparison_can_fail(compute):
    with pytest.raises(AssertionError):
        assert_close(
            compute("softmax", ROWS["usual"], 1.0),
            calculus.softmax(torch.tensor(ROWS["usual"], dtype=torch.float64), 1.01),
        )


@pytest.mark.parametrize(
    "change", [{"shift": [0.3, -1.1, 2.0]}, {"stretch": 3.5}, {"stretch": -40.0}, {"stretch": 0.0}]
)
def test_a_changed_key_follows_the_law_and_the_run(compute, change):
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(1, 3, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 5, 3, generator=generator, dtype=torch.float64)
    for index in range(5):
        weights = calculus.softmax(query @ key.mT, 1 / math.sqrt(3))
        given = {
            name: torch.tensor(one, dtype=torch.float64) if isinstance(one, list) else one
            for name, one in change.items()
        }
        score = calculus.score_change(query, key[index], **given)
        assert_close(compute("scoreChange", query[0].tolist(), key[index].tolist(), change), score[0])
        law = calculus.perturb_key(weights[:, index], weights @ value, value[index], score)
        found = compute(
            "perturbKey",
            weights[0, index].item(),
            (weights @ value)[0].tolist(),
            value[index].tolist(),
            score[0].item(),
        )
        for name, expected in law._asdict().items():
            assert_close(found[name], expected[0], 1e-11)
        new_weights, output = calculus.perturb_attention(query, key, value, index, **given)
        changed = key.clone()
        changed[index] = key[index] + given["shift"] if "shift" in given else key[index] * given["stretch"]
        run = compute("attend", query.tolist(), changed.tolist(), value.tolist())
        assert_close(run["weights"], new_weights, 1e-11)
        assert_close(run["output"], output, 1e-11)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("tokens", "dim"), [(1, 3), (7, 2), (5, 11)])
def test_softmax_and_linear_attention_are_those_of_attend(compute, tokens, dim, causal):
    generator = torch.Generator().manual_seed(7)
    query, key = torch.randn(2, tokens, dim, generator=generator, dtype=torch.float64)
    value = torch.randn(tokens, 3, generator=generator, dtype=torch.float64)
    pattern = Causal() if causal else Full()
    given = [tensor.tolist() for tensor in (query, key, value)]
    soft = compute("attend", *given, 1 / math.sqrt(dim), causal)
    linear = compute("linearAttend", *given, causal)
    batched = [tensor[None, None] for tensor in (query, key, value)]
    assert_close(soft["output"], attend(*batched, pattern=pattern)[0, 0], 1e-12)
    assert_close(linear["output"], attend(*batched, pattern=pattern, feature_map="elu1")[0, 0], 1e-12)
    weights = torch.tensor(linear["weights"], dtype=torch.float64)
    assert_close((weights @ value).tolist(), linear["output"], 1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.31, 46.0])
def test_quadratic_heads_are_those_of_the_bias_and_become_a_convolution(compute, alpha):
    rows, columns = 5, 7
    bias = Quadratic(1, grid=(rows, columns), centre=[[1, -2]], alpha=alpha, dtype=torch.float64)
    keys = torch.arange(rows * columns)
    for place in (0, 16, 34):
        scores = bias.scores(torch.tensor([[place]]), keys[None])[0].detach()
        found = compute("quadraticWeights", [rows, columns], list(divmod(place, columns)), [1, -2], alpha)
        assert_close(found, calculus.softmax(scores)[0], 1e-12)
    image = torch.rand(rows * columns, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    offsets = [[down, across] for down in (-1, 0, 1) for across in (-1, 0, 1)]
    kernel = [0.5, -1, 2, 0, 3, 0.25, -2, 1, 1]
    heads = [{"center": offset, "alpha": alpha} for offset in offsets]
    found = compute("quadraticHeads", image.tolist(), [rows, columns], heads, kernel)
    bias = Quadratic(9, grid=(rows, columns), centre=offsets, alpha=alpha, dtype=torch.float64)
    weights = calculus.softmax(bias.scores(keys[:, None], keys[None]).detach())
    expected = torch.einsum("h,hqk,k->q", torch.tensor(kernel, dtype=torch.float64), weights, image)
    # The page leaves rows out whose weight is below 1e-12.
    assert_close(found, expected, 1e-9)
    if alpha > 40:
        padded = torch.nn.functional.pad(image.view(1, 1, rows, columns), (1, 1, 1, 1), mode="replicate")
        expected = torch.nn.functional.conv2d(
            padded, torch.tensor(kernel, dtype=torch.float64).view(1, 1, 3, 3)
        ).flatten()
        assert_close(compute("convolve", image.tolist(), [rows, columns], offsets, kernel), expected, 1e-12)
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, rtol=1e-9, atol=1e-9)


def test_every_function_is_compared_here(compute):
    source = Path(__file__).read_text()
    assert "calculus.js" in component_names()
    names = compute_names(compute)
    assert len(names) > 10
    assert [name for name in names if f'"{name}"' not in source and name not in ("dot", "mix", "elu1")] == []


def compute_names(compute) -> list[str]:
    from regard.render.components import read_component

    text = read_component("calculus.js")[0].decode()
    return [line.split("(")[0].split()[-1] for line in text.splitlines() if line.startswith("export function")]
