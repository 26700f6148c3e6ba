"""One decode step of a whole model in one native call.

    h = norm(x),  x = x + part(h)          for every part: self-attention, cross-attention, feed-forward
    logits = final_norms(x) output^T

A `ModelProgram` is made once for each model. It holds addresses of weights, which are read where they are: a weight
that is changed in place is never stale. A step is given the embeddings of one new token for each row, and the caches.
Float32 activations and caches; weights of any format of `regard.kernels.weights`. Inference only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard.kernels.library import (
    MODEL_PART,
    MODEL_STEP,
    NO_MEMORY,
    NOT_FINITE,
    OK,
    STEP_CACHE,
    native,
    num_threads,
)
from regard.kernels.weights import PackedMatrix

NORM_KINDS = {"none": 0, "layer": 1, "rms": 2}
PART_KINDS = {"self_attention": 0, "cross_attention": 1, "feed_forward": 2}
ACTIVATION_CODES = {"none": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}
_NO_MATRIX = (0,) * 8
MOST_FORMATS = 3  # of the rows of one matrix: queries, keys and values are stored apart


@dataclass(frozen=True, eq=False)
class StepNorm:
    """A norm over channels: `layer`, `rms` or `none`, with optional weight and bias."""

    kind: str = "none"
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 0.0

    def fields(self) -> tuple[float, ...]:
        return NORM_KINDS[self.kind], _address(self.weight), _address(self.bias), self.eps


@dataclass(frozen=True, eq=False)
class ModelPart:
    """One part with a residual connection around it.

    Attributes:
        kind: a key of `PART_KINDS`.
        norm: before the part.
        from_normed: whether the residual connection begins after the norm, as in post-norm models.
        first, first_bias: `(q | k | v)`, `q`, or the hidden channels, the gate above, as up to `MOST_FORMATS` matrices,
            one below the other.
        second, second_bias: the output of the part.
        heads, kv_heads, dim, value_dim, scale: of an attention.
        slopes: ALiBi's, `(head,)`.
        rotary, rotary_pairs: channels of a head that rotate, and whether neighbours form a pair.
        cache: number of the attention's cache in the step.
        window: tokens before the newest that an attention sees; -1 for all.
        activation, gated: of a feed-forward part.
    """

    kind: str
    norm: StepNorm
    from_normed: bool
    first: tuple[PackedMatrix, ...]
    first_bias: Tensor | None
    second: PackedMatrix
    second_bias: Tensor | None
    heads: int = 0
    kv_heads: int = 0
    dim: int = 0
    value_dim: int = 0
    scale: float = 0.0
    slopes: Tensor | None = None
    rotary: int = 0
    rotary_pairs: bool = False
    cache: int = 0
    window: int = -1
    activation: str = "none"
    gated: bool = False

    def pack(self) -> bytes:
        return MODEL_PART.pack(
            PART_KINDS[self.kind],
            *self.norm.fields(),
            self.from_normed,
            *(field for matrix in self.first for field in matrix.fields()),
            *_NO_MATRIX * (MOST_FORMATS - len(self.first)),
            _address(self.first_bias),
            *self.second.fields(),
            _address(self.second_bias),
            self.heads,
            self.kv_heads,
            self.dim,
            self.value_dim,
            self.scale,
            _address(self.slopes),
            self.rotary,
            self.rotary_pairs,
            self.cache,
            self.window,
            ACTIVATION_CODES[self.activation],
            self.gated,
        )


@dataclass(frozen=True, eq=False)
class StepEmbedding:
    """`x = scale table[token] + positions[position]`: a table of any format, float32 `positions` or none."""

    table: PackedMatrix
    positions: Tensor | None = None
    scale: float = 1.0


class StepInputs(NamedTuple):
    """What changes from step to step.

    Attributes:
        rows: texts that are decoded together.
        x: `(row, dim)` embeddings, or `None` where the program has tables.
        tokens, positions: `(row,)` int64, for the tables.
        caches: address of the fields of `STEP_CACHE` for each attention, one behind the other.
        rotation: addresses of the cosines and sines, and the stride of their rows.
    """

    rows: int
    x: Tensor | None
    tokens: Tensor | None
    positions: Tensor | None
    caches: int
    rotation: tuple[int, int, int]


@dataclass(eq=False)
class ModelProgram:
    """A model as the kernel reads it; valid while its tensors stay where they are."""

    dim: int
    parts: Sequence[ModelPart]
    final_norms: tuple[StepNorm, StepNorm]
    output: PackedMatrix | None
    embedding: StepEmbedding | None = None

    def __post_init__(self) -> None:
        parts = b"".join(part.pack() for part in self.parts)
        self._parts = torch.frombuffer(bytearray(parts or b"\0"), dtype=torch.uint8)
        norms = (*self.final_norms[0].fields(), *self.final_norms[1].fields())
        self._end = (*norms, *(_NO_MATRIX if self.output is None else self.output.fields()))
        self._table: tuple[float, ...] = (*_NO_MATRIX, 0.0, 0)
        if self.embedding is not None:
            self._table = (*self.embedding.table.fields(), self.embedding.scale, _address(self.embedding.positions))

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one step reads, whatever the number of rows."""
        return sum(matrix.bytes for matrix in self.matrices())

    def matrices(self) -> list[PackedMatrix]:
        """All matrices that a step reads."""
        found = [matrix for part in self.parts for matrix in (*part.first, part.second)]
        return found if self.output is None else [*found, self.output]

    def run(self, step: StepInputs) -> Tensor | None:
        """Logits `(row, vocab)`, or hidden states `(row, dim)` without an output; `None` if something is not finite."""
        assert native is not None
        made = torch.empty(step.rows, self.dim if self.output is None else self.output.rows, dtype=torch.float32)
        status = native.regard_model_step(
            MODEL_STEP.pack(
                num_threads(),
                step.rows,
                self.dim,
                len(self.parts),
                self._parts.data_ptr(),
                step.caches,
                *step.rotation,
                _address(step.x),
                *self._table,
                _address(step.tokens),
                _address(step.positions),
                *self._end,
                made.data_ptr() if self.output is None else 0,
                0 if self.output is None else made.data_ptr(),
            )
        )
        if status == NO_MEMORY:
            raise MemoryError("there is no memory for a decode step")
        if status == NOT_FINITE:
            return None
        assert status == OK, status
        return made


CACHE_FIELDS = STEP_CACHE.size // 8


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
