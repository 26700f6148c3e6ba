"""How each model is spread over processes: which of its modules are sharded and recomputed as one unit.

FSDP2 (`fully_shard`) gathers the parameters of a unit before it runs and releases them after; activation checkpointing
computes a unit again in the backward pass. In every model here the unit is a block, and what is left (embeddings, the
last norm, heads) belongs to the root. Nothing of this is inside a model's own file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from regard.errors import ConfigError
from regard.models.bert import Bert
from regard.models.bert_heads import BertForClassification, BertForPretraining
from regard.models.davit import DaViT
from regard.models.gpt import GPT
from regard.models.pretrained import Pretrained
from regard.models.resnet import ResNet
from regard.models.spatial import SpatialTransformer
from regard.models.transformer import Transformer
from regard.models.vit import ViT

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def list_units(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model, in the order in which they run."""
    for kind, find in UNITS.items():
        if isinstance(model, kind):
            return list(find(model))
    raise ConfigError(
        f"There is no plan to spread a {type(model).__name__} over processes.",
        asked=f"a {type(model).__name__} in units",
        because=f"its blocks are not known; those of {', '.join(kind.__name__ for kind in UNITS)} are",
        instead='the strategy "ddp", which needs no units',
    )


def _blocks(model: Any) -> Iterator[nn.Module]:
    yield from model.blocks


def _encoder_blocks(model: Any) -> Iterator[nn.Module]:
    yield from model.bert.blocks


def _encoder_decoder_blocks(model: Any) -> Iterator[nn.Module]:
    yield from model.encoder
    yield from model.decoder


def _stage_blocks(model: Any) -> Iterator[nn.Module]:
    for stage in model.stages:
        yield from stage.blocks


UNITS: dict[type[Pretrained], Callable[[Any], Iterator[nn.Module]]] = {
    GPT: _blocks,
    Bert: _blocks,
    BertForPretraining: _encoder_blocks,
    BertForClassification: _encoder_blocks,
    ViT: _blocks,
    SpatialTransformer: _blocks,
    Transformer: _encoder_decoder_blocks,
    DaViT: _stage_blocks,
    ResNet: _blocks,
}


def shard_model(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None = None) -> None:
    """Shard parameters, gradients and optimizer state over the mesh by FSDP2, block by block, in place.

    dtype: of the gathered parameters and the computation, bfloat16 for mixed precision; gradients are summed in
        float32. None leaves all in the precision of the parameters.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # FSDP would cast inputs too, and rebuild a pattern among them from its fields, which are not its arguments.
    policy = MixedPrecisionPolicy(dtype, None if dtype is None else torch.float32, cast_forward_inputs=False)
    for unit in (*list_units(model), model):
        if dtype is not None:
            unit.register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True)
        fully_shard(unit, mesh=mesh, mp_policy=policy)


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    def cast(each: Any) -> Any:
        return each.to(dtype) if isinstance(each, torch.Tensor) and each.is_floating_point() else each

    return tree_map(cast, (args, kwargs))


def checkpoint_activations(model: nn.Module) -> None:
    """Compute every block again in the backward pass, instead of keeping what it computed, in place."""
    from torch.utils.checkpoint import checkpoint

    for unit in list_units(model):
        forward = unit.forward
        norms = [each for each in unit.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]

        def again(*args: Any, _forward: Callable = forward, _norms: list = norms, **kwargs: Any) -> Any:
            contexts = partial(_make_contexts, _norms)
            return checkpoint(_forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

        unit.forward = again  # type: ignore[method-assign]


def _make_contexts(norms: list[Any]) -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
    """Those of the first computation and of the second, which counts no batch in the statistics of batch norms."""
    return contextlib.nullcontext(), _keep_statistics(norms)


@contextlib.contextmanager
def _keep_statistics(norms: list[Any]) -> Iterator[None]:
    kept = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:  # the same operations as before: only their result is the old one
        norm.momentum = 0.0
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked = norm.num_batches_tracked.clone()
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, kept, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
