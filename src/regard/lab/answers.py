"""Answers to the page: JSON, arrays in it, lines of progress, and errors in four parts."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import torch
from starlette.responses import Response
from torch import Tensor

from regard.errors import InputError, RegardError
from regard.lab.inputs import Gone
from regard.lab.jobs import Busy

MOST_ERROR_CHARACTERS = 2000


class Refused(InputError):
    """A request that is not answered, with the status of the answer."""

    def __init__(self, headline: str, *, status: int, because: str, instead: str, asked: str = "", found: str = ""):
        super().__init__(headline, asked=asked, found=found, because=because, instead=instead)
        self.status = status


def encode_array(values: Tensor) -> dict[str, Any]:
    """A tensor of bytes or of numbers, as the page reads it."""
    values = values.detach().cpu().contiguous()
    values = values if values.dtype == torch.uint8 else values.float()
    data = base64.b64encode(values.numpy().tobytes()).decode("ascii")  # little endian on every machine torch runs on
    return {"dtype": "uint8" if values.dtype == torch.uint8 else "float32", "shape": list(values.shape), "data": data}


def json_response(content: Any, status: int = 200) -> Response:
    return Response(encode_json(content), status, media_type="application/json")


def encode_json(content: Any) -> bytes:
    """JSON; what is not finite is null, which JSON has and NaN is not."""
    try:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_make_finite(content), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")  # half a surrogate pair, which a text of JSON may hold


def _make_finite(content: Any) -> Any:
    if isinstance(content, float) and not math.isfinite(content):
        return None
    if isinstance(content, dict):
        return {key: _make_finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_make_finite(value) for value in content]
    return content


def describe_error(failure: BaseException) -> dict[str, Any]:
    """An error in the parts that the page shows. Nothing of the stack is sent."""
    if isinstance(failure, RegardError):
        parts = {name: getattr(failure, name) for name in ("asked", "found", "because", "instead")}
        parts = {"title": failure.headline, **parts}
    else:
        lines = str(failure).strip().splitlines() or [""]
        parts = {
            "title": "The computation failed.",
            "found": f"{type(failure).__name__}: {lines[0]}",
            "because": "the model, or what it was asked for, raised this error",
            "instead": "another input; the terminal of regard lab has the traceback",
        }
    return {"error": {name: text[:MOST_ERROR_CHARACTERS] for name, text in parts.items() if text}}


def find_status(failure: BaseException) -> int:
    if isinstance(failure, Refused):
        return failure.status
    if isinstance(failure, Busy):
        return 503
    if isinstance(failure, Gone):
        return 404
    return 400 if isinstance(failure, RegardError) else 500


def error_response(failure: BaseException) -> Response:
    response = json_response(describe_error(failure), find_status(failure))
    if isinstance(failure, Busy):
        response.headers["retry-after"] = "1"
    return response
