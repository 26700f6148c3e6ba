"""Runs of `regard train`, while they run or after: curves, samples, heads, and attention on a fixed input."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from regard.errors import InputError, RegardError
from regard.lab.answers import Refused, encode_array
from regard.lab.fields import Fields, check_integer
from regard.lab.jobs import Job
from regard.lab.kinds import OURS
from regard.lab.opened import OpenedModel
from regard.lab.sources import LoadedModel, Source
from regard.lab.state import Lab
from regard.models.io.atomic import read_json
from regard.train.checkpoint import STEP, find_checkpoints, read_claimed_recipe, read_position
from regard.train.data.text import read_tokenizer
from regard.train.history import HISTORY, SAMPLES, STEPS, heads_file, read_heads, read_lines
from regard.train.loop import MODEL
from regard.visualize.player import player_data

FIXED_TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on."
MOST_TOKENS = 24  # of the fixed input
MOST_FRAMES = 32
MOST_WEIGHTS = 2 << 20  # of a frame: of larger images there is no attention over time
MOST_LINES = 20_000  # of one answer


def list_runs(lab: Lab) -> list[dict[str, str]]:
    return [{"id": name, "name": name} for name in lab.runs]


def read_run(lab: Lab, fields: Fields, job: Job) -> dict[str, Any]:
    """What is new in a run since the cursor of the last answer."""
    folder = _find_folder(lab, fields.text("run"))
    since = _read_cursor(fields)
    recipe = read_claimed_recipe(folder)[0]
    files = {"steps": STEPS, "evaluations": HISTORY, "samples": SAMPLES}
    lines = {name: read_lines(folder / file) for name, file in files.items()}
    cursor = {name: min(len(found), since.get(name, 0) + MOST_LINES) for name, found in lines.items()}
    new = {name: found[since.get(name, 0) : cursor[name]] for name, found in lines.items()}
    checkpoints = find_checkpoints(folder)
    # The final model is the last that a run writes; one that ends early says so in its checkpoint.
    finished = (folder / MODEL / "config.json").is_file() or (bool(checkpoints) and _is_finished(checkpoints[-1]))
    newest = int(_find_step(checkpoints[-1])) if checkpoints else -1
    job.check()
    answer: dict[str, Any] = {
        "kind": recipe.kind,
        "finished": finished and all(cursor[name] == len(found) for name, found in lines.items()),
        "steps": [_flatten(line) for line in new["steps"]],
        "evaluations": [_flatten(line) for line in new["evaluations"]],
        "samples": [
            {"step": line["step"], "text": str(text)} for line in new["samples"] for text in line.get("samples", ())
        ],
    }
    if new["evaluations"]:
        answer["heads"] = _read_heads(folder, lines["evaluations"])
    if newest != since.get("checkpoint", -1):
        answer["attention"] = _read_attention(lab, fields.text("run"), folder, checkpoints, job)
    answer["cursor"] = {**cursor, "checkpoint": newest}
    return answer


def _find_folder(lab: Lab, name: str) -> Path:
    if name not in lab.runs:
        raise Refused(
            "There is no such run.",
            status=404,
            asked=f"run {name[:60]!r}",
            found=", ".join(lab.runs) or "no runs",
            because="the runs of the lab are those of its command line",
            instead="regard lab runs/quadratic",
        )
    return lab.runs[name]


def _read_cursor(fields: Fields) -> dict[str, int]:
    given = fields.content.get("since")
    if given is None:
        return {}
    names = ("steps", "evaluations", "samples", "checkpoint")
    return {name: check_integer(name, Fields(given).content.get(name, 0), -1, 1 << 40) for name in names}


def _flatten(line: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a line, metrics among them."""
    numbers = {**line, **(line.get("metrics") or {})}
    return {
        name: value
        for name, value in numbers.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _find_step(checkpoint: Path) -> str:
    found = STEP.fullmatch(checkpoint.name)
    assert found is not None
    return found.group(1)


def _is_finished(checkpoint: Path) -> bool:
    try:
        return read_position(checkpoint).finished
    except RegardError:  # replaced by a newer one meanwhile
        return False


def _read_heads(folder: Path, lines: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The positions of the heads at every evaluation, as the player of a page shows them; None for content heads."""
    epochs, labels = [], []
    for line in lines:
        path = heads_file(folder, int(line["number"]))
        if line.get("layers") and path.is_file():
            epochs.append(read_heads(path))
            labels.append(f"evaluation {line['number']}, step {line['step']}")
    return player_data(epochs, labels) if epochs else None


def _read_attention(lab: Lab, name: str, folder: Path, checkpoints: list[Path], job: Job) -> dict[str, Any] | None:
    """The weights on a fixed input at every checkpoint that was there while the lab watched, a frame for each."""
    frames = lab.frames.setdefault(name, {})
    for checkpoint in checkpoints[-MOST_FRAMES:]:
        step = int(_find_step(checkpoint))
        if step in frames:
            continue
        try:
            frames[step] = _compute_frame(folder, checkpoint, job)
        except (RegardError, OSError, KeyError, json.JSONDecodeError):
            continue  # a checkpoint that was replaced while it was read, or a model without a map
    for step in sorted(frames)[:-MOST_FRAMES]:
        del frames[step]
    shapes = {maps.shape for maps, _ in frames.values()}
    if len(shapes) != 1:
        return None
    steps = sorted(frames)
    maps = torch.stack([frames[step][0] for step in steps])
    return {
        "labels": [f"step {step:,}" for step in steps],
        "tokens": frames[steps[-1]][1],
        "layers": maps.shape[1],
        "heads": maps.shape[2],
        "maps": encode_array(maps),
    }


def _compute_frame(folder: Path, checkpoint: Path, job: Job) -> tuple[torch.Tensor, list[str]]:
    """The weights of every head `(layer, head, query, key)` as bytes of the largest of each row, and the tokens."""
    kind = str(read_json(checkpoint / "config.json").get("model_type", ""))
    found = next((each for each in OURS if f"regard.{each.__name__.lower()}" == kind), None)
    if found is None:
        raise InputError(
            f"{kind!r} is no model of the lab.",
            because="its class is not known",
            instead=", ".join(each.__name__ for each in OURS),
        )
    model: Any = found
    module = model.from_pretrained(checkpoint)
    tokenizer = read_tokenizer(checkpoint) if (checkpoint / "tokenizer.json").is_file() else None
    opened = OpenedModel(
        folder.name,
        Source(folder.name, str(folder), lambda: LoadedModel(module)),
        LoadedModel(module, tokenizer),
        job.check,
    )
    if opened.image_shape is not None:
        channels, rows, columns = opened.image_shape
        ramp = torch.linspace(0, 1, rows)[:, None] * torch.linspace(0, 1, columns)
        given = opened.read_image(ramp.expand(channels, -1, -1), "", job.check, None)
    else:
        texts = [FIXED_TEXT] * (2 if opened.kind == "translation" else 1)
        given = opened.read_texts(texts, "")
        arguments = tuple(part[:, :MOST_TOKENS] for part in given.arguments)
        given = opened.read_ids([part[0].tolist() for part in arguments], texts, "")
        given.layers = opened.record(given, job.check, None)
    assert given.layers is not None
    name = "decoder" if "decoder" in given.layers else next(iter(given.layers))
    layers = given.layers[name]
    if sum(layer.heads * layer.queries * layer.keys for layer in layers) > MOST_WEIGHTS:
        raise InputError(
            "The attention of this run is too large to be kept over time.",
            asked=f"{len(layers)} layers with {layers[0].queries} queries and {layers[0].keys} keys",
            because=f"a frame holds up to {MOST_WEIGHTS:,} weights",
            instead="the view Look, with the model of the run",
        )
    rows = torch.stack([layer.rows(range(layer.queries)) for layer in layers])
    shown = rows / rows.amax(-1, keepdim=True).clamp(min=1e-30)
    return (255 * shown).round().to(torch.uint8), list(given.sides[name][1].labels)
