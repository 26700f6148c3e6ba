"""The compiled library: found, loaded and called in one place.

It has a plain C interface. Each call takes one address: of a struct whose fields are all eight bytes wide, packed here
by `struct`, which costs a microsecond where a ctypes structure would cost ten.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from pathlib import Path

import torch
from torch import Tensor

DTYPE_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
OK, NOT_FINITE, TOO_TALL, NO_MEMORY, NO_FORMAT = range(5)
# The fields of the structs of csrc/interface.h: `q` for integers and addresses, `d` for floating-point numbers.
ATTENTION = struct.Struct("=9qd2qd2q12q4q3q5q5q4q12q2q")
DECODE = struct.Struct("=9qd12q4q2q")
LINEAR_ATTENTION = struct.Struct("=9q2d12q6q8q")
GEMV = struct.Struct("=11q")
GEMM = struct.Struct("=15q")
PACK_WEIGHT = struct.Struct("=7q")
CHANNEL_ATTENTION = struct.Struct("=6qd2q")
GRID_CONVOLUTION = struct.Struct("=6qd7q")
PACKED_MATRIX = struct.Struct("=8q")
WEIGHT_PRODUCTS = struct.Struct("=15q")
MODEL_PART = struct.Struct("=q3qdq25q9q4qd7q")
STEP_CACHE = struct.Struct("=11q")
MODEL_STEP = struct.Struct("=10q8qd3q3qd3qd8q2q")
MATMUL = struct.Struct("=20q")
NORM = struct.Struct("=5qd11q")
LARGE = 1 << 25  # bytes from which the C library's allocator maps every block anew, and unmaps it
_FILES = {"win32": "regard_native.dll", "darwin": "libregard_native.dylib"}
_OVERRIDE = "REGARD_NATIVE_LIBRARY"  # another build of the library, such as one with sanitizers


def _list_candidates() -> list[Path]:
    if os.environ.get(_OVERRIDE):
        return [Path(os.environ[_OVERRIDE])]
    # An editable installation keeps the library beside the metadata, not beside the sources.
    package = sys.modules["regard"].__path__ if "regard" in sys.modules else []
    folders = [Path(__file__).parent.parent, *map(Path, package)]
    folders += [Path(folder) / "regard" for folder in sys.path if folder]
    return [folder / _FILES.get(sys.platform, "libregard_native.so") for folder in folders]


def _load_library() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or why there is none. One of another version is passed over for one that fits."""
    reason = None
    for path in _list_candidates():
        if not path.is_file():
            continue
        try:
            return _declare_functions(ctypes.CDLL(str(path))), None
        except (OSError, AttributeError) as error:
            reason = reason or f"its library does not load ({error}); install regard again to build it anew"
    if reason is not None:
        return None, reason
    if os.environ.get(_OVERRIDE):
        return None, f"{_OVERRIDE} names {os.environ[_OVERRIDE]}, and there is no such file"
    return None, (
        f"it was not built for this {platform.machine()} machine: there was no C++ compiler when regard was installed; "
        "install g++ or clang, then regard again"
    )


def _declare_functions(found: ctypes.CDLL) -> ctypes.CDLL:
    found.regard_fields.argtypes, found.regard_fields.restype = [ctypes.c_int32], ctypes.c_int32
    structs = (ATTENTION, DECODE, LINEAR_ATTENTION, GEMV, GEMM, WEIGHT_PRODUCTS, MODEL_PART, STEP_CACHE, MODEL_STEP)
    structs += (PACK_WEIGHT, CHANNEL_ATTENTION, GRID_CONVOLUTION, MATMUL, NORM)
    for number, fields in enumerate(structs):
        if 8 * found.regard_fields(number) != fields.size:
            raise AttributeError(f"{found._name} belongs to another version of regard")
    for name in (
        "attention",
        "attention_backward",
        "decode",
        "linear_attention",
        "linear_attention_backward",
        "gemv",
        "gemm",
        "weight_products",
        "model_step",
        "pack_weight",
        "channel_attention",
        "grid_convolution",
        "matmul",
        "norm",
        "norm_backward",
    ):
        function = getattr(found, f"regard_{name}")
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int32
    found.regard_greedy.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    found.regard_greedy.restype = ctypes.c_int32
    found.regard_exp2.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    found.regard_exp2.restype = None
    found.regard_use_huge_pages.argtypes, found.regard_use_huge_pages.restype = [ctypes.c_void_p, ctypes.c_int64], None
    found.regard_peak.argtypes, found.regard_peak.restype = [ctypes.c_int64, ctypes.c_double], ctypes.c_double
    found.regard_name.argtypes, found.regard_name.restype = [], ctypes.c_char_p
    found.regard_use.argtypes, found.regard_use.restype = [ctypes.c_char_p], ctypes.c_int32
    return found


native, _missing = _load_library()
# Kept in Python, so that what traces Python can follow.
_lanes = native.regard_lanes() if native is not None else 0


def missing() -> str | None:
    """Why there are no native kernels here, or `None` if there are."""
    return _missing


def use(name: str) -> None:
    """Take the kernels of this name from now on: `avx512vnni avx512 avx2 plain`, or `scalar` (loops, for tests)."""
    assert native is not None, _missing
    global _lanes
    if native.regard_use(name.encode()):
        raise ValueError(f"there are no kernels {name!r} on this machine")
    _lanes = native.regard_lanes()


def name() -> str:
    """The kernels in use."""
    assert native is not None, _missing
    return native.regard_name().decode()


def lanes(dtype: torch.dtype) -> int:
    """Numbers in a vector of this machine, in the dtype that the kernels compute with."""
    return _lanes // 2 if dtype == torch.float64 else _lanes


_one_thread = False  # in a forked child, whose OpenMP runtime has no threads


def num_threads() -> int:
    """Threads that a kernel may use: torch's number, or one in a child forked from a process that had several.

    A child inherits the state of OpenMP's thread pool but not its threads: GNU's runtime waits for them forever.
    """
    return 1 if _one_thread else torch.get_num_threads()


def _has_threads() -> bool:
    try:
        return len(os.listdir("/proc/self/task")) > 1
    except OSError:  # no such list on this system
        return True


def _before_fork() -> None:
    global _parent_has_threads
    _parent_has_threads = _has_threads()


def _after_fork_in_child() -> None:
    global _one_thread
    _one_thread = _one_thread or _parent_has_threads


_parent_has_threads = False
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)


def machine_peak(threads: int | None = None, seconds: float = 0.2) -> float:
    """Operations a second, in 1e9, of nothing but float32 multiply-adds: no kernel can be faster."""
    assert native is not None, _missing
    return native.regard_peak(threads or num_threads(), seconds) / 1e9


def empty_output(*shape: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor for a kernel to fill; a large one gets huge pages, since its memory is mapped anew."""
    output = torch.empty(shape, dtype=dtype, device="cpu")
    if output.nbytes >= LARGE and native is not None:
        native.regard_use_huge_pages(output.data_ptr(), output.nbytes)
    return output


def address_and_strides(tensor: Tensor) -> tuple[int, int, int, int]:
    """Address and strides of a `(batch, head, token, dim)` tensor: the C struct `Tensor4`."""
    batch, head, token, _ = tensor.stride()
    return tensor.data_ptr(), batch, head, token


def last_axis_dense(tensor: Tensor) -> Tensor:
    """The tensor itself if its last axis is contiguous, else a copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()
