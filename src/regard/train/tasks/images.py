"""Image classification: the recipes of the spatial transformer, ViT, DaViT and a ResNet, and their task."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.errors import ConfigError, InputError
from regard.layers.profiles import HeadProfile
from regard.models.davit import DaViT, DaViTConfig
from regard.models.pretrained import Pretrained
from regard.models.resnet import ResNet, ResNetConfig
from regard.models.spatial import SpatialConfig, SpatialTransformer
from regard.models.vit import ViT, ViTConfig
from regard.train import history
from regard.train.data import load
from regard.train.data.augment import Augmentation
from regard.train.data.images import Images
from regard.train.recipe import Recipe
from regard.train.task import ORDER, Task, seed_of, split_rows

# Batch size of the evaluation, and number of images on which content-based heads are measured.
EVAL_BATCH, PROFILED_IMAGES = 250, 64
# Changes for larger data sets to the defaults, which are for the digits.
FOR_DATA: dict[str, dict[str, Any]] = {
    "mnist": {"patch": 4, "epochs": 1, "batch_size": 64, "shift": 0, "turn": 0, "stretch": 0},
    "fashion-mnist": {"patch": 4, "epochs": 1, "batch_size": 64, "shift": 0, "turn": 0, "stretch": 0, "flip": True},
    "cifar10": {"patch": 4, "epochs": 10, "batch_size": 64, "shift": 4, "turn": 0, "stretch": 0, "flip": True},
}


@dataclass(frozen=True)
class ImageRecipe(Recipe):
    """Train a classifier of images.

    Attributes:
        data: the name of a data set, "digits", "mnist", "fashion-mnist" or "cifar10".
        held: evaluate on a fifth of the training set instead of the test set, for choosing hyperparameters.
        shift, turn, stretch, flip: augmentation of training images (`Augmentation`).
    """

    data: str = "digits"
    held: bool = False
    epochs: int = 40
    learning_rate: float = 4e-3
    label_smoothing: float = 0.1
    shift: float = 0.5
    turn: float = 10.0
    stretch: float = 0.1
    flip: bool = False

    @property
    def augmentation(self) -> Augmentation:
        return Augmentation(self.shift, self.turn, self.stretch, self.flip)

    @classmethod
    def on(cls, data: str, **changes: Any) -> Self:
        """A recipe for this data set: small models that take minutes.

        >>> from regard.train import SpatialRecipe
        >>> recipe = SpatialRecipe.on("mnist")
        >>> recipe.patch, recipe.epochs, recipe.shift
        (4, 1, 0)
        """
        names = {field.name for field in dataclasses.fields(cls)}  # a ResNet has no patches
        fitting = {name: value for name, value in FOR_DATA.get(data, {}).items() if name in names}
        return cls.from_dict({"data": data, **fitting, **changes})

    def make_task(self, data: Images | None = None) -> ImageTask:
        """The classification of the recipe's data set, or of the given images."""
        images = load(self.data) if data is None else data
        return ImageTask(self, images.held() if self.held and not images.is_held else images)

    def model(self, data: Images) -> Pretrained:
        """A new model for images of this size, initialised from torch's global generator."""
        raise NotImplementedError


@dataclass(frozen=True)
class SpatialRecipe(ImageRecipe):
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
    heads_share_channels: ClassVar[bool] = False

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
            data="cifar10", epochs=300, batch_size=100, optimizer="sgd", learning_rate=0.1, momentum=0.9,
            weight_decay=1e-4, warmup_steps=0.05, max_grad_norm=None, label_smoothing=0, shift=4,
            turn=0, stretch=0, flip=True, patch=2, dim=400, layers=6, heads=9, hidden_dim=512, dropout=0.1,
            attention_dropout=0.1, norm_eps=1e-12, keep_values=False,
        )  # fmt: skip
        return cls.from_dict(published | changes)


@dataclass(frozen=True)
class ViTRecipe(ImageRecipe):
    """Train a small `ViT`; the defaults are for the digits.

    patch, dim, layers, heads, hidden_dim: patch size, width, layers, heads, feed-forward size (the ViT's if None).
    pool, dropout: of the model; `pool` is "class" or "mean".
    initial: the standard deviation of the initial weights of feed-forward and output layers. A ViT's own 0.02 is meant
        for 768 channels; with fewer it is scaled by the square root of the ratio, `0.02 sqrt(768 / 64) = 0.07`, for
        activations of the same size. Queries, keys, values and patches use Xavier initialisation, the classifier zeros.
    """

    kind: ClassVar[str] = "vit"

    epochs: int = 100
    learning_rate: float = 2e-3
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


@dataclass(frozen=True)
class DaViTRecipe(ImageRecipe):
    """Train a small `DaViT`; the defaults are for the digits.

    dims, heads, depths: channels, heads and pairs of blocks of each stage.
    window, expansion, drop_path: of the model (`DaViTConfig`).
    """

    kind: ClassVar[str] = "davit"

    learning_rate: float = 2e-3
    dims: tuple[int, ...] = (48, 96)
    heads: tuple[int, ...] = (3, 6)
    depths: tuple[int, ...] = (1, 1)
    window: int = 4
    expansion: float = 2.0
    drop_path: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.config(1, 1)

    def config(self, channels: int, classes: int) -> DaViTConfig:
        """The model's own configuration."""
        names = ("dims", "heads", "depths", "window", "expansion", "drop_path")
        return DaViTConfig(channels=channels, classes=classes, **{name: getattr(self, name) for name in names})

    def model(self, data: Images) -> DaViT:
        return DaViT(self.config(data.shape[0], len(data.names)))


@dataclass(frozen=True)
class ResNetRecipe(ImageRecipe):
    """Train a small `ResNet`, the convolutional baseline.

    width, blocks: of the model (`ResNetConfig`); the defaults are He's ResNet-8 for CIFAR-10. The statistics of its
    batch norms are those of a micro-batch, so here `accumulation` changes the result.
    """

    kind: ClassVar[str] = "resnet"

    width: int = 16
    blocks: tuple[int, ...] = (1, 1, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        ResNetConfig(width=self.width, blocks=self.blocks)

    def model(self, data: Images) -> ResNet:
        sizes = {"channels": data.shape[0], "classes": len(data.names)}
        return ResNet(ResNetConfig(width=self.width, blocks=self.blocks, **sizes))


# The task


class ImageBatch(NamedTuple):
    """Images as they are stored, their labels, and their draw of the augmentation."""

    pixels: Tensor
    labels: Tensor
    drawn: Tensor


class ImageTask(Task[ImageRecipe]):
    """Classify images: cross-entropy with label smoothing, and accuracy on the test images."""

    unit: ClassVar[str] = "images"
    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True

    def __init__(self, recipe: ImageRecipe, images: Images) -> None:
        super().__init__(recipe, images)
        self.images = images
        self.evaluated_on = "validation set" if images.is_held else "test set"
        self._epoch: tuple[int, Tensor, Tensor] | None = None
        if recipe.batch_size > len(images.train):
            raise InputError(
                "The batch is larger than the training set.",
                asked=f"batch_size={recipe.batch_size}",
                found=f"{len(images.train)} training images",
                because="an epoch consists of whole batches",
                instead=f"batch_size={len(images.train)} or less",
            )

    @property
    def digest(self) -> str:
        return self.images.digest

    @property
    def steps_per_epoch(self) -> int:
        return len(self.images.train) // self.recipe.batch_size

    def _draw_epoch(self, epoch: int) -> tuple[Tensor, Tensor]:
        """Order and augmentation of the images in an epoch, which follow from the seed and its number."""
        if self._epoch is None or self._epoch[0] != epoch:
            count = len(self.images.train)
            generator = torch.Generator().manual_seed(seed_of(self.recipe.seed, ORDER, epoch))
            order = torch.randperm(count, generator=generator)
            self._epoch = epoch, order, self.recipe.augmentation.draw(count, generator)
        return self._epoch[1:]

    def _choose_images(self, step: int) -> Tensor:
        epoch, inside = divmod(step, self.steps_per_epoch)
        order, _ = self._draw_epoch(epoch)
        return order[inside * self.recipe.batch_size : (inside + 1) * self.recipe.batch_size]

    def make_batches(self, step: int) -> list[ImageBatch]:
        train = self.images.train
        chosen = self._choose_images(step)
        drawn = self._draw_epoch(step // self.steps_per_epoch)[1]
        return [
            ImageBatch(train.pixels[part], train.labels[part], drawn[part])
            for part in split_rows(chosen, self.micro_batches)
        ]

    def describe_batch(self, step: int) -> str:
        chosen = self._choose_images(step).tolist()
        return f"training images {', '.join(map(str, chosen[:8]))}{', ...' if len(chosen) > 8 else ''}"

    def count_units(self, batch: ImageBatch) -> int:
        return len(batch.labels)

    def build_model(self) -> Pretrained:
        return self.recipe.model(self.images)

    def count_terms(self, batch: ImageBatch) -> dict[str, int]:
        return {"loss": len(batch.labels)}

    def compute_terms(self, model: nn.Module, batch: ImageBatch) -> dict[str, Tensor]:
        images = self.recipe.augmentation.apply(batch.pixels.float() / self.images.train.white, batch.drawn)
        dtype = next(model.parameters()).dtype
        logits = model(self.images.normalise(images).to(dtype))
        smoothing = self.recipe.label_smoothing
        return {"loss": functional.cross_entropy(logits, batch.labels, label_smoothing=smoothing, reduction="sum")}

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        groups = super().parameter_groups(model)
        rate = getattr(self.recipe, "position_rate", 1.0)
        if rate == 1:
            return groups
        positions = {
            id(parameter): parameter for name, parameter in model.named_parameters() if ".position" in f".{name}"
        }
        for group in groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in positions]
        return [*groups, {"params": list(positions.values()), "weight_decay": 0.0, "share": rate}]

    def evaluate(self, model: Pretrained) -> dict[str, float]:
        right, loss = _score(model, self.images)
        return {"accuracy": right, "loss": loss}

    def measure_heads(self, model: Pretrained) -> dict[str, HeadProfile]:
        test = self.images.test
        observed = self.images.normalise(test.pixels[:PROFILED_IMAGES].float() / test.white)
        found = history.measure_head_profiles(model, observed.to(next(model.parameters()).dtype))
        if isinstance(self.recipe, SpatialRecipe) and not self.recipe.keep_values:
            return {name: HeadProfile(each.scores, each.centre, each.precision) for name, each in found.items()}
        return found


def accuracy(model: Pretrained, data: Images) -> float:
    """The accuracy of a model on the test images, 0 to 1; leaves the model in eval mode."""
    model.eval()
    return _score(model, data)[0]


@torch.no_grad()
def _score(model: Pretrained, data: Images) -> tuple[float, float]:
    """Accuracy and mean cross-entropy on the test images."""
    test, right, loss = data.test, 0, 0.0
    dtype = next(model.parameters()).dtype
    for start in range(0, len(test), EVAL_BATCH):
        pixels, labels = test.pixels[start : start + EVAL_BATCH], test.labels[start : start + EVAL_BATCH]
        logits = model(data.normalise(pixels.float() / test.white).to(dtype))
        right += int((logits.argmax(-1) == labels).sum())
        loss += functional.cross_entropy(logits, labels, reduction="sum").item()
    return right / len(test), loss / len(test)
