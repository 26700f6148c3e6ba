"""Arguments of operations that are no tensors and that a cost depends on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from regard.cost_model.trace.operation import Operand

Arguments = dict[str, Any]
Noted = tuple[tuple[Any, ...], tuple[Any, ...]]  # words, numbers


def words_of(name: str, arguments: Arguments, reads: dict[str, Operand]) -> Noted:
    """The words and the numbers of an operation."""
    read = READERS.get(name.removesuffix("_"))
    return ((), ()) if read is None else read(arguments, reads)


def _axes(name: str) -> Callable[[Arguments, dict[str, Operand]], Noted]:
    """The axes over which something is reduced, counted from the front; all of them if none are named."""

    def read(arguments: Arguments, reads: dict[str, Operand]) -> Noted:
        rank = len(next(iter(reads.values())).shape)
        axes = arguments.get(name)
        if axes is None or axes == []:
            return (tuple(range(rank)),), ()
        axes = axes if isinstance(axes, list | tuple) else (axes,)
        return (tuple(sorted(axis % rank if rank else 0 for axis in axes)),), ()

    return read


def _convolution(arguments: Arguments, reads: dict[str, Operand]) -> Noted:
    mask = arguments.get("output_mask")
    words = bool(arguments.get("transposed", False)), int(arguments.get("groups", 1))
    return ((*words, tuple(map(bool, mask))) if mask is not None else words), ()


def _channels(arguments: Arguments, reads: dict[str, Operand]) -> Noted:
    """How many channels at the end a layer norm reads; whether a batch norm learns from the batch."""
    return (len(arguments.get("normalized_shape") or ()),), ()


def _training(arguments: Arguments, reads: dict[str, Operand]) -> Noted:
    return (bool(arguments.get("training", arguments.get("train", False))),), ()


def _groups(arguments: Arguments, reads: dict[str, Operand]) -> Noted:
    return (int(arguments.get("group", 1)),), ()


def _causal(arguments: Arguments, reads: dict[str, Operand]) -> Noted:
    return (bool(arguments.get("is_causal", False)),), ()


def _pairs(arguments: Arguments, reads: dict[str, Operand]) -> Noted:
    """The pairs that a program visits, of so many rows of the batch: they are written in its words."""
    words = arguments["words"]
    if isinstance(words, FakeTensor):
        return (), ()
    with _disable_current_modes():  # a program has numbers, and whoever follows must not take them away
        rows, low, high = words[3:6].tolist()
    return (int(rows),), ((int(high) << 31) + int(low),)


def _seen(arguments: Arguments, reads: dict[str, Operand]) -> Noted:
    """The pairs of a step of decoding: every query sees one interval of keys."""
    start, stop = arguments["start"], arguments["stop"]
    if isinstance(start, FakeTensor) or isinstance(stop, FakeTensor):
        return (), ()
    with _disable_current_modes():
        return (len(start),), (int((stop - start).clamp(min=0).sum()),)


REDUCTIONS = ("sum", "mean", "amax", "amin", "logsumexp", "var", "var_mean", "std", "std_mean", "linalg_vector_norm",
              "norm", "prod", "any", "all", "argmax", "argmin", "max", "min", "cumsum", "cumprod", "topk", "sort",
              "median", "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data",
              "_safe_softmax", "logcumsumexp")  # fmt: skip

READERS: dict[str, Callable[[Arguments, dict[str, Operand]], Noted]] = {
    **{f"aten.{name}": _axes("dim") for name in REDUCTIONS},
    "aten.convolution": _convolution,
    "aten._convolution": _convolution,
    "aten.convolution_backward": _convolution,
    "aten.convolution_overrideable": _convolution,
    "aten.convolution_backward_overrideable": _convolution,
    "aten.native_layer_norm": _channels,
    "aten.native_layer_norm_backward": _channels,
    "aten._fused_rms_norm": _channels,
    "aten._fused_rms_norm_backward": _channels,
    "aten.native_group_norm": _groups,
    "aten.native_group_norm_backward": _groups,
    "aten.native_batch_norm": _training,
    "aten._native_batch_norm_legit": _training,
    "aten.cudnn_batch_norm": _training,
    "aten.native_batch_norm_backward": _training,
    "regard.attention": _pairs,
    "regard.attention_backward": _pairs,
    "regard.decode": _seen,
}
for _name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention",
              "fused_attention_overrideable"):  # fmt: skip
    READERS[f"aten._scaled_dot_product_{_name}"] = READERS[f"aten._scaled_dot_product_{_name}_backward"] = _causal
