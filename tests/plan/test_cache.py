"""Plans are remembered, within bounds."""

import torch

from regard import Causal, Padding, Window, attend, plan
from regard.backends.tiles import PROGRAM_LIMIT, program
from regard.plan.cache import keep


def test_what_is_used_often_stays_and_what_is_old_leaves():
    made = []

    @keep(100, lambda number: 40)
    def make(number):
        made.append(number)
        return number

    for number in (1, 2, 1, 3, 1, 2):
        assert make(number) == number
    # Two of weight 40 fit into 100: asking for 3 sent 2 away, and 1 was used in between.
    assert made == [1, 2, 3, 2]


def test_one_thing_heavier_than_the_limit_is_kept_until_the_next():
    calls = []

    @keep(10, lambda _: 99)
    def make(number):
        calls.append(number)
        return number

    make(1)
    make(1)
    make(2)
    make(1)
    assert calls == [1, 2, 1]


def test_a_new_batch_of_lengths_at_every_step_does_not_pile_up():
    x = torch.randn(8, 1, 256, 4)
    generator = torch.Generator().manual_seed(0)
    program.cache_clear()
    for _ in range(30):
        lengths = torch.randint(1, 257, (8,), generator=generator)
        attend(x, x, x, pattern=Causal() & Padding(lengths), backend="blocked")
    held = sum(weight for _, weight in program.kept.values())
    assert 0 < held <= PROGRAM_LIMIT
    real = sum(
        group.query.nbytes + group.key.nbytes + (0 if group.masks is None else group.masks.nbytes)
        for groups, _ in program.kept.values()
        for group in groups
    )
    assert real <= held


def test_equal_questions_get_the_same_plan_object():
    assert plan(Window(5, 2), 90) is plan(Window(5, 2), 90)
    assert plan(Window(5, 2), 90, block=32) is not plan(Window(5, 2), 90)
