"""A sheet as LaTeX: headings, paragraphs with code, blocks of code, and the lines for answers."""

from __future__ import annotations

import re

SIGNS = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "β": r"$\beta$"}
SIGNS |= {sign: f"\\{sign}" for sign in "#$%&_{}"} | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
PREAMBLE = r"""\documentclass[11pt]{article}
\usepackage[T1]{fontenc}
\usepackage[margin=2.2cm]{geometry}
\setlength{\parindent}{0pt}
\setlength{\parskip}{.6em}
\begin{document}
"""
BLOCK = re.compile(r"^```text\n(?P<code>.*?)\n```$", re.DOTALL)
INLINE = re.compile(r"`(?P<code>[^`]+)`|\\(?P<sign>[*_])")


def to_latex(sheet: str) -> str:
    """A whole document of a sheet, which is the Markdown that `make_sheet` writes."""
    return PREAMBLE + "\n\n".join(_convert(block) for block in sheet.strip().split("\n\n")) + "\n\\end{document}\n"


def _convert(block: str) -> str:
    match = BLOCK.match(block)
    if match is not None:
        lines = [f"\\texttt{{{_escape(line)}}}" for line in match["code"].split("\n")]
        return "\\begin{flushleft}\n" + "\\\\\n".join(lines) + "\n\\end{flushleft}"
    for mark, command in (("## ", "section*"), ("# ", "section*")):
        if block.startswith(mark):
            size = "" if mark == "# " else "\\large "
            return f"\\{command}{{{size}{_convert_inline(block[len(mark) :])}}}"
    if block.startswith("answer "):
        return f"\\texttt{{{_escape(block)}}} \\hrulefill"
    return _convert_inline(block)


def _convert_inline(text: str) -> str:
    """Prose: code between backticks, and signs that Markdown had to escape."""
    made, last = [], 0
    for match in INLINE.finditer(text):
        made.append(_escape(text[last : match.start()]))
        made.append(f"\\texttt{{{_escape(match['code'])}}}" if match["code"] else _escape(match["sign"]))
        last = match.end()
    return "".join([*made, _escape(text[last:])])


def _escape(text: str) -> str:
    return "".join(SIGNS.get(sign, sign) for sign in text)
