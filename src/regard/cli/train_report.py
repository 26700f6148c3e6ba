"""The page that `regard train` leaves in the folder of a run.

Curves, samples, attention of a few heads, the laws it obeys, what its heads have learned, cost, and the recipe.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from regard.cli.train_attention import render_attention
from regard.cli.train_heads import describe_values, make_answer_table
from regard.cli.train_laws import render_laws
from regard.laws import Report
from regard.render.chart import share_chart
from regard.render.markup import Markup, element
from regard.render.page import Page, code_block, figure, paragraph, tiles
from regard.render.table import Column, Table
from regard.train import Answer, Run
from regard.train.history import SAMPLES, STEPS, read_lines
from regard.train.progress import format_metric

REPORT = "report.html"
POINTS = 400  # of a curve


def write_report(run: Run, laws: Report | None = None, answers: list[Answer] | None = None) -> Path:
    """Write `report.html` to the folder of a run.

    laws: the verdicts on the trained model; answers: those about its positional heads.
    """
    assert run.folder is not None
    last = run.evaluations[-1]
    name = getattr(run.data, "name", run.recipe.data)
    page = Page(f"{type(run.model).__name__} on {name}", kicker="regard train", lead=_describe_run(run))
    units = sum(each.units for each in run.evaluations)
    facts = [(_format_value(metric, value), metric.replace("_", " ")) for metric, value in last.metrics.items()]
    page.open_with(
        tiles([*facts, (f"{units:,}", f"{run.task.unit} trained on"), (f"{run.seconds:,.0f} s", "training")])
    )
    page.add("Curves", *_draw_curves(run))
    lines = read_lines(run.folder / SAMPLES)
    if lines:
        chosen = [lines[0], *([lines[-1]] if len(lines) > 1 else [])]
        parts = [part for line in chosen for part in (paragraph(f"After step {line['step']}:"),
                 *map(code_block, line["samples"]))]  # fmt: skip
        page.add("Samples", *parts)
    if attention := render_attention(run):
        page.add("Attention", *attention)
    if answers:
        _add_answers(page, run, answers)
    if laws is not None:
        page.add("Laws", *render_laws(laws))
    page.add("Model", _make_size_table(run).to_html())
    fields = {field: value for field, value in run.recipe.to_json().items() if value is not None}
    rows = [(field, json.dumps(value)) for field, value in fields.items()]
    page.add("Recipe", Table([Column("field"), Column("value")], rows).to_html())
    return page.save(run.folder / REPORT)


def _add_answers(page: Page, run: Run, answers: list[Answer]) -> None:
    """What the heads have learned, as numbers, and the paths of their centres."""
    page.add(
        "Heads",
        *_draw_paths(run),
        make_answer_table(answers, with_reasons=True).to_html(),
        paragraph("What the values are:"),
        element("ul", *(element("li", line) for line in describe_values())),
        paragraph(
            "No: the interval excludes an effect of a tenth of the width, a quarter of a token, half the distance of "
            "chance. Yes: p < 0.05, adjusted for the number of layers. Heads without a position are left out. The loss "
            "determines the effective kernel of a layer, not its single heads: a layer may be a convolution without a "
            "grid of centres.",
            kind="faint",
        ),
    )


def _draw_paths(run: Run) -> list[Markup]:
    if importlib.util.find_spec("matplotlib") is None:
        return []
    from regard.visualize import draw_head_paths

    paths = draw_head_paths([each.head_profiles for each in run.evaluations])
    return [figure(Markup(paths.svg), paths.caption, kind="picture")]


def _describe_run(run: Run) -> str:
    last = run.evaluations[-1]
    best = format_metric(run.task.metric, run.best.metrics[run.task.metric])
    return f"{last.step:,} of {run.task.steps:,} steps; the best of {len(run.evaluations)} evaluations has {best}."


def _format_value(name: str, value: float) -> str:
    return f"{value:.2%}" if name.endswith("accuracy") else f"{value:.4g}"


def _draw_curves(run: Run) -> list[Any]:
    """The training loss, and each metric at the evaluations."""
    assert run.folder is not None
    last = run.evaluations[-1].step
    losses = [(line["step"], line["loss"]) for line in read_lines(run.folder / STEPS) if line["step"] <= last]
    charts = []
    if len(losses) > 1:
        thinned = losses[:: max(1, len(losses) // POINTS)]
        charts.append(_draw("training loss", thinned, "Loss of single steps.", last))
    for metric in run.evaluations[-1].metrics:
        values = [(each.step, each.metrics[metric]) for each in run.evaluations]
        if len(values) > 1 and all(abs(value) < 1e6 for _, value in values):
            name = metric.replace("_", " ")
            charts.append(_draw(name, values, f"{name} on the {run.task.evaluated_on}.", last))
    return charts or [paragraph("Too few evaluations for a curve.")]


def _draw(name: str, points: list[tuple[int, float]], caption: str, steps: int) -> Any:
    """A curve through values at steps, from step 0 to the last one."""
    values = [value for _, value in points]
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 0.5
    bottom = max(low - margin, 0.0) if low >= 0 else low - margin
    top, form = high + margin, _choose_format(bottom, high + margin)
    if name.endswith("accuracy"):
        top, form = min(top, 1.0), ".0%"
    ends, places = ("step 0", f"step {steps:,}"), {name: [step / steps for step, _ in points]}
    text = caption[0].upper() + caption[1:]
    return share_chart({name: values}, text, ends, bottom, top, form, places)


def _choose_format(low: float, high: float) -> str:
    """Three significant digits, or as many as tell the ends of an axis apart.

    >>> _choose_format(1.0, 2.0), _choose_format(3.3989, 3.3991)
    ('.3g', '.5g')
    """
    digits = 3
    while digits < 9 and f"{low:.{digits}g}" == f"{high:.{digits}g}":
        digits += 1
    return f".{digits}g"


def _make_size_table(run: Run) -> Table:
    """Parameters, and floating-point operations of a token or an image in training, counted on a real batch."""
    from regard.cli.train_speed import count_flops

    unit = {"tokens": "a token", "images": "an image"}[run.task.unit]
    flops = count_flops(run.task, run.model, run.task.make_batches(0)[0])
    rows = [
        ("parameters", f"{sum(parameter.numel() for parameter in run.model.parameters()):,}"),
        (f"floating-point operations of {unit}, forward and backward", f"{flops:,.0f}"),
    ]
    return Table([Column("model"), Column("", "right")], rows)
