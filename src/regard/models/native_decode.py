"""Decode steps of whole models by one native call, and why a model cannot have them.

A program of addresses is made from the modules of a model, once. Every step compares the modules, their hooks and the
addresses of their parameters with those it was made from, and makes it anew where one differs. Weights are read where
they are, so that changes in place need no check.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.utils.hooks import RemovableHandle

from regard.biases import Alibi
from regard.kernels.eager import is_plain_eager
from regard.kernels.library import missing
from regard.kernels.model_step import MOST_FORMATS, ModelPart, ModelProgram, StepEmbedding, StepInputs, StepNorm
from regard.kernels.quantized import QuantizedTensor
from regard.kernels.weights import PackedMatrix
from regard.layers.block import BlockList, TransformerBlock
from regard.layers.cache import ModelCache
from regard.layers.feedforward import GATED, PLAIN, FeedForward
from regard.layers.linear import Linear, use_huge_pages
from regard.layers.multihead import MultiHeadAttention
from regard.layers.positions import LearnedPositions
from regard.layers.projections import Projections
from regard.layers.rotary import Rotary
from regard.models.step_caches import find_fields

GATE_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MAX_ROWS = 64  # beyond, products are bound by arithmetic, and gemm is faster


class NotNativeError(Exception):
    """Why a model has no native decode step."""


@dataclass(frozen=True, eq=False)
class StackDescription:
    """What is decoded, by the names of the model's children.

    Attributes:
        dim: channels of a token.
        blocks: the list of blocks.
        norm, output: after the blocks; a child that is `None` is not there.
        embedding, positions: of the tokens.
        scale: of the embeddings.
        has_context: whether blocks attend to a context as well.
    """

    dim: int
    blocks: str = "blocks"
    norm: str = "norm"
    output: str = "output"
    embedding: str = "embedding"
    positions: str = "positions"
    scale: float = 1.0
    has_context: bool = False


class Watch:
    """The modules and parameters that a program was made from, to see whether they are still the same.

    A step reads all weights, so that nothing of this is in the processor's caches at the next one. What is compared is
    therefore little: the dictionaries of children and parameters, the number of attributes (a patched `forward` is
    one more), and addresses. That hooks were registered is seen by the counter that numbers them.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.tensors: list[Tensor] = []
        self.quantized: list[QuantizedTensor] = []
        self.drops = False

    def add(self, module: nn.Module, where: str) -> None:
        if _is_hooked(module):
            raise NotNativeError(f"{where} has hooks or a forward of its own")
        self.modules.append(module)

    def child(self, parent: nn.Module, name: str, kinds: tuple[type, ...]) -> Any:
        """The child of exactly one of these types, without hooks."""
        child = parent._modules.get(name)
        where = f"{type(parent).__name__}.{name}"
        if type(child) not in kinds:
            raise NotNativeError(f"{where} is {type(child).__name__}, and only {kinds[0].__name__} is known")
        assert child is not None
        self.add(child, where)
        return child

    def parameter(self, parent: nn.Module, name: str, *, buffer: bool = False) -> Tensor | None:
        """The parameter as it is: plain, float32, contiguous, on the CPU."""
        tensor = (parent._buffers if buffer else parent._parameters).get(name)
        if tensor is None:
            return None
        plain = is_plain_eager(tensor) and tensor.is_cpu and tensor.layout == torch.strided
        if not plain or tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise NotNativeError(f"{type(parent).__name__}.{name} is no plain contiguous float32 tensor on the CPU")
        self.tensors.append(tensor)
        return tensor

    def seal(self) -> None:
        """Note what `is_current` compares."""
        self._states = [module.__dict__ for module in self.modules]
        self._attributes = [*map(len, self._states)]
        dicts = [own for m in self.modules for own in (m._modules, m._parameters, m._buffers) if own]
        self._dicts, self._values = dicts, list(itertools.chain.from_iterable(map(dict.values, dicts)))
        # `==` of lists takes identical entries as equal, and is ten times as fast as comparing them one by one. Other
        # tensors of one number may be equal as well; those of more have no truth value, and raise.
        self._small = [n for n, value in enumerate(self._values) if isinstance(value, Tensor) and value.numel() <= 1]
        self._blocks = [weight.parts for weight in self.quantized]
        self._addresses = [tensor.data_ptr() for tensor in self.tensors]
        # A parameter may be given other memory; what was read until now has to live as long as the program.
        self._kept = [tensor.detach() for tensor in self.tensors]
        self._handles = RemovableHandle.next_id

    def is_current(self) -> bool:
        """Whether nothing was replaced, moved or hooked since."""
        if RemovableHandle.next_id != self._handles:
            if any(map(_is_hooked, self.modules)) or modules._has_any_global_hook():
                return False
            self._handles = RemovableHandle.next_id
        found = list(itertools.chain.from_iterable(map(dict.values, self._dicts)))
        try:
            if len(found) != len(self._values) or found != self._values:
                return False
        except (RuntimeError, NotImplementedError, TypeError, ValueError):  # other tensors, even of another shape
            return False
        return (
            all(found[place] is self._values[place] for place in self._small)
            and [*map(len, self._states)] == self._attributes
            and [tensor.data_ptr() for tensor in self.tensors] == self._addresses
            and all(map(operator.is_, [weight.parts for weight in self.quantized], self._blocks))
            and not (self.drops and any(module.training for module in self.modules))
        )


def _is_hooked(module: nn.Module) -> bool:
    state = module.__dict__
    return "forward" in state or any(state[name] for name in HOOKS)


class NativeDecoder:
    """The program of a stack of blocks, and the step through it."""

    def __init__(self, model: nn.Module, stack: StackDescription) -> None:
        if (reason := missing()) is not None:
            raise NotNativeError(f"there are no native kernels: {reason}")
        if modules._has_any_global_hook():
            raise NotNativeError("there are hooks on all modules")
        self.watch = Watch()
        self.watch.add(model, "the model")
        self.attentions: list[MultiHeadAttention] = []
        self.rotary: Rotary | None = None
        self.table: tuple[Tensor, Tensor] | None = None
        parts, final = self._lower_blocks(model, stack)
        output = None
        if model._modules.get(stack.output) is not None:
            (output,), bias = self._find_linear(model, stack.output)
            if bias is not None:
                raise NotNativeError("the output matrix has a bias")
        self.embedding = self._find_embedding(model, stack)
        self.program = ModelProgram(stack.dim, parts, final, output, self.embedding)
        self.has_context = stack.has_context
        self.watch.seal()
        self.identity = object()  # of the fields that were made for this program

    # Building

    def _find_embedding(self, model: nn.Module, stack: StackDescription) -> StepEmbedding | None:
        """The tables of tokens and positions; `None` where the modules have to compute them."""
        tokens, positions = model._modules.get(stack.embedding), model._modules.get(stack.positions)
        if type(tokens) is not nn.Embedding or tokens.max_norm is not None or _is_hooked(tokens):
            return None
        if positions is not None and (type(positions) is not LearnedPositions or _is_hooked(positions)):
            return None
        try:
            (table,) = self._find_rows(tokens, "the embedding", most=1)
            added = None if positions is None else self.watch.parameter(positions, "weight")
        except NotNativeError:
            return None
        self.watch.modules += [module for module in (tokens, positions) if module is not None]
        return StepEmbedding(table, added, stack.scale)

    def _lower_blocks(
        self, model: nn.Module, stack: StackDescription
    ) -> tuple[list[ModelPart], tuple[StepNorm, StepNorm]]:
        parts: list[ModelPart] = []
        waiting = StepNorm()  # the norm after the part before, which a post-norm part begins with
        self.watch.drops |= self.watch.child(model, "dropout", (nn.Dropout,)).p > 0
        blocks = self.watch.child(model, stack.blocks, (BlockList,))
        for name in blocks._modules:
            block = self.watch.child(blocks, name, (TransformerBlock,))
            if block.shortcut is not None:
                raise NotNativeError("a block has a shortcut matrix")
            self.watch.drops |= self.watch.child(block, "dropout", (nn.Dropout,)).p > 0
            names = [("attention", "attention_norm")]
            names += [("cross", "cross_norm")] if stack.has_context else []
            post = block.order == "post"
            for part, norm_name in [*names, ("feed_forward", "feed_forward_norm")]:
                norm = self._find_norm(block, norm_name, stack.dim)
                before = waiting if post else norm
                if part == "feed_forward":
                    parts.append(self._lower_feed_forward(block, before, post))
                else:
                    parts.append(self._lower_attention(block, part, before, post, stack.dim))
                waiting = norm if post else StepNorm()
        if model._modules.get(stack.norm) is None:
            return parts, (waiting, StepNorm())
        last = self._find_norm(model, stack.norm, stack.dim)
        return parts, (last, StepNorm()) if waiting.kind == "none" else (waiting, last)

    def _find_norm(self, parent: nn.Module, name: str, dim: int) -> StepNorm:
        norm = self.watch.child(parent, name, (nn.LayerNorm, nn.RMSNorm))
        if norm.normalized_shape != (dim,):
            raise NotNativeError(f"{name} is over {norm.normalized_shape}, and tokens have {dim} channels")
        eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
        kind = "layer" if type(norm) is nn.LayerNorm else "rms"
        return StepNorm(kind, self.watch.parameter(norm, "weight"), self.watch.parameter(norm, "bias"), eps)

    def _find_rows(self, module: nn.Module, where: str, most: int) -> list[PackedMatrix]:
        """The matrix of a module in the format it is stored in, as runs of rows with one format each."""
        weight = module._parameters["weight"]
        if isinstance(weight, QuantizedTensor):
            if len(weight.parts) > most:
                raise NotNativeError(f"the rows of {where} have several formats: {', '.join(weight.formats)}")
            self.watch.quantized.append(weight)
            return weight.packed()
        weight = self.watch.parameter(module, "weight")
        assert weight is not None
        return [PackedMatrix.from_tensor(weight)]

    def _find_linear(
        self, parent: nn.Module, name: str, most: int = 1
    ) -> tuple[tuple[PackedMatrix, ...], Tensor | None]:
        """The weights of a linear layer, and its bias."""
        module = parent._modules[name]
        assert module is not None
        self.watch.add(module, name)
        if type(module) not in (Linear, nn.Linear):
            raise NotNativeError(f"{name} is {type(module).__name__}")
        return tuple(self._find_rows(module, name, most)), self.watch.parameter(module, "bias")

    def _lower_feed_forward(self, block: nn.Module, norm: StepNorm, post: bool) -> ModelPart:
        layer = self.watch.child(block, "feed_forward", (FeedForward,))
        dropout = self.watch.child(layer, "dropout", (nn.Dropout,))
        self.watch.drops |= dropout.p > 0
        name = GATE_ACTIVATIONS[layer.activation] if layer.gated else str(layer.activation)
        if layer.activation_fn is not (GATED if layer.gated else PLAIN).get(layer.activation):
            raise NotNativeError("the activation of a feed-forward layer was replaced")
        first, first_bias = self._find_linear(layer, "inner", MOST_FORMATS)
        (second,), second_bias = self._find_linear(layer, "outer")
        return ModelPart(
            "feed_forward",
            norm,
            post,
            first,
            first_bias,
            second,
            second_bias,
            activation=name,
            gated=layer.gated,
        )

    def _lower_attention(self, block: nn.Module, name: str, norm: StepNorm, post: bool, dim: int) -> ModelPart:
        layer = self.watch.child(block, name, (MultiHeadAttention,))
        projections = self.watch.child(layer, "projections", (Projections,))
        sizes, described, is_cross = layer.sizes, layer.attention, name == "cross"
        self.watch.drops |= layer.dropout > 0
        scale = 1 / math.sqrt(sizes.key) if described.scale is None else float(described.scale)
        slopes = None
        if described.feature_map is not None:
            raise NotNativeError("an attention has a feature map")
        if isinstance(described.bias, Alibi) and type(described.bias) is Alibi:
            slopes = self.watch.parameter(described.bias, "slopes", buffer=True)
        elif described.bias is not None:
            raise NotNativeError(f"an attention has the bias {described.bias!r}; only Alibi is known")
        if scale == 0 or not math.isfinite(scale):
            raise NotNativeError(f"an attention has scale={scale}")
        if not projections.joint or sizes.input != dim or sizes.output != dim:
            raise NotNativeError("the projections of an attention are no single matrix")
        window = -1 if is_cross else _find_window(layer)
        if projections.letters not in ("", "qkv"):
            raise NotNativeError(f"of the projections, only {projections.letters!r} have biases")
        first = self._find_rows(projections, "projections", MOST_FORMATS)
        bias = self.watch.parameter(projections, "bias")
        if is_cross:
            width = projections.widths[0]
            first, bias = _take_rows(first, width), None if bias is None else bias[:width]
        elif layer.rotary is not None:
            if self.rotary not in (None, layer.rotary):
                raise NotNativeError("layers have different rotary positions")
            self.rotary = layer.rotary
        (second,), second_bias = self._find_linear(layer, "output")
        self.attentions.append(layer)
        return ModelPart(
            "cross_attention" if is_cross else "self_attention",
            norm,
            post,
            tuple(first),
            bias,
            second,
            second_bias,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            dim=sizes.key,
            value_dim=sizes.value,
            scale=scale,
            slopes=slopes,
            rotary=0 if layer.rotary is None else layer.rotary.dim,
            rotary_pairs=layer.rotary is not None and layer.rotary.layout == "pairs",
            cache=len(self.attentions) - 1,
            window=window,
        )

    # Running

    def run(self, tokens: Tensor, x: Tensor | None, cache: ModelCache) -> Tensor | None:
        """Logits of one new token for each row, or hidden states; `None` where the step cannot do it.

        `tokens`: `(row, 1)`. `x`: `(row, dim)`, where the program has no tables.
        """
        rows = len(tokens)
        fields = find_fields(self, cache, rows)
        if fields is None:
            return None
        places = [cache.length] * rows if cache.lengths is None else cache.lengths
        ids = positions = None
        if x is None:
            ids, positions = tokens.reshape(-1).to(torch.int64).contiguous(), torch.tensor(places)
        rotation, kept = self._find_rotation(places)
        made = self.program.run(StepInputs(rows, x, ids, positions, fields.address, rotation))
        del kept  # its address is in the rotation
        if made is not None:
            fields.commit(cache)
        return made

    def _find_rotation(self, places: list[int]) -> tuple[tuple[int, int, int], tuple[Tensor, Tensor] | None]:
        """Addresses of the cosines and sines of these positions, and what must live until the step is over."""
        if self.rotary is None:
            return (0, 0, 0), None
        last = max(places)
        if self.table is None or len(self.table[0]) <= last:
            with torch.inference_mode(False):
                made = self.rotary.rotation(torch.arange(max(64, 2 * (last + 1))), torch.float32)
            self.table = made.cosine.contiguous(), made.sine.contiguous()
        cosine, sine = self.table
        if min(places) == last:
            offset = 4 * last * cosine.shape[1]
            return (cosine.data_ptr() + offset, sine.data_ptr() + offset, 0), None
        kept = cosine[places], sine[places]
        return (kept[0].data_ptr(), kept[1].data_ptr(), cosine.shape[1]), kept


def _take_rows(stack: Sequence[PackedMatrix], count: int) -> list[PackedMatrix]:
    """The first rows of matrices that stand one below the other."""
    taken: list[PackedMatrix] = []
    for matrix in stack:
        rows = min(matrix.rows, count)
        taken += [dataclasses.replace(matrix, rows=rows)] if rows else []
        count -= rows
    return taken


def _find_window(layer: MultiHeadAttention) -> int:
    """How many tokens before the newest a self-attention sees, -1 for all."""
    pattern = layer.attention.pattern
    if pattern is not None and pattern.is_causal:
        return -1
    if pattern is None or pattern.sliding_window is None:
        raise NotNativeError(f"the pattern {pattern!r} is neither causal nor a sliding window")
    return pattern.sliding_window


# Models

_decoders: weakref.WeakKeyDictionary[nn.Module, NativeDecoder | str] = weakref.WeakKeyDictionary()
_moved: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # whose weights were moved to huge pages


class NativeModel(Protocol):
    """What a model has to offer for native decode steps."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int | None: ...

    def describe_stack(self) -> StackDescription:
        """What is decoded."""
        ...

    def embed_step(self, tokens: Tensor, cache: ModelCache) -> Tensor:
        """Check the tokens; their embeddings `(row, 1, dim)` with positions added."""
        ...


def find_decoder(model: nn.Module) -> NativeDecoder | str:
    """The native decoder of a model, or why it has none."""
    found = _decoders.get(model)
    if isinstance(found, NativeDecoder) and found.watch.is_current():
        return found
    try:
        if model not in _moved and not any(parameter.is_shared() for parameter in model.parameters()):
            use_huge_pages(model)
        _moved.add(model)
        made: NativeDecoder | str = NativeDecoder(model, model.describe_stack())  # type: ignore[operator]
        if made.watch.drops and not made.watch.is_current():
            made = "the model is in training mode and has dropout"
    except NotNativeError as reason:
        made = str(reason)
    _decoders[model] = made
    return made


def run_native_step(model: NativeModel, tokens: Tensor, cache: object) -> Tensor | None:
    """Logits `(row, vocab)` of the next token, or hidden states; `None` where the modules have to run.

    The cache is one token longer afterwards, or as before where the answer is `None`.
    """
    assert isinstance(model, nn.Module)
    if type(cache) is not ModelCache or not _is_plain_step(model, tokens):
        return None
    decoder = find_decoder(model)
    if isinstance(decoder, str):
        return None
    if _can_look_up(model, decoder.embedding, tokens, cache):
        return decoder.run(tokens, None, cache)
    x = model.embed_step(tokens, cache)[:, 0]
    if x.dtype != torch.float32 or not is_plain_eager(x):
        return None
    return decoder.run(tokens, x.detach().contiguous(), cache)


def _can_look_up(model: NativeModel, embedding: StepEmbedding | None, tokens: Tensor, cache: ModelCache) -> bool:
    """Whether the kernel may read the tables: no token or position is out of range, which the modules would report."""
    if embedding is None or tokens.dtype not in (torch.int64, torch.int32):
        return False
    ids, longest = tokens.reshape(-1).tolist(), cache.length
    if min(ids) < 0 or max(ids) >= model.vocab_size:
        return False
    if model.context_length is not None and longest >= model.context_length:
        return False
    return embedding.positions is None or longest < len(embedding.positions)


def _is_plain_step(model: nn.Module, tokens: Tensor) -> bool:
    """Whether a native step is possible here: one plain token for each row, no gradients, no modes, no hooks."""
    if not isinstance(tokens, Tensor) or tokens.is_nested or not tokens.is_cpu or not is_plain_eager(tokens):
        return False
    if tokens.dim() != 2 or tokens.shape[1] != 1 or not 1 <= len(tokens) <= MAX_ROWS or _is_hooked(model):
        return False
    if torch._C._len_torch_function_stack() or torch.is_autocast_enabled("cpu"):
        return False
    return not torch.is_grad_enabled() or not any(parameter.requires_grad for parameter in model.parameters())
