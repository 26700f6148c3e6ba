"""Descriptions of the parameters of a case: what a report shows beside `kind=one key head`.

`WORDS` has an entry for each law and each parameter of its cases: the name that reports use and what it means; for a
parameter that is a word, also what each value means. `describe` gives the names and meanings of one case. A test runs
over the cases of all laws and fails for a parameter or value without an explanation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from regard.laws.law import Case


@dataclass(frozen=True)
class Term:
    """A parameter: its name in reports, its meaning, and the meaning of each value that is not a number."""

    name: str
    meaning: str
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Explained:
    """One parameter of one case: `name=value`, and what it means."""

    name: str
    value: Any
    meaning: str


NO_MASK = {"none": "no mask"}
PAIR_MASKS = {
    **NO_MASK,
    "keys": "a mask of keys, (batch, 1, 1, key)",
    "shared": "one mask of query-key pairs for the whole batch, (1, 1, query, key)",
    "pairs": "a mask of query-key pairs for each row of the batch, (batch, 1, query, key)",
    "heads": "a mask of query-key pairs for each row and head, (batch, head, query, key)",
    "plain": "a mask of query-key pairs without batch and head axes, (query, key)",
}
DRAWN_MASKS = {
    **NO_MASK,
    "keys": "one mask of keys for the whole batch, (1, 1, 1, key)",
    "rows of keys": "a mask of keys for each row of the batch, (batch, 1, 1, key)",
    "pairs": "a mask of query-key pairs, (query, key)",
    "pairs of rows": "a mask of query-key pairs for each row of the batch, (batch, 1, query, key)",
    "pairs of heads": "a mask of query-key pairs for each row and head, (batch, head, query, key)",
}
PADDING = {
    **NO_MASK,
    "right": "padding at the end of rows, of unequal lengths",
    "left": "padding at the start of rows, of unequal lengths",
    "interior": "padding in the middle of rows",
    "random": "padding at random positions",
    "row": "padding at the end, and a last row that is all padding",
    "same": "the same padding at the end of every row",
    "single": "one real token in each row, each at another position",
    "ones": "a mask that hides nothing",
    "holes": "every third token of the last row is padding",
}
PRECISIONS = {"float16": "run in float16", "bfloat16": "run in bfloat16"}
SPLITS = {
    "whole": "the whole sequence in one call",
    "ones": "decoded one token at a time",
    "twos": "decoded two tokens at a time",
    "threes": "decoded three tokens at a time",
    "halves": "two chunks of about equal length",
    "first": "one token first, then the rest",
    "last": "all but one token first, then the last",
    "prefill": "a prefill of all but four tokens, then one token at a time",
    "random": "chunks of random length",
    "from 250": "a prefill of 250 tokens, twelve tokens one at a time, then the rest",
}
PATHS = {
    "with gradients": "run with autograd enabled",
    "without gradients": "run under torch.no_grad()",
    "in training": "run in training mode with every dropout at 0",
    "training without dropout": "run in training mode with every dropout at 0",
    "inference mode": "run under torch.inference_mode()",
    "torch's plain kernel": "torch's fused kernels and its encoder fast path switched off",
    "fast path off": "torch's encoder fast path switched off",
    "compiled": "compiled by torch.compile",
    "a mask of ones": "a mask that hides nothing, against no mask",
    "additive mask": "the mask as numbers that are added to the scores, 0 and -inf",
    "attn_mask": "the padding given as a mask of pairs, attn_mask",
    "strided mask": "the mask in memory that is not contiguous",
    "static cache": "through a cache of fixed size",
    "channels last": "the input in channels_last memory format",
    "the definition": "the reference backend, which follows the definition",
    "lengths of the rows": "the padding given as lengths",
    "the sum over heads": "computed head by head and summed",
    "place by place": "computed position by position",
    "pattern and positions": "the padding given as a pattern and position numbers",
    "the last place alone": "the logits of the last position only",
    "bfloat16": "run in bfloat16, against its own precision",
    "float16": "run in float16, against its own precision",
    "transposed": "the input with batch and token axes swapped in memory",
    "sliced": "the input as every second channel of a wider tensor",
    "offset": "the input as the inside of a longer tensor",
    "backwards": "the input with token and channel axes swapped in memory",
    "expanded": "one row expanded to the batch without a copy",
    "expanded heads": "one head expanded to all without a copy",
    "expanded rows": "one row expanded to the batch without a copy",
    "tokens first": "tensors laid out (batch, token, head, dim) in memory and transposed",
    "one projection": "query, key and value as slices of one projection",
    "padded memory": "tensors as the inside of larger ones",
    "the formula": "compared with softmax(scale Q K^T) V, which it computes on a few tokens",
    "the formula: one head": "compared with the formula, with one head",
    "the formula: five heads": "compared with the formula, with five heads",
    "the formula: wide values": "compared with the formula, with values wider than keys",
    "the formula: narrow values": "compared with the formula, with values narrower than keys",
    "the formula: larger": "compared with the formula, with heads twice as wide",
    "the formula: 80 channels": "compared with the formula, with heads of 80 channels",
    "the formula: 128 channels": "compared with the formula, with heads of 128 channels",
    "the formula: more rows": "compared with the formula, with a batch of seven",
    "the formula: bfloat16": "compared with the formula, in bfloat16",
    "the formula: float16": "compared with the formula, in float16",
    "the formula: no number in a query": "compared with the formula, with one query NaN",
}
# Names of code paths that depend on the subject: an argument of the call, or an attribute of a module.
PATH_FORMS = (
    (r"mask of (\(.*\))", r"a mask of shape \1, against the same mask written out in full"),
    (r"(\w+) turned over", r"the attribute \1 of the module negated"),
    (r"(\w+=.*)", r"called with \1"),
    (r"(.*)", r"another code path of its library: \1"),
)

BATCH = Term("batch", "batch size")
TOKENS = Term("tokens", "sequence length")
QUERIES = Term("queries", "query length")
KEYS = Term("keys", "key length")
HEADS = {"heads": Term("heads", "query heads"), "kv_heads": Term("kv_heads", "key and value heads")}
PATH = Term("path", "code path that is run", PATHS)
# Variants of a subject that any law may ask for.
VARIANTS = {
    "dtype": Term("precision", "half precision, in which the subject is run", PRECISIONS),
    "num_heads": Term("num_heads", "heads of the operator's inputs"),
    "head_dim": Term("head_dim", "channels of each head of the operator's inputs"),
}
SIZES = {"batch": BATCH, "tokens": TOKENS, "queries": QUERIES, "keys": KEYS, **HEADS, **VARIANTS}


def _make_mask_term(values: Mapping[str, str]) -> Term:
    return Term("mask", "what is hidden", values)


HIDDEN = Term("hidden", "padded tokens in the first row, fewer in others")

WORDS: dict[str, dict[str, Term]] = {
    "causality": {
        "kept": Term("prefix", "tokens before those that are replaced"),
        "content": Term("content", "what the later tokens contain", {
            "other": "later tokens replaced by other random ones",
            "large": "later tokens replaced by ones 30 times as large",
            "blank": "later tokens zeros, or the lowest token id, then replaced",
            "repeated": "later tokens copies of the last one before, then replaced",
            "huge values": "later values replaced by ones 1e25 times as large",
        }),
        "mask": _make_mask_term({**PADDING, "pairs": PAIR_MASKS["pairs"]}),
        "path": PATH,
    },
    "alignment": {
        "last_queries": Term("last_queries", "how many of the queries are given alone"),
        "mask": _make_mask_term({**PAIR_MASKS, "causal": "an explicit causal mask of pairs"}),
    },
    "cache": {
        "split": Term("chunks", "how the sequence is split", SPLITS),
        "mask": _make_mask_term(PADDING),
        "used": Term("decoded_before", "whether another text was decoded before", {
            "True": "another text was decoded with this instance before",
            "False": "nothing was decoded before",
        }),
        "try": Term("repetition", "number of the random split"),
    },
    "padding": {
        "comparison": Term("comparison", "what is compared", {
            "content": "hidden tokens get other content; real outputs must stay",
            "removal": "hidden tokens are deleted; real outputs must stay",
            "gradient": "no gradient may flow from real outputs to hidden tokens",
            "ones": "a mask that hides nothing, against no mask",
            "pairs": "keys and values hidden from a query are replaced or deleted",
        }),
        "side": Term("padding", "where the padding is", PADDING),
        "hidden": HIDDEN,
        "form": Term("mask", "shape of the mask", PAIR_MASKS),
    },
    "masked-values": {
        "comparison": Term("comparison", "what is replaced", {
            "keys": "keys that are hidden from every query are replaced",
            "some": "one key is replaced; queries from which it is hidden are compared",
            "tokens": "padded tokens are replaced",
            "future": "later tokens of a causal subject are replaced",
        }),
        "form": Term("mask", "shape of the mask", PAIR_MASKS),
        "poison": Term("content", "what hidden entries are set to", {
            "nan": "set to NaN", "inf": "set to infinity", "-inf": "set to minus infinity",
            "1e30": "set to 1e30", "-1e30": "set to -1e30",
        }),
        "what": Term("replaced", "which tensors are replaced", {
            "both": "keys and values", "keys": "keys alone", "values": "values alone",
        }),
        "side": Term("padding", "where the padding is", PADDING),
        "hidden": HIDDEN,
    },
    "empty-rows": {
        "comparison": Term("comparison", "how a query comes to see nothing", {
            "rows": "a mask hides every key from some queries",
            "longer": "a causal operator with more queries than keys",
            "left": "left padding of a causal operator",
            "paths": "the code paths of the operator are compared on a row that is all padding",
            "blocks": "whole blocks of keys are hidden from queries that see other keys",
            "layer": "padding leaves a row or its first tokens without a key",
        }),
        "form": Term("mask", "which queries see nothing", {
            "shared": f"some queries; {PAIR_MASKS['shared']}",
            "pairs": f"some queries; {PAIR_MASKS['pairs']}",
            "heads": f"some queries; {PAIR_MASKS['heads']}",
            "row": "every query of one row of the batch",
            "head": "every query of one head",
            "all": "every query",
            "band": "none: each sees the keys next to it only",
            "late": "none: each sees the keys next to it and the last two",
            "early": "none: each sees the keys next to it and the first two",
        }),
        "side": Term("padding", "where the padding is", {
            "row": "the last row of the batch is all padding", "left": "padding at the start of every row",
        }),
        "hidden": Term("hidden", "padded tokens in a row"),
    },
    "row-stochasticity": {
        "mask": _make_mask_term({**PADDING, **DRAWN_MASKS}),
        "by": Term("method", "how weights are observed", {
            "weights": "weights as they are returned, or captured while it runs",
            "constant tokens": "equal tokens must give equal outputs",
        }),
    },
    "support": {"mask": _make_mask_term({**PADDING, **DRAWN_MASKS})},
    "permutation": {
        "what": Term("permuted", "which tensors are permuted", {
            "keys": "keys and values together", "queries": "queries", "tokens": "tokens of the input",
        }),
        "mask": _make_mask_term({**PAIR_MASKS, "tokens": "padding at random positions"}),
    },
    "batch-independence": {
        "comparison": Term("comparison", "what is compared", {
            "alone": "each row alone, against the row in its batch",
            "others": "the other rows of the batch get other content or masks",
            "order": "the rows of the batch are permuted",
            "expanded": "one row alone, against the row expanded to a batch",
            "between": "the same call before and after calls with other batches",
            "threads": "two threads call the same instance at once",
            "operator": "each row alone, against the row in its batch, with unequal query and key lengths",
        }),
        "mask": _make_mask_term({**PADDING, **PAIR_MASKS}),
    },
    "paths": {
        "path": PATH,
        "mask": _make_mask_term({
            **PADDING,
            "random": "a random mask of pairs",
            "banded": "a mask that keeps keys within two positions of the query",
            "late": "a mask that hides the first keys",
            "early": "a mask that hides the last keys",
            "blocks": "a mask that hides every second block of 64 keys",
        }),
        "poison": Term("nan", "whether a token is NaN", {"True": "one token is NaN", "False": "no token is NaN"}),
        "content": Term("content", "what the tokens contain", {
            "two groups": "two tokens, each repeated over half of the sequence, so that all keys weigh about the same",
        }),
    },
    "determinism": {
        "keys": Term("keys", "key length, 0 for as many keys as tokens"),
        "dropout": Term("dropout", "the dropout that evaluation mode must ignore", {
            "as it is": "dropout as configured", "raised": "every dropout of a copy set to 0.5, in evaluation mode",
        }),
        "mask": _make_mask_term(
            {**PADDING, **PAIR_MASKS, "empty": "a mask of pairs that hides every key from one query"}
        ),
        "gradients": Term("gradients", "autograd", {"True": "autograd enabled", "False": "under torch.no_grad()"}),
        "memory": Term("memory", "content of uninitialised memory", {
            "as it is": "uninitialised memory as it is", "filled": "uninitialised memory filled with NaN by torch",
        }),
    },
    "gradients": {
        "keys": Term("keys", "key length, of an operator"),
        "mask": _make_mask_term({
            **NO_MASK,
            "padding": "padding inside rows and at the end",
            "random": "a random mask of pairs",
        }),
        "kind": Term("variant", "which gradient, of what input", {
            "all": "gradients of all inputs and parameters",
            "each": "gradients of query, key and value, each required alone as well",
            "strided": "inputs that are not contiguous in memory",
            "bias": "gradient of an additive mask",
            "constant": "an output gradient of ones, expanded from one number",
            "one key head": "one key and value head shared by all query heads (multi-query attention)",
            "half the key heads": "two key and value heads for four query heads (grouped-query attention)",
        }),
    },
    "reference": {
        "heads": Term("heads", "heads of queries, keys and values"),
        "hidden": HIDDEN,
        "mask": _make_mask_term({**PADDING, **PAIR_MASKS}),
        "compare": Term("compared", "what is compared", {
            "outputs": "the outputs of target and reference",
            "gradients": "the gradients of both with respect to their inputs",
        }),
    },
    "scale": {
        "dim": Term("dim", "head dim of queries and keys"),
        "value_dim": Term("value_dim", "head dim of values"),
        "factor": Term("factor", "what queries are multiplied by"),
    },
    "relative-position": {
        "by": Term("method", "how positions are moved", {
            "shift": "position numbers are raised", "padding": "left padding moves the tokens",
            "weights": "weights of equal content at equal distance are compared",
            "own place": "a token's score with itself, at every position",
        }),
        "shift": Term("shift", "by how many positions"),
    },
    "head-groups": {"mask": _make_mask_term(DRAWN_MASKS)},
    "range": {
        "kind": Term("variant", "which numbers are extreme", {
            "large": "large scores, or large inputs of a layer",
            "negative": "large scores, all of them negative",
            "shift": "a constant added to all scores of a query",
            "large, masked": "large scores under a mask",
            "negative, masked": "large negative scores under a mask",
            "hidden": "large content in padded tokens",
            "later": "large content in later tokens, which a causal subject does not see",
            "half": "half precision, against float64",
            "half, masked": "half precision under a mask, against float64",
            "half, large": "large scores in half precision, against float64",
            "half, many keys": "half precision with many keys of about equal weight, against its own precision",
            "half, overflow": "products beyond the largest float16 before the scale",
        }),
        "size": Term("size", "how large the numbers are"),
        "precision": Term("precision", "precision of the run", PRECISIONS),
    },
    "cache-algebra": {
        "kept": Term("crop_to", "tokens that the cache is cropped to, 0 for no crop"),
        "split": Term("chunks", "how the cache is filled", SPLITS),
        "order": Term("reorder", "how the rows of the cache are reordered", {
            "none": "rows are not reordered",
            "turn": "rows 0, 1, 2 become 1, 2, 0", "swap": "rows 1 and 2 change places",
            "twice": "row 0 is taken twice", "fewer": "two of three rows are kept",
            "one": "one row is kept", "more": "three rows become four",
        }),
    },
    "cost": {
        "tokens": Term("tokens", "sequence length, 0 for several"),
        "kind": Term("count", "which operation counts are compared", {
            "declared": "the count, against the declared one",
            "growth": "the counts of several lengths, against the declared power",
            "batch": "the counts of three batch sizes, which lie on a line",
            "content": "the counts of two inputs of one shape",
            "heads": "the counts of 2, 4 and 6 heads, which lie on a line",
        }),
    },
    "table-precision": {
        "precision": Term("precision", "precision of the run", PRECISIONS),
        "size": Term("size", "factor of the queries, or of the input"),
    },
    "jacobian": {
        "length": Term("norm", "norm of the keys"),
        "mask": _make_mask_term({**NO_MASK, "pairs": "a mask of query-key pairs, (query, key)"}),
    },
    "statelessness": {
        "between": Term("in_between", "what happens between two equal calls", {
            "other": "a call with other content", "longer": "a call with more tokens",
            "shorter": "a call with fewer tokens", "same start": "a call with the same first token",
            "same end": "a call with the same last token", "batch": "a call with more rows",
            "one row": "a call with one row", "masked": "a call with a mask",
            "other mask": "a call with another mask", "unmasked": "a call without a mask",
            "large": "a call with numbers 100 times as large",
            "memory": "a call with other content in the same tensor",
            "backward": "a backward pass", "modes": "training mode and back",
            "refused": "a call that raises", "cached": "a text decoded with a cache",
            "many": "24 calls of many lengths",
            "thread": "a second thread calls in the middle of the first call",
            "threads": "two threads call at once",
            "conversations": "two texts decoded in turn, each with its own cache",
            "other queries": "a call with another query length",
            "other masks of pairs": "a call with another mask of pairs",
        }),
        "mask": _make_mask_term({**PADDING, **PAIR_MASKS}),
        "before": Term("queries_before", "query length of the call before"),
    },
    "shape": {
        "mask": _make_mask_term(PADDING),
        "form": Term("mask", "shape of the mask", {**PAIR_MASKS, "empty": "a mask that hides every key"}),
        "hidden": HIDDEN,
        "gradients": Term("gradients", "autograd", {"True": "autograd enabled", "False": "under torch.no_grad()"}),
    },
}  # fmt: skip


def describe(slug: str, case: Case) -> list[Explained]:
    """Each parameter of a case under its name in reports, with its value and what it means."""
    described = []
    for key, value in case.items():
        word = find_term(slug, key)
        if word is None:
            described.append(Explained(key, value, ""))
        else:
            described.append(Explained(word.name, value, explain_value(word, value) or word.meaning))
    return described


def find_term(slug: str, key: str) -> Term | None:
    """The entry of a law's parameter; None if there is none."""
    return WORDS.get(slug, {}).get(key) or SIZES.get(key)


def explain_value(word: Term, value: Any) -> str:
    """What a value means; empty for a number, which the word itself explains, and for a value without an entry."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return ""
    known = word.values.get(str(value), "")
    if known or word.values is not PATHS:
        return known
    for form, meaning in PATH_FORMS:
        if re.fullmatch(form, str(value)):
            return re.sub(form, meaning, str(value), count=1)
    return ""
