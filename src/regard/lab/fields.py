"""The fields of a request, read strictly: what has another type, or lies outside its bounds, is refused."""

from __future__ import annotations

import json
import math
from typing import Any

from regard.lab.answers import Refused

MOST_LIST = 4096


class Fields:
    """A JSON object from the page."""

    def __init__(self, content: Any) -> None:
        if not isinstance(content, dict):
            raise _wrong("the body", content, "an object with the fields of this request")
        self.content = content

    @classmethod
    def parse(cls, body: bytes) -> Fields:
        try:
            return cls(json.loads(body or b"{}"))
        except (ValueError, RecursionError) as failure:
            raise Refused(
                "The request is not JSON.",
                status=400,
                found=f"{type(failure).__name__}: {str(failure)[:80]}",
                because="a request is one JSON object in UTF-8",
                instead='{"model": "minilm"}',
            ) from None

    def text(self, name: str, default: str | None = None, most: int = 500_000) -> str:
        value = self._get(name, default)
        if not isinstance(value, str) or len(value) > most:
            raise _wrong(name, value, f"a text of at most {most:,} characters")
        return value.encode("utf-8", "replace").decode()  # half a surrogate pair is no text

    def optional_text(self, name: str) -> str | None:
        return None if self.content.get(name) is None else self.text(name)

    def has(self, name: str) -> bool:
        return self.content.get(name) is not None

    def integer(self, name: str, least: int, most: int, default: int | None = None) -> int:
        return check_integer(name, self._get(name, default), least, most)

    def number(self, name: str, least: float, most: float, default: float | None = None) -> float:
        return check_number(name, self._get(name, default), least, most)

    def choice(self, name: str, choices: tuple[str, ...], default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str) or value not in choices:
            raise _wrong(name, value, f"one of {', '.join(choices)}")
        return value

    def range(self, name: str, size: int) -> tuple[int, int]:
        """Two whole numbers: the first, and one after the last."""
        value = self._get(name, None)
        if not isinstance(value, list) or len(value) != 2:
            raise _wrong(name, value, "two numbers, the first and one after the last")
        first = check_integer(name, value[0], 0, size - 1)
        return first, check_integer(name, value[1], first + 1, size)

    def entries(self, name: str, most: int = MOST_LIST, default: list[Any] | None = None) -> list[Any]:
        value = self._get(name, default)
        if not isinstance(value, list) or len(value) > most:
            raise _wrong(name, value, f"a list of at most {most:,} entries")
        return value

    def object(self, name: str) -> Fields:
        value = self.content.get(name)
        return Fields({} if value is None else value)

    def _get(self, name: str, default: Any) -> Any:
        value = self.content.get(name)
        if value is None and default is None:
            raise _wrong(name, value, "a value")
        return default if value is None else value


def check_integer(name: str, value: Any, least: int, most: int) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _wrong(name, value, f"a whole number from {least} to {most}")
    return value


def check_number(name: str, value: Any, least: float, most: float) -> float:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if not plain or not math.isfinite(value if abs(value) < 1e300 else math.inf) or not least <= value <= most:
        raise _wrong(name, value, f"a number from {least:g} to {most:g}")
    return float(value)


def _wrong(name: str, value: Any, wanted: str) -> Refused:
    return Refused(
        f"{name} is not valid.",
        status=400,
        asked=f"{name}={repr(value)[:100]}",
        because=f"it is {wanted}",
        instead=wanted,
    )
