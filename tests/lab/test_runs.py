"""Runs of `regard train` in the lab: their models, curves, heads, samples and attention over time."""

from __future__ import annotations

import json
import random

import pytest
import torch
from lab_client import Client, decode, run_server

from regard.cli.lab import find_runs, make_source
from regard.lab.state import Lab
from regard.train import GPTRecipe, SpatialRecipe, read_history, train
from regard.train.checkpoint import find_checkpoints
from regard.train.history import read_lines


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A language model of characters, and heads on images of digits, a few steps each."""
    place = tmp_path_factory.mktemp("runs")
    draw = random.Random(1)
    lines = [f"{draw.choice(['the cat', 'a dog'])} {draw.choice(['sat', 'lay'])} on the mat." for _ in range(300)]
    (place / "book.txt").write_text("\n".join(lines))
    recipe = GPTRecipe(
        data=str(place / "book.txt"), tokenizer="characters", steps=9, batch_size=4, context_length=32, dim=12,
        layers=2, heads=3, eval_every=3, eval_batches=1, warmup_steps=1, sample_tokens=8, log_every=1,
        keep_checkpoints=5,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        train(recipe, place / "gpt", progress=False)
    train(
        SpatialRecipe(epochs=1, layers=2, batch_size=256, dim=8, hidden_dim=8, heads=3),
        place / "spatial",
        progress=False,
    )
    return place


@pytest.fixture(scope="module")
def client(folders):
    targets = [str(folders / "gpt"), str(folders / "spatial")]
    running = run_server(Lab([make_source(target) for target in targets], find_runs(targets)))
    yield Client(next(running))
    assert next(running, None) is None


def test_a_run_of_a_language_model_is_opened_with_its_own_tokenizer(client):
    opened = client.post("open", model="gpt")
    assert opened["kind"] == "decoder"
    given = client.post("input", model="gpt", text="the cat sat")
    assert given["attentions"]["self"]["queries"] == ["t", "h", "e", "␣", "c", "a", "t", "␣", "s", "a", "t"]
    layers = client.post("overview", input=given["input"], attention="self")["layers"]
    assert [len(layer) for layer in layers] == [3, 3]
    assert len(client.post("predict", input=given["input"], off=[], top=5)["after"]) == 5
    longer = client.post("generate", input=given["input"], steps=4, temperature=0, seed=0)
    assert len(longer["attentions"]["self"]["queries"]) == 15


def test_a_run_on_images_is_opened_with_its_own_normalisation_and_classes(client):
    from regard.render.png import encode_png
    from regard.train import read_run

    opened = client.post("open", model="spatial")
    assert opened["kind"] == "image"
    image = torch.rand(8, 8, 1, generator=torch.Generator().manual_seed(3)).mul(255).round().div(255)
    reply = client.upload("spatial", encode_png(image.expand(8, 8, 3)))
    given = reply.content
    assert given["attentions"]["self"]["grid"] is not None
    overview = client.post("overview", input=given["input"], attention="self")["layers"]
    assert [len(layer) for layer in overview] == [3, 3]
    found = client.post("predict", input=given["input"], off=[], top=10)
    run = read_run(client.server.lab.runs["spatial"])
    with torch.no_grad():
        shares = run.model(run.data.normalise(image.permute(2, 0, 1)[None])).softmax(-1)[0]
    assert [entry["token"] for entry in found["after"]] == [
        str(run.data.names[n]) for n in shares.argsort(descending=True)
    ]
    assert found["after"][0]["probability"] == pytest.approx(float(shares.max()), rel=1e-4)
    without = client.post("predict", input=given["input"], off=[["self", 1, 2]], top=10)
    assert without["after"] != without["before"]


def test_the_list_of_runs_names_no_folder(client, folders):
    reply = client.send("GET", "/api/runs")
    assert reply.content == {"runs": [{"id": "gpt", "name": "gpt"}, {"id": "spatial", "name": "spatial"}]}


def test_a_run_has_its_curves_samples_and_attention(client, folders):
    found = client.post("run", run="gpt", since=None)
    assert found["finished"]
    written = read_lines(folders / "gpt" / "steps.jsonl")
    assert [line["step"] for line in found["steps"]] == [line["step"] for line in written]
    assert found["steps"][0]["loss"] == written[0]["loss"]
    assert [line["step"] for line in found["evaluations"]] == [each.step for each in read_history(folders / "gpt")]
    assert all(isinstance(sample["text"], str) for sample in found["samples"])
    assert found["heads"] is None  # heads that depend on content have no position
    maps = decode(found["attention"]["maps"])
    steps = len(find_checkpoints(folders / "gpt"))
    count = len(found["attention"]["tokens"])
    assert maps.shape == (steps, 2, 3, count, count)
    assert len(found["attention"]["labels"]) == steps
    assert (maps.amax(-1) == 255).all()  # of the largest of each row
    assert not maps[0, 0, 0].triu(1).any()
    assert not torch.equal(maps[0], maps[-1])


def test_only_what_is_new_is_sent_again(client, folders):
    first = client.post("run", run="gpt", since=None)
    again = client.post("run", run="gpt", since=first["cursor"])
    assert again["steps"] == again["evaluations"] == again["samples"] == []
    assert "attention" not in again
    assert "heads" not in again
    assert again["cursor"] == first["cursor"]
    partly = client.post("run", run="gpt", since={**first["cursor"], "steps": 7})
    assert [line["step"] for line in partly["steps"]] == [line["step"] for line in first["steps"]][7:]


def test_positional_heads_are_those_of_the_player(client, folders):
    from regard.visualize.player import player_data

    found = client.post("run", run="spatial", since=None)
    epochs = [each.head_profiles for each in read_history(folders / "spatial")]
    expected = json.loads(json.dumps(player_data(epochs, found["heads"]["labels"])))
    assert found["heads"] == expected


@pytest.mark.parametrize("since", ["", 5, {"steps": "x"}, {"steps": -5}, {"evaluations": 10**30}, []])
def test_a_cursor_that_is_none_is_refused(client, since):
    if since == "":
        since = "last"
    assert client.refuse("run", run="gpt", since=since)[0] == 400


def test_a_run_without_a_checkpoint_yet_is_no_error(client, tmp_path, folders):
    import shutil

    place = tmp_path / "young"
    shutil.copytree(folders / "gpt", place)
    for name in ("checkpoints", "best", "model"):
        shutil.rmtree(place / name, ignore_errors=True)
    (place / "history.jsonl").unlink()
    client.server.lab.runs["young"] = place
    found = client.post("run", run="young", since=None)
    assert not found["finished"]
    assert found["evaluations"] == []
    assert found.get("attention") is None
