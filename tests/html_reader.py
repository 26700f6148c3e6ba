"""A strict HTML parser: every tag is closed, and no id occurs twice."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "br", "link", "img", "input"}


class Reader(HTMLParser):
    """Reads a page, and is strict about what is opened and closed, and about names that occur twice."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.scripts: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == [], f"never closed: {self.open}"
        names = [attributes["id"] for _, attributes in self.tags if "id" in attributes]
        assert len(names) == len(set(names)), names

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif not self.open or self.open[-1] != "style":
            self.words += data
