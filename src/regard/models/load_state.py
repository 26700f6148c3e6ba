"""Load a state dict into a model that was built on the meta device, and report what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.errors import CheckpointError, RegardError
from regard.kernels.quantized import QuantizedTensor
from regard.models.attention_text import comparison_key
from regard.models.config import Config

State = dict[str, Tensor]
Model = TypeVar("Model", bound=nn.Module)

# How many tensors an error names.
NAMED = 8
# What layers compute with.
COMPUTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def build_from_state(
    build: Callable[[Any], Model], config: Config, state: State, dtype: torch.dtype | None, source: str
) -> Model:
    """The model of a configuration with these tensors, copied one by one; `state` is emptied on the way.

    At no time is there more than one copy of the model and one tensor more, and none of it is initialised in vain.
    dtype: of the floating-point tensors; None keeps theirs. Tensors of several dtypes are widened to the smallest one
    that holds them all, since layers compute in one.
    """
    check_layers(config, state, source)
    try:
        with torch.device("meta"):
            model = build(config)
    except (RuntimeError, OverflowError, TypeError, MemoryError) as failure:
        if isinstance(failure, RegardError):
            raise
        raise CheckpointError(
            "No model can be built with these sizes.",
            asked=f"a model from {source}",
            found=f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:200]}",
            because="a size of the configuration is beyond what a tensor can have",
            instead="the configuration these tensors were saved with",
        ) from failure
    check_tensor_kinds(model, state, source)
    groups = group_tied_names(model)
    check_state(model, groups, state, source)
    dtype = dtype or find_common_dtype(state)
    while groups:
        names = groups.pop()
        sources = [state.pop(name) for name in names if name in state]
        _assign_tensor(model, names, _copy_tensor(sources[0], dtype))
    _reset_buffers(model, source)
    if dtype is not None:
        model.to(dtype)  # buffers that were computed anew, too
    return model.eval()


def check_tensor_kinds(model: nn.Module, state: State, source: str) -> None:
    """Refuse tensors that no layer computes with: integers, complex numbers, float8, and those that are not dense."""
    learned = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in state.items():
        plain = tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_quantized)
        if not plain or (name in learned and tensor.dtype not in COMPUTED):
            raise CheckpointError(
                f"{name!r} is no tensor of weights.",
                asked=source,
                found=f"{tensor.dtype}" if plain else "a tensor that is nested, sparse or quantised",
                because="a model is made of dense tensors of float16, bfloat16, float32 or float64",
                instead="a checkpoint whose tensors were converted to one of these before they were saved",
            )


def find_common_dtype(state: State) -> torch.dtype | None:
    """The smallest floating-point dtype that holds every floating-point tensor exactly; None without any."""
    common: torch.dtype | None = None
    for tensor in state.values():
        if tensor.is_floating_point():
            common = tensor.dtype if common is None else torch.promote_types(common, tensor.dtype)
    return common


def check_layers(config: Config, state: State, source: str) -> None:
    """Refuse more layers than tensors, before layers are built or counted one by one: a broken number takes forever."""
    layers = max(getattr(config, "layers", 0), *getattr(config, "depths", ()), 0)
    if layers > len(state):
        raise CheckpointError(
            "There are more layers than tensors.",
            asked=f"a model of {layers} layers from {source}",
            found=f"{len(state)} tensors",
            because="every layer has tensors of its own",
            instead="the configuration these tensors were saved with",
        )


def group_tied_names(model: nn.Module) -> list[list[str]]:
    """The names of the model's state, in groups that are one tensor; most groups have one name."""
    groups: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())


def find_stored_names(model: nn.Module) -> set[str]:
    """One name for each tensor of the model: the first."""
    return {names[0] for names in group_tied_names(model)}


def check_state(model: nn.Module, groups: list[list[str]], state: State, source: str) -> None:
    """Refuse a state that is not exactly the model's: every tensor there, none more, each of its shape."""
    if faults := _find_mismatches(model, groups, state):
        raise CheckpointError(
            f"These tensors do not make this {type(model).__name__}.",
            asked=f"{type(model).__name__} from {source}",
            found="\n".join(faults),
            because=f"a model needs each of its {len(groups)} tensors, in its shape, and has no place for others",
            instead="the configuration these tensors were saved with, or the tensors of this configuration",
        )


def check_matches_config(model: nn.Module, build: Callable[[Any], nn.Module], config: Config) -> None:
    """Refuse a model that was changed by hand, so that what its configuration builds has no place for its tensors."""
    with torch.device("meta"):
        twin = build(config)
    groups = group_tied_names(twin)
    place = {name: index for index, names in enumerate(groups) for name in names}
    joined = [names for names in group_tied_names(model) if len({place.get(name) for name in names}) > 1]
    faults = [
        *_find_mismatches(twin, groups, model.state_dict()),
        *_format_lines("tied here, but not by the configuration", [" and ".join(names) for names in joined]),
        *_format_lines("described otherwise", _find_changed_attentions(model, twin)),
    ]
    if faults:
        raise CheckpointError(
            f"This {type(model).__name__} is no longer the one of its configuration.",
            asked=repr(config),
            found="\n".join(faults),
            because="a checkpoint is read into the model that its configuration builds, which is another",
            instead="undo what was changed by hand, say it in the configuration (attention=...), or keep the tensors "
            "alone: model.state_dict()",
        )


def _find_changed_attentions(model: nn.Module, twin: nn.Module) -> list[str]:
    """The layers whose description of attention is another than in the model that the configuration builds."""
    built = {name: attention for name, module in twin.named_modules() if (attention := _find_description(module))}
    changed = []
    for name, module in model.named_modules():
        found = _find_description(module)
        if name in built and found is not None and comparison_key(found) != comparison_key(built[name]):
            changed.append(f"{name} is {found!r}, by the configuration {built[name]!r}")
    return changed


def _find_description(module: nn.Module) -> Attention | None:
    found = getattr(module, "attention", None)
    return found if isinstance(found, Attention) else None


def check_dtype(dtype: torch.dtype | None) -> None:
    """Refuse what layers do not compute in: integers, complex numbers, float8."""
    if dtype is not None and dtype not in COMPUTED:
        raise CheckpointError(
            f"A model cannot be loaded in {dtype!r}.",
            asked=f"dtype={dtype!r}",
            because="layers compute in float16, bfloat16, float32 or float64",
            instead=f"dtype=torch.{dtype}"
            if isinstance(dtype, str) and getattr(torch, dtype, None) in COMPUTED
            else "dtype=torch.float32 or torch.bfloat16, or None for the file's own",
        )


def _find_mismatches(model: nn.Module, groups: list[list[str]], state: State) -> list[str]:
    """What is wrong with a state, a line for each tensor."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    lacking = [names[0] for names in groups if not any(name in state for name in names)]
    extra = [name for name in state if name not in shapes]
    misshapen = [name for name, shape in shapes.items() if name in state and tuple(state[name].shape) != shape]
    divided = [names for names in groups if not lacking and not misshapen and _have_different_values(names, state)]
    return [
        *_format_lines("missing", [f"{name} {shapes[name]}" for name in lacking]),
        *_format_lines("extra", [f"{name} {tuple(state[name].shape)}" for name in extra]),
        *_format_lines("misshapen", [f"{name} {tuple(state[name].shape)}, not {shapes[name]}" for name in misshapen]),
        *_format_lines(
            "tied, yet different", [" and ".join(name for name in names if name in state) for names in divided]
        ),
    ]


def _have_different_values(names: list[str], state: State) -> bool:
    """Whether a file has several tensors for one that the model has once."""
    first, *others = [state[name] for name in names if name in state]
    return any(first.data_ptr() != other.data_ptr() and not torch.equal(first, other) for other in others)


def _format_lines(kind: str, items: list[str]) -> list[str]:
    shown = [f"{kind}: {item}" for item in items[:NAMED]]
    return [*shown, f"{kind}: {len(items) - NAMED} more"] if len(items) > NAMED else shown


def _copy_tensor(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A copy in memory of its own, since the tensor may be a view of a file; blocks are moved later, all together."""
    if isinstance(tensor, QuantizedTensor):
        return tensor
    target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=target, device=tensor.device).copy_(tensor.detach())


def _assign_tensor(model: nn.Module, names: list[str], tensor: Tensor) -> None:
    """Share one tensor object between all modules that have the parameter."""
    placed: nn.Parameter | Tensor | None = None
    for name in names:
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        if last in module._parameters:
            if placed is None:
                old = module._parameters[last]
                needs_grad = old is not None and old.requires_grad and not isinstance(tensor, QuantizedTensor)
                placed = nn.Parameter(tensor, requires_grad=needs_grad)
            setattr(module, last, placed)
        else:
            module._buffers[last] = tensor


def _reset_buffers(model: nn.Module, source: str) -> None:
    """Compute the buffers that are not in the state dict, and check that no tensor is left on the meta device."""
    for module in model.modules():
        if callable(reset := getattr(module, "reset_buffers", None)):
            reset()
    empty = [
        f"{path or type(model).__name__}.{name}"
        for path, module in model.named_modules()
        for name, value in (*module._parameters.items(), *module._buffers.items(), *vars(module).items())
        if isinstance(value, Tensor) and value.is_meta
    ]
    if empty:
        raise CheckpointError(
            f"{type(model).__name__} keeps tensors that no file holds.",
            asked=f"{type(model).__name__} from {source}",
            found=", ".join(empty[:NAMED]),
            because="they were computed while the model was built, on a device without memory",
            instead="compute them on first use, or in a method reset_buffers()",
        )
