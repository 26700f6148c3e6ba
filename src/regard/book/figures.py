"""SVG figures of the objects that code blocks end with: drawings, charts, pictures and matplotlib figures."""

from __future__ import annotations

import io
import re
from typing import Any


def find_svg(value: Any) -> str | None:
    """The object as one SVG element, or None if it is not a figure.

    Anything with `_repr_svg_` or `svg` (a method or an attribute), SVG text, and matplotlib figures.
    """
    if isinstance(value, str):
        return _trim(value) if re.match(r"\s*(<\?xml[^>]*>\s*)?<svg\b", value) else None
    for name in ("_repr_svg_", "svg"):
        found = getattr(value, name, None)
        if found is not None:
            return _trim(str(found() if callable(found) else found))
    if type(value).__module__ == "matplotlib.figure":
        return _trim(_save(value))
    return None


def find_caption(value: Any) -> str:
    """The caption of a picture, if it has one."""
    caption = getattr(value, "caption", "")
    return caption if isinstance(caption, str) else ""


def _save(figure: Any) -> str:
    import matplotlib

    out = io.StringIO()
    # The same bytes every day: no date, and names that do not depend on a random number.
    with matplotlib.rc_context({"svg.hashsalt": "regard"}):
        figure.savefig(out, format="svg", metadata={"Date": None}, bbox_inches="tight")
    return out.getvalue()


def _trim(svg: str) -> str:
    """The element without prologue, metadata, comments and empty lines, which would end a block of HTML in Markdown."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    return re.sub(r"\n\s*(?=\n)", "", svg).strip()
