"""The Transformer: an encoder, and a decoder with cross-attention to it.

    encoder   x = norm(x + attention(x)),  x = norm(x + feed_forward(x))
    decoder   y = norm(y + causal attention(y)),  y = norm(y + attention(y, x)),  y = norm(y + feed_forward(y))
    logits = y E^T       E the one embedding of both texts, which enter as E[token] sqrt(dim) + position

Source: Vaswani et al., Attention Is All You Need (2017), section 3 and table 3.

Where we differ: `order="pre"` normalises before each part, and then once more at the end of either side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.errors import ConfigError
from regard.layers.block import BlockList, TransformerBlock
from regard.layers.cache import CrossCache, ModelCache, padded_positions
from regard.layers.feedforward import GATED, PLAIN, FeedForward
from regard.layers.linear import Linear
from regard.layers.multihead import MultiHeadAttention
from regard.layers.positions import LearnedPositions, SinusoidalPositions
from regard.models.attention_layers import Attentions, build_layer, check_attentions, make_causal, select_layer
from regard.models.config import Config
from regard.models.converters.torch_transformer import TorchTransformer, read_arguments
from regard.models.generation import Generation, generate
from regard.models.initialization import init_weights
from regard.models.native_decode import StackDescription, run_native_step
from regard.models.padding import find_padding
from regard.models.pretrained import Pretrained
from regard.models.validation import (
    check_cache,
    check_lengths,
    check_pattern,
    check_positions,
    check_sizes,
    check_tensor,
    check_tokens,
)
from regard.patterns import Padding, Pattern

Lengths = Sequence[int] | Tensor


@dataclass(frozen=True, eq=False)
class TransformerConfig(Config):
    """AttentionSizes and choices of a Transformer; the defaults are the paper's base model.

    Attributes:
        vocab_size: number of tokens that both languages share.
        dim, layers, heads, hidden_dim: hidden size, blocks on either side, heads, channels of the feed-forward part.
        context_length: the longest sequence; `None` for any, which sinusoidal positions allow.
        position: "sinusoidal" or "learned".
        activation, norm_eps: of the blocks.
        attention_bias: whether queries, keys, values and outputs have biases; the feed-forward part always has.
        order: "post", as published, or "pre".
        final_norm: whether either side ends with a norm; `None` does so where the order is "pre".
        shared: whether one matrix embeds both texts and makes the logits.
        start: the token that a translation starts with.
        dropout: while training, on embeddings, residuals and attention weights.
        encoder_attention, decoder_attention, cross_attention: an `Attention` for all layers of the encoder, for the
            self-attention of all layers of the decoder, and for the cross-attention of all layers; or one for
            each layer. The decoder's pattern is joined to `Causal()` by `&`. Cross-attention has a scale or a feature
            map: source and target have no positions in common that a pattern or a bias could count. Each layer has a
            copy of the bias, learned parameters included.
    """

    vocab_size: int = 37000
    dim: int = 512
    layers: int = 6
    heads: int = 8
    hidden_dim: int = 2048
    context_length: int | None = None
    position: str = "sinusoidal"
    activation: str = "relu"
    attention_bias: bool = True
    norm_eps: float = 1e-5
    order: str = "post"
    final_norm: bool | None = None
    shared: bool = True
    start: int = 0
    dropout: float = 0.1
    encoder_attention: Attention | tuple[Attention, ...] | None = None
    decoder_attention: Attention | tuple[Attention, ...] | None = None
    cross_attention: Attention | tuple[Attention, ...] | None = None

    causal: ClassVar[tuple[str, ...]] = ("decoder_attention",)

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "context_length", "dim", "layers", "heads", "hidden_dim")
        because = ""
        if self.position not in ("sinusoidal", "learned"):
            because = 'positions are "sinusoidal" or "learned"'
        elif self.position == "learned" and self.context_length is None:
            because = "learned positions need the longest sequence: context_length=..."
        elif self.order not in ("pre", "post") or self.activation not in (*PLAIN, *GATED):
            because = f'the order is "pre" or "post", activations are {", ".join((*PLAIN, *GATED))}'
        elif not 0 <= self.start < self.vocab_size:
            because = f"the start token is one of the {self.vocab_size} tokens"
        if because:
            raise ConfigError(
                "The Transformer cannot be built so.",
                asked=f"position={self.position!r}, context_length={self.context_length}, order={self.order!r}, "
                f"activation={self.activation!r}, start={self.start}",
                because=because,
                instead="TransformerConfig.base()",
            )
        self._check_attentions()

    def _check_attentions(self) -> None:
        """Refuse descriptions that no layer can run, and cross-attention by position."""
        for name, attentions in self.attentions().items():
            check_attentions(self, name, attentions)
        for layer in range(len(self.decoder_attention) if isinstance(self.decoder_attention, tuple) else 1):
            check_attentions(self, "decoder_attention", self.describe_decoder(layer))
        crosses = self.cross_attention if isinstance(self.cross_attention, tuple) else (self.cross_attention,)
        for cross in crosses:
            by_position = cross is not None and not (cross.pattern is None or cross.pattern.is_full)
            if cross is not None and (by_position or cross.bias is not None):
                raise ConfigError(
                    "Cross-attention cannot depend on positions.",
                    asked=f"cross_attention={cross!r}",
                    because="a target token has no position in the source, so it would depend on the target's length",
                    instead="a scale or a feature map; encoder_attention and decoder_attention for patterns and biases",
                )

    def describe_decoder(self, layer: int) -> Attention:
        """The self-attention of a layer of the decoder, which is causal whatever its description says."""
        described = select_layer(self.decoder_attention, layer)
        return dataclasses.replace(described, pattern=make_causal(described.pattern))

    @classmethod
    def base(cls, **changes: Any) -> TransformerConfig:
        """The paper's base model."""
        return cls.from_dict(changes)

    @classmethod
    def big(cls, **changes: Any) -> TransformerConfig:
        """The paper's big model."""
        return cls.from_dict({"dim": 1024, "heads": 16, "hidden_dim": 4096, "dropout": 0.3} | changes)


class Transformer(Pretrained):
    """An encoder and a decoder.

    >>> from regard.models import Transformer, TransformerConfig
    >>> model = Transformer(TransformerConfig(vocab_size=11, dim=8, layers=2, heads=2, hidden_dim=16)).eval()
    >>> model(torch.tensor([[1, 2, 3]]), torch.tensor([[0, 4]])).shape
    torch.Size([1, 2, 11])
    >>> len(model.generate([[1, 2, 3], [4]], max_new_tokens=5).tokens[1])
    5
    """

    Config: ClassVar = TransformerConfig
    converters: ClassVar = {"torch": TorchTransformer(TransformerConfig)}
    prompt_fills_context = False

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.config: TransformerConfig = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.target_embedding = self.embedding if config.shared else nn.Embedding(config.vocab_size, config.dim)
        self.source_positions, self.target_positions = _build_positions(config), _build_positions(config)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = BlockList(_build_block(config, layer, decodes=False) for layer in range(config.layers))
        self.decoder = BlockList(_build_block(config, layer, decodes=True) for layer in range(config.layers))
        ends = config.order == "pre" if config.final_norm is None else config.final_norm
        self.encoder_norm = nn.LayerNorm(config.dim, eps=config.norm_eps) if ends else None
        self.decoder_norm = nn.LayerNorm(config.dim, eps=config.norm_eps) if ends else None
        self.output = Linear(config.dim, config.vocab_size, bias=False)
        if config.shared:
            self.output.weight = self.embedding.weight
        self._init_weights()

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def context_length(self) -> int | None:
        return self.config.context_length

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_lengths: Lengths | None = None,
        target_lengths: Lengths | None = None,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Logits of the next token at every position of the target, `(batch, token, vocab_size)`.

        target: begins with the start token.
        source_lengths, target_lengths: number of real tokens of each row, for texts padded on the right.
        attention_mask, decoder_attention_mask: the same for source and target as Hugging Face gives them, `(batch,
            token)`, 1 for real tokens; padded on either side. Positions count the real tokens of each row.
        """
        for tokens in (source, target):
            check_tensor("tokens", tokens, "torch.tensor([[464, 3290]])")
        names = (("source_lengths", "attention_mask"), ("target_lengths", "decoder_attention_mask"))
        source_padding = find_padding(source, source_lengths, attention_mask, side="right", names=names[0])
        padding = find_padding(target, target_lengths, decoder_attention_mask, side="right", names=names[1])
        encoded, source_padding = self._encode_padded(source, source_padding)
        if padding is not None and padding.side == "left":
            hidden = self.decode(target, encoded, encoder_pattern=source_padding, lengths=padding.counts)
        else:
            hidden = self.decode(target, encoded, pattern=padding, encoder_pattern=source_padding)
        return self.output(hidden)

    def encode(self, source: Tensor, *, pattern: Pattern | None = None, positions: Tensor | None = None) -> Tensor:
        """Hidden states of the encoder, `(batch, token, dim)`."""
        check_pattern(pattern)
        check_tokens(source, self.vocab_size, self.context_length)
        check_positions(positions, source)
        positions = torch.arange(source.shape[1], device=source.device) if positions is None else positions
        x = self._embed_tokens(source, self.embedding, self.source_positions, positions)
        for block in self.encoder:
            x = block(x, pattern=pattern)
        return x if self.encoder_norm is None else self.encoder_norm(x)

    def _encode_padded(self, source: Tensor, padding: Padding | None) -> tuple[Tensor, Padding | None]:
        """The source's hidden states, and the padding that cross-attention has to hide.

        Positions count real tokens. An attention that depends on absolute positions needs the padding on the right.
        """
        if padding is None or padding.side == "right":
            return self.encode(source, pattern=padding), padding
        lengths = torch.tensor(padding.counts)
        if all(block.attention.is_shift_invariant for block in self.encoder):
            positions = padded_positions(source.shape[1], lengths).to(source.device)
            return self.encode(source, pattern=padding, positions=positions), padding
        return self.encode(_pad_right(source, lengths), pattern=Padding(lengths)), Padding(lengths)

    def decode(
        self,
        target: Tensor,
        encoder_hidden_states: Tensor | None,
        *,
        pattern: Pattern | None = None,
        encoder_pattern: Pattern | None = None,
        cache: ModelCache | None = None,
        lengths: Lengths | None = None,
    ) -> Tensor:
        """Hidden states of every target token, `(batch, token, dim)`.

        `encoder_hidden_states` come from `encode`, and `encoder_pattern` hides their padding. With a cache, `target`
        are the next tokens, and the hidden states of the encoder are needed only for the first of them. `lengths`:
        number of real tokens of each row, for targets padded on the left.
        """
        check_cache(cache)
        check_pattern(pattern)
        check_pattern(encoder_pattern)
        check_tokens(target, self.vocab_size, self.context_length, 0 if cache is None else cache.length)
        if lengths is not None:
            check_lengths(lengths, target)
        past = ModelCache([]) if cache is None else cache
        positions = past.positions(target.shape[1], lengths).to(target.device)
        y = self._embed_tokens(target, self.target_embedding, self.target_positions, positions)
        for index, block in enumerate(self.decoder):
            y = block(
                y,
                pattern=pattern,
                context=encoder_hidden_states,
                context_pattern=encoder_pattern,
                cache=None if cache is None else cache.layers[index],
                cross_cache=None if cache is None else cache.cross_layers[index],
                lengths=lengths,
            )
        return y if self.decoder_norm is None else self.decoder_norm(y)

    def _embed_tokens(self, tokens: Tensor, embedding: nn.Embedding, positions: nn.Module, places: Tensor) -> Tensor:
        x = embedding(tokens) * self.config.dim**0.5
        # A computed table is rounded once, to the model's own precision.
        added = positions(places, x.dtype) if isinstance(positions, SinusoidalPositions) else positions(places)
        return self.dropout(x + added)

    # Generation

    def new_cache(self, capacity: int | None = None) -> ModelCache:
        """Empty caches for targets of at most `capacity` tokens."""
        caches = [block.attention.new_cache(capacity) for block in self.decoder]
        return ModelCache(caches, [CrossCache() for _ in self.decoder])

    def prefill(self, prompts: Tensor, lengths: Tensor | None = None, capacity: int = 0) -> tuple[Tensor, ModelCache]:
        """Prefill with sources padded on the left: logits of the first target tokens, and the cache."""
        encoded, padding = self._encode_padded(prompts, None if lengths is None else Padding(lengths, side="left"))
        cache = self.new_cache(capacity + 1)
        cache.encoder_padding = padding
        begin = prompts.new_full((len(prompts), 1), self.config.start)
        hidden = self.decode(begin, encoded, encoder_pattern=padding, cache=cache)
        return self.output(hidden)[:, -1], cache

    def decode_step(self, tokens: Tensor, cache: ModelCache) -> Tensor:
        """Decode one more target token of each row: logits of the next.

        By one native call for the whole decoder where that is possible; `regard.models.explain_decoding` says why not.
        """
        made = run_native_step(self, tokens, cache)
        if made is not None:
            return made
        hidden = self.decode(tokens, None, encoder_pattern=cache.encoder_padding, cache=cache)
        return self.output(hidden)[:, -1]

    def describe_stack(self) -> StackDescription:
        """What a native decode step runs through."""
        names = {"blocks": "decoder", "norm": "decoder_norm", "embedding": "target_embedding"}
        return StackDescription(
            self.config.dim, **names, positions="target_positions", scale=self.config.dim**0.5, has_context=True
        )

    def embed_step(self, tokens: Tensor, cache: ModelCache) -> Tensor:
        """Embeddings of the next target tokens, `(batch, 1, dim)`."""
        check_tokens(tokens, self.vocab_size, self.context_length, cache.length)
        return self._embed_tokens(tokens, self.target_embedding, self.target_positions, cache.positions(1))

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
        configuration, such as `start`. `to_checkpoint("torch")` is the inverse.
        """
        state = dict(module.state_dict()) | {"embedding.weight": embedding}
        shared = target_embedding is None and output is None
        if target_embedding is not None:
            state["target_embedding.weight"] = target_embedding
        if output is not None:
            state["output.weight"] = output
        config = read_arguments(module) | {"vocab_size": len(embedding), "shared": shared} | changes
        return cls.from_checkpoint(config, state, "torch").train(module.training)

    @torch.no_grad()
    def _init_weights(self) -> None:
        """Xavier's uniform for matrices, `1/sqrt(dim)` for the embedding, which comes in times `sqrt(dim)`."""
        init_weights(self, nn.init.xavier_uniform_)
        for embedding in (self.embedding, self.target_embedding):
            nn.init.normal_(embedding.weight, std=self.config.dim**-0.5)


def _build_positions(config: TransformerConfig) -> nn.Module:
    if config.position == "learned":
        assert config.context_length is not None
        return LearnedPositions(config.context_length, config.dim)
    return SinusoidalPositions(config.dim)


def _pad_right(tokens: Tensor, lengths: Tensor) -> Tensor:
    """Rows that were padded on the left, with their tokens first."""
    count = tokens.shape[1]
    places = torch.arange(count, device=tokens.device) + count - lengths.to(tokens.device)[:, None]
    return tokens.gather(1, places.remainder(count))


def _build_block(config: TransformerConfig, layer: int, *, decodes: bool) -> TransformerBlock:
    def attention(described: Attentions) -> MultiHeadAttention:
        own = build_layer(described, layer)
        return MultiHeadAttention(
            config.dim, config.heads, attention=own, bias=config.attention_bias, dropout=config.dropout
        )

    return TransformerBlock(
        attention(config.describe_decoder(layer) if decodes else config.encoder_attention),
        FeedForward(config.dim, config.hidden_dim, config.activation, dropout=config.dropout),
        cross=attention(config.cross_attention) if decodes else None,
        eps=config.norm_eps,
        order="pre" if config.order == "pre" else "post",
        dropout=config.dropout,
    )
