"""GPT: a decoder-only transformer, by its configuration GPT-2, LLaMA, Mistral or Qwen2.

    x = embed(tokens) + position                        (rotary positions turn queries and keys instead)
    x = x + attention(norm(x)),  x = x + feed_forward(norm(x))          in every layer
    logits = norm(x) W^T                                (W the embedding itself where it is tied)

Sources: Radford et al., Language Models are Unsupervised Multitask Learners (2019); Touvron et al., LLaMA (2023);
Jiang et al., Mistral 7B (2023); Qwen Team, Qwen2 Technical Report (2024).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.biases import Alibi
from regard.errors import ConfigError, InputError
from regard.layers.block import BlockList, TransformerBlock
from regard.layers.cache import ModelCache
from regard.layers.feedforward import NORMS, FeedForward
from regard.layers.linear import Linear
from regard.layers.multihead import MultiHeadAttention
from regard.layers.positions import LearnedPositions, SinusoidalPositions
from regard.layers.projections import AttentionSizes, bias_letters
from regard.layers.rotary import Rotary
from regard.models.attention_layers import build_layer, check_attentions, find_window, make_causal, select_layer
from regard.models.config import Config, find_published
from regard.models.converters.base import ConverterGroup
from regard.models.converters.gpt2 import GPT2
from regard.models.converters.llama import Llama
from regard.models.converters.mistral import Mistral
from regard.models.converters.qwen2 import Qwen2
from regard.models.generation import Generation, generate
from regard.models.initialization import init_weights, normal
from regard.models.native_decode import StackDescription, run_native_step
from regard.models.padding import check_cached_mask, find_padding
from regard.models.pretrained import Pretrained
from regard.models.validation import (
    check_cache,
    check_pattern,
    check_positions,
    check_sizes,
    check_tokens,
)
from regard.patterns import Pattern, Window

POSITIONS = ("learned", "rotary", "sinusoidal", "alibi", "none")
# layers, dim, heads of the four published GPT-2 models
SIZES = {"small": (12, 768, 12), "medium": (24, 1024, 16), "large": (36, 1280, 20), "xl": (48, 1600, 25)}


@dataclass(frozen=True, eq=False)
class GPTConfig(Config):
    """AttentionSizes and choices of a GPT; the defaults are GPT-2's smallest.

    Attributes:
        vocab_size: number of distinct tokens.
        context_length: longest sequence, in tokens.
        dim, layers, heads: hidden size, number of blocks, query heads per block.
        hidden_dim: channels inside the feed-forward part; `4 dim` if `None`.
        kv_heads: key heads shared by groups of query heads; as `heads` if `None`.
        norm, norm_eps: `"layer"` or `"rms"`.
        position: `"learned"`, `"rotary"` (with `rotary_base`), `"sinusoidal"`, `"alibi"` or `"none"`.
        feed_forward: an activation of `FeedForward`; `"swiglu"` is LLaMA's.
        bias: whether linear layers have biases.
        attention_bias: which of the attention's projections have biases, where not as `bias` says: `True`, `False`, or
            letters of query, key, value and output; Qwen2 has `"qkv"`.
        head_dim: channels of a head; `dim / heads` if `None`.
        tie_embeddings: whether the output matrix is the embedding.
        logits: whether there is an output matrix; without one `forward` returns the hidden states, as in `LlamaModel`.
        window: how many tokens back a token sees, itself not counted; `None` for all. Hugging Face's `sliding_window`
            counts the token itself: it is `window + 1`.
        window_layers: the layers that have the window, counted from 0; the others see all. `None`: every layer has it.
        attention: an `Attention` for all layers, or one for each; `None` is causal attention. Its pattern is joined to
            `Causal()`, or to the window of the layer, by `&`: no configuration lets a token see a later one. Each layer
            has a copy of the bias, learned parameters included.
        dropout: while training, on embeddings, residuals and attention weights.
    """

    vocab_size: int = 50257
    context_length: int = 1024
    dim: int = 768
    layers: int = 12
    heads: int = 12
    kv_heads: int | None = None
    hidden_dim: int | None = None
    norm: str = "layer"
    norm_eps: float = 1e-5
    position: str = "learned"
    rotary_base: float = 10000.0
    feed_forward: str = "gelu_tanh"
    bias: bool = True
    tie_embeddings: bool = True
    window: int | None = None
    dropout: float = 0.0
    attention_bias: bool | str | None = None
    head_dim: int | None = None
    logits: bool = True
    window_layers: tuple[int, ...] | None = None
    attention: Attention | tuple[Attention, ...] | None = None

    def __post_init__(self) -> None:
        check_sizes(
            self, "vocab_size", "context_length", "dim", "layers", "heads", "kv_heads", "hidden_dim", "head_dim"
        )
        self._check_windows()
        if self.position not in POSITIONS or self.norm not in NORMS:
            raise ConfigError(
                "GPT has no such part.",
                asked=f"position={self.position!r}, norm={self.norm!r}",
                because=f"positions are {', '.join(POSITIONS)}; norms are {', '.join(NORMS)}",
                instead='position="learned", norm="layer" for GPT-2; "rotary" and "rms" for LLaMA',
            )
        self._check_attention()

    def _check_attention(self) -> None:
        """Refuse descriptions that no layer can run, joined to the causal pattern and to the positions."""
        given = self.attention
        check_attentions(self, "attention", given)
        if given is None:
            return
        layers = range(self.layers) if isinstance(given, tuple) else {0, *(self.window_layers or ())}
        if self.position == "alibi" and any(select_layer(given, layer).bias is not None for layer in layers):
            raise ConfigError(
                "GPT has one bias in a layer.",
                asked='position="alibi" and an attention with a bias',
                because='position="alibi" is the bias Alibi(heads) in every layer',
                instead=f'position="none" with Attention(bias=Alibi({self.heads})), or the attention without a bias',
            )
        for layer in layers:
            check_attentions(self, "attention", self.describe_layer(layer))

    def describe_layer(self, layer: int) -> Attention:
        """The attention of one layer: the description, the window and the positions together."""
        described = select_layer(self.attention, layer)
        window = Window(self.window, 0) if self.window is not None and self.is_windowed(layer) else None
        bias = Alibi(self.heads) if self.position == "alibi" else described.bias
        return dataclasses.replace(described, pattern=make_causal(described.pattern, window), bias=bias)

    def simplify(self) -> GPTConfig:
        """The same model by `window` and `window_layers` alone, if its descriptions are windows and nothing else."""
        described = [select_layer(self.attention, layer) for layer in range(self.layers)]
        if self.attention is None or any(find_window(each) is None for each in described):
            return self
        windows = [
            find_window(dataclasses.replace(self.describe_layer(layer), bias=None)) for layer in range(self.layers)
        ]
        sizes = {window for window in windows if window != -1}
        if None in sizes or len(sizes) > 1:
            return self
        where = tuple(layer for layer, window in enumerate(windows) if window != -1)
        return dataclasses.replace(
            self,
            attention=None,
            window=sizes.pop() if sizes else None,
            window_layers=where if 0 < len(where) < self.layers else None,
        )

    def _check_windows(self) -> None:
        """Refuse a window that sees nothing, a base that turns nothing, and windows of layers that do not exist."""
        asked = f"window={self.window}, window_layers={self.window_layers}, layers={self.layers}"
        because = ""
        if self.window is not None and self.window < 0:
            because = "a token sees at least itself, and window counts the tokens before it"
        elif self.window is None and self.window_layers is not None:
            because = "window_layers says which layers have the window, and there is none"
        elif any(not 0 <= layer < self.layers for layer in self.window_layers or ()):
            because = f"layers are counted from 0 to {self.layers - 1}"
        elif not 0 < self.rotary_base < math.inf:
            asked, because = f"rotary_base={self.rotary_base}", "angles are positions times powers of the base"
        if because:
            raise ConfigError(
                "GPT cannot be built so.",
                asked=asked,
                because=because,
                instead="window=255, window_layers=(1, 3), rotary_base=10000.0, or the like",
            )

    @property
    def projection_biases(self) -> str:
        """The letters of the attention's projections that have a bias: some of q, k, v and o."""
        return bias_letters(self.bias if self.attention_bias is None else self.attention_bias)

    @property
    def head_size(self) -> int:
        """Channels of one head."""
        return self.dim // self.heads if self.head_dim is None else self.head_dim

    def is_windowed(self, layer: int) -> bool:
        return self.window is not None and (self.window_layers is None or layer in self.window_layers)

    @classmethod
    def gpt2(cls, size: str = "small", **changes: Any) -> GPTConfig:
        """GPT-2 `small`, `medium`, `large` or `xl`."""
        layers, dim, heads = find_published("GPT-2", f"GPTConfig.gpt2({size!r})", size, SIZES)
        return cls.from_dict({"layers": layers, "dim": dim, "heads": heads, **changes})

    @classmethod
    def llama(cls, **sizes: Any) -> GPTConfig:
        """LLaMA's choices: rotary positions, RMS norm, a gated feed-forward part, no biases."""
        choices = {"norm": "rms", "position": "rotary", "feed_forward": "swiglu", "bias": False}
        return cls.from_dict(choices | sizes)


class GPT(Pretrained):
    """A decoder-only language model.

    >>> from regard.models import GPT, GPTConfig
    >>> model = GPT(GPTConfig(vocab_size=11, context_length=16, dim=8, layers=2, heads=2)).eval()
    >>> model(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 11])
    >>> len(model.generate([[1, 2, 3]], max_new_tokens=4).tokens[0])
    4
    """

    Config: ClassVar = GPTConfig
    converters: ClassVar = {
        "huggingface": ConverterGroup(GPT2(GPTConfig), Llama(GPTConfig), Mistral(GPTConfig), Qwen2(GPTConfig))
    }
    prompt_fills_context = True

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.config: GPTConfig = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.positions = _build_positions(config)
        self.rotary = Rotary(config.head_size, config.rotary_base) if config.position == "rotary" else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = BlockList(self._build_block(layer) for layer in range(config.layers))
        self.norm = NORMS[config.norm](config.dim, eps=config.norm_eps)
        self.output = Linear(config.dim, config.vocab_size, bias=False) if config.logits else None
        if config.tie_embeddings and self.output is not None:
            self.output.weight = self.embedding.weight
        self._init_weights()

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def context_length(self) -> int:
        return self.config.context_length

    def forward(
        self,
        tokens: Tensor,
        *,
        pattern: Pattern | None = None,
        cache: ModelCache | None = None,
        lengths: Sequence[int] | Tensor | None = None,
        attention_mask: Tensor | None = None,
        positions: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits of the next token, `(batch, token, vocab_size)`; hidden states where `logits=False`.

        tokens: `(batch, token)`; with a cache, those after the cached ones.
        pattern: hides more, as `Segments` do for texts packed into one row.
        cache: from `new_cache`.
        lengths: number of real tokens of each row, for texts padded on the left.
        attention_mask: the same as Hugging Face gives it, `(batch, token)`, 1 for real tokens; padded on either side.
            With a cache only the first call may be padded, on the left.
        positions: `(token,)` or `(batch, token)`; by default they count the real tokens of each row.
        last_only: logits of the last token alone.
        """
        if last_only and isinstance(attention_mask, Tensor) and not bool(attention_mask[..., -1].all()):
            raise InputError(
                "The last token of a row is padding.",
                asked="last_only=True with an attention_mask whose last column has zeros",
                because="last_only returns the logits of the last column",
                instead='texts padded on the left (padding_side="left" of the tokenizer), or last_only=False',
            )
        x = self.hidden(
            tokens,
            pattern=pattern,
            cache=cache,
            lengths=lengths,
            attention_mask=attention_mask,
            positions=positions,
        )
        x = x[:, -1:] if last_only else x
        return x if self.output is None else self.output(x)

    def hidden(
        self,
        tokens: Tensor,
        *,
        pattern: Pattern | None = None,
        cache: ModelCache | None = None,
        lengths: Sequence[int] | Tensor | None = None,
        attention_mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the last norm, `(batch, token, dim)`; arguments as in `forward`."""
        check_cache(cache)
        check_pattern(pattern)
        check_tokens(tokens, self.vocab_size, self.context_length, 0 if cache is None else cache.length)
        check_positions(positions, tokens)
        if attention_mask is not None and lengths is None and cache is not None and cache.length:
            check_cached_mask(attention_mask, tokens, cache)
        elif (padding := find_padding(tokens, lengths, attention_mask, side="left")) is not None:
            if padding.side == "right":
                if cache is not None:
                    raise InputError(
                        "A cache cannot be filled from texts padded on the right.",
                        asked=f"attention_mask {tuple(tokens.shape)}, padded on the right, with a cache",
                        because="later tokens would follow padding; the last token of every row is in the last column",
                        instead='texts padded on the left (padding_side="left" of the tokenizer)',
                    )
                pattern = padding if pattern is None else pattern & padding
            elif lengths is None:
                lengths = padding.counts
        if positions is None:
            past = ModelCache([]) if cache is None else cache
            positions = past.positions(tokens.shape[1], lengths).to(tokens.device)
        x = self._embed(tokens, positions)
        rotation = None if self.rotary is None else self.rotary.rotation(positions, x.dtype)
        for index, block in enumerate(self.blocks):
            layer_cache = None if cache is None else cache.layers[index]
            x = block(x, pattern=pattern, cache=layer_cache, lengths=lengths, rotation=rotation)
        return self.norm(x)

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if isinstance(self.positions, SinusoidalPositions):
            x = x + self.positions(positions, x.dtype)
        elif self.positions is not None:
            x = x + self.positions(positions)
        return self.dropout(x)

    # Generation

    def new_cache(self, capacity: int | None = None) -> ModelCache:
        """Empty caches for texts of at most `capacity` tokens; they grow where no room is given."""
        return ModelCache([block.attention.new_cache(capacity) for block in self.blocks])

    def prefill(self, prompts: Tensor, lengths: Tensor | None = None, capacity: int = 0) -> tuple[Tensor, ModelCache]:
        """Prefill: logits of each next token `(batch, vocab_size)`, and the cache to continue from."""
        cache = self.new_cache(prompts.shape[1] + capacity)
        return self(prompts, cache=cache, lengths=lengths, last_only=True)[:, 0], cache

    def decode_step(self, tokens: Tensor, cache: ModelCache) -> Tensor:
        """Decode one more token of each row: logits of the next, `(batch, vocab_size)`.

        By one native call for the whole model where that is possible; `regard.models.explain_decoding` says why not.
        """
        made = run_native_step(self, tokens, cache)
        return made if made is not None else self(tokens, cache=cache, last_only=True)[:, 0]

    def describe_stack(self) -> StackDescription:
        """What a native decode step runs through."""
        return StackDescription(self.config.dim)

    def embed_step(self, tokens: Tensor, cache: ModelCache) -> Tensor:
        """Embeddings of the next tokens, `(batch, 1, dim)`."""
        check_tokens(tokens, self.vocab_size, self.context_length, cache.length)
        return self._embed(tokens, cache.positions(1))

    def generate(self, prompts: Sequence[Sequence[int]] | Tensor, **words: Any) -> Generation:
        """Continue the prompts; see `regard.models.generation.generate` for all it can do."""
        if self.output is None:
            raise ConfigError(
                "This GPT has no logits.",
                asked="generate(...)",
                found="a configuration with logits=False: the checkpoint had no output matrix (lm_head)",
                because="the next token is drawn from logits",
                instead="the checkpoint with its head, such as that of a ...ForCausalLM; hidden(tokens) for features",
            )
        return generate(self, prompts, **words)

    # Building

    def _build_block(self, layer: int) -> TransformerBlock:
        config = self.config
        attention = MultiHeadAttention(
            AttentionSizes(config.dim, config.heads, config.kv_heads, config.head_dim),
            attention=build_layer(config.describe_layer(layer), layer),
            bias=config.projection_biases,
            dropout=config.dropout,
            rotary=self.rotary,
        )
        hidden = 4 * config.dim if config.hidden_dim is None else config.hidden_dim
        feed_forward = FeedForward(config.dim, hidden, config.feed_forward, bias=config.bias)
        return TransformerBlock(
            attention, feed_forward, norm=NORMS[config.norm], eps=config.norm_eps, dropout=config.dropout
        )

    @torch.no_grad()
    def _init_weights(self) -> None:
        """What is added to the residual is smaller, so that depth does not make it grow."""
        init_weights(self, normal, (nn.Linear, nn.Embedding), projections=True)
        for block in self.blocks:
            for last in (block.attention.output, block.feed_forward.outer):
                nn.init.normal_(last.weight, std=0.02 / (2 * self.config.layers) ** 0.5)


def _build_positions(config: GPTConfig) -> nn.Module | None:
    if config.position == "learned":
        return LearnedPositions(config.context_length, config.dim)
    return SinusoidalPositions(config.dim) if config.position == "sinusoidal" else None
