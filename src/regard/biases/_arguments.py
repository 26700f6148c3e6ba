"""Validation of the constructor arguments of biases, and initialisation of their parameters."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.errors import BiasError

Grid = tuple[int, int]
Numbers = Tensor | Sequence[Any] | float


def make_error(owner: str, *, asked: str, found: str, because: str, instead: str) -> BiasError:
    return BiasError(f"{owner} cannot be built.", asked=asked, found=found, because=because, instead=instead)


def check_integer(owner: str, name: str, value: object, least: int, *, because: str, instead: str) -> int:
    """The integer `value`, refused when it is not one or is smaller than `least`."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < least:
        found = f"a {type(value).__name__}, not a whole number" if number is None else f"less than {least}"
        raise make_error(owner, asked=f"{name}={value!r}", found=found, because=because, instead=instead)
    return number


def check_heads(owner: str, heads: object) -> int:
    return check_integer(
        owner,
        "heads",
        heads,
        1,
        because="a bias gives one score per head and pair",
        instead="the attention's number of heads, or heads=1, which fits any number",
    )


def check_grid(owner: str, grid: Sequence[int] | None, start: int) -> tuple[Grid | None, int]:
    """The checked grid and the position of its first token."""
    first = check_integer(
        owner,
        "start",
        start,
        0,
        because="start counts the tokens in front of the grid, such as a class token",
        instead="start=0 when the grid begins with the first token",
    )
    if grid is None:
        if first:
            raise make_error(
                owner,
                asked=f"start={start!r} and no grid",
                found="a bias along one axis",
                because="start says where a grid begins; along one axis every position has its place",
                instead="grid=(rows, columns), or leave out start",
            )
        return None, 0
    try:
        sizes = tuple(operator.index(size) for size in grid if not isinstance(size, bool))
    except TypeError:
        sizes = ()
    if len(sizes) != 2 or min(sizes) < 1:
        raise make_error(
            owner,
            asked=f"grid={grid!r}",
            found="not two whole numbers of at least 1",
            because="a token's row and column follow from the numbers of rows and columns",
            instead="grid=(rows, columns), for instance grid=(14, 14)",
        )
    return (sizes[0], sizes[1]), first


def read_numbers(owner: str, name: str, value: Numbers, shape: tuple[int, ...], axes: str) -> Tensor:
    """`value` copied to float64, refused unless finite and of `shape`, whose axes are called `axes`."""
    try:
        given = torch.as_tensor(value, dtype=torch.float64, device="cpu")
        copy, found = given.detach().clone(), f"of shape {tuple(given.shape)}"
    except (TypeError, ValueError):
        copy, found = None, f"= {value!r}"
    if copy is None or tuple(copy.shape) != shape:
        *others, last = axes.split(", ")
        each = f"{', '.join(others)} and {last}" if others else last
        raise make_error(
            owner,
            asked=f"{name} {found}",
            found=f"({axes}) = {shape}",
            because=f"{name} has one number for each {each}",
            instead=f"{name} of shape {shape}",
        )
    if not bool(copy.isfinite().all()):
        raise make_error(
            owner,
            asked=f"{name}={copy.tolist()}",
            found="a number that is not finite",
            because="an infinite score has no gradient, and two of them differ by NaN",
            instead="a large finite number; a pattern, where pairs must not see each other at all",
        )
    return copy


def draw_normal(shape: tuple[int, ...], *, mean: float = 0.0, std: float, generator: torch.Generator | None) -> Tensor:
    """Normal samples in float64, so that one seed gives the same parameters in every dtype."""
    device = "cpu" if generator is None else generator.device
    if torch.get_default_device().type == "meta":  # a module that is built for its shapes
        device, generator = "meta", None
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device=device)
    return drawn * std + mean


def to_default_dtype(values: Tensor, dtype: torch.dtype | None, device: torch.device | str | None) -> Tensor:
    """`values` in the given dtype and device, or in torch's defaults."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    device = torch.get_default_device() if device is None else device
    return values.to(device=device, dtype=dtype)


def format_arguments(**arguments: object) -> str:
    """Format constructor arguments for `extra_repr`, without those that are `None`."""
    texts = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in arguments.items()}
    return ", ".join(f"{name}={value!r}" for name, value in texts.items() if value is not None)
