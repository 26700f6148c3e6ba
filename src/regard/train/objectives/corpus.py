"""Running text as tokens, cut into sentences and documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Corpus:
    """Documents of sentences in one array of tokens, which may be a memory map; none of them is empty.

    Attributes:
        tokens: of all documents, without special tokens, `(token,)`.
        starts: where each sentence begins, and after them where the last one ends, `(sentence + 1,)`.
        document_starts: the first sentence of each document, and after them their number, `(document + 1,)`.
    """

    tokens: np.ndarray
    starts: np.ndarray
    document_starts: np.ndarray

    @classmethod
    def from_store(cls, tokens: np.ndarray, starts: np.ndarray, document_starts: np.ndarray) -> Corpus:
        """The corpus in a token store whose units are sentences, without empty sentences and documents.

        >>> Corpus.from_store(np.arange(5), np.array([0, 2, 2, 5]), np.array([0, 1, 2, 3]))
        Corpus(tokens=array([0, 1, 2, 3, 4]), starts=array([0, 2, 5]), document_starts=array([0, 1, 2]))
        """
        full = np.diff(starts) > 0
        counted = np.concatenate([[0], np.cumsum(full)])  # full sentences before each one
        return cls(tokens, np.unique(starts), np.unique(counted[document_starts]))

    @classmethod
    def from_documents(cls, documents: Sequence[Sequence[Sequence[int]]]) -> Corpus:
        """A corpus of documents of sentences of tokens.

        >>> Corpus.from_documents([[[5, 6], [7]], [[8, 9]]]).starts
        array([0, 2, 3, 5])
        """
        sentences = [sentence for document in documents for sentence in document]
        tokens = np.array([token for sentence in sentences for token in sentence], dtype=np.int64)
        starts = np.cumsum([0, *map(len, sentences)])
        return cls.from_store(tokens, starts, np.cumsum([0, *map(len, documents)]))

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.document_starts) - 1

    def get_sentence(self, number: int) -> list[int]:
        """The tokens of a sentence."""
        return self.tokens[self.starts[number] : self.starts[number + 1]].tolist()
