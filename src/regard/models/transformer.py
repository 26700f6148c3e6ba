"""The Transformer: an encoder reads one text, a decoder writes another while looking at it.

    encoder   x = norm(x + attention(x)),  x = norm(x + feed_forward(x))
    decoder   y = norm(y + causal attention(y)),  y = norm(y + attention(y, x)),  y = norm(y + feed_forward(y))
    logits = y E^T       E the one embedding of both texts, which enter as E[token] sqrt(dim) + position

Source: Vaswani et al., Attention Is All You Need (2017), section 3 and table 3.

Where we differ: `order="pre"` normalises before each part, and then once more at the end of either side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.errors import ConfigError
from regard.layers.block import Block, Stack
from regard.layers.cache import CrossCache, Memory, padded_positions
from regard.layers.feedforward import GATED, PLAIN, FeedForward
from regard.layers.linear import Linear
from regard.layers.multihead import MultiHeadAttention
from regard.layers.positions import LearnedPositions, SinusoidalPositions
from regard.models.config import Config
from regard.models.foreign.torch_transformer import TorchTransformer, described
from regard.models.generation import Generation, generate
from regard.models.pretrained import Pretrained
from regard.models.reading import check_sizes, check_tokens
from regard.patterns import Causal, Padding, Pattern

Lengths = Sequence[int] | Tensor


@dataclass(frozen=True)
class TransformerConfig(Config):
    """Sizes and choices of a Transformer; the defaults are the paper's base model.

    Attributes:
        vocabulary: tokens that both languages share.
        dim, layers, heads, hidden: channels, blocks on either side, heads, channels inside the feed-forward part.
        context: the longest text; `None` for any, which sinusoidal positions allow.
        position: "sinusoidal" or "learned".
        activation, norm_eps: of the blocks.
        attention_bias: whether queries, keys, values and outputs have biases; the feed-forward part always has.
        order: "post", as published, or "pre".
        final_norm: whether either side ends with a norm; `None` does so where the order is "pre".
        shared: whether one matrix embeds both texts and makes the logits.
        start: the token that a translation starts with.
        dropout: while training, on embeddings, residuals and attention weights.
    """

    vocabulary: int = 37000
    dim: int = 512
    layers: int = 6
    heads: int = 8
    hidden: int = 2048
    context: int | None = None
    position: str = "sinusoidal"
    activation: str = "relu"
    attention_bias: bool = True
    norm_eps: float = 1e-5
    order: str = "post"
    final_norm: bool | None = None
    shared: bool = True
    start: int = 0
    dropout: float = 0.1

    def __post_init__(self) -> None:
        check_sizes(self, "vocabulary", "context", "dim", "layers", "heads", "hidden")
        because = ""
        if self.position not in ("sinusoidal", "learned"):
            because = 'positions are "sinusoidal" or "learned"'
        elif self.position == "learned" and self.context is None:
            because = "learned positions need the longest text: context=..."
        elif self.order not in ("pre", "post") or self.activation not in (*PLAIN, *GATED):
            because = f'the order is "pre" or "post", activations are {", ".join((*PLAIN, *GATED))}'
        elif not 0 <= self.start < self.vocabulary:
            because = f"the start token is one of the {self.vocabulary} tokens"
        if because:
            raise ConfigError(
                "The Transformer cannot be built so.",
                asked=f"position={self.position!r}, context={self.context}, order={self.order!r}, "
                f"activation={self.activation!r}, start={self.start}",
                because=because,
                instead="TransformerConfig.base()",
            )

    @classmethod
    def base(cls, **changes: Any) -> TransformerConfig:
        """The paper's base model."""
        return cls.from_dict(changes)

    @classmethod
    def big(cls, **changes: Any) -> TransformerConfig:
        """The paper's big model."""
        return cls.from_dict({"dim": 1024, "heads": 16, "hidden": 4096, "dropout": 0.3} | changes)


class Transformer(Pretrained):
    """An encoder and a decoder.

    >>> from regard.models import Transformer, TransformerConfig
    >>> model = Transformer(TransformerConfig(vocabulary=11, dim=8, layers=2, heads=2, hidden=16)).eval()
    >>> model(torch.tensor([[1, 2, 3]]), torch.tensor([[0, 4]])).shape
    torch.Size([1, 2, 11])
    >>> len(model.generate([[1, 2, 3], [4]], max_new=5).tokens[1])
    5
    """

    Config: ClassVar = TransformerConfig
    converters: ClassVar = {"torch": TorchTransformer(TransformerConfig)}
    prompts_count = False

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.config: TransformerConfig = config
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.target_embedding = self.embedding if config.shared else nn.Embedding(config.vocabulary, config.dim)
        self.source_positions, self.target_positions = _positions(config), _positions(config)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = Stack(_block(config, decodes=False) for _ in range(config.layers))
        self.decoder = Stack(_block(config, decodes=True) for _ in range(config.layers))
        ends = config.order == "pre" if config.final_norm is None else config.final_norm
        self.encoder_norm = nn.LayerNorm(config.dim, eps=config.norm_eps) if ends else None
        self.decoder_norm = nn.LayerNorm(config.dim, eps=config.norm_eps) if ends else None
        self.output = Linear(config.dim, config.vocabulary, bias=False)
        if config.shared:
            self.output.weight = self.embedding.weight
        self._initialise()

    @property
    def vocabulary(self) -> int:
        return self.config.vocabulary

    @property
    def context(self) -> int | None:
        return self.config.context

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_lengths: Lengths | None = None,
        target_lengths: Lengths | None = None,
    ) -> Tensor:
        """Logits of the next token at every place of the target, `(batch, token, vocabulary)`.

        Texts are padded on the right; lengths say how long each one is. The target begins with the start token.
        """
        hidden = None if source_lengths is None else Padding(source_lengths)
        pattern = None if target_lengths is None else Padding(target_lengths)
        context = self.encode(source, pattern=hidden)
        return self.output(self.decode(target, context, pattern=pattern, context_pattern=hidden))

    def encode(self, source: Tensor, *, pattern: Pattern | None = None, positions: Tensor | None = None) -> Tensor:
        """What the encoder knows of every source token, `(batch, token, dim)`."""
        check_tokens(source, self.vocabulary, self.context)
        positions = torch.arange(source.shape[1], device=source.device) if positions is None else positions
        x = self._embed(source, self.embedding, self.source_positions, positions)
        for block in self.encoder:
            x = block(x, pattern=pattern)
        return x if self.encoder_norm is None else self.encoder_norm(x)

    def decode(
        self,
        target: Tensor,
        context: Tensor | None,
        *,
        pattern: Pattern | None = None,
        context_pattern: Pattern | None = None,
        memory: Memory | None = None,
    ) -> Tensor:
        """What the decoder knows of every target token, `(batch, token, dim)`.

        With a memory, `target` are the next tokens, and the context is needed only for the first of them.
        """
        past = 0 if memory is None else memory.length
        check_tokens(target, self.vocabulary, self.context, past)
        positions = torch.arange(target.shape[1]) if memory is None else memory.positions(target.shape[1])
        positions = positions.to(target.device)
        y = self._embed(target, self.target_embedding, self.target_positions, positions)
        for index, block in enumerate(self.decoder):
            y = block(
                y,
                pattern=pattern,
                context=context,
                context_pattern=context_pattern,
                cache=None if memory is None else memory.caches[index],
                cross_cache=None if memory is None else memory.crosses[index],
            )
        return y if self.decoder_norm is None else self.decoder_norm(y)

    def _embed(self, tokens: Tensor, embedding: nn.Embedding, positions: nn.Module, places: Tensor) -> Tensor:
        x = embedding(tokens) * self.config.dim**0.5
        # A computed table is rounded once, to the model's own precision.
        added = positions(places, x.dtype) if isinstance(positions, SinusoidalPositions) else positions(places)
        return self.dropout(x + added)

    # Writing

    def new_memory(self, room: int | None = None) -> Memory:
        """Empty caches for targets of at most `room` tokens."""
        caches = [block.attention.new_cache(room) for block in self.decoder]
        return Memory(caches, [CrossCache() for _ in self.decoder])

    def start(self, prompts: Tensor, lengths: Tensor | None = None, room: int = 0) -> tuple[Tensor, Memory]:
        """Read the sources, padded on the left: logits of the first target tokens, and the memory to go on with."""
        padding, places = None, None
        if lengths is not None:
            padding = Padding(lengths, side="left")
            places = padded_positions(prompts.shape[1], lengths).to(prompts.device)
        context = self.encode(prompts, pattern=padding, positions=places)
        memory = self.new_memory(room + 1)
        memory.context_pattern = padding
        begin = prompts.new_full((len(prompts), 1), self.config.start)
        hidden = self.decode(begin, context, context_pattern=padding, memory=memory)
        return self.output(hidden)[:, -1], memory

    def extend(self, tokens: Tensor, memory: Memory) -> Tensor:
        """Read one more target token of each row: logits of the next."""
        hidden = self.decode(tokens, None, context_pattern=memory.context_pattern, memory=memory)
        return self.output(hidden)[:, -1]

    def generate(self, prompts: Sequence[Sequence[int]] | Tensor, **words: Any) -> Generation:
        """Translate the prompts; see `regard.models.generation.generate` for all it can do."""
        return generate(self, prompts, **words)

    # torch.nn.Transformer

    @classmethod
    def from_torch(
        cls,
        module: nn.Transformer,
        embedding: Tensor,
        target_embedding: Tensor | None = None,
        output: Tensor | None = None,
        **changes: Any,
    ) -> Transformer:
        """The model around torch's module, which leaves embeddings `(vocabulary, dim)` and the output to its user.

        One embedding serves for all three, unless the other two are given. `changes` are further fields of the
        configuration, such as `start`. `to_foreign("torch")` is the way back.
        """
        state = dict(module.state_dict()) | {"embedding.weight": embedding}
        shared = target_embedding is None and output is None
        if target_embedding is not None:
            state["target_embedding.weight"] = target_embedding
        if output is not None:
            state["output.weight"] = output
        config = described(module) | {"vocabulary": len(embedding), "shared": shared} | changes
        return cls.from_foreign(config, state, "torch").train(module.training)

    @torch.no_grad()
    def _initialise(self) -> None:
        """Xavier's uniform for matrices, `1/sqrt(dim)` for the embedding, which comes in times `sqrt(dim)`."""
        for module in self.modules():
            if isinstance(module, Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for embedding in (self.embedding, self.target_embedding):
            nn.init.normal_(embedding.weight, std=self.config.dim**-0.5)


def _positions(config: TransformerConfig) -> nn.Module:
    if config.position == "learned":
        assert config.context is not None
        return LearnedPositions(config.context, config.dim)
    return SinusoidalPositions(config.dim)


def _block(config: TransformerConfig, *, decodes: bool) -> Block:
    def attention(described: Attention | None) -> MultiHeadAttention:
        return MultiHeadAttention(
            config.dim, config.heads, attention=described, bias=config.attention_bias, dropout=config.dropout
        )

    return Block(
        attention(Attention(pattern=Causal()) if decodes else None),
        FeedForward(config.dim, config.hidden, config.activation, dropout=config.dropout),
        cross=attention(None) if decodes else None,
        eps=config.norm_eps,
        order="pre" if config.order == "pre" else "post",
        dropout=config.dropout,
    )
