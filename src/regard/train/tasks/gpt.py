"""Language modelling: predict the next character, byte or word piece of a text."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.distributed import SequenceLayout
from regard.errors import ConfigError, InputError
from regard.models.gpt import GPT, GPTConfig
from regard.models.pretrained import Pretrained
from regard.patterns import Pattern, Segments
from regard.train.data import text
from regard.train.recipe import Recipe
from regard.train.task import Task, split_rows

IGNORED = -100
# Changes to the defaults, which are nanoGPT's for Shakespeare on a laptop, for other data sets.
FOR_DATA: dict[str, dict[str, Any]] = {
    "enwik8": {"tokenizer": "bytes", "context_length": 256, "dim": 256, "layers": 6, "heads": 8, "steps": 5000},
    "gutenberg": {"tokenizer": "bpe", "vocab_size": 4096, "context_length": 128},
}


@dataclass(frozen=True)
class GPTRecipe(Recipe):
    """Train a `GPT` on text.

    The defaults are those of nanoGPT's run on a CPU (`config/train_shakespeare_char.py` with the sizes that its page
    gives for a laptop), with a weight decay of 0.1, beta2 0.99 and a tenth of the learning rate at the end.

    Attributes:
        data: "shakespeare", "enwik8", "gutenberg", "brown", "moby-dick", or the path of a text, a folder or a .jsonl.
        tokenizer: "characters", "bytes", "bpe" (with `vocab_size`), or the path of a tokenizer.json.
        packing: "windows" are random stretches of the whole text, as in nanoGPT; "documents" packs whole documents
            into rows, which do not attend to each other.
        eval_batches: micro-batches of the validation set that are evaluated; None for all of it.
        sample_tokens: tokens of the sample that is written at every evaluation; 0 for none.
        prompt: how the sample begins.
        context_length, dim, layers, heads, kv_heads, hidden_dim, position, norm, feed_forward, bias, tie_embeddings,
            window, dropout: of the model (`GPTConfig`).
    """

    kind: ClassVar[str] = "gpt"

    data: str = "shakespeare"
    tokenizer: str = "characters"
    vocab_size: int | None = None
    packing: str = "windows"
    steps: int | None = 2000
    batch_size: int = 12
    learning_rate: float = 1e-3
    min_learning_rate: float = 1e-4
    warmup_steps: float = 100
    weight_decay: float = 0.1
    eval_every: int | None = 250
    eval_batches: int | None = 50
    sample_tokens: int = 200
    prompt: str = "\n"
    context_length: int = 64
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int | None = None
    hidden_dim: int | None = None
    position: str = "learned"
    norm: str = "layer"
    feed_forward: str = "gelu_tanh"
    bias: bool = False
    tie_embeddings: bool = True
    window: int | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing not in ("windows", "documents"):
            raise ConfigError(
                f"There is no packing {self.packing!r}.",
                asked=f"packing={self.packing!r}",
                because='a row is a random stretch of the text ("windows") or holds whole documents ("documents")',
                instead='packing="windows"',
            )
        if self.vocab_size is not None and self.tokenizer in ("characters", "bytes"):
            raise ConfigError(
                f"A tokenizer of {self.tokenizer} has no vocab_size.",
                asked=f"tokenizer={self.tokenizer!r}, vocab_size={self.vocab_size}",
                because="it has a token for each of the text's characters, or for each byte",
                instead=f'tokenizer="bpe", vocab_size={self.vocab_size}',
            )
        self.config(self.vocab_size or 1)  # raises for inconsistent sizes

    def config(self, vocab_size: int) -> GPTConfig:
        """The model's own configuration, for a tokenizer of this size."""
        names = (
            "context_length", "dim", "layers", "heads", "kv_heads", "hidden_dim", "position", "norm", "feed_forward",
            "bias", "tie_embeddings", "window", "dropout",
        )  # fmt: skip
        return GPTConfig(vocab_size=vocab_size, **{name: getattr(self, name) for name in names})

    @classmethod
    def on(cls, data: str, **changes: Any) -> Self:
        """A recipe for this data set, of a size that a CPU trains in minutes."""
        return cls.from_dict({"data": data, **FOR_DATA.get(data, {}), **changes})

    def make_task(self, data: Any = None) -> LanguageModelTask:
        """Language modelling of the recipe's text, of the given path, or of the given documents."""
        return LanguageModelTask(self, text.load_documents(self.data if data is None else data))


class TextBatch(NamedTuple):
    """Tokens `(row, token)` and the tokens after them; documents of a row are told apart by the pattern."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None = None
    pattern: Pattern | None = None


class LanguageModelTask(Task[GPTRecipe]):
    """Next-token prediction; metrics are the loss in nats, the perplexity, and bits per character or byte."""

    def __init__(self, recipe: GPTRecipe, documents: text.Documents) -> None:
        super().__init__(recipe, documents)
        self.documents = documents
        parts = documents.split()
        train, validation = parts.train, parts.validation
        self.tokenizer = text.build_tokenizer(recipe.tokenizer, train, recipe.vocab_size)
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        self.train_store = text.build_store(train, self.tokenizer, suffix=end)
        self.validation_store = text.build_store(validation, self.tokenizer, suffix=end)
        self._check_length()
        self._check_prompt()
        self.packed = self._pack(self.train_store)
        # Of the validation text, for units that do not depend on the tokenizer.
        self._bytes = sum(len(document.encode()) for document in validation)

    def _pack(self, store: text.TokenStore) -> text.PackedDocuments:
        return text.PackedDocuments(
            store, self.recipe.context_length, rows=self.recipe.batch_size, seed=self.recipe.seed
        )

    def _check_length(self) -> None:
        for name, store in (("training", self.train_store), ("validation", self.validation_store)):
            if len(store.tokens) < 2 or (
                self.recipe.packing == "windows" and len(store.tokens) <= self.recipe.context_length
            ):
                raise InputError(
                    f"The {name} text is too short.",
                    asked=f"context_length={self.recipe.context_length}",
                    found=f"{len(store.tokens)} tokens in the {name} part of {self.documents.name}",
                    because="a row has context_length tokens and the one after them",
                    instead="a longer text, or a smaller context_length",
                )

    def _check_prompt(self) -> None:
        count, limit = len(self.tokenizer.encode(self.recipe.prompt)), self.recipe.context_length
        if self.recipe.sample_tokens and count >= limit:
            raise InputError(
                "The prompt of the samples fills the context.",
                asked=f"prompt={self.recipe.prompt!r}, context_length={limit}",
                found=f"{count} tokens",
                because="a sample is the prompt and at least one token after it",
                instead="a shorter prompt, or sample_tokens=0 for no samples",
            )

    @property
    def digest(self) -> str:
        return hashlib.sha256((self.documents.digest + self.tokenizer.digest).encode()).hexdigest()

    @property
    def steps_per_epoch(self) -> int:
        if self.recipe.packing == "documents":
            return self.packed.batches_per_epoch
        return max(1, len(self.train_store.tokens) // (self.recipe.batch_size * self.recipe.context_length))

    def make_batches(self, step: int) -> list[TextBatch]:
        recipe = self.recipe
        if recipe.packing == "windows":
            rows = text.sample_windows(
                self.train_store.tokens, recipe.batch_size, recipe.context_length, seed=recipe.seed, step=step
            )
            return [TextBatch(part[:, :-1], part[:, 1:]) for part in split_rows(rows, self.micro_batches)]
        return _split_packed(self.packed.make_batch(step), self.micro_batches)

    def describe_batch(self, step: int) -> str:
        first = self.make_batches(step)[0].tokens[0, :40].tolist()
        return f"{self.recipe.batch_size} rows, the first of which begins {self.tokenizer.decode(first)!r}"

    def count_units(self, batch: TextBatch) -> int:
        return int((batch.targets != IGNORED).sum()) if batch.pattern is not None else batch.targets.numel()

    def count_tokens(self, batch: TextBatch) -> int:
        return batch.tokens.shape[1]

    def take_tokens(self, batch: TextBatch, layout: SequenceLayout, process: int) -> TextBatch:
        """The pattern stays that of the whole row: attention speaks of positions there."""
        tokens, targets = (layout.take(each, process, dim=-1) for each in (batch.tokens, batch.targets))
        positions = layout.positions(process) if batch.positions is None else layout.take(batch.positions, process, -1)
        return TextBatch(tokens, targets, positions, batch.pattern)

    def companions(self) -> dict[str, bytes]:
        return self.tokenizer.to_files()

    def build_model(self) -> GPT:
        return GPT(self.recipe.config(self.tokenizer.vocab_size))

    def count_terms(self, batch: TextBatch) -> dict[str, int]:
        return {"loss": self.count_units(batch)}

    def compute_terms(self, model: nn.Module, batch: TextBatch) -> dict[str, Tensor]:
        logits = model(batch.tokens, pattern=batch.pattern, positions=batch.positions)
        smoothing = self.recipe.label_smoothing
        loss = functional.cross_entropy(
            logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED, label_smoothing=smoothing,
            reduction="sum",
        )  # fmt: skip
        return {"loss": loss}

    @cached_property
    def _validation_batches(self) -> list[TextBatch]:
        """The batches that every evaluation reads."""
        recipe, batches = self.recipe, []
        if recipe.packing == "windows":
            windows = text.sequential_windows(self.validation_store.tokens, recipe.batch_size, recipe.context_length)
            batches = [TextBatch(rows[:, :-1], rows[:, 1:]) for rows in windows]
        else:
            packed = self._pack(self.validation_store).evaluation_batches()
            batches = [part for batch in packed for part in _split_packed(batch, 1)]
        if recipe.eval_batches is None or len(batches) <= recipe.eval_batches:
            return batches
        chosen = torch.linspace(0, len(batches) - 1, recipe.eval_batches).round().int().tolist()  # evenly spread
        return [batches[index] for index in chosen]

    def evaluate(self, model: Pretrained) -> dict[str, float]:
        """Loss on the validation text (`eval_batches` of it), perplexity, and bits per byte of the text."""
        total, count = 0.0, 0
        for batch in self._validation_batches:
            logits = model(batch.tokens, pattern=batch.pattern, positions=batch.positions).flatten(0, 1)
            total += functional.cross_entropy(
                logits.float(), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum"
            ).item()
            count += int((batch.targets != IGNORED).sum())
        loss = total / count
        per_byte = len(self.validation_store.tokens) / max(self._bytes, 1)
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
        return metrics | {"bits_per_byte": loss / math.log(2) * per_byte}

    def make_samples(self, model: Pretrained) -> list[str]:
        if not self.recipe.sample_tokens:
            return []
        assert isinstance(model, GPT)
        prompt = self.tokenizer.encode(self.recipe.prompt) or [0]
        count = min(self.recipe.sample_tokens, max(self.recipe.context_length - len(prompt), 1))
        written = model.generate([prompt], max_new_tokens=count, temperature=0.8, top_k=200, seed=abs(self.recipe.seed))
        return [self.tokenizer.decode([*prompt, *written.tokens[0]])]


def _split_packed(batch: text.PackedBatch, parts: int) -> list[TextBatch]:
    """Rows of packed documents as micro-batches; the last token of a row has nothing after it."""
    targets = batch.next_tokens(IGNORED)
    rows = torch.arange(len(batch.tokens))
    return [
        TextBatch(batch.tokens[part], targets[part], batch.positions[part], Segments(batch.segment_ids[part]))
        for part in split_rows(rows, parts)
    ]
