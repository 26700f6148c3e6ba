"""The batches of BERT's pre-training tasks, each a pure function of the seed and the step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.train.data.text import Tokenizer
from regard.train.objectives import (
    IGNORED,
    Corpus,
    Example,
    PackedSequences,
    Sequences,
    Stream,
    find_invertible,
    find_words,
    join_examples,
    make_generator,
    make_inversion_pairs,
    make_nsp_pairs,
    make_rng,
    make_sop_pairs,
    make_texts,
    mask_tokens,
    pack_sequences,
    replace_tokens,
)

if TYPE_CHECKING:
    from regard.train.tasks.bert import BertRecipe

# Tasks whose pairs are running text, which is masked as well where "mlm" is one of the tasks.
RUNNING_PAIRS = ("nsp", "sop")
SEQUENCE_TOKENS, PAIR_TOKENS = 2, 3  # special tokens of a sequence with one text, and with two
COUNTED_AT_ONCE = 10_000_000


class BertBatch(NamedTuple):
    """A micro-batch: packed sequences, and for each task what is predicted where.

    targets: for each task the places of hidden states in the flattened rows, and as many targets: tokens ("mlm"),
        0 or 1 ("rtd"), the label of a pair, or the place of the other view ("infonce").
    """

    sequences: PackedSequences
    targets: dict[str, tuple[Tensor, Tensor]]


class _Step(NamedTuple):
    """All sequences of a step, before they are split into micro-batches."""

    sequences: Sequences
    tokens: dict[str, Tensor]  # targets of each token, IGNORED where there is none
    labels: dict[str, Tensor]  # targets of each sequence


class BertBatches:
    """The batches of a recipe's tasks on one corpus.

    Every task has a stream of its own, but "mlm" masks the pairs of "nsp" and "sop" where these are there, as BERT and
    ALBERT do. The sequences of a batch are shared evenly among the streams.

    pairs: encoded pairs of texts with labels, for "entailment".
    """

    def __init__(
        self, recipe: BertRecipe, corpus: Corpus, tokenizer: Tokenizer, pairs: Sequence[Example], name: str = ""
    ) -> None:
        self.recipe, self.corpus, self.tokenizer, self.pairs = recipe, corpus, tokenizer, pairs
        self.name = name
        self.special = sorted(tokenizer.special_ids)
        assert tokenizer.cls_token_id is not None
        assert tokenizer.sep_token_id is not None
        self.separators = tokenizer.cls_token_id, tokenizer.sep_token_id
        running = [task for task in recipe.tasks if task in RUNNING_PAIRS]
        names = [task for task in recipe.tasks if not (task == "mlm" and running)]
        self.streams = {task: Stream(f"{name} {task}".strip(), recipe.seed, self._find_table(task)) for task in names}
        self.shares = share_sequences(recipe.batch_size, names)

    def _find_table(self, task: str) -> Callable[[random.Random], Iterable[tuple[int, ...]]]:
        corpus, length, short = self.corpus, self.recipe.length, self.recipe.short
        match task:
            case "nsp":
                return lambda rng: make_nsp_pairs(corpus, length - PAIR_TOKENS, rng, short=short)
            case "sop":
                return lambda rng: make_sop_pairs(corpus, length - PAIR_TOKENS, rng, short=short)
            case "inversion":
                sentences = map(corpus.get_sentence, range(len(corpus.starts) - 1))
                fitting = find_invertible(sentences, self.starts_word.tolist(), length - PAIR_TOKENS)
                return lambda rng: ((number,) for number in fitting)
            case "entailment":
                return lambda rng: ((number,) for number in range(len(self.pairs)))
            case "infonce":
                last = set((corpus.document_starts[1:] - 1).tolist()) if self.recipe.views == "adjacent" else set()
                return lambda rng: ((number,) for number in range(len(corpus.starts) - 1) if number not in last)
        return lambda rng: make_texts(corpus, length - SEQUENCE_TOKENS)

    @cached_property
    def starts_word(self) -> Tensor:
        """Of every token, whether it begins a word."""
        return torch.from_numpy(self.tokenizer.find_word_starts(np.arange(self.tokenizer.vocab_size)))

    @cached_property
    def frequencies(self) -> Tensor:
        """How often every token occurs in the corpus."""
        tokens, size = self.corpus.tokens, self.tokenizer.vocab_size
        counts = np.zeros(size, dtype=np.int64)
        for start in range(0, len(tokens), COUNTED_AT_ONCE):
            counts += np.bincount(tokens[start : start + COUNTED_AT_ONCE], minlength=size)
        return torch.from_numpy(counts)

    @property
    def per_epoch(self) -> int:
        """Steps of one pass over the examples of the first stream."""
        first = next(iter(self.streams))
        return max(1, self.streams[first].size // self._count_rows(first))

    def _count_rows(self, task: str) -> int:
        """Rows of a stream in a step; a row of "infonce" is two sequences."""
        return self.shares[task] // 2 if task == "infonce" else self.shares[task]

    def describe(self, step: int) -> str:
        """Which examples a step trains on."""
        taken = {task: stream.take(step, self._count_rows(task)) for task, stream in self.streams.items()}
        return "; ".join(
            f"{task}: {', '.join(map(str, rows[:4]))}{', ...' if len(rows) > 4 else ''}" for task, rows in taken.items()
        )

    def make(self, step: int, parts: int | None = None) -> list[BertBatch]:
        """The micro-batches of a step, by default as many as the recipe says."""
        parts = self.recipe.accumulation if parts is None else parts
        whole = self._make_step(step)
        numbers, firsts = whole.sequences.numbers, torch.arange(len(whole.sequences.lengths))
        streams = firsts.split([self.shares[task] for task in self.streams])
        split = [torch.cat([stream.tensor_split(parts)[part] for stream in streams]) for part in range(parts)]
        return [self._pack(whole, chosen, torch.isin(numbers, chosen)) for chosen in split if len(chosen)]

    def _pack(self, whole: _Step, chosen: Tensor, kept: Tensor) -> BertBatch:
        """The micro-batch of some sequences, whose tokens are `kept`."""
        tokens, segments, lengths = whole.sequences
        packed = pack_sequences(
            Sequences(tokens[kept], segments[kept], lengths[chosen]),
            self.recipe.length,
            self.tokenizer.pad_token_id or 0,
        )
        targets = {}
        for task, values in whole.tokens.items():
            values = values[kept]
            targets[task] = packed.places[values != IGNORED], values[values != IGNORED]
        for task, values in whole.labels.items():
            values = values[chosen]
            targets[task] = packed.firsts[values != IGNORED], values[values != IGNORED]
        if (views := targets.get("infonce")) is not None:
            # The second views follow the first ones; their targets are their numbers among all sequences.
            targets["infonce"] = views[0], packed.firsts[views[1]]
        return BertBatch(packed, targets)

    def _make_step(self, step: int) -> _Step:
        joined: list[Sequences] = []
        token_targets: dict[str, list[Tensor]] = {task: [] for task in self.recipe.tasks if task in ("mlm", "rtd")}
        labels: dict[str, list[Tensor]] = {task: [] for task in self.recipe.tasks if task not in ("mlm", "rtd")}
        for task, stream in self.streams.items():
            examples = self._make_examples(task, stream.take(step, self._count_rows(task)), step)
            sequences = join_examples(examples, *self.separators)
            sequences, found = self._corrupt(task, sequences, step)
            for name, collected in token_targets.items():
                collected.append(found.get(name, torch.full_like(sequences.tokens, IGNORED)))
            before = sum(len(each.lengths) for each in joined)
            for name, collected in labels.items():
                own = _number_views(len(examples), before) if task == "infonce" else [each.label for each in examples]
                collected.append(torch.tensor(own if name == task else [IGNORED] * len(examples)))
            joined.append(sequences)
        return _Step(
            Sequences(*map(torch.cat, zip(*joined, strict=True))),
            {task: torch.cat(parts) for task, parts in token_targets.items()},
            {task: torch.cat(parts) for task, parts in labels.items()},
        )

    def _make_examples(self, task: str, rows: list[tuple[int, ...]], step: int) -> list[Example]:
        corpus = self.corpus
        if task in RUNNING_PAIRS:
            return [
                Example(corpus.tokens[a:b].tolist(), corpus.tokens[c:d].tolist(), label) for a, b, c, d, label in rows
            ]
        if task in ("mlm", "rtd"):
            return [Example(corpus.tokens[start:end].tolist()) for start, end in rows]
        if task == "entailment":
            return [self.pairs[number] for (number,) in rows]
        sentences = [corpus.get_sentence(number) for (number,) in rows]
        if task == "inversion":
            rng = make_rng(self.recipe.seed, f"{self.name} words", step)
            return [Example(*pair) for pair in make_inversion_pairs(sentences, self.starts_word.tolist(), rng)]
        others = sentences
        if self.recipe.views == "adjacent":
            others = [corpus.get_sentence(number + 1) for (number,) in rows]
        return [Example(tokens[: self.recipe.length - SEQUENCE_TOKENS]) for tokens in (*sentences, *others)]

    def _corrupt(self, task: str, sequences: Sequences, step: int) -> tuple[Sequences, dict[str, Tensor]]:
        """Mask or replace tokens, as the task needs it; and the targets of its tokens."""
        recipe, generator = self.recipe, make_generator(self.recipe.seed, f"{self.name} tokens of {task}", step)
        if task == "rtd":
            tokens, targets = replace_tokens(
                sequences.tokens,
                generator=generator,
                frequencies=self.frequencies,
                special_tokens=self.special,
                share=recipe.share,
            )
        elif "mlm" in recipe.tasks and task in ("mlm", *RUNNING_PAIRS):
            assert self.tokenizer.mask_token_id is not None
            tokens, targets = mask_tokens(
                sequences.tokens,
                generator=generator,
                vocab_size=self.tokenizer.vocab_size,
                mask_token=self.tokenizer.mask_token_id,
                special_tokens=self.special,
                share=recipe.share,
                words=find_words(sequences.tokens, self.starts_word) if recipe.whole_words else None,
                exact=recipe.max_predictions is not None,
                max_predictions=recipe.max_predictions,
                sequences=sequences.numbers,
            )
        else:
            return sequences, {}
        return sequences._replace(tokens=tokens), {"rtd" if task == "rtd" else "mlm": targets}


def share_sequences(batch_size: int, streams: Sequence[str]) -> dict[str, int]:
    """How many sequences of a batch each stream has; an even number where they come in twos.

    >>> share_sequences(32, ["nsp", "inversion", "rtd"])
    {'nsp': 11, 'inversion': 10, 'rtd': 10}
    """
    shares = {}
    for index, task in enumerate(streams):
        share = batch_size // len(streams) + (index < batch_size % len(streams))
        shares[task] = share - share % 2 if task in ("inversion", "infonce") else share
    return shares


def _number_views(sequences: int, before: int) -> list[int]:
    """For the first view of each text the number of the second among all sequences; nothing for the second ones."""
    half = sequences // 2
    return [before + half + number for number in range(half)] + [IGNORED] * half
