"""What a model is for the lab: what it reads, what it predicts, and how it is called."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regard.adapters.huggingface_attention import is_huggingface
from regard.errors import InputError
from regard.layers.modes import eval_mode
from regard.models import GPT, Bert, BertForClassification, BertForPretraining, Transformer
from regard.models.davit import DaViT
from regard.models.spatial import SpatialTransformer
from regard.models.vit import ViT
from regard.visualize.inputs import read_limits

Kind = Literal["encoder", "decoder", "image", "translation"]
OURS: dict[type, Kind] = {
    GPT: "decoder",
    Bert: "encoder",
    BertForPretraining: "encoder",
    BertForClassification: "encoder",
    Transformer: "translation",
    ViT: "image",
    DaViT: "image",
    SpatialTransformer: "image",
}


def find_kind(model: nn.Module) -> Kind:
    """What a model reads and predicts: by its class, by its configuration, or by its first layers and one run."""
    for known, kind in OURS.items():
        if isinstance(model, known):
            return kind
    if is_huggingface(model):
        return _find_hugging_face_kind(model)
    if isinstance(model, nn.Transformer):
        raise _make_error(model, "it reads embedded tokens, and has no embedding of its own")
    first = next((m for m in model.modules() if isinstance(m, nn.Embedding | nn.Conv2d)), None)
    if isinstance(first, nn.Conv2d) or hasattr(model, "patch_embed"):
        return "image"
    if first is None:
        raise _make_error(model, "it has no embedding of tokens and no convolution of images: it reads neither")
    required = [p for p in inspect.signature(model.forward).parameters.values() if p.default is p.empty and p.kind < 2]
    if len(required) == 2:
        return "translation"
    return "decoder" if _is_causal(model) else "encoder"


def _find_hugging_face_kind(model: Any) -> Kind:
    if getattr(model, "main_input_name", "input_ids") == "pixel_values" and not model.config.is_encoder_decoder:
        return "image"
    if getattr(model.config, "is_encoder_decoder", False):
        if getattr(model, "main_input_name", "input_ids") != "input_ids":
            raise _make_error(model, f"it reads {model.main_input_name}, which the lab cannot make from a text")
        return "translation"
    return "decoder" if _is_causal(model) else "encoder"


def _is_causal(model: nn.Module) -> bool:
    """Whether the outputs of earlier tokens stay when a later one changes: one run on five tokens, twice."""
    vocab_size = read_limits(model)[0] or 6
    tokens = torch.arange(1, 6).remainder(vocab_size)[None]
    changed = tokens.clone()
    changed[0, -1] = 0
    with eval_mode(model), torch.no_grad():
        first, second = (take_tensor(model(each)) for each in (tokens, changed))
    if first.ndim != 3 or first.shape[1] != 5:
        return False
    return torch.allclose(first[:, :-1], second[:, :-1], atol=1e-5) and not torch.equal(first[:, -1], second[:, -1])


def take_tensor(output: Any) -> Tensor:
    """The first tensor of what a model returns: its logits, or its hidden states."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(output, name, None), Tensor):
            return getattr(output, name)
    values = output.values() if isinstance(output, dict) else output
    return next(value for value in values if isinstance(value, Tensor))


def _make_error(model: nn.Module, because: str) -> InputError:
    return InputError(
        f"{type(model).__name__} cannot be opened in the lab.",
        asked=f"a model with texts or images, found {type(model).__name__}",
        because=because,
        instead="a model of token ids (batch, token) or of images (batch, channel, row, column)",
    )


# Logits


def find_head(model: Any, kind: Kind) -> Literal["next", "mask", "class"] | None:
    """What a model predicts: the next token, a masked one, or a class; None where it has no head."""
    if isinstance(model, GPT):
        return "next" if model.output is not None else None
    if isinstance(model, Bert):
        return "mask" if model.masked_tokens is not None else None
    if isinstance(model, BertForPretraining):
        return "mask" if model.bert.masked_tokens is not None else None
    if isinstance(model, BertForClassification):
        return "class"
    if kind == "translation":
        return "next"
    if is_huggingface(model):
        name = type(model).__name__
        endings = {"ForCausalLM": "next", "LMHeadModel": "next", "ForMaskedLM": "mask", "ForPreTraining": "mask"}
        for ending, head in endings.items():
            if name.endswith(ending):
                return head  # type: ignore[return-value]
        return "class" if name.endswith("Classification") and "Token" not in name else None
    if kind == "image":
        return "class" if getattr(model, "num_classes", 1) else None
    return "next" if kind == "decoder" else "mask" if kind == "encoder" else None


@torch.no_grad()
def compute_logits(model: Any, kind: Kind, arguments: tuple[Any, ...], position: int) -> Tensor:
    """The logits `(class,)` of the prediction at a position, in eval mode; a classifier has no positions."""
    with eval_mode(model):
        if isinstance(model, GPT):
            hidden = model.hidden(*arguments)[:, position]
            assert model.output is not None
            return model.output(hidden)[0].float()
        if isinstance(model, Bert | BertForPretraining):
            hidden = (model.hidden if isinstance(model, Bert) else model)(*arguments)[0, position][None]
            predict = model.masked_tokens if isinstance(model, Bert) else model.predict_tokens
            assert predict is not None
            return predict(hidden)[0].float()
        output = model(*make_call(model, kind, arguments)[0], **make_call(model, kind, arguments)[1])
        found = getattr(output, "prediction_logits", None)  # ForPreTraining of Hugging Face
        logits = take_tensor(output) if found is None else found
        return (logits[0, position] if logits.ndim == 3 else logits[0]).float()


def make_call(model: Any, kind: Kind, arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a call of the model on token ids or an image."""
    if not is_huggingface(model):
        return arguments, {}
    if kind == "translation":
        return (), {"input_ids": arguments[0], "decoder_input_ids": arguments[1]}
    if kind == "decoder":
        return (), {"input_ids": arguments[0], "use_cache": False}
    return arguments, {}


def find_vocab_size(model: Any) -> int | None:
    return read_limits(model)[0]


def find_most_tokens(model: Any) -> int | None:
    """How many tokens fit into a model; None where nothing says so."""
    config = getattr(model, "config", None)
    positions = read_limits(model)[1] or getattr(config, "max_length", None)
    if config is not None and getattr(config, "model_type", "") in ("roberta", "xlm-roberta", "camembert"):
        return positions - 2 if positions else None  # its positions begin at 2
    return positions if isinstance(positions, int) and positions > 0 else None


def find_image_shape(model: Any) -> tuple[int, int, int]:
    """Channels, rows and columns of the images that a model reads."""
    config = getattr(model, "config", None)
    size = getattr(config, "image", None) or getattr(config, "image_size", None)
    size = size or getattr(getattr(model, "patch_embed", None), "img_size", None)
    channels = getattr(config, "channels", None) or getattr(config, "num_channels", None)
    if channels is None:
        first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
        channels = 3 if first is None else first.in_channels
    given = (getattr(model, "default_cfg", None) or {}).get("input_size")
    if size is None and given is not None:
        size = tuple(given)[-2:]
    if size is None:
        size = 224  # of a model that says nothing: what most are trained with
    rows, columns = (size, size) if isinstance(size, int) else size
    return int(channels), int(rows), int(columns)
