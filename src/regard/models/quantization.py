"""Models with quantised weights: which matrices are rounded, how they are stored, and where they lie in memory.

Rounded are the matrices of linear layers and of token embeddings, row by row in blocks of 32 channels; norms, biases,
positions and convolutions keep their dtype. Parameters stay where they are, tied ones stay tied.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import CheckpointError, ConfigError
from regard.kernels.blocks import BLOCK_FORMATS, QUANTIZERS, row_bytes
from regard.kernels.quantized import BlockRows, QuantizedTensor
from regard.layers.projections import Projections

State = dict[str, Tensor]

# Words of `model.quantize`; the formats of GGUF that weights can be rounded to are words, too.
WORDS = {"int8": "q8_0", "int4": "q4_1"}
# Tables of embeddings, often the output matrix as well, have 8 bits beside matrices of 4, as in llama.cpp's files.
FOUR_BITS, EMBEDDING_FORMAT = ("q4_0", "q4_1"), "q8_0"
# The key of config.json that says which tensors are blocks.
KEY = "quantization"
SMALLEST_EMBEDDING = 8  # rows: a table of segments is not worth rounding
LARGEST_SCALE = 65504.0  # of float16
HUGE_PAGE = 1 << 21
LINE = 64  # bytes


def find_format(word: object) -> str:
    """The format of blocks behind a word of `model.quantize`."""
    format = WORDS.get(word, word) if isinstance(word, str) else None
    if format not in QUANTIZERS:
        raise ConfigError(
            "Weights cannot be quantised so.",
            asked=f"quantize({word!r})",
            because=f"known are bf16, {', '.join(f'{word} ({format})' for word, format in WORDS.items())}, "
            f"{', '.join(format for format in QUANTIZERS if format not in (*WORDS.values(), 'bf16'))}",
            instead='quantize("int8"), which changes results least but for "bf16"',
        )
    return format


def find_matrices(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Modules whose matrices are rounded, the name of the parameter, and its full name; tied ones several times."""
    for path, module in model.named_modules():
        kinds = (nn.Linear, Projections)
        if not isinstance(module, (*kinds, nn.Embedding)):
            continue
        for name, weight in module._parameters.items():
            if weight is None or weight.dim() != 2:
                continue
            if isinstance(module, kinds) or len(weight) > SMALLEST_EMBEDDING:
                yield module, name, f"{path}.{name}" if path else name


def is_quantized(model: nn.Module) -> bool:
    return any(isinstance(parameter, QuantizedTensor) for parameter in model.parameters())


@torch.no_grad()
def quantize_model(model: nn.Module, word: str) -> None:
    """Round the matrices in place. A matrix that is quantised already keeps its blocks."""
    format = find_format(word)
    matrices = list(find_matrices(model))
    for module, name, path in matrices:
        _check_weight(module._parameters[name], path, format)
    tables = {id(module._parameters[name]) for module, name, _ in matrices if isinstance(module, nn.Embedding)}
    made: dict[int, tuple[Tensor, nn.Parameter]] = {}  # with the old one, so that its id is not given to another
    for module, name, _ in matrices:
        weight = module._parameters[name]
        assert weight is not None
        if isinstance(weight, QuantizedTensor):
            continue
        if id(weight) not in made:
            kept = EMBEDDING_FORMAT if id(weight) in tables and format in FOUR_BITS else format
            quantized = QuantizedTensor.quantize(weight, kept)
            made[id(weight)] = weight, nn.Parameter(quantized, requires_grad=False)
        module._parameters[name] = made[id(weight)][1]
    model.requires_grad_(False)
    del made
    pack_blocks(model)


def _check_weight(weight: Tensor | None, path: str, format: str) -> None:
    assert weight is not None
    if isinstance(weight, QuantizedTensor):
        return
    plain = weight.is_floating_point() and weight.device.type == "cpu"
    largest = float(weight.detach().abs().amax()) if plain and weight.numel() else 0.0
    limit = torch.finfo(torch.float32).max if format == "bf16" else LARGEST_SCALE * (127 if format == "q8_0" else 4)
    if not plain or not largest < limit:
        raise ConfigError(
            f"{path} cannot be quantised.",
            asked=f"{format} of {path} {tuple(weight.shape)}",
            found=f"largest weight {largest:.3g}" if plain else f"{weight.dtype} on {weight.device}",
            because=f"a scale in float16 reaches weights below {limit:.3g}"
            if plain
            else "floats on the CPU are rounded",
            instead="a model whose weights are finite and of the usual size, on the CPU",
        )


@torch.no_grad()
def dequantize_model(model: nn.Module, dtype: torch.dtype) -> None:
    made: dict[int, tuple[Tensor, nn.Parameter]] = {}
    for module, name, _ in list(find_matrices(model)):
        weight = module._parameters[name]
        if isinstance(weight, QuantizedTensor):
            if id(weight) not in made:
                made[id(weight)] = weight, nn.Parameter(weight.dequantize().to(dtype))
            module._parameters[name] = made[id(weight)][1]
    model.requires_grad_(True).to(dtype)


def pack_blocks(model: nn.Module) -> None:
    """Move all blocks behind one another into memory on huge pages: a decode step reads them once, in this order.

    Matrices are small (200 KB in a model of 135 million parameters), so that huge pages for each would be wasted.
    """
    weights = [each for each in model.parameters() if isinstance(each, QuantizedTensor)]
    sizes = [-(-part.data.nbytes // LINE) * LINE for weight in weights for part in weight.parts]
    if not weights or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    memory = mmap.mmap(-1, sum(sizes) + 2 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    place = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    memory.madvise(mmap.MADV_HUGEPAGE, place, sum(sizes) // HUGE_PAGE * HUGE_PAGE)
    for weight in weights:
        parts = []
        for format, data in weight.parts:
            moved = torch.frombuffer(memory, dtype=torch.uint8, count=data.numel(), offset=place).view(data.shape)
            parts.append(BlockRows(format, moved.copy_(data)))
            place += -(-data.nbytes // LINE) * LINE
            data = None
        weight.parts = tuple(parts)  # the old memory is free before the next is touched
    _return_freed_memory()


def _return_freed_memory() -> None:
    """Give the system back what the C library keeps for later: as much as the blocks, of which there was a copy."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # another C library than glibc
        return


# Stored


def to_stored(state: Mapping[str, Tensor]) -> tuple[State, dict[str, Any]]:
    """Plain tensors, and for each quantised one its rows: `{name: [[format, rows, cols], ...]}`."""
    stored: State = {}
    described: dict[str, Any] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, QuantizedTensor):
            stored[name] = tensor
            continue
        described[name] = [[part.format, len(part.data), tensor.shape[1]] for part in tensor.parts]
        stored |= dict(zip(_name_parts(name, len(tensor.parts)), (part.data for part in tensor.parts), strict=True))
    return stored, described


def from_stored(state: Mapping[str, Tensor], described: object, source: str) -> State:
    """The inverse; refuses a description that does not fit the bytes."""
    if not isinstance(described, dict):
        raise _damage_error(source, f"{KEY} is a {type(described).__name__}")
    made = dict(state)
    for name, rows in described.items():
        if not isinstance(rows, list) or not rows or not all(map(_is_description, rows)):
            raise _damage_error(source, f"{name}: {str(rows)[:80]}")
        parts = []
        for part, (format, count, cols) in zip(_name_parts(name, len(rows)), rows, strict=True):
            data = made.pop(part, None)
            if data is None or data.dtype != torch.uint8 or data.shape != (count, row_bytes(format, cols)):
                found = "no such tensor" if data is None else f"{tuple(data.shape)} {data.dtype}"
                raise _damage_error(source, f"{part}: {found}, for {count} rows of {cols} in {format}")
            parts.append(BlockRows(format, data))
        if len({cols for _, _, cols in rows}) != 1:
            raise _damage_error(source, f"{name}: rows of different widths")
        made[name] = QuantizedTensor(parts, rows[0][2])
    return made


def _name_parts(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}.{number}" for number in range(count)]


def _is_description(row: object) -> bool:
    return (
        isinstance(row, list)
        and len(row) == 3
        and row[0] in BLOCK_FORMATS
        and all(isinstance(size, int) and not isinstance(size, bool) and 0 < size < 1 << 40 for size in row[1:])
    )


def _damage_error(source: str, found: str) -> CheckpointError:
    return CheckpointError(
        "The quantised weights of this checkpoint do not fit their description.",
        asked=source,
        found=found,
        because=f"{KEY} in config.json says the format, rows and channels of each matrix of blocks",
        instead="get both files again, or save the model once more",
    )
