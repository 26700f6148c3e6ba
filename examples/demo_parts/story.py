"""The report of the demo: one HTML page."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

from demo_parts.convolution import Converted
from demo_parts.costs import Mixing, ModelCost
from regard import __version__
from regard.laws import Report
from regard.layers import head_profile
from regard.render.chart import share_chart
from regard.render.markup import Markup
from regard.render.page import Page, code, code_block, paragraph, tiles
from regard.render.table import Bar, Cell, Column, Table
from regard.train import Images, Run
from regard.visualize import ExplorerModel, make_explorer, make_player
from regard.visualize.kernels import effective_kernels, find_strongest_pairs, kernel_figure

OUTCOMES = {"holds": "holds", "broken": "broken", "flaky": "flaky", "undecided": "undecided", "not applicable": "–"}
KERNELS = 8
WIDE = 3  # standard deviations of a wide head, in pixels
CNN_REACH, LEARNED_REACH = 2, 4  # pixels around the query


@dataclass
class Results:
    """The contents of the page."""

    spatial: Run
    vit: Run
    converted: Converted
    laws: dict[str, Report]
    mistake: str
    prices: list[ModelCost]
    mixing: list[Mixing]
    seconds: dict[str, float]


def report(results: Results) -> Page:
    """The whole page."""
    spatial, vit = results.spatial, results.vit
    page = Page(
        headline(results),
        title="Regard: positional attention learned on digits",
        kicker=f"Regard {__version__} · {spatial.data.name} · {len(spatial.data.train):,} training and "
        f"{len(spatial.data.test)} test images",
        lead=Markup(
            "A transformer without convolutions classifies handwritten digits. Each of its heads attends to a learned "
            "position relative to the query, and <b>the player below shows how these positions were learned</b>. Then "
            "the convolutions of a CNN are converted to attention without changing a prediction."
        ),
    )
    page.open_with(tiles(facts(results)))
    page.add("Learned head positions", *heads(spatial))
    page.add("Attention maps", *pixels(spatial, vit))
    page.add("Accuracy during training", *learning(spatial, vit))
    page.add("A convolution is attention", *convolutions(results.converted, spatial))
    page.add("Laws", *laws(results.laws, results.mistake))
    page.add("Cost", *costs(results.prices, results.mixing))
    page.close_with(*closing(results))
    return page


def headline(results: Results) -> str:
    run = results.spatial
    return f"{count_heads(run)} positional heads classify {percent(run.accuracy)} of the digits correctly"


def count_heads(run: Run) -> int:
    return sum(each.heads for each in run.evaluations[-1].head_profiles.values())


def facts(results: Results) -> list[tuple[str, str]]:
    holding = sum(v.outcome == "holds" for report in results.laws.values() for v in report.verdicts)
    checked = sum(v.outcome != "not applicable" for report in results.laws.values() for v in report.verdicts)
    converted = results.converted
    return [
        (
            percent(results.spatial.accuracy),
            "test accuracy of the spatial transformer, whose heads attend by position alone",
        ),
        (percent(results.vit.accuracy), "test accuracy of a small vision transformer, whose heads attend by content"),
        (f"{converted.agreed} of {converted.images}", "predictions of a CNN unchanged by its conversion to attention"),
        (f"{holding} of {checked}", "checks of laws that the models claim found no counterexample"),
        (duration(sum(results.seconds.values())), "of computing for this page, including training"),
    ]


def heads(run: Run) -> list[str]:
    epochs = [epoch.head_profiles for epoch in run.evaluations]
    labels = [f"epoch {epoch.number} of {run.recipe.epochs} · {percent(epoch.accuracy)}" for epoch in run.evaluations]
    last = run.evaluations[-1].head_profiles
    moved = [
        float((last[name].mean - run.evaluations[0].head_profiles[name].mean).norm(dim=-1).mean()) for name in last
    ]
    narrow = sum(int((each.weights.flatten(1).amax(-1) > 0.5).sum()) for each in last.values())
    wide = sum(int((each.width > WIDE).sum()) for each in last.values())
    how = ", ".join(f"{far:.1f}" for far in moved)
    return [
        paragraph(
            "Each dot is a head, relative to the query (the orange square). The centre and the width of a head are "
            f"parameters. In this run the heads of the {len(moved)} layers moved by {how} pixels on average. {narrow} "
            f"of {count_heads(run)} heads have over half of their weight on one pixel, like a tap of a convolution; "
            f"{wide} have a standard deviation above {WIDE} pixels and average over much of the image.",
        ),
        make_player(
            epochs,
            labels,
            "One panel for each layer, one color and number for each head. The dot is the centre of mass of the head's "
            "attention weights; half of them lie in the filled shape, nine tenths within the line. Drag the slider or "
            "press play; hover over a head to see it alone.",
            eager=True,
        ),
    ]


def pixels(spatial: Run, vit: Run) -> list[str]:
    data = spatial.data
    chosen = one_of_each(data)
    images = data.test.images[chosen]
    shown = data.normalise(images)
    names = [f"a {data.names[label]}" for label in data.test.labels[chosen].tolist()]
    models = [
        ExplorerModel("Spatial transformer", spatial.model, shown, predict(spatial, shown)),
        ExplorerModel("Vision transformer", vit.model, shown, predict(vit, shown)),
    ]
    return [
        paragraph(
            "Choose a digit and move over it: every small image is one head, and blue is its attention weight from the "
            "selected pixel. The maps of the spatial transformer are the same for every image; those of the vision "
            "transformer depend on the content."
        ),
        make_explorer(
            models,
            images,
            names,
            "Test images. The number is the largest weight of a head; each map has its own scale. Arrow keys move the "
            "selected pixel, too.",
        ),
    ]


def learning(spatial: Run, vit: Run) -> list[str]:
    series = {
        f"Spatial transformer, {spatial.recipe.epochs} epochs": [epoch.accuracy for epoch in spatial.evaluations],
        f"Vision transformer, {vit.recipe.epochs} epochs": [epoch.accuracy for epoch in vit.evaluations],
    }
    seconds = f"{duration(spatial.seconds)} and {duration(vit.seconds)}"
    caption = f"Test accuracy from the initial model to the last epoch; training took {seconds}."
    return [share_chart(series, caption, ("untrained", "last epoch"), 0.0, 1.0)]


def convolutions(converted: Converted, spatial: Run) -> list[str]:
    conv, layer = converted.network[0], converted.attentive[0]
    pairs = find_strongest_pairs(conv, KERNELS)
    first_layer = next(iter(spatial.evaluations[-1].head_profiles.values()))
    rows = {
        "Kernels of a trained CNN": effective_kernels(conv, pairs, CNN_REACH),
        "The same layer converted to attention: its effective kernels": effective_kernels(
            head_profile(layer), pairs, CNN_REACH
        ),
    }
    learned = {
        "Effective kernels of the spatial transformer's first layer": effective_kernels(
            first_layer, find_strongest_pairs(first_layer, KERNELS), LEARNED_REACH
        )
    }
    cases = [(case.name, str(case.heads), power(case.error)) for case in converted.cases]
    return [
        paragraph(
            "Nine heads that each attend to one fixed offset compute a 3 × 3 convolution (Cordonnier, Loukas and Jaggi "
            "2020). ",
            code("convert_network(cnn)"),
            f" replaced both convolutions of a CNN with {percent(converted.accuracy)} test accuracy. Logits differ by "
            f"{power(converted.error)} at most, in float32, and {converted.agreed} of {converted.images} predictions "
            "are the same.",
        ),
        kernel_figure(
            rows,
            "Each square is a kernel around the query, on one scale: red is positive, blue negative, white zero. The "
            "two rows are equal.",
        ),
        kernel_figure(
            learned,
            "Heads with learned positions have effective kernels too: smooth, and of any size.",
            shared=False,
        ),
        html_table(["Convolution", "Heads", "Largest difference, float64"], cases),
    ]


def laws(reports: dict[str, Report], mistake: str) -> list[str]:
    names = sorted(
        {(v.id, v.slug) for report in reports.values() for v in report.verdicts}, key=lambda pair: int(pair[0][1:])
    )
    rows = []
    for number, slug in names:
        cells = []
        for report in reports.values():
            found = next((v for v in report.verdicts if v.slug == slug), None)
            if found is None or found.outcome == "not applicable":
                cells.append(Cell("not claimed" if found is None else "–", "silent"))
            else:
                kind = "flaky" if found.outcome == "undecided" else found.outcome
                cells.append(Cell(f"{OUTCOMES[found.outcome]} · {found.tried} cases", kind))
        rows.append((f"{number} {slug}", *cells))
    return [
        paragraph(
            "Faults in attention are silent: a model whose mask is off by one still trains. ",
            code("check(model)"),
            " searches for the smallest case in which a model breaks a law that it claims. For the trained models:",
        ),
        Table([Column("Law"), *map(Column, reports)], rows).to_html(),
        paragraph("A layer whose causal mask is off by one gets this report:"),
        code_block(mistake),
    ]


def costs(prices: list[ModelCost], mixing: list[Mixing]) -> list[str]:
    rows = [
        (
            each.name,
            f"{each.parameters:,}",
            f"{each.macs:,}",
            f"{each.saved_bytes / 1024:,.0f} KiB",
            f"{each.milliseconds:.2f} ms",
        )
        for each in prices
    ]
    largest = max(each.pairs / each.separable for each in mixing)
    ratios = [
        (
            f"{each.side} × {each.side}",
            f"{each.pairs / 1e6:,.0f} M",
            f"{each.separable / 1e6:,.0f} M",
            f"{each.pairs / each.separable:.1f} ×",
            Bar(each.pairs / each.separable / largest, f"{each.pairs / each.separable:.1f} times fewer"),
        )
        for each in mixing
    ]
    return [
        paragraph("Counted for one image of 8 × 8 pixels; the time is measured in batches of the whole test set."),
        html_table(["Model", "Parameters", "Multiply-adds", "Saved activations", "Measured time"], rows),
        paragraph(
            "If the score of a head is a sum of a row term and a column term, its softmax is a product. Regard then "
            "averages along one axis after the other instead of over all pairs of pixels, with the same result. The "
            "saving grows with the image (multiply-adds of the whole model):"
        ),
        html_table(["Image", "All pairs", "Axis by axis", "Saved", ""], ratios),
    ]


def closing(results: Results) -> list[str]:
    steps = ", ".join(f"{name} {duration(seconds)}" for name, seconds in results.seconds.items())
    return [
        paragraph("Made by ", code("make demo"), f" with seed {results.spatial.recipe.seed}: {steps}."),
        paragraph(
            "The number of epochs, the learning rates and the augmentation were chosen on these same "
            f"{len(results.spatial.data.test)} test images, with this one seed: the accuracies are slightly "
            "optimistic, and a difference of a few images means nothing."
        ),
        paragraph(
            f"torch {torch.__version__}, Python {platform.python_version()}, one thread for each model, "
            f"{platform.machine()}. This page is one self-contained file."
        ),
    ]


# Formatting


def html_table(names: list[str], rows: list[tuple]) -> Markup:
    """A table of numbers; the first column names the rows."""
    return Table([Column(names[0]), *(Column(name, "right") for name in names[1:])], rows).to_html()


def one_of_each(data: Images) -> list[int]:
    """The first test image of every class."""
    labels = data.test.labels
    return [int((labels == label).nonzero()[0]) for label in range(len(data.names)) if bool((labels == label).any())]


def predict(run: Run, shown: torch.Tensor) -> list[str]:
    with torch.no_grad():
        probability, guess = run.model(shown).softmax(-1).max(-1)
    return [
        f"Prediction: {run.data.names[index]}, with probability {percent(share)}."
        for index, share in zip(guess.tolist(), probability.tolist(), strict=True)
    ]


def percent(share: float) -> str:
    return f"{100 * share:.1f}\u202f%" if share < 0.9995 else "100\u202f%"


def power(number: float) -> str:
    """9e-16 as a power of ten."""
    digit, _, exponent = f"{number:.0e}".partition("e")
    return f"{digit} · 10{str(int(exponent)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}" if number else "0"


def duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"
