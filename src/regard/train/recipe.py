"""Recipes: frozen dataclasses with the configuration of a run, serialisable to JSON."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from torch import nn

from regard.errors import ConfigError
from regard.models.config import Config
from regard.models.pretrained import Pretrained
from regard.models.spatial import SpatialConfig, SpatialTransformer
from regard.models.validation import check_sizes
from regard.models.vit import ViT, ViTConfig
from regard.train.data.augment import Augmentation
from regard.train.data.images import Images

# Fields in [0, 1), and fields that are at least 0.
SHARES = ("momentum", "warmup", "smoothing", "stretch")
AMOUNTS = ("rate", "position_rate", "weight_decay", "shift", "turn", "initial")
LARGEST_SEED = 2**32 - 1
# Changes for larger data sets to the defaults, which are for the digits.
FOR_DATA: dict[str, dict[str, Any]] = {
    "mnist": {"patch": 4, "epochs": 1, "batch": 64, "shift": 0, "turn": 0, "stretch": 0},
    "cifar10": {"patch": 4, "epochs": 10, "batch": 64, "shift": 4, "turn": 0, "stretch": 0, "flip": True},
}


def check_seed(seed: int) -> None:
    """Raise for a seed out of range; the seeds of epochs are some millions of times as large."""
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
        data: the name of a data set, "digits", "mnist" or "cifar10".
        held: evaluate on a fifth of the training set instead of the test set, for choosing hyperparameters.
        epochs, batch, seed: number of epochs, batch size, and seed of all randomness.
        optimizer: "adamw", or "sgd" with `momentum`.
        rate: the peak learning rate, with linear warmup over the first `warmup` of all steps and cosine decay.
        weight_decay: on matrices only, never on norms, biases, centres, spreads or position tables.
        clip: the largest norm of the gradients; None for no clipping.
        smoothing: label smoothing.
        shift, turn, stretch, flip: augmentation of training images (`Augmentation`).
    """

    kind: ClassVar[str]

    data: str = "digits"
    held: bool = False
    epochs: int = 40
    batch: int = 32
    seed: int = 0
    optimizer: Literal["adamw", "sgd"] = "adamw"
    rate: float = 4e-3
    momentum: float = 0.9
    weight_decay: float = 0.05
    warmup: float = 0.05
    clip: float | None = 1.0
    smoothing: float = 0.1
    shift: float = 0.5
    turn: float = 10.0
    stretch: float = 0.1
    flip: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "epochs", "batch")
        check_seed(self.seed)
        for field in dataclasses.fields(self):
            value, most = getattr(self, field.name), 1.0 if field.name in SHARES else math.inf
            if field.name in (*SHARES, *AMOUNTS) and not 0 <= value < most:
                raise ConfigError(
                    f"A recipe cannot have {field.name}={value}.",
                    asked=f"{type(self).__name__}({field.name}={value})",
                    because=f"it must be at least 0{'' if math.isinf(most) else ' and less than 1'}",
                    instead=f"{field.name}={field.default}",
                )
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(
                f"A recipe cannot have clip={self.clip}.",
                asked=f"{type(self).__name__}(clip={self.clip})",
                because="a norm of 0 removes the gradient",
                instead="clip=1.0, or None for no clipping",
            )

    @property
    def augmentation(self) -> Augmentation:
        return Augmentation(self.shift, self.turn, self.stretch, self.flip)

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

    @classmethod
    def on(cls, data: str, **changes: Any) -> Self:
        """A recipe for this data set: small models that take minutes.

        >>> from regard.train import SpatialRecipe
        >>> recipe = SpatialRecipe.on("mnist")
        >>> recipe.patch, recipe.epochs, recipe.shift
        (4, 1, 0)
        """
        return cls.from_dict({"data": data, **FOR_DATA.get(data, {}), **changes})

    def model(self, data: Images) -> Pretrained:
        """A new model for images of this size, initialised from torch's global generator."""
        raise NotImplementedError


@dataclass(frozen=True)
class SpatialRecipe(Recipe):
    """Train a `SpatialTransformer`; the defaults are for the digits.

    position: "quadratic", "gaussian", "learned" or "content".
    patch, dim, layers, heads, hidden_dim: patch size, width, layers, heads (a tuple for each layer), feed-forward size.
    dropout, attention_dropout, norm_eps: of the model.
    position_rate: factor of the learning rate of head positions (centres, spreads, tables).
    keep_values: whether the value matrices of the heads are saved every epoch, beside the head positions.

        >>> from regard.train import SpatialRecipe
        >>> SpatialRecipe.paper().epochs, SpatialRecipe.paper().heads
        (300, 9)
    """

    kind: ClassVar[str] = "spatial"

    position: str = "quadratic"
    patch: int = 2
    dim: int = 64
    layers: int = 3
    heads: int | tuple[int, ...] = 9
    hidden_dim: int = 128
    dropout: float = 0.0
    attention_dropout: float = 0.0
    norm_eps: float = 1e-5
    position_rate: float = 1.0
    keep_values: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.config((self.patch, self.patch), 1, 1)  # raises for inconsistent values

    def config(self, image: tuple[int, int], channels: int, classes: int) -> SpatialConfig:
        """The model's own configuration, for images of this size."""
        names = (
            "position",
            "patch",
            "dim",
            "layers",
            "heads",
            "hidden_dim",
            "dropout",
            "attention_dropout",
            "norm_eps",
        )
        return SpatialConfig(
            image=image, channels=channels, classes=classes, **{name: getattr(self, name) for name in names}
        )

    def model(self, data: Images) -> SpatialTransformer:
        channels, *image = data.shape
        return SpatialTransformer(self.config((image[0], image[1]), channels, len(data.names)))

    @classmethod
    def paper(cls, **changes: Any) -> Self:
        """The published run on CIFAR-10: six layers of nine heads of 400 channels, 300 epochs.

        Source: Cordonnier, Loukas and Jaggi (ICLR 2020), appendix, and their code. Where we differ: their code divides
        by 0.2023, 0.1994 and 0.2010, which are not the standard deviations of the channels (0.2470, 0.2435, 0.2616).
        """
        published = dict(
            data="cifar10", epochs=300, batch=100, optimizer="sgd", rate=0.1, momentum=0.9, weight_decay=1e-4,
            warmup=0.05, clip=None, smoothing=0, shift=4, turn=0, stretch=0, flip=True,
            patch=2, dim=400, layers=6, heads=9, hidden_dim=512, dropout=0.1,
            attention_dropout=0.1, norm_eps=1e-12, keep_values=False,
        )  # fmt: skip
        return cls.from_dict(published | changes)


@dataclass(frozen=True)
class ViTRecipe(Recipe):
    """Train a small `ViT`; the defaults are for the digits.

    patch, dim, layers, heads, hidden_dim: patch size, width, layers, heads, feed-forward size (the ViT's if None).
    pool, dropout: of the model; `pool` is "class" or "mean".
    initial: the standard deviation of the initial weights of feed-forward and output layers. A ViT's own 0.02 is meant
        for 768 channels; with fewer it is scaled by the square root of the ratio, `0.02 sqrt(768 / 64) = 0.07`, for
        activations of the same size. Queries, keys, values and patches use Xavier initialisation, the classifier zeros.
    """

    kind: ClassVar[str] = "vit"

    epochs: int = 100
    rate: float = 2e-3
    patch: int = 2
    dim: int = 64
    layers: int = 3
    heads: int = 4
    hidden_dim: int | None = None
    pool: str = "class"
    dropout: float = 0.0
    initial: float = 0.07

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.initial > 0:
            raise ConfigError(
                f"A recipe cannot have initial={self.initial}.",
                asked=f"{type(self).__name__}(initial={self.initial})",
                because="with zero weights these layers get no gradient",
                instead="initial=0.07",
            )
        self.config((self.patch, self.patch), 1, 1)

    def config(self, image: tuple[int, int], channels: int, classes: int) -> ViTConfig:
        """The model's own configuration, for images of this size."""
        names = ("patch", "dim", "layers", "heads", "hidden_dim", "pool", "dropout")
        return ViTConfig(
            image=image, channels=channels, classes=classes, **{name: getattr(self, name) for name in names}
        )

    def model(self, data: Images) -> ViT:
        channels, *image = data.shape
        model = ViT(self.config((image[0], image[1]), channels, len(data.names)))
        for module in model.modules():
            if isinstance(module, nn.Linear) and module is not model.head:  # initialised with zeros
                nn.init.trunc_normal_(module.weight, std=self.initial)
        return model


KINDS: dict[str, type[Recipe]] = {recipe.kind: recipe for recipe in (SpatialRecipe, ViTRecipe)}


def read_recipe(value: dict[str, Any]) -> Recipe:
    """The recipe of any kind that `to_json` wrote."""
    kind = value.get("kind")
    if kind not in KINDS:
        raise ConfigError(
            f"There is no recipe of the kind {kind!r}.",
            asked=f"kind={kind!r}",
            because=f"the kinds are {', '.join(KINDS)}",
            instead="a recipe.json that a run has written",
        )
    return KINDS[kind].from_json(value)
