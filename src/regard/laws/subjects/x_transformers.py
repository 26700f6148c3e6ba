"""Soon."""

from __future__ import annotations

from typing import Any

from regard.laws.subjects.base import Subject


def recognise(target: Any, kind: str | None, name: str, options: dict[str, Any]) -> Subject | None:
    return None
