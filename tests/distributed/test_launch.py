"""torchrun: the command line on several processes, processes that die or never come, and who gets which token."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch

from regard.models import GPT
from regard.train import GPTRecipe, Parallelism
from regard.train.parallel import Workers
from tests.distributed.test_training import run_alone

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
    begin = time.monotonic()
    made = run_python(JOIN, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29411",
                      REGARD_TIMEOUT_MINUTES="0.05")  # fmt: skip
    assert time.monotonic() - begin < 60
    assert "Process 0 of 2 found no others" in made.stderr
    assert "REGARD_TIMEOUT_MINUTES" in made.stderr


def test_half_an_environment_is_refused() -> None:
    made = run_python(JOIN, WORLD_SIZE="2", RANK="0")
    assert "no MASTER_ADDR and no MASTER_PORT" in made.stderr
    assert "torchrun" in made.stderr


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
            for batch in SomeWorkers(rank, processes).take_share(task.make_batches(step), str):
                seen += batch.tokens[torch.from_numpy(batch.pattern.ids.copy()) >= 0].tolist()
    stored = torch.as_tensor(numpy.asarray(task.train_store.tokens)).tolist()
    assert sorted(seen) == sorted(stored)
    assert len(set(seen)) >= 2000


@pytest.mark.parametrize("processes", [2, 4])
def test_random_windows_are_those_of_one_process(processes: int) -> None:
    task = GPTRecipe(batch_size=8, context_length=16, dim=8, layers=1, heads=1).make_task(["abc def " * 300] * 2)
    for step in (0, 7):
        task.micro_batches = 1
        (whole,) = task.make_batches(step)
        task.micro_batches = processes
        shares = [SomeWorkers(rank, processes).take_share(task.make_batches(step), str) for rank in range(processes)]
        torch.testing.assert_close(torch.cat([share[0].tokens for share in shares]), whole.tokens)


def test_a_batch_that_is_too_small_is_refused() -> None:
    task = GPTRecipe(batch_size=3, context_length=16, dim=8, layers=1, heads=1).make_task(["abc def " * 300] * 2)
    task.micro_batches = 4
    with pytest.raises(Exception, match="shared by 4 processes"):
        SomeWorkers(0, 4).take_share(task.make_batches(0), str)
