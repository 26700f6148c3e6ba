"""BERT: an encoder that reads a text from both sides, with its two heads for pre-training.

    x = norm(embed(tokens) + position + segment)
    x = norm(x + attention(x)),  x = norm(x + feed_forward(x))          in every layer
    pooled = tanh(x_0 W + b)
    masked-token logits = norm(gelu(x W + b)) E^T + c      E the embedding itself
    next-sentence logits = pooled W + b                    0: B follows A, 1: B is some other sentence

Source: Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers (2019), and its released code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.layers.block import Block, Stack
from regard.layers.feedforward import PLAIN, FeedForward
from regard.layers.linear import Linear
from regard.layers.multihead import MultiHeadAttention
from regard.layers.positions import LearnedPositions
from regard.models.config import Config, published
from regard.models.foreign.bert import HuggingFaceBert, heads_in
from regard.models.foreign.rules import Converter
from regard.models.generation.writer import resting
from regard.models.packing import check_pooling, pack, pooled_rows
from regard.models.pretrained import Pretrained
from regard.models.reading import check_segments, check_sizes, check_tokens
from regard.patterns import Padding, Pattern

# layers, dim of the published models; a head has 64 channels
SIZES = {
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024),
}


@dataclass(frozen=True)
class BertConfig(Config):
    """Sizes and parts of a BERT; the defaults are those of BERT base without the heads for pre-training.

    Attributes:
        vocabulary, context, segments: numbers of tokens, positions and kinds of sentences (A and B).
        dim, layers, heads, hidden: channels, blocks, heads, channels inside the feed-forward part (`4 dim` if `None`).
        activation: of the feed-forward part and of the masked-token head.
        pooler: whether the first token is pooled.
        masked_tokens, next_sentence: whether the two heads for pre-training are there.
        dropout: while training, on embeddings, residuals and attention weights.
    """

    vocabulary: int = 30522
    context: int = 512
    segments: int = 2
    dim: int = 768
    layers: int = 12
    heads: int = 12
    hidden: int | None = None
    activation: str = "gelu"
    norm_eps: float = 1e-12
    pooler: bool = True
    masked_tokens: bool = False
    next_sentence: bool = False
    dropout: float = 0.1

    def __post_init__(self) -> None:
        check_sizes(self, "vocabulary", "context", "segments", "dim", "layers", "heads", "hidden")
        if self.activation not in PLAIN or (self.next_sentence and not self.pooler):
            raise ConfigError(
                "BERT cannot be built so.",
                asked=f"activation={self.activation!r}, pooler={self.pooler}, next_sentence={self.next_sentence}",
                because=f"activations are {', '.join(PLAIN)}, and the next-sentence head reads the pooled token",
                instead='activation="gelu"; pooler=True where next_sentence=True',
            )

    @classmethod
    def bert(cls, size: str = "base", **changes: Any) -> BertConfig:
        """BERT `tiny`, `mini`, `small`, `medium`, `base` or `large`, uncased."""
        layers, dim = published("BERT", f"BertConfig.bert({size!r})", size, SIZES)
        return cls.from_dict({"layers": layers, "dim": dim, "heads": dim // 64, **changes})


class BertOutput(NamedTuple):
    """What a BERT knows; `None` where it has no such part.

    Attributes:
        hidden: of every token, `(batch, token, dim)`.
        pooled: of the text, from its first token, `(batch, dim)`.
        masked_tokens: logits `(batch, token, vocabulary)`.
        next_sentence: logits `(batch, 2)`.
    """

    hidden: Tensor
    pooled: Tensor | None
    masked_tokens: Tensor | None
    next_sentence: Tensor | None


class Bert(Pretrained):
    """An encoder of texts.

    >>> from regard.models import Bert, BertConfig
    >>> model = Bert(BertConfig(vocabulary=31, context=16, dim=8, layers=2, heads=2)).eval()
    >>> model(torch.tensor([[1, 2, 3], [4, 5, 0]]), lengths=[3, 2]).hidden.shape
    torch.Size([2, 3, 8])
    >>> model.embed([[1, 2, 3, 4], [5, 6]]).shape
    torch.Size([2, 8])
    """

    Config: ClassVar = BertConfig
    converters: ClassVar = {"huggingface": HuggingFaceBert(BertConfig)}

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.config: BertConfig = config
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.positions = LearnedPositions(config.context, config.dim)
        self.segments = nn.Embedding(config.segments, config.dim)
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = Stack(_block(config) for _ in range(config.layers))
        self.pooler = Linear(config.dim, config.dim) if config.pooler else None
        self.masked_tokens = MaskedTokens(config, self.embedding) if config.masked_tokens else None
        self.next_sentence = Linear(config.dim, 2) if config.next_sentence else None
        self._initialise()

    def forward(
        self,
        tokens: Tensor,
        segments: Tensor | None = None,
        *,
        lengths: Sequence[int] | Tensor | None = None,
        pattern: Pattern | None = None,
    ) -> BertOutput:
        """Read texts `(batch, token)`, padded on the right to equal length; `lengths` says how long each one is.

        segments: 0 for the tokens of the first sentence, 1 for those of the second; all 0 if not given.
        pattern: hides more, or something else than padding.
        """
        if lengths is not None:
            padding = Padding(lengths)
            pattern = padding if pattern is None else pattern & padding
        hidden = self.hidden(tokens, segments, pattern=pattern)
        pooled = None if self.pooler is None else torch.tanh(self.pooler(hidden[:, 0]))
        masked = None if self.masked_tokens is None else self.masked_tokens(hidden)
        following = None if self.next_sentence is None or pooled is None else self.next_sentence(pooled)
        return BertOutput(hidden, pooled, masked, following)

    def hidden(
        self,
        tokens: Tensor,
        segments: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        pattern: Pattern | None = None,
    ) -> Tensor:
        """What the last layer knows of every token, `(batch, token, dim)`."""
        check_tokens(tokens, self.config.vocabulary, None if positions is not None else self.config.context)
        if segments is not None:
            check_segments(segments, tokens, self.config.segments)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(positions)
        x = x + (self.segments.weight[0] if segments is None else self.segments(segments))
        x = self.dropout(self.norm(x))
        for block in self.blocks:
            x = block(x, pattern=pattern)
        return x

    @torch.no_grad()
    def embed(
        self,
        texts: Sequence[Sequence[int]],
        *,
        pooling: str = "mean",
        normalise: bool = True,
        tokens_at_once: int = 2048,
    ) -> Tensor:
        """One vector for each text, `(text, dim)`, whatever their lengths: they are packed, not padded.

        Texts of any length are laid end to end, about `tokens_at_once` tokens in a row, and see only themselves
        (`Segments`); no token is computed that nobody asked for. `pooling`: "mean" of the tokens, "first" token, or
        "pooled". In evaluation mode, without gradients.
        """
        with resting(self):
            return self._embed(texts, pooling, normalise, tokens_at_once)

    def _embed(self, texts: Sequence[Sequence[int]], pooling: str, normalise: bool, tokens_at_once: int) -> Tensor:
        check_pooling(pooling)
        rows_of_texts = list(pack(texts, tokens_at_once, self.config.context, self.config.vocabulary))
        made = self.embedding.weight.new_empty(len(texts), self.config.dim)
        for packed in rows_of_texts:
            device = made.device
            hidden = self.hidden(
                packed.tokens.to(device), positions=packed.positions.to(device), pattern=packed.pattern
            )[0]
            rows = pooled_rows(hidden, packed, "first" if pooling == "pooled" else pooling)
            if pooling == "pooled":
                rows = self._pooled(rows)
            made[packed.texts] = rows
        return nn.functional.normalize(made, dim=-1) if normalise else made

    def _pooled(self, first: Tensor) -> Tensor:
        if self.pooler is None:
            raise ConfigError(
                "This BERT has no pooler.",
                asked='embed(pooling="pooled")',
                because="its configuration says pooler=False",
                instead='pooling="mean" or "first"',
            )
        return torch.tanh(self.pooler(first))

    @torch.no_grad()
    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, MultiHeadAttention):
                for weight in module.projections.weights():
                    nn.init.normal_(weight, std=0.02)
            if isinstance(module, Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    @classmethod
    def _convert(
        cls,
        converter: Converter,
        config: dict[str, Any],
        state: dict[str, Tensor],
        dtype: torch.dtype | None,
        source: str,
    ) -> Self:
        # Configurations do not always say which heads there are; the tensors do.
        return super()._convert(converter, heads_in(config, state), state, dtype, source)


class MaskedTokens(nn.Module):
    """What stands at a masked place: `norm(bend(x W + b)) E^T + c`, with the embedding `E` itself."""

    def __init__(self, config: BertConfig, embedding: nn.Embedding) -> None:
        super().__init__()
        self.inner = Linear(config.dim, config.dim)
        self.bend = PLAIN[config.activation]
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.output = Linear(config.dim, config.vocabulary)
        self.output.weight = embedding.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return self.output(self.norm(self.bend(self.inner(hidden))))


def _block(config: BertConfig) -> Block:
    hidden = 4 * config.dim if config.hidden is None else config.hidden
    return Block(
        MultiHeadAttention(config.dim, config.heads, dropout=config.dropout),
        FeedForward(config.dim, hidden, config.activation),
        eps=config.norm_eps,
        order="post",
        dropout=config.dropout,
    )
