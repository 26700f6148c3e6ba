"""Training runs: the same numbers from the same seed, interrupted or not."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from agreement import refused
from plain import slow, slow_but

from regard.errors import CheckpointError, InputError
from regard.models.spatial import POSITIONS, SpatialTransformer
from regard.train import Interrupted, SpatialRecipe, ViTRecipe, accuracy, read_run, train
from regard.train import loop as loops
from regard.train.data import Images

SMALL = SpatialRecipe(
    epochs=3, batch_size=24, layers=2, heads=3, dim=8, hidden_dim=8, dropout=0.2, attention_dropout=0.1
)
RECIPES = {
    **{position: dataclasses.replace(SMALL, position=position) for position in POSITIONS},
    "sgd": dataclasses.replace(
        SMALL, optimizer="sgd", learning_rate=0.05, max_grad_norm=None, shift=1, turn=0, stretch=0, flip=True
    ),
    "vit": ViTRecipe(epochs=3, batch_size=24, layers=1, dim=8, heads=2, dropout=0.2),
}


def told(run):
    """Everything a run has to say, without its clock."""
    epochs = [
        (
            repr(epoch.loss),
            epoch.accuracy,
            epoch.learning_rate,
            {name: profile.scores for name, profile in epoch.head_profiles.items()},
        )
        for epoch in run.evaluations
    ]
    return epochs, run.model.state_dict()


def assert_same(one, other):
    (epochs, state), (again, other_state) = told(one), told(other)
    assert [epoch[:3] for epoch in epochs] == [epoch[:3] for epoch in again]
    for mine, theirs in zip(epochs, again, strict=True):
        assert mine[3].keys() == theirs[3].keys()
        assert all(torch.equal(scores, theirs[3][name]) for name, scores in mine[3].items())
    assert state.keys() == other_state.keys()
    assert all(torch.equal(value, other_state[name]) for name, value in state.items())


@pytest.mark.parametrize("name", ["sgd", "vit", *slow("learned", "content")])
def test_the_same_seed_gives_the_same_run_and_another_seed_another(name, few, tmp_path):
    recipe = RECIPES[name]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = train(recipe, data=few)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert_same(one, train(recipe, tmp_path / "run", data=few))
    other = train(dataclasses.replace(recipe, seed=1), data=few)
    assert [epoch.loss for epoch in other.evaluations[1:]] != [epoch.loss for epoch in one.evaluations[1:]]
    assert one.done
    assert not one.model.training
    assert [epoch.number for epoch in one.evaluations] == [0, 1, 2, 3]
    layers = [] if name == "vit" else ["blocks.0.attention", "blocks.1.attention"]
    assert all(list(epoch.head_profiles) == layers for epoch in one.evaluations)


@pytest.mark.parametrize("name", slow_but(("quadratic", "vit"), RECIPES))
def test_a_run_that_was_stopped_within_an_epoch_goes_on_to_the_same_numbers(name, few, tmp_path, monkeypatch):
    whole, folder, taken = train(RECIPES[name], data=few), tmp_path / "run", []
    step = loops.Training._run_step

    def stop_at(number):
        def counted(self, *arguments):
            loss = step(self, *arguments)
            taken.append(arguments[-1])
            if len(taken) == number:
                os.kill(os.getpid(), signal.SIGINT)  # waits for the end of the step
            return loss

        return counted

    for number in (2, 5, 9):  # within the first and second epochs, and within the third
        monkeypatch.setattr(loops.Training, "_run_step", stop_at(number))
        with pytest.raises(Interrupted, match=f"saved in {folder}"):
            train(RECIPES[name], folder, data=few)
    monkeypatch.setattr(loops.Training, "_run_step", stop_at(10**9))
    assert_same(whole, train(RECIPES[name], folder, data=few))
    assert taken == list(range(12))  # four batches of 24 in each of three epochs, none of them twice
    assert_same(whole, read_run(folder, data=few))
    assert_same(whole, train(RECIPES[name], folder, data=few))  # nothing is left to do
    assert len(taken) == 12


def test_a_running_run_can_be_read(few, tmp_path, monkeypatch):
    recipe = RECIPES["quadratic"]
    monkeypatch.setattr(loops.Training, "_run_step", _raising_at(8, loops.Training._run_step))
    with pytest.raises(RuntimeError, match="power"):
        train(recipe, tmp_path, data=few)
    run = read_run(tmp_path, data=few)
    assert not run.done
    assert [epoch.number for epoch in run.evaluations] == [0, 1, 2]
    assert accuracy(run.model, few) == run.accuracy
    assert not (tmp_path / "model").exists()


def _raising_at(number, original):
    def raising(self, step):
        if step == number:
            raise RuntimeError("the power is gone")
        return original(self, step)

    return raising


def test_the_model_of_a_finished_run_is_a_checkpoint_like_any_other(few, tmp_path):
    run = train(RECIPES["gaussian"], tmp_path, data=few)
    model = SpatialTransformer.from_pretrained(tmp_path / "model")
    image = few.normalise(few.test.images[:3])
    assert torch.equal(model(image), run.model(image))


PROGRAM = """
import sys, torch
torch.set_num_threads(1)
from regard.train import SpatialRecipe, train
train(SpatialRecipe(epochs=300, batch_size=721, layers=1, heads=3, dim=4, hidden_dim=4), sys.argv[1], progress=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("deaths", [1, 5])
def test_a_run_that_is_killed_loses_an_epoch_at_most(deaths, tmp_path):
    recipe = SpatialRecipe(epochs=300, batch_size=721, layers=1, heads=3, dim=4, hidden_dim=4)
    reached = 0
    for death in range(deaths):
        program = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)])
        try:
            deadline = time.monotonic() + 900
            while time.monotonic() < deadline and len(_lines(tmp_path)) <= reached + 3:
                time.sleep(0.005)
            time.sleep(0.007 * death)  # at another moment each time
        finally:
            program.kill()
        assert program.wait() == -signal.SIGKILL
        run = read_run(tmp_path)
        assert run.evaluations[-1].number >= len(_lines(tmp_path)) - 2  # line 0 is before the first epoch
        assert run.evaluations[-1].number >= reached + 2
        assert [epoch.number for epoch in run.evaluations] == list(range(len(run.evaluations)))
        reached = run.evaluations[-1].number
    # What is there after the last death is what an undisturbed run has at that point.
    assert [epoch.loss for epoch in run.evaluations[1:]] == _first_losses(recipe, reached)


def _first_losses(recipe, count):
    with torch.random.fork_rng(devices=[]):
        training = loops.Training(recipe.make_task(), None)
        losses = []
        for _ in range(count * training.task.steps_per_epoch):
            training._run_counted_step(None)
            if training.position.step % training.task.steps_per_epoch == 0:
                losses.append(training._evaluate().loss)
    return losses


def _lines(folder):
    path = folder / "history.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def test_a_folder_belongs_to_one_recipe_and_one_data_set(few, tmp_path):
    recipe = dataclasses.replace(RECIPES["learned"], epochs=1)
    train(recipe, tmp_path / "run", data=few)
    with refused(CheckpointError, "learning_rate=0.5", f"learning_rate={recipe.learning_rate}", "another folder"):
        train(dataclasses.replace(recipe, learning_rate=0.5), tmp_path / "run", data=few)
    other = Images("few", few.test, few.train, few.names)
    with refused(CheckpointError, "digest="):
        train(recipe, tmp_path / "run", data=other)
    with refused(CheckpointError, "not the data of this run"):
        read_run(tmp_path / "run", data=other)
    with refused(CheckpointError, "There is a run in"):
        train(recipe, tmp_path / "run", data=few, resume=False)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with refused(CheckpointError, "thesis.txt"):
        train(recipe, tmp_path / "mine", data=few)
    with refused(CheckpointError, "recipe.json"):
        read_run(tmp_path / "nowhere")


def test_a_damaged_checkpoint_is_refused_with_a_reason(few, tmp_path):
    recipe = dataclasses.replace(RECIPES["vit"], epochs=1)
    train(recipe, tmp_path, data=few)
    (place,) = (tmp_path / "checkpoints").iterdir()
    for name in ("training.safetensors", "model.safetensors"):
        whole = (place / name).read_bytes()
        (place / name).write_bytes(whole[: len(whole) // 2])
        with refused(CheckpointError, f"{name} cannot be read"):
            train(recipe, tmp_path, data=few)
        (place / name).write_bytes(whole)
    assert train(recipe, tmp_path, data=few).done
    shutil.rmtree(place)
    with refused(CheckpointError, "has no checkpoint"):
        read_run(tmp_path, data=few)


def test_training_may_begin_with_a_model(few, tmp_path):
    first = train(RECIPES["quadratic"], data=few)
    slow = dataclasses.replace(RECIPES["quadratic"], learning_rate=0.0, epochs=1)
    second = train(slow, tmp_path, data=few, start=first.model)
    assert second.accuracy == first.accuracy
    assert all(torch.equal(v, second.model.state_dict()[k]) for k, v in first.model.state_dict().items())
    with refused(CheckpointError, "start="):
        train(slow, tmp_path, data=few)
    with refused(InputError, "does not fit the recipe"):
        train(RECIPES["gaussian"], data=few, start=first.model)


def test_a_batch_that_no_epoch_has_and_a_rate_that_bursts_are_refused(few):
    with refused(InputError, "97 training images"):
        train(dataclasses.replace(SMALL, batch_size=98), data=few)
    with refused(InputError, "learning rate below"):
        train(dataclasses.replace(SMALL, optimizer="sgd", max_grad_norm=None, learning_rate=1e30), data=few)


def test_a_model_learns(few):
    recipe = SpatialRecipe(
        epochs=25, batch_size=16, layers=2, heads=5, dim=32, hidden_dim=32, shift=0, turn=0, stretch=0
    )
    run = train(recipe, data=few)
    assert run.evaluations[-1].loss < 0.5 * run.evaluations[1].loss
    assert run.accuracy > 0.4
    moved = (
        run.evaluations[-1].head_profiles["blocks.0.attention"].centre
        - run.evaluations[0].head_profiles["blocks.0.attention"].centre
    )
    assert moved.norm(dim=-1).min() > 1e-3


def test_a_quiet_run_prints_nothing(few, capfd, tmp_path):
    train(dataclasses.replace(SMALL, epochs=1), tmp_path, data=few)
    assert capfd.readouterr() == ("", "")


def test_the_recipe_in_the_folder_is_readable_json(few, tmp_path):
    train(dataclasses.replace(SMALL, epochs=1), tmp_path, data=few)
    written = json.loads((tmp_path / "recipe.json").read_text())
    assert written["kind"] == "spatial"
    assert written["digest"] == few.digest
