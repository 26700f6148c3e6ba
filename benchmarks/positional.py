"""Attention by position alone against implementations over all pairs: time, growth and memory.

python -m benchmarks.positional [--rounds N] [--only TEXT] [--grids 16,32,56,112] [--out FILE]

64 channels, 9 heads that share one head of values, as the classifier of Cordonnier, Loukas and Jaggi (2020) has them.
"2020" is their method in plain torch: relative encodings of all pairs, a softmax over the square, one product. An
implementation that needs more memory than MOST_BYTES for squares does not run, and the table says so. The exit code
says whether all results agree.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

CHANNELS, HEADS = 64, 9
MOST_BYTES = 4 << 30
SQUARES = {"2020": 6, "reference": 14}  # squares of all pairs and heads that are alive at once in a training step
KINDS = ("quadratic", "learned", "gaussian")
METHODS = ("positional", "native", "reference", "2020")


def make(kind: str, side: int):
    """A bias, and `all_pairs(value)`: the published method with the same parameters."""
    import torch

    from regard import Gaussian, Quadratic, RowColumn

    kinds = {"quadratic": Quadratic, "learned": RowColumn, "gaussian": Gaussian}
    bias = kinds[kind](HEADS, grid=(side, side), generator=torch.Generator().manual_seed(1))
    place = torch.arange(side)
    delta = place - place[:, None]
    tokens = side * side

    def all_pairs(value):
        if kind == "learned":
            rows, columns = (table[:, delta + side - 1] for table in (bias.row, bias.column))
            scores = rows[:, :, None, :, None] + columns[:, None, :, None, :]
            return scores.reshape(HEADS, tokens, tokens).softmax(-1) @ value
        # Encodings of every pair, (row, column, row, column, feature), meet one vector of each head.
        row = delta[:, None, :, None].expand(side, side, side, side).float()
        column = delta[None, :, None, :].expand(side, side, side, side).float()
        if kind == "quadratic":
            encoding = torch.stack((row.square() + column.square(), row, column), -1)
            target = -bias.alpha[:, None] * torch.cat((torch.ones(HEADS, 1), -2 * bias.centre), -1)
        else:
            encoding = torch.stack((row.square(), row * column, column.square(), row, column), -1)
            precision, linear = bias.precision, (bias.precision @ bias.centre[..., None])[..., 0]
            steep = torch.stack((-precision[:, 0, 0] / 2, -precision[:, 0, 1], -precision[:, 1, 1] / 2), -1)
            target = torch.cat((steep, linear), -1)
        scores = torch.einsum("rcklf,hf->hrckl", encoding, target)
        return scores.reshape(HEADS, tokens, tokens).softmax(-1) @ value

    return bias, all_pairs


def runners(kind: str, side: int, method: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """A forward pass, and a training step with gradients of values and positions."""
    import torch

    from regard import attend

    bias, all_pairs = make(kind, side)
    value = torch.randn(1, 1, side * side, CHANNELS, generator=torch.Generator().manual_seed(2)).requires_grad_()
    nothing = torch.zeros(1, HEADS, side * side, 1)

    def output():
        if method == "2020":
            return all_pairs(value)
        return attend(nothing, nothing[:, :1], value, scale=0, bias=bias, backend=method)

    def forward():
        with torch.no_grad():
            return output()

    def step():
        mean = output()
        return torch.autograd.grad(mean, [value, *bias.parameters()], mean.detach())

    return forward, step


def fits(method: str, side: int) -> bool:
    return SQUARES.get(method, 0) * HEADS * side**4 * 4 <= MOST_BYTES


MEMORY = """
import sys
from benchmarks.positional import runners

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

kind, side, way = sys.argv[1], int(sys.argv[2]), sys.argv[3]
runners(kind, 8, way)[1]()
_, step = runners(kind, side, way)
with open("/proc/self/clear_refs", "w") as peaks:
    peaks.write("5")
before = status("VmRSS")
step()
print(status("VmHWM") - before)
"""


def peak(kind: str, side: int, method: str) -> float | None:
    """MiB that a process of its own came to hold for a training step; `None` where it cannot be measured."""
    command = [sys.executable, "-c", MEMORY, kind, str(side), method]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    return int(done.stdout) / 2**20 if done.returncode == 0 else None


def by_processor(runners: dict[str, Callable[[], object]], rounds: int) -> dict:
    """Milliseconds of processor time in turn: on a busy machine the clock on the wall counts what others do."""
    import statistics
    import time

    from benchmarks.timing import Timing

    times: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(rounds + 1):
        for name, run in runners.items():
            begin = time.process_time()
            run()
            if number:  # the first is to warm up
                times[name].append(1e3 * (time.process_time() - begin))
    quartiles = {name: statistics.quantiles(mine, n=4, method="inclusive") for name, mine in times.items()}
    return {name: Timing(median, low, high, rounds) for name, (low, median, high) in quartiles.items()}


def agree(kind: str, side: int, methods: list[str]) -> float:
    """The largest difference between outputs, of values of about one."""
    import torch

    outputs = [runners(kind, side, method)[0]() for method in methods]
    return max(float((torch.as_tensor(output) - outputs[0]).abs().max()) for output in outputs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of every competitor, at least")
    parser.add_argument("--only", default="", help="variants whose name holds this text")
    parser.add_argument("--grids", default="16,32,56,112", help="sides of square grids")
    parser.add_argument("--one-core", action="store_true", help="processor time of one thread, for a busy machine")
    parser.add_argument("--no-memory", action="store_true", help="time only")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/positional.json"))
    args = parser.parse_args()

    from benchmarks.runner import bind_threads

    bind_threads()
    import torch

    from benchmarks import machine
    from benchmarks.timing import race
    from regard.kernels import library

    if args.one_core:
        torch.set_num_threads(1)
    described = machine.describe()
    print(f"{described['processor']}, {described['threads']} threads, torch {described['torch']}, {described['date']}")
    print(f"{CHANNELS} channels, {HEADS} heads, float32; milliseconds, and how many times positional is as fast\n")
    methods = [method for method in METHODS if method != "native" or library.missing() is None]
    sides = [int(side) for side in args.grids.split(",")]
    found, wrong = [], False
    for kind in (kind for kind in KINDS if args.only in kind):
        for side in sides:
            able = [method for method in methods if fits(method, side)]
            apart = agree(kind, side, able)
            wrong |= apart > 1e-3
            pairs = {method: runners(kind, side, method) for method in able}
            rounds = args.rounds if side <= 56 else max(2, args.rounds // 2)
            warm_up = 2 if side <= 56 else 1
            entry = {"kind": kind, "side": side, "apart": apart}
            for number, what in enumerate(("forward", "training step")):
                racing = {method: pair[number] for method, pair in pairs.items()}
                with machine.Watch() as watch:
                    if args.one_core:
                        timings = by_processor(racing, rounds)
                    else:
                        timings = race(racing, rounds=rounds, warm_up=warm_up)
                entry[f"{what}, disturbed"] = watch.load.disturbed
                mine = timings["positional"].median
                entry[what] = {method: timing.median for method, timing in timings.items()}
                cells = [f"positional {mine:8.2f} [{timings['positional'].low:.2f}, {timings['positional'].high:.2f}]"]
                for method in methods[1:]:
                    if method not in timings:
                        cells.append(f"{method} needs too much memory")
                        continue
                    ratio = timings[method].median / mine
                    cells.append(
                        f"{method} {timings[method].median:8.2f} ({ratio:.1f}x{', LOSES' if ratio < 1 else ''})"
                    )
                print(f"{kind:9s} {side:3d} x {side:<3d} {what:13s}  " + "   ".join(cells), end="")
                print("   ~ DISTURBED" if watch.load.disturbed else "", flush=True)
            if not args.no_memory:
                entry["MiB"] = {method: peak(kind, side, method) for method in able}
                sizes = "   ".join(f"{method} {size:.0f}" for method, size in entry["MiB"].items() if size is not None)
                print(f"{kind:9s} {side:3d} x {side:<3d} MiB of a step  {sizes}", flush=True)
            found.append(entry)
        print(_format_growth(kind, [entry for entry in found if entry["kind"] == kind]), "\n", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"machine": described, "found": found}, indent=1))
    print(f"saved {args.out}")
    return int(wrong)


def _format_growth(kind: str, entries: list[dict]) -> str:
    """Exponents of the pixels between the second and the last grid, beside those of the formulas."""
    if len(entries) < 3:
        return ""
    first, last = entries[1], entries[-1]
    pixels = math.log(last["side"] ** 2 / first["side"] ** 2)
    said = []
    for what in ("forward", "training step"):
        for method in ("positional", "native"):
            if method in last[what]:
                said.append(f"{method} {what} {math.log(last[what][method] / first[what][method]) / pixels:.2f}")
    formula = "n log n" if kind == "gaussian" else "n^1.5"
    return f"{kind:9s} time grows as pixels to the power of: {', '.join(said)}   (formulas: {formula}; all pairs n^2)"


if __name__ == "__main__":
    sys.exit(main())
