"""The base of all recipes: a frozen dataclass with the whole configuration of a run, serialisable to JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from regard.errors import ConfigError
from regard.models.config import Config
from regard.models.io import atomic
from regard.models.validation import check_sizes

if TYPE_CHECKING:
    from regard.train.task import Task

# Fields that lie in [0, 1), and fields that are at least 0; a recipe need not have all of them.
SHARES = ("momentum", "beta1", "beta2", "label_smoothing", "stretch", "dropout", "attention_dropout", "ema_decay")
AMOUNTS = (
    "learning_rate", "min_learning_rate", "position_rate", "weight_decay", "warmup_steps", "eps", "initial",
    "shift", "turn", "sample_tokens", "eval_pairs",
)  # fmt: skip
COUNTS = (
    "epochs", "steps", "batch_size", "accumulation", "eval_every", "log_every", "keep_checkpoints", "patience",
    "eval_batches", "tokens_per_batch", "max_length", "max_predictions", "num_beams",
)  # fmt: skip
LARGEST_SEED = 2**32 - 1


def check_seed(seed: int) -> None:
    """Raise for a seed out of range; the seeds of steps are some millions of times as large."""
    if abs(seed) > LARGEST_SEED:
        raise ConfigError(
            f"A recipe cannot have seed={seed}.",
            asked=f"seed={seed}",
            because=f"a seed is an integer between -{LARGEST_SEED:,} and {LARGEST_SEED:,}",
            instead=f"seed={seed % (LARGEST_SEED + 1)}",
        )


@dataclass(frozen=True)
class Recipe(Config):
    """The configuration of a run; the same recipe gives bit-identical results on the same machine.

    Attributes:
        data: the name of a data set, or the path of a file of your own.
        epochs: passes over the training set, where `steps` is not given.
        steps: optimizer steps.
        batch_size: examples of one optimizer step.
        accumulation: micro-batches that a batch is split into; the gradient is the same, the memory is less.
        seed: of initialisation, data order, augmentation and dropout.
        optimizer: "adamw" with `beta1`, `beta2`, `eps`, or "sgd" with `momentum`.
        learning_rate: the peak; for `schedule="noam"` the factor of Noam's formula.
        schedule: "cosine" or "linear" decay to `min_learning_rate`, "constant", or "noam" (`learning_rate_at`).
        warmup_steps: steps of linear warm-up; below 1, a share of all steps.
        weight_decay: on matrices only, never on norms, biases, centres, spreads or position tables.
        max_grad_norm: gradients are clipped to this norm; None for no clipping.
        label_smoothing: probability mass that the target distribution gives to all classes evenly.
        ema_decay: keep an exponential moving average of the weights, which is evaluated and saved; None for none.
        precision: "float32", "float64", or "bfloat16" for mixed precision by autocast.
        compile: whether the model is compiled by `torch.compile`.
        eval_every: steps between evaluations and checkpoints; once per epoch if None.
        log_every: steps between lines of `steps.jsonl`.
        keep_checkpoints: how many of the newest checkpoints are kept, beside the best.
        patience: stop after this many evaluations without a better metric; None for never.
    """

    kind: ClassVar[str] = ""
    kinds: ClassVar[dict[str, type[Recipe]]] = {}
    # Whether each head of the model has dim / heads channels.
    heads_share_channels: ClassVar[bool] = True

    data: str = ""
    epochs: int = 1
    steps: int | None = None
    batch_size: int = 32
    accumulation: int = 1
    seed: int = 0
    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 1e-3
    min_learning_rate: float = 0.0
    schedule: Literal["cosine", "linear", "constant", "noam"] = "cosine"
    warmup_steps: float = 0.05
    momentum: float = 0.9
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.05
    max_grad_norm: float | None = 1.0
    label_smoothing: float = 0.0
    ema_decay: float | None = None
    precision: Literal["float32", "float64", "bfloat16"] = "float32"
    compile: bool = False
    eval_every: int | None = None
    log_every: int = 10
    keep_checkpoints: int = 1
    patience: int | None = None

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if kind := cls.__dict__.get("kind"):
            Recipe.kinds[kind] = cls

    def __post_init__(self) -> None:
        names = {field.name for field in dataclasses.fields(self)}
        check_sizes(self, *(name for name in COUNTS if name in names))
        check_seed(self.seed)
        for field in dataclasses.fields(self):
            value, most = getattr(self, field.name), 1.0 if field.name in SHARES else math.inf
            if field.name in (*SHARES, *AMOUNTS) and value is not None and not 0 <= value < most:
                raise ConfigError(
                    f"A recipe cannot have {field.name}={value}.",
                    asked=f"{type(self).__name__}({field.name}={value})",
                    because=f"it must be at least 0 and {'finite' if math.isinf(most) else 'less than 1'}",
                    instead=f"{field.name}={field.default}",
                )
        dim, heads = getattr(self, "dim", None), getattr(self, "heads", None)
        if self.heads_share_channels and isinstance(dim, int) and isinstance(heads, int) and heads > 0 and dim % heads:
            raise ConfigError(
                f"{heads} heads cannot share {dim} channels evenly.",
                asked=f"{type(self).__name__}(dim={dim}, heads={heads})",
                because="every head has dim / heads channels",
                instead=f"heads={math.gcd(dim, heads)}, or dim={-(-dim // heads) * heads}",
            )
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(
                f"A recipe cannot have max_grad_norm={self.max_grad_norm}.",
                asked=f"{type(self).__name__}(max_grad_norm={self.max_grad_norm})",
                because="a norm of 0 removes the gradient",
                instead="max_grad_norm=1.0, or None for no clipping",
            )
        if self.schedule == "noam" and "dim" not in names:
            raise ConfigError(
                f"A {type(self).__name__} cannot have Noam's schedule.",
                asked='schedule="noam"',
                because="its formula has the width of the model, and this recipe has no dim",
                instead='schedule="cosine"',
            )

    def make_task(self, data: Any = None) -> Task:
        """The task of this recipe, on its own data set or on the given data."""
        raise NotImplementedError

    # Files

    def to_json(self) -> dict[str, Any]:
        """The recipe as JSON types, with its kind."""
        return {"kind": self.kind, **self.to_dict()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """The recipe of a `to_json`; raises for another kind."""
        if value.get("kind") != cls.kind:
            raise ConfigError(
                f"This is not a {cls.__name__}.",
                asked=f"kind={value.get('kind')!r}",
                because=f"a {cls.__name__} has kind={cls.kind!r}",
                instead="regard.train.read_recipe, which reads every kind",
            )
        return cls.from_dict({name: field for name, field in value.items() if name != "kind"})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recipe to a JSON file, for `read_recipe` and `regard train --recipe`."""
        atomic.write_atomically(Path(path), atomic.make_json_writer(self.to_json()))


def read_recipe(value: dict[str, Any] | str | os.PathLike[str]) -> Recipe:
    """The recipe of any kind, from `to_json` or from a JSON or TOML file; a file may leave out fields.

    >>> read_recipe({"kind": "vit", "layers": 2}).layers
    2
    """
    import regard.train.tasks  # noqa: F401 (registers every kind)

    fields = value if isinstance(value, dict) else read_recipe_fields(value)
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in Recipe.kinds:
        raise ConfigError(
            f"There is no recipe of the kind {kind!r}.",
            asked=f"kind={kind!r}",
            because=f"the kinds are {', '.join(Recipe.kinds)}",
            instead="a recipe.json that a run has written",
        )
    return Recipe.kinds[kind].from_json(fields)


def read_recipe_fields(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields in a JSON or TOML file."""
    place = Path(path).expanduser()
    if not place.is_file():
        raise ConfigError(
            f"There is no recipe {str(path)!r}.",
            asked=str(path),
            found=f"no such file in {Path.cwd()}",
            because="a recipe is a .json or .toml file with some of its fields",
            instead="the recipe.json in the folder of a run, or a file of your own",
        )
    if place.suffix != ".toml":
        return atomic.read_json(place)
    atomic.check_file(place)
    try:
        return tomllib.loads(place.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as failure:
        raise ConfigError(
            f"{place.name} is not a TOML file.",
            asked=str(place),
            found=str(failure),
            because="a recipe is a table of fields",
            instead=f"{json.dumps({'kind': 'gpt'})} in a .json file, or kind = 'gpt' in a .toml file",
        ) from failure
