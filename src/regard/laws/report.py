"""The verdicts of a subject as a table, JSON, a page, and error messages."""

from __future__ import annotations

import json
import math
import platform
import textwrap
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.errors import LawViolation
from regard.laws.causes import rank_causes
from regard.laws.glossary import describe
from regard.laws.unchecked import Unchecked
from regard.laws.verdict import Counterexample, Verdict, Verdicts
from regard.render.files import write_file

if TYPE_CHECKING:
    from rich.console import RenderableType

# A map of more entries than this is for a picture, not for JSON.
MOST_NUMBERS = 4096
# Columns of the text behind a label of a violation: with the label a line of eighty.
COLUMNS = 69
# The remark on a claim that was inferred.
INFERRED = "inferred from the kind of subject; pass claims= to state what is claimed"
# The headline of an undecided law.
UNDECIDED = "too few cases were tried to conclude that it holds."


@dataclass
class Report:
    """The verdicts of the laws on one subject.

    Attributes:
        subject: its name.
        verdicts: one for each law, in order; a slug or number finds its own.
        seed: the same seed draws the same cases.
        declared: what was recognised about it.
        asked: the kind, the claims and the options as they were given.
        command: the shell command of this check, if it was run from the command line.
        unchecked: the laws that were left out, each with why and what would have it checked.
        target: the text that names the target on a command line, if it was given there.
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
    unchecked: list[Unchecked] = field(default_factory=list)
    target: str = ""

    @property
    def ok(self) -> bool:
        """Whether no law is broken, flaky or undecided."""
        return all(verdict.ok for verdict in self.verdicts)

    @property
    def failed(self) -> Verdicts:
        """The verdicts that are broken, flaky or undecided."""
        return Verdicts(verdict for verdict in self.verdicts if not verdict.ok)

    @property
    def causes(self) -> dict[str, str]:
        """The claimed laws that do not hold, likeliest cause first, each with the one it probably follows from."""
        failed = [verdict for verdict in self.failed if verdict.claimed]
        undecided = {verdict.slug: "" for verdict in failed if verdict.outcome == "undecided"}
        found = {verdict.slug: verdict.counterexample for verdict in failed if verdict.slug not in undecided}
        return rank_causes({slug: {} if each is None else each.case for slug, each in found.items()}) | undecided

    @property
    def violations(self) -> list[LawViolation]:
        """An error for each claimed law that does not hold, the likeliest cause first."""
        return [
            violation(self.verdicts[slug], self.replay(self.verdicts[slug]), self.tell_cause(slug))
            for slug in self.causes
        ]

    def tell_cause(self, slug: str) -> str:
        """Whether a broken law is the likeliest cause of others that are broken, or probably follows from one."""
        causes = self.causes
        if causes.get(slug):
            return f"probably follows from {causes[slug]}"
        effects = [other for other, cause in causes.items() if cause == slug]
        return f"probably the cause; {', '.join(effects)} may follow from it" if effects else ""

    @property
    def summary(self) -> str:
        """How many laws hold and how many do not, in words."""
        words = {"holds": ("holds", "hold"), "not applicable": ("does not apply", "do not apply")}
        counts: dict[str, int] = {}
        for verdict in self.verdicts:
            counts[verdict.outcome] = counts.get(verdict.outcome, 0) + 1
        order = [
            outcome for outcome in ("broken", "flaky", "undecided", "holds", "not applicable") if outcome in counts
        ]
        text = [
            f"{counts[outcome]} {words.get(outcome, (outcome, outcome))[counts[outcome] != 1]}" for outcome in order
        ]
        return ", ".join(text) or "no law was checked"

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
        # A law may depend on the other claims, so a single law is selected by `only`.
        words |= {"claims": claims} if claims is not None else {}
        words |= {"only": [slug]} if claims != [slug] or "reference" in words else {}
        words |= {"seed": self.seed} if self.seed else {}
        words |= {"fast": True} if self.fast else {}
        if self.probing:
            words = {name: value for name, value in words.items() if name not in ("claims", "only")} | {"laws": [slug]}
        text = {name: "reference" if name == "reference" else _quote(value) for name, value in words.items()}
        given = ", ".join(["target", *(f"{name}={value}" for name, value in text.items())])
        return f"{'probe' if self.probing else 'check'}({given})"

    # Output formats

    def __rich__(self) -> RenderableType:
        from regard.laws import table

        return table.render(self)

    def __str__(self) -> str:
        from regard.laws import table

        return table.text(self)

    def show(self) -> None:
        """Print the report, in colours where there is a terminal."""
        from regard.laws import table

        table.show(self)

    def to_json(self, path: str | Path | None = None) -> str:
        """The report as JSON, written to `path` if one is given. Non-finite numbers are text: "inf", "-inf", "nan"."""
        content = {
            "subject": self.subject,
            "kind": self.kind,
            "declared": self.declared,
            "ok": self.ok,
            "seed": self.seed,
            "fast": self.fast,
            "probing": self.probing,
            "command": self.command,
            "options": {name: _encode_value(value) for name, value in self.asked.items()},
            "versions": versions(),
            "verdicts": [_encode_verdict(verdict, self.replay(verdict)) for verdict in self.verdicts],
            "causes": [{"law": slug, "follows_from": cause or None} for slug, cause in self.causes.items()],
            "unchecked": [
                {"law": left.slug, "id": left.id, "reason": left.reason, "flag": left.flag, "argument": left.argument}
                for left in self.unchecked
            ],
        }
        return _write_if_asked(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n", path)

    def script(self, path: str | Path | None = None, *, law: str | None = None, target: str | None = None) -> str:
        """The counterexample as a file of plain torch that reproduces it without Regard, written to `path` if given.

        It makes the target, calls it as the law did, and ends with 1 while the outputs differ. Of several broken laws
        the likeliest cause is written, unless `law` names one. `target` is how a script gets the target, as on the
        command line: `"mypackage.attention:Attention(24)"`, made with the seed of this report. Without it a function
        is imported by its own name, and a module is put into the script with its weights. What cannot be written as
        calls of the target has one line with the reason.
        """
        from regard.laws.script import write_first

        order = [self.verdicts[slug] for slug in self.causes] + [each for each in self.failed if not each.claimed]
        chosen = [verdict for verdict in order if law in (None, verdict.slug, verdict.id)]
        replays = [self.replay(verdict) for verdict in chosen]
        text = write_first(chosen, replays, self.target if target is None else target, self.seed)
        return _write_if_asked(text, path)

    def to_html(self, path: str | Path | None = None) -> str:
        """The report as one page that needs nothing else, written to `path` if one is given."""
        from regard.laws import page

        return _write_if_asked(page.render(self), path)


# A verdict in words


def violation(verdict: Verdict, replay: str = "", cause: str = "") -> LawViolation:
    """A verdict as the error that a test shows. `cause` relates it to other broken laws."""
    counterexample, parts = verdict.counterexample, {"subject": verdict.subject}
    if counterexample is not None:
        parts["smallest"] = _format_smallest(verdict.slug, counterexample)
        parts["meaning"] = _format_meaning(verdict.slug, counterexample)
        changed = (
            f"{counterexample.changed}  ->  {counterexample.happened}"
            if counterexample.changed
            else counterexample.happened
        )
        parts["changed" if counterexample.changed else "found"] = changed
        if counterexample.precision and counterexample.precision != "float64":
            parts["shows in"] = counterexample.precision
    parts["flaky" if verdict.outcome == "flaky" else "because"] = verdict.reason
    parts["claim"] = INFERRED if verdict.inferred else ""
    parts["likely"] = cause
    parts["replay"] = replay
    headline = UNDECIDED if verdict.outcome == "undecided" else verdict.law.headline
    return LawViolation(verdict.slug, headline, {label: text for label, text in parts.items() if text})


def _format_smallest(slug: str, counterexample: Counterexample) -> str:
    """The case, and behind it the other sizes that were tried."""
    words = describe(slug, counterexample.case)
    names = {key: word.name for key, word in zip(counterexample.case, words, strict=True)}
    case = ", ".join(f"{word.name}={word.value}" for word in words)
    groups: dict[str, list[str]] = {}
    for key, remark in counterexample.remarks.items():
        groups.setdefault(remark, []).append(names.get(key, key))
    remarks = [f"# {', '.join(keys)}: {remark}" for remark, keys in groups.items()]
    return "\n".join([case, *remarks])


def _format_meaning(slug: str, counterexample: Counterexample) -> str:
    """What the parameters of the case mean: the numbers on one line, then a line for each word."""
    words = [word for word in describe(slug, counterexample.case) if word.meaning]
    numbers = [word for word in words if isinstance(word.value, int | float) and not isinstance(word.value, bool)]
    lines = textwrap.wrap(", ".join(f"{word.name}: {word.meaning}" for word in numbers), COLUMNS)
    lines += [f"{word.name}={word.value}: {word.meaning}" for word in words if word not in numbers]
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """The versions that a verdict may depend on."""
    try:
        own = metadata.version("regard")
    except metadata.PackageNotFoundError:
        own = "not installed"
    return {"regard": own, "torch": str(torch.__version__), "python": platform.python_version()}


def _encode_verdict(verdict: Verdict, replay: str) -> dict[str, Any]:
    law, counterexample = verdict.law, verdict.counterexample
    return {
        "law": law.slug,
        "id": law.id,
        "title": law.title,
        "statement": law.statement,
        "equation": law.equation,
        "outcome": verdict.outcome,
        "claimed": verdict.claimed,
        "inferred": verdict.inferred,
        "reason": verdict.reason,
        "measured": verdict.measured,
        "cases": verdict.cases,
        "tried": verdict.tried,
        "refused": verdict.refused,
        "discarded": verdict.discarded,
        "seconds": round(verdict.seconds, 3),
        "replay": replay,
        "counterexample": None if counterexample is None else _encode_counterexample(law.slug, counterexample),
    }


def _encode_counterexample(slug: str, counterexample: Counterexample) -> dict[str, Any]:
    plain = ("changed", "place", "happened", "moved", "bound", "precision", "touched", "map")
    words = dict(zip(counterexample.case, describe(slug, counterexample.case), strict=True))
    return {
        "case": {word.name: _encode_value(word.value) for word in words.values()},
        "meaning": {word.name: word.meaning for word in words.values()},
        "remarks": {words[key].name if key in words else key: text for key, text in counterexample.remarks.items()},
        **{name: _encode_value(getattr(counterexample, name)) for name in plain},
    }


def _encode_value(value: Any) -> Any:
    """A value as JSON has it; text where it has no other form."""
    if isinstance(value, Tensor):
        return _encode_value(value.tolist()) if value.numel() <= MOST_NUMBERS else None
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(name): _encode_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode_value(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else repr(value)


def _quote(value: Any) -> str:
    """As Python source, in the quotes of this house."""
    if isinstance(value, list):
        return f"[{', '.join(_quote(item) for item in value)}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _write_if_asked(text: str, path: str | Path | None) -> str:
    if path is not None:
        write_file(path, text)
    return text


__all__ = ["Report", "violation"]
