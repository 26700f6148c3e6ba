"""Mistral as Hugging Face has it: LLaMA without biases, each token seeing a sliding window.

Their `sliding_window` counts the token itself: with w a query at position i sees the keys i - w + 1 to i. Ours counts
the tokens before it, w - 1.

Source: Jiang et al., Mistral 7B (2023), section 2.
"""

from __future__ import annotations

from typing import Any, ClassVar

from regard.models.converters.llama import Llama


class Mistral(Llama):
    """`MistralForCausalLM`, or `MistralModel` alone."""

    name = "Mistral"
    model_types = ("mistral",)
    architecture = "Mistral"
    only: ClassVar = {"attention_bias": (False,), "mlp_bias": (False,), "layer_types": (None,)}

    def read_biases(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"bias": False}

    def read_windows(self, config: dict[str, Any]) -> dict[str, Any]:
        width = config.get("sliding_window", 4096)  # their default where the key is absent
        return {"window": None if width is None else width - 1}

    def find_unsupported(self, config: Any) -> dict[str, bool]:
        return {
            f"bias={config.bias}": config.bias,
            f"attention_bias={config.attention_bias!r}": config.projection_biases != "",
            f"window_layers={config.window_layers}": config.window_layers is not None,
        }

    def write_differences(self, config: Any) -> dict[str, Any]:
        return {"sliding_window": None if config.window is None else config.window + 1}
