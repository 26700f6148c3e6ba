"""L20: position tables are computed in full precision and rounded last."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from regard.adapters.base import Adapter
from regard.adapters.dispatch_mode import HigherOrderDispatchMode
from regard.adapters.operator import OperatorAdapter
from regard.adapters.precision import perturb_parameters
from regard.adapters.rng import Rng
from regard.laws.law import Case, Law, Observation, expect_true

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# Positions whose tables even half precision gets right.
NEAR = 8
# The tolerance, in differences of float64 outputs for inputs that are moved by one rounding: every step of a
# computation rounds once more.
SAFETY = 4.0
# Weights below this have no digits left in float16.
FAINT = 1e-4
# An angle above this, rounded to half precision, is wrong by many of the roundings that its sine would have suffered.
WIDE = 64.0


class TablePrecisionLaw(Law):
    id = "L20"
    slug = "table-precision"
    title = "Table precision law"
    headline = "far positions are wrong in half precision."
    statement = (
        "In half precision the output at distant positions is that of float64 with the same rounded inputs and "
        "parameters, up to rounding: frequencies, angles and distances keep their precision; finished tables are "
        "rounded."
    )
    equation = "y_half(x)_t = y(round(x))_t + O(eps),  the same O for every position t"
    catches = (
        "rotary angles, sinusoids and linear biases computed in float16 or bfloat16; frequencies cast with the model"
    )
    needs = ("lengths",)
    smallest = {"batch": 1, "tokens": 301}
    kinds = ("precision", "tokens", "size")
    minimum = 4

    def cases(self, subject: Adapter, fast: bool) -> Iterator[Case]:
        for tokens in subject.lengths(701, 307) if fast else subject.lengths(701, 307, 1201):
            for precision in HALVES:
                yield {"batch": 1, "tokens": tokens, "precision": precision, "size": 1}
                if "float" in subject.abilities:
                    yield {"batch": 1, "tokens": tokens, "precision": precision, "size": 3}
        if isinstance(subject, OperatorAdapter) and not fast:
            for precision in HALVES:
                yield {"batch": 1, "tokens": 2053, "precision": precision, "size": 3}

    @torch.no_grad()
    def observe(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        if subject.dtype != subject.native:
            return  # checked once, in the subject's own precision
        half, double = subject.at(HALVES[str(case["precision"])]), subject.at(torch.float64)
        for view in dict.fromkeys(view for view in (subject, half) if view is not None):
            yield from self._observe_angles(view, int(case["tokens"]), rng)
        if half is None or double is None or half is subject or _ignores_positions(double):
            return
        words = {"changed": f"the precision: {case['precision']}"}
        if isinstance(subject, OperatorAdapter):
            yield from self._observe_operator(half, double, case, rng, words)
        else:
            yield from self._observe_tokens(half, double, case, rng, words)

    def _observe_angles(self, subject: Adapter, tokens: int, rng: Rng) -> Iterator[Observation]:
        """No sine or cosine of a wide angle that has been rounded to half precision."""
        x = subject.draw(1, tokens, rng)
        with _Angles(tokens) as angles:
            subject.run(x)
        words = f"takes sines of angles up to {angles.largest:.0f} that were rounded to {angles.worst}"
        yield expect_true(angles.worst is None, words, output="a table", changed="nothing but the length")

    def _observe_operator(self, half: Any, double: Any, case: Case, rng: Rng, words: dict) -> Iterator[Observation]:
        tokens, start = int(case["tokens"]), min(int(case["tokens"]), 2 * NEAR)
        query, key, value = half.tensors(rng, int(case["batch"]), tokens, tokens)
        query = query * float(case["size"])
        near, far = slice(0, start), slice(tokens - start, tokens)
        try:  # few queries are enough
            first = tuple(tensor[:, :, near] for tensor in (query, key, value))
            close = _compare_with_rounding(*_measure_error(double.attend, half.attend, first, None, rng))
            error, spread = _measure_error(double.attend, half.attend, (query[:, :, far], key, value), None, rng)
        except Exception:  # it needs as many queries as keys
            error, spread = _measure_error(double.attend, half.attend, (query, key, value), None, rng)
            close = _compare_with_rounding(error[:, :, near], spread[:, :, near])
            error, spread = error[:, :, far], spread[:, :, far]
        yield _expect_few_roundings(close, error, spread, "output", words)

    def _observe_tokens(
        self, half: Adapter, double: Adapter, case: Case, rng: Rng, words: dict
    ) -> Iterator[Observation]:
        tokens = int(case["tokens"])
        start = min(tokens, 2 * NEAR)
        x = half.draw(int(case["batch"]), tokens, rng)
        if x.is_floating_point():
            x = x * float(case["size"])
        reference = _copy_parameters(double, half)
        error, spread = _measure_error(reference.run, half.run, (x,), reference.target, rng)
        close = 0.0
        if "aligned" in half.abilities:
            close = _compare_with_rounding(error[:, :NEAR], spread[:, :NEAR])
            error, spread = error[:, -start:], spread[:, -start:]
        yield _expect_few_roundings(close, error, spread, "output", words)
        found = reference.weights(x.to(reference.dtype) if x.is_floating_point() else x)
        if not found:
            return
        positive = found[0] > FAINT

        def scores(view: Adapter) -> Callable[[Tensor], Tensor]:
            # The logarithm of a weight is a score, up to one number for each row; it shows an angle at once.
            # Later layers see what earlier ones have rounded.
            def run(x: Tensor) -> Tensor:
                # Which weights are small is decided once: at the threshold two precisions would not agree.
                logs = torch.where(positive, view.weights(x)[0].double().clamp_min(FAINT**2).log(), 0.0)
                return torch.where(positive, logs - logs.sum(-1, keepdim=True) / positive.sum(-1, keepdim=True), 0.0)

            return run

        error, spread = _measure_error(scores(reference), scores(half), (x,), reference.target, rng, half.dtype)
        close = _compare_with_rounding(error[:, :, 1:NEAR], spread[:, :, 1:NEAR])
        yield _expect_few_roundings(close, error[:, :, -start:], spread[:, :, -start:], "the score", words)


def _measure_error(
    wide: Callable[..., Tensor],
    narrow: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    module: Any,
    rng: Rng,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The error of half precision, and the change of the float64 output for inputs moved by one rounding."""
    output = narrow(*inputs)
    eps = torch.finfo(dtype or output.dtype).eps
    doubled = [x.double() if x.is_floating_point() else x for x in inputs]
    expected = wide(*doubled)
    spread = torch.zeros_like(expected)
    for _ in range(3):
        back = perturb_parameters(module, eps / 2, rng)
        near = [x * (1 + eps / 2 * rng.normal(*x.shape)) if x.is_floating_point() else x for x in doubled]
        spread += (wide(*near) - expected).square() / 3
        back()
    spread += (eps / 2 * expected).square()
    return expected - output.double(), spread.sqrt()


def _compare_with_rounding(error: Tensor, spread: Tensor) -> float:
    """The error, in units of what one rounding does, both as root mean squares."""
    if not error.isfinite().all() or not spread.isfinite().all():
        return 0.0  # outputs that are not finite are covered by `range`
    return float(error.square().mean().sqrt() / (spread.square().mean().sqrt() + 1e-30))


def _expect_few_roundings(close: float, error: Tensor, spread: Tensor, name: str, words: dict) -> Observation:
    """The far positions may be off by a few roundings, and by a few times what the near ones are."""
    far, bound = _compare_with_rounding(error, spread), max(SAFETY, 3 * close)
    effect = f"is off by {far:.1f} roundings at the last positions and by {close:.1f} at the first, bound {bound:.1f}"
    return expect_true(far <= bound, effect, output=name, **words)


def _copy_parameters(double: Adapter, half: Adapter) -> Adapter:
    """The subject in float64 with its own exact tables, and the parameters of the one in half precision."""
    if not isinstance(double.target, nn.Module):
        return double
    reference = copy.copy(double)
    reference.target = copy.deepcopy(double.target)
    rounded = dict(half.target.named_parameters())
    for name, parameter in reference.target.named_parameters():
        parameter.copy_(rounded[name])
    reference._rebind(double)
    return reference


def _ignores_positions(double: Adapter) -> bool:
    """Whether the output of the last token is independent of the order of those before it."""
    rng = Rng(0, "positions")
    tokens = double.lengths(11)[0]
    if tokens < 3:
        return True
    x = double.draw(2, tokens, rng)
    order = torch.cat([torch.arange(tokens - 1).roll(1), torch.tensor([tokens - 1])])
    if isinstance(double, OperatorAdapter):
        query, key, value = double.parted(x)
        before = double.attend(query, key, value)[:, :, -1]
        after = double.attend(query, key[:, :, order], value[:, :, order])[:, :, -1]
    else:
        before, after = double.run(x), double.run(x[:, order])
        if "aligned" in double.abilities:
            before, after = before[:, -1], after[:, -1]
    return bool(torch.allclose(before, after, 1e-7, 1e-7))


class _Angles(HigherOrderDispatchMode):
    """Watches for sines and cosines of wide angles that have no more digits than bfloat16.

    A position above 256 has more digits than that, and so has its product with any frequency.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.worst: str | None = None
        self.largest = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").split(".")[0].rstrip("_")
        if name in ("sin", "cos") and isinstance(args[0], Tensor) and args[0].is_floating_point():
            angle = args[0].detach()
            largest = float(angle.abs().max()) if angle.numel() else 0.0
            if largest > WIDE and self.tokens > 300 and self.tokens in angle.shape:
                rounded = angle.to(torch.bfloat16).to(angle.dtype)
                if bool((rounded == angle).all()):
                    self.worst, self.largest = "bfloat16", largest
        return self.call(func, args, kwargs)
