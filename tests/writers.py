"""Models for tests of generation: one whose every logit can be recomputed from the history, and Hugging Face's."""

from __future__ import annotations

import torch
from torch import Tensor


class Histories:
    """The cache of a toy: a number that depends on every token read, in order. It notes how it was reordered."""

    def __init__(self, state: Tensor, length: int) -> None:
        self.state = state
        self.length = length
        self.reorders: list[list[int]] = []

    def reorder(self, index: Tensor) -> None:
        self.reorders.append(index.tolist())
        self.state = self.state[index]


class Toy:
    """A model whose logits are a row of a random table, chosen by a number that depends on the whole history.

    A row that continues another's history gets another's logits, so a wrong reorder cannot go unnoticed. `reads`
    holds the number of rows of every call, `grads` whether gradients were on.
    """

    SIZE = 7919

    def __init__(
        self, vocab_size=11, *, context=None, prompt_fills_context=True, seed=0, spread=1.0, dtype=torch.float64
    ):
        generator = torch.Generator().manual_seed(seed)
        self.table = (torch.randn(self.SIZE, vocab_size, generator=generator, dtype=torch.float64) * spread).to(dtype)
        self.vocab_size = vocab_size
        self.context_length = context
        self.prompt_fills_context = prompt_fills_context
        self.reads: list[int] = []
        self.grads: list[bool] = []
        self.caches: list[Histories] = []

    def _read(self, state: Tensor, tokens: Tensor) -> Tensor:
        return (state * 31 + tokens + 1) % self.SIZE

    def _logits(self, state: Tensor) -> Tensor:
        self.reads.append(len(state))
        self.grads.append(torch.is_grad_enabled())
        return self.table[state]

    def after(self, history: list[int]) -> Tensor:
        """The logits after a history, from scratch."""
        state = torch.zeros((), dtype=torch.int64)
        for token in history:
            state = self._read(state, torch.tensor(token))
        return self.table[state]

    def prefill(self, prompts: Tensor, lengths: Tensor | None, capacity: int):
        batch, longest = prompts.shape
        state = torch.zeros(batch, dtype=torch.int64)
        real = torch.full((batch,), longest) if lengths is None else lengths
        for place in range(longest):
            state = torch.where(place >= longest - real, self._read(state, prompts[:, place]), state)
        self.caches.append(Histories(state, longest))
        return self._logits(state), self.caches[-1]

    def decode_step(self, tokens: Tensor, cache: Histories) -> Tensor:
        assert tokens.shape == (len(cache.state), 1)
        cache.state = self._read(cache.state, tokens[:, 0])
        cache.length += 1
        return self._logits(cache.state)


class HuggingFaceCache:
    """Hugging Face's cache, the mask of what is real in it, and the position of each row's next token."""

    def __init__(self, cache, mask: Tensor) -> None:
        self.cache = cache
        self.mask = mask

    @property
    def length(self) -> int:
        return self.mask.shape[1]

    def reorder(self, index: Tensor) -> None:
        self.cache.reorder_cache(index)
        self.mask = self.mask[index]


class Hugging:
    """A decoder of Hugging Face as a writer."""

    prompt_fills_context = True

    def __init__(self, model) -> None:
        self.model = model
        self.vocab_size = model.config.vocab_size
        self.context_length = model.config.n_positions

    def prefill(self, prompts: Tensor, lengths: Tensor | None, capacity: int):
        batch, longest = prompts.shape
        real = torch.full((batch,), longest) if lengths is None else lengths
        mask = (torch.arange(longest) >= longest - real[:, None]).long()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        out = self.model(input_ids=prompts, attention_mask=mask, position_ids=positions, use_cache=True)
        return out.logits[:, -1], HuggingFaceCache(out.past_key_values, mask)

    def decode_step(self, tokens: Tensor, cache: HuggingFaceCache) -> Tensor:
        positions = cache.mask.sum(-1, keepdim=True)
        cache.mask = torch.cat([cache.mask, torch.ones_like(tokens)], dim=1)
        out = self.model(
            input_ids=tokens,
            attention_mask=cache.mask,
            position_ids=positions,
            past_key_values=cache.cache,
            use_cache=True,
        )
        return out.logits[:, -1]


def tiny_gpt2(hugging, vocab_size=23, context=31):
    """A random GPT-2 in float64, whose weights are large enough that its texts differ."""
    config = hugging.GPT2Config(
        vocab_size=vocab_size,
        n_positions=context,
        n_embd=12,
        n_layer=2,
        n_head=3,
        initializer_range=0.7,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(7)
    return hugging.GPT2LMHeadModel(config).double().eval()


def left_padded(prompts: list[list[int]]) -> dict[str, Tensor]:
    """Prompts as Hugging Face's generate wants them."""
    longest = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts]),
        "attention_mask": torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
    }
