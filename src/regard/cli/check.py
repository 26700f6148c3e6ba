"""`regard check TARGET` and `regard laws`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from regard.cli.arguments import read_option
from regard.cli.output import check_writable, report_written
from regard.errors import InputError
from regard.render.terminal import progress_on_stderr

if TYPE_CHECKING:
    from regard.adapters import Adapter
    from regard.laws import Report
    from regard.laws.checking import Progress

KINDS = ("operator", "layer", "model")

DESCRIPTION = """Search for the smallest case in which TARGET breaks a law that it claims.

TARGET is one of
  module:name                 a function or a module; a class is built without arguments
  "module:name(16, heads=2)"  a class, or a function that makes one, called with plain values
  file.py:name                the same from a file
  transformers:BertModel      a tiny random model of a class of Hugging Face
  timm:vit_tiny_patch16_224   a model of timm with random weights
  path/to/checkpoint          a folder with a config.json, or a file of weights
"""
EPILOG = "Ends with 0 if every claim holds, 1 if one is broken, flaky or undecided, 2 if the question cannot be asked."


def add(commands: Any) -> None:
    """Teach the command line the word `check`."""
    words = commands.add_parser(
        "check",
        help="check TARGET against the laws that it claims",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    words.add_argument("target", metavar="TARGET", nargs="?", help="what to check")
    words.add_argument("--kind", choices=KINDS, help="how to call it, where that cannot be seen")
    words.add_argument("--law", metavar="SLUG", action="append", default=[], help="look at this law only; repeatable")
    words.add_argument("--claims", metavar="A,B", help="the laws that it claims; its kind decides if not given")
    words.add_argument(
        "--also", metavar="A,B", action="append", default=[], help="check these laws besides its claims; repeatable"
    )
    words.add_argument(
        "--reference", metavar="TARGET", help="compare values with this too: a function or module called like TARGET"
    )
    words.add_argument("--seed", metavar="N", type=int, default=0, help="the same seed draws the same cases")
    words.add_argument("--fast", action="store_true", help="a tenth of the search")
    words.add_argument("--seconds", metavar="S", type=float, help="stop a law after this time; it is undecided then")
    words.add_argument("--probe", action="store_true", help="claim nothing: say which laws hold, and measure")
    words.add_argument(
        "--option",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a size or convention: heads=3, mask=hide, empty=mean, pattern='Window(3, 0)', image_size=3,64,64",
    )
    words.add_argument("--json", metavar="FILE", help="write the report as JSON")
    words.add_argument("--html", metavar="FILE", help="write the report as a page")
    words.add_argument(
        "--script", metavar="FILE", help="write the counterexample as a Python file that needs torch and TARGET alone"
    )
    words.add_argument("--list", action="store_true", help="list the laws that would be looked at, and stop")
    words.set_defaults(run=run)


def run(words: argparse.Namespace) -> int:
    """Check, print, write, and say how it went."""
    laws = [slug for given in words.law for slug in _split(given)]
    claims = None if words.claims is None else _split(words.claims)
    also = [slug for given in words.also for slug in _split(given)]
    if words.target is None:
        if words.list:
            return list_laws(words, [*laws, *(claims or []), *also])
        raise InputError(
            "no target was given.",
            because="a law observes what something does",
            instead="regard check module:name; regard check --help shows other targets",
        )
    options = dict(read_option(text) for text in words.option)
    check_writable(words.json, words.html, words.script)

    from regard.adapters import adapt
    from regard.cli.targets import find
    from regard.laws import check, probe
    from regard.laws.checking import find_laws
    from regard.laws.claims import infer_claims

    named = [slug for slug in laws if slug != "reference" or words.reference is None]
    if named or claims is not None or also:
        find_laws([*named, *(claims or []), *also])  # a misspelt law is told before anything long begins
    target = find(words.target, words.seed)
    subject = adapt(target, words.kind, **options)
    reference = None if words.reference is None else _find_reference(words, target, subject, options)
    chosen = named or claims or (None if words.probe else infer_claims(subject))
    chosen = chosen if chosen is None or named else [*chosen, *also]
    if words.list:
        return list_laws(words, chosen)
    from regard.laws import LAWS

    with _progress(len(find_laws(chosen)) if chosen else len(LAWS)) as progress:
        if words.probe:
            report = probe(
                subject, laws=chosen, seed=words.seed, fast=words.fast, seconds=words.seconds, progress=progress
            )
        else:
            only = laws or None
            report = check(
                subject,
                claims=claims,
                only=only,
                also=also,
                reference=reference,
                seed=words.seed,
                fast=words.fast,
                seconds=words.seconds,
                progress=progress,
            )
    report.asked = {"kind": words.kind, "claims": claims, "also": also, "reference": words.reference, **options}
    report.target = words.target
    report.command = _command(words)
    return _tell(report, words)


def _find_reference(words: argparse.Namespace, target: Any, subject: Adapter, options: dict[str, Any]) -> Adapter:
    """The reference, made with the same seed; where names and shapes of parameters fit it has those of the target."""
    from regard.cli.targets import find
    from regard.laws.reference import copy_parameters, read_reference

    reference = find(words.reference, words.seed)
    if copy_parameters(target, reference):
        print("the reference has the parameters of the target; buffers are its own", file=sys.stderr)
    return read_reference(reference, subject, words.kind, options).subject


def list_laws(words: argparse.Namespace, names: list[str] | None = None) -> int:
    """Print each law with its equation and what it says."""
    from regard.laws import LAWS
    from regard.laws.checking import find_laws

    for law in find_laws(names) if names else LAWS:
        print(f"{law.id:<4}{law.slug:<20}{law.equation}")
        print(f"{'':<24}{law.statement}")
    return 0


def _split(text: str) -> list[str]:
    return [slug.strip() for slug in text.split(",") if slug.strip()]


def _command(words: argparse.Namespace) -> str:
    """The command again, without its law, its seed and where it writes."""
    parts = ["regard", "check", words.target]
    for name in ("kind", "claims", "reference"):
        if getattr(words, name) is not None:
            parts += [f"--{name}", getattr(words, name)]
    for slugs in words.also:
        parts += ["--also", slugs]
    for option in words.option:
        parts += ["--option", option]
    parts += [f"--{name}" for name in ("fast", "probe") if getattr(words, name)]
    return shlex.join(parts)


def _tell(report: Report, words: argparse.Namespace) -> int:
    report.show()
    for file, write in (
        (words.json, report.to_json),
        (words.html, report.to_html),
        (words.script, report.script),
    ):
        if file is None:
            continue
        try:
            write(file)
        except OSError as failure:
            raise InputError(
                f"{file} cannot be written.",
                found=f"{type(failure).__name__}: {failure}",
                because="the system refuses",
                instead="another file",
            ) from failure
        report_written(file)
    return 0 if report.probing or report.ok else 1


@contextmanager
def _progress(total: int) -> Iterator[Progress | None]:
    """A transient progress bar on the error stream, if that is a terminal."""
    with progress_on_stderr("{task.fields[law]:<20}", "{task.completed}/{task.total} {task.fields[cases]}") as bar:
        if bar is None:
            yield None
            return
        task = bar.add_task("laws", total=total, law="", cases="")
        seen: list[str] = []

        def progress(slug: str, number: int, cases: int) -> None:
            if slug not in seen:
                seen.append(slug)
            bar.update(task, completed=len(seen) - 1, law=slug, cases=f"{cases} cases")

        yield progress
