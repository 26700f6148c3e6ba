"""Engines that decode GPT-2 on a CPU, each with the same weights: seconds for each new token, the prompt not counted.

An engine that is not installed, or does not run here, is named with its reason.
"""

from __future__ import annotations

import importlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# Seconds for each token, of one run over the prompt and the new tokens; and those tokens, or the text.
Decode = Callable[[], tuple[float, list[int] | str]]


@contextmanager
def on_all_cores() -> Iterator[None]:
    """Threads that are made inside may run on every core, although OpenMP has bound this one to its own."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _average_gap(times: list[float]) -> float:
    return (times[-1] - times[0]) / (len(times) - 1)


def make_regard(model: Any, prompt: Tensor, new_tokens: int) -> Decode:
    def decode() -> tuple[float, list[int] | str]:
        times: list[float] = []
        made = model.generate(prompt, max_new_tokens=new_tokens, on_token=lambda *_: times.append(time.perf_counter()))
        return _average_gap(times), made.tokens[0]

    return decode


class _Clock:
    """A streamer of transformers that notes when a token arrives; the first one is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def make_transformers(model: Any, prompt: Tensor, new_tokens: int) -> Decode:
    words = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}

    def decode() -> tuple[float, list[int] | str]:
        clock = _Clock()
        with torch.inference_mode():
            made = model.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=clock, **words)
        return _average_gap(clock.times[1:]), made[0, prompt.shape[1] :].tolist()

    return decode


def make_ctranslate2(model: Any, prompt: Tensor, new_tokens: int, compute_type: str = "float32") -> Decode:
    """CTranslate2, from the modules of transformers' GPT-2."""
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

    def decode() -> tuple[float, list[int] | str]:
        times: list[float] = []

        def note(step: Any) -> bool:
            times.append(time.perf_counter())
            return False

        made = generator.generate_batch(
            [words],
            max_length=new_tokens,
            min_length=new_tokens,
            include_prompt_in_result=False,
            callback=note,
            end_token=[],
        )
        return _average_gap(times), made[0].sequences_ids[0]

    return decode


def make_llama_cpp(model: Any, prompt: Tensor, new_tokens: int, kind: str = "f32") -> Decode:
    """llama.cpp, from a GGUF file written for it; `kind` is f32, f16 or q8_0."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "gpt2.gguf"
        write_gguf(model, file, kind)
        decode_text = make_llama_cpp_from_file(file, prompt, new_tokens)

    def decode() -> tuple[float, list[int] | str]:
        seconds, text = decode_text()
        return seconds, [int(number) for number in re.findall(r"t(\d+)", str(text))]  # as `write_gguf` names them

    return decode


def make_llama_cpp_from_file(file: Path, prompt: Tensor, new_tokens: int) -> Decode:
    """llama.cpp on a file of its own format; it gives text and no tokens."""
    xllamacpp = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel = 512, 1
    params.warmup, params.cache_prompt, params.fit_params = False, False, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
    with on_all_cores():
        server = xllamacpp.Server(params)
        request = {"prompt": prompt[0].tolist(), "n_predict": new_tokens, "ignore_eos": True, "temperature": 0.0}
        request |= {"cache_prompt": False, "samplers": ["top_k"], "top_k": 1}
        server.handle_completions(request | {"n_predict": 2})  # loads the file

    def decode() -> tuple[float, list[int] | str]:
        answer = server.handle_completions(request)
        return 1e-3 * answer["timings"]["predicted_per_token_ms"], answer["choices"][0]["text"]

    return decode


def write_gguf(model: Any, file: Path, kind: str) -> None:
    """GPT-2's weights as llama.cpp names them; matrices in `kind`, vectors and positions in float32."""
    gguf = importlib.import_module("gguf")
    config, body = model.config, model.transformer
    writer = gguf.GGUFWriter(str(file), "gpt2")
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_head_count(config.n_head)
    writer.add_feed_forward_length(4 * config.n_embd)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{n}" for n in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    kinds = {"f32": None, "f16": gguf.GGMLQuantizationType.F16, "q8_0": gguf.GGMLQuantizationType.Q8_0}

    def add(name: str, tensor: Tensor) -> None:
        numbers = tensor.detach().float().contiguous().numpy()
        if kinds[kind] is None or numbers.ndim == 1 or name == "position_embd.weight":
            writer.add_tensor(name, numbers)
        else:
            writer.add_tensor(name, gguf.quants.quantize(numbers, kinds[kind]), raw_dtype=kinds[kind])

    def add_layer(name: str, module: nn.Module) -> None:
        weight: Tensor = module.weight  # type: ignore[assignment]
        add(f"{name}.weight", weight.T if type(module).__name__ == "Conv1D" else weight)
        add(f"{name}.bias", module.bias)  # type: ignore[arg-type]

    add("token_embd.weight", body.wte.weight)
    add("position_embd.weight", body.wpe.weight)
    add_layer("output_norm", body.ln_f)
    for number, block in enumerate(body.h):
        names = {"attn_norm": block.ln_1, "attn_qkv": block.attn.c_attn, "attn_output": block.attn.c_proj}
        names |= {"ffn_norm": block.ln_2, "ffn_up": block.mlp.c_fc, "ffn_down": block.mlp.c_proj}
        for name, module in names.items():
            add_layer(f"blk.{number}.{name}", module)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
