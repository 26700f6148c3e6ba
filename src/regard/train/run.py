"""A run: its recipe, its evaluations, and the trained model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regard.layers.profiles import HeadProfile
from regard.models.pretrained import Pretrained
from regard.train.recipe import Recipe
from regard.train.task import Task


@dataclass(frozen=True)
class Evaluation:
    """The state of a run at one evaluation.

    Attributes:
        number: counted from 1; 0 is the initial model. With the default `eval_every` it is the number of epochs.
        step: optimizer steps so far.
        loss: the mean training loss since the evaluation before; nan for number 0.
        metrics: on the validation set.
        seconds: of training since the evaluation before, without evaluating.
        learning_rate: of the last step.
        units: tokens or images trained on since the evaluation before.
        head_profiles: where the heads of every layer attend, by the layer's name; empty for most models.
    """

    number: int
    step: int
    loss: float
    metrics: dict[str, float]
    seconds: float
    learning_rate: float
    units: int = 0
    head_profiles: dict[str, HeadProfile] = field(default_factory=dict, repr=False)

    @property
    def accuracy(self) -> float:
        """The metric of this name, 0 to 1."""
        return self.metrics["accuracy"]


@dataclass(frozen=True, eq=False)
class Run:
    """A recipe and its results.

    Attributes:
        recipe: the configuration.
        model: after the last step, in eval mode; the moving average if the recipe has one.
        evaluations: in order; the first, number 0, is the initial model.
        task: data, loss and metrics.
        folder: where the run is saved, or None.
        done: whether all steps were run, or none after them were needed (`patience`).
    """

    recipe: Recipe
    model: Pretrained
    evaluations: list[Evaluation]
    task: Task
    folder: Path | None = None
    done: bool = True

    @property
    def data(self) -> Any:
        """The data that the task was given."""
        return self.task.data

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the last evaluation."""
        return self.evaluations[-1].metrics

    @property
    def accuracy(self) -> float:
        """At the last evaluation, 0 to 1."""
        return self.evaluations[-1].accuracy

    @property
    def best(self) -> Evaluation:
        """The evaluation with the best metric of the task; the first of several."""
        name, sign = self.task.metric, 1 if self.task.higher_is_better else -1
        return max(self.evaluations, key=lambda each: sign * each.metrics[name])

    @property
    def seconds(self) -> float:
        """Training time, without evaluating."""
        return sum(evaluation.seconds for evaluation in self.evaluations)

    def __repr__(self) -> str:
        last = self.evaluations[-1]
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in last.metrics.items())
        name = self.recipe.data or "own data"
        return f"Run({self.recipe.kind} on {name}, step {last.step} of {self.task.steps}, {metrics})"
