"""Which kernels a decode step of a model runs, and what bounds its speed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from regard.errors import InputError
from regard.kernels import library
from regard.kernels.bandwidth import measure_bandwidth
from regard.layers.block import BlockList
from regard.layers.cache import KVCache
from regard.layers.multihead import MultiHeadAttention
from regard.models.native_decode import NativeDecoder, find_decoder


@dataclass(frozen=True)
class DecodingExplanation:
    """The result of `explain_decoding`; prints as a few lines.

        tokens/s <= batch bandwidth / (weight_bytes + batch cache_bytes)

    Attributes:
        kernels: what runs: the kernels of the native step, or the modules one after the other.
        reason: why the native step does not run; `None` if it does.
        formats: bytes of weights by the format they are stored in.
        weight_bytes: read once for each step, whatever the batch.
        cache_bytes: keys and values read for each row, at this number of tokens.
        tokens, batch: for which the bytes are counted.
        bandwidth: bytes a second that this machine reads, measured or given; `None` if neither.
    """

    kernels: str
    reason: str | None
    formats: dict[str, int]
    weight_bytes: int
    cache_bytes: int
    tokens: int
    batch: int
    bandwidth: float | None

    @property
    def bound(self) -> float | None:
        """The most tokens a second, all rows together, that the bandwidth allows."""
        if self.bandwidth is None:
            return None
        return self.batch * self.bandwidth / (self.weight_bytes + self.batch * self.cache_bytes)

    def __str__(self) -> str:
        lines = [f"runs on  {self.kernels}"]
        if self.reason is not None:
            lines.append(f"   not   one native call: {self.reason}")
        formats = ", ".join(f"{size / 1e6:.1f} MB {name}" for name, size in self.formats.items())
        lines.append(f"reads    {self.weight_bytes / 1e6:.1f} MB of weights for each step ({formats})")
        cached = f"{self.cache_bytes / 1e6:.1f} MB of keys and values for each row, at {self.tokens} tokens"
        lines.append(f"         {cached}")
        if self.bound is not None and self.bandwidth is not None:
            speed = f"{self.bound:.1f} tokens/s at {self.bandwidth / 1e9:.1f} GB/s, batch {self.batch}"
            lines.append(f"bound    memory bandwidth: {speed}")
        else:
            lines.append("bound    memory bandwidth; measure=True measures it")
        return "\n".join(lines)

    __repr__ = __str__


def explain_decoding(
    model: nn.Module, *, tokens: int = 1024, batch: int = 1, measure: bool = False, bandwidth: float | None = None
) -> DecodingExplanation:
    """What one decode step of a GPT or of a Transformer's decoder runs on, and what bounds it.

    Args:
        model: a model with `decode_step`.
        tokens: how many the cache holds; of an encoder-decoder, the source as well.
        batch: rows that are decoded together.
        measure: measure the memory bandwidth of this machine, which takes a moment.
        bandwidth: bytes a second, in place of a measurement.

        >>> from regard.models import GPT, GPTConfig, explain_decoding
        >>> model = GPT(GPTConfig(vocab_size=11, dim=8, layers=2, heads=2)).eval()
        >>> explain_decoding(model, tokens=10, bandwidth=30e9).cache_bytes
        1280
    """
    if not hasattr(model, "describe_stack"):
        raise InputError(
            "This model does not decode.",
            asked=f"explain_decoding({type(model).__name__})",
            because="a decode step belongs to a language model: GPT, or the decoder of Transformer",
            instead="cost(model) for what any model computes, explain(query, key, value, ...) for one attention",
        )
    stack = model.describe_stack()  # type: ignore[operator]
    found = find_decoder(model)
    blocks: BlockList = getattr(model, stack.blocks)
    cache_bytes = _count_cache_bytes(blocks, tokens)
    if measure and bandwidth is None:
        bandwidth = measure_bandwidth()
    if isinstance(found, NativeDecoder):
        program = found.program
        formats: dict[str, int] = {}
        for matrix in program.matrices():
            formats[matrix.format] = formats.get(matrix.format, 0) + matrix.bytes
        kernels = f"one native call for all {len(blocks)} blocks ({library.name()}, {torch.get_num_threads()} threads)"
        return DecodingExplanation(kernels, None, formats, program.weight_bytes, cache_bytes, tokens, batch, bandwidth)
    weights = {
        id(p): p for module in (blocks, getattr(model, stack.output)) if module is not None for p in module.parameters()
    }
    formats = {}
    for weight in weights.values():
        name = str(weight.dtype).removeprefix("torch.")
        formats[name] = formats.get(name, 0) + weight.nbytes
    kernels = "module after module: gemv for linear layers and decode for attention, where they fit, else torch"
    return DecodingExplanation(kernels, found, formats, sum(formats.values()), cache_bytes, tokens, batch, bandwidth)


def _count_cache_bytes(blocks: BlockList, tokens: int) -> int:
    """Float32 keys and values that one row reads; of a window only what it sees."""
    total = 0
    for block in blocks:
        for layer in (block.attention, block.cross):
            if not isinstance(layer, MultiHeadAttention):
                continue
            seen = tokens
            if layer is block.attention:
                own = layer.new_cache(tokens)
                if not isinstance(own, KVCache):
                    continue
                seen = tokens if own.window is None else min(tokens, own.window + 1)
            total += 4 * seen * layer.sizes.kv_heads * (layer.sizes.key + layer.sizes.value)
    return total
