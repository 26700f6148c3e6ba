"""GPT: a decoder that continues a text, in GPT-2's layout and, by its configuration, in LLaMA's.

    x = embed(tokens) + position                        (rotary positions turn queries and keys instead)
    x = x + attention(norm(x)),  x = x + feed_forward(norm(x))          in every layer
    logits = norm(x) W^T                                (W the embedding itself where it is tied)

Sources: Radford et al., Language Models are Unsupervised Multitask Learners (2019); Touvron et al., LLaMA (2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.biases import Alibi
from regard.errors import ConfigError
from regard.layers.block import Block, Stack
from regard.layers.cache import Memory, padded_positions
from regard.layers.feedforward import NORMS, FeedForward
from regard.layers.linear import Linear
from regard.layers.multihead import MultiHeadAttention
from regard.layers.positions import LearnedPositions, SinusoidalPositions
from regard.layers.rotary import Rotary
from regard.models.config import Config, published
from regard.models.foreign.gpt2 import GPT2
from regard.models.foreign.llama import Llama
from regard.models.foreign.rules import Either
from regard.models.generation import Generation, generate
from regard.models.pretrained import Pretrained
from regard.models.reading import check_lengths, check_sizes, check_tokens
from regard.patterns import Causal, Pattern, Window

POSITIONS = ("learned", "rotary", "sinusoidal", "alibi", "none")
# layers, dim, heads of the four published GPT-2 models
SIZES = {"small": (12, 768, 12), "medium": (24, 1024, 16), "large": (36, 1280, 20), "xl": (48, 1600, 25)}


@dataclass(frozen=True)
class GPTConfig(Config):
    """Sizes and choices of a GPT; the defaults are GPT-2's smallest.

    Attributes:
        vocabulary, context: number of tokens there are, and of tokens in a text.
        dim, layers, heads, hidden: channels, blocks, heads, channels inside the feed-forward part (`4 dim` if `None`).
        kv_heads: key heads shared by groups of query heads; as `heads` if `None`.
        norm, norm_eps: `"layer"` or `"rms"`.
        position: `"learned"`, `"rotary"` (with `rotary_base`), `"sinusoidal"`, `"alibi"` or `"none"`.
        feed_forward: an activation of `FeedForward`; `"swiglu"` is LLaMA's.
        bias: whether linear layers have biases.
        tied: whether the output matrix is the embedding.
        window: how many tokens back a token sees, itself not counted; `None` for all.
        dropout: while training, on embeddings, residuals and attention weights.
    """

    vocabulary: int = 50257
    context: int = 1024
    dim: int = 768
    layers: int = 12
    heads: int = 12
    kv_heads: int | None = None
    hidden: int | None = None
    norm: str = "layer"
    norm_eps: float = 1e-5
    position: str = "learned"
    rotary_base: float = 10000.0
    feed_forward: str = "gelu_tanh"
    bias: bool = True
    tied: bool = True
    window: int | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_sizes(self, "vocabulary", "context", "dim", "layers", "heads", "kv_heads", "hidden")
        if self.position not in POSITIONS or self.norm not in NORMS:
            raise ConfigError(
                "GPT has no such part.",
                asked=f"position={self.position!r}, norm={self.norm!r}",
                because=f"positions are {', '.join(POSITIONS)}; norms are {', '.join(NORMS)}",
                instead='position="learned", norm="layer" for GPT-2; "rotary" and "rms" for LLaMA',
            )

    @classmethod
    def gpt2(cls, size: str = "small", **changes: Any) -> GPTConfig:
        """GPT-2 `small`, `medium`, `large` or `xl`."""
        layers, dim, heads = published("GPT-2", f"GPTConfig.gpt2({size!r})", size, SIZES)
        return cls.from_dict({"layers": layers, "dim": dim, "heads": heads, **changes})

    @classmethod
    def llama(cls, **sizes: Any) -> GPTConfig:
        """LLaMA's choices: rotary positions, RMS norm, a gated feed-forward part, no biases."""
        choices = {"norm": "rms", "position": "rotary", "feed_forward": "swiglu", "bias": False}
        return cls.from_dict(choices | sizes)


class GPT(Pretrained):
    """A decoder-only transformer that writes.

    >>> from regard.models import GPT, GPTConfig
    >>> model = GPT(GPTConfig(vocabulary=11, context=16, dim=8, layers=2, heads=2)).eval()
    >>> model(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 11])
    >>> len(model.generate([[1, 2, 3]], max_new=4).tokens[0])
    4
    """

    Config: ClassVar = GPTConfig
    converters: ClassVar = {"huggingface": Either(GPT2(GPTConfig), Llama(GPTConfig))}
    prompts_count = True

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.config: GPTConfig = config
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.positions = _positions(config)
        self.rotary = Rotary(config.dim // config.heads, config.rotary_base) if config.position == "rotary" else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = Stack(self._block() for _ in range(config.layers))
        self.norm = NORMS[config.norm](config.dim, eps=config.norm_eps)
        self.output = Linear(config.dim, config.vocabulary, bias=False)
        if config.tied:
            self.output.weight = self.embedding.weight
        self._initialise()

    @property
    def vocabulary(self) -> int:
        return self.config.vocabulary

    @property
    def context(self) -> int:
        return self.config.context

    def forward(
        self,
        tokens: Tensor,
        *,
        pattern: Pattern | None = None,
        memory: Memory | None = None,
        lengths: Sequence[int] | Tensor | None = None,
        positions: Tensor | None = None,
        last: bool = False,
    ) -> Tensor:
        """Logits of the next token at every place, `(batch, token, vocabulary)`; of the last place only if `last`.

        `lengths`: how many tokens of each row are real, counted from the right: unequal texts are padded on the left.
        `memory`: what `new_memory` made; `tokens` are then the next ones. `pattern` may hide more, as `Segments` do for
        texts packed into one row; their `positions`, `(token,)` or `(batch, token)`, then begin again with each text.
        """
        x = self.hidden(tokens, pattern=pattern, memory=memory, lengths=lengths, positions=positions)
        return self.output(x[:, -1:] if last else x)

    def hidden(
        self,
        tokens: Tensor,
        *,
        pattern: Pattern | None = None,
        memory: Memory | None = None,
        lengths: Sequence[int] | Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """What the last layer knows of every token, normalised: `(batch, token, dim)`."""
        check_tokens(tokens, self.vocabulary, self.context, 0 if memory is None else memory.length)
        if lengths is not None:
            check_lengths(lengths, tokens)
        if positions is None:
            positions = _places(tokens, memory, lengths)
        x = self.embedding(tokens)
        if isinstance(self.positions, SinusoidalPositions):
            x = x + self.positions(positions, x.dtype)
        elif self.positions is not None:
            x = x + self.positions(positions)
        rotation = None if self.rotary is None else self.rotary.rotation(positions, x.dtype)
        x = self.dropout(x)
        for index, block in enumerate(self.blocks):
            cache = None if memory is None else memory.caches[index]
            x = block(x, pattern=pattern, cache=cache, lengths=lengths, rotation=rotation)
        return self.norm(x)

    # Writing

    def new_memory(self, room: int | None = None) -> Memory:
        """Empty caches for texts of at most `room` tokens; they grow where no room is given."""
        return Memory([block.attention.new_cache(room) for block in self.blocks])

    def start(self, prompts: Tensor, lengths: Tensor | None = None, room: int = 0) -> tuple[Tensor, Memory]:
        """Read the prompts: logits of each next token `(batch, vocabulary)`, and the memory to go on with."""
        memory = self.new_memory(prompts.shape[1] + room)
        return self(prompts, memory=memory, lengths=lengths, last=True)[:, 0], memory

    def extend(self, tokens: Tensor, memory: Memory) -> Tensor:
        """Read one more token of each row: logits of the next, `(batch, vocabulary)`."""
        return self(tokens, memory=memory, last=True)[:, 0]

    def generate(self, prompts: Sequence[Sequence[int]] | Tensor, **words: Any) -> Generation:
        """Continue the prompts; see `regard.models.generation.generate` for all it can do."""
        return generate(self, prompts, **words)

    # Building

    def _block(self) -> Block:
        config = self.config
        pattern = Causal() if config.window is None else Window(config.window, 0)
        bias = Alibi(config.heads) if config.position == "alibi" else None
        attention = MultiHeadAttention(
            config.dim,
            config.heads,
            kv_heads=config.kv_heads,
            attention=Attention(pattern=pattern, bias=bias),
            bias=config.bias,
            dropout=config.dropout,
            rotary=self.rotary,
        )
        hidden = 4 * config.dim if config.hidden is None else config.hidden
        feed_forward = FeedForward(config.dim, hidden, config.feed_forward, bias=config.bias)
        return Block(attention, feed_forward, norm=NORMS[config.norm], eps=config.norm_eps, dropout=config.dropout)

    @torch.no_grad()
    def _initialise(self) -> None:
        """Normal with deviation 0.02; what is added to the residual is smaller, so that depth does not make it grow."""
        for module in self.modules():
            if isinstance(module, Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, MultiHeadAttention):
                for weight in module.projections.weights():
                    nn.init.normal_(weight, std=0.02)
            if isinstance(module, Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            for last in (block.attention.output, block.feed_forward.outer):
                nn.init.normal_(last.weight, std=0.02 / (2 * self.config.layers) ** 0.5)


def _positions(config: GPTConfig) -> nn.Module | None:
    if config.position == "learned":
        return LearnedPositions(config.context, config.dim)
    return SinusoidalPositions(config.dim) if config.position == "sinusoidal" else None


def _places(tokens: Tensor, memory: Memory | None, lengths: Sequence[int] | Tensor | None) -> Tensor:
    """Each token's position in its own text, `(token,)` or `(batch, token)`."""
    count = tokens.shape[1]
    if memory is not None:
        return memory.positions(count, lengths).to(tokens.device)
    places = torch.arange(count) if lengths is None else padded_positions(count, lengths)
    return places.to(tokens.device)
