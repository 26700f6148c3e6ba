"""torchrun: the command line on several processes, processes that die or never come, and who gets which token."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist

from regard.distributed.launch import make_group, wait_for_first
from regard.errors import CheckpointError, ConfigError
from regard.models import GPT
from regard.train import GPTRecipe, Parallelism, checkpoint_store, train
from regard.train.parallel import Workers
from tests.distributed.processes import TIMEOUT, Processes
from tests.distributed.test_training import TEXT, make_recipe, run_alone

ROOT = Path(__file__).resolve().parents[2]


def launch(*words: str, processes: int = 2, restarts: int = 0, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}",
               f"--max-restarts={restarts}", *words]  # fmt: skip
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=400, check=False)


SMALL = ("--steps", "4", "--batch-size", "4", "--dim", "16", "--layers", "1", "--heads", "2", "--context-length", "16",
         "--eval-every", "2", "--eval-batches", "2", "--sample-tokens", "4", "--no-laws")  # fmt: skip


def write_text(folder: Path) -> str:
    path = folder / "text.txt"
    path.write_text("the cat sat on the mat. a dog lay on the rug.\n" * 60)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--strategy", "fsdp"), ("--context-parallel", "2", "--recompute")])
def test_the_command_runs_on_two_processes_and_is_resumed_on_one(tmp_path: Path, options: tuple[str, ...]) -> None:
    text, folder = write_text(tmp_path), tmp_path / "run"
    made = launch("-m", "regard", "train", "gpt", text, "--folder", str(folder), *SMALL, *options, "--minutes", "0.001")
    assert made.returncode == 0, made.stderr
    assert made.stderr.count("saved in") == 1  # one process speaks
    words = [sys.executable, "-m", "regard", "train", "gpt", text, "--folder", str(folder), *SMALL, "--resume"]
    again = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    assert "step 4" in again.stderr
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines][-1] == 4
    assert isinstance(GPT.from_pretrained(folder / "model"), GPT)
    assert (folder / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "strategy"), [("1", "fsdp"), ("0", "ddp")])
def test_a_killed_process_is_restarted_and_nothing_is_lost(tmp_path: Path, victim: str, strategy: str) -> None:
    script = str(Path(__file__).with_name("killed_run.py"))
    made = launch(script, str(tmp_path / "run"), victim, strategy, restarts=1)
    assert made.returncode == 0, made.stderr
    assert "Signal 9" in made.stderr or "SIGKILL" in made.stderr or "exitcode: -9" in made.stderr.replace(" ", " ")
    expected = run_alone({"steps": 12})
    found = dict(GPT.from_pretrained(tmp_path / "run" / "model").named_parameters())
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found[name].detach(), weight, atol=1e-9, rtol=1e-9)


# Two machines


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces that see each other by one cable, each with a network interface of its own."""
    names = f"regard-a-{os.getpid()}", f"regard-b-{os.getpid()}"
    cable = f"rga{os.getpid() % 100000}", f"rgb{os.getpid() % 100000}"

    def run(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    made: list[str] = []
    try:
        for name in names:
            run("netns", "add", name)
            made.append(name)
        run("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for number, (name, end) in enumerate(zip(names, cable, strict=True), 1):
            run("link", "set", end, "netns", name)
            run("-n", name, "link", "set", end, "name", "wire")
            run("-n", name, "addr", "add", f"10.99.0.{number}/24", "dev", "wire")
            run("-n", name, "link", "set", "wire", "up")
            run("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as reason:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False)
        pytest.skip(f"no network namespaces here: {reason}")
    try:
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


@pytest.mark.slow
def test_two_machines_train_one_model(tmp_path: Path) -> None:
    """Without a common loopback: what they do not send over the cable does not arrive."""
    script = str(Path(__file__).with_name("killed_run.py"))
    with two_hosts() as hosts:
        variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "wire"}
        running = []
        for number, host in enumerate(hosts):
            words = ["ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
                     f"--node-rank={number}", "--nproc-per-node=1", "--master-addr=10.99.0.1", "--master-port=29500",
                     script, str(tmp_path / "run"), "-1", "fsdp"]  # fmt: skip
            running.append(subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        outputs = [each.communicate(timeout=300)[0].decode() for each in running]
    assert [each.returncode for each in running] == [0, 0], outputs
    expected = run_alone({"steps": 12})
    found = dict(GPT.from_pretrained(tmp_path / "run" / "model").named_parameters())
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found[name].detach(), weight, atol=1e-9, rtol=1e-9)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables, timeout=120,
                          check=False)  # fmt: skip


JOIN = "from regard.distributed.launch import join_processes; join_processes()"


def test_a_process_that_never_comes_is_missed_within_the_limit() -> None:
    made = run_python(JOIN, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29411",
                      REGARD_TIMEOUT_MINUTES="0.05")  # fmt: skip
    assert "Process 0 of 2 found no others" in made.stderr
    assert "REGARD_TIMEOUT_MINUTES" in made.stderr


def test_half_an_environment_is_refused() -> None:
    made = run_python(JOIN, WORLD_SIZE="2", RANK="0")
    assert "no MASTER_ADDR and no MASTER_PORT" in made.stderr
    assert "torchrun" in made.stderr


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("WORLD_SIZE", "two", "not a number of processes"),
        ("RANK", "2", "not the number of one of 2 processes"),
        ("REGARD_TIMEOUT_MINUTES", "soon", "not minutes"),
        ("REGARD_TIMEOUT_MINUTES", "-1", "not minutes"),
        ("REGARD_TIMEOUT_MINUTES", "nan", "not minutes"),
    ],
)
def test_an_environment_of_wrong_numbers_is_refused(name: str, text: str, words: str) -> None:
    common = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29412"}
    made = run_python(JOIN, **(common | {name: text}))
    assert f"ConfigError: {name} is {words}" in made.stderr
    assert f"{name}={text}" in made.stderr


# Who gets which token


class SomeWorkers(Workers):
    """One of several processes, without the others."""

    def __init__(self, rank: int, size: int) -> None:
        self.parallelism, self.rank, self.size = Parallelism(), rank, size
        self.data_rank, self.data_size = rank, size


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_every_token_is_read_once_in_an_epoch(processes: int) -> None:
    """Every token of this corpus is another one, so that each can be followed."""
    letters = "".join(chr(0x4E00 + number) for number in range(3000))
    documents = [letters[start : start + 25] for start in range(0, 3000, 25)]
    recipe = GPTRecipe(packing="documents", batch_size=8, context_length=64, dim=8, layers=1, heads=1)
    task = recipe.make_task(documents)
    task.micro_batches = processes
    seen: list[int] = []
    for step in range(task.steps_per_epoch):
        for rank in range(processes):
            for batch, counted in SomeWorkers(rank, processes).take_share(task.make_batches(step)):
                assert counted
                seen += batch.tokens[torch.from_numpy(batch.pattern.ids.copy()) >= 0].tolist()
    stored = numpy.asarray(task.train_store.tokens).tolist()
    assert sorted(seen) == sorted(stored)
    assert len(set(seen)) >= 2000


@pytest.mark.parametrize("processes", [2, 4])
def test_random_windows_are_those_of_one_process(processes: int) -> None:
    task = GPTRecipe(batch_size=8, context_length=16, dim=8, layers=1, heads=1).make_task(["abc def " * 300] * 2)
    for step in (0, 7):
        task.micro_batches = 1
        (whole,) = task.make_batches(step)
        task.micro_batches = processes
        shares = [SomeWorkers(rank, processes).take_share(task.make_batches(step)) for rank in range(processes)]
        torch.testing.assert_close(torch.cat([share[0][0].tokens for share in shares]), whole.tokens)


def test_rows_that_do_not_suffice_for_all_count_once() -> None:
    shares = [SomeWorkers(rank, 4).take_share(["a", "b", "c", "d", "e"]) for rank in range(4)]
    assert shares == [
        [("a", True), ("e", True)],
        [("b", True), ("e", False)],
        [("c", True), ("e", False)],
        [("d", True), ("e", False)],
    ]


def train_small_batch(rank: int, size: int, folder: str) -> str:
    with pytest.raises(ConfigError) as failure:
        train(make_recipe(batch_size=1), folder, data=TEXT, progress=False)
    return str(failure.value)


def test_a_batch_that_is_too_small_is_refused_before_there_is_a_folder(two: Processes, tmp_path: Path) -> None:
    for text in two.run(train_small_batch, folder=str(tmp_path / "run")):
        assert "shared by 2 processes" in text
        assert "enough for 1" in text
    assert not (tmp_path / "run").exists()


# Processes that do not fit together, or are lost


def spread_wrongly(rank: int, size: int, options: dict) -> str:
    with pytest.raises(ConfigError) as failure:
        Workers(Parallelism(**options))
    return str(failure.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": 3}, "--context-parallel 3"),
        ({"tensor": 4}, "torchrun --nproc-per-node 4 ..., or tensor=1 or 2"),
        ({"tensor": 2, "strategy": "fsdp"}, 'strategy="ddp" with tensor=2'),
        ({"tensor": 2, "context": 2}, "context=2 with tensor=1"),
        ({"strategy": "zero"}, "one of ddp, fsdp"),
        ({"context": 0}, "one process at least"),
    ],
)
def test_a_wrong_world_size_is_refused(two: Processes, options: dict, words: str) -> None:
    assert all(words in text for text in two.run(spread_wrongly, options=options))


def start_differently(rank: int, size: int, what: str) -> str:
    recipe = make_recipe(**({"dim": 32} if what == "recipe" and rank else {}))
    parallelism = Parallelism("fsdp" if what == "parallelism" and rank else "ddp")
    data = [f"{TEXT[0]} {rank}"] * 3 if what == "data" else TEXT
    with pytest.raises(ConfigError) as failure:
        train(
            recipe,
            data=data,
            progress=False,
            parallelism=parallelism,
            minutes=9 if what == "minutes" and rank else None,
        )
    return str(failure.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [("recipe", "dim=32"), ("parallelism", "strategy='fsdp'"), ("data", "data='"), ("minutes", "minutes=9")],
)
def test_processes_that_were_started_differently_are_refused(two: Processes, what: str, words: str) -> None:
    """As with another command on a second machine: without a word, both would wait for the other."""
    first, second = two.run(start_differently, what=what)
    assert all("not started alike" in text for text in (first, second))
    assert "on another process" in first
    assert words in second


def test_one_process_cannot_share_a_sequence() -> None:
    with pytest.raises(ConfigError, match=r"there is 1.\n(.|\n)*world size of 1"):
        Workers(Parallelism(context=2))


def train_in_folders_of_their_own(rank: int, size: int, folder: str) -> str:
    checkpoint_store.VISIBLE = 0.1
    with pytest.raises(CheckpointError) as failure:
        train(make_recipe(), f"{folder}/{rank}", data=TEXT, progress=False)
    return str(failure.value)


def test_a_folder_that_not_all_see_is_refused(two: Processes, tmp_path: Path) -> None:
    """As on two machines without a common file system."""
    texts = two.run(train_in_folders_of_their_own, folder=str(tmp_path))
    assert "a recipe.json for process 0" in texts[0]
    assert "no recipe.json for process 1" in texts[1]
    assert all("file system that all machines share" in text for text in texts)


def take_turns(rank: int, size: int, path: str) -> None:
    os.environ["LOCAL_RANK"] = str(rank % 2)
    try:
        with wait_for_first(), open(path, "a", encoding="utf-8") as file:
            time.sleep(0.1)
            file.write(str(rank))
    finally:
        del os.environ["LOCAL_RANK"]


def test_the_first_process_of_each_machine_prepares_the_data_of_the_others(four: Processes, tmp_path: Path) -> None:
    """Two machines of two processes."""
    four.run(take_turns, path=str(tmp_path / "order"))
    assert (tmp_path / "order").read_text() in ("0213", "0231")


def find_limits(rank: int, size: int) -> list[float]:
    groups = make_group(), make_group([0, 1]), make_group(backend="gloo"), dist.group.WORLD
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_all_groups_have_the_time_limit_of_the_first(two: Processes) -> None:
    assert two.run(find_limits) == [[TIMEOUT] * 4] * 2


LOSE = """
import os, sys, time
import torch, torch.distributed as dist
from regard.distributed.launch import explain_lost_processes, join_processes
rank, _ = join_processes()
if rank == 1:
    {fate}
with explain_lost_processes():
    dist.all_reduce(torch.ones(3))
"""


@pytest.mark.parametrize("fate", ["os._exit(3)", "time.sleep(600)"])
def test_a_process_that_dies_or_hangs_is_missed_within_the_limit(fate: str) -> None:
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": find_port(), "OMP_NUM_THREADS": "1",
              "REGARD_TIMEOUT_MINUTES": "0.1"}  # fmt: skip
    words = [sys.executable, "-c", LOSE.format(fate=fate)]
    lost = subprocess.Popen(words, env=os.environ | common | {"RANK": "1"}, stderr=subprocess.DEVNULL)
    try:
        made = run_python(words[-1], **common, RANK="0")
        assert (lost.poll() is None) == ("sleep" in fate)  # this one has ended, and the other one hangs on
    finally:
        lost.kill()
        lost.wait()
    assert "ProcessError: Process 0 of 2 has lost another one." in made.stderr
    assert "an answer within 0.1 minutes" in made.stderr
    assert "--max-restarts" in made.stderr


def find_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
