"""Engines that encode texts or read prompts on a CPU, each with the weights of a model of transformers.

An engine that is not installed, or does not run here, is named with its reason.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.decode_peers import on_all_cores
from benchmarks.timing import Run

Texts = Sequence[Sequence[int]]
# Hidden states of padded tokens `(text, token)`, given how long each text is.
Hidden = Callable[[Tensor, list[int]], Tensor]


def sorted_batches(texts: Texts, size: int) -> list[list[int]]:
    """Indices of texts of neighbouring lengths, so that little is padded."""
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    return [order[start : start + size] for start in range(0, len(order), size)]


def make_encoder(hidden: Hidden, texts: Texts, size: int, dim: int) -> Run:
    """The mean of the tokens of each text, normalised, `size` texts at a time."""

    def run() -> Tensor:
        made = torch.empty(len(texts), dim)
        with torch.inference_mode():
            for batch in sorted_batches(texts, size):
                lengths = [len(texts[index]) for index in batch]
                ids = torch.tensor([[*texts[i], *[0] * (max(lengths) - len(texts[i]))] for i in batch])
                mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
                mean = (hidden(ids, lengths) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
                made[batch] = nn.functional.normalize(mean, dim=-1)
        return made

    return run


def hidden_by_transformers(model: Any) -> Hidden:
    def hidden(ids: Tensor, lengths: list[int]) -> Tensor:
        mask = (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long()
        return model(ids, attention_mask=mask).last_hidden_state

    return hidden


def hidden_by_ctranslate2(model: Any, compute_type: str = "float32") -> Hidden:
    """CTranslate2, from the modules of transformers' BERT."""
    ctranslate2 = importlib.import_module("ctranslate2")
    converters = importlib.import_module("ctranslate2.converters.transformers")
    model = copy.deepcopy(model)  # the converter adds the segment to the positions, in place
    model.config.position_embedding_type = "absolute"  # which newer configurations no longer say
    spec = converters.BertLoader().get_model_spec(model)
    spec.register_vocabulary([f"t{n}" for n in range(model.config.vocab_size)])
    spec.config.unk_token = "t0"
    spec.config.layer_norm_epsilon = model.config.layer_norm_eps
    spec.validate()
    spec.optimize(quantization=None if compute_type == "float32" else compute_type)
    with tempfile.TemporaryDirectory() as folder:
        spec.save(folder)
        with on_all_cores():
            threads = torch.get_num_threads()
            encoder = ctranslate2.Encoder(folder, compute_type=compute_type, intra_threads=threads)

    def hidden(ids: Tensor, lengths: list[int]) -> Tensor:
        rows = [row[:length] for row, length in zip(ids.tolist(), lengths, strict=True)]
        made = encoder.forward_batch(rows).last_hidden_state
        return torch.from_numpy(importlib.import_module("numpy").array(made))

    return hidden


def hidden_by_onnxruntime(model: Any, *, int8: bool = False) -> Hidden:
    """onnxruntime, from an export of the model; with int8 weights and activations rounded as they come."""
    onnxruntime = importlib.import_module("onnxruntime")

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return self.model(ids, attention_mask=mask).last_hidden_state

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        file = str(Path(folder) / "model.onnx")
        batch, token = torch.export.Dim("batch", min=2), torch.export.Dim("token", min=2)
        example = torch.ones(3, 5, dtype=torch.long)
        mask = example.clone()
        mask[1, 3:] = 0  # a mask of ones only would be left out
        shapes = {"ids": {0: batch, 1: token}, "mask": {0: batch, 1: token}}
        torch.onnx.export(
            Whole().eval(), (example, mask), file, dynamic_shapes=shapes, input_names=["ids", "mask"], dynamo=True
        )
        if int8:
            quantization = importlib.import_module("onnxruntime.quantization")
            small = str(Path(folder) / "int8.onnx")
            quantization.quantize_dynamic(file, small)
            file = small
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 4
        with on_all_cores():
            session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def hidden(ids: Tensor, lengths: list[int]) -> Tensor:
        mask = (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long()
        return torch.from_numpy(session.run(None, {"ids": ids.numpy(), "mask": mask.numpy()})[0])

    return hidden


def first_token_by_ctranslate2(model: Any, prompt: Tensor, compute_type: str = "float32") -> Run:
    """CTranslate2 reads a prompt and writes one token."""
    ctranslate2 = importlib.import_module("ctranslate2")
    converters = importlib.import_module("ctranslate2.converters.transformers")
    spec = converters.GPT2Loader().get_model_spec(model)
    spec.register_vocabulary([f"t{n}" for n in range(model.config.vocab_size)])
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "t0"
    spec.validate()
    spec.optimize(quantization=None if compute_type == "float32" else compute_type)
    with tempfile.TemporaryDirectory() as folder:
        spec.save(folder)
        with on_all_cores():
            threads = torch.get_num_threads()
            generator = ctranslate2.Generator(folder, compute_type=compute_type, intra_threads=threads)
    words = [f"t{n}" for n in prompt[0].tolist()]
    options = {"max_length": 1, "min_length": 1, "include_prompt_in_result": False, "end_token": []}
    return lambda: torch.tensor(generator.generate_batch([words], **options)[0].sequences_ids[0])
