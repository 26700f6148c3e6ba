"""Errata of the solutions to Prince, Understanding Deep Learning, 12.6 and 12.7: BERT's tasks and the cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from regard.book.errata.erratum import Trial, erratum
from regard.book.errata.single_head import attend_rows
from regard.patterns import Causal

DOUBLE = torch.float64


@erratum(
    "udl-12.6:inference-labels",
    "Prince 12.6, solution, second proposed task",
    "incomplete",
    claim=(
        "Logical-inference verification is proposed as a pre-training task, as if its labels came from the text itself."
    ),
    correction=(
        "Whether one sentence follows from another is not in the text: the same pair can carry either label. "
        "Labels that a text"
        " gives are those of its order (inversion, sentence order) and of its own words (masked or replaced tokens)."
    ),
)
def _inference_labels() -> Iterator[Trial]:
    # A label comes from the text if it is a function of it. Order is; truth is an assignment chosen from outside.
    for sentences in (2, 3, 4):
        text = tuple(range(sentences))
        pairs = list(itertools.permutations(text, 2))
        by_order = {pair: pair[0] < pair[1] for pair in pairs}
        labelings = list(itertools.product((False, True), repeat=len(pairs)))
        determined = len([each for each in labelings if dict(zip(pairs, each, strict=True)) == by_order])
        case = f"labelings of all pairs of {sentences} sentences that the text allows: (order, inference)"
        yield Trial(case, (1, 1), (determined, len(labelings)), (1, 2 ** len(pairs)))


@erratum(
    "udl-12.6:vocabulary",
    "Prince 12.6",
    "garbled",
    claim="BERT's vocabulary has 30,000 tokens.",
    correction=(
        "The released uncased model has 30,522 tokens: 109,482,240 parameters in the base model, which 30,000 "
        "do not give."
    ),
)
def _vocabulary() -> Iterator[Trial]:
    from regard.models import Bert, BertConfig

    config = BertConfig()
    with torch.device("meta"):
        model = Bert(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # Solve for the vocabulary: every token is one row of the embedding.
    rows = (109_482_240 - (parameters - config.vocab_size * config.dim)) // config.dim
    yield Trial("rows of the embedding in 109,482,240 parameters", 30_000, rows, 30_522)


@erratum(
    "udl-12.7:new-query",
    "Prince 12.7, solution",
    "wrong",
    claim=(
        "A new token's key is multiplied with the queries of all tokens, and the outputs of all tokens are "
        "computed again."
    ),
    correction=(
        "In masked attention the new token's query meets all keys; that is one new row. The outputs of the tokens "
        "before it"
        " do not change in a single bit."
    ),
)
def _new_query() -> Iterator[Trial]:
    for tokens in (1, 2, 5):
        query, key, value = (torch.randn(tokens + 1, 4, dtype=DOUBLE) for _ in range(3))
        before = attend_rows(query[:-1], key[:-1], value[:-1], scale=0.5, pattern=Causal())
        after = attend_rows(query, key, value, scale=0.5, pattern=Causal())
        changed = int((before != after[:-1]).any(1).sum())
        yield Trial(f"a new token after N = {tokens}: outputs that change", tokens, changed, 0)
