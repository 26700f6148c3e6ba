"""The layout of a model in another library: what its configuration and its tensors are called there."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.errors import CheckpointError, ConfigError, RegardError
from regard.models.config import Config

State = dict[str, Tensor]
# A name of ours, without `.weight` or `.bias`, and theirs; several of theirs are the rows of one tensor of ours, in
# this order. `{}` is the number of the layer.
Names = Mapping[str, str | tuple[str, ...]]

# Names of activations at Hugging Face, and ours.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
# Hugging Face's configurations have ids of their own vocabulary as defaults, which need not exist in another.
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None}


class Converter(ABC):
    """A layout of the same model in another library: its configuration and its names, both ways.

    Every method is pure; tensors are renamed, reshaped, split or joined, never rounded. Their configuration has many
    keys that change nothing here, and these are ignored; one that would change the result and has no counterpart is
    refused (`check_values`), since a model that is almost the same is worse than none.

    A subclass states tables: what differs between layouts is data where it can be.
    """

    # How errors call it.
    name: ClassVar[str]
    # The values of `model_type` in the configurations that this layout reads.
    model_types: tuple[str, ...] = ()
    # Their keys and our fields with the same values; keys that must be there; their defaults, where ours differ.
    fields: ClassVar[Mapping[str, str]] = {}
    required: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar[Mapping[str, Any]] = {}
    activations: ClassVar[Mapping[str, str]] = ACTIVATIONS
    # Names of tensors as they are written and read, and as they are read only.
    names: ClassVar[Names] = {}
    also_read: ClassVar[Names] = {}
    # What their names begin with in a model with a head, except for the head itself: our names of its parts.
    prefix: ClassVar[str] = ""
    heads: ClassVar[tuple[str, ...]] = ()
    # Tensors without a counterpart that hold no weights, and names of ours whose matrices are transposed there.
    ignored: ClassVar[re.Pattern[str] | None] = None
    transposed: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: type[Config]) -> None:
        self.config = config
        self._theirs = {ours: _as_tuple(theirs) for ours, theirs in self.names.items()}
        self._ours: dict[str, tuple[str, int, int]] = {}  # ours, the place of this part, the number of parts
        for table in (self.also_read, self.names):
            for ours, theirs in table.items():
                parts = _as_tuple(theirs)
                self._ours |= {part: (ours, place, len(parts)) for place, part in enumerate(parts)}

    # Configurations

    def matches(self, config: dict[str, Any]) -> bool:
        """Whether a `config.json` is of this layout."""
        kind = config.get("model_type")
        return isinstance(kind, str) and kind in self.model_types

    @property
    def supported(self) -> str:
        """Which checkpoints this layout reads, for errors."""
        return f"model_type {', '.join(self.model_types)}"

    def infer_heads(self, config: dict[str, Any], state: State) -> dict[str, Any]:
        """The configuration with what only the tensors tell: which heads there are."""
        return config

    @abstractmethod
    def read_config(self, config: dict[str, Any]) -> Config: ...

    @abstractmethod
    def write_config(self, config: Any) -> dict[str, Any]: ...

    def explain_unsupported(self, config: Any) -> str:
        """Why a model of this configuration cannot be written in the layout; empty where it can."""
        return ""

    def read_fields(self, config: Mapping[str, Any]) -> dict[str, Any]:
        for name in self.required:
            require(self.name, config, name)
        stated = {**self.defaults, **config}
        return {ours: stated[theirs] for theirs, ours in self.fields.items() if theirs in stated}

    def write_fields(self, config: Any) -> dict[str, Any]:
        return {theirs: getattr(config, ours) for theirs, ours in self.fields.items()}

    def write_activation(self, activation: str) -> str:
        """Their first name of an activation of ours."""
        return next(theirs for theirs, ours in self.activations.items() if ours == activation)

    # Tensors

    def read_state(self, state: State, config: Any) -> State:
        """Their names to ours. A tensor without a counterpart keeps its name, by which it is then refused."""
        ours: State = {}
        parts: dict[str, dict[int, str]] = {}
        for name, tensor in state.items():
            short = self.normalize_name(name.removeprefix(self.prefix))
            if self.ignored is not None and self.ignored.fullmatch(short):
                continue
            target, place, count = self._find_ours(short)
            if not target or target in ours or place in parts.get(target, {}):
                ours[name] = tensor
            elif count > 1:
                parts.setdefault(target, {})[place] = name
            else:
                ours[target] = tensor.T if self._is_transposed(target, tensor) else tensor
        for target, found in parts.items():
            tensors = [state[found[place]] for place in sorted(found)]
            count = self._find_ours(self.normalize_name(next(iter(found.values())).removeprefix(self.prefix)))[2]
            if len(found) == count and len({tensor.shape[1:] for tensor in tensors}) == 1:
                ours[target] = torch.cat(tensors)
            else:
                ours |= {name: state[name] for name in found.values()}
        return ours

    def write_state(self, state: State, config: Any) -> State:
        """Our names to theirs."""
        prefix = self.prefix if self.has_prefix(config) else ""
        theirs: State = {}
        for name, tensor in state.items():
            key, layer, kind = _split_name(name, self._theirs)
            parts = self._theirs[key]
            lead = "" if key.split(".")[0] in self.heads else prefix
            rows = (tensor,) if len(parts) == 1 else tensor.split(self.split_rows(key, tensor, config))
            for part, piece in zip(parts, rows, strict=True):
                theirs[f"{lead}{part.format(layer)}{kind}"] = piece.T if self._is_transposed(name, piece) else piece
        return theirs

    def normalize_name(self, name: str) -> str:
        """A name of theirs without its prefix, as the tables have it; for spellings of older versions."""
        return name

    def has_prefix(self, config: Any) -> bool:
        """Whether names begin with the prefix in a model of this configuration."""
        return True

    def split_rows(self, key: str, tensor: Tensor, config: Any) -> Sequence[int]:
        """How many rows of a tensor of ours belong to each of their parts."""
        count = len(self._theirs[key])
        return [tensor.shape[0] // count] * count

    def _find_ours(self, name: str) -> tuple[str, int, int]:
        key, layer, kind = _split_name(name, self._ours)
        ours, place, count = self._ours.get(key, ("", 0, 1))
        return (ours.format(layer) + kind if ours else ""), place, count

    def _is_transposed(self, name: str, tensor: Tensor) -> bool:
        return name.endswith(".weight") and name.removesuffix(".weight").endswith(self.transposed) and tensor.ndim == 2


def _as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _split_name(name: str, table: Mapping[str, Any]) -> tuple[str, str, str]:
    """The key of a table, the number of the layer, and `.weight` or `.bias` where the key is without it."""
    found = re.search(r"(?<=\.)\d+(?=\.)", name)
    layer = found[0] if found else ""
    key = name[: found.start()] + "{}" + name[found.end() :] if found else name
    if key in table:
        return key, layer, ""
    stem, dot, kind = key.rpartition(".")
    return (stem, layer, dot + kind) if kind in ("weight", "bias") else (key, layer, "")


class ConverterGroup(Converter):
    """Several layouts of one library under one name: the configuration decides which.

    Our GPT is Hugging Face's GPT-2 or its LLaMA, by configuration. Where several could write a model the first does.
    """

    def __init__(self, *converters: Converter) -> None:
        self.converters = converters
        self.model_types = tuple(kind for converter in converters for kind in converter.model_types)

    def matches(self, config: dict[str, Any]) -> bool:
        return any(converter.matches(config) for converter in self.converters)

    def infer_heads(self, config: dict[str, Any], state: State) -> dict[str, Any]:
        return self._find_reader(config).infer_heads(config, state) if self.matches(config) else config

    def read_config(self, config: dict[str, Any]) -> Config:
        return self._find_reader(config).read_config(config)

    def write_config(self, config: Any) -> dict[str, Any]:
        return self._find_writer(config).write_config(config)

    def read_state(self, state: State, config: Any) -> State:
        return self._find_writer(config).read_state(state, config)

    def write_state(self, state: State, config: Any) -> State:
        return self._find_writer(config).write_state(state, config)

    def explain_unsupported(self, config: Any) -> str:
        reasons = [converter.explain_unsupported(config) for converter in self.converters]
        return "" if "" in reasons else "; ".join(reasons)

    def _find_reader(self, config: dict[str, Any]) -> Converter:
        for converter in self.converters:
            if converter.matches(config):
                return converter
        raise KeyError(f"model_type {config.get('model_type')!r}; read are {', '.join(self.model_types)}")

    def _find_writer(self, config: Any) -> Converter:
        for converter in self.converters:
            if not converter.explain_unsupported(config):
                return converter
        raise ConfigError(
            "The other library has no model of this configuration.",
            asked=repr(config),
            because=self.explain_unsupported(config),
            instead='layout="regard"',
        )


def check_values(library: str, config: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse a configuration with a value that has no counterpart here; an absent key is the default.

    >>> check_values("LLaMA", {"hidden_act": "silu"}, {"hidden_act": ("silu",), "attention_bias": (False,)})
    """
    for name, values in allowed.items():
        if name in config and config[name] not in values:
            raise ConfigError(
                f"This {library} has {name}={config[name]!r}, which has no counterpart here.",
                asked=f"{name}={config[name]!r}",
                because=f"only {' or '.join(map(repr, values))} gives the same numbers here",
                instead=f"a model with {name}={values[0]!r}",
            )


def require(library: str, config: Mapping[str, Any], name: str) -> Any:
    """A size that their configuration must state."""
    if config.get(name) is None:
        raise ConfigError(
            f"This {library} does not say its {name}.",
            asked=", ".join(config) or "an empty configuration",
            because="the model cannot be built without it",
            instead=f"a config.json with {name}",
        )
    return config[name]


def list_unsupported(library: str, wrong: Mapping[str, bool]) -> str:
    """The reason for `explain_unsupported`: those of our settings that another library does not have.

    >>> list_unsupported("GPT-2", {"bias=False": True, "window=3": False})
    'GPT-2 has no bias=False'
    """
    settings = ", ".join(setting for setting, is_so in wrong.items() if is_so)
    return f"{library} has no {settings}" if settings else ""


def convert_config(library: str, converter: Converter, config: dict[str, Any]) -> Config:
    """Our configuration for theirs; a failure that no converter expects becomes an error in four parts."""
    try:
        return converter.read_config(config)
    except RegardError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as failure:
        raise ConfigError(
            f"This configuration of {library} cannot be understood.",
            asked=", ".join(f"{name}={value!r}" for name, value in list(config.items())[:8])
            or "an empty configuration",
            found=f"{type(failure).__name__}: {failure}",
            because="a key is missing, or its value is of another type than that library writes",
            instead="the config.json that was saved with the model",
        ) from failure


def convert_tensors(library: str, converter: Converter, state: State, config: Config, source: str) -> State:
    """The tensors by our names; tensors that cannot be joined or transposed become an error in four parts."""
    try:
        return converter.read_state(state, config)
    except RegardError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError) as failure:
        first = str(failure).strip().splitlines()
        raise CheckpointError(
            f"These tensors do not make this {library}.",
            asked=f"{library} from {source}",
            found=f"{type(failure).__name__}: {first[0] if first else ''}",
            because="tensors that belong together differ in shape, dtype or kind",
            instead="the tensors that were saved with this configuration",
        ) from failure
