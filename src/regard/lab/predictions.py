"""What a model predicts, with and without some of its heads; and texts continued token by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.adapters.huggingface_attention import is_huggingface
from regard.errors import InputError
from regard.lab import kinds
from regard.lab.answers import Refused
from regard.lab.fields import Fields, check_integer
from regard.lab.inputs import LabInput
from regard.lab.jobs import Job
from regard.lab.layer_heads import LayerHeads
from regard.lab.opened import OpenedModel, describe_input
from regard.lab.state import Lab
from regard.lab.switch import Off, heads_off
from regard.layers.modes import eval_mode

MOST_OFF = 4096
MOST_STEPS = 512
MOST_TOP = 100
MOST_KEPT = 16  # predictions of one input: those of the heads that were switched off last
SHOWN = 10  # probabilities of each generated token


def predict(lab: Lab, fields: Fields, job: Job) -> dict[str, Any]:
    """The likeliest tokens or classes, with all heads and without those that are off."""
    given = lab.inputs.get(fields.text("input"))
    opened = lab.open(given.model, job)
    top = fields.integer("top", 1, MOST_TOP, 10)
    off = _read_off(fields)
    head = _require_head(opened)
    arguments, position = _place(opened, given, fields)
    key = (position if head != "class" else None, tuple(sorted(off)))
    results = []
    for heads in ((), key[1]):
        known = given.predictions.get((key[0], heads))
        if known is None:
            layers = lab.record(given, job) if heads else {}
            known = _compute(opened, arguments, position, layers, list(heads), job)
            while len(given.predictions) >= MOST_KEPT:
                given.predictions.pop(next(iter(given.predictions)))
            given.predictions[(key[0], heads)] = known
            lab.inputs.put(given)
        results.append(known)
    chosen = [shares.topk(min(top, len(shares))).indices.tolist() for shares in results]
    before = chosen[0] + [number for number in chosen[1] if number not in chosen[0]]
    after = chosen[1]
    return {
        "before": _describe(opened, head, results[0], before),
        "after": _describe(opened, head, results[1], after),
        "kind": head,
        "position": position,
    }


def _require_head(opened: OpenedModel) -> str:
    if opened.head is None or (opened.head == "mask" and opened.words is not None and opened.words.mask is None):
        raise InputError(
            f"{opened.source.name} makes no predictions.",
            asked="a prediction",
            because="it has no head for tokens or classes" if opened.head is None else "its tokenizer has no mask",
            instead="its attention, or another model",
        )
    return opened.head


def _read_off(fields: Fields) -> list[Off]:
    off: list[Off] = []
    for entry in fields.entries("off", MOST_OFF, []):
        if not isinstance(entry, list) or len(entry) != 3 or not isinstance(entry[0], str):
            raise Refused(
                "off is not valid.",
                status=400,
                asked=f"off={repr(entry)[:80]}",
                because="a head that is off is an attention, a layer and a head",
                instead='[["self", 0, 3]]',
            )
        off.append((entry[0], *(check_integer("off", number, 0, 100_000) for number in entry[1:])))  # type: ignore[arg-type]
    return list(dict.fromkeys(off))


def _place(opened: OpenedModel, given: LabInput, fields: Fields) -> tuple[tuple[Tensor, ...], int]:
    """The arguments and the position whose prediction is read; a masked token is masked here."""
    if opened.kind == "image" or opened.head == "class":
        return given.arguments, 0
    tokens = given.arguments[-1]
    count = tokens.shape[1]
    mask = None if opened.words is None else opened.words.mask
    if fields.has("position"):
        position = fields.integer("position", 0, count - 1)
    elif opened.head == "mask" and mask is not None and bool((tokens[0] == mask).any()):
        position = int((tokens[0] == mask).nonzero()[0])
    else:
        position = min(count // 2, count - 1) if opened.head == "mask" else count - 1
    if opened.head == "mask":
        assert mask is not None
        tokens = tokens.clone()
        tokens[0, position] = mask
    elif opened.kind == "decoder":
        tokens = tokens[:, : position + 1]  # later tokens do not matter to it
    return (*given.arguments[:-1], tokens), position


def _compute(
    opened: OpenedModel,
    arguments: tuple[Tensor, ...],
    position: int,
    layers: dict[str, list[LayerHeads]],
    off: list[Off],
    job: Job,
) -> Tensor:
    """Probabilities of all tokens or classes."""
    guards = [
        module.register_forward_pre_hook(lambda *_: job.check()) for module in list(opened.module.modules())[:500]
    ]
    try:
        with heads_off(opened.module, layers, off):
            logits = kinds.compute_logits(opened.module, opened.kind, arguments, position)
    finally:
        for guard in guards:
            guard.remove()
    return logits.softmax(-1)


def _describe(opened: OpenedModel, head: str, shares: Tensor, numbers: list[int]) -> list[dict[str, Any]]:
    if head == "class":
        names = opened.loaded.class_names
        labels = [names[number] if number < len(names) else f"class {number}" for number in numbers]
    else:
        assert opened.words is not None
        labels = opened.words.label(numbers)
    seen: set[str] = set()
    found = []
    for number, label in zip(numbers, labels, strict=True):
        text = label if label not in seen else f"{label} [{number}]"  # a word with and without a space before it
        seen.add(label)
        found.append({"token": text, "id": number, "probability": float(shares[number])})
    return found


# Generation


def generate(lab: Lab, fields: Fields, job: Job) -> dict[str, Any]:
    """Continue a text; every token is a line with the probabilities it was drawn from, the result is the new input."""
    given = lab.inputs.get(fields.text("input"))
    opened = lab.open(given.model, job)
    steps = fields.integer("steps", 1, MOST_STEPS, 1)
    temperature = fields.number("temperature", 0, 100, 0)
    seed = fields.integer("seed", 0, 2**32 - 1, 0)
    if opened.kind not in ("decoder", "translation") or opened.head != "next":
        raise InputError(
            f"{opened.source.name} generates no text.",
            asked="generate",
            because=f"it is a model of the kind {opened.kind!r}",
            instead="a decoder, such as stories15m",
        )
    assert opened.words is not None
    ids = given.arguments[-1][0].tolist()
    generator = torch.Generator().manual_seed(seed)
    written = opened.words.decode(ids)
    logits = _step_logits(opened, given, steps)
    for step in range(steps):
        if len(ids) >= opened.most_tokens:
            break
        job.check()
        shares = next(logits) if step == 0 else logits.send(ids[-1])
        number = _draw(shares, temperature, generator)
        ids.append(number)
        top = shares.softmax(-1)
        numbers = top.topk(min(SHOWN, len(top))).indices.tolist()
        text = opened.words.decode(ids)
        token = text[len(written) :] if text.startswith(written) else opened.words.label([number])[0]
        written = text
        job.report({"token": token, "id": number, "probabilities": _describe(opened, "next", top, numbers)})
        if number in opened.words.ends:
            break
    rows = [part[0].tolist() for part in given.arguments[:-1]] + [ids]
    content = [repr(row).encode() for row in rows]
    found = opened.read_ids(rows, (*given.texts[:-1], written), lab.inputs.make_id(opened.id, b"ids", *content))
    lab.inputs.put(found)
    return describe_input(opened, found)


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    shares = (logits.double() / max(temperature, 1e-3)).softmax(-1)
    return int(torch.multinomial(shares, 1, generator=generator))


def _step_logits(opened: OpenedModel, given: LabInput, steps: int) -> Any:
    """The logits after the text, and after each token that is sent; with the model's own cache where it has one."""
    module, arguments = opened.module, given.arguments
    if opened.kind == "decoder" and hasattr(module, "prefill") and hasattr(module, "decode_step"):
        return _cached_logits(module, arguments[0], steps)
    if opened.kind == "decoder" and is_huggingface(module):
        return _hugging_face_logits(module, arguments[0])
    return _plain_logits(opened, arguments)


def _cached_logits(module: Any, tokens: Tensor, steps: int) -> Any:
    with torch.no_grad(), eval_mode(module):
        logits, cache = module.prefill(tokens, None, steps)
        while True:
            number = yield logits[0].float()
            logits = module.decode_step(torch.tensor([[number]]), cache)


def _hugging_face_logits(module: Any, tokens: Tensor) -> Any:
    past = None
    while True:
        with torch.no_grad(), eval_mode(module):
            output = module(input_ids=tokens, past_key_values=past, use_cache=True)
        past = getattr(output, "past_key_values", None)
        number = yield output.logits[0, -1].float()
        new = torch.tensor([[number]])
        tokens = new if past is not None else torch.cat((tokens, new), 1)


def _plain_logits(opened: OpenedModel, arguments: tuple[Tensor, ...]) -> Any:
    tokens = arguments[-1]
    while True:
        given = (*arguments[:-1], tokens)
        number = yield kinds.compute_logits(opened.module, opened.kind, given, tokens.shape[1] - 1)
        tokens = torch.cat((tokens, torch.tensor([[number]])), 1)
