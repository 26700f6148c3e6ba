"""Verdicts of the laws: operators and modules, and on request the zoo and the commands of docs/findings.md."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from record import Record
from torch import nn

from regard import Attention, Causal, check
from regard.laws import LAWS
from regard.layers import MultiHeadAttention

ROOT = Path(__file__).resolve().parents[2]


def _attend_plainly(query, key, value, mask=None):
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -1e9)
    return scores.softmax(-1) @ value


def record_verdicts(record: Record) -> None:
    torch.manual_seed(0)
    every = [law.slug for law in LAWS if law.slug != "reference"]
    targets: dict[str, tuple[Any, dict[str, Any]]] = {
        "plain softmax": (_attend_plainly, {"kind": "operator"}),
        "layer": (MultiHeadAttention(12, 3, attention=Attention(Causal())), {}),
        "torch attention": (nn.MultiheadAttention(12, 3, batch_first=True), {}),
    }
    for name, (target, words) in targets.items():
        with record.case(f"laws/{name}"):
            for verdict in check(target, claims=every, fast=True, **words).verdicts:
                record.add(f"laws/{name} {verdict.slug}", verdict.outcome)


def record_zoo(record: Record) -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from zoo.catalogue import EXHIBITS  # pyright: ignore[reportMissingImports]

    for exhibit in EXHIBITS:
        for which, claims in {"faulty": exhibit.law, "twin": exhibit.claims}.items():
            where = f"zoo/{exhibit.id} {which}"
            with record.case(where):
                words = {"kind": exhibit.kind, "claims": claims, "seed": 0, "fast": True, **exhibit.options}
                verdicts = check(exhibit.build(which), **words).verdicts
                record.add(where, {verdict.slug: verdict.outcome for verdict in verdicts})


def record_findings(record: Record) -> None:
    """The commands of docs/findings.md, each with its exit status and its verdicts."""
    from regard.cli import main

    commands = re.findall(r"^    regard (check .*)$", (ROOT / "docs/findings.md").read_text(), re.MULTILINE)
    for command in commands:
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            path = Path(folder) / "report.json"
            status = main([*shlex.split(command), "--json", str(path)])
            verdicts = json.loads(path.read_text())["verdicts"] if path.exists() else []
            record.add(f"findings/{command}", [status, [[each["law"], each["outcome"]] for each in verdicts]])
