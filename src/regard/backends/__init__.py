"""The backends, in the order in which `auto` tries them."""

from __future__ import annotations

from regard.backends.base import Backend, Request
from regard.backends.blocked import Blocked
from regard.backends.flex import Flex
from regard.backends.linear_attention import LinearAttentionBackend
from regard.backends.native import Native
from regard.backends.positional import Positional
from regard.backends.reference import Reference
from regard.backends.sdpa import Sdpa
from regard.errors import BackendError

# Fastest first where more than one accepts: torch's own kernels for the dense cases, FlexAttention on GPUs, tiles for
# what is sparse or special. The reference takes what is left.
BACKENDS: tuple[Backend, ...] = (
    LinearAttentionBackend(),
    Positional(),
    Native(),
    Sdpa(),
    Flex(),
    Blocked(),
    Reference(),
)


def find(name: str) -> Backend:
    """The backend of this name."""
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    raise BackendError(
        f"There is no backend {name!r}.",
        asked=f"backend={name!r}",
        because="the backends are " + ", ".join(backend.name for backend in BACKENDS),
        instead='backend="auto", or one of these names',
    )


def choose(request: Request) -> Backend:
    """The first backend that can run the request and is not reluctant to."""
    return next(b for b in BACKENDS if b.refuse(request) is None and b.reluctance(request) is None)


__all__ = ["BACKENDS", "Backend", "Request", "choose", "find"]
