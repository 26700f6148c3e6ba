"""A counterexample as one file of plain torch: it makes the target, calls it as the law did, and compares.

The file imports the target and torch, and nothing of Regard. It ends with 1 while the law is broken and with 0 once it
is not. What was written is run once in this process before it is given out; what does not reproduce is not given out.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from regard.adapters import copies
from regard.adapters.base import Adapter
from regard.laws.compare import FACTOR, Finding, compare
from regard.laws.law import Law, Observation
from regard.laws.recording import Inexpressible, RecordedFunction, Recording
from regard.laws.script_lines import ScriptWriter
from regard.laws.script_target import TargetSource, find_source
from regard.laws.verdict import Origin, Verdict

HEADER = '''"""{title}

{story}
This file needs torch and the code under test. It ends with 1 while the law is broken, and with 0 once it holds.
"""
'''

HELPERS = {
    "copy_of": '''
def copy_of(value):
    """Another instance; of a function, one that is loaded anew."""
    return {fresh}
''',
    "set_attribute": """
def set_attribute(module, name, value):
    part, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(part), attribute, value)
""",
    "unpack": """
def unpack(text, dtype, shape):
    import base64
    import zlib

    return torch.frombuffer(bytearray(zlib.decompress(base64.b85decode(text))), dtype=dtype).reshape(shape)
""",
    "gradient_of": """
def gradient_of(leaf):
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
""",
    "fast_path_off": """
@contextmanager
def fast_path_off():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
""",
    "filled_memory": '''
@contextmanager
def filled_memory():
    """Memory that was not written yet holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
''',
    "widened": '''
class Widened(torch.overrides.TorchFunctionMode):
    """Constants of a function that are float32 are met as float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        kwargs = dict(kwargs or {})
        writes = name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))
        writes = writes or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
        widen = lambda t: t.double() if t.dtype in (torch.float32, torch.float16, torch.bfloat16) else t
        rest = torch.utils._pytree.tree_map_only(torch.Tensor, widen, args[1:] if writes else args)
        out = kwargs.pop("out", None)
        kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, widen, kwargs) | ({} if out is None else {"out": out})
        return func(*((args[0], *rest) if writes else rest), **kwargs)


def widen(function):
    def widened(*args, **kwargs):
        with Widened():
            return function(*args, **kwargs)

    return widened
''',
}

COMPARE = '''

def compare(expected, actual, where, bound):
    """The largest difference where both should agree; NaN in one of them alone is an infinite difference."""
    if expected.shape != actual.shape:
        print(f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
        return 1
    expected, actual = expected.detach().double(), actual.detach().double()
    same = (expected == actual) | (expected.isnan() & actual.isnan())
    apart = torch.where(same, 0.0, (expected - actual).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    if where is not None:
        apart = apart.masked_fill(~where.reshape(where.shape + (1,) * (apart.ndim - where.ndim)), 0.0)
    place = torch.unravel_index(apart.argmax(), apart.shape)
    print(f"{name}[{', '.join(str(int(i)) for i in place)}]: expected {float(expected[place]):.6e},"
          f" found {float(actual[place]):.6e}; differ by {float(apart.max()):.1e}, bound {bound:.1e}")
    return int(float(apart.max()) > bound)
'''


# How often a target that is random is run again.
ATTEMPTS = 8


class NotSeenAgain(Inexpressible):
    """The same case did not break the law in another instance."""


@dataclass
class Recorded:
    """The worst comparison of a counterexample, with the steps before it and the names that its tensors had then."""

    recording: Recording
    count: int
    finding: Finding
    names: dict[str, Any]


def write_first(verdicts: Iterable[Verdict], replays: Iterable[str], target: str = "", seed: int = 0) -> str:
    """The first counterexample that can be written as a script; else a line for each with the reason why not."""
    refusals = []
    for verdict, replay in zip(verdicts, replays, strict=True):
        try:
            return write_script(verdict, replay, target, seed)
        except Inexpressible as reason:
            refusals.append(f"# {verdict.slug}: there is no script, because {reason}\n")
        except (
            Exception
        ) as failure:  # a target may do what a recording does not support; its verdict then has no script
            words = f"writing it down ended in {type(failure).__name__}"
            refusals.append(f"# {verdict.slug}: there is no script, because {words}\n")
    return "".join(refusals) or "# there is no script, because no law is broken\n"


def write_script(verdict: Verdict, replay: str = "", target: str = "", seed: int = 0) -> str:
    """The counterexample of a verdict as a file of plain torch. Raises `Inexpressible` with why there is none.

    `target` names the target as the command line does; without it the target has to be importable by its own name.
    """
    counterexample = verdict.counterexample
    if counterexample is None or counterexample.origin is None:
        raise Inexpressible("there is no counterexample")
    origin = counterexample.origin
    reasons: list[str] = []
    for source in find_source(origin.view, target, seed):
        recorded = _record_observation(verdict.law, origin, dict(counterexample.case))
        widenings = (False, True) if source.function and origin.view.dtype == torch.float64 else (False,)
        for widen in widenings:
            for calls in (False, True):
                text = _write_text(verdict, recorded, source, calls, widen, replay)
                if (code := _run_script(text)) == 1:
                    return text
                reasons.append(code if isinstance(code, str) else "it does not show what was seen")
    raise Inexpressible(reasons[0] if reasons else "the target cannot be imported")


def _record_observation(law: Law, origin: Origin, case: dict[str, Any]) -> Recorded:
    """Run the case once more, with everything written down; a random target with some more seeds."""
    failure = Inexpressible("")
    for seed in range(ATTEMPTS):
        try:
            return _record_with(law, origin, case, seed)
        except Inexpressible as reason:
            failure = reason
            if not isinstance(reason, NotSeenAgain):
                break
    raise failure


def _record_with(law: Law, origin: Origin, case: dict[str, Any], seed: int) -> Recorded:
    recording = Recording()
    view = _instrument(origin.view, recording)
    factor = FACTOR[torch.float64] if origin.view.eps < 1e-12 else FACTOR[torch.float32]
    worst: Recorded | None = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(recording.active())
        torch.manual_seed(seed)  # noted, so that dropout that should be off drops the same
        observations = law.observe(view, case, law.make_rng(origin.seed, case))
        while True:
            try:
                observation = next(observations)
            except StopIteration:
                break
            except Exception as failure:  # what came before may be enough
                if worst is None:
                    raise Inexpressible(f"it ends in {type(failure).__name__}") from failure
                break
            with recording.pause():
                finding = compare(observation, origin.view.eps, factor)
            if worst is None or finding.ratio > worst.finding.ratio:
                worst = Recorded(recording, len(recording.steps), finding, _find_names(recording, observation))
    if worst is None or worst.finding.ratio <= origin.threshold:
        raise NotSeenAgain("a new instance does not show it: it depends on earlier calls")
    if recording.reason:
        raise Inexpressible(recording.reason)
    return worst


def _find_names(recording: Recording, observation: Observation) -> dict[str, Any]:
    fact: Any = observation.extra.get("fact", (None, ""))
    tensors = {"expected": observation.expected, "actual": observation.actual, "where": observation.where}
    return {name: recording.find(tensor) for name, tensor in {**tensors, "fact": fact[0]}.items()}


def _instrument(view: Adapter, recording: Recording) -> Adapter:
    """Another instance of the subject, whose calls are recorded."""
    other = view.copy_unused()
    if isinstance(other.target, nn.Module):
        other._unused = copies.copy_target(other._unused)
        recording.keep_instance(other.target, 0)
        recording.keep_instance(other._unused, -2)
        recording.watch_methods(type(other.target))
        return other
    unused = other._unused
    other._unused = RecordedFunction(recording, unused, lambda: copies.copy_target(unused))
    other.target = RecordedFunction(recording, other.target, lambda: copies.copy_target(unused))
    recording.keep_instance(other.target, 0)
    recording.keep_instance(other._unused, -2)
    other._rebind(view)
    return other


def _write_text(
    verdict: Verdict, recorded: Recorded, source: TargetSource, calls: bool, widen: bool, replay: str
) -> str:
    recording, output = recorded.recording, recorded.finding.observation.output
    program = ScriptWriter(recording.steps[: recorded.count])
    origin = verdict.counterexample.origin  # type: ignore[union-attr]
    assert origin is not None
    body = _write_body(program, recorded, calls, origin.threshold)
    dtype = origin.view.dtype if not source.function else None
    parts = [HEADER.format(title=f"{verdict.slug}: {verdict.law.headline}", story=_write_story(verdict, replay))]
    parts.append(source.code)
    for name in ("set_attribute", "unpack", "gradient_of", "fast_path_off", "filled_memory"):
        parts += [HELPERS[name]] if f"{name}(" in body else []
    parts += [HELPERS["widened"]] if widen else []
    made = "widen(make())" if widen else "make()"
    fresh = made if source.function else "copy.deepcopy(value)"
    parts += [HELPERS["copy_of"].format(fresh=fresh)] if "copy_of(" in body else []
    parts.append(COMPARE.replace("{name}", output.replace("{", "").replace("}", "")))
    start = f"target = {made}" + ("" if source.function else ".eval()")
    start += f".to({dtype})" if dtype is not None and dtype != origin.view.native else ""
    unused = "unused = make()" + ("" if source.function else ".eval()") if "unused" in body else ""
    header, *code = parts
    text = "\n".join(part.strip("\n") + "\n\n" for part in code) + "\n".join(line for line in (start, unused) if line)
    return header + _write_imports(f"{text}\n{body}") + f"\n\n{text}\n{body}\n"


def _write_imports(code: str) -> str:
    """The imports that the code needs, as a formatter would order them."""
    names = [name for name in ("contextmanager", "suppress") if re.search(rf"\b{name}\b", code)]
    odd = [name for name in ("inf", "nan") if re.search(rf"(?<!\.)\b{name}\b(?!')", code)]
    lines = ["import copy"] if "copy.deepcopy(" in code else []
    lines += ["import sys"]
    lines += [f"from contextlib import {', '.join(names)}"] if names else []
    lines += [f"from math import {', '.join(odd)}"] if odd else []
    lines += ["", "import torch"]
    lines += ["from torch.nn.attention import SDPBackend, sdpa_kernel"] if "sdpa_kernel(" in code else []
    return "\n" + "\n".join(lines) + "\n"


def _write_body(program: ScriptWriter, recorded: Recorded, calls: bool, threshold: float) -> str:
    """The calls, the arithmetic, and the comparison with which the script ends."""
    observation = recorded.finding.observation
    names = recorded.names
    if names["expected"] is not None or names["actual"] is not None:
        values = [names["expected"] or observation.expected, names["actual"] or observation.actual]
        where = observation.where if names["where"] is None else names["where"]
        lines = program.lines(program.needed([*values, where], calls))
        bound = recorded.finding.bound * (threshold if recorded.finding.bound else 1.0)
        final = ", ".join(program.value(value) for value in (*values, where))
        return "\n".join([*lines, f"sys.exit(compare({final}, {bound!r}))"])
    if (ref := names["fact"]) is not None:
        _, reading = observation.extra["fact"]  # type: ignore[misc]
        lines = program.lines(program.needed([ref], calls))
        found = f'print("{observation.output}", tuple(value.shape), value.dtype)'
        return "\n".join([*lines, f"value = {program.value(ref)}", found, f"sys.exit(0 if {reading} else 1)"])
    steps = program.needed([], True)
    if steps and steps[-1].kind == "call" and steps[-1].raised:
        *before, last = steps
        lines = program.lines(before)
        call = ["try:", *(f"    {line}" for line in program.lines([replace(last, raised=False)]))]
        return "\n".join([*lines, *call, "except Exception as failure:", "    sys.exit(f'it raises {failure!r}')"])
    raise Inexpressible("its comparison is not of outputs of calls, but of weights inside, of counts or of statistics")


def _write_story(verdict: Verdict, replay: str) -> str:
    from regard.laws.report import violation

    lines = str(violation(verdict, replay)).split("\n")[1:]
    return textwrap.dedent("\n".join(lines)).replace("\\", "\\\\").replace('"""', "'''") + "\n"


def _run_script(text: str) -> int | str:
    """The code that a script ends with, run in this process; or what it raised."""
    path, streams = list(sys.path), io.StringIO()
    modules = set(sys.modules)
    state = torch.get_rng_state()
    try:
        with contextlib.redirect_stdout(streams), contextlib.redirect_stderr(streams):
            exec(compile(text, "<script>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    except Exception as failure:  # a script that does not run is not given out
        return f"a script of it ends in {type(failure).__name__}: {failure}"
    finally:
        sys.path[:] = path
        torch.set_rng_state(state)
        for name in set(sys.modules) - modules:
            del sys.modules[name]
    return 0


__all__ = ["write_first", "write_script"]
