"""The page that `regard train` leaves in the folder of a run: curves, samples, the recipe, and what the model costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from regard.render.chart import share_chart
from regard.render.page import Page, code_block, paragraph, tiles
from regard.render.table import Column, Table
from regard.train import Run
from regard.train.history import SAMPLES, STEPS, read_lines
from regard.train.progress import format_metric

REPORT = "report.html"
POINTS = 400  # of a curve


def write_report(run: Run) -> Path:
    """Write `report.html` to the folder of a run."""
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
    page.add("Model", _make_size_table(run).to_html())
    fields = {field: value for field, value in run.recipe.to_json().items() if value is not None}
    rows = [(field, json.dumps(value)) for field, value in fields.items()]
    page.add("Recipe", Table([Column("field"), Column("value")], rows).to_html())
    return page.save(run.folder / REPORT)


def _describe_run(run: Run) -> str:
    last = run.evaluations[-1]
    best = format_metric(run.task.metric, run.best.metrics[run.task.metric])
    return f"{last.step:,} of {run.task.steps:,} steps; the best of {len(run.evaluations)} evaluations has {best}."


def _format_value(name: str, value: float) -> str:
    return f"{value:.2%}" if name.endswith("accuracy") else f"{value:.4g}"


def _draw_curves(run: Run) -> list[Any]:
    """The training loss, and each metric at the evaluations."""
    assert run.folder is not None
    losses = [line["loss"] for line in read_lines(run.folder / STEPS)]
    charts = []
    if len(losses) > 1:
        thinned = losses[:: max(1, len(losses) // POINTS)]
        charts.append(_draw({"training loss": thinned}, "Loss of single steps.", run.evaluations[-1].step))
    for metric in run.evaluations[-1].metrics:
        values = [each.metrics[metric] for each in run.evaluations]
        if len(values) > 1 and max(values) < 1e6:
            name = metric.replace("_", " ")
            charts.append(_draw({name: values}, f"{name} on the validation set.", run.evaluations[-1].step))
    return charts or [paragraph("Too few evaluations for a curve.")]


def _draw(series: dict[str, list[float]], caption: str, steps: int) -> Any:
    values = [value for each in series.values() for value in each]
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 0.5
    is_share = all(name.endswith("accuracy") for name in series)
    form = ".0%" if is_share else ".3g"
    ends = ("step 0", f"step {steps:,}")
    return share_chart(series, caption[0].upper() + caption[1:], ends, low - margin, high + margin, form)


def _make_size_table(run: Run) -> Table:
    """Parameters, and floating-point operations of a token or an image in training, counted on a real batch."""
    from regard.cli.train_speed import count_flops

    unit = run.task.unit.removesuffix("s")
    flops = count_flops(run.task, run.model, run.task.make_batches(0)[0])
    rows = [
        ("parameters", f"{sum(parameter.numel() for parameter in run.model.parameters()):,}"),
        (f"floating-point operations of a {unit}, forward and backward", f"{flops:,.0f}"),
    ]
    return Table([Column("model"), Column("", "right")], rows)
