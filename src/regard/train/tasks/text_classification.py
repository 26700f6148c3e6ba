"""Classification of texts: a head on a BERT, from scratch or on pre-trained weights."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard import downloads
from regard.errors import ConfigError, InputError
from regard.models.bert import Bert
from regard.models.bert_heads import BertForClassification, BertForClassificationConfig
from regard.models.initialization import init_weights
from regard.models.pretrained import Pretrained
from regard.models.validation import check_sizes
from regard.train.data import text
from regard.train.loop import hash_state_dict
from regard.train.objectives import make_generator
from regard.train.recipe import Recipe
from regard.train.task import ORDER, Task, split_rows
from regard.train.tasks.bert import initial_deviation

SPECIAL_TOKENS = 2  # [CLS] and [SEP]
# Changes to the defaults: Brown has 500 texts of 2,000 words.
FOR_DATA: dict[str, dict[str, Any]] = {"brown": {"passages": 16}}


@dataclass(frozen=True)
class TextClassificationRecipe(Recipe):
    """Train a BERT to classify texts; the defaults are for BBC news, from scratch.

    With `weights` the published rates for fine-tuning are 2e-5 to 5e-5, for 2 to 4 epochs (Devlin et al. 2019,
    appendix A.3); `TextClassificationRecipe.on(data, weights=...)` chooses these.

    Attributes:
        data: "bbc" (5 classes), "brown" (15 genres), or the path of your own labelled texts.
        weights: a folder of a BERT with its tokenizer, as `regard train bert` and Hugging Face write it, or the name of
            a downloaded one, "minilm"; None for random weights. The sizes of the model are then those of the weights.
        length: of a passage in tokens, special ones included.
        passages: passages of a text that are used, from its beginning; each is an example to train on, and a text is
            classified by the mean of their log-probabilities.
        tokenizer, vocab_size: "wordpiece" trained on the training texts, or the path of a tokenizer; without `weights`.
        dim, layers, heads, hidden_dim: of the model; without `weights`.
        pooling: what the head reads: the "mean" of the tokens, the "first" token, or the "pooled" one.
        held_out: the share of the texts that are evaluated, of every class.
    """

    kind: ClassVar[str] = "classify"

    data: str = "bbc"
    weights: str | None = None
    epochs: int = 5
    learning_rate: float = 5e-4
    beta2: float = 0.999
    weight_decay: float = 0.01
    schedule: Literal["cosine", "linear", "constant", "noam"] = "linear"
    warmup_steps: float = 0.1
    length: int = 128
    passages: int = 1
    tokenizer: str = "wordpiece"
    vocab_size: int = 8000
    dim: int = 128
    layers: int = 2
    heads: int = 2
    hidden_dim: int | None = None
    dropout: float = 0.1
    pooling: Literal["mean", "first", "pooled"] = "mean"
    held_out: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self, "passages")
        if not 0 < self.held_out < 1 or self.length <= SPECIAL_TOKENS:
            raise ConfigError(
                "Texts cannot be classified so.",
                asked=f"held_out={self.held_out}, length={self.length}",
                because="some texts are evaluated and some trained on, and a text has two special tokens",
                instead="held_out=0.2, length=128",
            )
        self.config(8, ("a", "b"))  # raises for inconsistent sizes

    @classmethod
    def on(cls, data: str, **changes: Any) -> Self:
        """A recipe for these texts; with `weights`, the rate and epochs of fine-tuning.

        >>> from regard.train import TextClassificationRecipe
        >>> recipe = TextClassificationRecipe.on("bbc", weights="minilm")
        >>> recipe.learning_rate, recipe.epochs
        (5e-05, 3)
        """
        fields = dict(FOR_DATA.get(data, {}))
        tuned = {"learning_rate": 5e-5, "epochs": 3} if changes.get("weights") else {}
        return cls.from_dict({"data": data, **fields, **tuned, **changes})

    def config(self, vocab_size: int, classes: tuple[str, ...]) -> BertForClassificationConfig:
        """The model's own configuration, without `weights`."""
        names = ("dim", "layers", "heads", "hidden_dim", "dropout", "pooling")
        return BertForClassificationConfig(
            vocab_size=vocab_size,
            context_length=self.length,
            pooler=self.pooling == "pooled",
            classes=classes,
            **{name: getattr(self, name) for name in names},
        )

    def make_task(self, data: Any = None) -> TextClassificationTask:
        """The classification of the recipe's texts, of the given path, or of the given `LabelledTexts`."""
        labelled = data
        if not isinstance(data, text.LabelledTexts):
            labelled = text.load_labelled(self.data if data is None else data)
        return TextClassificationTask(self, labelled)


class LabelledBatch(NamedTuple):
    """Passages padded on the right, `(passage, token)`, their lengths, labels, and texts."""

    tokens: Tensor
    lengths: Tensor
    labels: Tensor
    texts: Tensor


class TextClassificationTask(Task[TextClassificationRecipe]):
    """Cross-entropy with label smoothing, and accuracy on held-out texts."""

    metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True

    def __init__(self, recipe: TextClassificationRecipe, data: text.LabelledTexts) -> None:
        super().__init__(recipe, data)
        parts = data.split(validation=recipe.held_out, test=0)
        self.start: Bert | None = None
        self.length = recipe.length
        if recipe.weights is None:
            self.tokenizer = text.build_tokenizer(recipe.tokenizer, parts.train.texts, recipe.vocab_size)
        else:
            weights = find_weights(recipe.weights)
            self.start, self.tokenizer = Bert.from_pretrained(weights), text.read_tokenizer(weights)
            self.length = min(self.length, self.start.config.context_length)
        self.train, self.held_out = (self._encode(part) for part in (parts.train, parts.validation))
        if recipe.batch_size > len(self.train.labels):
            raise InputError(
                "The batch is larger than the training set.",
                asked=f"batch_size={recipe.batch_size}",
                found=f"{len(self.train.labels)} training passages",
                because="an epoch consists of whole batches",
                instead=f"batch_size={len(self.train.labels)} or less",
            )

    def _encode(self, part: text.LabelledTexts) -> LabelledBatch:
        """The passages of all texts of a part, with special tokens and padded."""
        tokenizer = self.tokenizer
        first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
        if first is None or last is None or tokenizer.pad_token_id is None:
            raise ConfigError(
                "The tokenizer has no special tokens for BERT.",
                asked=f"tokenizer={self.recipe.tokenizer!r}, weights={self.recipe.weights!r}",
                because="a text is [CLS] tokens [SEP], padded with [PAD]",
                instead='tokenizer="wordpiece"',
            )
        cut, rows, texts = self.length - SPECIAL_TOKENS, [], []
        for number, tokens in enumerate(tokenizer.encode_batch(part.texts)):
            for start in range(0, max(len(tokens), 1), cut)[: self.recipe.passages]:
                rows.append(torch.tensor([first, *tokens[start : start + cut].tolist(), last]))
                texts.append(number)
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
        lengths = torch.tensor([len(row) for row in rows])
        return LabelledBatch(tokens, lengths, torch.tensor(part.labels)[texts], torch.tensor(texts))

    @property
    def digest(self) -> str:
        digest = hashlib.sha256((self.data.digest + self.tokenizer.digest).encode())
        if self.start is not None:
            digest.update(hash_state_dict(self.start).encode())
        return digest.hexdigest()

    @property
    def steps_per_epoch(self) -> int:
        return len(self.train.labels) // self.recipe.batch_size

    def _choose_passages(self, step: int) -> Tensor:
        epoch, inside = divmod(step, self.steps_per_epoch)
        order = torch.randperm(len(self.train.labels), generator=make_generator(self.recipe.seed, ORDER, epoch))
        return order[inside * self.recipe.batch_size : (inside + 1) * self.recipe.batch_size]

    def make_batches(self, step: int) -> list[LabelledBatch]:
        return [take_passages(self.train, part) for part in split_rows(self._choose_passages(step), self.micro_batches)]

    def describe_batch(self, step: int) -> str:
        chosen = self._choose_passages(step).tolist()
        return f"training passages {', '.join(map(str, chosen[:8]))}{', ...' if len(chosen) > 8 else ''}"

    def count_units(self, batch: LabelledBatch) -> int:
        return int(batch.lengths.sum())

    def build_model(self) -> BertForClassification:
        recipe = self.recipe
        if self.start is not None:
            return BertForClassification.from_bert(
                self.start, self.data.names, pooling=recipe.pooling, dropout=recipe.dropout
            )
        model = BertForClassification(recipe.config(self.tokenizer.vocab_size, self.data.names))
        deviation = initial_deviation(recipe.dim)
        init_weights(model.bert.blocks, lambda weight: nn.init.normal_(weight, std=deviation), projections=True)
        return model

    def count_terms(self, batch: LabelledBatch) -> dict[str, int]:
        return {"loss": len(batch.labels)}

    def compute_terms(self, model: nn.Module, batch: LabelledBatch) -> dict[str, Tensor]:
        logits = model(batch.tokens, lengths=batch.lengths)
        smoothing = self.recipe.label_smoothing
        return {"loss": functional.cross_entropy(logits, batch.labels, label_smoothing=smoothing, reduction="sum")}

    def evaluate(self, model: Pretrained) -> dict[str, float]:
        """Accuracy and loss on the held-out texts, taken in the order of their lengths."""
        part = self.held_out
        count = int(part.texts[-1]) + 1
        labels = torch.zeros(count, dtype=torch.long).index_copy(0, part.texts, part.labels)
        scores = torch.zeros(count, len(self.data.names), dtype=torch.float64)
        for chosen in part.lengths.argsort(stable=True).split(self.recipe.batch_size):
            batch = take_passages(part, chosen)
            logits = model(batch.tokens, lengths=batch.lengths)
            scores.index_add_(0, batch.texts, functional.log_softmax(logits.double(), -1))
        means = functional.log_softmax(scores / part.texts.bincount()[:, None], -1)
        accuracy = (means.argmax(-1) == labels).double().mean()
        return {"accuracy": accuracy.item(), "loss": functional.nll_loss(means, labels).item()}

    def companions(self) -> dict[str, bytes]:
        return self.tokenizer.to_files()


def take_passages(passages: LabelledBatch, chosen: Tensor) -> LabelledBatch:
    """Some of the passages, with no more columns than the longest of them needs."""
    lengths = passages.lengths[chosen]
    return LabelledBatch(
        passages.tokens[chosen, : int(lengths.max())], lengths, passages.labels[chosen], passages.texts[chosen]
    )


def find_weights(source: str) -> Path:
    """The folder of pre-trained weights, by its path or by the name of a download."""
    path = Path(source).expanduser()
    if path.exists():
        # The folder of a run has its best model inside.
        return next((path / name for name in ("best", "model") if (path / name / "config.json").is_file()), path)
    if source in downloads.WEIGHTS:
        if (found := downloads.find(source)) is not None:
            return found
        raise InputError(
            f"{source} is not downloaded.",
            asked=f"weights={source!r}",
            because="downloads only start on an explicit command",
            instead=f"python -m regard.downloads {source}",
        )
    raise InputError(
        f"There are no weights {source!r}.",
        asked=f"weights={source!r}",
        found=f"no such folder in {Path.cwd()}",
        because=f"it is neither a path nor one of {', '.join(downloads.WEIGHTS)}",
        instead='weights="minilm", or a folder of `regard train bert`',
    )
