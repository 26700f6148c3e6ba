"""Runs on several processes: the losses of one, checkpoints that any number of processes can resume from."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.errors import CheckpointError
from regard.models import GPT
from regard.train import GPTRecipe, read_run, train
from regard.train.averaging import average_checkpoints
from regard.train.parallel import Parallelism
from tests.distributed.processes import Processes

TEXT = ["the cat sat on the mat. a dog lay on the rug, and an owl flew over the wood.\n" * 12] * 3


def make_recipe(**changes: Any) -> GPTRecipe:
    fields: dict[str, Any] = {
        "steps": 6, "batch_size": 8, "context_length": 16, "dim": 16, "layers": 2, "heads": 2, "eval_every": 3,
        "eval_batches": 2, "sample_tokens": 8, "log_every": 1, "precision": "float64", "warmup_steps": 1,
    }  # fmt: skip
    return GPTRecipe(**(fields | changes))


def run_training(rank: int, size: int, folder: str | None, options: dict, changes: dict, **words: Any) -> dict:
    run = train(make_recipe(**changes), folder, data=TEXT, progress=False, parallelism=Parallelism(**options), **words)
    weights = {} if rank else {name: each.detach().clone() for name, each in run.model.named_parameters()}
    shapes = [tuple(getattr(each, "to_local", lambda each=each: each)().shape) for each in run.model.parameters()]
    return {"losses": [each.loss for each in run.evaluations], "metrics": [each.metrics for each in run.evaluations],
            "weights": weights, "done": run.done, "local": shapes}  # fmt: skip


def run_alone(changes: dict, folder: str | None = None) -> dict:
    return run_training(0, 1, folder, {}, changes)


def assert_same(made: list[dict], expected: dict, tolerance: float = 1e-9) -> None:
    for each in made:
        assert each["losses"][1:] == pytest.approx(expected["losses"][1:], rel=tolerance)
        for mine, other in zip(each["metrics"], expected["metrics"], strict=True):
            assert mine == pytest.approx(other, rel=tolerance)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(made[0]["weights"][name], weight, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "changes", [{"accumulation": 2, "ema_decay": 0.9}, pytest.param({"packing": "documents"}, marks=pytest.mark.slow)]
)
def test_losses_and_weights_are_those_of_one_process(two: Processes, strategy: str, changes: dict) -> None:
    made = two.run(run_training, folder=None, options={"strategy": strategy}, changes=changes)
    assert_same(made, run_alone(changes))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"strategy": "ddp"}, {"strategy": "fsdp", "recompute": True}])
def test_four_processes(four: Processes, options: dict) -> None:
    made = four.run(run_training, folder=None, options=options, changes={})
    assert_same(made, run_alone({}))


def test_sharded_parameters_are_a_part_of_the_model(four: Processes) -> None:
    made = four.run(run_training, folder=None, options={"strategy": "fsdp"}, changes={"steps": 1})
    whole = sum(weight.numel() for weight in made[0]["weights"].values())
    parts = [sum(torch.Size(shape).numel() for shape in each["local"]) for each in made[1:]]  # the first has it all
    assert sum(parts) < whole
    assert max(parts) <= 1.1 * whole / 4


@pytest.mark.parametrize("packing", [pytest.param("windows", marks=pytest.mark.slow), "documents"])
@pytest.mark.parametrize("context", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_sequences_that_are_cut(four: Processes, context: int, packing: str) -> None:
    changes = {"packing": packing}
    made = four.run(run_training, folder=None, options={"context": context}, changes=changes)
    assert_same(made, run_alone(changes))


@pytest.mark.slow
def test_sequences_that_are_cut_and_a_model_that_is_sharded(four: Processes) -> None:
    made = four.run(run_training, folder=None, options={"strategy": "fsdp", "context": 2}, changes={})
    assert_same(made, run_alone({}))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"context": 2}, {"strategy": "fsdp"}, {"tensor": 2}])
def test_dropout_and_mixed_precision_train(two: Processes, options: dict) -> None:
    """Masks differ from those of one process; the losses are of the same size, and equal on all processes."""
    changes = {"dropout": 0.1, "precision": "bfloat16", "position": "rotary", "steps": 30, "learning_rate": 1e-2}
    made = two.run(run_training, folder=None, options=options, changes=changes)
    assert made[0]["losses"][1:] == made[1]["losses"][1:]
    assert made[0]["losses"][-1] < 0.85 * made[0]["losses"][1]
    assert made[0]["losses"][-1] == pytest.approx(run_alone(changes)["losses"][-1], rel=0.15)


@pytest.mark.parametrize(
    "changes",
    [
        {"ema_decay": 0.9, "max_grad_norm": 0.05},
        {"position": "alibi", "ema_decay": 0.9, "max_grad_norm": 0.05},
        pytest.param(
            {"feed_forward": "swiglu", "position": "rotary", "norm": "rms", "kv_heads": 2, "heads": 4, "bias": True},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_blocks_that_are_split(two: Processes, changes: dict) -> None:
    made = two.run(run_training, folder=None, options={"tensor": 2}, changes=changes)
    assert_same(made, run_alone(changes))


@pytest.mark.slow
def test_split_blocks_beside_whole_copies(four: Processes) -> None:
    made = four.run(run_training, folder=None, options={"tensor": 2}, changes={"accumulation": 2})
    assert_same(made, run_alone({"accumulation": 2}))
    assert made[1]["local"] != made[0]["local"]


@pytest.mark.slow
def test_checkpoints_are_resumed_on_other_numbers(two: Processes, four: Processes, tmp_path: Path) -> None:
    """2 -> 4 -> 1 processes, sharded, split and not; the result is that of one uninterrupted process."""
    changes = {"steps": 9, "ema_decay": 0.8, "position": "alibi"}
    expected = run_alone(changes)
    fsdp, ddp, split = {"strategy": "fsdp"}, {"strategy": "ddp"}, {"tensor": 2}
    for number, (first, second) in enumerate(((fsdp, ddp), (ddp, fsdp), (split, split), (fsdp, split))):
        folder = str(tmp_path / str(number))
        step = {"folder": folder, "changes": changes, "minutes": 0}
        assert not two.run(run_training, options=first, **step)[0]["done"]
        assert not four.run(run_training, options=second, **step)[0]["done"]
        final = run_alone(changes, folder)
        assert final["done"]
        assert final["metrics"][-1] == pytest.approx(expected["metrics"][-1], rel=1e-9)
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(final["weights"][name], weight, atol=1e-9, rtol=1e-9)
        assert isinstance(GPT.from_pretrained(Path(folder) / "model"), GPT)


def test_a_sharded_run_is_read_by_one_process(two: Processes, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    made = two.run(run_training, folder=folder, options={"strategy": "fsdp"}, changes={})
    run = read_run(folder, data=TEXT)
    for name, parameter in run.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), made[0]["weights"][name], atol=0, rtol=0)
    torch.testing.assert_close(
        dict(GPT.from_pretrained(tmp_path / "run" / "model").named_parameters()),
        {name: torch.nn.Parameter(weight) for name, weight in made[0]["weights"].items()},
    )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_checkpoint_of_several_processes_is_read_by_from_pretrained(
    two: Processes, tmp_path: Path, strategy: str
) -> None:
    changes = {"steps": 3, "ema_decay": 0.5, "eval_every": 1, "keep_checkpoints": 2, "position": "alibi"}
    made = two.run(run_training, folder=str(tmp_path), options={"strategy": strategy}, changes=changes)
    first, last = sorted((tmp_path / "checkpoints").iterdir())
    model = GPT.from_pretrained(last)
    for name, weight in made[0]["weights"].items():  # the averaged ones
        torch.testing.assert_close(dict(model.named_parameters())[name].detach(), weight, atol=0, rtol=0)
    assert model.companions == GPT.from_pretrained(tmp_path / "model").companions != {}
    other, mean = GPT.from_pretrained(first).state_dict(), average_checkpoints(tmp_path, GPT).state_dict()
    torch.testing.assert_close(mean, {name: (other[name] + each) / 2 for name, each in model.state_dict().items()})
    for shard in sorted(last.glob("shard-*"))[:1]:
        shard.unlink()
    with pytest.raises(CheckpointError, match=r"not whole|does not fit|missing"):
        GPT.from_pretrained(last)


@pytest.mark.parametrize("damage", ["missing", "cut", "position"])
def test_a_damaged_checkpoint_is_refused_and_kept(two: Processes, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "run"
    step = {"folder": str(folder), "changes": {"steps": 4}, "minutes": 0}
    two.run(run_training, options={"strategy": "fsdp"}, **step)
    (place,) = (folder / "checkpoints").iterdir()
    shard = sorted(place.glob("shard-*"))[-1]
    if damage == "missing":
        shard.unlink()
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-100])
    else:
        (place / "training.json").write_text('{"step": "two"}')
    files = sorted(place.iterdir())
    with pytest.raises(CheckpointError) as failure:
        run_alone({"steps": 4}, str(folder))
    assert "instead" in str(failure.value)
    for text in two.run(refuse_damaged, folder=str(folder)):
        assert f"remove {place}" in text
    assert sorted(place.iterdir()) == files


def refuse_damaged(rank: int, size: int, folder: str) -> str:
    with pytest.raises(CheckpointError) as failure:
        train(make_recipe(steps=4), folder, data=TEXT, progress=False, parallelism=Parallelism("fsdp"))
    return str(failure.value)


def fill_disk(rank: int, size: int, folder: str) -> str:
    """After its first checkpoint process 1 may write no file of more than a few bytes, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(evaluation: Any) -> None:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))

    options: dict[str, Any] = {"parallelism": Parallelism("fsdp"), "on_evaluation": limit}
    try:
        with pytest.raises(CheckpointError) as failure:
            train(make_recipe(steps=4), folder, data=TEXT, progress=False, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return str(failure.value)


def test_a_disk_that_is_full_for_one_process_stops_all_of_them(two: Processes, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for text in two.run(fill_disk, folder=str(folder)):
        assert "cannot be saved" in text
        assert "File too large" in text
        assert "the last checkpoint" in text
    assert {each.name for each in (folder / "checkpoints").iterdir()} <= {"step-00000000"}  # and nothing half written
    made = two.run(run_training, folder=str(folder), options={"strategy": "fsdp"}, changes={"steps": 4})
    assert_same(made, run_alone({"steps": 4}))
