"""`regard train ablation` and `regard train compare`: one command, one table, and they go on where they stopped."""

import json
import random

import pytest
import torch

from regard.cli import main
from regard.train import read_run

TOPICS = {
    "sport": ["team", "goal", "match", "player", "coach", "win", "league", "cup", "score", "ball"],
    "tech": ["chip", "screen", "code", "phone", "network", "software", "data", "robot", "cloud", "user"],
}
SMALL = ["--option", "dim=16", "--option", "layers=1", "--option", "heads=2", "--option", "length=24"]
SMALL += ["--option", "vocab_size=120", "--option", "separator=blank_line", "--option", "batch_size=8"]
SMALL += ["--option", "eval_batches=1", "--label-option", "length=24", "--label-option", "batch_size=8"]


@pytest.fixture(autouse=True)
def texts(tmp_path, monkeypatch):
    """Documents of one topic each, and sentences with their topic."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    draw = random.Random(0)

    def say(topic):
        return f"The {' '.join(draw.choices(TOPICS[topic], k=5))}."

    documents = [" ".join(say(topic) for _ in range(6)) for _ in range(20) for topic in TOPICS]
    (tmp_path / "text.txt").write_text("\n\n".join(documents))
    (tmp_path / "labels.tsv").write_text("".join(f"{topic}\t{say(topic)}\n" for _ in range(60) for topic in TOPICS))
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_the_ablation_of_the_tasks_is_one_command(tmp_path, capsys):
    command = ["train", "ablation", "text.txt", "--labels", "labels.tsv", "--folder", "arms", "--epochs", "10"]
    command += ["--seeds", "2", "--json", "a.json", *SMALL]
    assert main([*command, "--minutes", "0.03"]) == 0
    out, err = capsys.readouterr()
    told = json.loads((tmp_path / "a.json").read_text())["results"]
    assert [one["pretraining"] for one in told] == ["mlm and nsp", "mlm", "nsp", "none"]
    # Equal steps of pre-training, each with the metrics of its own tasks, and equal steps of fine-tuning.
    assert len({one["steps"] for one in told[:3]}) == 1
    assert told[0]["steps"] > 0
    assert told[3]["steps"] == 0
    known = [(one["mlm_accuracy"] is not None, one["nsp_accuracy"] is not None) for one in told]
    assert known == [(True, True), (True, False), (False, True), (False, False)]
    tuned = [read_run(tmp_path / "arms" / arm / "tuned-1") for arm in ("mlm-and-nsp", "mlm", "nsp", "none")]
    assert len({run.evaluations[-1].step for run in tuned}) == 1
    assert len({run.model.config.dim for run in tuned}) == 1
    assert [one["accuracies"][1] for one in told] == [run.accuracy for run in tuned]
    # Words alone tell the topics apart: chance, 12 of 24, has a standard deviation of 2.4 texts.
    assert min(one["accuracy"] for one in told) > 0.5 + 3 * 0.102
    for word in ("pre-training", "mlm and nsp", "fine-tuned", "none"):
        assert word in out
    assert "mlm, step 0 of" in err
    assert (tmp_path / "arms" / "comparison.html").read_text().count("<tr>") == 5
    # Again: the steps are those of the runs, everything is complete and nothing is trained.
    assert main([*command, "--minutes", "0.01"]) == 0
    assert "step" not in capsys.readouterr().err.replace("steps", "")
    assert json.loads((tmp_path / "a.json").read_text())["results"] == told


@pytest.mark.slow
def test_image_classifiers_are_compared_after_equal_time(tmp_path, capsys):
    fields = [
        "dim=8",
        "hidden_dim=8",
        "batch_size=64",
        "dims=12,12",
        "depths=1,1",
        "width=4",
        "layers=1",
        "position=learned",
    ]
    options = [word for field in fields for word in ("--option", field)]
    command = ["train", "compare", "digits", "--minutes", "0.04", "--folder", "all", "--json", "c.json", *options]
    assert main(command) == 0
    out = capsys.readouterr().out
    told = json.loads((tmp_path / "c.json").read_text())["results"]
    assert [one["model"] for one in told] == ["spatial", "vit", "davit", "resnet"]
    runs = [read_run(tmp_path / "all" / one["model"]) for one in told]
    assert runs[0].recipe.position == "learned"  # an option of one of them
    assert all(run.done for run in runs)
    assert all(one["images"] == 64 * one["steps"] for one in told)
    assert [one["accuracy"] for one in told] == [run.accuracy for run in runs]
    assert all(one["curve"][-1] == [one["steps"], one["accuracy"]] for one in told)
    page = (tmp_path / "all" / "comparison.html").read_text()
    assert page.count("<polyline") == 4
    assert "parameters" in out
    assert main(command) == 0  # nothing is trained again
    assert json.loads((tmp_path / "c.json").read_text())["results"] == told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("compare digits --arms spatial,lstm", "no image classifier 'lstm'"),
        ("compare nowhere", "There is no data set called 'nowhere'"),
        ("compare digits --option depth=3", "has no field 'depth'"),
        ("compare digits --minutes 0", "not a positive number"),
        ("ablation missing.txt --labels labels.tsv", "no file 'missing.txt'"),
        ("ablation text.txt --labels labels.tsv --option layer=3", "has no field 'layer'"),
    ],
)
def test_what_cannot_be_compared_is_refused(words, told, capsys, tmp_path):
    assert main(["train", *words.split()]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert "instead" in err
    assert not (tmp_path / "runs").exists()
