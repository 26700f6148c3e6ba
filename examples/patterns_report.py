# slow
"""Patterns of attention: draw every one, attend over a long sequence, and write a report.

It writes out/patterns.svg and out/report.html in the working folder.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
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
from regard.render.markup import Markup
from regard.render.page import Page, code, code_block, figure, paragraph
from regard.render.table import Column, Table

TOKENS, HEADS, DIM = 32_768, 4, 64
LOCAL = Window(128, 128)
SMALL, IMAGE = 256, (16, 16)

LAYERS = (
    "Layers: how many it takes until the receptive field covers the sequence.",
    "Never: the classes of a dilated window do not meet, and causal attention never sees later tokens.",
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
    print(indent(str(rows)))
    print("\n" + indent("\n".join(LAYERS)))

    heading(f"A long sequence: {LOCAL} over {TOKENS:,} tokens, {HEADS} heads of {DIM}, float32")
    print("Forward and backward ...", flush=True)
    run = long_sequence()
    print("\n".join(f"  {name:<24}{value}" for name, value in run.numbers))

    heading("Why it ran where it ran: explain(...)")
    print(indent(run.explanation))

    report = page(picture, rows, run).save(out / "report.html")
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


def comparison() -> Table:
    rows = []
    for name, layers in COMPARED:
        pairs = sum(pattern.pairs(SMALL) for pattern in layers) // len(layers)
        depth = layers_to_connect(*layers, tokens=SMALL)
        numbers = (f"{pairs:,}", f"{pairs / SMALL**2:.1%}", "never" if depth is None else str(depth))
        rows.append((name, *numbers, ", then ".join(map(repr, layers))))
    numbers = (Column(name, "right") for name in ("pairs", "density", "layers"))
    return Table([Column("name"), *numbers, Column("pattern", "left", "wrap")], rows)


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def indent(text: str) -> str:
    return "\n".join("  " + line for line in text.splitlines())


# The report


def page(picture: str, compared: Table, run: Run) -> Page:
    lead = f"Regard {__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads."
    report = Page("Patterns of attention", title="Regard: patterns of attention", lead=lead)
    report.add(
        "A long sequence",
        paragraph(
            code(repr(LOCAL)), f" over {TOKENS:,} tokens, {HEADS} heads of {DIM}, float32, forward and backward."
        ),
        Table([Column("measured"), Column()], run.numbers).to_html(),
        code_block(run.explanation),
    )
    report.add(
        f"What patterns cost on {SMALL} tokens",
        paragraph(f"Pairs are those of one layer, on average. {' '.join(LAYERS)}"),
        compared.to_html(),
    )
    report.add("Every pattern", figure(Markup(picture), "Rows are queries, columns are keys.", kind="picture"))
    return report


if __name__ == "__main__":
    main()
