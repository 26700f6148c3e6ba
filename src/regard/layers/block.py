"""One block of a transformer: attention, perhaps attention to another text, and a feed-forward part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from torch import Tensor, nn

from regard.errors import ConfigError, InputError
from regard.layers.cache import CrossCache, KVCache, StateCache
from regard.layers.feedforward import FeedForward
from regard.layers.linear import Linear
from regard.layers.multihead import MultiHeadAttention
from regard.layers.rotary import Rotation
from regard.patterns import Pattern


class TransformerBlock(nn.Module):
    """Each part is added to what came in, normalised before or after.

        pre    x = x + part(norm(x))
        post   x = norm(x + part(x))

    part: self-attention; attention to the context, if there is one; feed-forward.

    Sources: Vaswani et al. (2017), section 3.1, normalise after; Xiong et al., On Layer Normalization in the
    Transformer Architecture (2020), before.

        >>> from regard.layers import TransformerBlock, FeedForward, MultiHeadAttention
        >>> block = TransformerBlock(MultiHeadAttention(12, 3), FeedForward(12, 24))
        >>> block(torch.randn(2, 5, 12)).shape
        torch.Size([2, 5, 12])
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        feed_forward: FeedForward,
        *,
        cross: MultiHeadAttention | None = None,
        norm: type[nn.Module] = nn.LayerNorm,
        eps: float = 1e-5,
        order: Literal["pre", "post"] = "pre",
        dropout: float = 0.0,
        shortcut: Literal["same", "project"] = "same",
    ) -> None:
        super().__init__()
        sizes = attention.sizes
        if order not in ("pre", "post"):
            raise ConfigError(
                "A block normalises before or after.",
                asked=f"order={order!r}",
                because="there are two places for a norm",
                instead='order="pre" or order="post"',
            )
        if shortcut not in ("same", "project"):
            raise ConfigError(
                "There are two ways past a part.",
                asked=f"shortcut={shortcut!r}",
                because="what came in is added as it is, or multiplied by a matrix where the sizes differ",
                instead='shortcut="same" or shortcut="project"',
            )
        if sizes.output != sizes.input and shortcut != "project":
            raise ConfigError(
                "What a block adds must be as large as what came in.",
                asked=f"an attention from {sizes.input} to {sizes.output} channels",
                because=f"x + attention(x) is not defined for {sizes.input} and {sizes.output} channels",
                instead=f'an output of {sizes.input} channels, or shortcut="project" for a matrix on the way past it',
            )
        _check_parts(sizes.output, cross, feed_forward)
        self.order: Literal["pre", "post"] = order
        outer = sizes.output
        before = order == "pre"
        self.attention, self.cross, self.feed_forward = attention, cross, feed_forward
        self.attention_norm = norm(sizes.input if before else outer, eps=eps)
        self.cross_norm = None if cross is None else norm(outer, eps=eps)
        self.feed_forward_norm = norm(outer, eps=eps)
        self.shortcut = Linear(sizes.input, outer, bias=False) if outer != sizes.input else None
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        *,
        pattern: Pattern | None = None,
        cache: KVCache | StateCache | None = None,
        lengths: Sequence[int] | Tensor | None = None,
        rotation: Rotation | None = None,
        context: Tensor | None = None,
        context_pattern: Pattern | None = None,
        cross_cache: CrossCache | None = None,
    ) -> Tensor:
        before = self.order == "pre"
        asked = self.attention_norm(x) if before else x
        made = self.attention(asked, pattern=pattern, cache=cache, lengths=lengths, rotation=rotation)
        past = x if self.shortcut is None else self.shortcut(x)
        x = past + (self.dropout(made) if self.training else made)
        x = x if before else self.attention_norm(x)
        if self.cross is not None and self.cross_norm is not None:
            if context is None and (cross_cache is None or cross_cache.key is None):
                raise InputError(
                    "This block reads a second text.",
                    asked="a block with attention to a context, without one",
                    because="without a context it would look at its own tokens, future ones included",
                    instead="block(x, context=...), or a cross_cache that was filled before",
                )
            made = self.cross(self.cross_norm(x) if before else x, context, pattern=context_pattern, cache=cross_cache)
            x = x + (self.dropout(made) if self.training else made)
            x = x if before else self.cross_norm(x)
        made = self.feed_forward(self.feed_forward_norm(x) if before else x)
        x = x + (self.dropout(made) if self.training else made)
        return x if before else self.feed_forward_norm(x)

    def extra_repr(self) -> str:
        return f"order={self.order!r}"


def _check_parts(channels: int, cross: MultiHeadAttention | None, feed_forward: nn.Module) -> None:
    """Every later part reads and writes the channels that leave the first."""
    found = []
    if cross is not None:
        found.append(("the attention to the context", cross.sizes.input, cross.sizes.output))
    if isinstance(feed_forward, FeedForward):
        found.append(("the feed-forward part", feed_forward.inner.in_features, feed_forward.outer.out_features))
    for name, read, written in found:
        if (read, written) != (channels, channels):
            raise ConfigError(
                "The parts of a block do not fit together.",
                asked=f"{name} from {read} to {written} channels",
                found=f"{channels} channels that leave the attention",
                because="each part is added to what the one before it made",
                instead=f"{name} from {channels} to {channels} channels",
            )


class BlockList(nn.ModuleList):
    """BlockList, one after the other."""

    def __iter__(self) -> Iterator[TransformerBlock]:
        return super().__iter__()  # type: ignore[return-value]
