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
EPILOG = "Ends with 0 if every claim holds, 1 if one is broken, flaky or undecided, 2 for wrong arguments."


def add(commands: Any) -> None:
    """Add the command `check`."""
    parser = commands.add_parser(
        "check",
        help="check TARGET against the laws that it claims",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument("target", metavar="TARGET", nargs="?", help="what to check")
    parser.add_argument("--kind", choices=KINDS, help="how to call it, if its signature does not tell")
    parser.add_argument("--attn", metavar="NAME", help="attention of a model of Hugging Face: regard, sdpa, eager")
    parser.add_argument("--law", metavar="SLUG", action="append", default=[], help="check this law only; repeatable")
    parser.add_argument("--claims", metavar="A,B", help="the laws that it claims; by default inferred from its kind")
    parser.add_argument(
        "--also", metavar="A,B", action="append", default=[], help="check these laws besides its claims; repeatable"
    )
    parser.add_argument(
        "--reference", metavar="TARGET", help="compare values with this too: a function or module called like TARGET"
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="the same seed draws the same cases")
    parser.add_argument("--fast", action="store_true", help="a tenth of the search")
    parser.add_argument("--seconds", metavar="S", type=float, help="stop a law after this time; it is undecided then")
    parser.add_argument("--probe", action="store_true", help="try every law and print which hold, without claims")
    parser.add_argument(
        "--option",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a size or convention: heads=3, mask=hide, empty=mean, pattern='Window(3, 0)', image_size=3,64,64",
    )
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON")
    parser.add_argument("--html", metavar="FILE", help="write the report as a page")
    parser.add_argument(
        "--script", metavar="FILE", help="write the counterexample as a Python file that needs torch and TARGET alone"
    )
    parser.add_argument("--list", action="store_true", help="list the laws that would be checked, and exit")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check, print and write the report; return the exit status."""
    laws = [slug for given in args.law for slug in _split_slugs(given)]
    claims = None if args.claims is None else _split_slugs(args.claims)
    also = [slug for given in args.also for slug in _split_slugs(given)]
    if args.target is None:
        if args.list:
            return list_laws(args, [*laws, *(claims or []), *also])
        raise InputError(
            "no target was given.",
            because="the laws are checked by calling a target",
            instead="regard check module:name; regard check --help shows other targets",
        )
    options = dict(read_option(text) for text in args.option)
    check_writable(args.json, args.html, args.script)

    from regard.adapters import adapt
    from regard.cli.targets import load_target, set_attention
    from regard.laws import check, probe
    from regard.laws.checking import find_laws
    from regard.laws.claims import infer_claims

    named = [slug for slug in laws if slug != "reference" or args.reference is None]
    if named or claims is not None or also:
        find_laws([*named, *(claims or []), *also])  # raises for a misspelt law before the search begins
    target = load_target(args.target, args.seed)
    if args.attn is not None:
        set_attention(target, args.attn)
    subject = adapt(target, args.kind, **options)
    reference = None if args.reference is None else _find_reference(args, target, subject, options)
    chosen = named or claims or (None if args.probe else infer_claims(subject))
    chosen = chosen if chosen is None or named else [*chosen, *also]
    if args.list:
        return list_laws(args, chosen)
    from regard.laws import LAWS

    with _show_progress(len(find_laws(chosen)) if chosen else len(LAWS)) as progress:
        if args.probe:
            report = probe(
                subject, laws=chosen, seed=args.seed, fast=args.fast, seconds=args.seconds, progress=progress
            )
        else:
            only = laws or None
            report = check(
                subject,
                claims=claims,
                only=only,
                also=also,
                reference=reference,
                seed=args.seed,
                fast=args.fast,
                seconds=args.seconds,
                progress=progress,
            )
    report.asked = {"kind": args.kind, "claims": claims, "also": also, "reference": args.reference, **options}
    report.target = args.target
    report.command = _format_command(args)
    return _write_report(report, args)


def _find_reference(args: argparse.Namespace, target: Any, subject: Adapter, options: dict[str, Any]) -> Adapter:
    """The reference, made with the same seed; where names and shapes of parameters fit it has those of the target."""
    from regard.cli.targets import load_target
    from regard.laws.reference import copy_parameters, read_reference

    reference = load_target(args.reference, args.seed)
    if copy_parameters(target, reference):
        print("the reference has the parameters of the target; buffers are its own", file=sys.stderr)
    return read_reference(reference, subject, args.kind, options).subject


def list_laws(args: argparse.Namespace, names: list[str] | None = None) -> int:
    """Print each law with its equation and what it says."""
    from regard.laws import LAWS
    from regard.laws.checking import find_laws

    for law in find_laws(names) if names else LAWS:
        print(f"{law.id:<4}{law.slug:<20}{law.equation}")
        print(f"{'':<24}{law.statement}")
    return 0


def _split_slugs(text: str) -> list[str]:
    return [slug.strip() for slug in text.split(",") if slug.strip()]


def _format_command(args: argparse.Namespace) -> str:
    """The command again, without its law, its seed and where it writes."""
    parts = ["regard", "check", args.target]
    for name in ("kind", "claims", "reference"):
        if getattr(args, name) is not None:
            parts += [f"--{name}", getattr(args, name)]
    for slugs in args.also:
        parts += ["--also", slugs]
    for option in args.option:
        parts += ["--option", option]
    parts += [f"--{name}" for name in ("fast", "probe") if getattr(args, name)]
    return shlex.join(parts)


def _write_report(report: Report, args: argparse.Namespace) -> int:
    report.show()
    for file, write in (
        (args.json, report.to_json),
        (args.html, report.to_html),
        (args.script, report.script),
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
def _show_progress(total: int) -> Iterator[Progress | None]:
    """A transient progress bar on the error stream, if that is a terminal."""
    with progress_on_stderr("{task.fields[law]:<20}", "{task.completed}/{task.total} {task.fields[cases]}") as bar:
        if bar is None:
            yield None
            return
        task = bar.add_task("laws", total=total, law="", cases="")
        started: list[str] = []

        def progress(slug: str, number: int, cases: int) -> None:
            if slug not in started:
                started.append(slug)
            bar.update(task, completed=len(started) - 1, law=slug, cases=f"{cases} cases")

        yield progress
