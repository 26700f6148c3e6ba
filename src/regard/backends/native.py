"""The C++ kernels of `csrc/`: softmax attention over a plan, forward and backward, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends.base import Backend, Request, accumulation_dtype
from regard.kernels import library
from regard.kernels.bias_table import make_bias_table
from regard.kernels.constant_program import get_program
from regard.kernels.decode import MAX_QUERIES, run_decode
from regard.kernels.eager import is_traced
from regard.kernels.key_intervals import find_key_intervals
from regard.kernels.program import best_plan
from regard.kernels.softmax import Score, attention
from regard.planner import Plan

# What benchmarks/attention.py measured on two cores with AVX2, in float32 without a bias; used where it applies.
MERITS = {
    "decode": "measured to read a long cache at 0.6 to 0.8 of the speed of memory",
    "dense": "measured 1.1 to 1.5 times as fast as torch's SDPA",
    "causal": "measured about twice as fast as torch's SDPA up to 512 tokens",
    "sparse": "a window measured 1.6 to 2.1 times as fast as SDPA on chunks, and 1.9 to 2.7 times with its gradients",
}


class Native(Backend):
    """Block-sparse flash attention in C++: the fast path on a CPU, and the one that trains sparse patterns there."""

    name = "native"

    def refuse(self, request: Request) -> str | None:
        if (missing := library.missing()) is not None:
            return missing
        if request.feature_map is not None:
            return "its tiles compute a softmax, and a feature map replaces it; causal features run inside 'linear'"
        if request.query.device.type != "cpu":
            return f"its kernels run on the CPU, and the tensors are on {request.query.device.type}"
        if not {request.query.dtype, request.key.dtype, request.value.dtype} <= library.DTYPE_CODES.keys():
            return f"its kernels read float64, float32, bfloat16 and float16, not {request.query.dtype}"
        if request.hard:
            return "its softmax is soft: hard attention is a search, which 'blocked' does"
        if request.bias is not None and not isinstance(request.bias, Tensor) and not request.bias.relative:
            return f"its kernels tabulate a bias by relative position, and {type(request.bias).__name__} needs more"
        return None

    def reluctance(self, request: Request) -> str | None:
        if request.uniform and request.dropout is None:
            return "it would compute a softmax of equal scores; 'blocked' takes the mean by running sums"
        return None

    def merit(self, request: Request) -> str | None:
        case = _find_benchmark(request)
        return None if case is None else MERITS[case]

    def plan(self, request: Request) -> Plan | None:
        return best_plan(request.pattern, request.lengths, library.lanes(accumulation_dtype(request)))

    def run(self, request: Request) -> Tensor:
        query, key, value = _unify_dtypes(request)
        dtype = accumulation_dtype(request)
        if 0 in (*request.lengths, request.batch) or not value.shape[-1]:
            return value.new_zeros(*query.shape[:3], value.shape[3], dtype=request.value.dtype)
        if request.lengths.queries <= MAX_QUERIES and (intervals := _find_intervals(request)) is not None:
            return run_decode(query, key, value, *intervals, request.scale)[0].to(request.value.dtype)
        table = query_code = key_code = bias = None
        if isinstance(request.bias, Tensor):
            bias = request.bias.to(dtype)
        elif request.bias is not None:
            table, query_code, key_code = make_bias_table(request.bias, request.lengths)
            table = table.to(dtype)
        words, masks = get_program(request.pattern, request.lengths, library.lanes(dtype))
        score = Score(table, query_code, key_code, bias, words, masks, request.scale)
        if request.dropout is not None:
            score = score._replace(dropout=request.dropout.probability, seed=request.dropout.seed)
        return attention(query, key, value, score)[0].to(request.value.dtype)


def _find_benchmark(request: Request) -> str | None:
    """The benchmark that covers a request, or `None`."""
    if request.query.dtype != torch.float32 or request.bias is not None or request.dropout is not None:
        return None
    if request.lengths.queries <= MAX_QUERIES:
        return "decode" if _find_intervals(request) is not None else None
    if request.dense:
        return "dense"
    return "causal" if request.pattern.is_causal else "sparse"


def _find_intervals(request: Request) -> tuple[Tensor, Tensor] | None:
    """The keys of a few queries, if they are one interval each and only the output is needed."""
    if request.bias is not None or request.dropout is not None or request.needs_gradient or is_traced():
        return None
    intervals = find_key_intervals(request.pattern, request.lengths)
    return None if intervals is None else (request.by_row(intervals[0]), request.by_row(intervals[1]))


def _unify_dtypes(request: Request) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as they are, unless autocast made their dtypes differ."""
    tensors = (request.query, request.key, request.value)
    if tensors[0].dtype == tensors[1].dtype == tensors[2].dtype:
        return tensors
    dtype = accumulation_dtype(request)
    return tensors[0].to(dtype), tensors[1].to(dtype), tensors[2].to(dtype)
