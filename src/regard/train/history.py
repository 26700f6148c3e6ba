"""What a run leaves behind while it learns: a line for each epoch, and where every head looked."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import CheckpointError
from regard.layers.gaze import Gaze, gazes
from regard.models.files import atomic, tensors
from regard.models.spatial import ContentPosition, SpatialHeads
from regard.train.run import Epoch

HISTORY = "history.jsonl"
HEADS = "heads"
NUMBER = (int, float)
FIELDS = {
    "epoch": int,
    "loss": (*NUMBER, type(None)),
    "accuracy": NUMBER,
    "seconds": NUMBER,
    "rate": NUMBER,
    "layers": dict,
}
MASSES = (0.5, 0.9)
# Between the name of a layer and the name of a tensor; no module's name has it.
SLASH = "/"


# Looking


@torch.no_grad()
def look(model: nn.Module, images: Tensor | None = None) -> dict[str, Gaze]:
    """Where the heads of every layer look; those that look by content are watched while they look at `images`."""
    found = gazes(model)
    watched = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, SpatialHeads) and isinstance(module.position, ContentPosition)
    }
    if not watched or images is None:
        return found

    def watch(name: str):
        def hook(module: Any, inputs: tuple[Tensor, ...]) -> None:
            values = module.value.weight.unflatten(1, (module.heads, module.dim)).transpose(0, 1)
            found[name] = Gaze.observed(module.weights(inputs[0]), module.grid, values)

        return hook

    hooks = [module.register_forward_pre_hook(watch(name)) for name, module in watched.items()]
    try:
        model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def describe(gaze: Gaze) -> dict[str, Any]:
    """A layer's heads in numbers: for each its place, its width, its contours and whether it is degenerate."""
    columns: dict[str, list[Any]] = {
        "mean": gaze.mean.tolist(),
        "width": gaze.width.tolist(),
        "covariance": gaze.covariance.tolist(),
        "degenerate": gaze.degenerate().tolist(),
    }
    if gaze.centre is not None:
        columns["centre"] = gaze.centre.tolist()
    if gaze.precision is not None:
        columns["precision"] = gaze.precision.tolist()
    for mass in MASSES:
        columns[f"level_{round(100 * mass)}"] = gaze.mass_level(mass).tolist()
        columns[f"pixels_{round(100 * mass)}"] = gaze.inside(mass).sum((1, 2)).tolist()
    if gaze.values is not None:
        # Its own kernel's norm, |a_h| |W_h|, of the sum of all heads': small for one that does little.
        norms = gaze.weights.flatten(1).norm(dim=1) * gaze.values.flatten(1).norm(dim=1)
        columns["share"] = (norms / norms.sum().clamp(min=torch.finfo(norms.dtype).tiny)).tolist()
    heads = [{name: values[head] for name, values in columns.items()} for head in range(gaze.heads)]
    layer: dict[str, Any] = {f"coverage_{round(100 * mass)}": gaze.coverage(mass) for mass in MASSES}
    if gaze.values is not None:
        layer["kernel_norm"] = gaze.kernel_norm.item()
    return {**layer, "heads": heads}


# Files


def line_of(epoch: Epoch) -> dict[str, Any]:
    """An epoch as a line of the history."""
    return {
        "epoch": epoch.number,
        "loss": None if math.isnan(epoch.loss) else epoch.loss,
        "accuracy": epoch.accuracy,
        "seconds": epoch.seconds,
        "rate": epoch.rate,
        "layers": {name: describe(gaze) for name, gaze in epoch.gazes.items()},
    }


def heads_file(folder: Path, number: int) -> Path:
    return folder / HEADS / f"epoch-{number:04d}.safetensors"


def write_heads(folder: Path, number: int, gazes: Mapping[str, Gaze]) -> None:
    """Where all heads look, complete or not at all."""
    if not gazes:
        return
    path = heads_file(folder, number)
    path.parent.mkdir(exist_ok=True)
    parts = {f"{name}{SLASH}{what}": t for name, gaze in gazes.items() for what, t in gaze.to_tensors().items()}
    tensors.write_safetensors(path, parts)


def read_heads(path: Path) -> dict[str, Gaze]:
    """Where all heads looked, from the file of an epoch."""
    layers: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.read_safetensors(path).items():
        name, _, what = key.rpartition(SLASH)
        layers.setdefault(name, {})[what] = tensor
    return {name: Gaze.from_tensors(found) for name, found in sorted(layers.items(), key=_layer_order)}


def _layer_order(item: tuple[str, Any]) -> list[tuple[bool, int, str]]:
    """blocks.10 after blocks.9."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in item[0].split(".")]


def append(folder: Path, epoch: Epoch) -> None:
    """Add an epoch's line, down to the disk."""
    with (folder / HISTORY).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line_of(epoch)) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of the history; a last one that a crash has torn is left out."""
    path = folder / HISTORY
    if not path.is_file():
        return []
    rows = path.read_bytes().split(b"\n")
    lines = []
    for number, row in enumerate(rows):
        if not row:
            continue
        try:
            lines.append(_checked(json.loads(row)))
        except (ValueError, KeyError) as failure:
            if number == len(rows) - 1:  # nothing ended it
                break
            raise CheckpointError(
                f"Line {number + 1} of {HISTORY} cannot be read.",
                asked=str(path),
                found=f"{type(failure).__name__}: {failure}",
                because="every line is an epoch as a JSON object, and only the last may be torn by a crash",
                instead="the file as the run left it, or begin the run anew in another folder",
            ) from failure
    return lines


def _checked(line: Any) -> dict[str, Any]:
    if not isinstance(line, dict):
        raise ValueError(f"a {type(line).__name__}")
    for name, kinds in FIELDS.items():
        if not isinstance(line[name], kinds):
            raise ValueError(f"{name} = {line[name]!r}")
    return line


def read_epochs(folder: Path, last: int) -> list[Epoch]:
    """The epochs up to number `last`, with where their heads looked; a history that lacks one is refused."""
    epochs, lines = [], [line for line in read_lines(folder) if line["epoch"] <= last]
    numbers = [line["epoch"] for line in lines]
    if numbers != list(range(last + 1)):
        raise CheckpointError(
            f"{HISTORY} does not tell of every epoch once.",
            asked=f"epochs 0 to {last}, which the checkpoint says are done",
            found=f"epochs {', '.join(map(str, numbers)) or 'of no number'} in {folder / HISTORY}",
            because="lines were lost or doubled after they were written",
            instead="the file as the run left it, or begin the run anew in another folder",
        )
    for line in lines:
        path = heads_file(folder, line["epoch"])
        seen = read_heads(path) if line["layers"] else {}
        loss = math.nan if line["loss"] is None else line["loss"]
        epochs.append(Epoch(line["epoch"], loss, line["accuracy"], line["seconds"], line["rate"], seen))
    return epochs


def cut(folder: Path, last: int) -> None:
    """Forget what lies after epoch `last`: lines and heads that a crash kept from being followed by a checkpoint."""
    kept = [line for line in read_lines(folder) if line["epoch"] <= last]

    def write(path: Path) -> None:
        path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    atomic.write_atomically(folder / HISTORY, write)
    for path in (folder / HEADS).glob("epoch-*.safetensors"):
        if path.stem.removeprefix("epoch-").isdecimal() and int(path.stem.removeprefix("epoch-")) > last:
            path.unlink(missing_ok=True)
