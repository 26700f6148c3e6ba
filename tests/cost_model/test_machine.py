"""The machine: measured once, kept in a file that may be lost, damaged or forbidden. No test says how fast it is."""

import dataclasses
import json

import pytest
import torch

from regard.cost_model import machine as module
from regard.cost_model.machine import Machine, cache_file, this_machine
from regard.errors import CostError

MADE = Machine("made up", threads=3, peak=70e9, bandwidth=7e9, peak_double=30e9, steady=0.9)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """A cache folder of this test's own, and no memory of others."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_known", {})
    return tmp_path / "cache"


@pytest.fixture
def calls(monkeypatch):
    """Measurements that take no time, and how many there were."""
    made = []

    def measured():
        made.append(dataclasses.replace(MADE, peak=70e9 + len(made)))
        return made[-1]

    monkeypatch.setattr(module, "measured", measured)
    return made


def forget(monkeypatch):
    """As in another process."""
    monkeypatch.setattr(module, "_known", {})


def test_a_measurement_is_plausible(monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0.0)
    before = torch.random.get_rng_state()
    found = module.measured()
    assert found.threads == torch.get_num_threads()
    assert found.name
    # A pocket calculator and a supercomputer lie outside.
    assert 1e8 < found.peak_double < 1e15
    assert 1e8 < found.peak < 1e15
    assert 1e8 < found.bandwidth < 1e14
    assert 0 < found.copy_bandwidth <= found.bandwidth
    assert 0 < found.row_bandwidth <= found.bandwidth
    assert 0 < found.steady <= 1
    assert found.cache == 0 or found.cache_bandwidth >= found.bandwidth
    assert torch.equal(before, torch.random.get_rng_state())  # other people's random numbers stay as they are


def test_it_is_measured_once(calls, monkeypatch):
    first = this_machine()
    assert this_machine() == first
    forget(monkeypatch)
    assert this_machine() == first  # from the file
    assert len(calls) == 1


def test_refreshing_measures_again_and_keeps_that(calls, monkeypatch):
    first, second = this_machine(), this_machine(refresh=True)
    assert first != second
    forget(monkeypatch)
    assert this_machine() == second
    assert len(calls) == 2


def test_the_measurement_of_a_busy_machine_is_not_stored(monkeypatch):
    monkeypatch.setattr(module, "measured", lambda: dataclasses.replace(MADE, steady=0.4))
    assert this_machine() is this_machine()
    assert not cache_file().exists()


@pytest.mark.parametrize("changed", ["processor", "threads", "torch"])
def test_another_processor_thread_count_or_torch_is_another_machine(calls, monkeypatch, changed):
    first = this_machine()
    with monkeypatch.context() as other:
        if changed == "processor":
            other.setattr(module, "processor", lambda: "another one")
        elif changed == "threads":
            other.setattr(torch, "get_num_threads", lambda: 17)
        else:
            other.setattr(torch, "__version__", "0.1.2")
        assert this_machine() != first
    forget(monkeypatch)
    assert this_machine() == first  # the first entry is still there
    assert len(calls) == 2


DAMAGED = {
    "empty": "",
    "half": '{"format": 1, "mach',
    "no object": "[1, 2]",
    "null": "null",
    "no machines": '{"format": 1}',
    "other format": '{"format": 99, "machines": {}}',
    "bytes": b"\xff\xfe\x00",
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_measured_again_and_mended(calls, monkeypatch, kind):
    file, content = cache_file(), DAMAGED[kind]
    file.parent.mkdir(parents=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    found = this_machine()
    forget(monkeypatch)
    assert this_machine() == found
    assert len(calls) == 1


@pytest.mark.parametrize(
    "changes",
    [{"peak": 0}, {"peak": -1e9}, {"peak": "fast"}, {"bandwidth": None}, {"peak": True}, {"more": 1}, {"name": 7}],
    ids=str,
)
def test_numbers_that_cannot_be_are_measured_again(calls, monkeypatch, changes):
    this_machine()
    held = json.loads(cache_file().read_text())
    for entry in held["machines"].values():
        entry.update(changes)
    cache_file().write_text(json.dumps(held))
    forget(monkeypatch)
    assert this_machine() == calls[1]


def test_not_a_number_is_measured_again(calls, monkeypatch):
    this_machine()
    cache_file().write_text(cache_file().read_text().replace("7000000000.0", "NaN"))
    forget(monkeypatch)
    this_machine()
    assert len(calls) == 2


def test_a_folder_that_cannot_be_written_is_no_error(calls, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert this_machine() == this_machine()
    assert len(calls) == 1  # this process remembers
    forget(monkeypatch)
    this_machine()
    assert len(calls) == 2


def test_the_file_lies_where_caches_lie(monkeypatch, tmp_path):
    assert cache_file() == tmp_path / "cache" / "regard" / "machine.json"
    monkeypatch.setenv("HOME", str(tmp_path))
    for nothing in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", nothing)
        assert cache_file() == tmp_path / ".cache" / "regard" / "machine.json"


def test_nothing_but_the_file_is_left_in_the_folder(calls):
    this_machine()
    this_machine(refresh=True)
    assert [file.name for file in cache_file().parent.iterdir()] == ["machine.json"]


# A machine somebody describes


def test_defaults_follow_from_what_is_given():
    described = Machine("a GPU", 1, peak=20e12, bandwidth=2e12)
    assert (described.peak_double, described.copy_bandwidth, described.row_bandwidth) == (10e12, 2e12, 2e12)
    assert described.balance == 10
    assert described.peak_of(torch.float64) == 10e12
    assert described.peak_of(torch.bfloat16) == described.peak_of(torch.float32) == 20e12


def test_what_fits_the_cache_comes_from_the_cache():
    described = Machine("small", 1, peak=8e9, bandwidth=1e9, cache=1000, cache_bandwidth=4e9)
    assert described.bandwidth_for(1000) == 4e9
    assert described.bandwidth_for(1001) == 1e9
    assert Machine("unknown", 1, peak=8e9, bandwidth=1e9).bandwidth_for(1) == 1e9


@pytest.mark.parametrize("wrong", [{"peak": 0}, {"bandwidth": -1.0}, {"threads": 0}, {"cache": float("nan")}], ids=str)
def test_a_machine_that_cannot_be_is_refused(wrong):
    with pytest.raises(CostError, match=f"no such {next(iter(wrong))}"):
        Machine(**{"name": "wrong", "threads": 1, "peak": 1e9, "bandwidth": 1e9, **wrong})


def test_it_says_what_it_is():
    assert str(MADE) == "made up, 3 threads, 70 GFLOP/s (float64 30), 7.0 GB/s from memory, balance 10.0 FLOP/B"
    assert "busy while it was measured" in str(dataclasses.replace(MADE, steady=0.4))
