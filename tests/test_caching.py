"""The cache of plans: one limit in bytes, constant-time operations, fork safety."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from regard import Causal, Padding, Window, attend, caching, clear_cache, plan, set_cache_limit
from regard.caching import DEFAULT_LIMIT, ENTRY_BYTES, ByteLimitedCache, cached_bytes, lazy_property, lru_cache_bytes
from regard.errors import RegardError


@pytest.fixture(autouse=True)
def _own_cache():
    clear_cache()
    yield
    set_cache_limit(DEFAULT_LIMIT)
    clear_cache()


# The cache itself


def test_the_least_recently_used_value_is_dropped_first():
    cache = ByteLimitedCache(100)
    for key in (1, 2):
        cache.put(key, key, 40)
    assert cache.get(1) == (1, 40)  # now 2 is the oldest
    cache.put(3, 3, 40)
    assert list(cache.entries) == [1, 3]
    assert cache.bytes == 80


def test_a_value_larger_than_the_limit_is_kept_until_the_next_one():
    cache = ByteLimitedCache(10)
    cache.put(1, 1, 99)
    assert cache.get(1) is not None
    cache.put(2, 2, 5)
    assert list(cache.entries) == [2]
    assert cache.bytes == 5


def test_replacing_a_value_counts_its_bytes_once():
    cache = ByteLimitedCache(100)
    cache.put(1, 1, 40)
    cache.put(1, 2, 30)
    assert cache.bytes == 30
    cache.discard(lambda key: True)
    assert cache.bytes == 0


def test_bytes_are_those_of_the_entries_after_any_history():
    cache, generator = ByteLimitedCache(1000), torch.Generator().manual_seed(0)
    for key, size in torch.randint(0, 300, (3000, 2), generator=generator).tolist():
        cache.put(key % 37, key, size)
        assert cache.bytes == sum(size for _, size in cache.entries.values())
        assert cache.bytes <= 1000 or len(cache.entries) == 1


def test_a_result_that_is_none_is_cached_too():
    calls = []

    @lru_cache_bytes(lambda result: 1)
    def compute(number):
        calls.append(number)

    assert compute(1) is compute(1) is None
    assert calls == [1]
    compute.cache_clear()  # type: ignore[attr-defined]
    compute(1)
    assert calls == [1, 1]


def test_keeping_costs_the_same_with_few_and_with_many_entries():
    """Counted in steps of the interpreter, which no other program on the machine can change."""

    def steps(entries: int) -> int:
        cache = ByteLimitedCache(entries)
        for key in range(entries):
            cache.put(key, None, 1)
        count = 0

        def step(frame, event, argument):
            nonlocal count
            count += 1
            return step

        threading.settrace(step)
        try:
            thread = threading.Thread(target=lambda: [cache.put((key,), None, 1) for key in range(50)])
            thread.start()
            thread.join()
        finally:
            threading.settrace(None)  # type: ignore[arg-type]
        return count

    assert steps(4000) == steps(100)


def test_equal_descriptions_get_the_same_plan_object():
    assert plan(Window(5, 2), 90) is plan(Window(5, 2), 90)
    assert plan(Window(5, 2), 90, block=32) is not plan(Window(5, 2), 90)
    assert plan(Window(5, 2), 91) is not plan(Window(5, 2), 90)


# The limit


@pytest.mark.parametrize("backend", ["native", "blocked"])
@pytest.mark.parametrize("scale", [None, 0.0])
def test_a_stream_of_new_lengths_and_patterns_stays_under_the_limit(backend, scale):
    limit = 400_000
    set_cache_limit(limit)
    x = torch.randn(3, 1, 97, 4)
    generator = torch.Generator().manual_seed(0)
    most = 0
    for step in range(20):
        lengths = torch.randint(1, 98, (3,), generator=generator)
        queries = 1 + (31 * step) % 97
        attend(x[:, :, :queries], x, x, pattern=Causal() & Padding(lengths), backend=backend, scale=scale)
        most = max(most, cached_bytes())
    largest = max(size for _, size in caching._CACHE.entries.values())
    assert 0 < most <= max(limit, largest)


def test_measured_bytes_are_at_least_those_of_the_arrays_in_a_result():
    made = plan(Causal() & Window(9, 0), 700)
    arrays = [each for part in made.parts for each in vars(part).values() if hasattr(each, "nbytes")]
    assert sum(each.nbytes for each in arrays) + ENTRY_BYTES <= cached_bytes()


def test_clear_cache_drops_everything():
    x = torch.randn(2, 1, 40, 4)
    attend(x, x, x, pattern=Causal() & Padding([3, 40]))
    assert cached_bytes() > 0
    clear_cache()
    assert cached_bytes() == 0
    assert not caching._CACHE.entries


@pytest.mark.parametrize("limit", [-1, 1.5, "1 MB", True, None])
def test_a_limit_that_is_no_number_of_bytes_is_refused(limit):
    with pytest.raises(RegardError, match="number of bytes"):
        set_cache_limit(limit)


def test_a_default_device_of_the_caller_does_not_reach_what_is_cached():
    with torch.device("meta"):
        made = plan(Causal() & Window(3, 0), 40)
    x = torch.randn(1, 1, 40, 4)
    for backend in ("native", "blocked", "reference"):
        clear_cache()
        with torch.device("meta"):
            output = attend(x, x, x, pattern=Causal() & Window(3, 0), backend=backend)
        assert output.device.type == "cpu"
        assert output.isfinite().all()
    assert made.pairs == (Causal() & Window(3, 0)).matrix(40).sum()


# Fork


class Attentions(Dataset):
    """Samples that are computed by attention in the worker that loads them."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        x = torch.ones(1, 2, 20 + index, 4) * index
        for threads in (1, 2):
            torch.set_num_threads(threads)
            output = attend(x, x, x, pattern=Causal() & Window(3 + index, 0))
        return output.mean()


@pytest.fixture
def busy_thread():
    """A thread that plans and attends without pause."""
    stopping = threading.Event()

    def run() -> None:
        length = 17
        # A generator of its own: a child that is forked inside torch's default one would wait for its lock forever.
        generator = torch.Generator().manual_seed(1)
        while not stopping.is_set():
            length = 17 + (length * 7) % 200
            x = torch.randn(1, 1, length, 4, generator=generator)
            attend(x, x, x, pattern=Causal() & Window(length % 13, 0))
            plan(Causal() & Window(2, 0), length).pairs  # noqa: B018

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    stopping.set()
    thread.join()


def cpu_seconds(pid: int) -> float | None:
    """Processor time that a process has used, or `None` where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def exit_code_of_forked(run: Callable[[], None], seconds: float = 40.0) -> int | None:
    """The exit code of a child process that runs a function, or `None` if it hangs.

    A child hangs if it uses no processor time for so many seconds, or more of it than that: on a busy machine one that
    works may take much longer.
    """
    child = os.fork()
    if child == 0:
        try:
            run()
            os._exit(0)
        except BaseException:
            os._exit(1)
    used, idle_since = 0.0, time.monotonic()
    while time.monotonic() - idle_since < seconds and used < seconds:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        now = cpu_seconds(child)
        if now is not None and now > used:
            used, idle_since = now, time.monotonic()
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def attend_and_plan() -> None:
    x = torch.randn(1, 2, 33, 4)
    output = attend(x, x, x, pattern=Causal())
    torch.set_num_threads(1)  # torch's own threads are gone as well, and its products would wait for them
    torch.testing.assert_close(output, attend(x, x, x, pattern=Causal(), backend="reference"))
    assert plan(Causal() & Window(4, 0), 300).pairs == 1490


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
# Python 3.12 warns of every fork beside a thread, which is what is tested here; torch of more workers than cores.
tolerates_warnings = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:This DataLoader will create")


@needs_fork
@tolerates_warnings
def test_a_child_forked_while_another_thread_attends_can_attend(busy_thread):
    assert [exit_code_of_forked(attend_and_plan) for _ in range(8)] == [0] * 8


@needs_fork
@tolerates_warnings
def test_a_child_forked_while_the_lock_is_held_can_attend():
    """The forking thread waits for the lock, so the child never inherits it locked."""
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with caching._CACHE.lock:
            held.set()
            release.wait(0.3)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    held.wait()
    assert exit_code_of_forked(attend_and_plan) == 0
    release.set()
    thread.join()


@needs_fork
@tolerates_warnings
def test_a_child_forked_inside_a_lazy_property_can_use_it():
    inside, release = threading.Event(), threading.Event()

    class Slow:
        waits = True

        @lazy_property
        def value(self) -> int:
            if self.waits:
                inside.set()
                release.wait(60)
            return 5

    thread = threading.Thread(target=lambda: Slow().value, daemon=True)
    thread.start()
    inside.wait()
    quick = Slow()
    quick.waits = False
    assert exit_code_of_forked(lambda: None if quick.value == 5 else os._exit(2), seconds=20) == 0
    release.set()
    thread.join()


@needs_fork
@tolerates_warnings
def test_a_child_of_a_parent_whose_kernels_used_all_threads_can_use_them_too():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        x = torch.randn(4, 8, 257, 32)
        expected = attend(x, x, x, pattern=Causal())

        def again() -> None:
            output = attend(x, x, x, pattern=Causal())
            torch.set_num_threads(1)  # as in attend_and_plan
            assert torch.equal(output, expected)

        assert exit_code_of_forked(again) == 0
    finally:
        torch.set_num_threads(threads)


@needs_fork
@tolerates_warnings
def test_workers_of_a_data_loader_attend_beside_a_busy_thread(busy_thread):
    context = multiprocessing.get_context("fork")
    x = torch.randn(4, 8, 257, 32)
    attend(x, x, x, pattern=Causal())
    loader = DataLoader(Attentions(), batch_size=3, num_workers=2, multiprocessing_context=context, timeout=60)
    loaded = torch.cat(list(loader))
    torch.testing.assert_close(loaded, torch.arange(12.0))


def test_a_lazy_property_is_computed_once_for_each_object():
    calls = []

    class Thing:
        @lazy_property
        def value(self) -> int:
            """The number of calls so far."""
            calls.append(self)
            return len(calls)

    one, other = Thing(), Thing()
    assert (one.value, one.value, other.value) == (1, 1, 2)
    assert Thing.value.__doc__ == "The number of calls so far."
