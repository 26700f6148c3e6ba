"""Arguments of operators that are no tensors and that a cost depends on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from regard.cost_model.trace.operation import Operand

Arguments = dict[str, Any]
Constants = tuple[Any, ...]
Reader = Callable[[Arguments, dict[str, Operand]], Constants]


def read_constants(name: str, arguments: Arguments, reads: dict[str, Operand]) -> Constants:
    """The arguments beside tensors that the cost of this operator depends on."""
    read = READERS.get(name.removesuffix("_"))
    return () if read is None else read(arguments, reads)


def _read_axes(name: str) -> Reader:
    """The axes of a reduction, counted from the front; all of them if none are named."""

    def read(arguments: Arguments, reads: dict[str, Operand]) -> Constants:
        rank = len(next(iter(reads.values())).shape)
        axes = arguments.get(name)
        if axes is None or axes == []:
            return (tuple(range(rank)),)
        axes = axes if isinstance(axes, list | tuple) else (axes,)
        return (tuple(sorted(axis % rank if rank else 0 for axis in axes)),)

    return read


def _read_convolution(arguments: Arguments, reads: dict[str, Operand]) -> Constants:
    """Groups follow from the shapes, except those of a transposed convolution."""
    transposed = bool(arguments.get("transposed", False))
    mask = arguments.get("output_mask")
    wanted = () if mask is None else (tuple(map(bool, mask)),)
    return (transposed, int(arguments.get("groups", 1)) if transposed else None, *wanted)


def _read_normalized_rank(arguments: Arguments, reads: dict[str, Operand]) -> Constants:
    """The number of axes at the end that a layer norm reads."""
    return (len(arguments.get("normalized_shape") or ()),)


def _read_training(arguments: Arguments, reads: dict[str, Operand]) -> Constants:
    return (bool(arguments.get("training", arguments.get("train", False))),)


def _read_groups(arguments: Arguments, reads: dict[str, Operand]) -> Constants:
    return (int(arguments.get("group", 1)),)


def _read_is_causal(arguments: Arguments, reads: dict[str, Operand]) -> Constants:
    return (bool(arguments.get("is_causal", False)),)


def _read_trilinear(arguments: Arguments, reads: dict[str, Operand]) -> Constants:
    """The axes that each operand lacks, and those that are summed."""
    return tuple(tuple(arguments[name]) for name in ("expand1", "expand2", "expand3", "sumdim"))


def _read_lengths(name: str) -> Reader:
    """The tokens of each row, which may be nested tensors, and the channels of all heads."""

    def read(arguments: Arguments, reads: dict[str, Operand]) -> Constants:
        return tuple(len(row) for row in arguments[name].unbind()), int(arguments["embed_dim"])

    return read


REDUCTIONS = ("sum", "mean", "amax", "amin", "logsumexp", "var", "var_mean", "std", "std_mean", "linalg_vector_norm",
              "norm", "prod", "any", "all", "argmax", "argmin", "max", "min", "cumsum", "cumprod", "topk", "sort",
              "median", "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data",
              "_safe_softmax", "logcumsumexp")  # fmt: skip

READERS: dict[str, Reader] = {
    **{f"aten.{name}": _read_axes("dim") for name in REDUCTIONS},
    "aten.convolution": _read_convolution,
    "aten._convolution": _read_convolution,
    "aten.convolution_backward": _read_convolution,
    "aten.convolution_overrideable": _read_convolution,
    "aten.convolution_backward_overrideable": _read_convolution,
    "aten._trilinear": _read_trilinear,
    "aten._native_multi_head_attention": _read_lengths("query"),
    "aten._transformer_encoder_layer_fwd": _read_lengths("src"),
    "aten.native_layer_norm": _read_normalized_rank,
    "aten.native_layer_norm_backward": _read_normalized_rank,
    "aten._fused_rms_norm": _read_normalized_rank,
    "aten._fused_rms_norm_backward": _read_normalized_rank,
    "aten.native_group_norm": _read_groups,
    "aten.native_group_norm_backward": _read_groups,
    "aten.native_batch_norm": _read_training,
    "aten._native_batch_norm_legit": _read_training,
    "aten.cudnn_batch_norm": _read_training,
    "aten.native_batch_norm_backward": _read_training,
}
for _name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention",
              "fused_attention_overrideable"):  # fmt: skip
    READERS[f"aten._scaled_dot_product_{_name}"] = _read_is_causal
    READERS[f"aten._scaled_dot_product_{_name}_backward"] = _read_is_causal
