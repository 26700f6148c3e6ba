"""Text to train on: data sets and files, tokenizers, token stores, and batches as functions of seed and step."""

from regard.train.data.text.corpora import load_documents, load_labelled, load_labelled_pairs, load_pairs
from regard.train.data.text.documents import Documents, LabelledPairs, LabelledTexts, Splits, TextPairs
from regard.train.data.text.packing import PackedBatch, PackedDocuments
from regard.train.data.text.pair_batches import PairBatch, PairBatches, pad_units
from regard.train.data.text.pieces import split_sentences
from regard.train.data.text.store import TokenStore, build_store, open_store
from regard.train.data.text.tokenizer import Tokenizer
from regard.train.data.text.tokenizers import build_tokenizer, make_tokenizer, read_tokenizer
from regard.train.data.text.windows import sample_windows, sequential_windows

__all__ = [
    "Documents",
    "LabelledPairs",
    "LabelledTexts",
    "PackedBatch",
    "PackedDocuments",
    "PairBatch",
    "PairBatches",
    "Splits",
    "TextPairs",
    "TokenStore",
    "Tokenizer",
    "build_store",
    "build_tokenizer",
    "load_documents",
    "load_labelled",
    "load_labelled_pairs",
    "load_pairs",
    "make_tokenizer",
    "open_store",
    "pad_units",
    "read_tokenizer",
    "sample_windows",
    "sequential_windows",
    "split_sentences",
]
