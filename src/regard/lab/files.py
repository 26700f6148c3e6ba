"""The files of the page: a fixed table, made when the server starts. No path is ever built from a request."""

from __future__ import annotations

import functools
from importlib import resources

from regard.lab.answers import Refused

MEDIA_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}


@functools.cache
def list_static() -> dict[str, tuple[bytes, str]]:
    """Every file of the lab's own page, by its name."""
    found = {}
    folder = resources.files("regard.lab").joinpath("static")
    for file in folder.iterdir() if folder.is_dir() else ():
        suffix = "." + file.name.rpartition(".")[2]
        if suffix in MEDIA_TYPES:
            found[file.name] = (file.read_bytes(), MEDIA_TYPES[suffix])
    return found


def read_static(folder: str, name: str) -> tuple[bytes, str]:
    """A file of the page or of the components, with its media type."""
    if folder == "static" and name in list_static():
        return list_static()[name]
    if folder == "components":
        from regard.render.components import read_component

        try:
            return read_component(name)
        except KeyError:
            pass
    raise Refused(
        "There is no such file.",
        status=404,
        asked=f"/{folder[:40]}/{name[:80]}",
        because="the files of the page are a fixed list",
        instead="the page at /",
    )
