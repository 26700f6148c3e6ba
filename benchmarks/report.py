"""The printed report: the machine, each case as it is measured, and all verdicts at the end."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.cases import SIMPLE
from benchmarks.limits import Limits
from benchmarks.results import OURS, Result, Verdict


def header(machine: dict, limits: Limits, backend: str) -> str:
    settings = " ".join(f"{name}={value}" for name, value in machine["environment"].items())
    return "\n".join(
        (
            f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads, float32, {settings}",
            f"regard {machine['regard']} ({machine['commit']}) backend {backend!r}, torch {machine['torch']}, "
            f"Python {machine['python']}, {machine['date']}",
            f"limits: {limits.peak:.0f} GF/s ({limits.peak_by}), sgemm {limits.sgemm:.0f} GF/s, "
            f"memory read {limits.read:.1f} GB/s (by {limits.read_by})",
            "medians [quartiles]; ratio = the fastest peer's median over ours, interleaved in one run",
        )
    )


def case(result: Result, limits: Limits) -> str:
    """One measured case: every time, the verdicts, the absent peers."""
    if result.failed is not None:
        return f"\n{result.name}\n  <<< FAILED: {result.failed}"
    lines = [f"\n{result.name}    {result.load}", *([f"  {result.about}"] if result.about else [])]
    for name, timing in result.timings.items():
        lines.append(f"  {name:<32} {timing!s:<34}{_format_rate(result, timing.seconds, limits)}")
    for name, timing in result.heats.items():
        kind = "simple, not raced" if result.groups.get(name) == SIMPLE else "slower in the heats, not raced"
        lines.append(f"  {name:<32} {timing!s:<34}{_format_rate(result, timing.seconds, limits)}  ({kind})")
    lines += [f"  {name:<32} absent: {why}" for name, why in result.absent.items()]
    lines += [f"  {note}" for note in result.notes]
    lines += [f"  {'=> ' + _format_peer(verdict):<67}{_format_ratio(verdict)}" for verdict in result.verdicts]
    if result.errors:
        worst = max(result.errors, key=result.errors.__getitem__)
        checked = f"{result.errors[OURS]:.0e} from float64" if OURS in result.errors else "not compared with float64"
        others = f", at most {result.errors[worst]:.0e} between competitors" if len(result.errors) > 1 else ""
        lines.append(f"  checked: ours {checked}{others}")
    return "\n".join(lines)


def _format_rate(result: Result, seconds: float, limits: Limits) -> str:
    if result.gflop is None:
        return ""
    rate = result.gflop / seconds
    return f"{rate:7.1f} useful GF/s {100 * rate / limits.peak:4.0f} % of peak"


def _format_peer(verdict: Verdict) -> str:
    return verdict.against + (f": {verdict.by}" if verdict.by and verdict.by != verdict.against else "")


def _format_ratio(verdict: Verdict) -> str:
    if verdict.value is None:
        return f"   -    {_format_bar(verdict)}  {verdict.word}  {verdict.why}"
    return f"{verdict.value:6.2f}  {_format_bar(verdict)}  {verdict.word}"


def _format_bar(verdict: Verdict) -> str:
    if verdict.bar is None:
        return " " * 15
    return f"({'at least' if verdict.at_least else 'at most':<8} {verdict.bar:.2f})"


def summary(repeats: list[list[Result]]) -> str:
    """Every verdict over all repeats: smallest and largest value, and in how many repeats the bar held."""
    collected = collect(repeats)
    failed = [result for results in repeats for result in results if result.failed is not None]
    width = max(len(name) for name in ("case", *(name for name, _ in collected), *(result.name for result in failed)))
    lines = ["", f"{'case':<{width}}  {'against':<26} {'ratio':>15}   bar"]
    lost, missing, barred = [], [], 0
    for (name, against), verdicts in collected.items():
        values = [verdict.value for verdict in verdicts if verdict.value is not None]
        held = sum(bool(verdict.holds) for verdict in verdicts)
        first = verdicts[0]
        barred += first.bar is not None
        if first.bar is not None and not values:
            missing.append(name)
        elif first.bar is not None and held < len(verdicts):
            lost.append(f"{name} against {against}")
        word = first.word if len(verdicts) == 1 else _format_held(first, held, len(verdicts), bool(values))
        lines.append(f"{name:<{width}}  {against:<26} {spread(values):>15}   {_format_bar(first)}  {word}")
    lines += [f"{result.name:<{width}}  <<< FAILED: {str(result.failed).splitlines()[0]}" for result in failed]
    lines.append(f"\n{barred - len(lost) - len(missing)} of {barred} bars hold" + _format_repeats(len(repeats)))
    lines += [f"{len(failed)} measurements failed"] if failed else []
    lines += [f"  loses: {name}" for name in lost] + [f"  not measured: {name}" for name in missing]
    disturbed = sorted({r.name for results in repeats for r in results if r.load is not None and r.load.disturbed})
    lines += [f"  disturbed by other programs: {name}" for name in disturbed]
    return "\n".join(lines)


def collect(repeats: Iterable[list[Result]]) -> dict[tuple[str, str], list[Verdict]]:
    """The verdicts of each case and group over all repeats, in the order of the table."""
    collected: dict[tuple[str, str], list[Verdict]] = {}
    for results in repeats:
        for result in results:
            for verdict in result.verdicts:
                collected.setdefault((verdict.case, verdict.against), []).append(verdict)
    return collected


def spread(values: list[float]) -> str:
    if not values:
        return "-"
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if len(values) == 1 else f"{low} .. {high}"


def _format_held(first: Verdict, held: int, times: int, measured: bool) -> str:
    if first.bar is None or not measured:
        return first.word
    return f"holds {held} of {times}" if held == times else f"<<< LOSES {times - held} of {times}"


def _format_repeats(repeats: int) -> str:
    return f" in every one of {repeats} repeats" if repeats > 1 else ""
