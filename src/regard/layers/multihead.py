"""Multi-head attention over any description."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.attention import Attention, attend
from regard.attention import weights as attention_weights
from regard.errors import CacheError, ConfigError
from regard.layers import surgery
from regard.layers.cache import CrossCache, KVCache, StateCache
from regard.layers.linear import Linear
from regard.layers.projections import Projections, Sizes, bias_letters
from regard.layers.rotary import Rotary, Rotation
from regard.patterns import Pattern
from regard.patterns.past import has_past, reach, shiftable


class MultiHeadAttention(nn.Module):
    """Several attentions side by side, each in its own small space, and one matrix that joins them.

        head_h = attend(x W_h^q, context W_h^k, context W_h^v),    output = concat_h(head_h) W^o + b^o

    Source: Vaswani et al., Attention Is All You Need (2017), section 3.2.2.

    Where we differ: the attention itself is any description: a pattern, a bias, a temperature, a feature map. All
    sizes are free (`Sizes`), keys may be shared by groups of heads, and any of the four biases may be absent.
    Dropout of attention weights needs the weights: while training with `dropout > 0` the square is built.

        >>> from regard.layers import MultiHeadAttention
        >>> layer = MultiHeadAttention(12, 3, attention=Attention(pattern=Causal()))
        >>> layer(torch.randn(2, 5, 12)).shape
        torch.Size([2, 5, 12])

    Attributes:
        sizes: every size, nothing left open.
        attention: the description.
        letters: which of query, key, value and output have a bias.
    """

    def __init__(
        self,
        sizes: int | Sizes,
        heads: int | None = None,
        *,
        kv_heads: int | None = None,
        attention: Attention | None = None,
        bias: bool | str = True,
        dropout: float = 0.0,
        rotary: Rotary | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(sizes, Sizes):
            sizes = Sizes(sizes, 1 if heads is None else heads, kv_heads)
        elif heads is not None or kv_heads is not None:
            raise ConfigError(
                "The heads were given twice.",
                asked=f"MultiHeadAttention({sizes}, heads={heads}, kv_heads={kv_heads})",
                because="Sizes has its own heads",
                instead="MultiHeadAttention(Sizes(...)) or MultiHeadAttention(channels, heads)",
            )
        self.sizes = sizes
        self.attention = Attention() if attention is None else attention
        self.letters = bias_letters(bias)
        self.dropout, self.rotary = dropout, rotary
        self.projections = Projections(self.sizes, self.letters)
        self.output = Linear(self.sizes.heads * self.sizes.value, self.sizes.output, bias="o" in self.letters)
        # A learned bias belongs to the layer: its parameters are trained, moved and saved with it.
        self.score_bias = self.attention.bias if isinstance(self.attention.bias, nn.Module) else None
        self.register_load_state_dict_pre_hook(_read_torch_names)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        values: Tensor | None = None,
        *,
        pattern: Pattern | None = None,
        cache: KVCache | StateCache | CrossCache | None = None,
        lengths: Sequence[int] | Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Attention of tokens `(*batch, token, channel)` over themselves, or over a context.

        `pattern` is joined to the description's by `&`: the padding or the segments of this batch. With a cache, `x`
        are the next tokens; `lengths` is for a first chunk that is padded on the left. `rotation` may be handed in
        by a model that makes it once for all its layers.
        """
        mixed = self._mixed(x, context, values, pattern, cache, lengths, rotation)
        return self.output(mixed.transpose(-2, -3).flatten(-2))

    def weights(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        pattern: Pattern | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """What every head looks at, `(*batch, head, query, key)`: this builds the square."""
        query, key, _ = self._queries_keys_values(x, context, None, rotation, None, None)
        return attention_weights(query, key, self._described(pattern))

    def head_contributions(self, x: Tensor, context: Tensor | None = None, *, pattern: Pattern | None = None) -> Tensor:
        """What each head adds to the output, `(head, *batch, token, output)`: they sum to it, but for the bias.

            output = sum_h A_h X W^(h) + b^o,    W^(h) = W_h^v W_h^o

        Source: Bishop and Bishop, Deep Learning (2024), exercise 12.5.
        """
        mixed = self._mixed(x, context, None, pattern, None, None, None)
        return surgery.contributions(self, mixed)

    def merge_value_output(self) -> Tensor:
        """The matrices `W^(h) = W_h^v W_h^o`, `(head, values, output)`, of rank at most the size of a value."""
        return surgery.merged(self)

    def split(self, rank: int) -> MultiHeadAttention:
        """The layer with values of `rank` channels that is nearest: exact if no `W^(h)` has a larger rank."""
        return surgery.split(self, rank)

    def fold_biases(self) -> MultiHeadAttention:
        """The same layer with the biases that do something: those of the query and of the output."""
        return surgery.folded(self)

    def new_cache(self, capacity: int | None = None) -> KVCache | StateCache:
        """A cache that fits the description: sums for a feature map, a window for a pattern of limited reach."""
        pattern = self.attention.pattern
        if pattern is None or not has_past(pattern):
            raise CacheError(
                "This attention has no past to keep.",
                asked=f"a cache for pattern {pattern!r}",
                because="old queries would have to see new keys, or other ones than before",
                instead="Causal() & ..., or RunningAttention, which also renews old outputs",
            )
        if self.attention.feature_map is not None:
            return StateCache()
        far = reach(pattern)
        if far is None or not shiftable(pattern) or not self._bias_moves():
            return KVCache(capacity)
        return KVCache(capacity, window=far) if capacity is None or far < capacity else KVCache(capacity)

    # The way of the data

    def _mixed(self, x, context, values, pattern, cache, lengths, rotation) -> Tensor:
        """The heads' outputs `(*batch, head, token, value)`."""
        if isinstance(cache, StateCache):
            if self.rotary is not None and rotation is None:
                rotation = self._rotation(x, cache, lengths)
            query, key, value = self._queries_keys_values(x, None, None, rotation, None, None)
            described = self.attention
            assert described.feature_map is not None
            return cache.advance(
                query, key, value, feature_map=described.feature_map, beta=described.beta, lengths=lengths
            )
        query, key, value = self._queries_keys_values(x, context, values, rotation, cache, lengths)
        if isinstance(cache, KVCache) and (padding := cache.padding) is not None:
            self._check_moved()
            pattern = padding if pattern is None else pattern & padding
        described = self._described(pattern)
        if self.training and self.dropout:
            dropped = nn.functional.dropout(attention_weights(query, key, described), self.dropout)
            group = query.shape[-3] // value.shape[-3]
            return dropped @ (value.repeat_interleave(group, -3) if group > 1 else value)
        return attend(query, key, value, described)

    def _queries_keys_values(self, x, context, values, rotation, cache, lengths) -> tuple[Tensor, Tensor, Tensor]:
        if isinstance(cache, CrossCache):
            if cache.key is None or cache.value is None:
                assert context is not None
                cache.fill(*self.projections.key_value(context, values))
            assert cache.key is not None
            assert cache.value is not None
            return self.projections.query(x), cache.key, cache.value
        query, key, value = self.projections(x, context, values)
        if self.rotary is not None:
            rotation = self._rotation(x, cache, lengths) if rotation is None else rotation
            query, key = self.rotary(query, rotation), self.rotary(key, rotation)
        if cache is not None:
            key, value = cache.append(key, value, lengths)
        return query, key, value

    def _rotation(self, x: Tensor, cache: KVCache | StateCache | None, lengths) -> Rotation:
        assert self.rotary is not None
        positions = torch.arange(x.shape[-2]) if cache is None else cache.positions(x.shape[-2], lengths)
        return self.rotary.rotation(positions.to(x.device), x.dtype)

    def _described(self, pattern: Pattern | None) -> Attention:
        if pattern is None:
            return self.attention
        whole = pattern if self.attention.pattern is None else self.attention.pattern & pattern
        return dataclasses.replace(self.attention, pattern=whole)

    def _bias_moves(self) -> bool:
        """Whether the bias stays the same when all positions are counted from elsewhere."""
        bias = self.attention.bias
        return bias is None or (isinstance(bias, nn.Module) and getattr(bias, "grid", None) is None)

    def _check_moved(self) -> None:
        pattern = self.attention.pattern
        if (pattern is None or shiftable(pattern)) and self._bias_moves():
            return
        raise CacheError(
            "Rows of unequal length need an attention that only looks at distances.",
            asked=f"padding on the left with pattern {pattern!r} and bias {self.attention.bias!r}",
            because="a padded row begins at another position, and the pattern or the bias counts from the first one",
            instead="rows of equal length, or patterns made of Causal, Window and Strided",
        )

    # torch.nn.MultiheadAttention

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, attention: Attention | None = None) -> MultiHeadAttention:
        """The same layer as torch's, with the same numbers. `load_state_dict` reads torch's names, too."""
        return surgery.from_torch(cls, module, attention)

    def extra_repr(self) -> str:
        described = ", ".join(
            f"{field.name}={getattr(self.attention, field.name)!r}"
            for field in dataclasses.fields(self.attention)
            if field.name != "bias" and getattr(self.attention, field.name) is not None
        )
        return f"heads={self.sizes.heads}, kv_heads={self.sizes.kv_heads}" + (f", {described}" if described else "")


def _read_torch_names(module: MultiHeadAttention, state: dict[str, Tensor], prefix: str, *_) -> None:
    surgery.rename_torch_state(state, prefix, module.projections)
