"""One block of a transformer: self-attention, optional cross-attention, and a feed-forward layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from regard.errors import ConfigError, InputError
from regard.layers.cache import CrossCache, KVCache, StateCache
from regard.layers.feedforward import FeedForward
from regard.layers.fused_training import feed_forward, feed_forward_with_residual, norm_with_residual
from regard.layers.linear import Linear, is_plain_module
from regard.layers.multihead import MultiHeadAttention
from regard.layers.rotary import Rotation
from regard.patterns import Pattern


class TransformerBlock(nn.Module):
    """A transformer block: residual connections around each part, with a norm before or after it.

        pre    x = x + part(norm(x))
        post   x = norm(x + part(x))

    part: self-attention; cross-attention to a context, if there is one; feed-forward.

    Sources: Vaswani et al. (2017), section 3.1, normalise after; Xiong et al., On Layer Normalization in the
    Transformer Architecture (2020), before.

        >>> from regard.layers import TransformerBlock, FeedForward, MultiHeadAttention
        >>> block = TransformerBlock(MultiHeadAttention(12, 3), FeedForward(12, 24))
        >>> block(torch.randn(2, 5, 12)).shape
        torch.Size([2, 5, 12])

    Args:
        attention: the self-attention.
        feed_forward: the feed-forward layer.
        cross: attention to a context, for a decoder.
        norm, eps: class of the norms, and their epsilon.
        order: `"pre"` normalises before each part, `"post"` after it.
        dropout: on the output of each part, while training.
        shortcut: `"project"` puts a matrix on the residual connection where attention changes the number of channels.
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
                "The shortcut is unknown.",
                asked=f"shortcut={shortcut!r}",
                because="a residual connection adds its input as it is, or times a matrix where the sizes differ",
                instead='shortcut="same" or shortcut="project"',
            )
        if sizes.output != sizes.input and shortcut != "project":
            raise ConfigError(
                "The attention changes the number of channels.",
                asked=f"an attention from {sizes.input} to {sizes.output} channels",
                because=f"x + attention(x) is not defined for {sizes.input} and {sizes.output} channels",
                instead=f'an output of {sizes.input} channels, or shortcut="project" for a projection',
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
        read, x = norm_with_residual(self.attention_norm, x) if before else (x, x)
        residual = x if self.shortcut is None else self.shortcut(x)
        options = {"pattern": pattern, "cache": cache, "lengths": lengths, "rotation": rotation}
        x = self._add(residual, self.attention, read, **options)
        x = x if before else norm_with_residual(self.attention_norm, x)[0]
        if self.cross is not None and self.cross_norm is not None:
            if context is None and (cross_cache is None or cross_cache.key is None):
                raise InputError(
                    "This block needs a context.",
                    asked="a block with cross-attention, without a context",
                    because="without one it would attend to its own tokens, future ones included",
                    instead="block(x, context=...), or a cross_cache that was filled before",
                )
            read, x = norm_with_residual(self.cross_norm, x) if before else (x, x)
            x = self._add(x, self.cross, read, context, pattern=context_pattern, cache=cross_cache)
            x = x if before else norm_with_residual(self.cross_norm, x)[0]
        norm = self.feed_forward_norm
        fused = None if self._drops() else feed_forward_with_residual(self.feed_forward, x, norm if before else None)
        if fused is None:
            read, x = norm_with_residual(norm, x) if before else (x, x)
            fused = self._add(x, self.feed_forward, read)
        return fused if before else norm_with_residual(norm, fused)[0]

    def _add(self, residual: Tensor, part: nn.Module, x: Tensor, *inputs: Tensor | None, **options: Any) -> Tensor:
        """`residual + part(x, ...)`; parts of ours do it in one pass where nothing is dropped."""
        if self._drops():
            made = feed_forward(part, x) if isinstance(part, FeedForward) else part(x, *inputs, **options)
            return residual + self.dropout(made)
        if isinstance(part, MultiHeadAttention | FeedForward):
            return part.add_to(residual, x, *inputs, **options)
        return residual + part(x, *inputs, **options)

    def _drops(self) -> bool:
        """Whether something happens between a part and its residual connection."""
        return (self.training and self.dropout.p > 0) or not is_plain_module(self.dropout, nn.Dropout)

    def extra_repr(self) -> str:
        return f"order={self.order!r}"


def _check_parts(channels: int, cross: MultiHeadAttention | None, feed_forward: nn.Module) -> None:
    """Refuse parts whose channels differ from the output of the self-attention."""
    found = []
    if cross is not None:
        found.append(("the cross-attention", cross.sizes.input, cross.sizes.output))
    if isinstance(feed_forward, FeedForward):
        found.append(("the feed-forward part", feed_forward.inner.in_features, feed_forward.outer.out_features))
    for name, read, written in found:
        if (read, written) != (channels, channels):
            raise ConfigError(
                "The parts of a block do not fit together.",
                asked=f"{name} from {read} to {written} channels",
                found=f"{channels} channels after the attention",
                because="each part is added to the output of the one before it",
                instead=f"{name} from {channels} to {channels} channels",
            )


class BlockList(nn.ModuleList):
    """Blocks that run one after the other."""

    def __iter__(self) -> Iterator[TransformerBlock]:
        return super().__iter__()  # type: ignore[return-value]
