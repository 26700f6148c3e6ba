"""Pictures of heads are drawn at the positions of the heads."""

from __future__ import annotations

import io
import sys

import pytest
import torch

from regard import Quadratic, RegardError, RowColumn, show
from regard.layers.profiles import head_profile
from regard.render.colors import HEADS, HEADS_DARK, diverging, head_color, overlay
from regard.render.png import encode_png
from regard.visualize import Picture, animate_heads, draw_head_paths, draw_heads
from regard.visualize.heads import find_extent, read_trajectories
from regard.visualize.labels import layer_titles

STEPS = 5


def course(layers: int = 2, count: int = 3):
    """Heads that walk: head h of layer l is at (l + t / 4, h - t / 2) at time t."""
    epochs = []
    for time in range(STEPS):
        epoch = {}
        for layer in range(layers):
            centre = [[layer + time / 4, head - time / 2] for head in range(count)]
            epoch[f"blocks.{layer}.attention"] = head_profile(Quadratic(count, grid=(11, 13), centre=centre, alpha=0.5))
        epochs.append(epoch)
    return epochs


def dots(panel) -> list[tuple[float, float, str]]:
    """Row, column and color of the dots that carry a number."""
    large = [line for line in panel.lines if line.get_marker() == "o" and line.get_markersize() > 5]
    return [(float(line.get_ydata()[0]), float(line.get_xdata()[0]), line.get_color()) for line in large]


def test_a_dot_lies_at_the_centre_of_mass_of_every_head():
    epochs = course()
    picture = draw_head_paths(epochs)
    panels = picture.figure.axes
    assert [panel.get_title() for panel in panels] == ["layer 0", "layer 1"]
    for panel, found in zip(panels, epochs[-1].values(), strict=True):
        expected = found.mean.tolist()
        for (row, column, color), (down, across), head in zip(dots(panel), expected, range(3), strict=True):
            assert row == pytest.approx(down)
            assert column == pytest.approx(across)
            assert color == head_color(head)


def test_rows_count_downward_on_equal_axes():
    panel = draw_heads(head_profile(Quadratic(1, grid=(11, 13), centre=[[3, -2]], alpha=0.5))).figure.axes[0]
    low, high = panel.get_ylim()
    assert low > high
    assert panel.get_aspect() == 1
    ((row, column, _),) = dots(panel)
    assert panel.transData.transform((column, row))[1] < panel.transData.transform((0, 0))[1]  # below the query
    assert panel.transData.transform((column, row))[0] < panel.transData.transform((0, 0))[0]  # to its left


def test_a_trail_leads_from_the_first_state_to_the_last_and_darkens():
    epochs = course(layers=1)
    panel = draw_head_paths(epochs).figure.axes[0]
    for head, trail in enumerate(panel.collections):
        pieces = trail.get_segments()
        assert len(pieces) == STEPS - 1
        way = [epoch["blocks.0.attention"].mean[head].flip(-1) for epoch in epochs]
        for piece, start, stop in zip(pieces, way, way[1:], strict=False):
            torch.testing.assert_close(torch.tensor(piece), torch.stack((start, stop)).double(), check_dtype=False)
        shades = trail.get_colors()[:, 3]
        assert (shades[1:] > shades[:-1]).all()


def test_the_panel_reaches_as_far_as_the_heads_and_no_farther_than_the_grid():
    near = read_trajectories([{"": head_profile(Quadratic(1, grid=(11, 13), centre=[[0, 0]], alpha=2.0))}])
    far = read_trajectories([{"": head_profile(Quadratic(1, grid=(3, 13), centre=[[2, 11]], alpha=0.5))}])
    assert find_extent(near) == (2.5, 2.5)
    assert find_extent(far) == (2.5, 12.5)
    # The ellipse of nine tenths has a radius of 2.15 around a centre one column away, although the border of the small
    # grid makes the weights themselves narrower than that.
    cut = read_trajectories([{"": head_profile(Quadratic(1, grid=(5, 7), centre=[[0, 1]], alpha=0.5))}])
    assert find_extent(cut) == (2.5, 3.5)


def test_a_layer_that_lost_heads_is_drawn_since_it_lost_them():
    before = {"a": head_profile(Quadratic(3, grid=(5, 7)))}
    after = {"a": head_profile(Quadratic(2, grid=(5, 7)))}
    picture = draw_head_paths([before, before, after, after])
    assert picture.data["layers"]["a"]["mean"].shape == (2, 2, 2)
    assert "number of heads changed" in picture.caption


def test_tables_can_be_drawn_too():
    picture = show(RowColumn(2, (5, 7)))
    assert picture.data["layers"][""]["mean"].shape == (1, 2, 2)


@pytest.mark.parametrize("epochs", [[], [{}]])
def test_nothing_to_draw_is_refused(epochs):
    with pytest.raises(RegardError, match="no heads to draw"):
        draw_head_paths(epochs)


def test_layers_are_called_by_their_numbers():
    assert layer_titles(["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"]) == ["layer 0", "layer 1"]
    assert layer_titles(["", ""]) == ["layer 0", "layer 1"]
    assert layer_titles(["blocks.0.self", "cross"]) == ["layer 0\nblocks.0.self", "layer 1\ncross"]
    assert layer_titles(["blocks.1.attention"]) == ["layer 0\nblocks.1.attention"]
    assert layer_titles(["stages.0.blocks.0", "stages.0.blocks.1"])[1] == "layer 1\nstages.0.blocks.1"


# Files


def test_pictures_are_written_as_vectors_images_and_pages(tmp_path):
    picture = draw_head_paths(course())
    for ending, start in ((".svg", b"<?xml"), (".png", b"\x89PNG"), (".pdf", b"%PDF"), (".html", b"<!doctype html>")):
        file = picture.save(tmp_path / "deep" / f"heads{ending}")
        assert file.read_bytes().startswith(start)
    page = (tmp_path / "deep" / "heads.html").read_text()
    assert "http" not in page
    assert "url(" not in page.replace("url(#", "")
    assert "centre of mass" in page


def test_the_same_picture_is_the_same_file(tmp_path):
    for ending in (".svg", ".pdf"):
        one, two = (draw_heads(course(1, 1)[0]).save(tmp_path / f"{name}{ending}") for name in "ab")
        assert one.read_bytes() == two.read_bytes()


def test_a_notebook_shows_a_picture():
    picture = draw_heads(head_profile(Quadratic(2, grid=(5, 7))))
    assert picture._repr_html_().startswith("<figure>\n<svg")
    assert picture._repr_png_().startswith(b"\x89PNG")


def test_an_unknown_ending_is_refused(tmp_path):
    picture = draw_heads(head_profile(Quadratic(2, grid=(5, 7))))
    for name in ("heads.bmp", "heads"):
        with pytest.raises(RegardError, match="cannot be written"):
            picture.save(tmp_path / name)
    (tmp_path / "file").write_text("")
    with pytest.raises(RegardError, match="cannot be written"):
        picture.save(tmp_path / "file" / "heads.svg")


def test_no_window_and_no_open_figure_is_left_behind():
    before = {name for name in sys.modules if name.startswith("matplotlib.pyplot")}
    draw_heads(head_profile(Quadratic(2, grid=(5, 7))))
    if not before:
        assert "matplotlib.pyplot" not in sys.modules
    else:
        import matplotlib.pyplot

        assert matplotlib.pyplot.get_fignums() == []


def test_a_missing_matplotlib_is_reported_with_its_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RegardError, match=r'pip install "regard\[show\]"'):
        draw_heads(head_profile(Quadratic(2, grid=(5, 7))))


# Films


def test_a_film_has_a_frame_for_every_epoch_and_waits_at_the_end(tmp_path):
    from PIL import Image

    film = animate_heads(course(layers=1, count=2))
    file = film.save(tmp_path / "heads.gif")
    with Image.open(file) as gif:
        times = []
        for frame in range(gif.n_frames):
            gif.seek(frame)
            times.append(gif.info["duration"])
    assert len(times) == STEPS
    assert times[-1] > 5 * times[0]


def test_an_animation_leaves_out_epochs_evenly_and_notes_it():
    film = animate_heads(course(), most=3)
    assert film.labels == ["epoch 0", "epoch 2", "epoch 4"]
    assert "3 of 5 epochs" in film.caption
    assert len(film.epochs) == 3


def test_a_film_for_a_notebook_brings_its_script():
    assert "<script>" in animate_heads(course())._repr_html_()


# Colours


def test_heads_have_colours_that_stand_out_from_their_paper():
    for colors, paper in ((HEADS, "#ffffff"), (HEADS_DARK, "#15171a")):
        assert len(set(colors)) == 9
        for color in colors:
            assert contrast(color, paper) >= 3  # what WCAG asks of graphics


def test_colours_of_kernels_are_white_at_zero_and_symmetric_in_strength():
    values = torch.arange(-15, 16) / 5
    colors = diverging(values, 3.0)
    assert colors.min() >= 0
    assert colors.max() <= 1
    assert colors[15].tolist() == [1.0, 1.0, 1.0]
    assert (colors[:15, 2] > colors[:15, 0]).all()  # blue takes away
    assert (colors[16:, 0] > colors[16:, 2]).all()  # red adds
    light = colors.mean(-1)
    assert (light[:15].diff() > 0).all()
    assert (light[16:].diff() < 0).all()
    assert torch.equal(diverging(torch.tensor([9.0]), 3.0), diverging(torch.tensor([3.0]), 3.0))


def test_more_weight_is_bluer_on_ink_and_on_paper():
    for ink in (0.0, 1.0):
        shades = overlay(torch.full((1, 5), ink), torch.linspace(0, 1, 5)[None])[0]
        assert ((shades[:, 2] - shades[:, 0]).diff() > 0).all()


def test_a_png_can_be_read_again():
    from PIL import Image

    pixels = torch.rand(3, 5, 4, generator=torch.Generator().manual_seed(0))
    for channels, mode in ((3, "RGB"), (4, "RGBA")):
        with Image.open(io.BytesIO(encode_png(pixels[..., :channels]))) as image:
            assert image.mode == mode
            assert image.size == (5, 3)
            read = torch.tensor(list(image.tobytes())).view(3, 5, channels)
        assert torch.equal(read, (255 * pixels[..., :channels]).round().long())


def contrast(one: str, other: str) -> float:
    """The ratio of luminances, as WCAG 2 defines it."""
    first, second = sorted((luminance(one), luminance(other)), reverse=True)
    return (first + 0.05) / (second + 0.05)


def luminance(color: str) -> float:
    parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_a_picture_has_a_caption():
    assert isinstance(show(Quadratic(2, grid=(5, 7))), Picture)
    assert repr(show(Quadratic(2, grid=(5, 7)))).startswith("Picture(Attention positions")
