"""What a foreign layout is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from regard.errors import CheckpointError, ConfigError, RegardError
from regard.models.config import Config

State = dict[str, Tensor]

# Names of activations at Hugging Face, and ours.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}


class Converter(ABC):
    """A layout of the same model in another library: its configuration and its names, both ways.

    Every method is pure; tensors are renamed, reshaped, split or joined, never rounded. A foreign configuration has
    many keys that change nothing here, and these are ignored; one that would change the result and has no counterpart
    is refused (`agree` helps), since a model that is almost the same is worse than none.
    """

    # The values of `model_type` in the configurations that this layout reads.
    model_types: tuple[str, ...] = ()

    def matches(self, config: dict[str, Any]) -> bool:
        """Whether a `config.json` is of this layout."""
        kind = config.get("model_type")
        return isinstance(kind, str) and kind in self.model_types

    @property
    def reads(self) -> str:
        """Which checkpoints this layout reads, for errors."""
        return f"model_type {', '.join(self.model_types)}"

    def add_heads(self, config: dict[str, Any], state: State) -> dict[str, Any]:
        """The configuration with what only the tensors tell: which heads there are."""
        return config

    @abstractmethod
    def read_config(self, config: dict[str, Any]) -> Config: ...

    @abstractmethod
    def write_config(self, config: Any) -> dict[str, Any]: ...

    @abstractmethod
    def read_state(self, state: State, config: Any) -> State:
        """Foreign names to ours. What has no place here stays as it is, and is then refused by name."""

    @abstractmethod
    def write_state(self, state: State, config: Any) -> State: ...

    def refuses(self, config: Any) -> str:
        """Why a model of this configuration cannot be written in the layout; empty where it can."""
        return ""


class Either(Converter):
    """Several layouts of one library under one name: what the configuration says decides which.

    Our GPT is Hugging Face's GPT-2 or its LLaMA, by configuration. Where several could write a model the first does.
    """

    def __init__(self, *converters: Converter) -> None:
        self.converters = converters
        self.model_types = tuple(kind for converter in converters for kind in converter.model_types)

    def matches(self, config: dict[str, Any]) -> bool:
        return any(converter.matches(config) for converter in self.converters)

    def add_heads(self, config: dict[str, Any], state: State) -> dict[str, Any]:
        return self._find_reader(config).add_heads(config, state) if self.matches(config) else config

    def read_config(self, config: dict[str, Any]) -> Config:
        return self._find_reader(config).read_config(config)

    def _find_reader(self, config: dict[str, Any]) -> Converter:
        for converter in self.converters:
            if converter.matches(config):
                return converter
        raise KeyError(f"model_type {config.get('model_type')!r}; read are {', '.join(self.model_types)}")

    def write_config(self, config: Any) -> dict[str, Any]:
        return self._find_writer(config).write_config(config)

    def read_state(self, state: State, config: Any) -> State:
        return self._find_writer(config).read_state(state, config)

    def write_state(self, state: State, config: Any) -> State:
        return self._find_writer(config).write_state(state, config)

    def refuses(self, config: Any) -> str:
        reasons = [converter.refuses(config) for converter in self.converters]
        return "" if "" in reasons else "; ".join(reasons)

    def _find_writer(self, config: Any) -> Converter:
        for converter in self.converters:
            if not converter.refuses(config):
                return converter
        raise ConfigError(
            "The other library has no model of this configuration.",
            asked=repr(config),
            because=self.refuses(config),
            instead='layout="regard"',
        )


def agree(library: str, config: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse a foreign configuration with a value that has no counterpart here; an absent key is the default.

    >>> agree("LLaMA", {"hidden_act": "silu"}, {"hidden_act": ("silu",), "attention_bias": (False,)})
    """
    for name, values in allowed.items():
        if name in config and config[name] not in values:
            raise ConfigError(
                f"This {library} has {name}={config[name]!r}, which has no counterpart here.",
                asked=f"{name}={config[name]!r}",
                because=f"only {' or '.join(map(repr, values))} gives the same numbers here",
                instead=f"a model with {name}={values[0]!r}",
            )


def need(library: str, config: Mapping[str, Any], name: str) -> Any:
    """A size that a foreign configuration must state."""
    if config.get(name) is None:
        raise ConfigError(
            f"This {library} does not say its {name}.",
            asked=", ".join(config) or "an empty configuration",
            because="the model cannot be built without it",
            instead=f"a config.json with {name}",
        )
    return config[name]


def renamed(state: State, names: Mapping[str, str]) -> State:
    """The tensors by names whose beginnings are replaced where they are in the table; others keep their names.

    >>> list(renamed({"roberta.x": Tensor(), "y": Tensor()}, {"roberta.": "bert."}))
    ['bert.x', 'y']
    """

    def rename(name: str) -> str:
        for old, new in names.items():
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    return {rename(name): tensor for name, tensor in state.items()}


def lacks(library: str, wrong: Mapping[str, bool]) -> str:
    """The reason for `refuses`: those of our settings that another library does not have; empty if there are none.

    >>> lacks("GPT-2", {"bias=False": True, "window=3": False})
    'GPT-2 has no bias=False'
    """
    settings = ", ".join(setting for setting, is_so in wrong.items() if is_so)
    return f"{library} has no {settings}" if settings else ""


def understood(library: str, converter: Converter, config: dict[str, Any]) -> Config:
    """Our configuration for a foreign one; what no converter expects becomes an error in the reader's words."""
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
    """The tensors by our names; tensors that cannot be joined or turned become an error in the reader's words."""
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
