"""What a cache has to know of a pattern: is there a past to keep, how long is it, and may it be moved?"""

from __future__ import annotations

from regard.patterns.base import And, Not, Or, Pattern
from regard.patterns.grid import Axial, GridStride, GridWindow, Neighborhood
from regard.patterns.rows import Padding
from regard.patterns.sequence import Blocks, Causal, Full, Strided, Window


def has_past(pattern: Pattern) -> bool:
    """Whether tokens can be decoded one by one from a cache with the result of the whole sequence.

    That is so when every query sees only keys at or before it, `allows(i, j)` implies `j <= i`, and when what it sees
    does not change as later tokens are appended: `allows(i, j)` does not depend on the number of keys. The answer
    follows the structure of the pattern; `True` is a promise, `False` may be cautious.

    Appended tokens are real ones: the facts about a batch's rows grow with them. `Padding([3, 5], side="left")`, whose
    first real key stays where it is, counts as the same padding with `[4, 6]` after one more token, and `Segments`
    with one more id. `Random` draws from all keys there are, so it has a past only when `tokens` fixes how many.

        >>> from regard.patterns.past import has_past
        >>> has_past(Causal() & Axial((4, 6))), has_past(Window(4, 1)), has_past(Causal() & Random(2, 5))
        (True, False, False)
    """
    return _hides_future(pattern) and _settled(pattern)


def reach(pattern: Pattern) -> int | None:
    """How far back a query can see: no allowed pair has `i - j` larger than this; `None` when there is no limit.

    A rolling cache needs to keep `reach` keys before the query's own. An upper bound that follows the structure of
    the pattern: the smaller one for `&`, the larger one for `|`, no limit for `~`. Keys after the query do not count.

        >>> from regard.patterns.past import reach
        >>> reach(Causal() & Window(4, 9, step=3)), reach(Causal() & Blocks(6)), reach(Causal() & Strided(2))
        (12, 5, None)
    """
    if isinstance(pattern, And):
        return min((far for far in (reach(pattern.left), reach(pattern.right)) if far is not None), default=None)
    if isinstance(pattern, Or):
        left, right = reach(pattern.left), reach(pattern.right)
        return None if left is None or right is None else max(left, right)
    if isinstance(pattern, Window):
        return pattern.left * pattern.step
    if isinstance(pattern, Blocks):
        return pattern.size - 1
    return _reach_on_grid(pattern)


def shiftable(pattern: Pattern) -> bool:
    """Whether only the distance counts: `allows(i, j)` equals `allows(i + n, j + n)` for every shift `n`.

    Then positions may be counted from anywhere, as they are in a row that is padded on the left and in a cache that has
    dropped its oldest keys. True for `Full`, `Causal`, `Window`, `Strided` and what `&`, `|`, `~` make of them.

        >>> from regard.patterns.past import shiftable
        >>> shiftable(Causal() & ~Strided(3)), shiftable(Causal() & Blocks(6))
        (True, False)
    """
    if isinstance(pattern, And | Or):
        return shiftable(pattern.left) and shiftable(pattern.right)
    if isinstance(pattern, Not):
        return shiftable(pattern.pattern)
    return isinstance(pattern, Full | Causal | Window | Strided)


def _hides_future(pattern: Pattern) -> bool:
    """Whether surely no pair with `j > i` is allowed."""
    if isinstance(pattern, And):
        return _hides_future(pattern.left) or _hides_future(pattern.right)
    if isinstance(pattern, Or):
        return _hides_future(pattern.left) and _hides_future(pattern.right)
    if isinstance(pattern, Not):
        return _shows_future(pattern.pattern)
    if isinstance(pattern, Window):
        return pattern.right == 0
    return isinstance(pattern, Causal)


def _shows_future(pattern: Pattern) -> bool:
    """Whether surely every pair with `j > i` is allowed: the mirror image that `~` needs."""
    if isinstance(pattern, And):
        return _shows_future(pattern.left) and _shows_future(pattern.right)
    if isinstance(pattern, Or):
        return _shows_future(pattern.left) or _shows_future(pattern.right)
    if isinstance(pattern, Not):
        return _hides_future(pattern.pattern)
    return isinstance(pattern, Full)


def _settled(pattern: Pattern) -> bool:
    """Whether a pair, once allowed or not, stays so when tokens are appended."""
    if isinstance(pattern, And | Or):
        return _settled(pattern.left) and _settled(pattern.right)
    if isinstance(pattern, Not):
        return _settled(pattern.pattern)
    return isinstance(pattern, Padding) or not pattern._needs_keys


def _reach_on_grid(pattern: Pattern) -> int | None:
    """Whole rows up, and columns to the left, of the farthest token that a token of a grid sees."""
    if isinstance(pattern, Axial):
        rows, columns = pattern.grid
        return max((rows - 1) * columns, columns - 1)
    if isinstance(pattern, Neighborhood):
        # A neighbourhood that moves inwards at the edge reaches twice as far from there.
        sides = 2 if pattern.edges == "shift" else 1
        up, left = (
            _multiple(pattern.step, size - 1, sides * r) for size, r in zip(pattern.grid, pattern.radii, strict=True)
        )
    elif isinstance(pattern, GridWindow):
        height, width, *_ = pattern._sides
        up, left = min(height, pattern.grid[0]) - 1, min(width, pattern.grid[1]) - 1
    elif isinstance(pattern, GridStride):
        up, left = (_multiple(step, size - 1) for size, step in zip(pattern.grid, pattern.steps, strict=True))
    else:
        return None
    return up * pattern.grid[1] + left


def _multiple(step: int, room: int, most: int | None = None) -> int:
    """The largest multiple of `step` within `room`, at most `most` steps."""
    steps = room // step
    return step * (steps if most is None else min(steps, most))
