"""Validation of the constructor arguments of patterns."""

from __future__ import annotations

import operator

from regard.errors import PatternError
from regard.patterns.box import Grid, Lengths

# Positions are 64-bit integers: beyond these, sums of a position and an argument would wrap around.
LONGEST = 1 << 62  # along a sequence
LONGEST_AXIS = 1 << 31  # along one axis of a grid, so that rows times columns is at most LONGEST


def check_integer(owner: str, name: str, value: object) -> int:
    """The value as an `int`, or an error that names the argument."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise PatternError(
            f"{owner} needs integers.",
            asked=f"{name}={value!r}",
            because=f"{name} counts tokens or names positions, and {type(value).__name__} is not an integer",
            instead=f"{name}=3, say",
        ) from None


def set_integer(pattern: object, name: str, value: object, least: int, most: int = LONGEST) -> None:
    """Store an argument as an `int`; raise unless it is one from `least` to `most`."""
    owner = type(pattern).__name__
    number = check_integer(owner, name, value)
    if number < least:
        raise PatternError(
            f"{owner} cannot have {name}={number}.",
            asked=f"{name}={number}",
            because=f"{name} must be at least {least}",
            instead=f"{name}={least} or more",
        )
    check_at_most(owner, name, number, most)
    object.__setattr__(pattern, name, number)


def check_at_most(owner: str, name: str, number: int, most: int) -> None:
    """Raise for a number with which positions would overflow."""
    if number > most:
        raise PatternError(
            f"{owner} cannot have {name}={number}.",
            asked=f"{name}={number}",
            because=f"no sequence is that long: positions are 64-bit integers, and {name} is at most {most}",
            instead="the length of the longest sequence reaches everything, too; Causal() or Full() for no limit",
        )


def set_pair(pattern: object, name: str, value: object, least: int) -> None:
    """Store one number for both axes, or two, as `(row, column)`."""
    owner = type(pattern).__name__
    both = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(both) != 2:
        raise PatternError(
            f"{owner} needs one number for both axes, or two.",
            asked=f"{name}={value!r}",
            because="a grid has rows and columns",
            instead=f"{name}=3 or {name}=(3, 5)",
        )
    numbers = tuple(check_integer(owner, name, number) for number in both)
    if min(numbers) < least:
        raise PatternError(
            f"{owner} cannot have {name}={value!r}.",
            asked=f"{name}={value!r}",
            because=f"each axis of {name} must be at least {least}",
            instead=f"{name}={least} or more",
        )
    check_at_most(owner, name, max(numbers), LONGEST_AXIS)
    object.__setattr__(pattern, name, numbers)


def check_grid_fits(pattern: object, grid: Grid, lengths: Lengths) -> None:
    """Raise for more tokens than the grid has cells: the extra ones would silently see nothing."""
    if lengths.keys > grid.start + grid.cells:
        extra = lengths.keys - grid.cells
        raise PatternError(
            f"{type(pattern).__name__} does not fit the sequence.",
            asked=f"a grid of {grid.rows} x {grid.columns} = {grid.cells} tokens from position {grid.start}",
            found=f"{lengths.queries} queries and {lengths.keys} keys",
            because=f"{lengths.keys - grid.start - grid.cells} tokens lie beyond the grid",
            instead=f"the grid of your feature map; start={extra} if the sequence opens with {extra} other tokens",
        )
