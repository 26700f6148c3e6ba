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
from regard.train.board import Board
from regard.train.data import load
from regard.train.data.images import Images, Part
from regard.train.optimizing import make_optimizer, rate_at
from regard.train.progress import Tell, bar, patient
from regard.train.recipe import Recipe, SpatialRecipe
from regard.train.run import Epoch, Run

# Batch size of the evaluation, and number of images on which content-based heads are measured.
TESTED, WATCHED = 250, 64
MODEL = "model"
# Separates the seeds of initialisation, order and dropout.
ORDER, CHANCE = 1_000_003, 2_000_003


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
    images = _images(recipe, data)
    if recipe.batch > len(images.train):
        raise InputError(
            "The batch is larger than the data.",
            asked=f"batch={recipe.batch}",
            found=f"{len(images.train)} images to learn from",
            because="an epoch is made of whole batches",
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
                instead="resume=True, which goes on with it, or another folder",
            )
        checkpoint.claim(place, recipe, images.digest, None if start is None else digest_of(start))
        with checkpoint.alone(place), torch.random.fork_rng(devices=[]):
            return Training(recipe, images, place, start).run(progress)
    except OSError as failure:
        raise CheckpointError(
            f"The run cannot be kept in {place}.",
            asked=f"a run in {place}",
            found=f"{type(failure).__name__}: {failure}",
            because="the system does not let it be written there",
            instead="another folder, or make room there: the same call goes on from the last epoch that was kept",
        ) from failure


def _images(recipe: Recipe, data: Images | None) -> Images:
    """The training and test images: the recipe's data set or the given one, with a validation split if `held`."""
    images = load(recipe.data) if data is None else data
    return images.held() if recipe.held and not images.is_held else images


def digest_of(model: Pretrained) -> str:
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
            self._begin_with(start)
        self.optimizer = make_optimizer(recipe, self.model)
        self.steps = len(images.train) // recipe.batch
        self.position = checkpoint.Position()
        self.epochs: list[Epoch] = []
        self._resume()

    def _begin_with(self, start: Pretrained) -> None:
        if start.config != self.model.config:
            raise InputError(
                "Training cannot begin with this model.",
                asked=repr(start.config),
                found=repr(self.model.config),
                because="the recipe builds another",
                instead="the recipe with the sizes of the model",
            )
        self.model.load_state_dict(start.state_dict())

    def _resume(self) -> None:
        found = None if self.folder is None else checkpoint.read(self.folder)
        if self.folder is None:
            return
        if found is None:  # files that were written before the first checkpoint
            history.cut(self.folder, -1)
            return
        self.position, state = found
        checkpoint.restore(self.folder, self.model, self.optimizer, self.position, state)
        self.epochs = history.read_epochs(self.folder, self.position.epoch)
        history.cut(self.folder, self.position.epoch)

    def run(self, progress: bool) -> Run:
        total = self.steps * self.recipe.epochs
        done = self.position.epoch * self.steps + self.position.step
        shown = bar(self.recipe.epochs, self.steps, done, self.recipe.batch, progress and done < total)
        with Board(self.folder, self.position.epoch) as board, shown as tell, patient() as stopped:
            if not self.epochs:
                self._note(Epoch(0, math.nan, self.test(), 0.0, 0.0, self.look()), board)
            while self.position.epoch < self.recipe.epochs:
                if not self._epoch(tell, stopped):
                    raise self._interrupted()
                position = self.position
                self.position = checkpoint.Position(position.epoch + 1)
                rate = self._rate(self.position.epoch * self.steps - 1)
                loss = position.loss / position.images
                self._note(Epoch(self.position.epoch, loss, self.test(), position.seconds, rate, self.look()), board)
                tell(self.position.epoch * self.steps, loss, self.epochs[-1].accuracy)
        self.model.eval()
        if self.folder is not None and not (self.folder / MODEL / "config.json").is_file():
            self.model.save_pretrained(self.folder / MODEL)
        return Run(self.recipe, self.model, self.epochs, self.images, self.folder)

    # Training

    def _epoch(self, tell: Tell, stopped) -> bool:
        """Run the rest of an epoch; False if it was interrupted before its end.

        Order and augmentation of the images follow from the seed and the epoch number. So does dropout, whose state
        within an epoch is that of torch's generator.
        """
        recipe, train, position = self.recipe, self.images.train, self.position
        generator = torch.Generator().manual_seed(recipe.seed * ORDER + position.epoch)
        order = torch.randperm(len(train), generator=generator)
        drawn = recipe.augmentation.draw(len(train), generator)
        if not position.step:
            torch.manual_seed(recipe.seed * CHANCE + position.epoch)
        self.model.train()
        while position.step < self.steps:
            began = time.perf_counter()
            chosen = order[position.step * recipe.batch : (position.step + 1) * recipe.batch]
            loss = self._step(train, chosen, drawn[chosen], position.epoch * self.steps + position.step)
            position.step += 1
            position.loss += loss * len(chosen)
            position.images += len(chosen)
            position.seconds += time.perf_counter() - began
            tell(position.epoch * self.steps + position.step, loss, None)
            if stopped() and position.step < self.steps:
                return False
        return True

    def _step(self, train: Part, chosen: Tensor, drawn: Tensor, number: int) -> float:
        recipe = self.recipe
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(number) * group.get("share", 1.0)
        images = recipe.augmentation.apply(train.pixels[chosen].float() / train.white, drawn)
        logits = self.model(self.images.normalise(images))
        loss = functional.cross_entropy(logits, train.labels[chosen], label_smoothing=recipe.smoothing)
        self.optimizer.zero_grad()
        loss.backward()
        if recipe.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        if not math.isfinite(loss.item()):
            raise InputError(
                "The training has come apart.",
                found=f"a loss of {loss.item()} in step {number + 1}",
                because="numbers grew until they were none",
                instead=f"a smaller rate than {recipe.rate}, a longer warmup, or clip=1.0",
            )
        self.optimizer.step()
        return loss.item()

    def _rate(self, number: int) -> float:
        return rate_at(self.recipe, number, self.steps * self.recipe.epochs)

    # Evaluation

    def test(self) -> float:
        """The accuracy on the test images."""
        return accuracy(self.model, self.images)

    def look(self) -> dict[str, HeadProfile]:
        self.model.eval()
        watched = self.images.normalise(self.images.test.pixels[:WATCHED].float() / self.images.test.white)
        seen = history.look(self.model, watched)
        if isinstance(self.recipe, SpatialRecipe) and not self.recipe.keep_values:
            seen = {
                name: HeadProfile(profile.scores, profile.centre, profile.precision) for name, profile in seen.items()
            }
        return seen

    def _note(self, epoch: Epoch, board: Board) -> None:
        """Record an epoch: heads, then its line, then the checkpoint, which commits it."""
        self.epochs.append(epoch)
        board.note(epoch)
        if self.folder is not None:
            history.write_heads(self.folder, epoch.number, epoch.head_profiles)
            history.append(self.folder, epoch)
            self._save()

    def _save(self) -> None:
        if self.folder is not None:
            checkpoint.save(self.folder, self.model, self.optimizer, self.position)

    def _interrupted(self) -> Interrupted:
        self._save()
        where = f"epoch {self.position.epoch + 1} of {self.recipe.epochs}, step {self.position.step} of {self.steps}"
        if self.folder is None:
            return Interrupted(f"stopped in {where}; without a folder nothing is kept")
        return Interrupted(f"stopped in {where}; kept in {self.folder}, from where train(recipe, folder) goes on")


@torch.no_grad()
def accuracy(model: Pretrained, data: Images) -> float:
    """The accuracy of a model on the test images, 0 to 1; leaves the model in eval mode."""
    model.eval()
    test, right = data.test, 0
    for start in range(0, len(test), TESTED):
        pixels, labels = test.pixels[start : start + TESTED], test.labels[start : start + TESTED]
        logits = model(data.normalise(pixels.float() / test.white))
        right += int((logits.argmax(-1) == labels).sum())
    return right / len(test)


def read_run(folder: str | os.PathLike[str], data: Images | None = None) -> Run:
    """Load a run, finished or not, from its folder.

    folder: the folder of the run.
    data: the images, if the recipe does not name a known data set.
    """
    place = Path(folder).expanduser()
    recipe, digest = checkpoint.read_claim(place)
    position, state = _begun(place)
    images = _images(recipe, data)
    if images.digest != digest:
        raise CheckpointError(
            "These are not the images of this run.",
            asked=repr(images),
            found=f"sha256 {images.digest[:16]}..., not {digest[:16]}...",
            because="the run was trained and tested on others",
            instead="read_run(folder, data=...) with the images that train was given",
        )
    with torch.random.fork_rng(devices=[]):
        model = recipe.model(images)
    checkpoint.restore_model(place, model, state)
    return Run(recipe, model.eval(), history.read_epochs(place, position.epoch), images, place)


def read_history(folder: str | os.PathLike[str]) -> list[Epoch]:
    """Load the epochs of a run, finished or not, from its folder; the images are not needed."""
    place = Path(folder).expanduser()
    checkpoint.read_claim(place)
    return history.read_epochs(place, _begun(place)[0].epoch)


def _begun(place: Path) -> tuple[checkpoint.Position, dict[str, Tensor]]:
    found = checkpoint.read(place)
    if found is None:
        raise CheckpointError(
            f"The run in {place} has not begun.",
            asked=str(place),
            found="a recipe and no checkpoint",
            because="there is nothing to read before the first checkpoint",
            instead="train(recipe, folder)",
        )
    return found
