"""Qwen2 as Hugging Face has it: LLaMA with biases of queries, keys and values, and a sliding window in some layers.

Source: Qwen Team, Qwen2 Technical Report (2024), section 2.2.
"""

from __future__ import annotations

from typing import Any, ClassVar

from regard.errors import ConfigError
from regard.models.converters.base import require
from regard.models.converters.llama import Llama

KINDS = {True: "sliding_attention", False: "full_attention"}
# No published model comes near; a broken number of layers must not be counted out one by one.
MOST_LAYERS = 65536


class Qwen2(Llama):
    """`Qwen2ForCausalLM`, or `Qwen2Model` alone."""

    name = "Qwen2"
    model_types = ("qwen2",)
    architecture = "Qwen2"
    only: ClassVar = {"use_mrope": (False, None)}

    def read_biases(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"bias": False, "attention_bias": "qkv"}

    def read_windows(self, config: dict[str, Any]) -> dict[str, Any]:
        """Theirs counts the token itself, and the window begins with layer `max_window_layers`."""
        layers = require(self.name, config, "num_hidden_layers")
        if not isinstance(layers, int) or layers > MOST_LAYERS:
            raise ConfigError(
                f"A Qwen2 cannot have num_hidden_layers={layers!r}.",
                asked=f"num_hidden_layers={layers!r}",
                because="it is the number of layers",
                instead="the config.json that was saved with the model",
            )
        used = config.get("use_sliding_window", False)
        width = config.get("sliding_window", 4096) if used else None
        first, kinds = config.get("max_window_layers", 28), config.get("layer_types")
        if kinds is None:
            kinds = [KINDS[width is not None and layer >= first] for layer in range(layers)]
        windowed = tuple(layer for layer, kind in enumerate(kinds) if kind == KINDS[True])
        if len(kinds) != layers or not set(kinds) <= set(KINDS.values()) or (windowed and width is None):
            raise ConfigError(
                "The windows of this Qwen2 cannot be understood.",
                asked=f"layer_types={kinds!r}, sliding_window={width!r}, use_sliding_window={used!r}",
                because=f"each of {layers} layers is {' or '.join(KINDS.values())}, and a window has a width",
                instead="the config.json that was saved with the model",
            )
        if not windowed or width is None:
            return {}
        return {"window": width - 1, "window_layers": None if len(windowed) == layers else windowed}

    def find_unsupported(self, config: Any) -> dict[str, bool]:
        return {
            f"bias={config.bias}": config.bias,
            f"attention_bias={config.attention_bias!r}": config.projection_biases != "qkv",
        }

    def write_differences(self, config: Any) -> dict[str, Any]:
        kinds = [config.is_windowed(layer) for layer in range(config.layers)]
        return {
            "use_sliding_window": config.window is not None,
            "sliding_window": None if config.window is None else config.window + 1,
            "max_window_layers": kinds.index(True) if any(kinds) else config.layers,
            "layer_types": [KINDS[kind] for kind in kinds],
        }
