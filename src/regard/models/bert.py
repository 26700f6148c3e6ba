"""BERT: a bidirectional encoder with its two heads for pre-training; RoBERTa and DistilBERT.

    x = norm(embed(tokens) + position + segment)
    x = norm(x + attention(x)),  x = norm(x + feed_forward(x))          in every layer
    pooled = tanh(x_0 W + b)
    masked-token logits = norm(gelu(x W + b)) E^T + c      E the embedding itself
    next-sentence logits = pooled W + b                    0: B follows A, 1: B is some other sentence

Source: Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers (2019), and its released code;
Liu et al., RoBERTa (2019); Sanh et al., DistilBERT (2019).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.errors import ConfigError, InputError
from regard.layers.block import BlockList, TransformerBlock
from regard.layers.feedforward import PLAIN, FeedForward
from regard.layers.linear import Linear
from regard.layers.modes import eval_mode
from regard.layers.multihead import MultiHeadAttention
from regard.layers.positions import LearnedPositions
from regard.models.attention_layers import build_layer, check_attentions
from regard.models.config import Config, find_published
from regard.models.converters.base import ConverterGroup
from regard.models.converters.bert import HuggingFaceBert
from regard.models.converters.distilbert import DistilBert
from regard.models.converters.roberta import Roberta
from regard.models.initialization import init_weights, normal
from regard.models.padding import find_padding
from regard.models.pretrained import Pretrained, State
from regard.models.sequence_packing import PackedTexts, check_pooling, pack_texts, pool_texts
from regard.models.validation import (
    check_pattern,
    check_positions,
    check_segments,
    check_sizes,
    check_tensor,
    check_tokens,
)
from regard.patterns import Pattern

# layers, dim of the published models; a head has 64 channels
SIZES = {
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024),
}
# Models of `regard.models.bert_heads`, which hold a `Bert` as the part "bert".
WITH_HEADS = ("regard.bertforpretraining", "regard.bertforclassification")


@dataclass(frozen=True, eq=False)
class BertConfig(Config):
    """AttentionSizes and parts of a BERT; the defaults are those of BERT base without the heads for pre-training.

    Attributes:
        vocab_size, context_length, segments: numbers of tokens, positions and segments (A and B); a model with
            `segments=0`, such as DistilBERT, does not tell sentences apart.
        dim, layers, heads, hidden_dim: hidden size, blocks, heads, feed-forward channels (`4 dim` if `None`).
        activation: of the feed-forward part and of the masked-token head.
        pooler: whether the first token is pooled.
        masked_tokens, next_sentence: whether the two heads for pre-training are there.
        padding_token: RoBERTa's, which has no position of its own: positions count the other tokens, and their table
            begins with `padding_token + 1` rows that no token of a text uses. `None`: positions count all tokens.
        dropout: while training, on embeddings, residuals and attention weights.
        attention: an `Attention` for all layers, or one for each; `None` sees everything. Each layer has a copy of the
            bias, learned parameters included.
    """

    vocab_size: int = 30522
    context_length: int = 512
    segments: int = 2
    dim: int = 768
    layers: int = 12
    heads: int = 12
    hidden_dim: int | None = None
    activation: str = "gelu"
    norm_eps: float = 1e-12
    pooler: bool = True
    masked_tokens: bool = False
    next_sentence: bool = False
    dropout: float = 0.1
    padding_token: int | None = None
    attention: Attention | tuple[Attention, ...] | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "context_length", "dim", "layers", "heads", "hidden_dim")
        if self.segments:
            check_sizes(self, "segments")
        if self.padding_token is not None and not 0 <= self.padding_token < self.vocab_size:
            raise ConfigError(
                "The padding token is not in the vocabulary.",
                asked=f"padding_token={self.padding_token}",
                found=f"a vocabulary of {self.vocab_size} tokens, 0 to {self.vocab_size - 1}",
                because="it is the token that positions do not count",
                instead="padding_token=1 for RoBERTa, None for BERT and DistilBERT",
            )
        if self.activation not in PLAIN or (self.next_sentence and not self.pooler):
            raise ConfigError(
                "BERT cannot be built so.",
                asked=f"activation={self.activation!r}, pooler={self.pooler}, next_sentence={self.next_sentence}",
                because=f"activations are {', '.join(PLAIN)}, and the next-sentence head reads the pooled token",
                instead='activation="gelu"; pooler=True where next_sentence=True',
            )
        check_attentions(self, "attention", self.attention)

    @classmethod
    def bert(cls, size: str = "base", **changes: Any) -> BertConfig:
        """BERT `tiny`, `mini`, `small`, `medium`, `base` or `large`, uncased."""
        layers, dim = find_published("BERT", f"BertConfig.bert({size!r})", size, SIZES)
        return cls.from_dict({"layers": layers, "dim": dim, "heads": dim // 64, **changes})


class BertOutput(NamedTuple):
    """Outputs of a BERT; `None` where it has no such part.

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
    >>> model = Bert(BertConfig(vocab_size=31, context_length=16, dim=8, layers=2, heads=2)).eval()
    >>> model(torch.tensor([[1, 2, 3], [4, 5, 0]]), lengths=[3, 2]).hidden.shape
    torch.Size([2, 3, 8])
    >>> model.embed([[1, 2, 3, 4], [5, 6]]).shape
    torch.Size([2, 8])
    """

    Config: ClassVar = BertConfig
    converters: ClassVar = {
        "huggingface": ConverterGroup(HuggingFaceBert(BertConfig), Roberta(BertConfig), DistilBert(BertConfig))
    }

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.config: BertConfig = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.positions = LearnedPositions(self.first_position + config.context_length, config.dim)
        self.segments = nn.Embedding(config.segments, config.dim) if config.segments else None
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = BlockList(_build_block(config, layer) for layer in range(config.layers))
        self.pooler = Linear(config.dim, config.dim) if config.pooler else None
        self.masked_tokens = MaskedTokens(config, self.embedding) if config.masked_tokens else None
        self.next_sentence = Linear(config.dim, 2) if config.next_sentence else None
        init_weights(self, normal, (nn.Linear, nn.Embedding), projections=True)

    @property
    def first_position(self) -> int:
        """The row of the first token in the table of positions."""
        return 0 if self.config.padding_token is None else self.config.padding_token + 1

    @classmethod
    def _load(cls, config: dict[str, Any], state: State, dtype: torch.dtype | None, source: str) -> Self:
        if config.get("model_type") in WITH_HEADS:  # the encoder in it
            known = {field.name for field in dataclasses.fields(BertConfig)}
            config = {name: value for name, value in config.items() if name in known} | {
                "model_type": cls._model_type()
            }
            state = {name.removeprefix("bert."): state[name] for name in state if name.startswith("bert.")}
        return super()._load(config, state, dtype, source)

    def forward(
        self,
        tokens: Tensor,
        segments: Tensor | None = None,
        *,
        lengths: Sequence[int] | Tensor | None = None,
        attention_mask: Tensor | None = None,
        pattern: Pattern | None = None,
    ) -> BertOutput:
        """Encode texts `(batch, token)`.

        segments: 0 for the tokens of the first sentence, 1 for those of the second; all 0 if not given.
        lengths: number of real tokens of each row, for texts padded on the right.
        attention_mask: the same as Hugging Face gives it, `(batch, token)`, 1 for real tokens; padded on either side.
            As there, it does not move positions: they count columns, so that padding on the left shifts them.
        pattern: hides more, or something else than padding.
        """
        check_pattern(pattern)
        check_tensor("tokens", tokens, "torch.tensor([[101, 7592, 102]])")
        if (padding := find_padding(tokens, lengths, attention_mask, side="right")) is not None:
            pattern = padding if pattern is None else pattern & padding
        hidden = self.hidden(tokens, segments, pattern=pattern)
        pooled = None if self.pooler is None else self.apply_pooler(hidden[:, 0])
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
        """Hidden states of the last layer, `(batch, token, dim)`.

        positions: `(token,)` or `(batch, token)`, counted from 0, of tokens that are all real; counted here if `None`.
        """
        check_tokens(tokens, self.config.vocab_size, None if positions is not None else self.config.context_length)
        check_pattern(pattern)
        check_positions(positions, tokens)
        if segments is not None:
            check_segments(segments, tokens, self.config.segments)
        x = self.embedding(tokens) + self.positions(self._find_position_rows(tokens, positions))
        if self.segments is not None:
            x = x + (self.segments.weight[0] if segments is None else self.segments(segments))
        x = self.dropout(self.norm(x))
        for block in self.blocks:
            x = block(x, pattern=pattern)
        return x

    def _find_position_rows(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Where the positions of these tokens are in their table; RoBERTa's padding token has the row of its id."""
        padding = self.config.padding_token
        if positions is not None:
            return positions if padding is None else positions + padding + 1
        if padding is None:
            return torch.arange(tokens.shape[1], device=tokens.device)
        counted = tokens != padding
        return counted.cumsum(1) * counted + padding

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
        (`Segments`), so that no padding is computed; one by one where an attention depends on absolute positions or
        has a feature map, which cannot be packed. `pooling`: "mean" of the tokens, "first" token, or
        "pooled". In evaluation mode, without gradients: no parameter of the model learns from what is returned.
        """
        if self.training and torch.is_grad_enabled() and any(each.requires_grad for each in self.parameters()):
            warnings.warn(
                "Bert.embed runs in evaluation mode and without gradients: in a training loop only what follows it "
                "learns. To train this model, call model(tokens, lengths=...).hidden; to embed without learning, call "
                "model.eval() first.",
                stacklevel=2,
            )
        with torch.no_grad(), eval_mode(self):
            return self._embed_packed(texts, pooling, normalise, tokens_at_once)

    def _embed_packed(
        self, texts: Sequence[Sequence[int]], pooling: str, normalise: bool, tokens_at_once: int
    ) -> Tensor:
        check_pooling(pooling)
        attentions = [block.attention for block in self.blocks]
        packs = all(each.is_shift_invariant and each.attention.feature_map is None for each in attentions)
        at_once = tokens_at_once if packs else 1
        rows_of_texts = list(pack_texts(texts, at_once, self.config.context_length, self.config.vocab_size))
        self._check_no_padding_token(rows_of_texts)
        made = self.embedding.weight.new_empty(len(texts), self.config.dim)
        for packed in rows_of_texts:
            device = made.device
            pattern = packed.pattern if packs else None
            hidden = self.hidden(packed.tokens.to(device), positions=packed.positions.to(device), pattern=pattern)[0]
            rows = pool_texts(hidden, packed, "first" if pooling == "pooled" else pooling)
            if pooling == "pooled":
                rows = self.apply_pooler(rows)
            made[packed.texts] = rows
        return nn.functional.normalize(made, dim=-1) if normalise else made

    def _check_no_padding_token(self, rows_of_texts: Sequence[PackedTexts]) -> None:
        """Refuse texts that are padded already, where positions depend on it."""
        padding = self.config.padding_token
        if padding is not None and any(bool((packed.tokens == padding).any()) for packed in rows_of_texts):
            raise InputError(
                "A text contains the padding token.",
                asked=f"embed(...) of texts with token {padding}",
                because="it has no position: this model counts the other tokens only",
                instead="each text without its padding: embed packs texts of unequal length",
            )

    def apply_pooler(self, first: Tensor) -> Tensor:
        """What the heads for texts read, from hidden states of first tokens `(text, dim)`."""
        if self.pooler is None:
            raise ConfigError(
                "This BERT has no pooler.",
                asked='apply_pooler, or embed(pooling="pooled")',
                because="its configuration says pooler=False",
                instead='pooling="mean" or "first"',
            )
        return torch.tanh(self.pooler(first))


class MaskedTokens(nn.Module):
    """The masked-token head: `norm(activation(x W + b)) E^T + c`, with the embedding `E` itself."""

    def __init__(self, config: BertConfig, embedding: nn.Embedding) -> None:
        super().__init__()
        self.inner = Linear(config.dim, config.dim)
        self.activation_fn = PLAIN[config.activation]
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.output = Linear(config.dim, config.vocab_size)
        self.output.weight = embedding.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return self.output(self.norm(self.activation_fn(self.inner(hidden))))


def _build_block(config: BertConfig, layer: int) -> TransformerBlock:
    hidden = 4 * config.dim if config.hidden_dim is None else config.hidden_dim
    return TransformerBlock(
        MultiHeadAttention(
            config.dim, config.heads, attention=build_layer(config.attention, layer), dropout=config.dropout
        ),
        FeedForward(config.dim, hidden, config.activation),
        eps=config.norm_eps,
        order="post",
        dropout=config.dropout,
    )
