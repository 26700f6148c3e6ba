"""The report: what was done, told on one page."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

from demo_parts.convolution import Converted
from demo_parts.costs import Mixing, Price
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

WORDS = {"holds": "holds", "broken": "broken", "flaky": "flaky", "undecided": "undecided", "not applicable": "–"}
KERNELS = 8
WIDE = 3  # standard deviations of a wide head, in pixels
CNN_REACH, LEARNED_REACH = 2, 4  # pixels around the one that asks


@dataclass
class Results:
    """All that the page tells."""

    spatial: Run
    vit: Run
    converted: Converted
    laws: dict[str, Report]
    mistake: str
    prices: list[Price]
    mixing: list[Mixing]
    seconds: dict[str, float]


def report(results: Results) -> Page:
    """The whole page."""
    spatial, vit = results.spatial, results.vit
    page = Page(
        headline(results),
        title="Regard: attention that learned where to look",
        kicker=f"Regard {__version__} · {spatial.data.name} · {len(spatial.data.train):,} images to learn from, "
        f"{len(spatial.data.test)} for the test",
        lead=Markup(
            "A transformer without a single convolution read handwritten digits. Its heads look at fixed places around "
            "each pixel, they chose these places themselves, and <b>you can watch them do it</b>. Then a real "
            "convolution became attention, and not one answer changed."
        ),
    )
    page.open_with(tiles(facts(results)))
    page.add("The heads find their places", *heads(spatial))
    page.add("Point at a pixel", *pixels(spatial, vit))
    page.add("How they learned", *learning(spatial, vit))
    page.add("A convolution is attention", *convolutions(results.converted, spatial))
    page.add("The laws", *laws(results.laws, results.mistake))
    page.add("What it costs", *costs(results.prices, results.mixing))
    page.close_with(*closing(results))
    return page


def headline(results: Results) -> str:
    run = results.spatial
    return f"{sum_of_heads(run)} heads learned where to look, and read {percent(run.accuracy)} of the digits"


def sum_of_heads(run: Run) -> int:
    return sum(each.heads for each in run.epochs[-1].head_profiles.values())


def facts(results: Results) -> list[tuple[str, str]]:
    held = sum(v.outcome == "holds" for report in results.laws.values() for v in report.verdicts)
    judged = sum(v.outcome != "not applicable" for report in results.laws.values() for v in report.verdicts)
    converted = results.converted
    return [
        (percent(results.spatial.accuracy), "of the test images read by heads that look by position alone"),
        (percent(results.vit.accuracy), "by a small vision transformer, whose heads look by content"),
        (f"{converted.agreed} of {converted.images}", "answers of a CNN that stayed the same when it became attention"),
        (f"{held} of {judged}", "laws claimed by the models hold, searched for counterexamples"),
        (duration(sum(results.seconds.values())), "of computing for everything on this page, training included"),
    ]


def heads(run: Run) -> list[str]:
    epochs = [epoch.head_profiles for epoch in run.epochs]
    labels = [f"epoch {epoch.number} of {run.recipe.epochs} · {percent(epoch.accuracy)}" for epoch in run.epochs]
    last = run.epochs[-1].head_profiles
    moved = [float((last[name].mean - run.epochs[0].head_profiles[name].mean).norm(dim=-1).mean()) for name in last]
    narrow = sum(int((each.weights.flatten(1).amax(-1) > 0.5).sum()) for each in last.values())
    wide = sum(int((each.width > WIDE).sum()) for each in last.values())
    how = ", ".join(f"{far:.1f}" for far in moved)
    return [
        paragraph(
            "Each dot is a head, seen from the pixel that asks (the orange square). Nobody told a head where to look: "
            "its place and its width are numbers that training moves. In this run the heads of the ",
            f"{len(moved)} layers travelled {how} pixels on average. {narrow} of {sum_of_heads(run)} became so narrow "
            "that more than half of their weight lies on one pixel, as a convolution's tap does; "
            f"{wide} became wider than {WIDE} pixels, and see much of the image at once.",
        ),
        make_player(
            epochs,
            labels,
            "One panel for each layer, one color and number for each head. The dot is the centre of mass of what the "
            "head sees; half of its weight lies in the filled shape, nine tenths within the line. Drag the slider, or "
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
        ExplorerModel("Spatial transformer", spatial.model, shown, said(spatial, shown)),
        ExplorerModel("Vision transformer", vit.model, shown, said(vit, shown)),
    ]
    return [
        paragraph(
            "Choose a digit and move over it: every small picture is one head, and blue is what it looks at from the "
            "pixel you point at. The spatial transformer sees every image from the same places. The vision "
            "transformer looks at what is there, so its maps change from digit to digit."
        ),
        make_explorer(
            models,
            images,
            names,
            "Test images, which neither model has learned from. The number is the largest weight of a head; each map "
            "has its own scale. Arrow keys move the pixel, too.",
        ),
    ]


def learning(spatial: Run, vit: Run) -> list[str]:
    series = {
        f"Spatial transformer, {spatial.recipe.epochs} epochs": [epoch.accuracy for epoch in spatial.epochs],
        f"Vision transformer, {vit.recipe.epochs} epochs": [epoch.accuracy for epoch in vit.epochs],
    }
    seconds = f"{duration(spatial.seconds)} and {duration(vit.seconds)}"
    words = f"Test images that were read correctly, from before the first epoch to the last; learning took {seconds}."
    return [share_chart(series, words, ("untrained", "last epoch"), 0.0, 1.0)]


def convolutions(converted: Converted, spatial: Run) -> list[str]:
    conv, layer = converted.network[0], converted.attentive[0]
    pairs = find_strongest_pairs(conv, KERNELS)
    first_layer = next(iter(spatial.epochs[-1].head_profiles.values()))
    rows = {
        "Kernels that a CNN learned": effective_kernels(conv, pairs, CNN_REACH),
        "The same layer as attention: the sum of its heads": effective_kernels(head_profile(layer), pairs, CNN_REACH),
    }
    learned = {
        "What the heads of the spatial transformer add up to, in its first layer": effective_kernels(
            first_layer, find_strongest_pairs(first_layer, KERNELS), LEARNED_REACH
        )
    }
    cases = [(case.name, str(case.heads), power(case.error)) for case in converted.cases]
    return [
        paragraph(
            "A head that looks exactly one step to the left picks out the left neighbour. Nine such heads are a 3 × 3 "
            "convolution (Cordonnier, Loukas and Jaggi 2020). ",
            code("convert_network(cnn)"),
            f" replaced both convolutions of a CNN that reads {percent(converted.accuracy)} of the digits. Logits "
            f"differ by {power(converted.error)} at most, in float32, and {converted.agreed} of {converted.images} "
            "answers are the same.",
        ),
        kernel_figure(
            rows,
            "Each square is a kernel around the pixel that asks, on one scale: red adds, blue takes away, white is "
            "nothing. The first two rows are equal, as they should be.",
        ),
        kernel_figure(
            learned,
            "Heads that were free to look anywhere add up to kernels, too: soft, and as large as they like.",
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
                cells.append(Cell(f"{WORDS[found.outcome]} · {found.tried} cases", kind))
        rows.append((f"{number} {slug}", *cells))
    return [
        paragraph(
            "Attention fails without a noise: a mask that is off by one trains well and cheats. ",
            code("check(model)"),
            " searches for the smallest case in which a model breaks a law that it claims. The trained models:",
        ),
        Table([Column("Law"), *map(Column, reports)], rows).to_html(),
        paragraph("And this is how it looks when something is wrong, here a causal mask that is off by one:"),
        code_block(mistake),
    ]


def costs(prices: list[Price], mixing: list[Mixing]) -> list[str]:
    rows = [
        (
            each.name,
            f"{each.parameters:,}",
            f"{each.macs:,}",
            f"{each.kept / 1024:,.0f} KiB",
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
        paragraph(
            "Counted by formula, to the unit, for one image of 8 × 8 pixels; the time is measured, in batches of the "
            "whole test set."
        ),
        html_table(["Model", "Parameters", "Multiply-adds", "Kept for backward", "Measured"], rows),
        paragraph(
            "A head whose score is a sum over rows and columns has a softmax that is a product. Regard averages one "
            "axis after the other instead of all pairs of pixels, with the same result. The saving grows with the "
            "image (multiply-adds of the whole model):"
        ),
        html_table(["Image", "All pairs", "Axis by axis", "Saved", ""], ratios),
    ]


def closing(results: Results) -> list[str]:
    steps = ", ".join(f"{name} {duration(seconds)}" for name, seconds in results.seconds.items())
    return [
        paragraph("Made by ", code("make demo"), f" with seed {results.spatial.recipe.seed}: {steps}."),
        paragraph(
            "How long to train, how fast heads may move and how images are changed was chosen while looking at the "
            f"accuracy on these same {len(results.spatial.data.test)} test images, with this one seed: expect a little "
            "less on digits nobody has looked at, and read nothing into a difference of a few images."
        ),
        paragraph(
            f"torch {torch.__version__}, Python {platform.python_version()}, one thread for each model, "
            f"{platform.machine()}. This page is one file and asks nobody for anything."
        ),
    ]


# Words


def html_table(names: list[str], rows: list[tuple]) -> Markup:
    """A table of numbers under their names, the first column says of what."""
    return Table([Column(names[0]), *(Column(name, "right") for name in names[1:])], rows).to_html()


def one_of_each(data: Images) -> list[int]:
    """The first test image of every class."""
    labels = data.test.labels
    return [int((labels == label).nonzero()[0]) for label in range(len(data.names)) if bool((labels == label).any())]


def said(run: Run, shown: torch.Tensor) -> list[str]:
    with torch.no_grad():
        sure, guess = run.model(shown).softmax(-1).max(-1)
    return [
        f"The model takes it for a {run.data.names[index]}, {percent(share)} sure."
        for index, share in zip(guess.tolist(), sure.tolist(), strict=True)
    ]


def percent(share: float) -> str:
    return f"{100 * share:.1f}\u202f%" if share < 0.9995 else "100\u202f%"


def power(number: float) -> str:
    """9e-16 as it is written by hand."""
    digit, _, exponent = f"{number:.0e}".partition("e")
    return f"{digit} · 10{str(int(exponent)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}" if number else "0"


def duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"
