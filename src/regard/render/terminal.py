"""Output by rich: in color to a terminal, as plain text elsewhere. rich is imported on first use."""

from __future__ import annotations

import io
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.progress import Progress
    from rich.text import Text

WIDTH = 100  # columns if the output is not a terminal
# Tables are fitted before they get here; a line that is still too long is wrapped by the terminal, never cropped.
UNLIMITED = 10_000


def plain_text(shown: RenderableType) -> str:
    """The output of rich as text without color and trailing spaces, independent of the terminal."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=UNLIMITED, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(shown, crop=False)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().split("\n"))


def print_fitted(make: Callable[[int], RenderableType]) -> None:
    """Print what `make` returns for a width: in color to a terminal, as plain text of 100 columns elsewhere."""
    from rich.console import Console

    console = Console(highlight=False)
    if console.is_terminal:
        console.print(make(console.width), crop=False, width=UNLIMITED)
    else:
        print(plain_text(make(WIDTH)))


def output_width() -> int:
    """The width of the terminal that `print` writes to; 100 if it is not a terminal."""
    from rich.console import Console

    return Console().width if sys.stdout.isatty() else WIDTH


def one_line(*pieces: tuple[str, str]) -> Text:
    """Styled pieces of text as one line, which rich does not break.

    Plain text, not rich markup: names of modules may have brackets.
    """
    from rich.text import Text

    return Text.assemble(*pieces, no_wrap=True, overflow="ignore")


def remarks(notes: Iterable[str], width: int) -> list[Text]:
    """Notes below a table, dimmed, each wrapped separately."""
    return [one_line((line, "dim")) for note in notes for line in textwrap.wrap(note, max(width, 40))]


def stack(*blocks: RenderableType | list[Any]) -> Group:
    """Blocks with an empty line between them; a block is a renderable, or a list of them without gaps."""
    from rich.console import Group
    from rich.text import Text

    rows: list[RenderableType] = []
    for block in blocks:
        parts = block if isinstance(block, list) else [block]
        rows += [Text(), *parts] if rows and parts else parts
    return Group(*rows)


@contextmanager
def progress_on_stderr(before: str, after: str, *, remaining: bool = False) -> Iterator[Progress | None]:
    """A progress bar on stderr between two texts, removed at the end; None if stderr is not a terminal.

    before, after: formats of rich, such as `"{task.fields[loss]}"`.
    remaining: whether the estimated remaining time is shown.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TimeRemainingColumn

    columns = (before, BarColumn(), after, *([TimeRemainingColumn()] if remaining else []))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield progress
