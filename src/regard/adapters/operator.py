"""An operator: `f(query, key, value, mask=None)`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.adapters.base import Adapter, Conventions, Variant, first_tensor
from regard.adapters.call_signature import MaskForm, accepted_form, find_switches, mask_name
from regard.adapters.rng import Rng
from regard.errors import InputError

# Heads and sizes to try, in order. Three heads are no power of two; an even size suits rotations.
SIZES = ((3, 8), (4, 8), (2, 8), (8, 8), (1, 8), (3, 16), (4, 16), (8, 16), (8, 64), (12, 64), (6, 4), (2, 4))


class OperatorAdapter(Adapter):
    """Queries, keys and values in, as `(batch, head, token, dim)`.

    To laws about tokens it is also a layer: a token is its query, key and value side by side, and a mask of tokens
    hides keys.

    Attributes:
        heads, kv_heads, dim, value_dim: the sizes of what is drawn.
        form: the form of its mask argument, or None if it takes none.
    """

    kind = "operator"
    example_tokens = 5  # the length of the calls that find sizes and the form of the mask

    def __init__(
        self,
        target: Any,
        name: str,
        conventions: Conventions | None = None,
        *,
        heads: int | None = None,
        kv_heads: int | None = None,
        dim: int | None = None,
        value_dim: int | None = None,
    ) -> None:
        super().__init__(target, name, conventions)
        self.abilities |= {"operator", "aligned", "float", "gradients", "lengths"}
        self.form: MaskForm | None = None
        for size, given in {"heads": heads, "kv_heads": kv_heads, "dim": dim, "value_dim": value_dim}.items():
            if given is not None and given < 1:
                raise InputError(
                    f"{size}={given} is no size.",
                    asked=f"{size}={given}",
                    because="there is at least one",
                    instead=f"{size}=1 or more",
                )
        self._find_sizes(heads, kv_heads, dim, value_dim)
        if (argument := mask_name(target)) is not None:
            self.form = self._mask_form(argument)
        if self.form is not None:
            self.abilities.add("mask")

    # The operator itself

    def tensors(self, rng: Rng, batch: int, queries: int, keys: int, **sizes: int) -> tuple[Tensor, Tensor, Tensor]:
        """Random query, key and value; `heads`, `kv_heads`, `dim` and `value_dim` may differ from the adapter's."""
        heads, dim = sizes.get("heads", self.heads), sizes.get("dim", self.dim)
        kv_heads = sizes.get("kv_heads", self.kv_heads if "heads" not in sizes else heads)
        value_dim = sizes.get("value_dim", self.value_dim if "dim" not in sizes else dim)
        query = rng.normal(batch, heads, queries, dim, dtype=self.dtype)
        key = rng.normal(batch, kv_heads, keys, dim, dtype=self.dtype)
        return query, key, rng.normal(batch, kv_heads, keys, value_dim, dtype=self.dtype)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        """The output `(batch, head, query, value_dim)`; `mask` is boolean, True is attend, broadcastable to scores."""
        if self.conventions.layout == "tokens":
            query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        if mask is not None and self.form is not None:
            more[self.form.name] = self.form.give(mask)
        output = first_tensor(self.target(query, key, value, **more))
        return output.transpose(1, 2) if self.conventions.layout == "tokens" else output

    def matrix(self, query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
        """The weights `(batch, head, query, key)`, read off by attending over the columns of the identity.

        out = A V,  so  V = [e_a ... e_b]  gives the columns a to b of A
        """
        batch, kv_heads, keys, _ = key.shape
        identity = torch.eye(keys, dtype=key.dtype)
        columns = []
        for start in range(0, keys, self.value_dim):
            value = torch.zeros(keys, self.value_dim, dtype=key.dtype)
            piece = identity[:, start : start + self.value_dim]
            value[:, : piece.shape[1]] = piece
            output = self.attend(query, key, value.expand(batch, kv_heads, keys, self.value_dim).clone(), mask)
            columns.append(output[..., : piece.shape[1]])
        return torch.cat(columns, -1)

    # The operator as a layer of tokens

    def draw(self, batch: int, tokens: int, rng: Rng) -> Tensor:
        return self.joined(*self.tensors(rng, batch, tokens, tokens))

    def run(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.rows(self.attend(*self.parted(x), None if mask is None else mask[:, None, None, :]))

    def joined(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One tensor `(batch, token, features)` of all three."""
        return torch.cat([tensor.transpose(1, 2).flatten(2) for tensor in (query, key, value)], -1)

    def parted(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of `joined`."""
        sizes = [(self.heads, self.dim), (self.kv_heads, self.dim), (self.kv_heads, self.value_dim)]
        pieces = x.split([heads * dim for heads, dim in sizes], -1)
        query, key, value = (
            piece.unflatten(-1, size).transpose(1, 2) for piece, size in zip(pieces, sizes, strict=True)
        )
        return query.contiguous(), key.contiguous(), value.contiguous()

    @staticmethod
    def rows(output: Tensor) -> Tensor:
        """`(batch, head, token, dim)` as `(batch, token, head, dim)`."""
        return output.transpose(1, 2)

    def attend_rows(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """The output of `attend`, `(batch, query, head, dim)`."""
        return self.rows(self.attend(query, key, value, mask))

    def weights(self, x: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        query, key, _ = self.parted(x)
        return [self.matrix(query, key, None if mask is None else mask[:, None, None, :])]

    def variants(self) -> dict[str, Variant]:
        variants: dict[str, Variant] = {}
        for name, value in find_switches(self.target).items():
            variants[f"{name}={value}"] = self._run_with_argument(name, value)
        return variants

    def _run_with_argument(self, name: str, value: bool) -> Variant:
        def variant(x: Tensor, mask: Tensor | None = None) -> Tensor:
            keys = None if mask is None else mask[:, None, None, :]
            return self.rows(self.attend(*self.parted(x), keys, **{name: value}))

        return variant

    @property
    def channels(self) -> int:
        return self.dim

    # Finding out how to call it

    def _find_sizes(self, heads: int | None, kv_heads: int | None, dim: int | None, value_dim: int | None) -> None:
        candidates = [(heads or own, dim or size) for own, size in SIZES]
        failure: Exception | None = None
        for self.heads, self.dim in dict.fromkeys(candidates):
            self.kv_heads, self.value_dim = kv_heads or self.heads, value_dim or self.dim
            try:
                query, key, value = self.tensors(Rng(0, "sizes"), 2, self.example_tokens, self.example_tokens)
                output = self.attend(query, key, value)
                if output.shape == (*query.shape[:-1], self.value_dim):
                    return
                failure = failure or ValueError(f"{tuple(query.shape)} gave {tuple(output.shape)}")
            except Exception as reason:  # any error is a refusal of this size
                failure = failure or reason
        raise InputError(
            f"{self.name} does not run as an operator.",
            asked="f(query, key, value) with (batch, head, token, dim) = (2, 3, 5, 8), and other heads and sizes",
            found=f"{type(failure).__name__}: {failure}",
            because="it has to be called before it can be checked",
            instead='kind="layer" or kind="model" if it takes one input; heads=, dim= and layout= if sizes are fixed',
        ) from failure

    def _mask_form(self, argument: str) -> MaskForm | None:
        query, key, value = self.tensors(Rng(0, "mask"), 2, 5, 5)
        mask = torch.ones(2, 1, 1, 5, dtype=torch.bool)

        def call(form: MaskForm) -> object:
            self.form = form
            return self.attend(query, key, value, mask)

        try:
            return accepted_form(call, argument, self.conventions.mask)
        except Exception as reason:  # it has a parameter of that name, but not for this
            words = f"{type(reason).__name__}: {(str(reason).strip().splitlines() or [''])[0]}"
            self.missing["mask"] = f"it has an argument {argument!r}, but refuses a mask (batch, 1, 1, key): {words}"
            return None
