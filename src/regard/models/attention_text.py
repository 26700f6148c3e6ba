"""Attention descriptions as text: what `config.json` holds of a pattern, a scale, a bias and a feature map."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regard.attention import Attention
from regard.biases import Alibi, Bias, Gaussian, Quadratic, RelativeTable, RowColumn, Shift, TransformerXL
from regard.errors import ConfigError, RegardError
from regard.features import Elu1, FavorPlus, FeatureMap, Relu, Taylor2
from regard.patterns import Pattern, read_pattern

BIASES: dict[str, type] = {
    kind.__name__: kind for kind in (Alibi, Gaussian, Quadratic, RelativeTable, RowColumn, Shift, TransformerXL)
}
FEATURE_MAPS: dict[str, type] = {kind.__name__: kind for kind in (Elu1, FavorPlus, Relu, Taylor2)}
FIELDS = tuple(field.name for field in dataclasses.fields(Attention))
# Arguments of a bias that say where and how its values are made, not what it is.
NOT_WRITTEN = ("dtype", "device", "generator")
# The largest heads * dim of a bias that is read: some compute a table of this size while they are built.
LARGEST_HEADS = 1 << 20


def write_attention(attention: Attention) -> str:
    """The expression that `read_attention` rebuilds a description from; the values of learned biases are no part of it.

    >>> from regard.models.attention_text import read_attention, write_attention
    >>> write_attention(Attention(pattern=Window(3, 0), bias=Alibi(4)))
    'Attention(pattern=Window(3, 0), bias=Alibi(heads=4))'
    """
    parts = []
    for name in FIELDS:
        value = getattr(attention, name)
        if value is None:
            continue
        text = _format_value(value)
        if text is None:
            shown = _truncate(_summarize(value))
            raise ConfigError(
                f"The {name} of this attention cannot be written as text.",
                asked=f"config.json of a model with {name}={shown}",
                because=f"{_explain_unwritable(value)}, and a configuration is read without running code",
                instead=f"a {name} that Regard can rebuild from its arguments (Window(3, 0), Alibi(8), 'elu1'); "
                "or keep the tensors alone, model.state_dict(), and build the model in code",
            )
        parts.append(f"{name}={text}")
    return f"Attention({', '.join(parts)})"


def read_attention(text: str) -> Attention:
    """The description that was written as `text`, which is parsed and never run.

    A bias is built on the meta device: its sizes are known, nothing is drawn or allocated. Models build one for each
    layer from it.

    >>> read_attention("Attention(pattern=Causal() & Strided(2), feature_map='elu1')").pattern
    Causal() & Strided(2)
    """
    try:
        return _parse_attention(ast.parse(text.strip(), mode="eval").body)
    except RegardError:
        raise
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, OverflowError) as failure:
        raise ConfigError(
            "This is not an attention.",
            asked=_truncate(text).strip() or "an empty text",
            because=str(failure) or type(failure).__name__,
            instead="an expression such as 'Attention(pattern=Window(128, 0), bias=Alibi(heads=8))'; fields are "
            f"{', '.join(FIELDS)}, biases {', '.join(BIASES)}",
        ) from None


def comparison_key(attention: Attention) -> tuple:
    """What two descriptions have in common that build the same layer: a value that can be compared and hashed.

    Two biases count as equal if they are written alike; what cannot be written is equal to itself alone.
    """
    return tuple(_make_comparable(getattr(attention, name)) for name in FIELDS)


def rebuild_bias(bias: Bias) -> Bias | None:
    """A new bias of the same class and arguments with values of its own, or None where its arguments are not text."""
    text = _format_value(bias)
    if text is None:
        return None
    kind, arguments = _parse_call(ast.parse(text, mode="eval").body, BIASES)
    return kind(**arguments)


def _make_comparable(value: Any) -> Any:
    if isinstance(value, Bias):
        return _format_value(value) or id(value)
    return id(value) if isinstance(value, Tensor) else value


# Writing


def _format_value(value: Any) -> str | None:
    """A value of a description as text, or None where no text would give it back."""
    if isinstance(value, type) and value in FEATURE_MAPS.values():
        value = value()
    try:
        if isinstance(value, Pattern):
            return repr(value) if read_pattern(repr(value)) == value else None
        if isinstance(value, Bias):
            text = f"{type(value).__name__}({value.extra_repr()})"
            return text if _parse_call(ast.parse(text, mode="eval").body, BIASES)[0] is type(value) else None
        if isinstance(value, FeatureMap):
            text = repr(value)
            kind, arguments = _parse_call(ast.parse(text, mode="eval").body, FEATURE_MAPS)
            return text if kind(**arguments) == value else None
    except (RegardError, SyntaxError, ValueError, TypeError):
        return None
    if isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
        return repr(value) if type(value) in (str, int, float) else None
    return None


def _explain_unwritable(value: Any) -> str:
    if isinstance(value, Tensor):
        return "it is a tensor"
    if isinstance(value, Pattern | Bias):
        return "a function, a tensor or a class of your own is part of it"
    return "it is a function" if callable(value) else f"it is a {type(value).__name__}"


def _summarize(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return getattr(value, "__qualname__", None) or repr(value)


def _truncate(text: str) -> str:
    return text if len(text) <= 200 else text[:199] + "…"


# Reading


def _parse_attention(node: ast.expr) -> Attention:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id != "Attention":
        raise ValueError("a description begins with Attention(")
    if node.args:
        raise ValueError("the arguments of Attention are given by name")
    values: dict[str, Any] = {}
    for word in node.keywords:
        if word.arg not in FIELDS or word.arg in values:
            raise ValueError(f"Attention has no {word.arg}" if word.arg not in FIELDS else f"two times {word.arg}")
        values[word.arg] = _parse_field(word.arg, word.value)
    return Attention(**values)


def _parse_field(name: str, node: ast.expr) -> Any:
    if name == "pattern":
        return read_pattern(ast.unparse(node))
    if name == "bias":
        kind, arguments = _parse_call(node, BIASES)
        with torch.device("meta"):
            return kind(**arguments)
    if name == "feature_map":
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        kind, arguments = _parse_call(node, FEATURE_MAPS)
        return kind(**arguments)
    return _parse_number(node)


def _parse_number(node: ast.expr) -> float:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_parse_number(node.operand)
    if isinstance(node, ast.Name) and node.id == "inf":
        return math.inf
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return node.value
    raise ValueError(f"{ast.unparse(node)!r} is not a number")


def _parse_literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"{ast.unparse(node)!r} is not a literal") from None


def _parse_call(node: ast.expr, kinds: Mapping[str, type]) -> tuple[type, dict[str, Any]]:
    """The class of a constructor call, and its arguments by name; they must be literals."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in kinds:
        raise ValueError(f"{ast.unparse(node)!r} is none of {', '.join(kinds)}")
    kind = kinds[node.func.id]
    if any(word.arg is None or word.arg in NOT_WRITTEN for word in node.keywords):
        raise ValueError(f"only the sizes of {node.func.id} can be given: not {', '.join(NOT_WRITTEN)}")
    arguments = [_parse_literal(argument) for argument in node.args]
    words = {str(word.arg): _parse_literal(word.value) for word in node.keywords}
    if len(words) < len(node.keywords):
        raise ValueError(f"an argument of {node.func.id} is given two times")
    bound = inspect.signature(kind).bind(*arguments, **words).arguments
    sizes = [bound[name] for name in ("heads", "dim") if isinstance(bound.get(name), int)]
    if math.prod(sizes) > LARGEST_HEADS:
        raise ValueError(f"a bias for {' x '.join(map(str, sizes))} heads and channels is larger than any model")
    return kind, bound
