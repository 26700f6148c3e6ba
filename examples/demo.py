# slow
"""The main job, end to end: train two transformers on real digits, watch their heads move, turn a convolution into
attention, check the laws, count the costs, and leave a report to look at.

    python examples/demo.py                 about two minutes of two cores; `make demo` runs this
    python examples/demo.py --fresh         forget what was trained before
    python examples/demo.py --quick         a few epochs, to see the page

It writes runs/demo/ in the working folder. Training that is finished is not done again, and training that was
interrupted (Ctrl-C) goes on where it was. The report is runs/demo/report.html, one file that needs nothing else.
"""

from __future__ import annotations

import _thread
import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from demo_parts import convolution, costs, laws, story

from regard import RegardError
from regard.train import Images, ImageSplit, Run, SpatialRecipe, ViTRecipe, checkpoint, train
from regard.train.data import digits
from regard.visualize import Picture, animate_heads, draw_head_paths, draw_kernels, show

# Every pixel is a token, and heads learn where to look ten times faster than the rest learns: they travel.
SPATIAL = SpatialRecipe(epochs=30, patch=1, dim=32, hidden_dim=64, position_rate=10.0)
VIT = ViTRecipe(epochs=40)
QUICK = {"epochs": 3, "layers": 2}
FILM = 40  # states of the GIF
PATIENCE = 20  # seconds that the other process has to end a step and write down what it has


def main() -> int:
    words = argparse.ArgumentParser(description="Train, convert, check, price, and leave a report to look at.")
    words.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder (runs/demo)")
    words.add_argument("--fresh", action="store_true", help="forget what is there and begin anew")
    words.add_argument("--quick", action="store_true", help="a few epochs only, in a folder of its own")
    words.add_argument("--only", choices=("spatial", "vit"), help="train this one, and no page")
    words.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)  # stop when the input ends
    asked = words.parse_args()
    folder = asked.out / "quick" if asked.quick else asked.out
    try:
        if asked.fresh:
            forget(folder)
        with one_thread():
            if asked.beside:
                stop_with_input()
            if asked.only:
                learn(asked.only, folder, asked.quick)
                return 0
            page = run(folder, quick=asked.quick)
    except RegardError as refusal:
        print(f"{refusal}\n\n`--fresh` begins anew.", file=sys.stderr)
        return 2
    except OSError as failure:
        print(f"{folder} cannot be written to: {failure}\n\n`--out` names another folder.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted. The same command goes on from here.", file=sys.stderr)
        return 130
    print(f"\nLook at  {page.resolve()}")
    return 0


@contextmanager
def one_thread() -> Iterator[None]:
    """So small products gain little from a second thread, and lose much where another program wants the core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def forget(folder: Path) -> None:
    """Remove what an earlier run has trained, and nothing else."""
    for recipe in (SPATIAL, VIT):
        if (folder / recipe.kind / "recipe.json").is_file():
            with checkpoint.lock_folder(folder / recipe.kind):  # not under somebody who trains there
                shutil.rmtree(folder / recipe.kind)
    (folder / "cnn.safetensors").unlink(missing_ok=True)


def learn(kind: str, folder: Path, quick: bool = False) -> Run:
    """Train one of the two; what is finished is read, and what was begun goes on."""
    recipe, name = {"spatial": (SPATIAL, "spatial transformer"), "vit": (VIT, "vision transformer")}[kind]
    recipe = dataclasses.replace(recipe, **(QUICK if quick else {}))
    print(f"Training a {name} on the digits: {recipe.epochs} epochs", flush=True)
    found = train(recipe, folder / kind, data=few() if quick else None)
    print(f"  {found.accuracy:.1%} of {len(found.data.test)} test images, {found.seconds:.0f} s", flush=True)
    return found


@contextmanager
def beside(kind: str, folder: Path) -> Iterator[None]:
    """Meanwhile a process of its own trains the other, if there is a second core. What it did lies in the folder.

    It hears no Ctrl-C. It stops at the end of a step, and keeps what it has, when its input ends: because we were
    interrupted, or because we are gone, whatever happened to us.
    """
    if (os.cpu_count() or 1) < 2 or (folder / kind / "model").is_dir():
        yield
        return
    print("(A second core trains a vision transformer meanwhile.)", flush=True)
    command = [sys.executable, __file__, "--beside", "--only", kind, "--out", str(folder)]
    quiet = subprocess.DEVNULL
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        yield
        if other.poll() is None:
            print("Waiting for the vision transformer", flush=True)
        other.wait()  # what went wrong there is tried again here, aloud
    finally:
        assert other.stdin is not None
        other.stdin.close()
        try:
            other.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            other.kill()
            other.wait()


def stop_with_input() -> None:
    """Interrupt this process, as Ctrl-C would, when its input ends."""

    def wait() -> None:
        sys.stdin.buffer.read()
        _thread.interrupt_main()

    threading.Thread(target=wait, daemon=True).start()


def run(folder: Path, quick: bool = False) -> Path:
    """Everything; returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
    with nullcontext() if quick else beside("vit", folder):
        spatial = learn("spatial", folder, quick)
    vit = learn("vit", folder, quick)
    seconds = {"training the spatial transformer": spatial.seconds, "training the vision transformer": vit.seconds}

    with step("Turning the convolutions of a CNN into attention", seconds, "the convolution"):
        converted = convolution.convert(spatial.data, folder, epochs=2 if quick else convolution.EPOCHS)
    worst = max(case.error for case in converted.cases)
    print(
        f"  logits differ by {converted.error:.0e}; {len(converted.cases)} kinds of convolution, {worst:.0e} in float64"
    )
    if converted.agreed != converted.images or worst > 1e-12:
        raise SystemExit("The network changed when its convolutions became attention: that is a bug, please report it.")

    with step("Checking the laws", seconds, "the laws"):
        models = {"Spatial transformer": spatial.model, "Vision transformer": vit.model}
        only = ["determinism", "shape"] if quick else None
        reports = laws.judge(models, lambda name: print(f"  {name}", flush=True), only)
        mistake = laws.mistake()
    for name, found in reports.items():
        print(f"  {name}: {found.summary}")

    with step("Counting what it costs", seconds, "the costs"):
        prices = [costs.price("Spatial transformer", spatial), costs.price("Vision transformer", vit)]
        mixing = costs.mixing(spatial.model.config)

    with step("Drawing", seconds, "the pictures"):
        for name, picture in pictures(spatial, vit, converted).items():
            picture.save(folder / name)
        labels = [f"epoch {epoch.number} · {epoch.accuracy:.1%}" for epoch in spatial.epochs]
        animate_heads([epoch.head_profiles for epoch in spatial.epochs], labels, most=FILM).save(folder / "heads.gif")
        results = story.Results(spatial, vit, converted, reports, mistake, prices, mixing, seconds)
        page = story.report(results).save(folder / "report.html")
    return page


def few() -> Images:
    """Some of the digits: enough to see the page."""
    whole = digits()
    parts = [
        ImageSplit(part.pixels[:count], part.labels[:count], part.white)
        for part, count in ((whole.train, 320), (whole.test, 96))
    ]
    return Images("some digits", *parts, names=whole.names)


def pictures(spatial: Run, vit: Run, converted: convolution.Converted) -> dict[str, Picture]:
    """For papers and slides: the same things as the page has, as vectors."""
    data = spatial.data
    three = int((data.test.labels == 3).nonzero()[0])
    image = data.normalise(data.test.images[three : three + 1])
    return {
        "heads.svg": draw_head_paths([epoch.head_profiles for epoch in spatial.epochs]),
        "spatial_map.svg": show(spatial.model, image, query=(3, 4)),
        "vit_map.svg": show(vit.model, image, query=(3, 4)),
        "kernels.svg": draw_kernels({"CNN": converted.network[0], "attention": converted.attentive[0]}),
    }


@contextmanager
def step(words: str, seconds: dict[str, float], name: str) -> Iterator[None]:
    print(words, flush=True)
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


if __name__ == "__main__":
    torch.manual_seed(0)
    raise SystemExit(main())
