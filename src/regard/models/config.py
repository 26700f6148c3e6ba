"""Configurations: small frozen values that refuse unknown fields."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, ClassVar, Literal, Self

from regard.attention import Attention
from regard.errors import ConfigError
from regard.models.attention_layers import is_plain
from regard.models.attention_text import comparison_key, read_attention, write_attention

# The largest whole number of a configuration: sizes are 64-bit numbers.
LARGEST = 2**63 - 1


@dataclass(frozen=True, eq=False)
class Config:
    """What a model is built from: a value that goes to `config.json` and comes back the same.

    A subclass is a frozen dataclass whose fields are numbers, strings, booleans, None or tuples of these, and which
    checks in `__post_init__` that its sizes belong together. Before that, and without being asked, lists become tuples
    and every value is known to have the annotated type.

    A field of type `Attention` is text in JSON (`regard.models.attention_text`). A class with such fields is declared
    with `eq=False`: its configurations are equal if they are written alike.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Tower(Config):
    ...     dim: int
    ...     depths: tuple[int, ...] = (1, 1)
    >>> Tower.from_dict({"dim": 7, "depths": [2, 3]})
    Tower(dim=7, depths=(2, 3))
    >>> Tower.from_dict({"dim": 7, "depth": [2, 3]})
    Traceback (most recent call last):
    regard.errors.ConfigError: Tower has no field 'depth'.
      asked    depth=[2, 3]
      because  its fields are dim, depths
      instead  depths=[2, 3]
    """

    # The fields of descriptions that are joined to `Causal()` in any case.
    causal: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if (own := cls.__dict__.get("__post_init__")) is not None:
            cls.__post_init__ = _check_types_first(own)

    def __post_init__(self) -> None:
        """Lists become tuples, and a value of another type than its field's is refused."""
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            value = _lists_to_tuples(given) if _is_nested_at_most(given) else _refuse_nesting(self, field.name)
            if _is_attention_field(hints[field.name]):
                value = _parse_attentions(value)
            if not _matches_type(value, hints[field.name]):
                raise ConfigError(
                    f"{type(self).__name__} cannot use {field.name}={given!r}.",
                    asked=f"{field.name}={given!r}, a {type(given).__name__}",
                    because=f"{field.name} is {_format_type(hints[field.name])}",
                    instead=f"{field.name}=... of that type"
                    if field.default is MISSING
                    else f"{field.name}={field.default!r}",
                )
            if not _fits_in_64_bits(value):
                raise ConfigError(
                    f"The {field.name} of {type(self).__name__} is too large.",
                    asked=f"{field.name}={given!r}",
                    because=f"sizes are 64-bit numbers: at most {LARGEST}",
                    instead=f"{field.name}=... of a size that fits in memory",
                )
            object.__setattr__(self, field.name, value)  # frozen outside of this method

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._comparison_key() == other._comparison_key()  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self), self._comparison_key()))

    def _comparison_key(self) -> tuple:
        return tuple(_make_comparable(getattr(self, field.name)) for field in dataclasses.fields(self))

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, in types of JSON."""
        return {field.name: _to_json(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def attentions(self) -> dict[str, Attention | tuple[Attention, ...]]:
        """The descriptions of attention that are given, by the names of their fields."""
        hints = typing.get_type_hints(type(self))
        fields = {name: getattr(self, name) for name, hint in hints.items() if _is_attention_field(hint)}
        return {name: value for name, value in fields.items() if value is not None}

    def simplify(self) -> Self:
        """The same model in fewer words, for layouts that have no descriptions: those that say nothing are left out."""
        plain = [name for name, value in self.attentions().items() if is_plain(value, causal=name in self.causal)]
        return dataclasses.replace(self, **dict.fromkeys(plain)) if plain else self

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """The configuration with these fields; an unknown one is refused, a missing one has its default."""
        known = {field.name: field for field in dataclasses.fields(cls) if field.init}
        if unknown := [name for name in fields if name not in known]:
            close = difflib.get_close_matches(unknown[0], known, n=1)
            raise ConfigError(
                f"{cls.__name__} has no field {unknown[0]!r}.",
                asked=", ".join(f"{name}={fields[name]!r}" for name in unknown),
                because=f"its fields are {', '.join(known)}",
                instead=f"{close[0]}={fields[unknown[0]]!r}" if close else "leave it out, or use a field it has",
            )
        needed = [
            name for name, field in known.items() if field.default is MISSING and field.default_factory is MISSING
        ]
        if missing := [name for name in needed if name not in fields]:
            raise ConfigError(
                f"{cls.__name__} needs {missing[0]!r}.",
                asked=", ".join(fields) or "no field at all",
                because=f"{', '.join(missing)} {'have' if len(missing) > 1 else 'has'} no default",
                instead=f"{missing[0]}=...",
            )
        return cls(**fields)


def _check_types_first(own: Callable[[Any], None]) -> Any:
    """A subclass's own checks, which may rely on the types."""

    @functools.wraps(own)
    def __post_init__(self: Config) -> None:
        Config.__post_init__(self)
        own(self)

    return __post_init__


def _to_json(value: Any) -> Any:
    """Tuples as lists, which is what JSON has."""
    if isinstance(value, Config):
        return value.to_dict()
    if isinstance(value, Attention):
        return write_attention(value)
    return [_to_json(item) for item in value] if isinstance(value, tuple | list) else value


def _is_nested_at_most(value: Any, depth: int = 16) -> bool:
    """Whether lists are nested a few times at most: what follows would run out of stack."""
    if not isinstance(value, tuple | list | dict):
        return True
    items = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_nested_at_most(item, depth - 1) for item in items)


def _refuse_nesting(config: Config, name: str) -> Any:
    raise ConfigError(
        f"{type(config).__name__} cannot read {name}.",
        asked=f"{name} of lists inside lists",
        found="more than 16 of them",
        because="a size is a number, or a short list of numbers",
        instead=f"a number for {name}",
    )


def _lists_to_tuples(value: Any) -> Any:
    return tuple(_lists_to_tuples(item) for item in value) if isinstance(value, tuple | list) else value


def _is_attention_field(hint: Any) -> bool:
    return hint is Attention or any(map(_is_attention_field, typing.get_args(hint)))


def _parse_attentions(value: Any) -> Any:
    """The descriptions that were written as text."""
    if isinstance(value, tuple):
        return tuple(map(_parse_attentions, value))
    return read_attention(value) if isinstance(value, str) else value


def _make_comparable(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_make_comparable, value))
    return comparison_key(value) if isinstance(value, Attention) else value


def _fits_in_64_bits(value: Any) -> bool:
    """False for whole numbers, alone or in tuples, that do not fit in 64 bits."""
    if isinstance(value, tuple):
        return all(map(_fits_in_64_bits, value))
    return not isinstance(value, int) or abs(value) <= LARGEST


def _matches_type(value: Any, hint: Any) -> bool:
    """Whether a value is of the annotated type; types that JSON cannot hold are not judged."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_matches_type(value, choice) for choice in arguments)
    if origin is Literal:
        return value in arguments
    if hint in (type(None), None):
        return value is None
    if hint is bool:
        return isinstance(value, bool)
    if hint in (int, float):  # a boolean is no number here, a whole number is a fine float
        return isinstance(value, int if hint is int else int | float) and not isinstance(value, bool)
    if hint in (str, Attention):
        return isinstance(value, hint)
    if origin is tuple and isinstance(value, tuple):
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return all(_matches_type(item, arguments[0]) for item in value)
        return len(value) == len(arguments) and all(map(_matches_type, value, arguments))
    return origin is not tuple


def _format_type(hint: Any) -> str:
    """An annotation in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(map(_format_type, arguments))
    return str(hint) if origin else getattr(hint, "__name__", str(hint)).replace("NoneType", "None")


def find_published(what: str, asked: str, name: str, table: Mapping[str, Any]) -> Any:
    """The entry of this name among the published sizes of a model."""
    if name not in table:
        raise ConfigError(
            f"There is no {what} called {name!r}.",
            asked=asked,
            because=f"published are {', '.join(table)}",
            instead=f"one of these, {next(iter(table))!r} say, with changes by name",
        )
    return table[name]
