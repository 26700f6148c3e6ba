"""The requests of the view Play: the pattern algebra, its time on this machine, and quadratic heads."""

from __future__ import annotations

import re
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from regard.attention import Attention, attend, explain
from regard.biases import Quadratic
from regard.errors import InputError, PatternError, RegardError
from regard.lab.answers import Refused, encode_array
from regard.lab.fields import Fields, check_number
from regard.lab.jobs import Job
from regard.lab.state import Lab
from regard.layers.profiles import head_profile
from regard.patterns import Pattern, read_pattern
from regard.visualize.attention_map import grid_weights

MOST_CHARACTERS = 500  # of an expression
MOST_TOKENS = 16_384
MOST_NUMBER = 1 << 20  # in an expression
CELLS = 128  # of the picture, along each side
CURVE_SECONDS = 2.0  # after which a curve ends
HEAD_DIM = 64
REPEATS = 5


def read_expression(fields: Fields) -> Pattern:
    """The pattern of an expression: parsed, never evaluated; constructors with literal arguments, `&`, `|` and `~`."""
    text = fields.text("expression", most=MOST_CHARACTERS)
    large = next((number for number in re.findall(r"\d+", text) if int(number[:20]) > MOST_NUMBER), None)
    if large is not None:
        raise PatternError(
            "A number of this pattern is too large.",
            asked=text[:200],
            found=large[:40],
            because=f"the lab draws up to {MOST_TOKENS:,} tokens, and takes numbers up to {MOST_NUMBER:,}",
            instead="Window(128, 0)",
        )
    try:
        return read_pattern(text)
    except RegardError:
        raise
    except Exception as failure:  # a literal beyond what a constructor can hold
        raise PatternError(
            "This is not a pattern.",
            asked=text[:200],
            found=f"{type(failure).__name__}: {str(failure)[:100]}",
            because="its arguments are beyond what a pattern can hold",
            instead="Causal() & Window(128, 0)",
        ) from None


def describe_pattern(lab: Lab, fields: Fields, job: Job) -> dict[str, Any]:
    """The picture of a pattern over so many tokens, its pairs, its cost as a formula and as a curve."""
    from regard.cost_model import cost

    pattern, tokens = read_expression(fields), fields.integer("tokens", 1, MOST_TOKENS)
    picture, pooled = draw_pairs(pattern, tokens, job)
    pairs = pattern.pairs(tokens)
    job.check()
    described = Attention(pattern=pattern)
    formula = cost(described, dim=HEAD_DIM, heads=1).macs.formula
    curve, ends = _make_curve(described, tokens, job)
    return {
        "expression": repr(pattern),
        "picture": encode_array(picture),
        "pooled": pooled,
        "pairs": pairs,
        "density": pairs / tokens**2,
        "formula": str(formula),
        "curve": curve,
        "curve_ends": ends,
        "supports_kv_cache": bool(pattern.supports_kv_cache),
        "python": "\n".join(
            (
                "from regard import *",
                f"pattern = {pattern!r}",
                f"print(pattern.draw({min(tokens, CELLS)}))",
                f"print(pattern.pairs({tokens}))",
                f"print(cost(Attention(pattern=pattern), tokens={tokens}, dim={HEAD_DIM}, heads=1).macs)",
            )
        ),
    }


def draw_pairs(pattern: Pattern, tokens: int, job: Job) -> tuple[Tensor, bool]:
    """The pairs as bytes: 0 and 1, or where cells hold several pairs their share from 0 to 255."""
    lengths = pattern.lengths(tokens, tokens)
    keys, cell = torch.arange(tokens), -(-tokens // CELLS)
    cells = -(-tokens // cell)
    counts = torch.zeros(cells, tokens)
    for start in range(0, tokens, max((1 << 20) // tokens, 1)):
        job.check()
        query = torch.arange(start, min(start + max((1 << 20) // tokens, 1), tokens))
        shown = pattern._evaluate_pairs(query[:, None], keys, lengths)
        shown = shown.flatten(0, -3)[0] if shown.ndim > 2 else shown
        if cell == 1:
            counts[query] = shown.float()
        else:
            counts.index_add_(0, query // cell, shown.float())
    if cell == 1:
        return counts.to(torch.uint8), False
    totals = torch.zeros(cells, cells).index_add_(1, keys // cell, counts)
    sizes = torch.bincount(keys // cell, minlength=cells).float()
    return (255 * totals / (sizes[:, None] * sizes)).round().to(torch.uint8), True


def _make_curve(described: Attention, tokens: int, job: Job) -> tuple[list[list[int]], str | None]:
    """Multiply-adds at powers of two and at these tokens, as far as they are found within `CURVE_SECONDS`."""
    from regard.cost_model import cost

    lengths = sorted({*(2**power for power in range(4, 15)), tokens})
    points, ends, begin = [], None, time.monotonic()
    for length in lengths:
        job.check()
        if time.monotonic() - begin > CURVE_SECONDS:
            ends = f"longer sequences than {points[-1][0]:,} take long to count" if points else "it takes long to count"
            break
        try:
            points.append([length, int(cost(described, tokens=length, dim=HEAD_DIM, heads=1).macs.value)])
        except RegardError as refusal:  # a grid has one length
            ends = refusal.headline
    return points, ends


def measure_time(lab: Lab, fields: Fields, job: Job) -> dict[str, Any]:
    """The median time of a forward pass with this pattern on this machine, after one to warm up."""
    pattern, tokens = read_expression(fields), fields.integer("tokens", 1, MOST_TOKENS)
    job.progress(0, REPEATS + 1, "planning")
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, tokens, HEAD_DIM, generator=generator) for _ in range(3))
    described, seconds = Attention(pattern=pattern), []
    chosen = explain(query, key, value, described)
    with torch.no_grad():
        for number in range(REPEATS + 1):
            job.check()
            begin = time.perf_counter()
            attend(query, key, value, described)
            seconds.append(time.perf_counter() - begin)
            job.progress(number + 1, REPEATS + 1, "measuring")
    return {"milliseconds": 1000 * statistics.median(seconds[1:]), "backend": str(chosen.backend)}


def slide_heads(lab: Lab, fields: Fields, job: Job) -> dict[str, Any]:
    """Quadratic heads on a grid: what the query sees, and how far that is from the pixel at each head's centre.

        weight[h, delta] = softmax over delta of -|delta - centre_h|^2 / (2 width_h^2)

    As the widths go to zero, each head sees one pixel, and the layer is a convolution whose kernel has one entry for
    each head (Cordonnier et al. 2020, theorem 1). The error is the largest weight that is elsewhere.
    """
    grid = [int(check_number("grid", number, 1, 64)) for number in fields.entries("grid", 2)]
    place = [int(check_number("query", number, 0, 63)) for number in fields.entries("query", 2)]
    entries = fields.entries("heads", 64)
    if len(grid) != 2 or len(place) != 2 or not entries or place[0] >= grid[0] or place[1] >= grid[1]:
        raise Refused(
            "These heads have no grid.",
            status=400,
            asked=f"grid={grid}, query={place}, {len(entries)} heads",
            because="a grid has rows and columns, the query lies on it, and there is a head at least",
            instead='{"grid": [5, 7], "heads": [{"center": [0, 1], "width": 1}], "query": [2, 3]}',
        )
    centres, widths = [], []
    for entry in entries:
        head = Fields(entry)
        centre = [check_number("center", number, -64, 64) for number in head.entries("center", 2)]
        if len(centre) != 2:
            raise InputError(
                "A centre has a row and a column.",
                asked=f"center={centre}",
                because="it is a relative position on the grid",
                instead='"center": [0, 1]',
            )
        centres.append(centre)
        widths.append(head.number("width", 1e-3, 1e3))
    alpha = [1 / (2 * width**2) for width in widths]
    bias = Quadratic(len(entries), (grid[0], grid[1]), centre=centres, alpha=alpha).double()
    maps = grid_weights(head_profile(bias), (place[0], place[1]))
    errors = []
    for number, centre in enumerate(centres):
        row, column = (round(at + offset) for at, offset in zip(place, centre, strict=True))
        inside = 0 <= row < grid[0] and 0 <= column < grid[1]
        errors.append(1 - float(maps[number, row, column]) if inside else 1.0)
    whole = all(float(number).is_integer() for centre in centres for number in centre)
    kernel = [[int(number) for number in centre] for centre in centres] if whole else None
    return {"maps": encode_array(maps), "kernel": kernel, "convolution_error": max(errors)}
