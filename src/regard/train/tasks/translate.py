"""Translation: an encoder-decoder Transformer on sentence pairs, with BLEU and chrF on held-out ones."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.errors import InputError
from regard.models.pretrained import Pretrained
from regard.models.transformer import Transformer, TransformerConfig
from regard.train.data import text
from regard.train.recipe import Recipe
from regard.train.task import Task, split_rows

IGNORED = -100
# Changes to the defaults, which are for the verses, for other data sets.
FOR_DATA: dict[str, dict[str, Any]] = {"sentences-de": {"max_length": 64, "steps": 12_000}}


@dataclass(frozen=True)
class TranslationRecipe(Recipe):
    """Train a `Transformer` to translate.

    Schedule, label smoothing, Adam's betas and epsilon, shared embeddings and the length penalty are the paper's; the
    sizes are for a CPU, and the normalisation is before each part (`order="pre"`), which trains without a long warm-up.
    `TranslationRecipe.paper()` is the published base model.

    Source: Vaswani et al., Attention Is All You Need (2017), section 5.

    Attributes:
        data: "kjv-luther", "sentences-de", the path of a .jsonl with "source" and "target" or of a .tsv, or the path of
            a text with one sentence in each line.
        target_data: the path of its translations, line by line, if `data` is such a text.
        reverse: translate from the second language to the first.
        vocab_size: of the byte-pair encoding that both languages share.
        tokens_per_batch: most source tokens, and most target tokens, of a batch; `batch_size` is not used.
        max_length: pairs with a longer side are not trained on.
        eval_pairs: validation pairs that are translated for BLEU and chrF at every evaluation.
        num_beams, length_penalty: of these translations.
        dim, layers, heads, hidden_dim, order, dropout: of the model (`TransformerConfig`).
    """

    kind: ClassVar[str] = "translate"

    data: str = "kjv-luther"
    target_data: str | None = None
    reverse: bool = False
    vocab_size: int = 8000
    tokens_per_batch: int = 2048
    max_length: int = 128
    steps: int | None = 4000
    learning_rate: float = 1.0
    schedule: Literal["cosine", "linear", "constant", "noam"] = "noam"
    warmup_steps: float = 1000
    beta2: float = 0.98
    eps: float = 1e-9
    weight_decay: float = 0.0
    label_smoothing: float = 0.1
    eval_every: int | None = 500
    keep_checkpoints: int = 5
    eval_pairs: int = 100
    num_beams: int = 1
    length_penalty: float = 0.6
    dim: int = 256
    layers: int = 3
    heads: int = 4
    hidden_dim: int = 1024
    order: str = "pre"
    dropout: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.config(self.vocab_size, 0)  # raises for inconsistent sizes

    def config(self, vocab_size: int, start: int) -> TransformerConfig:
        """The model's own configuration."""
        names = ("dim", "layers", "heads", "hidden_dim", "order", "dropout")
        return TransformerConfig(vocab_size=vocab_size, start=start, **{name: getattr(self, name) for name in names})

    @classmethod
    def paper(cls, **changes: Any) -> Self:
        """The published base model and its training: 100,000 steps of about 25,000 tokens on either side."""
        published = dict(
            vocab_size=37_000, tokens_per_batch=25_000, max_length=256, steps=100_000, warmup_steps=4000, dim=512,
            layers=6, heads=8, hidden_dim=2048, order="post", num_beams=4,
        )  # fmt: skip
        return cls.from_dict(published | changes)

    @classmethod
    def on(cls, data: str, **changes: Any) -> Self:
        """A recipe for this data set, of a size that a CPU trains in half an hour."""
        return cls.from_dict({"data": data, **FOR_DATA.get(data, {}), **changes})

    def make_task(self, data: Any = None) -> TranslationTask:
        """Translation of the recipe's pairs, of the given file, or of the given pairs."""
        pairs = data
        if data is None:
            pairs = text.load_pairs(self.data, self.target_data)
        elif not isinstance(data, text.TextPairs):
            pairs = text.load_pairs(data)
        return TranslationTask(self, pairs)


class TranslationBatch(NamedTuple):
    """Sources, targets that begin with the start token, and the tokens after them, padded on the right."""

    source: Tensor
    source_lengths: Tensor
    target: Tensor
    target_lengths: Tensor
    next_tokens: Tensor


class TranslationTask(Task[TranslationRecipe]):
    """Sequence-to-sequence learning with label smoothing."""

    def __init__(self, recipe: TranslationRecipe, pairs: text.TextPairs) -> None:
        super().__init__(recipe, pairs)
        self.pairs = pairs
        parts = pairs.split()
        train, self.validation, self.test = parts.train, parts.validation, parts.test
        sides = self._sides(train)
        self.tokenizer = text.build_tokenizer("bpe", [*train.sources, *train.targets], recipe.vocab_size)
        assert self.tokenizer.eos_token_id is not None
        self.end = self.tokenizer.eos_token_id  # ends a sentence, and starts a translation
        source, target = (text.build_store(side, self.tokenizer, suffix=[self.end]) for side in sides)
        self.batches = text.PairBatches(
            source, target, recipe.tokens_per_batch, max_length=recipe.max_length, seed=recipe.seed, pad=self.end
        )

    @property
    def digest(self) -> str:
        return hashlib.sha256((self.pairs.digest + self.tokenizer.digest).encode()).hexdigest()

    @property
    def steps_per_epoch(self) -> int:
        return self.batches.batches_per_epoch

    def make_batches(self, step: int) -> list[TranslationBatch]:
        made = self._shift(self.batches.make_batch(step))
        rows = split_rows(torch.arange(len(made.source)), self.micro_batches)
        return [TranslationBatch(*(tensor[part] for tensor in made)) for part in rows]

    def _shift(self, batch: text.PairBatch) -> TranslationBatch:
        """The decoder reads the start token and all of the target but its end, and predicts all of the target."""
        start = torch.full_like(batch.target[:, :1], self.end)
        target = torch.cat((start, batch.target[:, :-1]), 1)
        place = torch.arange(batch.target.shape[1])
        following = torch.where(place < batch.target_lengths[:, None], batch.target, IGNORED)
        return TranslationBatch(batch.source, batch.source_lengths, target, batch.target_lengths, following)

    def describe_batch(self, step: int) -> str:
        indices = self.batches.make_batch(step).indices.tolist()
        return f"training pairs {', '.join(map(str, indices[:8]))}{', ...' if len(indices) > 8 else ''}"

    def count_units(self, batch: TranslationBatch) -> int:
        return int(batch.source_lengths.sum() + batch.target_lengths.sum())

    def companions(self) -> dict[str, bytes]:
        return self.tokenizer.to_files()

    def build_model(self) -> Transformer:
        return Transformer(self.recipe.config(self.tokenizer.vocab_size, self.end))

    def count_terms(self, batch: TranslationBatch) -> dict[str, int]:
        return {"loss": int(batch.target_lengths.sum())}

    def compute_terms(self, model: nn.Module, batch: TranslationBatch) -> dict[str, Tensor]:
        return {"loss": self._sum_loss(model, batch, self.recipe.label_smoothing)}

    def _sum_loss(self, model: nn.Module, batch: TranslationBatch, smoothing: float) -> Tensor:
        logits = model(
            batch.source, batch.target, source_lengths=batch.source_lengths, target_lengths=batch.target_lengths
        )
        return functional.cross_entropy(
            logits.flatten(0, 1).float() if logits.dtype == torch.bfloat16 else logits.flatten(0, 1),
            batch.next_tokens.flatten(), ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum",
        )  # fmt: skip

    # Evaluation

    @cached_property
    def _held_out(self) -> text.PairBatches:
        """All validation pairs, whatever their length."""
        sides = self._sides(self.validation)
        source, target = (text.build_store(side, self.tokenizer, suffix=[self.end]) for side in sides)
        return text.PairBatches(source, target, self.recipe.tokens_per_batch, pad=self.end)

    def _sides(self, pairs: text.TextPairs) -> tuple[list[str], list[str]]:
        return (pairs.targets, pairs.sources) if self.recipe.reverse else (pairs.sources, pairs.targets)

    def evaluate(self, model: Pretrained) -> dict[str, float]:
        """Loss without smoothing and perplexity on all validation pairs; BLEU and chrF on `eval_pairs` of them."""
        assert isinstance(model, Transformer)
        sources, targets = self._sides(self.validation)
        total, count = 0.0, 0
        for batch in self._held_out.evaluation_batches():
            shifted = self._shift(batch)
            total += self._sum_loss(model, shifted, 0.0).item()
            count += int(shifted.target_lengths.sum())
        loss = total / count
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
        if self.recipe.eval_pairs:
            chosen = slice(None, self.recipe.eval_pairs)
            metrics |= score_translations(self.translate(model, sources[chosen]), targets[chosen])
        return metrics

    def translate(self, model: Transformer, sentences: list[str]) -> list[str]:
        recipe = self.recipe
        return translate(model, self.tokenizer, sentences, num_beams=recipe.num_beams,
                         length_penalty=recipe.length_penalty)  # fmt: skip

    def make_samples(self, model: Pretrained) -> list[str]:
        assert isinstance(model, Transformer)
        sources, targets = (side[:3] for side in self._sides(self.validation))
        rows = zip(sources, self.translate(model, sources), targets, strict=True)
        return [f"{source}\n  ours       {ours}\n  reference  {target}" for source, ours, target in rows]


def translate(
    model: Transformer,
    tokenizer: text.Tokenizer,
    sentences: list[str],
    *,
    num_beams: int = 4,
    length_penalty: float = 0.6,
    batch_size: int = 32,
) -> list[str]:
    """Translate sentences, by beam search with the paper's length penalty; a translation has at most 50 tokens more.

    Source: Vaswani et al. (2017), section 6.1: four beams, alpha 0.6, and the input's length plus 50.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise InputError(
            "This tokenizer has no token that ends a sentence.",
            asked=repr(tokenizer),
            because="a translation ends with it",
            instead="the folder of a model that `regard train translate` has trained",
        )
    tokens = [[*tokenizer.encode(sentence), end] for sentence in sentences]
    order = sorted(range(len(tokens)), key=lambda index: len(tokens[index]))
    found = [""] * len(tokens)
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        longest = len(tokens[chosen[-1]]) + 50
        written = model.generate(
            [tokens[index] for index in chosen],
            max_new_tokens=longest,
            num_beams=num_beams,
            length_penalty=length_penalty,
            stop_tokens=[end],
        )
        for index, made in zip(chosen, written.tokens, strict=True):
            found[index] = tokenizer.decode([token for token in made if token != end])
    return found


def score_translations(translations: list[str], references: list[str]) -> dict[str, float]:
    """BLEU and chrF of translations, 0 to 100, as sacrebleu computes them."""
    try:
        import sacrebleu
    except ImportError as failure:
        raise InputError(
            "BLEU needs the package sacrebleu.",
            asked="eval_pairs > 0",
            because=f"{type(failure).__name__}: {failure}",
            instead="pip install 'regard[train]', or eval_pairs=0",
        ) from failure
    return {
        "bleu": sacrebleu.corpus_bleu(translations, [references]).score,
        "chrf": sacrebleu.corpus_chrf(translations, [references]).score,
    }
