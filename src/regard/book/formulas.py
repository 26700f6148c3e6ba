"""Formulas in prose, `$...$` and `$$...$$`: found outside of code, and replaced by MathML or Unicode text."""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Callable

from regard.book.unicode_formulas import to_unicode
from regard.errors import PageError

# Code first: a dollar in code is a dollar.
PIECES = re.compile(
    r"(?P<code>^(?P<fence>`{3,}|~{3,})[^\n]*\n.*?^(?P=fence)[^\n]*$|(?P<ticks>`+).+?(?<!`)(?P=ticks)(?!`))"
    r"|(?<!\\)\$\$(?P<block>.+?)(?<!\\)\$\$"
    r"|(?<![\\$])\$(?P<inline>[^\s$](?:[^$]*?[^\s\\$])?)\$(?!\d)",
    re.DOTALL | re.MULTILINE,
)
# What Markdown would read inside of an element; as entities it cannot.
MARKDOWN_SIGNS = {sign: f"&#{ord(sign)};" for sign in "*_`[]\\|~^$"}


def replace_formulas(text: str, render: Callable[[str, bool], str]) -> str:
    """The text with `render(latex, is_block)` in place of every formula; code stays."""

    def replace(match: re.Match[str]) -> str:
        if match["code"] is not None:
            return match["code"]
        block = match["block"] is not None
        return render((match["block"] if block else match["inline"]).strip(), block)

    return PIECES.sub(replace, text)


def as_mathml(latex: str, block: bool) -> str:
    """A formula as MathML that survives Markdown: on one line, or for a block in a paragraph of its own.

    Browsers show MathML without a script and without the network. Without latex2mathml it is Unicode text.
    """
    math = _convert(latex, block)
    return f'\n\n<div class="formula">{math}</div>\n\n' if block else math


def as_unicode(latex: str, block: bool) -> str:
    """A formula as text for a terminal: in a block of code, or inside of the line."""
    text = to_unicode(latex)
    if block:
        return "\n\n" + "\n".join(f"    {line}" for line in text.split("\n")) + "\n\n"
    return _escape_markdown(text)


@functools.cache
def _convert(latex: str, block: bool) -> str:
    try:
        from latex2mathml.converter import convert
    except ImportError:
        return f'<span class="formula">{_protect(html.escape(to_unicode(latex), quote=False))}</span>'
    # The library knows the environment by its other name, and these operators by none.
    known = re.sub(r"\\(begin|end)\{aligned\}", r"\\\1{align*}", latex)
    known = re.sub(r"\\arg\\(max|min)(?![A-Za-z])", r"\\operatorname{arg\1}", known)
    try:
        math = convert(known, display="block" if block else "inline").replace("\n", " ")
    except Exception as failure:
        raise _refuse(latex, f"{type(failure).__name__} {failure}") from failure
    unknown = re.search(r">\\([A-Za-z]+)", math)
    if unknown is not None:
        raise _refuse(latex, f"\\{unknown[1]} is not known")
    # The text between the tags only: attributes may have any sign.
    math = re.sub(r">&(?=<)", ">&amp;", math)
    return re.sub(r">([^<]+)<", lambda text: f">{_protect(text[1])}<", math)


def _refuse(latex: str, because: str) -> PageError:
    return PageError("A formula cannot be converted.", asked=latex, because=because, instead="plain LaTeX mathematics")


def _protect(text: str) -> str:
    return "".join(MARKDOWN_SIGNS.get(sign, sign) for sign in text)


def _escape_markdown(text: str) -> str:
    return re.sub(r"([\\*_`\[\]<|])", r"\\\1", text)
