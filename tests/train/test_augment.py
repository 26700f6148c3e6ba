"""Changed images: moved, mirrored, turned and stretched, by hand and by the same draw every time."""

import pytest
import torch

from regard.train.data.augment import Augmentation

IMAGE = torch.arange(1.0, 36).reshape(1, 1, 5, 7)


def drawn(row=0.0, column=0.0, flip=0.0, angle=0.0, taller=0.0, wider=0.0):
    return torch.tensor([[row, column, flip, angle, taller, wider]])


def test_nothing_drawn_is_nothing_changed():
    for augmentation in (Augmentation(), Augmentation(shift=2, flip=True), Augmentation(0.5, 10, 0.1)):
        assert torch.allclose(augmentation.apply(IMAGE, drawn()), IMAGE, atol=2e-5)


def test_whole_shifts_move_pixels_and_bring_in_zeros():
    moved = Augmentation(shift=2).apply(IMAGE, drawn(2, -1))
    assert torch.equal(moved[0, 0, 2:, :-1], IMAGE[0, 0, :-2, 1:])
    assert not moved[0, 0, :2].any()
    assert not moved[0, 0, :, -1].any()


def test_warped_shifts_agree_with_whole_ones():
    expected = Augmentation(shift=2).apply(IMAGE, drawn(1, -2, flip=1))
    assert torch.allclose(Augmentation(2, 10, flip=True).apply(IMAGE, drawn(1, -2, flip=1)), expected, atol=2e-5)
    half = Augmentation(shift=0.5).apply(IMAGE, drawn(0.0, 0.5))
    assert torch.allclose(half[0, 0, :, 1:], (IMAGE[0, 0, :, 1:] + IMAGE[0, 0, :, :-1]) / 2, atol=2e-5)


def test_mirroring_exchanges_left_and_right():
    assert torch.equal(Augmentation(flip=True).apply(IMAGE, drawn(flip=1)), IMAGE.flip(-1))


def test_a_quarter_turn_on_pixels_that_are_square():
    dot = torch.zeros(1, 1, 5, 7)
    dot[0, 0, 2, 5] = 1.0  # two right of the middle
    turned = Augmentation(turn=90).apply(dot, drawn(angle=90))
    place = divmod(int(turned.flatten().argmax()), 7)
    assert place in ((0, 3), (4, 3))
    assert abs(turned.max().item() - 1) < 1e-5


def test_a_stretch_shows_more_of_what_lies_outside():
    white = torch.ones(1, 1, 6, 10)
    wide = Augmentation(stretch=0.9).apply(white, drawn(wider=0.9))
    assert wide[0, 0, 3, 0] == 0
    assert wide[0, 0, 3, 5] == 1
    assert torch.allclose(wide[0, 0, 0], wide[0, 0, 5], atol=1e-5)


@pytest.mark.parametrize("augmentation", [Augmentation(4, flip=True), Augmentation(0.5, 10, 0.1)])
def test_draws_stay_within_their_limits_reach_them_and_repeat(augmentation):
    first, again = (augmentation.draw(3001, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, again)
    limits = torch.tensor([augmentation.shift] * 2 + [1.0, augmentation.turn] + [augmentation.stretch] * 2)
    limits[2] *= augmentation.flip
    assert bool((first.abs() <= limits).all())
    assert bool((first.abs().amax(0) >= 0.99 * limits).all())
    assert bool((first.mean(0)[[0, 1, 3, 4, 5]].abs() <= limits[[0, 1, 3, 4, 5]] * 0.05).all())
    changed = augmentation.apply(torch.rand(3001, 3, 5, 7), first)
    assert changed.shape == (3001, 3, 5, 7)
    assert bool((changed >= 0).all())
    assert bool((changed <= 1 + 1e-6).all())
