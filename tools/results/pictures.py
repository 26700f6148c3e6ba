"""Pictures: the pixels that matplotlib draws, the text of our own SVG, and the numbers behind both."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import torch
from attention import PATTERNS
from modules import IMAGE, TEXT, make_models
from record import Record, fill_parameters
from torch import Tensor

from regard import Alibi, Attention, Causal, Quadratic, Window, cost, gallery, show
from regard.cost_model.chart import draw_curves
from regard.layers import head_profiles


def record_pictures(record: Record) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    torch.manual_seed(0)
    models = {name: model for name, (model, _, _) in make_models().items()}
    for model in models.values():
        fill_parameters(model.eval())
    drawn = {
        "vit pixel": lambda: show(models["vit"], IMAGE[0], query=(2, 5)),
        "gpt matrices": lambda: show(models["gpt"], TEXT[0]),
        "gpt query": lambda: show(models["gpt"], TEXT[0], query=4),
        "spatial heads": lambda: show(models["spatial, quadratic"]),
        "spatial paths": lambda: show(
            [head_profiles(models[f"spatial, {kind}"]) for kind in ("gaussian", "quadratic")]
        ),
        "quadratic": lambda: show(Quadratic(2, grid=(5, 7), centre=[[0, 1], [-1, 0]])),
        "alibi": lambda: show(Alibi(2), 12),
        "pattern": lambda: show(Causal() & Window(3, 0), 12),
    }
    for name, make in drawn.items():
        with record.case(f"pictures/{name}"):
            picture = make()
            canvas = FigureCanvasAgg(picture.figure)
            canvas.draw()
            record.add(f"pictures/{name}", _hash(bytes(canvas.buffer_rgba())))
            record.add(f"pictures/{name} data", _find_tensors(picture.data))
    for name, pattern in PATTERNS.items():
        record.add(f"pictures/pattern {name}", _hash(_strip_words(gallery([pattern.draw(35)]))))
    curves = {"softmax": cost(Attention(), dim=64), "linear": cost(Attention(feature_map="elu1"), dim=64)}
    chart = draw_curves(curves, low=32)
    record.add("pictures/cost curves", _hash(_strip_words(chart.svg)))


def _strip_words(svg: str) -> str:
    """The marks of a drawing without its text and labels, which may be reworded."""
    svg = re.sub(r"<(text|title|desc)\b.*?</\1>", "", svg, flags=re.DOTALL)
    return "\n".join(sorted(re.findall(r'\b(?:d|points|x|y|x1|y1|x2|y2|width|height|r|cx|cy)="[^"]*"', svg)))


def _find_tensors(data: Any) -> Any:
    if isinstance(data, Mapping):
        found = {str(key): _find_tensors(each) for key, each in data.items()}
        return {key: each for key, each in found.items() if each is not None}
    return data if isinstance(data, Tensor) else None


def _hash(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()
