"""A run: its recipe, epochs, model and images."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from regard.layers.profiles import HeadProfile
from regard.models.pretrained import Pretrained
from regard.train.data.images import Images
from regard.train.recipe import Recipe


@dataclass(frozen=True)
class Epoch:
    """The metrics after an epoch.

    Attributes:
        number: counted from 1; 0 is the initial model.
        loss: the mean training loss of the epoch; nan for number 0.
        accuracy: on the test images, 0 to 1.
        seconds: of training, without the evaluation.
        rate: the last learning rate.
        head_profiles: the head positions of every layer, by the layer's name; empty for a ViT.
    """

    number: int
    loss: float
    accuracy: float
    seconds: float
    rate: float
    head_profiles: dict[str, HeadProfile] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, eq=False)
class Run:
    """A recipe and its results.

    Attributes:
        recipe: the configuration.
        model: after the last epoch, in eval mode.
        epochs: in order; the first, number 0, is the initial model.
        folder: where the run is saved, or None.
        data: the images.
        done: whether all epochs were run.
    """

    recipe: Recipe
    model: Pretrained
    epochs: list[Epoch]
    data: Images
    folder: Path | None = None

    @property
    def accuracy(self) -> float:
        """On the test images after the last epoch, 0 to 1."""
        return self.epochs[-1].accuracy

    @property
    def done(self) -> bool:
        return self.epochs[-1].number == self.recipe.epochs

    @property
    def seconds(self) -> float:
        """Training time of all epochs."""
        return sum(epoch.seconds for epoch in self.epochs)

    def __repr__(self) -> str:
        last = self.epochs[-1]
        return (
            f"Run({self.recipe.kind} on {self.data.name}, epoch {last.number} of {self.recipe.epochs}, "
            f"accuracy {last.accuracy:.4f})"
        )
