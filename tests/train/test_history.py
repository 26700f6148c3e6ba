"""The history of a run: numbers that agree with the layers, as text, JSON and TensorBoard."""

import dataclasses
import json
import struct

import pytest
import torch
from agreement import refused

from regard.errors import CheckpointError
from regard.layers import HeadProfile, head_profile
from regard.models.spatial import POSITIONS, SpatialConfig, SpatialTransformer
from regard.train import SpatialRecipe, history, read_run, tensorboard, train
from regard.train.run import Evaluation

SMALL = SpatialRecipe(epochs=2, batch_size=48, layers=2, heads=3, dim=6, hidden_dim=8)


@pytest.mark.parametrize("position", POSITIONS)
def test_every_epoch_records_every_head(position, few, tmp_path):
    run = train(dataclasses.replace(SMALL, position=position), tmp_path, data=few)
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [line["number"] for line in lines] == [0, 1, 2]
    assert lines[0]["loss"] is None
    for line, epoch in zip(lines, run.evaluations, strict=True):
        assert line["metrics"] == epoch.metrics
        assert list(line["layers"]) == ["blocks.0.attention", "blocks.1.attention"]
        for name, layer in line["layers"].items():
            seen = epoch.head_profiles[name]
            assert len(layer["heads"]) == seen.heads == 3
            assert layer["coverage_50"] == seen.coverage(0.5)
            assert layer["kernel_norm"] == pytest.approx(seen.kernel.norm().item(), rel=1e-4)
            for head, told in enumerate(layer["heads"]):
                assert told["mean"] == seen.mean[head].tolist()
                assert told["width"] == seen.width[head].item()
                assert told["pixels_90"] >= told["pixels_50"] >= 1
                assert told["level_90"] <= told["level_50"]
                assert ("centre" in told) == (position in ("quadratic", "gaussian")) == ("precision" in told)
                assert told["degenerate"] is False
    last = run.model.blocks[1].attention
    if position != "content":
        assert torch.equal(run.evaluations[-1].head_profiles["blocks.1.attention"].scores, last.head_profile().scores)


def test_content_heads_are_recorded_on_real_images(few):
    torch.manual_seed(3)
    model = SpatialTransformer(SpatialConfig("content", (8, 8), 1, 2, 6, 2, 3, 8)).eval()
    images = few.normalise(few.test.images[:7])
    seen = history.measure_head_profiles(model, images)
    x = model.embedding(torch.nn.functional.pixel_unshuffle(images, 2).permute(0, 2, 3, 1))
    expected = HeadProfile.observed(model.blocks[0].attention.weights(x), (4, 4))
    assert torch.allclose(seen["blocks.0.attention"].scores, expected.scores, rtol=1e-6)
    assert list(seen) == ["blocks.0.attention", "blocks.1.attention"]
    assert history.measure_head_profiles(model) == {}
    assert not model.blocks[0].attention._forward_pre_hooks


def test_heads_come_back_from_their_file_in_the_order_of_the_layers(tmp_path):
    model = SpatialTransformer(SpatialConfig(image=(6, 10), dim=2, layers=11, heads=2, hidden_dim=2))
    seen = {
        name: head_profile(layer.attention)
        for name, layer in ((f"blocks.{n}.attention", b) for n, b in enumerate(model.blocks))
    }
    history.write_heads(tmp_path, 7, seen)
    found = history.read_heads(tmp_path / "heads" / "evaluation-0007.safetensors")
    assert list(found) == list(seen)
    for name, one in found.items():
        assert all(torch.equal(value, seen[name].to_tensors()[what]) for what, value in one.to_tensors().items())


def test_values_are_left_out_if_the_recipe_disables_them(few, tmp_path):
    run = train(dataclasses.replace(SMALL, keep_values=False, epochs=1), tmp_path, data=few)
    again = read_run(tmp_path, data=few)
    for epoch in (*run.evaluations, *again.evaluations):
        assert all(seen.values is None and seen.centre is not None for seen in epoch.head_profiles.values())
    assert (
        "kernel_norm"
        not in json.loads((tmp_path / "history.jsonl").read_text().splitlines()[0])["layers"]["blocks.0.attention"]
    )


def write(folder, count):
    for number in range(count):
        history.append_evaluation(folder, Evaluation(number, 10 * number, 1.0, {"accuracy": 0.5}, 0.1, 0.01))


def test_a_torn_last_line_is_left_out_and_any_other_is_refused(tmp_path):
    write(tmp_path, 3)
    path = tmp_path / "history.jsonl"
    with path.open("a") as file:
        file.write('{"number": 3, "lo')
    assert [line["number"] for line in history.read_history_lines(tmp_path)] == [0, 1, 2]
    assert len(history.read_evaluations(tmp_path, 3)) == 3
    with path.open("a") as file:
        file.write('\n{"number": 4}\n')
    with refused(CheckpointError, "Line 4"):
        history.read_history_lines(tmp_path)
    assert history.read_history_lines(tmp_path / "heads") == []


def test_history_after_the_last_checkpoint_is_dropped(tmp_path):
    write(tmp_path, 4)
    seen = {"layer": HeadProfile(torch.zeros(1, 3, 5))}
    for number in range(4):
        history.write_heads(tmp_path, number, seen)
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write("torn")
    history.append_lines(tmp_path / "steps.jsonl", [{"step": step, "loss": 1.0} for step in range(1, 31)])
    history.truncate_history(tmp_path, 2, 10)
    assert [line["number"] for line in history.read_history_lines(tmp_path)] == [0, 1]
    assert [line["step"] for line in history.read_lines(tmp_path / "steps.jsonl")] == list(range(1, 11))
    assert sorted(path.name for path in (tmp_path / "heads").iterdir()) == [
        "evaluation-0000.safetensors",
        "evaluation-0001.safetensors",
    ]


# TensorBoard


def events(folder):
    """The scalars in the files that TensorBoard reads, `{name: {step: value}}`."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for file in sorted(folder.iterdir()):
        raw, place = file.read_bytes(), 0
        while place < len(raw):  # a length, its checksum, an event, its checksum
            (length,) = struct.unpack_from("<Q", raw, place)
            event = Event.FromString(raw[place + 12 : place + 12 + length])
            place += 16 + length
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def test_tensorboard_gets_losses_and_every_head(few, tmp_path):
    run = train(SMALL, tmp_path, data=few)
    scalars = events(tmp_path / "tensorboard")
    assert scalars["validation/accuracy"] == pytest.approx(
        {epoch.step: epoch.accuracy for epoch in run.evaluations}, rel=1e-6
    )
    assert scalars["loss"] == pytest.approx({epoch.step: epoch.loss for epoch in run.evaluations[1:]}, rel=1e-6)
    for head in range(3):
        widths = {epoch.step: epoch.head_profiles["blocks.1.attention"].width[head].item() for epoch in run.evaluations}
        assert scalars[f"width/blocks.1.attention/{head}"] == pytest.approx(widths, rel=1e-6)


def test_without_tensorboardx_one_line_reports_it_and_training_continues(few, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tensorboard.importlib.util, "find_spec", lambda name: None)
    run = train(dataclasses.replace(SMALL, epochs=1), tmp_path, data=few)
    assert run.done
    assert not (tmp_path / "tensorboard").exists()
    assert capsys.readouterr().err.count("\n") == 1
