"""Damaged run folders, or folders in use by another process: refused with a reason, and nothing in them is lost."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys

import pytest
import torch
from agreement import refused

from regard.errors import CheckpointError, ConfigError, InputError
from regard.models.io import tensors
from regard.train import Images, ImageSplit, SpatialRecipe, TeacherRecipe, ViTRecipe, history, read_run, train

TINY = SpatialRecipe(epochs=2, batch_size=48, layers=1, heads=2, dim=4, hidden_dim=4)
HISTORY = "history.jsonl"
CHECKPOINT = "checkpoints/step-00000004/training.safetensors"


@pytest.fixture(scope="module")
def done(few, tmp_path_factory):
    folder = tmp_path_factory.mktemp("done") / "run"
    train(TINY, folder, data=few)
    return folder


@pytest.fixture
def copy(done, tmp_path):
    return shutil.copytree(done, tmp_path / "run")


def lines(change):
    return lambda text: "".join(change(text.splitlines(keepends=True)))


@pytest.mark.parametrize(
    ("message", "harm"),
    [
        ("every evaluation exactly once", lambda text: ""),
        ("every evaluation exactly once", lines(lambda rows: rows[:1] + rows[2:])),
        ("every evaluation exactly once", lines(lambda rows: rows + rows)),
        (
            "every evaluation exactly once",
            lambda text: text[:-40],
        ),  # torn, though the checkpoint says that it was whole
        ("Line 2 of", lines(lambda rows: [rows[0], "[3]\n", *rows[2:]])),
        ("Line 2 of", lines(lambda rows: [rows[0], '{"number": 1}\n', *rows[2:]])),
        ("Line 2 of", lambda text: text.replace('"number": 1', '"number": "one"')),
        ("Line 1 of", lambda text: "\udcff\n" + text),
    ],
)
def test_a_damaged_history_is_refused_and_stays_as_it_is(message, harm, copy, few):
    path = copy / HISTORY
    path.write_text(harm(path.read_text()), errors="surrogateescape")
    before = path.read_bytes()
    with refused(CheckpointError, message, HISTORY):
        read_run(copy, data=few)
    with refused(CheckpointError, message, HISTORY):
        train(TINY, copy, data=few)
    assert path.read_bytes() == before


def test_a_history_that_is_gone_is_not_written_anew_from_the_middle(copy, few):
    (copy / HISTORY).unlink()
    with refused(CheckpointError, "every evaluation exactly once"):
        train(TINY, copy, data=few)
    assert not (copy / HISTORY).exists()


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(copy, few):
    shutil.rmtree(copy / "checkpoints")
    again = train(TINY, copy, data=few)
    assert [epoch.number for epoch in again.evaluations] == [0, 1, 2]
    assert [line["number"] for line in history.read_history_lines(copy)] == [0, 1, 2]


@pytest.mark.parametrize("wrong", [{"step": -1}, {"step": "one"}, {"evaluations": 0.5}, {"units": None}, {"images": 3}])
def test_a_checkpoint_of_no_place_in_a_run_is_refused(wrong, copy, few):
    state, notes = tensors.read_with_metadata(copy / CHECKPOINT)
    position = json.loads(notes["position"]) | wrong
    tensors.write_safetensors(copy / CHECKPOINT, dict(state), {"position": json.dumps(position)})
    with refused(CheckpointError, "is not of a checkpoint"):
        train(TINY, copy, data=few)


def test_a_checkpoint_of_another_model_is_refused(copy, few, tmp_path):
    train(dataclasses.replace(TINY, dim=6), tmp_path / "other", data=few)
    shutil.copy(tmp_path / "other" / "checkpoints" / "step-00000004" / "model.safetensors", (copy / CHECKPOINT).parent)
    with refused(CheckpointError, "does not fit the recipe", "other parameters"):
        train(TINY, copy, data=few)


# Folders


def test_a_folder_that_cannot_be_one_is_refused(few, tmp_path):
    (tmp_path / "file").write_text("a letter")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with refused(CheckpointError, "cannot be saved", "file"):
            train(TINY, place, data=few)
    assert (tmp_path / "file").read_text() == "a letter"


def test_a_disk_that_is_full_is_said_and_what_was_kept_goes_on(few, tmp_path, monkeypatch):
    whole, append = train(TINY, data=few), history.append_evaluation

    def full(folder, epoch):
        if epoch.number == 2:
            with (folder / HISTORY).open("a") as file:
                file.write('{"number": 2, "lo')
            raise OSError(28, "No space left on device")
        append(folder, epoch)

    monkeypatch.setattr(history, "append_evaluation", full)
    with refused(CheckpointError, "No space left", "resumes from the last checkpoint"):
        train(TINY, tmp_path / "run", data=few)
    monkeypatch.undo()
    again = train(TINY, tmp_path / "run", data=few)
    assert [repr(epoch.loss) for epoch in again.evaluations] == [repr(epoch.loss) for epoch in whole.evaluations]


def write_at_most(size):
    """No file may grow beyond this many bytes: the system refuses, as on a full disk, in whatever library writes."""
    resource = pytest.importorskip("resource", reason="this system limits no files")
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("size", [700, 3000])
def test_a_file_size_limit_is_reported_and_the_run_can_be_resumed(kept, size, few, tmp_path):
    """Small enough for the files of TensorBoard and the history to fail, and large enough for the checkpoint alone."""
    whole = train(TINY, data=few)
    append, unlimited = history.append_evaluation, -1

    def limit(folder, epoch):
        append(folder, epoch)
        if epoch.number == kept:
            write_at_most(size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "append_evaluation", limit)
        try:
            with refused(CheckpointError, "too large", "resumes from the last checkpoint"):
                train(TINY, tmp_path / "run", data=few)
        finally:
            write_at_most(unlimited)
    again = train(TINY, tmp_path / "run", data=few)
    assert [repr(epoch.loss) for epoch in again.evaluations] == [repr(epoch.loss) for epoch in whole.evaluations]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*map(tensors_of, (again, whole)), strict=True))


def tensors_of(run):
    return run.model.state_dict().values()


def test_a_model_that_does_not_fit_on_the_disk_leaves_the_one_before_it(tmp_path, few):
    first, second = (train(dataclasses.replace(TINY, seed=seed, epochs=1), data=few).model for seed in (1, 2))
    first.save_pretrained(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    try:
        write_at_most(1000)
        with refused(CheckpointError, "too large", "what was saved there before is still whole"):
            second.save_pretrained(tmp_path)
    finally:
        write_at_most(-1)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    second.save_pretrained(tmp_path)


HOLDER = """
import sys, pathlib
from regard.train import checkpoint
with checkpoint.lock_folder(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_processes_do_not_train_in_one_folder(copy, few):
    pytest.importorskip("fcntl", reason="this system locks no files")
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(copy)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with refused(CheckpointError, "in use by another", "another folder"):
            train(TINY, copy, data=few)
        assert read_run(copy, data=few).done  # to look is allowed
    finally:
        other.kill()
        other.communicate()
    assert train(TINY, copy, data=few).done  # a lock ends with who held it


def test_a_run_leaves_its_folder_free(few, tmp_path):
    for _ in range(2):
        assert train(TINY, tmp_path / "run", data=few).done
    assert not [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")]


# Recipes and images


def test_images_of_ones_own_are_held_back_too(few, tmp_path):
    recipe = dataclasses.replace(TINY, held=True, batch_size=24)
    run = train(recipe, tmp_path / "run", data=few)
    held = few.held()
    assert run.data.digest == held.digest
    assert run.data.is_held
    assert len(run.data.test) + len(run.data.train) == len(few.train)
    assert train(recipe, data=held).accuracy == run.accuracy  # what is held already is not held again
    assert read_run(tmp_path / "run", data=few).accuracy == run.accuracy


def test_too_few_images_to_hold_some_back_are_refused():
    part = ImageSplit(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))
    with refused(InputError, "too few images", "4 images"):
        Images("four", part, part, ("a",)).held()


@pytest.mark.parametrize("white", [0, 6, 256])
def test_pixels_brighter_than_white_are_refused(white):
    with refused(InputError, "larger than `white`", f"white={white}"):
        ImageSplit(torch.full((1, 1, 2, 2), 7, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64), white)


def test_seeds_and_beginnings_that_torch_does_not_take_are_refused():
    for kind in (SpatialRecipe, ViTRecipe, TeacherRecipe):
        with refused(ConfigError, "seed="):
            kind(seed=2**32)
        kind(seed=-(2**32) + 1)
    for initial in (0.0, -0.1, math.nan, math.inf):
        with refused(ConfigError, "initial="):
            ViTRecipe(initial=initial)
    with refused(ConfigError, "no convolution to learn"):
        TeacherRecipe(learning_rate=math.inf)


def test_the_largest_seed_can_be_trained_with(few):
    assert train(dataclasses.replace(TINY, seed=2**32 - 1, epochs=1), data=few).done


def test_a_vit_is_initialised_with_the_given_std(few):
    torch.manual_seed(0)
    for initial in (0.03, 0.2):
        model = ViTRecipe(initial=initial).model(few)
        sizes = {
            name: module.weight.std().item()
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not model.head
        }
        assert len(sizes) == 3 * 3
        # The deviation of n numbers is known to 1 / sqrt(2 n) of itself; that of 64 x 64 to 1.1 %.
        assert all(abs(size / initial - 1) < 5 * 0.011 for size in sizes.values()), sizes
        assert model.head is not None
        assert not model.head.weight.any()
