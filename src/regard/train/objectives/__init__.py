"""Self-supervised objectives of text encoders, as pure functions of their inputs and a random generator."""

from regard.train.objectives.contrast import info_nce
from regard.train.objectives.corpus import Corpus
from regard.train.objectives.inversion import find_invertible, invert_words, make_inversion_pairs, shuffle_words
from regard.train.objectives.masking import IGNORED, Masked, count_predictions, find_words, mask_tokens
from regard.train.objectives.pairs import PairSpan, make_nsp_pairs, make_sop_pairs, make_texts, truncate_pair
from regard.train.objectives.replaced import replace_tokens

__all__ = [
    "IGNORED",
    "Corpus",
    "Masked",
    "PairSpan",
    "count_predictions",
    "find_invertible",
    "find_words",
    "info_nce",
    "invert_words",
    "make_inversion_pairs",
    "make_nsp_pairs",
    "make_sop_pairs",
    "make_texts",
    "mask_tokens",
    "replace_tokens",
    "shuffle_words",
    "truncate_pair",
]
