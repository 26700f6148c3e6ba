"""A small batch for a model of another library, and its output as one tensor."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import InputError, RegardError

TOKENS, ROWS = 24, 2


def make_probe(model: Any, example: dict[str, Any] | Tensor | None = None) -> dict[str, Any] | Tensor:
    """The example, or inputs that fit a model of Hugging Face or timm; random numbers depend on no seed of the user."""
    if example is not None:
        return example
    random = torch.Generator().manual_seed(0)
    config = getattr(model, "config", None)
    if config is not None and hasattr(model, "main_input_name"):
        names = set(inspect.signature(model.forward).parameters)
        if model.main_input_name == "input_ids":
            words = config.get_text_config().vocab_size
            inputs = {"input_ids": make_token_probe(model)}
            if config.is_encoder_decoder and "decoder_input_ids" in names:
                inputs["decoder_input_ids"] = torch.randint(0, words, (ROWS, TOKENS // 2), generator=random)
            return inputs
        size = getattr(config, "image_size", None)
        if model.main_input_name == "pixel_values" and size is not None:
            height, width = (size, size) if isinstance(size, int) else size
            shape = (ROWS, getattr(config, "num_channels", 3), height, width)
            return {"pixel_values": torch.randn(shape, generator=random)}
    size = getattr(model, "default_cfg", {}).get("input_size") if hasattr(model, "default_cfg") else None
    if size is not None:
        patches = getattr(getattr(model, "patch_embed", None), "img_size", None)
        shape = (ROWS, size[0], *(patches or size[1:]))
        return torch.randn(shape, generator=random)
    raise InputError(
        f"No inputs are known for {type(model).__name__}.",
        asked="a comparison of outputs before and after",
        because="it is neither a model of Hugging Face with tokens or images nor one of timm",
        instead='example={"input_ids": ...}, or one tensor',
    )


def make_token_probe(model: Any) -> Tensor:
    """Random tokens for a model of Hugging Face."""
    words = model.config.get_text_config().vocab_size
    return torch.randint(0, words, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def run_probe(model: nn.Module, probe: dict[str, Any] | Tensor) -> Tensor:
    """The first tensor of floating-point numbers that the model returns."""
    try:
        output = model(**probe) if isinstance(probe, dict) else model(probe)
    except RegardError:
        raise
    except Exception as failure:
        raise InputError(
            f"{type(model).__name__} does not run on these inputs.",
            asked="a comparison of outputs before and after",
            found=f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}",
            because=f"the model was called with {_describe(probe)}",
            instead='example={"input_ids": ...} with the arguments of the model by name, or one tensor',
        ) from failure
    found = _find_tensor(output)
    if found is None:
        raise InputError(
            f"{type(model).__name__} returns no tensor that could be compared.",
            asked="a comparison of outputs before and after",
            found=f"an output of type {type(output).__name__}",
            because="the first tensor of floating-point numbers is compared",
            instead="a part of the model that returns tensors",
        )
    return found


def _find_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    values = output.values() if hasattr(output, "values") else output if isinstance(output, list | tuple) else ()
    return next((tensor for tensor in map(_find_tensor, values) if tensor is not None), None)


def _describe(probe: Any) -> str:
    if isinstance(probe, dict):
        return ", ".join(f"{name}={_describe(value)}" for name, value in probe.items())
    return f"a tensor of shape {tuple(probe.shape)}" if isinstance(probe, Tensor) else f"a {type(probe).__name__}"
