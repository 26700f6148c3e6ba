"""The average of the last checkpoints of a run."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from regard.errors import InputError
from regard.models.pretrained import Pretrained
from regard.train.checkpoint import find_checkpoints


def average_checkpoints(folder: str | os.PathLike[str], kind: type[Pretrained], last: int | None = None) -> Pretrained:
    """A model whose weights are the mean of those in a run's checkpoints.

    folder: of the run; kind: the class of its model; last: how many of the newest checkpoints; all that were kept if
    None.

    Source: Vaswani et al. (2017), section 6.1, who averaged the last 5 checkpoints of the base model.
    """
    places = find_checkpoints(Path(folder).expanduser())
    if not places or (last is not None and not 0 < last <= len(places)):
        raise InputError(
            "There are not that many checkpoints.",
            asked=f"last={last} in {folder}",
            found=f"{len(places)} checkpoints",
            because="a run keeps as many as its recipe says: keep_checkpoints",
            instead=f"last={len(places)}" if places else "the folder of a run that has begun",
        )
    chosen = places if last is None else places[-last:]
    model = kind.from_pretrained(chosen[-1])
    state = {name: tensor.to(torch.float64, copy=True) for name, tensor in model.state_dict().items()}
    for place in chosen[:-1]:
        for name, tensor in kind.from_pretrained(place).state_dict().items():
            state[name] += tensor.double()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(state[name] / len(chosen))
    return model.eval()
