"""Multi-head attention over any description."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.attention import Attention, attend
from regard.attention import weights as attention_weights
from regard.attention.decode_step import decode_step
from regard.errors import CacheError, ConfigError, InputError
from regard.layers import rewrite
from regard.layers.cache import CrossCache, KVCache, StateCache, make_cache
from regard.layers.cache_requirements import check_padded_rows, fits_padded_rows
from regard.layers.linear import Linear, can_fuse_residual, linear
from regard.layers.projections import AttentionSizes, Projections, bias_letters
from regard.layers.rotary import Rotary, Rotation
from regard.layers.row_subset import restrict_to_queries
from regard.patterns import Padding, Pattern


class MultiHeadAttention(nn.Module):
    """Multi-head attention over any description of attention.

        head_h = attend(x W_h^q, context W_h^k, context W_h^v),    output = concat_h(head_h) W^o + b^o

    Source: Vaswani et al., Attention Is All You Need (2017), section 3.2.2.

    Where we differ: the attention itself is any description: a pattern, a bias, a temperature, a feature map. All
    sizes are free (`AttentionSizes`), keys may be shared by groups of heads, and any of the four biases may be absent.

        >>> from regard.layers import MultiHeadAttention
        >>> layer = MultiHeadAttention(12, 3, attention=Attention(pattern=Causal()))
        >>> layer(torch.randn(2, 5, 12)).shape
        torch.Size([2, 5, 12])

    Args:
        sizes: channels of the tokens, or `AttentionSizes` for everything that may be chosen.
        heads: query heads, 1 if `None`; only where `sizes` is a number.
        kv_heads: key and value heads, as `heads` if `None`; only where `sizes` is a number.
        attention: pattern, scale, bias and feature map; full softmax attention if `None`.
        bias: which projections have a bias: all, none, or some of the letters q, k, v and o.
        dropout: probability of dropping an attention weight while training, below 1 (see `attend`: memory stays linear
            in the tokens). Linear attention has no weights to drop.
        rotary: rotary position embedding of queries and keys.
    """

    def __init__(
        self,
        sizes: int | AttentionSizes,
        heads: int | None = None,
        *,
        kv_heads: int | None = None,
        attention: Attention | None = None,
        bias: bool | str = True,
        dropout: float = 0.0,
        rotary: Rotary | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(sizes, AttentionSizes):
            sizes = AttentionSizes(sizes, 1 if heads is None else heads, kv_heads)
        elif heads is not None or kv_heads is not None:
            raise ConfigError(
                "The heads were given twice.",
                asked=f"MultiHeadAttention({sizes}, heads={heads}, kv_heads={kv_heads})",
                because="AttentionSizes has its own heads",
                instead="MultiHeadAttention(AttentionSizes(...)) or MultiHeadAttention(channels, heads)",
            )
        if not 0 <= dropout < 1 or (rotary is not None and rotary.dim > sizes.key):
            raise ConfigError(
                "This attention cannot be built.",
                asked=f"dropout={dropout}, rotary={rotary}, {sizes}",
                because="dropout is a probability, and weights that are kept are divided by 1 - dropout"
                if rotary is None or rotary.dim <= sizes.key
                else f"rotary positions turn {rotary.dim} channels of a head, and a key has {sizes.key}",
                instead="0 <= dropout < 1, and a Rotary of at most the channels of a key",
            )
        self.sizes = sizes
        self.attention = Attention() if attention is None else attention
        self.letters = bias_letters(bias)
        self.dropout, self.rotary = dropout, rotary
        self.projections = Projections(self.sizes, self.letters)
        self.output = Linear(self.sizes.heads * self.sizes.value, self.sizes.output, bias="o" in self.letters)
        # A learned bias belongs to the layer: its parameters are trained, moved and saved with it.
        learned = isinstance(self.attention.bias, nn.Module | nn.Parameter)
        self.score_bias = self.attention.bias if learned else None
        self.register_load_state_dict_pre_hook(_rename_torch_keys)

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
        are the next tokens. `lengths` says how many tokens of each row are real, for a first chunk, or a whole text,
        that is padded on the left. `rotation` may be handed in by a model that makes it once for all its layers.
        """
        head_outputs = self._attend(x, context, values, pattern, cache, lengths, rotation)
        return self.output(head_outputs.transpose(-2, -3).flatten(-2))

    def add_to(
        self,
        residual: Tensor,
        x: Tensor,
        context: Tensor | None = None,
        *,
        pattern: Pattern | None = None,
        cache: KVCache | StateCache | CrossCache | None = None,
        lengths: Sequence[int] | Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """`residual + self(x, ...)`, in one pass over the result where that is possible."""
        if not can_fuse_residual(self, MultiHeadAttention, self.output, residual, x):
            return residual + self(x, context, pattern=pattern, cache=cache, lengths=lengths, rotation=rotation)
        head_outputs = self._attend(x, context, None, pattern, cache, lengths, rotation).transpose(-2, -3).flatten(-2)
        return linear(head_outputs, self.output.weight, self.output.bias, residual=residual)

    def weights(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        pattern: Pattern | None = None,
        rotation: Rotation | None = None,
        queries: Sequence[int] | Tensor | None = None,
    ) -> Tensor:
        """Attention weights `(*batch, head, query, key)`: this builds the square.

        With `queries`, indices of some tokens of `x`, only their rows are computed.
        """
        query, key = self.projections.query(x), self.projections.key(x if context is None else context)
        query, key = self._rotate(query, key, x, context, rotation, None, None)
        described = self._join_pattern(pattern)
        if queries is not None:
            places, first = _check_queries(queries, x), key.shape[-2] - x.shape[-2]
            query = query[..., places, :]
            described = restrict_to_queries(described, places + first, query, key, first)
        return attention_weights(query, key, described)

    def project_heads(
        self,
        x: Tensor,
        context: Tensor | None = None,
        values: Tensor | None = None,
        *,
        pattern: Pattern | None = None,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Attention]:
        """Queries, keys and values of the heads as the attention takes them, positions included, and its description.

        Keys and values have a head for each group of query heads: `(*batch, kv_head, token, dim)`.
        """
        query, key, value = self.projections(x, context, values)
        return (*self._rotate(query, key, x, context, rotation, None, None), value, self._join_pattern(pattern))

    def head_contributions(
        self,
        x: Tensor,
        context: Tensor | None = None,
        values: Tensor | None = None,
        *,
        pattern: Pattern | None = None,
    ) -> Tensor:
        """What each head adds to the output, `(head, *batch, token, output)`: they sum to it, but for the bias.

            output = sum_h A_h X W^(h) + b^o,    W^(h) = W_h^v W_h^o

        Source: Bishop and Bishop, Deep Learning (2024), exercise 12.5.
        """
        head_outputs = self._attend(x, context, values, pattern, None, None, None)
        return rewrite.split_output(self, head_outputs)

    def merge_value_output(self) -> Tensor:
        """The matrices `W^(h) = W_h^v W_h^o`, `(head, values, output)`, of rank at most the size of a value."""
        return rewrite.merge_value_output(self)

    def split(self, rank: int) -> MultiHeadAttention:
        """The layer with values of `rank` channels that is nearest: exact if no `W^(h)` has a larger rank."""
        return rewrite.split(self, rank)

    def fold_biases(self) -> MultiHeadAttention:
        """The same layer with the biases that do something: those of the query and of the output."""
        return rewrite.fold_biases(self)

    def new_cache(self, capacity: int | None = None) -> KVCache | StateCache:
        """A cache that fits the description: sums for a feature map, a window for a pattern of limited reach."""
        return make_cache(self.attention, capacity)

    # Forward

    def _attend(self, x, context, values, pattern, cache, lengths, rotation) -> Tensor:
        """The heads' outputs `(*batch, head, token, value)`."""
        self._check_arguments(x, context, values, pattern, cache, lengths)
        if isinstance(cache, StateCache):
            cache.check_fits(self._join_pattern(pattern))
            query, key, value = self.projections(x)
            query, key = self._rotate(query, key, x, None, rotation, cache, lengths)
            return cache.advance(query, key, value, attention=self.attention, lengths=lengths)
        drops = self.training and self.dropout > 0 and self.attention.feature_map is None
        if isinstance(cache, KVCache):
            cache.check_fits(self._join_pattern(pattern))
        query, key, value = self._project(x, context, values, rotation, cache, lengths)
        padding = cache.padding if isinstance(cache, KVCache) else None
        if cache is None and lengths is not None:
            padding = Padding(lengths, side="left")
        if padding is not None:
            check_padded_rows(self._join_pattern(pattern))
        if isinstance(cache, KVCache) and pattern is None and not drops:
            output = decode_step(query, key, value, self.attention, cache.real)
            if output is not None:
                return output
        if padding is not None:
            pattern = padding if pattern is None else pattern & padding
        described = self._join_pattern(pattern)
        return attend(query, key, value, described, dropout=self.dropout if drops else 0.0)

    def _project(self, x, context, values, rotation, cache, lengths) -> tuple[Tensor, Tensor, Tensor]:
        if isinstance(cache, CrossCache):
            query = self.projections.query(x)
            self._check_rotary(x)  # the context is another sequence
            if cache.key is None or cache.value is None:
                if context is None:
                    raise CacheError(
                        "The cache of the context is empty.",
                        asked="attention to a context that was given before",
                        because="keys and values of the context are made at the first step, and there was none",
                        instead="layer(x, context, cache=cache) at the first step",
                    )
                cache.fill(*self.projections.key_value(context, values), source=context)
            assert cache.key is not None
            assert cache.value is not None
            return query, cache.key, cache.value
        query, key, value = self.projections(x, context, values)
        query, key = self._rotate(query, key, x, context, rotation, cache, lengths)
        if cache is not None:
            key, value = cache.append(key, value, lengths)
        return query, key, value

    def _rotate(self, query, key, x, context, rotation, cache, lengths) -> tuple[Tensor, Tensor]:
        """Queries and keys with their positions, where these are rotary."""
        self._check_rotary(context)
        if self.rotary is None:
            return query, key
        if rotation is None:
            past = KVCache() if cache is None else cache
            rotation = self.rotary.rotation(past.positions(x.shape[-2], lengths).to(x.device), x.dtype)
        return self.rotary(query, rotation), self.rotary(key, rotation)

    def _check_rotary(self, context: Tensor | None) -> None:
        if self.rotary is not None and context is not None:
            raise InputError(
                "Rotary positions are undefined between two sequences.",
                asked=f"attention to a context by a layer with {self.rotary}",
                because="queries and keys are rotated by their positions in one sequence",
                instead="a layer without rotary positions for the context",
            )

    def _join_pattern(self, pattern: Pattern | None) -> Attention:
        if pattern is None:
            return self.attention
        whole = pattern if self.attention.pattern is None else self.attention.pattern & pattern
        return dataclasses.replace(self.attention, pattern=whole)

    def _check_arguments(self, x, context, values, pattern, cache, lengths) -> None:
        """Refuse arguments that would otherwise be ignored or misread."""
        because = ""
        if isinstance(cache, KVCache | StateCache):
            if context is not None or values is not None:
                because = (
                    "this cache holds the keys of the sequence itself; those of a context are kept by a CrossCache"
                )
        elif lengths is not None and (context is not None or cache is not None):
            because = "lengths belong to the queries; padding of the context belongs into pattern="
        elif isinstance(cache, CrossCache) and cache.key is not None:
            if context is not None and context is not cache.source:
                because = "the cache was filled from another context; a new one needs a new cache"
            elif len(x) != len(cache.key):
                because = f"the cache was filled with {len(cache.key)} rows, and these are {len(x)}"
        if because:
            arguments = {"context": context, "values": values, "lengths": lengths, "pattern": pattern}
            given = ", ".join(name for name, thing in arguments.items() if thing is not None)
            raise CacheError(
                "These arguments do not go together.",
                asked=f"tokens {tuple(x.shape)} with {type(cache).__name__ if cache is not None else 'no cache'}"
                + (f" and {given}" if given else ""),
                because=because,
                instead="one cache for each text, by layer.new_cache() or CrossCache(), and lengths= for its padding",
            )

    @property
    def is_shift_invariant(self) -> bool:
        """Whether only distances count, so that positions may begin anywhere, as in a packed or padded row."""
        return fits_padded_rows(self.attention)

    # torch.nn.MultiheadAttention

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, attention: Attention | None = None) -> MultiHeadAttention:
        """The same layer as torch's, with the same numbers. `load_state_dict` reads torch's names, too."""
        return rewrite.from_torch(cls, module, attention)

    def extra_repr(self) -> str:
        described = ", ".join(
            f"{field.name}={getattr(self.attention, field.name)!r}"
            for field in dataclasses.fields(self.attention)
            if field.name != "bias" and getattr(self.attention, field.name) is not None
        )
        return f"heads={self.sizes.heads}, kv_heads={self.sizes.kv_heads}" + (f", {described}" if described else "")


def _check_queries(queries: Sequence[int] | Tensor, x: Tensor) -> Tensor:
    places = torch.as_tensor(queries, device=x.device)
    if places.ndim != 1 or places.is_floating_point() or bool(((places < 0) | (places >= x.shape[-2])).any()):
        raise InputError(
            "A query index is out of range.",
            asked=f"queries={queries}",
            found=f"{x.shape[-2]} tokens",
            because="a row of weights belongs to a token, and tokens are counted from 0",
            instead=f"a list of whole numbers from 0 to {x.shape[-2] - 1}",
        )
    return places


def _rename_torch_keys(module: MultiHeadAttention, state: dict[str, Tensor], prefix: str, *_) -> None:
    rewrite.rename_torch_state(state, prefix, module.projections)
