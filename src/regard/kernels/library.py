"""The compiled library: found, loaded and asked in one place.

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

NUMBERS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
FINE, NOT_FINITE, TOO_TALL, NO_MEMORY = range(4)
# The fields of the structs of csrc/interface.h: `q` for whole numbers and addresses, `d` for numbers.
ATTENTION = struct.Struct("=9qd12q4q5q5q6q")
DECODE = struct.Struct("=9qd12q4q")
LINEAR = struct.Struct("=9q2d12q6q8q")
FEW = struct.Struct("=11q")
MANY = struct.Struct("=12q")
LARGE = 1 << 25  # bytes from which the C library's allocator asks the system for every block, and gives it back
_FILES = {"win32": "regard_native.dll", "darwin": "libregard_native.dylib"}
_OVERRIDE = "REGARD_NATIVE_LIBRARY"  # another build of the library, such as one with sanitizers


def _places() -> list[Path]:
    if os.environ.get(_OVERRIDE):
        return [Path(os.environ[_OVERRIDE])]
    # An editable installation keeps the library beside the metadata, not beside the sources.
    package = sys.modules["regard"].__path__ if "regard" in sys.modules else []
    folders = [Path(__file__).parent.parent, *map(Path, package)]
    folders += [Path(folder) / "regard" for folder in sys.path if folder]
    return [folder / _FILES.get(sys.platform, "libregard_native.so") for folder in folders]


def _load() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or why there is none."""
    for place in _places():
        if not place.is_file():
            continue
        try:
            return _declared(ctypes.CDLL(str(place))), None
        except (OSError, AttributeError) as error:
            return None, f"its library does not load ({error}); install regard again to build it anew"
    if os.environ.get(_OVERRIDE):
        return None, f"{_OVERRIDE} names {os.environ[_OVERRIDE]}, and there is no such file"
    return None, (
        f"it was not built for this {platform.machine()} machine: there was no C++ compiler when regard was installed; "
        "install g++ or clang, then regard again"
    )


def _declared(found: ctypes.CDLL) -> ctypes.CDLL:
    found.regard_fields.argtypes, found.regard_fields.restype = [ctypes.c_int32], ctypes.c_int32
    for number, fields in enumerate((ATTENTION, DECODE, LINEAR, FEW, MANY)):
        if 8 * found.regard_fields(number) != fields.size:
            raise AttributeError(f"{found._name} belongs to another version of regard")
    for name in ("attention", "attention_backward", "decode", "linear", "linear_backward", "few", "many"):
        function = getattr(found, f"regard_{name}")
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int32
    found.regard_exp2.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    found.regard_exp2.restype = None
    found.regard_expect.argtypes, found.regard_expect.restype = [ctypes.c_void_p, ctypes.c_int64], None
    found.regard_peak.argtypes, found.regard_peak.restype = [ctypes.c_int64, ctypes.c_double], ctypes.c_double
    found.regard_name.argtypes, found.regard_name.restype = [], ctypes.c_char_p
    found.regard_use.argtypes, found.regard_use.restype = [ctypes.c_char_p], ctypes.c_int32
    return found


native, _missing = _load()
# Kept in Python, so that what traces Python can follow.
_lanes = native.regard_lanes() if native is not None else 0


def missing() -> str | None:
    """Why there are no native kernels here, or `None` if there are."""
    return _missing


def use(name: str) -> None:
    """Take the kernels of this name from now on: `avx512`, `avx2`, `plain`, or `scalar` (the slow twins)."""
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


def machine_peak(threads: int | None = None, seconds: float = 0.2) -> float:
    """Operations a second, in 1e9, of nothing but float32 multiply-adds: no kernel can be faster."""
    assert native is not None, _missing
    return native.regard_peak(threads or torch.get_num_threads(), seconds) / 1e9


def fresh(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor that a kernel will fill. A large one gets large pages: its memory is new to the process each time."""
    made = torch.empty(shape, dtype=dtype, device="cpu")
    if made.nbytes >= LARGE and native is not None:
        native.regard_expect(made.data_ptr(), made.nbytes)
    return made


def placed(tensor: Tensor) -> tuple[int, int, int, int]:
    """Address and strides of `(batch, head, token, dim)`, as `Tensor4` wants them."""
    batch, head, token, _ = tensor.stride()
    return tensor.data_ptr(), batch, head, token


def last_axis_dense(tensor: Tensor) -> Tensor:
    """The tensor itself if neighbours in its last axis are neighbours in memory, else a copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()
