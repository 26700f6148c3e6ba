"""What a run is: its recipe, its epochs, its model and its images."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from regard.layers.gaze import Gaze
from regard.models.pretrained import Pretrained
from regard.train.data.images import Images
from regard.train.recipe import Recipe


@dataclass(frozen=True)
class Epoch:
    """What was seen after all training images had been shown once more.

    Attributes:
        number: counted from 1; 0 is before anything was learned.
        loss: the mean over the training images, each as it was met; nan for number 0.
        accuracy: on the test images, 0 to 1.
        seconds: of learning, without the test.
        rate: the last learning rate.
        gazes: where the heads of every layer look, by the layer's name; none for a ViT.
    """

    number: int
    loss: float
    accuracy: float
    seconds: float
    rate: float
    gazes: dict[str, Gaze] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, eq=False)
class Run:
    """A recipe and what came of it.

    Attributes:
        model: in evaluation mode, as after the last epoch.
        epochs: in their order; the first, number 0, is the model before it has learned anything.
        folder: where it is kept, or None.
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
        """Time of learning, all epochs together."""
        return sum(epoch.seconds for epoch in self.epochs)

    def __repr__(self) -> str:
        last = self.epochs[-1]
        return (
            f"Run({self.recipe.kind} on {self.data.name}, epoch {last.number} of {self.recipe.epochs}, "
            f"accuracy {last.accuracy:.4f})"
        )
