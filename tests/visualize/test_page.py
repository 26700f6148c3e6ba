"""The page of the demo: complete, self-contained, escaped, and with the right numbers."""

from __future__ import annotations

import base64
import json
import re
import sys

import pytest
import torch
from html_reader import Reader

from regard import Quadratic, RegardError
from regard.layers.profiles import head_profile
from regard.models import ViT, ViTConfig
from regard.models.spatial import SpatialConfig, SpatialTransformer
from regard.render.chart import share_chart
from regard.render.markup import Markup
from regard.render.page import Page, code_block, figure, paragraph, tiles
from regard.render.table import Bar, Cell, Column, Table
from regard.visualize import ExplorerModel, attention_maps, make_explorer, make_player
from regard.visualize.kernels import kernel_figure

EVIL = "<script>alert('&')</script>"


def steps(count: int = 3):
    return [
        {"blocks.0.attention": head_profile(Quadratic(2, grid=(5, 7), centre=[[0, t], [t, 0]], alpha=0.5))}
        for t in range(count)
    ]


def data_of(html: str) -> dict:
    (script,) = (text for text in Reader(html).scripts if text.startswith("{"))
    return json.loads(script)


def assert_alone(text: str) -> Reader:
    """Nothing in the page asks anybody for anything, and nothing in it runs but its own scripts."""
    read = Reader(text)
    assert not re.search(r"https?:|[\"'(]//|url\(|@import|import\(", text)
    for tag, attributes in read.tags:
        assert not any(name.startswith("on") for name in attributes), tag
        assert (attributes.get("src") or "data:").startswith("data:")
        assert (attributes.get("href") or "#").startswith(("#", "data:"))
    return read


@pytest.mark.slow
def test_the_page_of_the_demo_is_well_formed_alone_and_not_heavy(quick_page):
    text = quick_page.read_text(encoding="utf-8")
    read = assert_alone(text)
    assert len(text) < 4_000_000
    tags = [tag for tag, _ in read.tags]
    assert tags.count("h1") == 1
    assert tags.count("main") == tags.count("header") == tags.count("footer") == 1
    assert all("alt" in attributes for tag, attributes in read.tags if tag == "img")
    for words in ("Learned head positions", "Attention maps", "A convolution is attention", "Laws"):
        assert words in read.words
    for name in ("heads.svg", "heads.gif", "kernels.svg", "spatial_map.svg", "vit_map.svg"):
        assert (quick_page.parent / name).stat().st_size > 1000


@pytest.mark.slow
def test_a_fresh_start_deletes_trained_models_and_nothing_else(quick_page, tmp_path):
    import demo

    for name in ("spatial", "vit", "mine"):
        (tmp_path / name).mkdir()
    for file in ("spatial/recipe.json", "vit/notes.txt", "mine/recipe.json", "cnn.safetensors", "report.html"):
        (tmp_path / file).write_text("{}")
    demo.discard_training(tmp_path)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["mine/recipe.json", "report.html", "vit/notes.txt"]


@pytest.mark.slow
def test_a_folder_of_another_training_is_refused_with_an_alternative(quick_page, monkeypatch, capsys):
    import demo

    monkeypatch.setattr(demo, "SPATIAL", demo.SpatialRecipe(seed=7))
    monkeypatch.setattr(sys, "argv", ["demo.py", "--quick", "--out", str(quick_page.parent.parent)])
    (quick_page.parent.parent / "quick").symlink_to(quick_page.parent)
    assert demo.main() == 2
    assert "--fresh" in capsys.readouterr().err


def test_user_text_is_escaped():
    page = Page(EVIL, kicker=EVIL, lead=EVIL, title=EVIL)
    page.open_with(tiles([(EVIL, EVIL)]))
    page.add("words", paragraph(EVIL), code_block(EVIL), figure(EVIL, EVIL), EVIL)
    page.add(
        "more", Table([Column(EVIL)] * 3, [(Cell(EVIL, link="#a"), Cell(EVIL, "holds"), Bar(0.5, EVIL))]).to_html()
    )
    page.add("still more", share_chart({EVIL: [0.1, 0.2]}, EVIL, (EVIL, EVIL), 0.0, 1.0))
    page.close_with(EVIL)
    read = assert_alone(page.html)
    assert "script" not in [tag for tag, _ in read.tags]
    assert read.words.count(EVIL) >= 14
    page.add("heads", make_player(steps(), [EVIL, EVIL, EVIL], EVIL))
    text = page.html
    read = assert_alone(text)
    assert [tag for tag, _ in read.tags].count("script") == 2  # the data and the player
    assert text.count("</script>") == 2


def test_what_is_html_already_is_left_as_it_is():
    assert paragraph(Markup("<b>so</b>"), " & so") == "<p><b>so</b> &amp; so</p>"


def test_unequal_rows_are_refused():
    with pytest.raises(RegardError, match="unequal"):
        Table([Column("a"), Column("b")], [("x",)])


def test_bars_and_lines_have_the_lengths_of_their_numbers():
    assert "width:25.00%" in Table([Column("a"), Column("b")], [("x", Bar(0.25, "a quarter"))]).to_html()
    drawn = share_chart({"line": [0.0, 0.5, 1.0]}, "", ("", ""), 0.0, 1.0)
    assert 'points="0.00,100.00 50.00,50.00 100.00,0.00"' in drawn
    drawn = share_chart({"line": [0.0, 0.5, 1.0]}, "", ("", ""), 0.0, 1.0, places={"line": [0.1, 0.2, 1.0]})
    assert 'points="10.00,100.00 20.00,50.00 100.00,0.00"' in drawn


def test_kernels_are_images_with_captions():
    drawn = kernel_figure({"a": torch.ones(2, 3, 3), "b": -torch.ones(2, 3, 3)}, "words")
    assert drawn.count("data:image/png") == 4
    assert 'alt="kernel 2 of b"' in drawn


# The moving heads


def test_the_player_has_every_head_of_every_epoch_where_it_was():
    epochs = steps(4)
    data = data_of(make_player(epochs, list("abcd"), ""))
    assert data["labels"] == list("abcd")
    (frames,) = data["layers"]
    for frame, epoch in zip(frames, epochs, strict=True):
        found = epoch["blocks.0.attention"]
        for head, mean in zip(frame, found.mean.tolist(), strict=True):
            assert head["at"] == pytest.approx(mean, abs=1e-3)
            _, _, long, short, _ = head["half"]
            assert long == pytest.approx(short, rel=1e-2)
        for head, centre in zip(frame, found.centre.tolist(), strict=True):
            assert head["half"][:2] == pytest.approx(centre, abs=1e-3)


def test_the_player_shows_the_end_even_without_a_script():
    drawn = make_player(steps(), list("abc"), "")
    places = re.findall(r'class="dot" transform="translate\(([-\d.]+) ([-\d.]+)\)"', drawn)
    found = steps()[-1]["blocks.0.attention"].mean
    heads = [int(head) for head in re.findall(r'data-head="(\d+)"', drawn)]
    assert sorted(heads) == [0, 1]
    for (column, row), mean in zip(places, found[heads].tolist(), strict=True):
        assert (float(row), float(column)) == pytest.approx(mean, abs=1e-3)
    assert "<output>c</output>" in drawn


def test_a_player_of_epochs_that_do_not_fit_is_refused():
    with pytest.raises(RegardError, match="do not fit"):
        make_player(steps(3), list("ab"), "")


# The pixels


def test_the_explorer_holds_every_weight_to_its_last_step():
    spatial = SpatialTransformer(
        SpatialConfig(image=(4, 6), channels=1, patch=1, dim=4, layers=2, heads=3, hidden_dim=5)
    )
    vit = ViT(ViTConfig(image=(4, 6), channels=1, patch=2, classes=3, dim=8, layers=2, heads=2))
    torch.manual_seed(0)
    for parameter in vit.parameters():
        torch.nn.init.normal_(parameter)
    images = torch.rand(2, 1, 4, 6)
    models = [ExplorerModel("one", spatial, images, ["a", "b"]), ExplorerModel("two", vit, images, ["c", "d"])]
    data = data_of(make_explorer(models, images, ["first", "second"], ""))
    for shown, kept, count in zip(models, data["models"], (1, 2), strict=True):
        keys = kept["first"] + kept["grid"][0] * kept["grid"][1]
        shape = (count, 2, kept["heads"], keys, keys)
        bytes_of = [torch.tensor(list(base64.b64decode(kept[name]))) / 255 for name in ("weights", "largest")]
        share, largest = bytes_of[0].view(shape), bytes_of[1].view(shape[:-1])
        for index in range(count):
            for layer, attention in enumerate(attention_maps(shown.model, images[index : index + 1])):
                rows = attention.rows(range(keys))
                torch.testing.assert_close(largest[index, layer], rows.amax(-1), rtol=0, atol=0.5 / 255 + 1e-6)
                scaled = rows / rows.amax(-1, keepdim=True)
                torch.testing.assert_close(share[index, layer], scaled, rtol=0, atol=0.5 / 255 + 1e-6)
    assert [model["shared"] for model in data["models"]] == [True, False]
    assert [model["first"] for model in data["models"]] == [0, 1]


def test_a_page_that_would_be_too_heavy_is_refused():
    model = SpatialTransformer(
        SpatialConfig(image=(24, 36), channels=1, patch=1, dim=4, layers=1, heads=3, hidden_dim=5)
    )
    with pytest.raises(RegardError, match="too large"):
        make_explorer(
            [ExplorerModel("one", model, torch.rand(1, 1, 24, 36), ["a"])], torch.rand(1, 1, 24, 36), ["x"], ""
        )
