"""Comparison of two implementations of one model: weights large enough to distinguish them, and the tolerance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

# Of the largest number of a tensor. Two orders of summation differ by some hundred roundings in models this small; a
# wrong constant (an epsilon, a scale, GELU's approximation) moves results by far more than the tighter bound.
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4}


@torch.no_grad()
def shaken(module: nn.Module, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """The module with random numbers in all its parameters, biases and norms included, so that each one matters."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.to(torch.float64).parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        # Matrices that keep the size of what they multiply; norms and biases around what they start with.
        spread = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
        parameter.copy_(noise * spread + (0 if parameter.ndim > 1 else parameter))
    return module.to(dtype).eval()


def assert_agree(ours: Tensor, theirs: Tensor, bound: float | None = None, what: str = "output") -> None:
    """Equal to within `bound` of the largest number; BOUNDS says how far where nothing is given."""
    assert ours.shape == theirs.shape, f"{what}: {tuple(ours.shape)}, not {tuple(theirs.shape)}"
    assert ours.dtype == theirs.dtype, f"{what}: {ours.dtype}, not {theirs.dtype}"
    ours, theirs = ours.detach(), theirs.detach()
    bound = BOUNDS[ours.dtype] if bound is None else bound
    largest = float(theirs.abs().max())
    assert largest > 1e-3, f"{what}: nothing to compare, all numbers are below {largest:.1e}"
    apart = float((ours - theirs).abs().max()) / largest
    assert apart <= bound, f"{what}: apart by {apart:.1e} of {largest:.1e}, bound {bound:.1e}"


def assert_gradients_agree(model: nn.Module, theirs: Mapping[str, Tensor], bound: float | None = None) -> None:
    """Every parameter of the model has a gradient, and it is the one that the other model found."""
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert set(ours) == set(theirs)
    for name, gradient in ours.items():
        assert gradient is not None, name
        assert_agree(gradient, theirs[name], bound, f"gradient of {name}")


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """The gradient of each parameter, tied ones once; zeros where the loss does not look."""
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in module.named_parameters()
    }


@contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[None]:
    """What happens inside is refused, in words of ours and with its four parts (one of the first two is enough)."""
    with pytest.raises(kind) as caught:
        yield
    text = str(caught.value)
    assert "\n  asked " in text or "\n  found " in text, text
    for part in ("\n  because ", "\n  instead ", *words):
        assert part in text, f"{part!r} is missing in: {text}"
