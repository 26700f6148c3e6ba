"""From logits to tokens: greedy, or sampled with temperature, top-k and nucleus."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.errors import InputError
from regard.models.generation.prompts import check_integer

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = ["RowGenerators", "Sampler", "find_max_logits", "find_top_logits", "log_probabilities", "to_float32_or_wider"]

# The nucleus is searched among this many tokens first, then among eight times as many, and so on: it is
# small in most texts, and sorting a vocabulary of 50,000 would cost a hundred times as much.
FIRST_CANDIDATES = 64


@dataclass(frozen=True)
class Sampler:
    """Draws tokens from logits: cooled, cut to the k best, cut to the nucleus, in this order.

        p_j ∝ exp(z_j / T)   for j in K and j in N,   0 for the others

    z: logits; T: temperature, where 0 is the limit, the largest logit for certain (greedy).
    K: the `top_k` tokens with the largest z, all for None.
    N: the smallest set of the largest p, among K, whose probability reaches `top_p`; never empty, all for None.

    Args:
        temperature: T; 0 is greedy.
        top_k: how many tokens are kept; all if `None`.
        top_p: probability of the nucleus; all if `None`.

    Of equal logits the token with the lower number counts as the larger, in all three. Computed in float32 or
    better whatever the logits are; the draw inverts the distribution function in float64.

    Source: Fan et al., Hierarchical Neural Story Generation (2018), section 5, for top-k; Holtzman et al.,
    The Curious Case of Neural Text Degeneration (2020), section 3.1, for the nucleus.

    >>> from regard.models.generation import Sampler
    >>> logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    >>> Sampler(top_p=0.7).probabilities(logits)
    tensor([[0.6667, 0.3333, 0.0000, 0.0000]])
    >>> Sampler(temperature=0.5, top_k=3).probabilities(logits)
    tensor([[0.7619, 0.1905, 0.0476, 0.0000]])
    >>> Sampler(temperature=0)(logits)
    tensor([0])
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.temperature, int | float) and 0 <= self.temperature < math.inf):
            raise InputError(
                "The temperature is a number, 0 or more.",
                asked=f"temperature={self.temperature!r}",
                because="logits are divided by it, and 0 is the limit that takes the largest",
                instead="temperature=0 for the best token, temperature=1 for the model's own distribution",
            )
        if self.top_k is not None:
            check_integer("top_k", self.top_k, least=1)
        if self.top_p is not None and not (isinstance(self.top_p, int | float) and 0 < self.top_p <= 1):
            raise InputError(
                "top_p is a probability.",
                asked=f"top_p={self.top_p!r}",
                because="the nucleus is the smallest set of tokens whose probability reaches it",
                instead="0 < top_p <= 1, for example top_p=0.9; top_k=1 or temperature=0 keeps one token",
            )

    def __call__(
        self, logits: Float[Tensor, "batch vocabulary"], generator: torch.Generator | None = None
    ) -> Int[Tensor, "batch"]:
        """One token for each row; `generator` makes it repeatable (torch's own one for None)."""
        if self.temperature == 0:
            return self.sample(logits, None)
        device = logits.device if generator is None else generator.device
        return self.sample(logits, torch.rand(len(logits), generator=generator, dtype=torch.float64, device=device))

    def sample(
        self, logits: Float[Tensor, "batch vocabulary"], chance: Float[Tensor, "batch"] | None
    ) -> Int[Tensor, "batch"]:
        """The token of each row at which the distribution function passes `chance`, a number in [0, 1)."""
        if self.temperature == 0 or chance is None:
            return find_argmax(logits)
        weights, tokens = self._unnormalized_probabilities(to_float32_or_wider(logits))
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        # Rounding might lift chance * total to the total itself, which no token passes.
        mark = (chance.to(cumulative) * (1 - 2**-52))[:, None] * cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, mark, right=True)
        return (chosen if tokens is None else tokens.gather(-1, chosen))[:, 0]

    def probabilities(self, logits: Float[Tensor, "batch vocabulary"]) -> Float[Tensor, "batch vocabulary"]:
        """The distribution that tokens are drawn from."""
        logits = to_float32_or_wider(logits)
        if self.temperature == 0:
            return torch.zeros_like(logits).scatter_(-1, find_argmax(logits)[:, None], 1.0)
        weights, tokens = self._unnormalized_probabilities(logits)
        weights = weights / weights.sum(-1, keepdim=True)
        return weights if tokens is None else torch.zeros_like(logits).scatter_(-1, tokens, weights)

    def _unnormalized_probabilities(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Probabilities up to a factor, and the tokens they belong to, largest first; None for all in order."""
        top = find_max_logits(logits)[:, None]
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            values, tokens = find_top_logits(logits, self.top_k)
            weights = (values - top).div_(self.temperature).exp_()
            return (weights, tokens) if self.top_p is None else (self._cut_to_nucleus(weights, None), tokens)
        # At most 1, and 1 for the largest: no temperature is too low, it can only leave zeros.
        weights = (logits - top).div_(self.temperature).exp_()
        if self.top_p is None or self.top_p == 1:
            return weights, None
        total = weights.sum(-1, keepdim=True, dtype=torch.float64)
        count = min(FIRST_CANDIDATES, logits.shape[-1])
        while True:
            tokens = find_top_logits(logits, count)[1]
            found = weights.gather(-1, tokens)
            reached = found.sum(-1, keepdim=True, dtype=torch.float64) >= self.top_p * total
            if count == logits.shape[-1] or bool(reached.all()):
                return self._cut_to_nucleus(found, total), tokens
            count = min(8 * count, logits.shape[-1])

    def _cut_to_nucleus(self, weights: Tensor, total: Tensor | None) -> Tensor:
        """Weights, largest first, set to zero after the first few that reach top_p of the total."""
        assert self.top_p is not None
        if self.top_p == 1:
            return weights
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        before = cumulative - weights
        return weights.where(before < self.top_p * (cumulative[:, -1:] if total is None else total), 0.0)


class RowGenerators:
    """Random numbers for the rows of a batch: those of a row depend on the seed and on its index alone.

    Drawn on the CPU, so that every device generates the same text, in blocks, so that a step costs one look-up.
    """

    BLOCK = 64

    def __init__(self, seed: int | None, rows: int) -> None:
        if seed is None:
            seed = int(torch.randint(2**63 - 1, ()))
        self.generators = [torch.Generator().manual_seed(_mix_seed(seed, row)) for row in range(rows)]
        self.block = torch.empty(rows, self.BLOCK, dtype=torch.float64)
        self.used = self.BLOCK

    def draw(self, rows: list[int]) -> Float[Tensor, "row"]:
        """The next number of each of these rows; a row that is left out once is left out for ever."""
        if self.used == self.BLOCK:
            self.block = torch.empty_like(self.block)  # numbers that were given out stay as they are
            for row in rows:
                torch.rand(self.BLOCK, generator=self.generators[row], out=self.block[row])
            self.used = 0
        self.used += 1
        column = self.block[:, self.used - 1]
        return column if len(rows) == len(column) else column[rows]


def _mix_seed(seed: int, row: int) -> int:
    """A seed of 32 bits, which is all that torch's CPU generator uses."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {row}".encode(), digest_size=4).digest(), "little")


def to_float32_or_wider(logits: Tensor) -> Tensor:
    """The logits in float32, or float64 where they are."""
    return logits if logits.dtype == torch.float64 else logits.float()


def find_max_logits(logits: Float[Tensor, "batch vocabulary"]) -> Float[Tensor, "batch"]:
    """The largest logit of each row, which is a finite number or there is an error."""
    top = logits.amax(-1)  # NaN wins
    if not math.isfinite(top.sum()) and not bool((good := top.isfinite()).all()):
        row = int((~good).nonzero()[0, 0])
        wrong = "NaN" if bool(top[row].isnan()) else "an infinite logit" if top[row] > 0 else "only -inf"
        raise InputError(
            "These logits are no distribution.",
            asked=f"a token from logits {tuple(logits.shape)}",
            found=f"{wrong} in row {row}",
            because="softmax needs a largest logit that is a finite number",
            instead="check for NaN in the model's weights, or for overflow: float16 ends at 65504",
        )
    return top


def find_argmax(logits: Float[Tensor, "batch vocabulary"]) -> Int[Tensor, "batch"]:
    """The token of each row's largest logit, the lowest number of equals."""
    logits = to_float32_or_wider(logits).detach()
    find_max_logits(logits)
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(-1))  # ten times as fast as torch's there
    return logits.argmax(-1)


def log_probabilities(
    logits: Float[Tensor, "batch vocabulary"], tokens: Int[Tensor, "batch count"]
) -> Float[Tensor, "batch count"]:
    """log softmax(logits) of these tokens."""
    return to_float32_or_wider(logits).log_softmax(-1).gather(-1, tokens)


def find_top_logits(
    logits: Float[Tensor, "batch vocabulary"], count: int
) -> tuple[Float[Tensor, "batch count"], Int[Tensor, "batch count"]]:
    """The `count` largest logits of each row in falling order, and their tokens; of equals the lower number first.

    torch.topk promises nothing about equals, and in half precision many logits are equal.
    """
    if count == logits.shape[-1]:
        return logits.sort(dim=-1, descending=True, stable=True)
    values, tokens = logits.topk(count + 1)
    equals = values[:, 1:] == values[:, :-1]
    values, tokens = values[:, :count], tokens[:, :count]
    if not bool(equals.any()):
        return values, tokens
    for row in equals[:, -1].nonzero()[:, 0].tolist():  # some of the equals were left out: take the lowest numbers
        above = int((values[row] > values[row, -1]).sum())
        tokens[row, above:] = (logits[row] == values[row, -1]).nonzero()[: count - above, 0]
    tokens = tokens.sort(dim=-1).values
    values, order = logits.gather(-1, tokens).sort(dim=-1, descending=True, stable=True)
    return values, tokens.gather(-1, order)
