"""HTML and SVG elements that are escaped by construction: text is escaped unless it is `Markup` already."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any


class Markup(str):
    """Text that is HTML or SVG already and is used as it is; any other text is escaped where it is used."""

    __slots__ = ()


def escape(text: Any) -> Markup:
    """The text as the content of an element; `Markup` comes back unchanged.

    >>> from regard.render.markup import Markup, escape
    >>> escape("a < b"), escape(Markup("<b>a</b>"))
    ('a &lt; b', '<b>a</b>')
    """
    return text if isinstance(text, Markup) else Markup(html.escape(str(text), quote=False))


def join(parts: Iterable[Any], separator: str = "") -> Markup:
    """All parts in a row, each escaped unless it is `Markup`; the separator is used as it is."""
    return Markup(separator.join(map(escape, parts)))


def element(tag: str, *content: Any, **attributes: Any) -> Markup:
    """An element; without content it closes itself, as `<path/>`, and with an empty text it does not.

    Attribute names are written with `_` for `-`, and with a trailing `_` where Python has the word. None and False
    leave an attribute out, True writes its name alone.

        >>> from regard.render.markup import element
        >>> element("text", "a < b", x=1, class_="name", text_anchor="end", fill=None)
        '<text x="1" class="name" text-anchor="end">a &lt; b</text>'
        >>> element("rect", width="7"), element("i", "", hidden=True)
        ('<rect width="7"/>', '<i hidden></i>')
    """
    opened = [tag]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        name = name.removesuffix("_").replace("_", "-")
        opened.append(
            name if value is True else f'{name}="{html.escape(str(value), quote=False).replace(chr(34), "&quot;")}"'
        )
    if not content:
        return Markup(f"<{' '.join(opened)}/>")
    return Markup(f"<{' '.join(opened)}>{join(content)}</{tag}>")


def script_data(value: Any) -> Markup:
    """JSON data for a script of the page, escaped so that no text can close the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Markup(f'<script type="application/json">{text}</script>')
