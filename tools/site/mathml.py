"""A Sphinx extension: formulas as MathML, which browsers show without a script and without the network."""

from __future__ import annotations

from typing import Any

from docutils import nodes

from regard.book.formulas import as_mathml


def setup(app: Any) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def visit_inline(writer: Any, node: nodes.Element) -> None:
    writer.body.append(as_mathml(node.astext(), False))
    raise nodes.SkipNode


def visit_block(writer: Any, node: nodes.Element) -> None:
    writer.body.append(as_mathml(node.astext(), True).strip() + "\n")
    raise nodes.SkipNode
