"""The browser components: ES modules and style sheets, served one by one or joined into one script without imports.

Every page of Regard (the lab, the demo's report, saved pictures, the book, notebooks) shows attention by the same
custom elements. They are plain modules beside this file, in `components/`; nothing compiles them, and they load
nothing else.
"""

from __future__ import annotations

import functools
import re
from importlib import resources
from typing import Any

from regard.render.colors import css_variables
from regard.render.markup import element, script_data
from regard.render.page import Widget

PACKAGE = "regard.render"
FOLDER = "components"
MEDIA_TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
PALETTE = "palette.css"  # made from `regard.render.colors`, so that pages and pictures have one palette
STYLE = "components.css"

_IMPORT = re.compile(r'^import (?:\{([^}]*)\} from )?"\./([\w.-]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async function|function|class|const) (\w+))", re.MULTILINE)
_DEFAULT = re.compile(r"^export default ", re.MULTILINE)


def component_names() -> list[str]:
    """The files that `read_component` reads."""
    folder = resources.files(PACKAGE).joinpath(FOLDER)
    names = [file.name for file in folder.iterdir() if file.name.endswith(tuple(MEDIA_TYPES))]
    return sorted([*names, PALETTE])


def read_component(name: str) -> tuple[bytes, str]:
    """The content of a module or style sheet and its media type; an unknown name raises KeyError.

    >>> from regard.render.components import read_component
    >>> read_component("palette.css")[1]
    'text/css; charset=utf-8'
    """
    if name not in component_names():
        raise KeyError(name)
    media_type = MEDIA_TYPES[name[name.rindex(".") :]]
    return (css_variables() if name == PALETTE else _read(name)).encode(), media_type


def bundle(*names: str) -> str:
    """The named modules and all they import as one script, in the order of their imports, without `import` or `export`.

    A page opened from a file cannot import modules, and a notebook takes one. Each module becomes a function of its
    own, so that private names never meet.
    """
    parts = [_wrap(name) for name in _order(names)]
    return "(function () {\n" + "".join(parts) + "})();\n"


def notebook_module() -> str:
    """The ES module of the notebook widget: `export default { render }`, with everything it imports inside."""
    *imported, last = _order(["notebook.js"])
    body = _DEFAULT.sub("const widget = ", _bind_imports(_read(last)))
    return "".join(map(_wrap, imported)) + body + "export default widget;\n"


def notebook_style() -> str:
    """The style sheet of the notebook widget."""
    return css_variables() + _read(STYLE)


def make_component(tag: str, data: Any, *modules: str, caption: str = "", **attributes: Any) -> Widget:
    """A figure of a page: the custom element `tag`, which one of the `modules` defines, around its data as JSON."""
    parts = [element(tag, script_data(data), **attributes)]
    if caption:
        parts.append(element("figcaption", caption))
    return Widget(element("figure", *parts, class_="rg-host"), style=_read(STYLE), script=bundle(*modules))


def _read(name: str) -> str:
    return resources.files(PACKAGE).joinpath(FOLDER, name).read_text(encoding="utf-8")


def _order(names: Any) -> list[str]:
    """The named modules after all that they import, each once."""
    found: dict[str, None] = {}

    def visit(name: str) -> None:
        if name not in found:
            for _, imported in _IMPORT.findall(_read(name)):
                visit(imported)
            found[name] = None

    for name in names:
        visit(name)
    return list(found)


@functools.cache
def _wrap(name: str) -> str:
    """A module as a function that is called once and returns what the module exports."""
    text = _bind_imports(_read(name))
    exported = _EXPORT.findall(text)
    body = _EXPORT.sub("", text)
    return f"const {_scope(name)} = (function () {{\n{body}return {{ {', '.join(exported)} }};\n}})();\n"


def _bind_imports(text: str) -> str:
    """Imports as constants, read from the functions of the modules they name."""
    return _IMPORT.sub(
        lambda found: f"const {{{found[1].replace(' as ', ': ')}}} = {_scope(found[2])};\n" if found[1] else "", text
    )


def _scope(name: str) -> str:
    return "module_" + re.sub(r"\W", "_", name.removesuffix(".js"))
