"""Verdicts together: a table, JSON, a page, and what is said when a law breaks."""

from __future__ import annotations

import json
import math
import platform
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.errors import LawViolation
from regard.laws.verdict import Verdict, Verdicts, Witness

if TYPE_CHECKING:
    from rich.console import RenderableType

# A map of more entries than this is for a picture, not for JSON.
MOST_NUMBERS = 4096


@dataclass
class Report:
    """What the laws say of one subject.

    Attributes:
        subject: its name.
        verdicts: one for each law, in order; a slug or number finds its own.
        seed: the same seed looks at the same cases.
        declared: what was recognised about it.
        asked: the kind, the claims and the options as they were given.
        command: the words of a shell that ask the same, if it was asked there.
    """

    subject: str
    kind: str
    verdicts: Verdicts
    seed: int = 0
    declared: str = ""
    fast: bool = False
    probing: bool = False
    asked: dict[str, Any] = field(default_factory=dict)
    command: str = ""

    @property
    def ok(self) -> bool:
        """Whether no law is broken and none is flaky."""
        return all(verdict.ok for verdict in self.verdicts)

    @property
    def failed(self) -> Verdicts:
        """The verdicts that are broken or flaky."""
        return Verdicts(verdict for verdict in self.verdicts if not verdict.ok)

    @property
    def violations(self) -> list[LawViolation]:
        """What is said of each law that is claimed and does not hold."""
        return [violation(verdict, self.replay(verdict)) for verdict in self.failed if verdict.claimed]

    @property
    def summary(self) -> str:
        """How many laws hold and how many do not, in words."""
        words = {"holds": ("holds", "hold"), "not applicable": ("does not apply", "do not apply")}
        counts: dict[str, int] = {}
        for verdict in self.verdicts:
            counts[verdict.outcome] = counts.get(verdict.outcome, 0) + 1
        order = [outcome for outcome in ("broken", "flaky", "holds", "not applicable") if outcome in counts]
        said = [
            f"{counts[outcome]} {words.get(outcome, (outcome, outcome))[counts[outcome] != 1]}" for outcome in order
        ]
        return ", ".join(said) or "no law was asked"

    def require(self) -> None:
        """Raise the first violation, with the others behind it, if there is one."""
        if violations := self.violations:
            first, *others = violations
            raise LawViolation(first.law, first.headline, first.parts, tuple(others))

    def replay(self, verdict: Verdict) -> str:
        """What to type to see a verdict again."""
        if verdict.replay:
            return verdict.replay
        slug = verdict.slug
        if self.command:
            return f"{self.command} --law {slug}" + (f" --seed {self.seed}" if self.seed else "")
        words = {name: value for name, value in self.asked.items() if value is not None and name != "claims"}
        claims = self.asked.get("claims")
        # Laws may look at what is claimed beside them, so a law alone is asked by `only`.
        words |= {"claims": claims} if claims is not None else {}
        words |= {"only": [slug]} if claims != [slug] else {}
        words |= {"seed": self.seed} if self.seed else {}
        words |= {"fast": True} if self.fast else {}
        if self.probing:
            words = {name: value for name, value in words.items() if name not in ("claims", "only")} | {"laws": [slug]}
        given = ", ".join(["target", *(f"{name}={_quoted(value)}" for name, value in words.items())])
        return f"{'probe' if self.probing else 'check'}({given})"

    # Ways to look at it

    def __rich__(self) -> RenderableType:
        from regard.laws import table  # rich costs a tenth of a second, and only who looks should pay it

        return table.render(self)

    def __str__(self) -> str:
        from regard.laws import table

        return table.text(self)

    def show(self) -> None:
        """Print the report, in colours where there is a terminal."""
        from regard.laws import table

        table.show(self)

    def to_json(self, path: str | Path | None = None) -> str:
        """The report as JSON, written to `path` if one is given. What is no number is text: "inf", "-inf", "nan"."""
        content = {
            "subject": self.subject,
            "kind": self.kind,
            "declared": self.declared,
            "ok": self.ok,
            "seed": self.seed,
            "fast": self.fast,
            "probing": self.probing,
            "command": self.command,
            "options": {name: _plain(value) for name, value in self.asked.items()},
            "versions": versions(),
            "verdicts": [_verdict(verdict, self.replay(verdict)) for verdict in self.verdicts],
        }
        return _written(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n", path)

    def to_html(self, path: str | Path | None = None) -> str:
        """The report as one page that needs nothing else, written to `path` if one is given."""
        from regard.laws import page

        return _written(page.render(self), path)


def violation(verdict: Verdict, replay: str = "") -> LawViolation:
    """A verdict as the error that a test shows."""
    witness, parts = verdict.witness, {"subject": verdict.subject}
    if witness is not None:
        parts["smallest"] = _smallest(witness)
        changed = f"{witness.changed}  ->  {witness.happened}" if witness.changed else witness.happened
        parts["changed" if witness.changed else "found"] = changed
        if witness.precision and witness.precision != "float64":
            parts["shows in"] = witness.precision
    parts["flaky" if verdict.outcome == "flaky" else "because"] = verdict.reason
    parts["replay"] = replay
    return LawViolation(verdict.slug, verdict.law.headline, {label: text for label, text in parts.items() if text})


def _smallest(witness: Witness) -> str:
    """The case, and behind it the sizes that do not matter."""
    case = ", ".join(f"{name}={value}" for name, value in witness.case.items())
    groups: dict[str, list[str]] = {}
    for name, remark in witness.remarks.items():
        groups.setdefault(remark, []).append(name)
    remarks = "; ".join(f"{', '.join(names)}: {remark}" for remark, names in groups.items())
    return f"{case:<43} # {remarks}" if remarks else case


def versions() -> dict[str, str]:
    """The versions that a verdict may depend on."""
    try:
        own = metadata.version("regard")
    except metadata.PackageNotFoundError:
        own = "not installed"
    return {"regard": own, "torch": str(torch.__version__), "python": platform.python_version()}


def _verdict(verdict: Verdict, replay: str) -> dict[str, Any]:
    law, witness = verdict.law, verdict.witness
    return {
        "law": law.slug,
        "id": law.id,
        "title": law.title,
        "statement": law.statement,
        "equation": law.equation,
        "outcome": verdict.outcome,
        "claimed": verdict.claimed,
        "reason": verdict.reason,
        "measured": verdict.measured,
        "cases": verdict.cases,
        "refused": verdict.refused,
        "seconds": round(verdict.seconds, 3),
        "replay": replay,
        "witness": None if witness is None else _witness(witness),
    }


def _witness(witness: Witness) -> dict[str, Any]:
    plain = ("case", "remarks", "changed", "place", "happened", "moved", "bound", "precision", "touched", "map")
    return {name: _plain(getattr(witness, name)) for name in plain}


def _plain(value: Any) -> Any:
    """A value as JSON has it; text where it has no other form."""
    if isinstance(value, Tensor):
        return _plain(value.tolist()) if value.numel() <= MOST_NUMBERS else None
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else repr(value)


def _quoted(value: Any) -> str:
    """As Python source, in the quotes of this house."""
    if isinstance(value, list):
        return f"[{', '.join(_quoted(item) for item in value)}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _written(text: str, path: str | Path | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


__all__ = ["Report", "violation"]
