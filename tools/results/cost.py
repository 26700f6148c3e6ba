"""Cost formulas and their numbers: descriptions, layers, models, modules of other libraries, and the textbook's."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from modules import make_layers, make_models
from record import Record
from torch import nn

from regard import Alibi, Attention, Axial, Causal, Neighborhood, Quadratic, RelativeTable, Strided, Window, cost
from regard.cost_model import textbook

QUANTITIES = ("parameters", "macs", "flops", "bytes", "activation_bytes", "depth", "pairs", "exponentials")
MEMORY = (
    "parameters",
    "gradients",
    "optimizer_state",
    "activations",
    "cache_per_token",
    "peak_forward",
    "peak_training",
)
STEPS = ("forward", "backward", "training", "decode")

DESCRIPTIONS = {
    "full": Attention(),
    "causal": Attention(Causal()),
    "window": Attention(Window(5, 3)),
    "causal window": Attention(Causal() & Window(7, 0)),
    "strided": Attention(Strided(4)),
    "axial": Attention(Axial((5, 7))),
    "neighborhood": Attention(Neighborhood((5, 7), 1)),
    "alibi": Attention(Causal(), bias=Alibi(3)),
    "table": Attention(bias=RelativeTable(3, distance=6)),
    "by position": Attention(scale=0.0, bias=Quadratic(3, (5, 7))),
    "hard": Attention(scale=float("inf")),
    "elu1": Attention(feature_map="elu1"),
    "causal elu1": Attention(Causal(), feature_map="elu1"),
    "favor+": Attention(feature_map="favor+"),
}


def record_costs(record: Record) -> None:
    sizes = {"batch": 2, "tokens": 35, "dim": 8, "heads": 3}
    for name, description in DESCRIPTIONS.items():
        for step in STEPS:
            for backend in (None, "reference", "native", "blocked"):
                _record_cost(record, f"cost/{name} {step} {backend}", description, step=step, backend=backend, **sizes)
        _record_cost(record, f"cost/{name} letters", description)
    torch.manual_seed(0)
    for name, (layer, _) in make_layers().items():
        for step in ("forward", "training"):
            _record_cost(record, f"cost/layer {name} {step}", layer, step=step, **_layer_sizes(name))
    for name, (model, _, _) in make_models().items():
        for step in STEPS:
            _record_cost(
                record, f"cost/model {name} {step}", model, memory=step == "forward", step=step, **_model_sizes(name)
            )
    for name, (module, given) in make_third_party().items():
        _record_cost(record, f"cost/module {name}", module, memory=True, **given)
        _record_cost(record, f"cost/module {name} training", module, step="training", **given)
    for name, table in {
        "attention": textbook.attention(7, 16),
        "mha": textbook.mha(7, 16, 2),
        "append": textbook.append(7, 16),
        "linear": textbook.linear(7, 16),
        "davit": textbook.davit((14, 14), 64),
        "encoding": textbook.encoding(7, 16),
        "parallel": textbook.parallel(7, 16, 2),
        "panels": textbook.panels(9),
        "patterns": textbook.patterns(),
    }.items():
        for index, row in enumerate(table.rows):
            for column, cell in enumerate(row.cells):
                if cell is not None and hasattr(cell, "formula"):
                    record.add(f"textbook/{name} {index} {column}", sympy.srepr(cell.formula))


def make_third_party() -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    """Modules of torch, Hugging Face and timm, as far as they are installed."""
    found: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "torch attention": (nn.MultiheadAttention(12, 3, batch_first=True), {"batch": 2, "tokens": 9}),
        "torch encoder": (nn.TransformerEncoderLayer(12, 3, 20, batch_first=True).eval(), {"batch": 2, "tokens": 9}),
    }
    try:
        from regard.adapters.huggingface import tiny

        found["GPT-2"] = (tiny("GPT2LMHeadModel"), {"batch": 2, "tokens": 9})
        found["BERT"] = (tiny("BertModel"), {"batch": 2, "tokens": 9})
    except ImportError:
        pass
    try:
        import timm

        found["timm ViT"] = (
            timm.create_model("vit_tiny_patch16_224", depth=2, embed_dim=24, num_heads=3),
            {"batch": 1},
        )
    except ImportError:
        pass
    return found


def _layer_sizes(name: str) -> dict[str, Any]:
    if name.startswith(("spatial", "table", "patches")):
        return {"batch": 2, "image": (8, 12)}
    if name.startswith(("windows", "grid", "channels, by")):
        return {"batch": 2, "image": (5, 7)}
    return {"batch": 2, "tokens": 11}


def _model_sizes(name: str) -> dict[str, Any]:
    if name.startswith("davit"):
        return {"batch": 2, "image": (24, 20)}
    if name.startswith(("vit", "spatial")):
        return {"batch": 2}
    return {"batch": 2, "tokens": 11} | ({"context_tokens": 7} if name.startswith("transformer") else {})


def _record_cost(record: Record, where: str, target: Any, memory: bool = False, **words: Any) -> None:
    with record.case(where):
        found = cost(target, **words)
        for name in QUANTITIES:
            quantity = found.quantity(name)
            value = float(quantity.value) if quantity.known else None
            record.add(f"{where} {name}", {"formula": sympy.srepr(quantity.formula), "value": value})
        for name in MEMORY if memory else ():
            with record.case(f"{where} memory {name}"):
                quantity = getattr(found.memory, name)
                record.add(f"{where} memory {name}", {"value": float(getattr(quantity, "value", quantity))})
