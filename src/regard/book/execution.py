"""Execution of a page: its blocks in one namespace, with what they print, their last value and their figures."""

from __future__ import annotations

import ast
import contextlib
import io
import random
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch

from regard.book.figures import find_caption, find_svg
from regard.book.page import Code, Page, Prose
from regard.book.values import fill_values, format_value, split_format
from regard.errors import PageError

SEED = 0
LONGEST_VALUE = 200  # characters of a value in a message


class Output(NamedTuple):
    """A code block with what it printed, the text of its last expression, and its figure as SVG."""

    code: Code
    printed: str = ""
    result: str = ""
    svg: str = ""
    caption: str = ""


@dataclass(frozen=True)
class ExecutedPage:
    """A page after its run: prose with its values filled in, and outputs; `namespace` has the names of the page."""

    page: Page
    parts: tuple[Prose | Output, ...]
    namespace: dict[str, Any]

    @property
    def figures(self) -> list[str]:
        """All figures, as SVG."""
        return [part.svg for part in self.parts if isinstance(part, Output) and part.svg]


def run_page(page: Page) -> ExecutedPage:
    """Run every block of a page in order; a block that raises, or an assertion that fails, raises `PageError`.

    Random generators start from the same seed for each page, and the state of torch is restored.
    """
    namespace: dict[str, Any] = {"__name__": "__page__", "__file__": page.path}
    parts: list[Prose | Output] = []
    with _isolated_state():
        for part in page.parts:
            parts.append(_fill(page, part, namespace) if isinstance(part, Prose) else _run(page, part, namespace))
        # Prose may announce what a later block computes.
        parts = [_fill(page, part, namespace, final=True) if isinstance(part, Prose) else part for part in parts]
    return ExecutedPage(page, tuple(parts), namespace)


def _run(page: Page, code: Code, namespace: dict[str, Any]) -> Output:
    out = io.StringIO()
    value = None
    try:
        # Padded with empty lines, so that a traceback has the lines of the file.
        tree = ast.parse("\n" * (code.line - 1) + code.source, page.path)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(out):
            exec(compile(tree, page.path, "exec"), namespace)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), page.path, "eval"), namespace)  # type: ignore[attr-defined]
    except Exception as failure:
        raise _explain(page, code, failure, namespace) from failure
    svg = find_svg(value) or ""
    result = "" if value is None or svg else _show(value)
    return Output(code, out.getvalue().rstrip(), result, svg, find_caption(value) if svg else "")


def _show(value: Any) -> str:
    """The text of a last expression: tables as they are printed, everything else as Python shows it."""
    return str(value) if hasattr(value, "to_markdown") else repr(value)


def _fill(page: Page, prose: Prose, namespace: dict[str, Any], final: bool = False) -> Prose:
    def evaluate(text: str) -> str:
        try:
            expression, spec = split_format(text)
            return format_value(eval(expression, namespace), spec)
        except Exception as failure:
            if isinstance(failure, NameError) and not final:
                return f"{{{{ {text} }}}}"
            raise PageError(
                f"A value of the page {page.id} cannot be computed.",
                asked=f"{{{{ {text} }}}}",
                found=f"{page.path}:{prose.line} (the paragraphs from this line on)",
                because=f"{type(failure).__name__}: {failure}",
                instead="an expression of names that the blocks of the page define",
            ) from failure

    return prose._replace(text=fill_values(prose.text, evaluate))


def _explain(page: Page, code: Code, failure: Exception, namespace: dict[str, Any]) -> PageError:
    """The failure of a block: the line of the page, and for an assertion the values on both sides."""
    lines = [frame.lineno for frame in traceback.extract_tb(failure.__traceback__) if frame.filename == page.path]
    line = next(iter(lines), None) or getattr(failure, "lineno", None) or code.line
    source = code.source.split("\n")
    statement = source[line - code.line].strip() if 0 <= line - code.line < len(source) else ""
    failed = isinstance(failure, AssertionError)
    because = f"{type(failure).__name__}: {failure}".rstrip(": ")
    if failed and type(failure) is AssertionError:
        because = "\n".join([because, *_values_of_assertion(code, line, namespace)])
    return PageError(
        f"A check of the page {page.id} fails." if failed else f"A block of the page {page.id} fails.",
        asked=statement,
        found=f"{page.path}:{line}",
        because=because,
        instead="a page whose every statement is true: mend the page, or what it uses",
    )


def _values_of_assertion(code: Code, line: int, namespace: dict[str, Any]) -> list[str]:
    """The value of each side of the comparison at this line of the page."""
    for node in ast.walk(ast.parse(code.source)):
        first = getattr(node, "lineno", 0) + code.line - 1
        if isinstance(node, ast.Assert) and first <= line <= (node.end_lineno or 0) + code.line - 1:
            test = node.test
            sides = [test.left, *test.comparators] if isinstance(test, ast.Compare) else [test]
            return [f"{ast.unparse(side)} is {_value(side, namespace)}" for side in sides if not _is_plain(side)]
    return []


def _is_plain(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant)


def _value(node: ast.expr, namespace: dict[str, Any]) -> str:
    try:
        text = repr(eval(compile(ast.Expression(node), "<assertion>", "eval"), namespace))
    except Exception as failure:  # a name of a comprehension or function, which is not in the namespace
        return f"not known here ({type(failure).__name__})"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]} ..."


@contextlib.contextmanager
def _isolated_state() -> Iterator[None]:
    """Fixed seeds, and the global state of torch, numpy and random restored at the end."""
    dtype, of_numpy, of_random = torch.get_default_dtype(), numpy.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        numpy.random.seed(SEED)
        random.seed(SEED)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            numpy.random.set_state(of_numpy)
            random.setstate(of_random)
