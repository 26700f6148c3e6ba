"""Parsing of command-line arguments, shared by all commands."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

from regard.errors import InputError

USAGE = 2  # exit code of a command line that cannot be parsed or run
CONSTANTS = {"true": True, "false": False, "none": None}


class Parser(argparse.ArgumentParser):
    """argparse with the descriptions as they are written, and errors that end with the command for help."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def error(self, message: str) -> None:  # type: ignore[override]
        print(f"regard: {message}.\n  instead  {self.prog} --help", file=sys.stderr)
        raise SystemExit(USAGE)


def read_option(text: str) -> tuple[str, Any]:
    """`heads=3` as a name and a value: a number, a constant, numbers with commas, a pattern, or a word."""
    name, value = split_option(text)
    return name, read_value(name, value)


def split_option(text: str) -> tuple[str, str]:
    """`heads=3` as a name and the text after the equals sign."""
    name, equals, value = text.partition("=")
    name = name.strip().replace("-", "_")
    if not equals or not name.isidentifier() or not value.strip():
        raise InputError(
            f"{text!r} is not an option.",
            because="an option is a name, an equals sign and a value",
            instead="--option heads=3",
        )
    return name, value.strip()


def read_value(name: str, text: str) -> Any:
    """The value of an option: a constant, a number, numbers with commas, a pattern, or a word."""
    if text.lower() in CONSTANTS:
        return CONSTANTS[text.lower()]
    if name == "pattern":
        from regard.patterns import read_pattern

        return read_pattern(text)
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    if re.fullmatch(r"\d+(,\d+)+", text):
        return tuple(int(part) for part in text.split(","))
    try:
        return float(text)
    except ValueError:
        return text


def read_count(text: str) -> int:
    """The argument of an option that is a whole number of at least 1, for argparse."""
    if not re.fullmatch(r"\d+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def read_integers(flag: str, text: str | None) -> list[int] | None:
    """The comma-separated integers of an option."""
    if text is None:
        return None
    because = "it must be integers separated by commas" if text.strip() else "it is empty"
    try:
        numbers = [int(part) for part in text.split(",")]
        if any(abs(number) >= 2**63 for number in numbers):
            because = "a number has more than 64 bits"
            raise ValueError
        return numbers
    except ValueError as failure:
        raise InputError(
            f"{text!r} is not a list of integers.",
            asked=f"--{flag} {text}",
            because=because,
            instead=f"--{flag} 0,2",
        ) from failure
