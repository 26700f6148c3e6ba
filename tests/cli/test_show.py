"""`regard show`: pictures from a shell."""

from __future__ import annotations

import pytest

from regard.cli import main
from regard.models import ViT, ViTConfig
from regard.train import Images, ImageSplit, SpatialRecipe, ViTRecipe, train
from regard.train.data import digits


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of two trainings, as `regard train` leaves them."""
    folder = tmp_path_factory.mktemp("runs")
    small = {"epochs": 1, "layers": 2, "batch_size": 64}
    train(SpatialRecipe(dim=8, hidden_dim=8, heads=3, **small), folder / "spatial", progress=False)
    train(ViTRecipe(dim=8, heads=2, **small), folder / "vit", progress=False)
    return folder


def test_a_run_shows_the_paths_of_its_heads(runs, tmp_path, capsys):
    for name in ("heads.svg", "heads.gif"):
        assert main(["show", str(runs / "spatial"), "-o", str(tmp_path / name)]) == 0
        assert (tmp_path / name).stat().st_size > 1000
    said = capsys.readouterr()
    assert "2 epochs" in said.out
    assert str(tmp_path / "heads.svg") in said.err


def test_a_run_as_a_page_is_the_player_that_python_makes(runs, tmp_path):
    from regard.train import read_history
    from regard.visualize import animate_heads

    history = read_history(runs / "spatial")
    labels = [f"epoch {epoch.number}, {epoch.accuracy:.1%}" for epoch in history]
    film = animate_heads([epoch.head_profiles for epoch in history], labels, layers=[1])
    out = tmp_path / "heads.html"
    assert main(["show", str(runs / "spatial"), "--layer", "1", "-o", str(out)]) == 0
    assert out.read_bytes() == film.save(tmp_path / "film.html").read_bytes()
    assert b'class="player"' in out.read_bytes()
    assert b"<h3>Layer 1</h3>" in out.read_bytes()
    assert main(["show", str(runs / "spatial"), "--layer", "1", "-o", str(tmp_path / "heads.gif")]) == 0


def test_a_run_shows_what_a_pixel_of_a_digit_sees(runs, tmp_path, capsys):
    out = tmp_path / "seven.png"
    assert main(["show", str(runs / "vit"), "--digit", "7", "--pixel", "3,4", "--layer", "1", "-o", str(out)]) == 0
    assert "row 3, column 4" in capsys.readouterr().out
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_checkpoint_shows_an_image_from_a_file(tmp_path, capsys):
    from PIL import Image

    model = ViT(ViTConfig(image=(8, 12), patch=4, classes=5, dim=8, layers=1, heads=2))
    model.save_pretrained(tmp_path / "model")
    Image.new("RGB", (31, 17), (10, 200, 30)).save(tmp_path / "image.png")
    words = ["show", str(tmp_path / "model"), "--image", str(tmp_path / "image.png"), "-o", str(tmp_path / "a.svg")]
    assert main(words) == 0
    assert "the class token" in capsys.readouterr().out
    assert main([*words[:3], str(tmp_path / "model" / "config.json"), *words[4:]]) == 2
    assert "cannot be read as an image" in capsys.readouterr().err
    assert main(["show", str(tmp_path / "model"), "--digit", "7"]) == 2
    assert "no such digit for this model" in capsys.readouterr().err


def test_a_pattern_is_drawn(tmp_path, capsys):
    out = tmp_path / "pattern.svg"
    assert main(["show", "Causal() & Window(4, 0)", "--tokens", "11", "--token", "3", "-o", str(out)]) == 0
    assert "pairs are allowed" in capsys.readouterr().out


def test_tokens_are_read_by_a_module(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(
        "from regard.models import GPT, GPTConfig\n"
        "def make():\n    return GPT(GPTConfig(vocab_size=11, context_length=16, dim=8, layers=1, heads=2))\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["show", "mine.py:make()", "--ids", "5,3,8", "--token", "2", "-o", "text.svg"]) == 0
    assert "token 2" in capsys.readouterr().out
    assert (tmp_path / "text.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pixel", "3", "--digit", "7"], "row and a column"),
        (["--digit", "11"], "no such digit"),
        (["--digit", "7", "--layer", "9"], "no such layer"),
        (["-o", "picture.bmp"], "cannot be written"),
    ],
)
def test_what_cannot_be_drawn_is_refused(runs, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(["show", str(runs / "spatial"), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_run_shows_its_heads_where_its_images_are_not(tmp_path, capsys):
    whole = digits()
    parts = (ImageSplit(part.pixels[:70], part.labels[:70], part.white) for part in (whole.train, whole.test))
    few = Images("mine", *parts, names=whole.names)
    train(SpatialRecipe(epochs=1, layers=1, dim=8, hidden_dim=8, heads=2), tmp_path / "run", data=few, progress=False)
    assert main(["show", str(tmp_path / "run"), "-o", str(tmp_path / "heads.svg")]) == 0
    assert "2 epochs" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "run"), "--digit", "7"]) == 2
    assert "not the data of this run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--head", "1"], "no head to select"),
        (["--layer", "one"], "'one' is not a list of integers"),
        (["--pixel", "3,4"], "no query to select"),
        (["--ids", "1,2"], "does not apply to this run"),
        (["--text", "a seven"], "does not apply to this run"),
        (["--head", "0", "-o", "heads.gif"], "no head to select"),
        (["--digit", "7", "--data-folder", "."], "digits takes no folder"),
    ],
)
def test_options_without_effect_are_refused(runs, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(["show", str(runs / "spatial"), *words]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
