"""The history of a run: a line for each evaluation, the head positions at it, and a line every few steps."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import CheckpointError
from regard.layers.profiles import HeadProfile, head_profiles
from regard.models.io import atomic, tensors
from regard.models.spatial import ContentPosition, SpatialHeads
from regard.train.run import Evaluation

HISTORY, STEPS, SAMPLES = "history.jsonl", "steps.jsonl", "samples.jsonl"
HEADS = "heads"
NUMBER = (int, float)
FIELDS = {
    "number": int,
    "step": int,
    "loss": (*NUMBER, type(None)),
    "metrics": dict,
    "seconds": NUMBER,
    "learning_rate": NUMBER,
    "units": int,
    "layers": dict,
}
MASSES = (0.5, 0.9)
# Separator between the names of layer and tensor; module names do not contain it.
SLASH = "/"


# Head positions


@torch.no_grad()
def measure_head_profiles(model: nn.Module, images: Tensor | None = None) -> dict[str, HeadProfile]:
    """The `HeadProfile` of every layer; for content-based heads, measured on `images`."""
    found = head_profiles(model)
    observed = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, SpatialHeads) and isinstance(module.position, ContentPosition)
    }
    if not observed or images is None:
        return found

    def make_hook(name: str):
        def hook(module: Any, inputs: tuple[Tensor, ...]) -> None:
            values = module.value.weight.unflatten(1, (module.heads, module.dim)).transpose(0, 1)
            found[name] = HeadProfile.observed(module.weights(inputs[0]), module.grid, values)

        return hook

    hooks = [module.register_forward_pre_hook(make_hook(name)) for name, module in observed.items()]
    try:
        model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def summarize_heads(profile: HeadProfile) -> dict[str, Any]:
    """Statistics of a layer's heads: centre, width, contours, and whether each is degenerate."""
    columns: dict[str, list[Any]] = {
        "mean": profile.mean.tolist(),
        "width": profile.width.tolist(),
        "covariance": profile.covariance.tolist(),
        "degenerate": profile.degenerate().tolist(),
    }
    if profile.centre is not None:
        columns["centre"] = profile.centre.tolist()
    if profile.precision is not None:
        columns["precision"] = profile.precision.tolist()
    for mass in MASSES:
        columns[f"level_{round(100 * mass)}"] = profile.mass_level(mass).tolist()
        columns[f"pixels_{round(100 * mass)}"] = profile.inside(mass).sum((1, 2)).tolist()
    if profile.values is not None:
        # The norm of the head's kernel, |a_h| |W_h|, as a share of the sum over heads.
        norms = profile.weights.flatten(1).norm(dim=1) * profile.values.flatten(1).norm(dim=1)
        columns["share"] = (norms / norms.sum().clamp(min=torch.finfo(norms.dtype).tiny)).tolist()
    heads = [{name: values[head] for name, values in columns.items()} for head in range(profile.heads)]
    layer: dict[str, Any] = {f"coverage_{round(100 * mass)}": profile.coverage(mass) for mass in MASSES}
    if profile.values is not None:
        layer["kernel_norm"] = profile.kernel_norm.item()
    return {**layer, "heads": heads}


# Files


def evaluation_to_json(evaluation: Evaluation) -> dict[str, Any]:
    """An evaluation as a line of `history.jsonl`."""
    return {
        "number": evaluation.number,
        "step": evaluation.step,
        "loss": None if math.isnan(evaluation.loss) else evaluation.loss,
        "metrics": evaluation.metrics,
        "seconds": evaluation.seconds,
        "learning_rate": evaluation.learning_rate,
        "units": evaluation.units,
        "layers": {name: summarize_heads(profile) for name, profile in evaluation.head_profiles.items()},
    }


def heads_file(folder: Path, number: int) -> Path:
    return folder / HEADS / f"evaluation-{number:04d}.safetensors"


def write_heads(folder: Path, number: int, head_profiles: Mapping[str, HeadProfile]) -> None:
    """Write the head positions of an evaluation atomically."""
    if not head_profiles:
        return
    path = heads_file(folder, number)
    path.parent.mkdir(exist_ok=True)
    parts = {
        f"{name}{SLASH}{what}": t for name, profile in head_profiles.items() for what, t in profile.to_tensors().items()
    }
    tensors.write_safetensors(path, parts)


def read_heads(path: Path) -> dict[str, HeadProfile]:
    """Read the head positions of an evaluation."""
    layers: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.read_safetensors(path).items():
        name, _, what = key.rpartition(SLASH)
        layers.setdefault(name, {})[what] = tensor
    return {name: HeadProfile.from_tensors(found) for name, found in sorted(layers.items(), key=_layer_order)}


def _layer_order(item: tuple[str, Any]) -> list[tuple[bool, int, str]]:
    """Sort key with numeric parts: blocks.10 after blocks.9."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in item[0].split(".")]


def append_evaluation(folder: Path, evaluation: Evaluation) -> None:
    """Append an evaluation's line and sync it to disk."""
    append_lines(folder / HISTORY, [evaluation_to_json(evaluation)])


def append_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Append JSON objects to a file of lines and sync it to disk."""
    if not lines:
        return
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path, fields: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """The JSON objects of a file of lines, without a last line that a crash left incomplete.

    fields: names and types that every line must have.
    """
    if not path.is_file():
        return []
    rows = path.read_bytes().split(b"\n")
    lines = []
    for number, row in enumerate(rows):
        if not row:
            continue
        try:
            lines.append(_check_line(json.loads(row), fields or {}))
        except (ValueError, KeyError) as failure:
            if number == len(rows) - 1:  # the last line has no newline
                break
            raise CheckpointError(
                f"Line {number + 1} of {path.name} cannot be read.",
                asked=str(path),
                found=f"{type(failure).__name__}: {failure}",
                because="every line is a JSON object, and only the last may be incomplete after a crash",
                instead="the unmodified file of the run, or a new run in another folder",
            ) from failure
    return lines


def _check_line(line: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(line, dict):
        raise ValueError(f"a {type(line).__name__}")
    for name, kinds in fields.items():
        if not isinstance(line[name], kinds):
            raise ValueError(f"{name} = {line[name]!r}")
    return line


def read_history_lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of `history.jsonl`."""
    return read_lines(folder / HISTORY, FIELDS)


def read_evaluations(folder: Path, count: int) -> list[Evaluation]:
    """The first `count` evaluations, with their head positions; raises if one is missing."""
    found, lines = [], [line for line in read_history_lines(folder) if line["number"] < count]
    numbers = [line["number"] for line in lines]
    if numbers != list(range(count)):
        raise CheckpointError(
            f"{HISTORY} does not have every evaluation exactly once.",
            asked=f"evaluations 0 to {count - 1}, which are complete according to the checkpoint",
            found=f"evaluations {', '.join(map(str, numbers)) or 'none'} in {folder / HISTORY}",
            because="lines were lost or duplicated after they were written",
            instead="the unmodified file of the run, or a new run in another folder",
        )
    for line in lines:
        profiles = read_heads(heads_file(folder, line["number"])) if line.pop("layers") else {}
        line["loss"] = math.nan if line["loss"] is None else line["loss"]
        found.append(Evaluation(**line, head_profiles=profiles))
    return found


def _write_text(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")


def truncate_history(folder: Path, count: int, step: int) -> None:
    """Delete what was written after the last checkpoint: evaluations from number `count`, lines after `step`."""
    for name, fields in ((HISTORY, FIELDS), (STEPS, {"step": int}), (SAMPLES, {"step": int})):
        path = folder / name
        lines = read_lines(path, fields)
        kept = [line for line in lines if (line["number"] < count if name == HISTORY else line["step"] <= step)]
        if path.exists():
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept)
            if text.encode() != path.read_bytes():
                atomic.write_atomically(path, functools.partial(_write_text, text))
    for path in (folder / HEADS).glob("evaluation-*.safetensors"):
        number = path.stem.removeprefix("evaluation-")
        if number.isdecimal() and int(number) >= count:
            path.unlink(missing_ok=True)
