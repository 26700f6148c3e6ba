"""A task: what the training loop needs to know of the data, the model, the loss and the metrics.

The loop (`regard.train.loop`) knows no more than this class. Data order and randomness are pure functions of the
recipe's seed and of the step, so that a run is resumed from any step without the state of a data loader.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from regard.distributed import SequenceLayout
from regard.layers.profiles import HeadProfile
from regard.models.pretrained import Pretrained
from regard.train.recipe import Recipe

AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)
# Random streams of a run; initialisation uses the seed itself.
ORDER, DROPOUT, MASKING = "order", "dropout", "masking"


def seed_of(seed: int, stream: str, number: int) -> int:
    """A seed for step or epoch `number` of a random stream; other streams and numbers have unrelated ones."""
    digest = hashlib.sha256(f"{seed} {stream} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


class Task(ABC, Generic[AnyRecipe]):
    """Data, model, loss and metrics of one kind of training.

    A subclass is built from a recipe and its data, `recipe.make_task(data)`, and overrides the abstract methods.

    Attributes:
        recipe: the configuration.
        data: what the task was built from.
        unit: what the throughput counts, "tokens" or "images".
        evaluated_on: the part of the data that `evaluate` reads, in words.
        metric, higher_is_better: the evaluation metric by which the best checkpoint is chosen.
        term_weights: the weight of each term of the loss; 1 for those that are not named.
        micro_batches: how many a batch is split into: `recipe.accumulation` for each process that shares it.
    """

    unit: ClassVar[str] = "tokens"
    metric: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False
    term_weights: Mapping[str, float] = {}
    evaluated_on: str = "validation set"

    def __init__(self, recipe: AnyRecipe, data: Any = None) -> None:
        self.recipe = recipe
        self.data = data
        self.micro_batches = recipe.accumulation

    # Data

    @property
    @abstractmethod
    def digest(self) -> str:
        """A sha256 of the data; a run is resumed on the same data only."""

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one pass over the training set."""

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        if self.recipe.steps is not None:
            return self.recipe.steps
        return self.recipe.epochs * self.steps_per_epoch

    @abstractmethod
    def make_batches(self, step: int) -> Sequence[Any]:
        """The `micro_batches` of a step, a pure function of the seed and the step; fewer if there are fewer rows."""

    @abstractmethod
    def describe_batch(self, step: int) -> str:
        """Which examples step `step` trains on, for error messages."""

    @abstractmethod
    def count_units(self, batch: Any) -> int:
        """The tokens or images of a micro-batch, for the throughput."""

    # Several processes

    def check_split(self) -> str | None:
        """Why a batch must not be split over processes, or `None`."""
        return None

    def count_tokens(self, batch: Any) -> int | None:
        """The length of a micro-batch's sequences, or `None` if they cannot be cut over processes."""
        return None

    def take_tokens(self, batch: Any, layout: SequenceLayout, process: int) -> Any:
        """The part of a micro-batch that one of the processes has which share its sequences."""
        raise NotImplementedError

    # Model and loss

    @abstractmethod
    def build_model(self) -> Pretrained:
        """A new model, initialised from torch's global generator."""

    @abstractmethod
    def count_terms(self, batch: Any) -> dict[str, int]:
        """By how many targets each term of the loss is divided, for one micro-batch."""

    @abstractmethod
    def compute_terms(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Each term of the loss, summed over the targets of a micro-batch.

        The loss of a step is the sum over terms of `weight * (sum over all micro-batches) / (count over all of them)`,
        which does not depend on how a batch is split.
        """

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Parameter groups of the optimizer: weight decay on matrices only, never on norms, biases or tables.

        A group may hold `"share"`, a factor of the learning rate.
        """
        decayed, others = [], []
        for name, parameter in model.named_parameters():
            (decayed if parameter.ndim > 1 and not is_exempt(name) else others).append(parameter)
        groups = [
            {"params": decayed, "weight_decay": self.recipe.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    # Evaluation

    @abstractmethod
    def evaluate(self, model: Pretrained) -> dict[str, float]:
        """Metrics on the validation set, with the model in eval mode and without gradients; `metric` is one of them."""

    def make_samples(self, model: Pretrained) -> list[str]:
        """Texts that show what the model has learned so far; written to `samples.jsonl` at every evaluation."""
        return []

    def measure_heads(self, model: Pretrained) -> dict[str, HeadProfile]:
        """Where the heads of every layer attend, for models with positional heads."""
        return {}

    # Files

    def companions(self) -> dict[str, bytes]:
        """Files that are saved beside the model, by name: `tokenizer.json` and the like."""
        return {}


def is_exempt(name: str) -> bool:
    """Whether a parameter is exempt from weight decay whatever its shape: positions and class tokens."""
    return ".position" in f".{name}" or name.endswith("class_token")


def split_rows(rows: Tensor, parts: int) -> list[Tensor]:
    """The rows of a batch in `parts` micro-batches of nearly equal size; fewer if there are fewer rows."""
    return [part for part in torch.tensor_split(rows, min(parts, len(rows))) if len(part)]
