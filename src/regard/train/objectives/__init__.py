"""Self-supervised objectives of text encoders, as pure functions of their inputs and a random generator."""

from regard.train.objectives.contrast import info_nce
from regard.train.objectives.corpus import Corpus
from regard.train.objectives.inversion import find_invertible, invert_words, make_inversion_pairs, shuffle_words
from regard.train.objectives.masking import IGNORED, Masked, count_predictions, find_words, mask_tokens
from regard.train.objectives.pairs import PairSpan, make_nsp_pairs, make_sop_pairs, make_texts, truncate_pair
from regard.train.objectives.replaced import replace_tokens
from regard.train.objectives.sequences import Example, PackedSequences, Sequences, join_examples, pack_sequences
from regard.train.objectives.streams import Stream, make_generator, make_rng

__all__ = [
    "IGNORED",
    "Corpus",
    "Example",
    "Masked",
    "PackedSequences",
    "PairSpan",
    "Sequences",
    "Stream",
    "count_predictions",
    "find_invertible",
    "find_words",
    "info_nce",
    "invert_words",
    "join_examples",
    "make_generator",
    "make_inversion_pairs",
    "make_nsp_pairs",
    "make_rng",
    "make_sop_pairs",
    "make_texts",
    "mask_tokens",
    "pack_sequences",
    "replace_tokens",
    "shuffle_words",
    "truncate_pair",
]
