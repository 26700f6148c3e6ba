"""One cache for what is computed from a description: plans, kernel programs, masks and tables of indices.

Everything kept shares one limit in bytes. A pattern that never changes is planned once; a stream of ever new lengths or
patterns cannot pile up, because the least recently used results are dropped when the limit is reached. Looking up,
keeping and dropping take constant time, however much is kept.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar, overload

import torch
from torch.utils._python_dispatch import _disable_current_modes

from regard.errors import InputError

Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])


def constant_under_compile(function: Function) -> Function:
    """`torch.compiler.assume_constant_result`, which would import Dynamo (two seconds) to set this one attribute."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


DEFAULT_LIMIT = 128 << 20
ENTRY_BYTES = 1024  # of the key, its pattern and the bookkeeping of one entry


class ByteLimitedCache:
    """Values by key, at most `limit` bytes of them; the least recently used are dropped first.

    The newest value is always kept, even when it alone exceeds the limit: it is about to be used again.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self.entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self.lock = threading.RLock()

    def get(self, key: Hashable) -> tuple[Any, int] | None:
        """The value of the key and its bytes, now the most recently used one; `None` where there is none."""
        with self.lock:
            found = self.entries.get(key)
            if found is not None:
                self.entries.move_to_end(key)
            return found

    def put(self, key: Hashable, value: Any, size: int) -> None:
        """Keep a value of so many bytes, and drop others until the limit holds."""
        with self.lock:
            self._drop(key)
            self.entries[key] = (value, size)
            self.bytes += size
            self._enforce_limit()

    def discard(self, select: Callable[[Hashable], bool]) -> None:
        """Drop every value whose key is selected."""
        with self.lock:
            for key in [key for key in self.entries if select(key)]:
                self._drop(key)

    def resize(self, limit: int) -> None:
        with self.lock:
            self.limit = limit
            self._enforce_limit()

    def _drop(self, key: Hashable) -> None:
        found = self.entries.pop(key, None)
        if found is not None:
            self.bytes -= found[1]

    def _enforce_limit(self) -> None:
        while self.bytes > self.limit and len(self.entries) > 1:
            _, (_, size) = self.entries.popitem(last=False)
            self.bytes -= size


_CACHE = ByteLimitedCache(DEFAULT_LIMIT)
_SMALL_CACHES: list[Callable[[], None]] = []

# A child process that is forked while another thread holds the lock would wait for it forever. Forking waits for the
# lock instead, so that the child gets a free lock and a consistent cache.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_CACHE.lock.acquire, after_in_parent=_CACHE.lock.release, after_in_child=_CACHE.lock.release
    )


def lru_cache_bytes(measure: Callable[[Any], int]) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Keep results of a function in the shared cache; `measure(result)` is the number of bytes it holds."""

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        @functools.wraps(function)
        def cached(*arguments, **keywords) -> Result:
            key = (function, arguments, tuple(sorted(keywords.items())) if keywords else ())
            found = _CACHE.get(key)
            if found is not None:
                return found[0]
            with outside_modes():
                result = function(*arguments, **keywords)
                size = ENTRY_BYTES + measure(result)
            _CACHE.put(key, result, size)
            return result

        cached.cache_clear = lambda: _CACHE.discard(lambda key: key[0] is function)  # type: ignore[attr-defined, index]
        return cached

    return decorate


def lru_cache_small(maxsize: int) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """`functools.lru_cache` for a few small results that are looked up in a hot loop; `clear_cache` empties it too."""

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        cached = functools.lru_cache(maxsize=maxsize)(function)
        _SMALL_CACHES.append(cached.cache_clear)
        return cached

    return decorate


def outside_cache_if_fake(cached: Callable[..., Result]) -> Callable[..., Result]:
    """The function behind `lru_cache_small` where tensors are fake: a fake tensor must not outlive its mode.

    Other dispatch modes get the cached tensors, which a traced graph holds as constants.
    """
    if torch.compiler.is_compiling() or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
        return cached
    return cached.__wrapped__  # type: ignore[attr-defined]


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """Outside of the caller's modes, since a cached result outlives them.

    No tracing, no functorch transform, no inference tensors, and the CPU as default device.
    """
    with contextlib.ExitStack() as stack:
        # Where no transform is active, a cached function may use one itself.
        if torch._C._are_functorch_transforms_active():
            stack.enter_context(torch._C._DisableFuncTorch())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.inference_mode(False))
        # A default device is a function mode, which every torch call in here would pay for: only against another one.
        if torch._C._len_torch_function_stack():
            stack.enter_context(torch.device("cpu"))
        yield


def clear_cache() -> None:
    """Drop every plan, program, mask and table that was kept for later calls.

    >>> clear_cache()
    """
    _CACHE.discard(lambda key: True)
    for clear in _SMALL_CACHES:
        clear()


def set_cache_limit(limit: int) -> None:
    """Keep at most `limit` bytes of plans, programs, masks and tables for later calls; 128 MiB unless set.

    A single result that is larger is kept alone.

        >>> set_cache_limit(128 << 20)
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        raise InputError(
            "The limit of the cache is not a number of bytes.",
            asked=f"set_cache_limit({limit!r})",
            because="it is a whole number of bytes, zero or more",
            instead="set_cache_limit(64 << 20) for 64 MiB; clear_cache() to drop what is kept now",
        )
    _CACHE.resize(limit)


def cached_bytes() -> int:
    """Bytes that are kept now, as they were measured when they were kept."""
    return _CACHE.bytes


class lazy_property(Generic[Result]):
    """A property that is computed once and then kept on its object.

    `functools.cached_property` of Python 3.11 holds one lock for all objects while it computes, on which a process that
    is forked meanwhile waits forever. Here two threads may compute the same value twice, which is harmless.
    """

    def __init__(self, function: Callable[[Any], Result]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> lazy_property[Result]: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Result: ...
    def __get__(self, instance: object | None, owner: type | None = None) -> lazy_property[Result] | Result:
        if instance is None:
            return self
        value = self.function(instance)
        instance.__dict__[self.name] = value  # found before this descriptor from now on
        return value
