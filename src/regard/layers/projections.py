"""The sizes of multi-head attention, and the matrices that make queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.errors import ConfigError, ShapeError
from regard.kernels import training
from regard.layers.linear import linear

LETTERS = "qkvo"


@dataclass(frozen=True, init=False)
class AttentionSizes:
    """All the numbers that multi-head attention leaves free; what is not given follows from the others.

    Attributes:
        input: channels of the query tokens.
        heads: query heads.
        kv_heads: key and value heads; each serves `heads / kv_heads` query heads.
        key: channels of a query or key, for each head; `input / heads` unless given.
        value: channels of a value, for each head; as `key` unless given.
        context: channels of the tokens that keys are made from; as `input` unless given.
        values: channels of the tokens that values are made from; as `context` unless given.
        output: channels of the output; as `input` unless given.

        >>> from regard.layers import AttentionSizes
        >>> AttentionSizes(12, 3, value=5)
        AttentionSizes(input=12, heads=3, kv_heads=3, key=4, value=5, context=12, values=12, output=12)
    """

    input: int
    heads: int
    kv_heads: int
    key: int
    value: int
    context: int
    values: int
    output: int

    def __init__(
        self,
        input: int,
        heads: int,
        kv_heads: int | None = None,
        key: int | None = None,
        value: int | None = None,
        context: int | None = None,
        values: int | None = None,
        output: int | None = None,
    ) -> None:
        kv_heads = heads if kv_heads is None else kv_heads
        given = (input, heads, kv_heads, key, value, context, values, output)
        because = ""
        if any(size is not None and (not isinstance(size, int) or size < 1) for size in given):
            because = "every size is a whole number of at least 1"
        elif heads % kv_heads:
            because = f"{heads} query heads cannot share {kv_heads} key heads evenly"
        elif key is None and input % heads:
            because = f"{input} channels cannot be shared evenly by {heads} heads"
        if because:
            raise ConfigError(
                "These sizes do not make a multi-head attention.",
                asked=f"{input} channels, {heads} heads, {kv_heads} key heads"
                + ("" if key is None else f", key {key}"),
                because=because,
                instead="heads that divide the channels, or AttentionSizes(..., key=...) for the channels of each head",
            )
        key = input // heads if key is None else key
        context = input if context is None else context
        resolved = {
            "input": input,
            "heads": heads,
            "kv_heads": kv_heads,
            "key": key,
            "value": key if value is None else value,
            "context": context,
            "values": context if values is None else values,
            "output": input if output is None else output,
        }
        for name, size in resolved.items():
            object.__setattr__(self, name, size)

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads


def bias_letters(bias: bool | str) -> str:
    """Which of query, key, value and output have a bias: `True` is all, `"qo"` is lossless (see `fold_biases`)."""
    letters = LETTERS if bias is True else (bias or "")
    if not isinstance(letters, str) or set(letters) - set(LETTERS):
        raise ConfigError(
            "There is no such bias.",
            asked=f"bias={bias!r}",
            because="biases are named by the letters q, k, v and o: query, key, value, output",
            instead='bias=True, False, "qkv", "o" or "qo"',
        )
    return "".join(letter for letter in LETTERS if letter in letters)


class Projections(nn.Module):
    """Queries, keys and values of all heads.

        query_h = x W_h^q + b_h^q,    key_h = context W_h^k + b_h^k,    value_h = values W_h^v + b_h^v

    If all three read tokens of the same size their matrices lie in one, `(q | k | v, input)`, so that self-attention
    multiplies once. Matrices of heads lie below one another, as torch's linear layers have them.
    """

    def __init__(self, sizes: AttentionSizes, letters: str) -> None:
        super().__init__()
        self.sizes = sizes
        self.widths = (sizes.heads * sizes.key, sizes.kv_heads * sizes.key, sizes.kv_heads * sizes.value)
        self.inputs = (sizes.input, sizes.context, sizes.values)
        self.letters = "".join(letter for letter in letters if letter in "qkv")
        self.joint = len(set(self.inputs)) == 1
        if self.joint:
            self.weight = nn.Parameter(torch.empty(sum(self.widths), sizes.input))
        else:
            self.query_weight, self.key_weight, self.value_weight = (
                nn.Parameter(torch.empty(width, size)) for width, size in zip(self.widths, self.inputs, strict=True)
            )
        lengths = [width for letter, width in zip("qkv", self.widths, strict=True) if letter in self.letters]
        self.bias = nn.Parameter(torch.zeros(sum(lengths))) if lengths else None
        for weight in self.weights():
            nn.init.xavier_uniform_(weight.data)

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three matrices, each `(heads * channels, input)`."""
        if self.joint:
            query, key, value = self.weight.split(self.widths)
            return query, key, value
        return self.query_weight, self.key_weight, self.value_weight

    def biases(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The three biases, `None` where there is none."""
        found: list[Tensor | None] = []
        start = 0
        for letter, width in zip("qkv", self.widths, strict=True):
            if self.bias is None or letter not in self.letters:
                found.append(None)
                continue
            found.append(self.bias[start : start + width])
            start += width
        return found[0], found[1], found[2]

    def forward(
        self, x: Tensor, context: Tensor | None = None, values: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value `(*batch, head, token, dim)`, views where that can be."""
        if context is None and values is None and self.joint:
            _check_width(x, self.inputs[0], "the tokens")
            bias = self._join_biases()
            if training.can_train(x, self.weight, bias):
                heads = (self.sizes.heads, self.sizes.kv_heads, self.sizes.kv_heads)
                query, key, value = training.project_heads(x, self.weight, bias, self.widths, heads)
                return query, key, value
            made = linear(x, self.weight, bias)
            query, key, value = made.split(self.widths, dim=-1)
            return self._split_heads(query, 0), self._split_heads(key, 1), self._split_heads(value, 2)
        context = x if context is None else context
        key, value = self.key_value(context, values)
        return self.query(x), key, value

    def query(self, x: Tensor) -> Tensor:
        _check_width(x, self.inputs[0], "the tokens")
        return self._split_heads(linear(x, self.weights()[0], self.biases()[0]), 0)

    def key(self, context: Tensor) -> Tensor:
        _check_width(context, self.inputs[1], "the context")
        return self._split_heads(linear(context, self.weights()[1], self.biases()[1]), 1)

    def key_value(self, context: Tensor, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
        values = context if values is None else values
        _check_width(context, self.inputs[1], "the context")
        _check_width(values, self.inputs[2], "the tokens of the values")
        weights, biases = self.weights(), self.biases()
        if self.joint and values is context and (biases[1] is None) == (biases[2] is None):
            start = self.widths[0]
            bias = None
            if self.bias is not None and biases[1] is not None:
                bias = self.bias[self.bias.shape[0] - self.widths[1] - self.widths[2] :]
            made = linear(context, self.weight[start:], bias)
            key, value = made.split(self.widths[1:], dim=-1)
        else:
            key = linear(context, weights[1], biases[1])
            value = linear(values, weights[2], biases[2])
        return self._split_heads(key, 1), self._split_heads(value, 2)

    def _join_biases(self) -> Tensor | None:
        if self.bias is None or self.letters == "qkv":
            return self.bias
        parts = zip(self.biases(), self.widths, strict=True)
        return torch.cat([self.bias.new_zeros(width) if bias is None else bias for bias, width in parts])

    def _split_heads(self, x: Tensor, which: int) -> Tensor:
        heads = self.sizes.heads if which == 0 else self.sizes.kv_heads
        return x.unflatten(-1, (heads, -1)).transpose(-2, -3)

    def extra_repr(self) -> str:
        return f"{self.inputs} -> {self.widths}, bias={self.letters!r}"


def _check_width(x: Tensor, width: int, what: str) -> None:
    if x.ndim < 2 or x.shape[-1] != width:
        raise ShapeError(
            f"The layer cannot read {what}.",
            asked=f"a tensor {tuple(x.shape)}",
            found=f"a layer for (*batch, token, {width})",
            because="tokens have as many channels as the projections expect",
            instead=f"tokens with {width} channels, or a layer of other AttentionSizes",
        )
