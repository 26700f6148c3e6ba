"""Patterns of attention: draw every one, attend over a long sequence, and leave a report to look at.

It writes out/patterns.svg and out/report.html in the working folder.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch
from draw_patterns import sheet

from regard import (
    Axial,
    Causal,
    First,
    Full,
    GridStride,
    GridWindow,
    Neighborhood,
    Pattern,
    Random,
    Strided,
    Window,
    __version__,
    attend,
    explain,
    layers_to_connect,
)

TOKENS, HEADS, DIM = 32_768, 4, 64
LOCAL = Window(128, 128)
SMALL, IMAGE = 256, (16, 16)

LAYERS = (
    "Layers: how many it takes until every token has heard of every other.",
    "Never: the classes of a dilated window do not meet, and the past does not hear of the future.",
)

# Patterns side by side; a row with two of them alternates from layer to layer.
COMPARED: list[tuple[str, tuple[Pattern, ...]]] = [
    ("dense", (Full(),)),
    ("local", (Window(8, 8),)),
    ("dilated", (Window(8, 8, step=4),)),
    ("BigBird", (Window(2, 2) | First(1) | Random(2, 0),)),
    ("neighbourhood", (Neighborhood(IMAGE, 2),)),
    ("Swin", (GridWindow(IMAGE, 4), GridWindow(IMAGE, 4, shift=2))),
    ("MaxViT", (GridWindow(IMAGE, 4), GridStride(IMAGE, 4))),
    ("axial", (Axial(IMAGE),)),
    ("Sparse Transformer", (Causal() & (Window(15, 0) | Strided(16)),)),
]


def main() -> None:
    out = Path("out")
    out.mkdir(exist_ok=True)

    heading("Every pattern, drawn")
    picture = sheet()
    (out / "patterns.svg").write_text(picture, encoding="utf-8")
    print("For example", COMPARED[3][1][0], "on 16 tokens (rows are queries, columns are keys):\n")
    print(indent(str(COMPARED[3][1][0].draw(16))))

    heading(f"What they cost on {SMALL} tokens (or an image of {IMAGE[0]} x {IMAGE[1]})")
    rows = comparison()
    print(as_text(rows))
    print("\n" + indent("\n".join(LAYERS)))

    heading(f"A long sequence: {LOCAL} over {TOKENS:,} tokens, {HEADS} heads of {DIM}, float32")
    print("Forward and backward ...", flush=True)
    run = long_sequence()
    print("\n".join(f"  {name:<24}{value}" for name, value in run.numbers))

    heading("Why it ran where it ran: explain(...)")
    print(indent(run.explanation))

    report = out / "report.html"
    report.write_text(page(picture, rows, run), encoding="utf-8")
    heading("Look at")
    print(f"  {report.resolve()}\n  {(out / 'patterns.svg').resolve()}")


# The long sequence


@dataclass
class Run:
    numbers: list[tuple[str, str]]
    explanation: str


def long_sequence() -> Run:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, HEADS, TOKENS, DIM, requires_grad=True) for _ in range(3))
    before = resident_now()
    start = time.perf_counter()
    output = attend(query, key, value, pattern=LOCAL)
    middle = time.perf_counter()
    output.square().mean().backward()
    end = time.perf_counter()
    grown = resident_peak() - before
    dense = HEADS * TOKENS**2 * 4
    numbers = [
        ("forward", f"{middle - start:.2f} s, planning included"),
        ("backward", f"{end - middle:.2f} s"),
        ("pairs", f"{LOCAL.pairs(TOKENS):,} of {TOKENS**2:,} ({LOCAL.density(TOKENS):.2%})"),
        ("memory grew by", f"{size(grown)} at its peak, the output and three gradients included"),
        ("dense scores need", f"{size(dense)} for the forward pass alone"),
        ("against the reference", f"largest difference {distance(query, key, value, output):.1e}"),
    ]
    return Run(numbers, str(explain(query, key, value, pattern=LOCAL)))


def distance(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor) -> float:
    """How far the first 512 outputs are from the reference, which can hold the square of a short piece."""
    keys = 512 + LOCAL.right
    with torch.no_grad():
        piece = (tensor[:, :, :keys].double() for tensor in (query, key, value))
        expected = attend(*piece, pattern=LOCAL, backend="reference")[:, :, :512]
    return float((output.detach()[:, :, :512] - expected).abs().max())


def resident_peak() -> int:
    """The most memory this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes, except on macOS


def resident_now() -> int:
    """The memory this process has now; where that cannot be read, the most it has had so far."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else resident_peak()


def size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


# The table


def comparison() -> list[tuple[str, ...]]:
    rows = [("name", "pattern", "pairs", "density", "layers")]
    for name, layers in COMPARED:
        pairs = sum(pattern.pairs(SMALL) for pattern in layers) // len(layers)
        depth = layers_to_connect(*layers, tokens=SMALL)
        patterns = ", then ".join(map(repr, layers))
        rows.append(
            (
                name,
                patterns,
                f"{pairs:,}",
                f"{pairs / SMALL**2:.1%}",
                "never" if depth is None else str(depth),
            )
        )
    return rows


def as_text(rows: list[tuple[str, ...]]) -> str:
    """The table for a terminal; the pattern comes last because it is the widest."""
    turned = [(row[0], *row[2:], row[1]) for row in rows]
    widths = [max(len(row[place]) for row in turned) for place in range(5)]
    signs = "<>>><"
    return "\n".join(
        "  " + "  ".join(f"{cell:{sign}{width}}" for cell, sign, width in zip(row, signs, widths, strict=True)).rstrip()
        for row in turned
    )


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def indent(text: str) -> str:
    return "\n".join("  " + line for line in text.splitlines())


# The report

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; }
body { max-width: 62rem; margin: 3rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; }
th, td { padding: .35rem .8rem .35rem 0; border-bottom: 1px solid #e6e0d4; }
th { color: #6b6459; font-weight: normal; } td.number, th.number { text-align: right; white-space: nowrap; }
code, pre { font: .85rem/1.45 ui-monospace, Menlo, Consolas, monospace; }
pre { background: #f6f3ec; padding: 1rem; overflow-x: auto; } svg { max-width: 100%; height: auto; }
"""


def page(picture: str, rows: list[tuple[str, ...]], run: Run) -> str:
    facts = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in run.numbers)
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Regard: patterns of attention</title><style>{STYLE}</style>
<h1>Patterns of attention</h1>
<p>Regard {escape(__version__)}, torch {escape(torch.__version__)}, {torch.get_num_threads()} threads.</p>
<h2>A long sequence</h2>
<p><code>{escape(repr(LOCAL))}</code> over {TOKENS:,} tokens, {HEADS} heads of {DIM}, float32,
forward and backward.</p>
<table>{facts}</table>
<pre>{escape(run.explanation)}</pre>
<h2>What patterns cost on {SMALL} tokens</h2>
<p>Pairs are those of one layer, on average. {escape(" ".join(LAYERS))}</p>
{as_html(rows)}
<h2>Every pattern</h2>
{picture}</html>
"""


def as_html(rows: list[tuple[str, ...]]) -> str:
    lines = []
    for number, (name, pattern, *figures) in enumerate(rows):
        tag = "td" if number else "th"
        shown = f"<code>{escape(pattern)}</code>" if number else escape(pattern)
        cells = "".join(f'<{tag} class="number">{escape(figure)}</{tag}>' for figure in figures)
        lines.append(f"<tr><{tag}>{escape(name)}</{tag}><{tag}>{shown}</{tag}>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


if __name__ == "__main__":
    main()
