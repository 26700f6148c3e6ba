# slow
"""The demo: train two transformers on handwritten digits, record the positions of their heads, convert a CNN to
attention, check the laws, compute the cost, and write a report.

    python examples/demo.py                 about two minutes of two cores; `make demo` runs this
    python examples/demo.py --fresh         discard earlier training
    python examples/demo.py --quick         a few epochs, for a preview of the page

It writes runs/demo/ in the working folder. Finished training is not repeated, and interrupted training (Ctrl-C) is
resumed. The report is runs/demo/report.html, one self-contained file.
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

# Every pixel is a token. The learning rate of head positions is ten times that of the other parameters, so they move.
SPATIAL = SpatialRecipe(epochs=30, patch=1, dim=32, hidden_dim=64, position_rate=10.0)
VIT = ViTRecipe(epochs=40)
QUICK = {"epochs": 3, "layers": 2}
GIF_EPOCHS = 40
STOP_SECONDS = 20  # for the other process to end a step and save


def main() -> int:
    parser = argparse.ArgumentParser(description="Train, convert, check, compute costs, and write a report.")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder (runs/demo)")
    parser.add_argument("--fresh", action="store_true", help="discard earlier training and start again")
    parser.add_argument("--quick", action="store_true", help="a few epochs only, in a subfolder")
    parser.add_argument("--only", choices=("spatial", "vit"), help="train this model only, without a report")
    parser.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)  # stop when the input ends
    args = parser.parse_args()
    folder = args.out / "quick" if args.quick else args.out
    try:
        if args.fresh:
            discard_training(folder)
        with one_thread():
            if args.beside:
                stop_with_input()
            if args.only:
                train_model(args.only, folder, args.quick)
                return 0
            page = run(folder, quick=args.quick)
    except RegardError as refusal:
        print(f"{refusal}\n\n`--fresh` starts again.", file=sys.stderr)
        return 2
    except OSError as failure:
        print(f"{folder} cannot be written to: {failure}\n\n`--out` names another folder.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted. The same command resumes.", file=sys.stderr)
        return 130
    print(f"\nReport: {page.resolve()}")
    return 0


@contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread: these models are too small to gain from a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def discard_training(folder: Path) -> None:
    """Remove earlier training, and nothing else."""
    for recipe in (SPATIAL, VIT):
        if (folder / recipe.kind / "recipe.json").is_file():
            with checkpoint.lock_folder(folder / recipe.kind):  # unless another process trains there
                shutil.rmtree(folder / recipe.kind)
    (folder / "cnn.safetensors").unlink(missing_ok=True)


def train_model(kind: str, folder: Path, quick: bool = False) -> Run:
    """Train one of the two models, or resume or load it."""
    recipe, name = {"spatial": (SPATIAL, "spatial transformer"), "vit": (VIT, "vision transformer")}[kind]
    recipe = dataclasses.replace(recipe, **(QUICK if quick else {}))
    print(f"Training a {name} on the digits: {recipe.epochs} epochs", flush=True)
    found = train(recipe, folder / kind, data=select_digits() if quick else None)
    print(f"  {found.accuracy:.1%} accuracy on {len(found.data.test)} test images, {found.seconds:.0f} s", flush=True)
    return found


@contextmanager
def train_beside(kind: str, folder: Path) -> Iterator[None]:
    """Train the other model in a second process meanwhile, if there is a second core.

    It ignores Ctrl-C. It stops after a step, and saves, when its stdin is closed: when this process is interrupted or
    ends for any reason.
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
        other.wait()  # after a failure there, training is repeated here, with its messages
    finally:
        assert other.stdin is not None
        other.stdin.close()
        try:
            other.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            other.kill()
            other.wait()


def stop_with_input() -> None:
    """Interrupt this process, as Ctrl-C would, when its stdin is closed."""

    def wait() -> None:
        sys.stdin.buffer.read()
        _thread.interrupt_main()

    threading.Thread(target=wait, daemon=True).start()


def run(folder: Path, quick: bool = False) -> Path:
    """Run the whole demo, and return the path of the report."""
    folder.mkdir(parents=True, exist_ok=True)
    with nullcontext() if quick else train_beside("vit", folder):
        spatial = train_model("spatial", folder, quick)
    vit = train_model("vit", folder, quick)
    seconds = {"training the spatial transformer": spatial.seconds, "training the vision transformer": vit.seconds}

    with step("Converting the convolutions of a CNN to attention", seconds, "the convolution"):
        converted = convolution.convert(spatial.data, folder, epochs=2 if quick else convolution.EPOCHS)
    worst = max(case.error for case in converted.cases)
    print(
        f"  logits differ by {converted.error:.0e}; {len(converted.cases)} kinds of convolution, {worst:.0e} in float64"
    )
    if converted.agreed != converted.images or worst > 1e-12:
        raise SystemExit("The conversion changed the network: that is a bug, please report it.")

    with step("Checking the laws", seconds, "the laws"):
        models = {"Spatial transformer": spatial.model, "Vision transformer": vit.model}
        only = ["determinism", "shape"] if quick else None
        reports = laws.check_models(models, lambda name: print(f"  {name}", flush=True), only)
        mistake = laws.report_off_by_one()
    for name, found in reports.items():
        print(f"  {name}: {found.summary}")

    with step("Computing the costs", seconds, "the costs"):
        prices = [costs.measure_cost("Spatial transformer", spatial), costs.measure_cost("Vision transformer", vit)]
        mixing = costs.mixing(spatial.model.config, prices[0].formula)

    with step("Drawing", seconds, "the pictures"):
        for name, picture in pictures(spatial, vit, converted).items():
            picture.save(folder / name)
        labels = [f"epoch {epoch.number} · {epoch.accuracy:.1%}" for epoch in spatial.evaluations]
        animate_heads([epoch.head_profiles for epoch in spatial.evaluations], labels, most=GIF_EPOCHS).save(
            folder / "heads.gif"
        )
        results = story.Results(spatial, vit, converted, reports, mistake, prices, mixing, seconds)
        page = story.report(results).save(folder / "report.html")
    return page


def select_digits() -> Images:
    """Some of the digits, for a preview of the page."""
    whole = digits()
    parts = [
        ImageSplit(part.pixels[:count], part.labels[:count], part.white)
        for part, count in ((whole.train, 320), (whole.test, 96))
    ]
    return Images("some digits", *parts, names=whole.names)


def pictures(spatial: Run, vit: Run, converted: convolution.Converted) -> dict[str, Picture]:
    """The figures of the page as SVG files."""
    data = spatial.data
    three = int((data.test.labels == 3).nonzero()[0])
    image = data.normalise(data.test.images[three : three + 1])
    return {
        "heads.svg": draw_head_paths([epoch.head_profiles for epoch in spatial.evaluations]),
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
