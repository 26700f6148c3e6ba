"""Random attentions for the operator: every backend is held to the dense oracle, output and gradients.

A case is told by its seed alone. A failure prints the line that repeats it:

    PYTHONPATH=tests python -m operator_cases --seed 4711 --cases 1
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from dense import attend_densely, mask_of, scores_of
from operator_draws import FEATURES, Case
from torch import Tensor

from regard import BackendError, TransformerXL
from regard.backends import choose, find
from regard.biases import Bias

BACKENDS = ("reference", "blocked", "native", "sdpa", "linear", "positional", "auto")
HALVES_WEIGHTS = ("sdpa", "flex")  # torch's kernels round weights to the dtype of the inputs
INFERENCE_PATHS = ("blocked", "native", "linear")  # run otherwise where no gradient is wanted
UPSTREAM = 4.0  # the largest gradient that comes from above
CASTS = 4  # how often a gradient may be rounded to its own dtype: cast, and added up over group, batch and strides


@dataclass
class Truth:
    """What the oracle says, and what bounds on rounding errors are made of.

    `slopes` says how far an error of one in all weights, relative to each, moves a result at most. `spread` is the sum
    of sizes of what is added up to a gradient when it was broadcast.
    """

    output: Tensor
    grads: dict[str, Tensor]
    spread: dict[str, Tensor]
    slopes: dict[str, float]
    weight_error: dict[str, float]  # in units of eps


def truth_of(case: Case, grad_output: Tensor) -> Truth:
    leaves, full = {}, {}
    batch, square = case.batch, (*case.batch, case.heads, case.queries, case.keys)
    for name, given in case.inputs.items():
        leaves[name], view = given.ready(torch.float64)
        if name == "bias":
            full[name] = view.expand(square)
        else:
            view = view.expand(*batch, *view.shape[-3:])
            full[name] = view.repeat_interleave(case.heads // view.shape[-3], dim=-3)
    parameters = {}
    if isinstance(case.bias, Bias):
        for name, parameter in case.bias.named_parameters():
            parameters[f"bias.{name}"] = parameter.detach().double().requires_grad_(parameter.requires_grad)
    query, key, value = (full[name] for name in ("query", "key", "value"))
    mask = mask_of(case.pattern, math.prod(batch), case.queries, case.keys).reshape(*batch, 1, case.queries, case.keys)
    default = 1.0 if case.features else 1 / math.sqrt(case.dim or 1)
    beta = default if case.scale is None else case.scale
    position, reads = full.get("bias"), beta != 0
    if isinstance(case.bias, Bias):
        clean = [torch.where(torch.isfinite(x), x, 0.0) for x in (query, key)]
        learned = {name.removeprefix("bias."): parameter for name, parameter in parameters.items()}
        position = scores_of(case.bias, learned, case.queries, case.keys, clean[0], clean[1])
        reads = reads or isinstance(case.bias, TransformerXL)
    found = attend_densely(
        query,
        key,
        value,
        mask,
        beta,
        position,
        None if case.features is None else FEATURES[case.features],
        reads_content=reads,
        dtype=torch.float64 if case.dtype == torch.float64 else torch.float32,
    )
    grads, spread = _gradients(found.output, leaves, full, parameters, grad_output)
    slopes, weight_error = _slopes(case, full, beta, found.largest_score, parameters)
    return Truth(found.output.detach(), grads, spread, slopes, weight_error)


def _gradients(output, leaves, full, parameters, grad_output) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of all that learns, and the sums of the sizes of what they are added up from."""
    grads, spread = {}, {}
    wanted = {name: full[name] for name, leaf in leaves.items() if leaf.requires_grad}
    wanted |= {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if not wanted:
        return grads, spread
    answers: tuple[Tensor | None, ...] = (None,) * len(wanted)
    if output.requires_grad:
        answers = torch.autograd.grad(output, list(wanted.values()), grad_output.double(), allow_unused=True)
    for (name, tensor), grad in zip(wanted.items(), answers, strict=True):
        grad = torch.zeros_like(tensor) if grad is None else grad
        if name in leaves:
            added = (torch.autograd.grad(tensor, leaves[name], part, retain_graph=True) for part in (grad, grad.abs()))
            (grads[name],), (spread[name],) = added
        else:
            grads[name], spread[name] = grad, grad.abs()
    return grads, spread


def _slopes(case: Case, full: dict[str, Tensor], beta: float, largest: float, parameters: dict):
    """From errors of weights to errors of results, and the errors of weights; see `catalog.bounds`.

    A score is a sum of `dim` products, so that its error is `dim + 2` times eps times the sizes of its terms. A weight
    is wrong by twice that of the largest score, and by the sum over the keys. A result adds up as many numbers as it
    is broadcast to, each wrong by as much as its weights.
    """
    size, copies = {}, {}
    for name, tensor in full.items():
        finite = tensor.detach()[torch.isfinite(tensor)]
        size[name] = float(finite.abs().max()) if finite.numel() else 1.0
        given = case.inputs[name]
        copies[name] = given.copies * tensor.numel() / max(1, given.view(given.leaf).numel())
    huge = max(size["query"], size["key"]) > 1e20
    scale = 1.0 if math.isinf(beta) else abs(beta)
    terms = largest if huge else scale * case.dim * size["query"] * size["key"] + largest
    error = 2 * (case.dim + 2) * (terms + 8) + case.keys + 16
    # The slope of a score is its weight times a difference of two products of `value_dim` numbers.
    score = 8 * UPSTREAM * case.value_dim * size["value"]
    if case.features or isinstance(case.bias, Bias):  # features and biases that read content have slopes of their own
        reach = {name: (scale + 1) * (size[name] + 1) for name in ("query", "key")}
    else:
        reach = {name: 0.0 if math.isinf(beta) else scale * size[name] for name in ("query", "key")}
    slopes = {
        "output": size["value"],
        "query": score * reach["key"] * copies["query"],
        "key": score * reach["query"] * case.queries * copies["key"],
        "value": UPSTREAM * case.queries * copies["value"],
    }
    errors = {name: error + case.queries + copies.get(name, 0.0) for name in slopes} | {"output": error}
    if "bias" in full:
        slopes["bias"], errors["bias"] = score * copies["bias"], error + copies["bias"]
    pairs = math.prod((case.rows, case.heads, case.queries, case.keys))
    far = (case.queries + case.keys + 12) ** 2 * (1 + size["query"]) * (1 + size["key"]) * max(1, case.dim)
    for name in parameters:
        slopes[name], errors[name] = score * pairs * far, error
    return slopes, errors


def check(case: Case, backends: tuple[str, ...] = BACKENDS) -> Counter[str]:
    """Hold every backend that accepts to the truth; what was compared, and how often."""
    compared: Counter[str] = Counter()
    request = case.request({name: given.ready()[1] for name, given in case.inputs.items()})
    accepts = {name: find(name).refuse(request) is None for name in backends if name != "auto"}
    if not any(accepts.values()):
        return compared
    generator = torch.Generator().manual_seed(case.upstream_seed)
    shape = (*case.batch, case.heads, case.queries, case.value_dim)
    grad_output = torch.randn(shape, generator=generator, dtype=torch.float64).clamp(-UPSTREAM, UPSTREAM).to(case.dtype)
    truth = truth_of(case, grad_output)
    outputs: dict[str, Tensor] = {}
    for backend in backends:
        leaves, views = {}, {}
        for name, given in case.inputs.items():
            leaves[name], views[name] = given.ready()
        if not accepts.get(backend, True):
            if case.seed % 20 == 0:
                _is_refused(case, views, backend)
            continue
        output = outputs[backend] = case.call(views, backend)
        compared[backend] += 1
        compared[f"{backend}, not finite"] += bool(truth.output.isnan().any())
        assert output.dtype == case.dtype, f"{backend}: {output.dtype}\n{case}"
        learns = bool(truth.grads)
        assert output.requires_grad == learns, f"{backend}: requires_grad is {output.requires_grad}\n{case}"
        same = outputs.get(choose(request).name) if backend == "auto" else None
        if same is not None:
            equal = (same == output) | (same.isnan() & output.isnan())
            assert bool(equal.all()), f"auto is not {choose(request).name}\n{case}"
            continue
        _compare(case, backend, "output", output, truth)
        if not learns:
            continue
        wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        if isinstance(case.bias, Bias):
            wanted |= {f"bias.{name}": p for name, p in case.bias.named_parameters() if p.requires_grad}
        grads = torch.autograd.grad(output, list(wanted.values()), grad_output, allow_unused=True)
        for (name, leaf), grad in zip(wanted.items(), grads, strict=True):
            assert grad is not None, f"{backend}: no gradient of {name}\n{case}"
            assert grad.dtype == leaf.dtype
            _compare(case, backend, name, grad, truth)
        compared[f"{backend}, gradient"] += 1
        if backend in INFERENCE_PATHS:
            with torch.no_grad():
                _compare(case, backend, "output", case.call(views, backend), truth)
    return compared


def _is_refused(case: Case, views: dict[str, Tensor], backend: str) -> None:
    with pytest.raises(BackendError, match="cannot run this attention"):
        case.call(views, backend)


def _compare(case: Case, backend: str, name: str, found: Tensor, truth: Truth) -> None:
    expected = truth.output if name == "output" else truth.grads[name]
    where = f"{backend}: {name} of seed {case.seed}"
    assert found.shape == expected.shape, f"{where} has shape {tuple(found.shape)}, not {tuple(expected.shape)}\n{case}"
    stored = torch.finfo(found.dtype).eps / 2
    found = found.detach().double()
    lost, nan = ~torch.isfinite(found), ~torch.isfinite(expected)
    assert torch.equal(lost, nan), f"{where}: {int(lost.sum())} not finite, expected {int(nan.sum())}\n{case}"
    computed = torch.finfo(torch.float64 if case.dtype == torch.float64 else torch.float32).eps
    error = computed * truth.weight_error[name]
    if backend in HALVES_WEIGHTS:
        error += torch.finfo(case.dtype).eps / 2
    # What is broadcast is rounded before it is added up, and after.
    rounded = stored * expected.abs() if name == "output" else CASTS * stored * truth.spread[name]
    limit = 1.01 * (error * truth.slopes[name] + rounded)
    difference, limit = (torch.where(nan, 0.0, x).flatten() for x in ((found - expected).abs(), limit))
    if not bool((difference <= limit).all()):
        worst = int((difference - limit).argmax())
        raise AssertionError(f"{where} is off by {difference[worst]:.3g}, bound {limit[worst]:.3g}\n{case}")


def run(
    first: int, cases: int, stop: bool = True, backends: tuple[str, ...] = BACKENDS
) -> tuple[list[str], Counter[str]]:
    """Check so many seeds from `first` on: the failures (or the first one raised), and what was compared how often."""
    failures: list[str] = []
    compared: Counter[str] = Counter()
    for number, seed in enumerate(range(first, first + cases)):
        if not stop and number and number % 1000 == 0:
            print(f"{number} cases, {len(failures)} failures", flush=True)
        case = None
        try:
            case = Case(seed)
            compared += check(case, backends)
        except Exception as error:
            if stop:
                raise
            failures.append(
                f"{type(error).__name__}: {error}" + ("" if "replay" in str(error) else f"\n{case or seed}")
            )
            print(failures[-1], flush=True)
    return failures, compared


def main() -> None:
    parser = argparse.ArgumentParser(description="Hold the operator's backends to a dense oracle.")
    parser.add_argument("--seed", type=int, default=0, help="the first case")
    parser.add_argument("--cases", type=int, default=1000, help="how many")
    parser.add_argument("--backends", nargs="+", default=BACKENDS, help="'flex' takes a second for each case")
    given = parser.parse_args()
    failures, compared = run(given.seed, given.cases, given.cases == 1, tuple(given.backends))
    print("compared:", ", ".join(f"{name} {count}" for name, count in sorted(compared.items())))
    print(f"{given.cases} cases from seed {given.seed}, {len(failures)} failures")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
