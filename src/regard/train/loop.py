"""The training loop: seeded, resumable, with recorded head positions."""

from __future__ import annotations

import hashlib
import math
import os
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from regard.errors import CheckpointError, InputError
from regard.layers.profiles import HeadProfile
from regard.models.pretrained import Pretrained
from regard.train import checkpoint, history
from regard.train.data import load
from regard.train.data.images import Images, ImageSplit
from regard.train.optimizer import learning_rate_at, make_optimizer
from regard.train.progress import ReportStep, defer_interrupt, progress_bar
from regard.train.recipe import Recipe, SpatialRecipe
from regard.train.run import Epoch, Run
from regard.train.tensorboard import TensorBoardLog

# Batch size of the evaluation, and number of images on which content-based heads are measured.
EVAL_BATCH, PROFILED_IMAGES = 250, 64
MODEL = "model"
# Separates the seeds of initialisation, order and dropout.
ORDER_SEED, DROPOUT_SEED = 1_000_003, 2_000_003


class Interrupted(KeyboardInterrupt):
    """Training was interrupted by Ctrl-C; the message says how to resume."""


def train(
    recipe: Recipe,
    folder: str | os.PathLike[str] | None = None,
    *,
    progress: bool = True,
    resume: bool = True,
    data: Images | None = None,
    start: Pretrained | None = None,
) -> Run:
    """Train a model by a recipe.

    recipe: the configuration.
    folder: where the run is saved: `recipe.json`, `history.jsonl` (one line per epoch), `heads/` (the head positions),
        `checkpoint.safetensors`, TensorBoard files and, at the end, the model (for `from_pretrained`). A folder with a
        run of the same recipe is resumed, bit-identical to an uninterrupted run. A run that is killed loses one epoch
        at most, Ctrl-C loses nothing.
    progress: show a progress bar if stderr is a terminal.
    resume: if False, a folder that already has a run raises.
    data: images in place of those the recipe names.
    start: a model of the recipe's kind to start from, in place of a random initialisation.

    All randomness comes from the recipe's seed; the state of torch's global generator is restored.

        >>> from regard.train import SpatialRecipe, train
        >>> run = train(SpatialRecipe(epochs=1, layers=1, heads=4, dim=8, hidden_dim=8))
        >>> [epoch.number for epoch in run.epochs], list(run.epochs[-1].head_profiles)
        ([0, 1], ['blocks.0.attention'])
    """
    images = _load_images(recipe, data)
    if recipe.batch > len(images.train):
        raise InputError(
            "The batch is larger than the training set.",
            asked=f"batch={recipe.batch}",
            found=f"{len(images.train)} training images",
            because="an epoch consists of whole batches",
            instead=f"batch={len(images.train)} or less",
        )
    if folder is None:
        with torch.random.fork_rng(devices=[]):
            return Training(recipe, images, None, start).run(progress)
    place = Path(folder).expanduser()
    try:
        place.mkdir(parents=True, exist_ok=True)
        if not resume and (place / checkpoint.RECIPE).exists():
            raise CheckpointError(
                f"There is a run in {place}.",
                asked="resume=False",
                because="its files would be overwritten",
                instead="resume=True to continue it, or another folder",
            )
        checkpoint.claim_folder(place, recipe, images.digest, None if start is None else hash_state_dict(start))
        with checkpoint.lock_folder(place), torch.random.fork_rng(devices=[]):
            return Training(recipe, images, place, start).run(progress)
    except OSError as failure:
        raise CheckpointError(
            f"The run cannot be saved in {place}.",
            asked=f"a run in {place}",
            found=f"{type(failure).__name__}: {failure}",
            because="the operating system refuses to write there",
            instead="another folder, or free some space: the same call resumes from the last saved epoch",
        ) from failure


def _load_images(recipe: Recipe, data: Images | None) -> Images:
    """The training and test images: the recipe's data set or the given one, with a validation split if `held`."""
    images = load(recipe.data) if data is None else data
    return images.held() if recipe.held and not images.is_held else images


def hash_state_dict(model: Pretrained) -> str:
    """A sha256 of the model's state."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Training:
    """The state of a run in progress."""

    def __init__(self, recipe: Recipe, images: Images, folder: Path | None, start: Pretrained | None = None) -> None:
        self.recipe, self.images, self.folder = recipe, images, folder
        torch.manual_seed(recipe.seed)
        self.model: Pretrained = recipe.model(images)
        if start is not None:
            self._load_initial_model(start)
        self.optimizer = make_optimizer(recipe, self.model)
        self.steps = len(images.train) // recipe.batch
        self.position = checkpoint.ResumePoint()
        self.epochs: list[Epoch] = []
        self._resume()

    def _load_initial_model(self, start: Pretrained) -> None:
        if start.config != self.model.config:
            raise InputError(
                "`start` does not fit the recipe.",
                asked=repr(start.config),
                found=repr(self.model.config),
                because="the recipe builds a model with another configuration",
                instead="the recipe with the sizes of the model",
            )
        self.model.load_state_dict(start.state_dict())

    def _resume(self) -> None:
        found = None if self.folder is None else checkpoint.read(self.folder)
        if self.folder is None:
            return
        if found is None:  # files that were written before the first checkpoint
            history.truncate_history(self.folder, -1)
            return
        self.position, state = found
        checkpoint.restore(self.folder, self.model, self.optimizer, self.position, state)
        self.epochs = history.read_epochs(self.folder, self.position.epoch)
        history.truncate_history(self.folder, self.position.epoch)

    def run(self, progress: bool) -> Run:
        total = self.steps * self.recipe.epochs
        done = self.position.epoch * self.steps + self.position.step
        shown = progress_bar(self.recipe.epochs, self.steps, done, self.recipe.batch, progress and done < total)
        with (
            TensorBoardLog(self.folder, self.position.epoch) as log,
            shown as report_step,
            defer_interrupt() as stopped,
        ):
            if not self.epochs:
                self._record_epoch(Epoch(0, math.nan, self.evaluate(), 0.0, 0.0, self.measure_heads()), log)
            while self.position.epoch < self.recipe.epochs:
                if not self._run_epoch(report_step, stopped):
                    raise self._interrupt_error()
                position = self.position
                self.position = checkpoint.ResumePoint(position.epoch + 1)
                rate = self._learning_rate(self.position.epoch * self.steps - 1)
                loss = position.loss / position.images
                self._record_epoch(
                    Epoch(self.position.epoch, loss, self.evaluate(), position.seconds, rate, self.measure_heads()), log
                )
                report_step(self.position.epoch * self.steps, loss, self.epochs[-1].accuracy)
        self.model.eval()
        if self.folder is not None and not (self.folder / MODEL / "config.json").is_file():
            self.model.save_pretrained(self.folder / MODEL)
        return Run(self.recipe, self.model, self.epochs, self.images, self.folder)

    # Training

    def _run_epoch(self, report_step: ReportStep, stopped) -> bool:
        """Run the rest of an epoch; False if it was interrupted before its end.

        Order and augmentation of the images follow from the seed and the epoch number. So does dropout, whose state
        within an epoch is that of torch's generator.
        """
        recipe, train, position = self.recipe, self.images.train, self.position
        generator = torch.Generator().manual_seed(recipe.seed * ORDER_SEED + position.epoch)
        order = torch.randperm(len(train), generator=generator)
        drawn = recipe.augmentation.draw(len(train), generator)
        if not position.step:
            torch.manual_seed(recipe.seed * DROPOUT_SEED + position.epoch)
        self.model.train()
        while position.step < self.steps:
            began = time.perf_counter()
            chosen = order[position.step * recipe.batch : (position.step + 1) * recipe.batch]
            loss = self._run_step(train, chosen, drawn[chosen], position.epoch * self.steps + position.step)
            position.step += 1
            position.loss += loss * len(chosen)
            position.images += len(chosen)
            position.seconds += time.perf_counter() - began
            report_step(position.epoch * self.steps + position.step, loss, None)
            if stopped() and position.step < self.steps:
                return False
        return True

    def _run_step(self, train: ImageSplit, chosen: Tensor, drawn: Tensor, number: int) -> float:
        recipe = self.recipe
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(number) * group.get("share", 1.0)
        images = recipe.augmentation.apply(train.pixels[chosen].float() / train.white, drawn)
        logits = self.model(self.images.normalise(images))
        loss = functional.cross_entropy(logits, train.labels[chosen], label_smoothing=recipe.smoothing)
        self.optimizer.zero_grad()
        loss.backward()
        if recipe.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        if not math.isfinite(loss.item()):
            raise InputError(
                f"The loss is {loss.item()} at step {number + 1}.",
                asked=f"rate={recipe.rate}, clip={recipe.clip}",
                because="the training diverged",
                instead=f"a learning rate below rate={recipe.rate}, a longer warmup, or clip=1.0",
            )
        self.optimizer.step()
        return loss.item()

    def _learning_rate(self, number: int) -> float:
        return learning_rate_at(self.recipe, number, self.steps * self.recipe.epochs)

    # Evaluation

    def evaluate(self) -> float:
        """The accuracy on the test images."""
        return accuracy(self.model, self.images)

    def measure_heads(self) -> dict[str, HeadProfile]:
        self.model.eval()
        observed = self.images.normalise(self.images.test.pixels[:PROFILED_IMAGES].float() / self.images.test.white)
        seen = history.measure_head_profiles(self.model, observed)
        if isinstance(self.recipe, SpatialRecipe) and not self.recipe.keep_values:
            seen = {
                name: HeadProfile(profile.scores, profile.centre, profile.precision) for name, profile in seen.items()
            }
        return seen

    def _record_epoch(self, epoch: Epoch, log: TensorBoardLog) -> None:
        """Record an epoch: heads, then its line, then the checkpoint, which commits it."""
        self.epochs.append(epoch)
        log.write_epoch(epoch)
        if self.folder is not None:
            history.write_heads(self.folder, epoch.number, epoch.head_profiles)
            history.append_epoch(self.folder, epoch)
            self._save()

    def _save(self) -> None:
        if self.folder is not None:
            checkpoint.save(self.folder, self.model, self.optimizer, self.position)

    def _interrupt_error(self) -> Interrupted:
        self._save()
        where = f"epoch {self.position.epoch + 1} of {self.recipe.epochs}, step {self.position.step} of {self.steps}"
        if self.folder is None:
            return Interrupted(f"interrupted in {where}; without a folder nothing is saved")
        return Interrupted(f"interrupted in {where}; saved in {self.folder}, from where train(recipe, folder) resumes")


@torch.no_grad()
def accuracy(model: Pretrained, data: Images) -> float:
    """The accuracy of a model on the test images, 0 to 1; leaves the model in eval mode."""
    model.eval()
    test, right = data.test, 0
    for start in range(0, len(test), EVAL_BATCH):
        pixels, labels = test.pixels[start : start + EVAL_BATCH], test.labels[start : start + EVAL_BATCH]
        logits = model(data.normalise(pixels.float() / test.white))
        right += int((logits.argmax(-1) == labels).sum())
    return right / len(test)


def read_run(folder: str | os.PathLike[str], data: Images | None = None) -> Run:
    """Load a run, finished or not, from its folder.

    folder: the folder of the run.
    data: the images, if the recipe does not name a known data set.
    """
    place = Path(folder).expanduser()
    recipe, digest = checkpoint.read_claimed_recipe(place)
    position, state = _read_checkpoint(place)
    images = _load_images(recipe, data)
    if images.digest != digest:
        raise CheckpointError(
            "These are not the images of this run.",
            asked=repr(images),
            found=f"sha256 {images.digest[:16]}..., not {digest[:16]}...",
            because="the run was trained and evaluated on others",
            instead="read_run(folder, data=...) with the images that train was given",
        )
    with torch.random.fork_rng(devices=[]):
        model = recipe.model(images)
    checkpoint.restore_model(place, model, state)
    return Run(recipe, model.eval(), history.read_epochs(place, position.epoch), images, place)


def read_history(folder: str | os.PathLike[str]) -> list[Epoch]:
    """Load the epochs of a run, finished or not, from its folder; the images are not needed."""
    place = Path(folder).expanduser()
    checkpoint.read_claimed_recipe(place)
    return history.read_epochs(place, _read_checkpoint(place)[0].epoch)


def _read_checkpoint(place: Path) -> tuple[checkpoint.ResumePoint, dict[str, Tensor]]:
    found = checkpoint.read(place)
    if found is None:
        raise CheckpointError(
            f"The run in {place} has no checkpoint.",
            asked=str(place),
            found="a recipe only",
            because="there is nothing to read before the first checkpoint",
            instead="train(recipe, folder)",
        )
    return found
