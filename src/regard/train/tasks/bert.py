"""Pre-training of BERT: masked tokens, and tasks on pairs of texts."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.errors import ConfigError, InputError
from regard.models.bert import SIZES
from regard.models.bert_heads import BertForPretraining, BertForPretrainingConfig
from regard.models.initialization import init_weights
from regard.train.data import text
from regard.train.objectives import Corpus, Example, PackedSequences, info_nce
from regard.train.objectives.contrast import compare_views
from regard.train.objectives.pairs import truncate_pair
from regard.train.objectives.streams import make_rng
from regard.train.recipe import Recipe
from regard.train.task import Task
from regard.train.tasks.bert_batches import PAIR_TOKENS, BertBatch, BertBatches, share_sequences

# The classes of each head for pairs; those of "entailment" come from the user's file, those of "nsp" are BERT's own.
PAIR_CLASSES = {"sop": ("in order", "swapped"), "inversion": ("other", "inverted")}
TASKS = ("mlm", "nsp", *PAIR_CLASSES, "entailment", "rtd", "infonce")
SHOWN_TEXTS = 3  # in the samples


@dataclass(frozen=True)
class BertRecipe(Recipe):
    """Pre-train a BERT on running text; the defaults are a small model that takes minutes.

    The constants of the optimizer are the published ones, the rate is higher since the model is smaller; `paper()` is
    the published run.

    Attributes:
        data: the name of a corpus, "gutenberg" or "brown", or the path of your own text.
        separator: of documents in a text file of yours: "blank_line", "line", or None for one document in each file.
        tasks: any of
            "mlm", masked language modelling (`regard.train.objectives.masking`);
            "nsp", next-sentence prediction, and "sop", sentence-order prediction (`pairs`);
            "inversion", inverted-sentence detection (`inversion`);
            "entailment", the classes of your own labelled pairs;
            "rtd", replaced-token detection (`replaced`);
            "infonce", in-batch contrastive learning (`contrast`).
            The loss is the sum of their means.
        entailment: the path of a file of labelled pairs, for the task of this name.
        batch_size: sequences of a step, shared evenly among the tasks ("mlm" masks the pairs of "nsp" and "sop").
        length: the longest sequence, special tokens included.
        tokenizer: "wordpiece", trained on the training text with `vocab_size` tokens, or the path of a tokenizer.
        dim, layers, heads, hidden_dim, dropout: of the model; `hidden_dim` is `4 dim` if None.
        initial: the standard deviation of the initial weights of the blocks; if None, `0.02 sqrt(768 / dim)`, which
            gives activations the size they have in BERT base, whose 0.02 is meant for 768 channels. Embeddings and
            heads begin with 0.02, so that the first losses are those of even guesses, ln V and ln 2.
        share: of the tokens that are masked or replaced.
        whole_words: whether words are masked as a whole.
        max_predictions: choose exactly `share` of each sequence and at most this many tokens, as BERT's code does; if
            None, every token is chosen by itself.
        short: the probability of a shorter pair.
        views: of a sentence, for "infonce": the sentence itself under two "dropout" masks, or its "adjacent" sentence.
        temperature: of "infonce".
        eval_batches: batches of the validation text that are evaluated.
    """

    kind: ClassVar[str] = "bert"

    data: str = "gutenberg"
    separator: str | None = None
    tasks: tuple[str, ...] = ("mlm", "nsp")
    entailment: str | None = None
    learning_rate: float = 5e-4
    beta2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 0.01
    schedule: Literal["cosine", "linear", "constant", "noam"] = "linear"
    length: int = 64
    tokenizer: str = "wordpiece"
    vocab_size: int = 8000
    dim: int = 128
    layers: int = 2
    heads: int = 2
    hidden_dim: int | None = None
    dropout: float = 0.1
    initial: float | None = None
    share: float = 0.15
    whole_words: bool = False
    max_predictions: int | None = None
    short: float = 0.1
    views: Literal["dropout", "adjacent"] = "dropout"
    temperature: float = 0.05
    eval_batches: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_tasks()
        for name, is_valid, reason in (
            ("share", 0 < self.share < 1, "it lies between 0 and 1"),
            ("initial", self.initial is None or self.initial > 0, "with zero weights these layers get no gradient"),
            ("short", 0 <= self.short <= 1, "it is a probability"),
            ("temperature", self.temperature > 0, "it must be positive"),
            ("length", self.length >= 5, "the shortest pair is [CLS] A [SEP] B [SEP]"),
        ):
            if not is_valid:
                raise ConfigError(
                    f"A recipe cannot have {name}={getattr(self, name)}.",
                    asked=f"{type(self).__name__}({name}={getattr(self, name)})",
                    because=reason,
                    instead=f"{name}={type(self).__dataclass_fields__[name].default}",
                )
        self.config(8, ("a", "b"))  # raises for inconsistent sizes

    def _check_tasks(self) -> None:
        reason, instead = "", 'tasks=("mlm", "nsp")'
        if not self.tasks or len(set(self.tasks)) != len(self.tasks) or any(task not in TASKS for task in self.tasks):
            reason = f"the tasks are some of {', '.join(TASKS)}, each once"
        elif ("entailment" in self.tasks) != (self.entailment is not None):
            reason, instead = (
                "labels of entailment cannot be made from text alone",
                'entailment="pairs.tsv", with the task',
            )
        elif "infonce" in self.tasks and self.accumulation > 1:
            reason, instead = (
                "the negatives of a text are the rest of its batch, which would be split",
                "accumulation=1",
            )
        elif "infonce" in self.tasks and self.views == "dropout" and self.dropout == 0:
            reason, instead = "two views under dropout are equal without dropout", 'dropout=0.1, or views="adjacent"'
        elif min(share_sequences(self.batch_size, self.tasks).values()) < 2:
            reason, instead = "every task has two sequences of a batch at least", f"batch_size={4 * len(self.tasks)}"
        if reason:
            raise ConfigError(
                "BERT cannot be trained so.",
                asked=f"tasks={self.tasks!r}, entailment={self.entailment!r}, batch_size={self.batch_size}, "
                f"accumulation={self.accumulation}, dropout={self.dropout}, views={self.views!r}",
                because=reason,
                instead=instead,
            )

    @classmethod
    def on(cls, data: str, **changes: Any) -> Self:
        """A recipe for this text."""
        return cls.from_dict({"data": data, **changes})

    @classmethod
    def paper(cls, size: str = "base", **changes: Any) -> Self:
        """The published run: Adam with rate 1e-4, 10,000 steps of warm-up and a million steps of 256 sequences.

        Source: Devlin et al., BERT (2019), appendix A.2, and the released code. Where we differ: sequences have 512
        tokens all the time, theirs have 128 in the first 900,000 steps; our Adam corrects the bias of its moments.
        """
        layers, dim = SIZES[size]
        published = dict(
            steps=1_000_000, batch_size=256, learning_rate=1e-4, warmup_steps=10_000, length=512, vocab_size=30_522,
            max_predictions=77, initial=0.02, dim=dim, layers=layers, heads=dim // 64,
        )  # fmt: skip
        return cls.from_dict(published | changes)

    def config(self, vocab_size: int, entailed: Sequence[str] = ()) -> BertForPretrainingConfig:
        """The model's own configuration."""
        classes = PAIR_CLASSES | {"entailment": tuple(entailed)}
        heads = tuple((task, classes[task]) for task in self.tasks if task in classes)
        names = ("dim", "layers", "heads", "hidden_dim", "dropout")
        return BertForPretrainingConfig(
            vocab_size=vocab_size,
            context_length=self.length,
            pooler=bool(heads) or "nsp" in self.tasks,
            masked_tokens="mlm" in self.tasks,
            next_sentence="nsp" in self.tasks,
            pair_heads=heads,
            replaced_tokens="rtd" in self.tasks,
            projection="infonce" in self.tasks,
            **{name: getattr(self, name) for name in names},
        )

    def make_task(self, data: Any = None) -> BertTask:
        """The tasks on the recipe's text, on the given path, or on the given documents."""
        return BertTask(self, data if isinstance(data, PretrainingText) else PretrainingText.load(self, data))


@dataclass(frozen=True)
class PretrainingText:
    """Tokenized text for pre-training.

    Attributes:
        tokenizer: of all texts.
        train, validation: sentences and documents.
        digest: a sha256 of all of it.
        train_pairs, validation_pairs, classes: labelled pairs, for the task "entailment".
    """

    tokenizer: text.Tokenizer
    train: Corpus
    validation: Corpus
    digest: str
    train_pairs: Sequence[Example] = ()
    validation_pairs: Sequence[Example] = ()
    classes: tuple[str, ...] = ()

    @classmethod
    def load(cls, recipe: BertRecipe, data: Any = None) -> PretrainingText:
        """Read, split and tokenize the recipe's text, or the given documents."""
        documents = data
        if isinstance(data, list | tuple):
            documents = text.Documents.from_texts(data)
        elif not isinstance(data, text.Documents):
            documents = text.load_documents(recipe.data if data is None else data, separator=recipe.separator)
        # Two documents at least, of which next-sentence prediction draws pairs, where there are four.
        parts = documents.split(validation=max(0.05, 2 / len(documents)) if len(documents) >= 4 else 0.05, test=0)
        if "nsp" in recipe.tasks:
            check_documents(min(len(parts.train), len(parts.validation)), len(documents))
        tokenizer = text.build_tokenizer(recipe.tokenizer, parts.train, recipe.vocab_size)
        check_special_tokens(tokenizer, recipe)
        stores = [text.build_store(part, tokenizer, unit="sentence") for part in (parts.train, parts.validation)]
        train, validation = (Corpus.from_store(each.tokens, each.starts, each.document_starts) for each in stores)
        digest = hashlib.sha256("".join(each.digest for each in stores).encode())
        if recipe.entailment is None:
            return cls(tokenizer, train, validation, digest.hexdigest())
        labelled = text.load_labelled_pairs(recipe.entailment)
        digest.update(labelled.digest.encode())
        divided = labelled.split(validation=0.1, test=0)
        most = recipe.length - PAIR_TOKENS
        pairs = [list(encode_pairs(part, tokenizer, most)) for part in (divided.train, divided.validation)]
        return cls(tokenizer, train, validation, digest.hexdigest(), *pairs, classes=tuple(labelled.names))


def encode_pairs(pairs: text.LabelledPairs, tokenizer: text.Tokenizer, max_tokens: int) -> Iterator[Example]:
    """Pairs of texts as tokens; where both are too long together, tokens of the longer one are left out."""
    firsts, seconds = tokenizer.encode_batch(pairs.firsts), tokenizer.encode_batch(pairs.seconds)
    for number, (first, second, label) in enumerate(zip(firsts, seconds, pairs.labels, strict=True)):
        a, b, c, d = truncate_pair(0, len(first), 0, len(second), max_tokens, make_rng(0, "pairs", number))
        yield Example(first[a:b].tolist(), second[c:d].tolist(), label)


def check_special_tokens(tokenizer: text.Tokenizer, recipe: BertRecipe) -> None:
    """Raise for a tokenizer without BERT's special tokens."""
    names = ("cls", "sep", "pad", *(("mask",) if "mlm" in recipe.tasks else ()))
    missing = [name for name in names if getattr(tokenizer, f"{name}_token_id") is None]
    if missing:
        raise ConfigError(
            f"The tokenizer has no token for {', '.join(missing)}.",
            asked=f"tokenizer={recipe.tokenizer!r}",
            because="a sequence is [CLS] A [SEP] B [SEP], and masked tokens are [MASK]",
            instead='tokenizer="wordpiece"',
        )


def check_documents(least: int, documents: int) -> None:
    """Raise if a part of the text has fewer than two documents, which next-sentence prediction needs."""
    if least < 2:
        raise InputError(
            "Next-sentence prediction needs four documents.",
            asked='the task "nsp"',
            found=f"{documents} document{'' if documents == 1 else 's'}",
            because="half of its pairs take B from another document, of the training and of the validation text",
            instead='separator="blank_line" if documents are separated so, a folder of texts, or the task "sop"',
        )


def initial_deviation(dim: int) -> float:
    """The standard deviation of initial weights that corresponds to 0.02 for 768 channels."""
    return 0.02 * math.sqrt(768 / dim)


def encode_sequences(model: nn.Module, packed: PackedSequences) -> Tensor:
    """The hidden states of packed sequences, `(row token, dim)`."""
    return model(packed.tokens, packed.segments, positions=packed.positions, pattern=packed.pattern).flatten(0, 1)


class BertTask(Task[BertRecipe]):
    """The pre-training tasks of a recipe on one corpus.

    Metrics: `loss`, the sum of the terms; of masked tokens `mlm_loss`, `mlm_accuracy`, `mlm_perplexity`; of every other
    task its loss and accuracy. That of "rtd" is the mean of the accuracies on original and on replaced tokens, since
    most tokens are original.
    """

    def __init__(self, recipe: BertRecipe, data: PretrainingText) -> None:
        super().__init__(recipe, data)
        self.batches = BertBatches(recipe, data.train, data.tokenizer, data.train_pairs)
        self.held_out = BertBatches(recipe, data.validation, data.tokenizer, data.validation_pairs, "validation")
        self._check_targets()

    def _check_targets(self) -> None:
        """Raise if an evaluation would have nothing to predict for one of the tasks."""
        missing = set(self.recipe.tasks)
        for step in range(self._eval_steps):
            for batch in self.held_out.make(step):
                missing -= {task for task, count in self.count_terms(batch).items() if count}
            if not missing:
                return
        raise InputError(
            f"The validation text has no target for {', '.join(sorted(missing))}.",
            asked=f"share={self.recipe.share}, batch_size={self.recipe.batch_size}, "
            f"eval_batches={self.recipe.eval_batches}",
            found=f"{self._eval_steps} batches without one",
            because="a task is evaluated on at least one target",
            instead="more text, a larger batch_size, or more eval_batches",
        )

    @property
    def _eval_steps(self) -> int:
        return min(self.recipe.eval_batches, self.held_out.per_epoch)

    @property
    def digest(self) -> str:
        return self.data.digest

    @property
    def steps_per_epoch(self) -> int:
        return self.batches.per_epoch

    def make_batches(self, step: int) -> list[BertBatch]:
        return self.batches.make(step, self.micro_batches)

    def check_split(self) -> str | None:
        contrasts = "infonce" in self.recipe.tasks
        return "the negatives of a text are the rest of its batch, which would be split" if contrasts else None

    def describe_batch(self, step: int) -> str:
        return self.batches.describe(step)

    def count_units(self, batch: BertBatch) -> int:
        return len(batch.sequences.places)

    def build_model(self) -> BertForPretraining:
        recipe = self.recipe
        model = BertForPretraining(recipe.config(self.data.tokenizer.vocab_size, self.data.classes))
        deviation = initial_deviation(recipe.dim) if recipe.initial is None else recipe.initial
        init_weights(model.bert.blocks, lambda weight: nn.init.normal_(weight, std=deviation), projections=True)
        return model

    def count_terms(self, batch: BertBatch) -> dict[str, int]:
        return {task: len(places) for task, (places, _) in batch.targets.items()}

    def compute_terms(self, model: nn.Module, batch: BertBatch) -> dict[str, Tensor]:
        return {task: loss for task, (loss, _) in self._score(model, batch, self.recipe.label_smoothing).items()}

    def _score(self, model: Any, batch: BertBatch, smoothing: float = 0.0) -> dict[str, tuple[Tensor, Tensor]]:
        """For each task the sum of its losses, and which of its targets are predicted."""
        sequences, scores = batch.sequences, {}
        hidden = encode_sequences(model, sequences)
        for task, (places, targets) in batch.targets.items():
            states = hidden[places]
            if task == "rtd":
                logits = model.detect_replaced(states)
                smoothed = targets.to(logits.dtype) * (1 - smoothing) + smoothing / 2
                loss = functional.binary_cross_entropy_with_logits(logits, smoothed, reduction="sum")
                scores[task] = loss, (logits > 0) == (targets > 0)
                continue
            if task == "infonce":
                first, second = model.project(states), model.project(hidden[targets])
                options = {"temperature": self.recipe.temperature, "label_smoothing": smoothing}
                loss = info_nce(first, second, **options, reduction="sum")
                found = compare_views(first, second).argmax(-1)
                scores[task] = loss, found == torch.arange(len(found), device=found.device)
                continue
            logits = model.predict_tokens(states) if task == "mlm" else model.classify_pairs(task, states)
            loss = functional.cross_entropy(logits, targets, label_smoothing=smoothing, reduction="sum")
            scores[task] = loss, logits.argmax(-1) == targets
        return scores

    def evaluate(self, model: Any) -> dict[str, float]:
        losses = dict.fromkeys(self.recipe.tasks, 0.0)
        found: dict[str, list[Tensor]] = {task: [] for task in self.recipe.tasks}
        replaced: list[Tensor] = []
        for step in range(self._eval_steps):
            for batch in self.held_out.make(step):
                for task, (loss, correct) in self._score(model, batch).items():
                    losses[task] += loss.item()
                    found[task].append(correct)
                if "rtd" in batch.targets:
                    replaced.append(batch.targets["rtd"][1] > 0)
        metrics: dict[str, float] = {}
        for task in self.recipe.tasks:
            correct = torch.cat(found[task]).double()
            metrics[f"{task}_loss"] = losses[task] / max(len(correct), 1)
            accuracy = correct.mean()
            if task == "rtd":
                chosen = torch.cat(replaced)
                sides = [side for side in (correct[chosen], correct[~chosen]) if len(side)]
                accuracy = torch.stack([side.mean() for side in sides]).mean()
            metrics[f"{task}_accuracy"] = accuracy.item()
        if "mlm" in self.recipe.tasks:
            metrics["mlm_perplexity"] = math.exp(min(metrics["mlm_loss"], 700))
        return {"loss": sum(metrics[f"{task}_loss"] for task in self.recipe.tasks), **metrics}

    def make_samples(self, model: Any) -> list[str]:
        """Masked texts of the validation set, and the texts with the model's predictions in place of the masks."""
        if "mlm" not in self.recipe.tasks:
            return []
        batch = self.held_out.make(0)[0]
        sequences, (places, _) = batch.sequences, batch.targets["mlm"]
        hidden = encode_sequences(model, sequences)
        decode = self.data.tokenizer.decode
        samples = []
        for row in range(min(SHOWN_TEXTS, len(sequences.tokens))):
            width = sequences.tokens.shape[1]
            inside = (places >= row * width) & (places < (row + 1) * width)
            filled = sequences.tokens[row].clone()
            filled[places[inside] - row * width] = model.predict_tokens(hidden[places[inside]]).argmax(-1)
            texts = [decode(sequences.tokens[row].tolist(), skip_special_tokens=False), decode(filled.tolist())]
            samples.append(" -> ".join(texts))
        return samples

    def companions(self) -> dict[str, bytes]:
        return self.data.tokenizer.to_files()
