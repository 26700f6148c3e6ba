"""Pruning of degenerate heads."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import InputError
from regard.layers.profiles import HeadProfile, head_profiles
from regard.models.spatial import ContentPosition, LearnedPosition, SpatialHeads, SpatialTransformer
from regard.train.loop import train
from regard.train.run import Run
from regard.train.tasks.images import SpatialRecipe, accuracy


@dataclass(frozen=True, eq=False)
class Pruned:
    """A run without its degenerate heads.

    Attributes:
        dropped: the removed heads of every layer.
        before, after: accuracy of the run, and of the same model without these heads.
        tuned: the run that fine-tunes the pruned model.
    """

    dropped: dict[str, tuple[int, ...]]
    before: float
    after: float
    tuned: Run


def degenerate_heads(
    model: SpatialTransformer, condition: float = 1000.0, least: float = 1e-5
) -> dict[str, tuple[int, ...]]:
    """The degenerate heads of every layer that has some (`HeadProfile.degenerate`), whose attention is uniform.

    Source: the criterion of Cordonnier, Loukas and Jaggi's code. Where we differ: a layer keeps at least one head, the
    narrowest. Content-based heads are not considered.
    """
    found = {}
    for name, profile in head_profiles(model).items():
        flat = profile.degenerate(condition, least)
        if bool(flat.all()):
            flat[narrowest(profile)] = False
        if bool(flat.any()):
            found[name] = tuple(flat.nonzero()[:, 0].tolist())
    return found


def narrowest(profile: HeadProfile) -> int:
    """The head with the smallest width, by its precision where it has one: a uniform head has the width of the grid."""
    if profile.precision is not None:
        return int(torch.linalg.det(profile.precision.double()).argmax())
    return int(profile.width.argmin())


@torch.no_grad()
def prune(model: SpatialTransformer, drop: Mapping[str, Sequence[int]]) -> SpatialTransformer:
    r"""A new model without the given heads of each layer; all other parameters are the same.

        value(concat_h A_h x) = sum over the kept h of A_h x V_h + b

    The contribution of a dropped head is lost. For a head whose `V_h` is zero the logits do not change; a head with
    uniform attention adds the mean of all pixels, times `V_h`, to each pixel: measure before and after.

        >>> from regard.models.spatial import SpatialConfig, SpatialTransformer
        >>> model = SpatialTransformer(SpatialConfig(image=(6, 10), dim=8, heads=4, layers=2))
        >>> prune(model, {"blocks.1.attention": [0, 3]}).config.heads
        (4, 2)
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, SpatialHeads)}
    kept: dict[str, list[int]] = {}
    for name, layer in layers.items():
        unwanted = list(drop.get(name, ()))
        kept[name] = [head for head in range(layer.heads) if head not in unwanted]
        if not kept[name] or any(not 0 <= head < layer.heads for head in unwanted):
            raise InputError(
                f"These heads of {name} cannot be dropped.",
                asked=f"{name}: {unwanted}",
                found=f"{layer.heads} heads, 0 to {layer.heads - 1}",
                because="only heads that are there can be dropped, and a layer keeps at least one",
                instead="degenerate_heads(model)",
            )
    if unknown := [name for name in drop if name not in layers]:
        raise InputError(
            f"There is no layer {unknown[0]!r}.",
            asked=", ".join(unknown),
            found=", ".join(layers),
            because="heads are dropped layer by layer",
            instead="degenerate_heads(model)",
        )
    heads = tuple(len(some) for some in kept.values())
    config = dataclasses.replace(model.config, heads=heads if len(set(heads)) > 1 else heads[0])
    with torch.random.fork_rng(devices=[]):
        pruned = SpatialTransformer(config).to(next(model.parameters()))
    state = model.state_dict()
    for name, layer in layers.items():
        state |= {f"{name}.{key}": value for key, value in _kept_tensors(layer, kept[name]).items()}
    pruned.load_state_dict(state)
    return pruned.train(model.training)


def _kept_tensors(layer: SpatialHeads, kept: Sequence[int]) -> dict[str, Tensor]:
    """The tensors of a layer with a head axis, without the dropped heads."""
    index = torch.tensor(kept, device=layer.value.weight.device)

    def rows(tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (layer.heads, layer.dim))[index].flatten(0, 1)

    found = {"value.weight": layer.value.weight.unflatten(1, (layer.heads, layer.dim))[:, index].flatten(1)}
    if isinstance(layer.position, ContentPosition):
        for part in ("query", "key"):
            linear = getattr(layer, part)
            found |= {f"{part}.weight": rows(linear.weight), f"{part}.bias": rows(linear.bias)}
    elif isinstance(layer.position, LearnedPosition):
        found |= {f"position.{name}": getattr(layer.position, name)[index] for name in ("row_head", "column_head")}
    else:  # centres, spreads or roots, and their reference
        found |= {f"position.{name}": tensor[index] for name, tensor in layer.position.state_dict().items()}
    return found


def prune_run(
    run: Run,
    folder: str | os.PathLike[str] | None = None,
    *,
    drop: Mapping[str, Sequence[int]] | None = None,
    epochs: int | None = None,
    progress: bool = True,
) -> Pruned:
    """Drop the degenerate heads of a run, and fine-tune the rest at a tenth of the learning rate.

    drop: heads to drop, in place of `degenerate_heads`. epochs: a third of the run's if not given, as in the paper.

    Source: Cordonnier, Loukas and Jaggi (ICLR 2020), who trained the pruned model for 100 epochs after 300.
    """
    if not isinstance(run.recipe, SpatialRecipe) or not isinstance(run.model, SpatialTransformer):
        raise InputError(
            "Only positional heads can be degenerate.",
            asked=repr(run),
            because="the attention of a ViT depends on the image",
            instead="a run of a SpatialRecipe",
        )
    unwanted = degenerate_heads(run.model) if drop is None else {name: tuple(some) for name, some in drop.items()}
    model = prune(run.model, unwanted)
    recipe = dataclasses.replace(
        run.recipe,
        heads=model.config.heads,
        learning_rate=run.recipe.learning_rate / 10,
        epochs=max(1, run.recipe.epochs // 3) if epochs is None else epochs,
    )
    tuned = train(recipe, folder, progress=progress, data=run.data, start=model)
    return Pruned(unwanted, run.accuracy, accuracy(model, run.data), tuned)
