"""BERT with heads beyond its own two: for more pre-training tasks, and for the classification of texts.

    pair logits      = pooled W + b                                  for each task on pairs of texts
    replaced logit   = gelu(x W + b) . w + c                         of every token (ELECTRA's discriminator head)
    projection       = tanh(x_0 W + b)                               of every text (SimCSE's head)
    class logits     = dropout(pool(x)) W + b

The encoder, with the heads that `Bert` has, is the part `bert`; `Bert.from_pretrained` reads it out of a checkpoint of
these models.

Sources: Clark et al., ELECTRA (ICLR 2020); Gao et al., SimCSE (2021); Devlin et al., BERT (2019), section 4.1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.layers.linear import Linear
from regard.models.bert import Bert, BertConfig
from regard.models.initialization import init_weights, normal
from regard.models.padding import find_padding
from regard.models.pretrained import Pretrained
from regard.patterns import Padding, Pattern


@dataclass(frozen=True, eq=False)
class BertForPretrainingConfig(BertConfig):
    """A BERT and its heads for pre-training.

    Attributes:
        pair_heads: a name and the names of the classes for each head on the pooled token, for example
            `(("sop", ("in order", "swapped")),)`.
        replaced_tokens: whether there is a head for replaced-token detection.
        projection: whether there is a head that projects the first token, for contrastive learning.
    """

    pair_heads: tuple[tuple[str, tuple[str, ...]], ...] = ()
    replaced_tokens: bool = False
    projection: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pair_heads and not self.pooler:
            raise ConfigError(
                "A head for pairs of texts needs the pooler.",
                asked=f"pair_heads={self.pair_heads!r}, pooler=False",
                because="it reads the pooled token",
                instead="pooler=True",
            )


class BertForPretraining(Pretrained):
    """A BERT whose forward pass gives the hidden states, and heads that are applied where they are needed.

    >>> from regard.models import BertForPretraining, BertForPretrainingConfig
    >>> heads = (("sop", ("in order", "swapped")),)
    >>> config = BertForPretrainingConfig(
    ...     vocab_size=31, context_length=16, dim=8, layers=1, heads=2, masked_tokens=True, pair_heads=heads)
    >>> model = BertForPretraining(config).eval()
    >>> hidden = model(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    >>> model.predict_tokens(hidden[:, 1]).shape, model.classify_pairs("sop", hidden[:, 0]).shape
    (torch.Size([2, 31]), torch.Size([2, 2]))
    """

    Config: ClassVar = BertForPretrainingConfig

    def __init__(self, config: BertForPretrainingConfig) -> None:
        super().__init__(config)
        self.config: BertForPretrainingConfig = config
        self.bert = Bert(take_encoder_config(config))
        self.pair_heads = nn.ModuleDict({name: Linear(config.dim, len(classes)) for name, classes in config.pair_heads})
        self.replaced_tokens = (
            nn.Sequential(Linear(config.dim, config.dim), nn.GELU(), Linear(config.dim, 1))
            if config.replaced_tokens
            else None
        )
        self.projection = Linear(config.dim, config.dim) if config.projection else None
        for head in (self.pair_heads, self.replaced_tokens, self.projection):
            if head is not None:
                init_weights(head, normal)

    def forward(
        self,
        tokens: Tensor,
        segments: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        pattern: Pattern | None = None,
    ) -> Tensor:
        """Hidden states `(batch, token, dim)` of texts `(batch, token)`; the arguments are those of `Bert.hidden`."""
        return self.bert.hidden(tokens, segments, positions=positions, pattern=pattern)

    def predict_tokens(self, hidden: Tensor) -> Tensor:
        """Logits of masked tokens over the vocabulary, from hidden states `(token, dim)`."""
        assert self.bert.masked_tokens is not None, "the configuration has masked_tokens=False"
        return self.bert.masked_tokens(hidden)

    def detect_replaced(self, hidden: Tensor) -> Tensor:
        """The logit of each token for being replaced, from hidden states `(token, dim)`."""
        assert self.replaced_tokens is not None, "the configuration has replaced_tokens=False"
        return self.replaced_tokens(hidden).squeeze(-1)

    def classify_pairs(self, name: str, first: Tensor) -> Tensor:
        """Logits of a head for pairs (`"nsp"` is BERT's own), from hidden states of first tokens `(pair, dim)`."""
        head = self.bert.next_sentence if name == "nsp" else self.pair_heads[name]
        assert head is not None, "the configuration has next_sentence=False"
        return head(self.bert.apply_pooler(first))

    def project(self, first: Tensor) -> Tensor:
        """What contrastive learning compares, from hidden states of the first tokens `(text, dim)`."""
        assert self.projection is not None, "the configuration has projection=False"
        return torch.tanh(self.projection(first))


@dataclass(frozen=True, eq=False)
class BertForClassificationConfig(BertConfig):
    """A BERT and a head that classifies texts.

    Attributes:
        classes: their names.
        pooling: what the head reads: the "mean" of the tokens, the "first" token, or the "pooled" one.
    """

    classes: tuple[str, ...] = ()
    pooling: Literal["mean", "first", "pooled"] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.classes) < 2 or (self.pooling == "pooled" and not self.pooler):
            raise ConfigError(
                "BERT cannot classify so.",
                asked=f"classes={self.classes!r}, pooling={self.pooling!r}, pooler={self.pooler}",
                because='there are at least two classes, and pooling="pooled" needs the pooler',
                instead='classes=("ham", "spam"), pooling="mean"',
            )


class BertForClassification(Pretrained):
    """A BERT that classifies texts.

    >>> from regard.models import BertForClassification, BertForClassificationConfig
    >>> sizes = dict(vocab_size=31, context_length=16, dim=8, layers=1, heads=2)
    >>> model = BertForClassification(BertForClassificationConfig(**sizes, classes=("ham", "spam"))).eval()
    >>> model(torch.tensor([[1, 2, 3], [4, 5, 0]]), lengths=[3, 2]).shape
    torch.Size([2, 2])
    """

    Config: ClassVar = BertForClassificationConfig

    def __init__(self, config: BertForClassificationConfig) -> None:
        super().__init__(config)
        self.config: BertForClassificationConfig = config
        self.bert = Bert(take_encoder_config(config))
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = Linear(config.dim, len(config.classes))
        init_weights(self.classifier, normal)

    @classmethod
    def from_bert(cls, bert: Bert, classes: Sequence[str], **changes: object) -> BertForClassification:
        """A new head on the weights of an encoder; its heads for pre-training are left out.

        changes: of the configuration, as `pooling` and `dropout`.
        """
        fields = bert.config.to_dict() | {"masked_tokens": False, "next_sentence": False, "classes": tuple(classes)}
        model = cls(BertForClassificationConfig.from_dict(fields | changes)).to(bert.embedding.weight.dtype)
        kept = model.bert.state_dict()
        model.bert.load_state_dict({name: tensor for name, tensor in bert.state_dict().items() if name in kept})
        return model

    def forward(
        self,
        tokens: Tensor,
        *,
        lengths: Sequence[int] | Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Logits `(batch, class)` of texts `(batch, token)`, padded as `lengths` or `attention_mask` say."""
        padding = find_padding(tokens, lengths, attention_mask, side="right")
        hidden = self.bert.hidden(tokens, pattern=padding)
        return self.classifier(self.dropout(self._pool(hidden, padding)))

    def _pool(self, hidden: Tensor, padding: Padding | None) -> Tensor:
        if self.config.pooling == "pooled":
            return self.bert.apply_pooler(hidden[:, 0])
        if self.config.pooling == "first":
            return hidden[:, 0]
        if padding is None:
            return hidden.mean(1)
        counts = torch.tensor(padding.counts, device=hidden.device)[:, None, None]
        columns = torch.arange(hidden.shape[1], device=hidden.device)[None, :, None]
        real = columns < counts if padding.side == "right" else columns >= hidden.shape[1] - counts
        return hidden.masked_fill(~real, 0).sum(1) / counts[:, 0]


def take_encoder_config(config: BertConfig) -> BertConfig:
    """The configuration of the encoder alone."""
    return BertConfig(**{field.name: getattr(config, field.name) for field in dataclasses.fields(BertConfig)})
