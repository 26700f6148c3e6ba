"""Tokenizers of subwords, trained and run by the package tokenizers: BPE, WordPiece, and any `tokenizer.json`."""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy

from regard.errors import CheckpointError, ConfigError
from regard.train.data.text.tokenizer import FILE, ROLES_FILE, Tokenizer, make_roles_file, no_training_text

# What tokens of these roles are called, in tokenizers that come without a tokenizer_config.json.
USUAL_NAMES = {
    "pad": ("[PAD]", "<pad>", "<|pad|>"),
    "bos": ("<s>", "<|begin_of_text|>", "<|im_start|>", "<|endoftext|>"),
    "eos": ("</s>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>"),
    "unk": ("[UNK]", "<unk>", "\ufffd"),
    "mask": ("[MASK]", "<mask>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
}
BPE_SPECIAL = ("<|endoftext|>", "<|pad|>")
COMMON = 1e-4  # of all characters of a text: those of a WordPiece vocabulary, if they fit
MOST_UNKNOWN = 0.05  # of the words of the training text
WORDPIECE_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class SubwordTokenizer(Tokenizer):
    """A tokenizer of the package tokenizers.

    text: the contents of its `tokenizer.json`.
    role_names: names of its special tokens by role, "pad" and so on; found by their usual names where not given.
    source: where it was read, for errors.
    """

    def __init__(self, text: str, role_names: Mapping[str, str] | None = None, source: str = "tokenizer.json") -> None:
        try:
            self.backend = _import_tokenizers().Tokenizer.from_str(text)
        except ConfigError:
            raise
        except Exception as failure:  # the package raises plain exceptions
            raise CheckpointError(
                "The tokenizer cannot be read.",
                asked=source,
                found=f"{type(failure).__name__}: {failure}",
                because="it is not a file of the package tokenizers",
                instead="the tokenizer.json that save_pretrained of a tokenizer wrote",
            ) from failure
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True  # the name of a special token in a text is text
        self.text = text
        self.vocab_size = 1 + max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.role_names = dict(role_names) if role_names else self._find_usual_roles()
        found = {role: self.backend.token_to_id(name) for role, name in self.role_names.items()}
        super().__init__({role: number for role, number in found.items() if number is not None})
        self.special_ids |= {
            number for number, token in self.backend.get_added_tokens_decoder().items() if token.special
        }
        model = json.loads(text)["model"].get("type")
        self.kind = {"BPE": "bpe", "WordPiece": "wordpiece"}.get(model, "other")  # pyright: ignore[reportAttributeAccessIssue]

    def _find_usual_roles(self) -> dict[str, str]:
        found = {}
        for role, names in USUAL_NAMES.items():
            known = [name for name in names if self.backend.token_to_id(name) is not None]
            if known:
                found[role] = known[0]
        return found

    def encode_batch(self, texts: Sequence[str]) -> list[numpy.ndarray]:
        encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [numpy.array(each.ids, dtype=numpy.uint32) for each in encoded]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode([int(each) for each in ids], skip_special_tokens=skip_special_tokens)

    def find_word_starts(self, ids: Sequence[int] | numpy.ndarray) -> numpy.ndarray:
        starts = self._word_starts[numpy.asarray(ids, dtype=numpy.int64)]
        starts[:1] = True
        return starts

    @cached_property
    def _word_starts(self) -> numpy.ndarray:
        """Of every id: continuing pieces have ## (WordPiece), first pieces have a space (Ġ or Ċ in bytes, or ▁)."""
        starts = numpy.zeros(self.vocab_size, dtype=bool)
        for name, number in self.backend.get_vocab(with_added_tokens=True).items():
            if self.kind == "wordpiece":
                starts[number] = not name.startswith("##")
            else:
                starts[number] = name[:1] in "ĠĊĉ▁" or not name[:1].isalnum()
        starts[list(self.special_ids)] = True
        return starts

    def to_files(self) -> dict[str, bytes]:
        return {FILE: self.text.encode("utf-8"), ROLES_FILE: make_roles_file(self.role_names)}


def train_bpe(documents: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()) -> SubwordTokenizer:
    """A byte-level BPE, as GPT-2's: no text is unknown.

    Source: Sennrich, Haddow and Birch, Neural Machine Translation of Rare Words with Subword Units (ACL 2016).
    """
    special = (*BPE_SPECIAL, *special_tokens)
    _check_vocab_size("bpe", vocab_size, 256 + len(special))
    package = _import_tokenizers()
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_check_texts("bpe", documents), trainer)
    names = {"pad": "<|pad|>", "bos": "<|endoftext|>", "eos": "<|endoftext|>"}
    usual = {role: name for role, choices in USUAL_NAMES.items() for name in special_tokens if name in choices}
    return SubwordTokenizer(tokenizer.to_str(pretty=True), names | usual)


def train_wordpiece(documents: Iterable[str], vocab_size: int) -> SubwordTokenizer:
    """A WordPiece tokenizer with BERT's lower-casing normaliser, punctuation rules and special tokens.

    At most a quarter of the vocabulary are characters, the most frequent ones, or half of a vocabulary so small that
    common ones would not fit; words with rarer ones are unknown, and more than a few of them are refused.

    Source: Devlin et al., BERT (NAACL 2019), after Schuster and Nakajima (2012).
    """
    _check_vocab_size("wordpiece", vocab_size, 4 * len(WORDPIECE_SPECIAL))
    package = _import_tokenizers()
    normaliser = package.normalizers.BertNormalizer(lowercase=True)
    texts = [normaliser.normalize_str(text) for text in _check_texts("wordpiece", documents)]
    rare, continuing = _choose_characters(texts, vocab_size)
    trained = package.Tokenizer(package.models.WordPiece(unk_token="[UNK]"))
    trained.pre_tokenizer = package.pre_tokenizers.BertPreTokenizer()
    trainer = package.trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        # The trainer numbers the characters within words in the order of a hash table, and breaks ties by number:
        # given beforehand, they have the same numbers in every run.
        special_tokens=[*WORDPIECE_SPECIAL, *(f"##{character}" for character in continuing)],
        continuing_subword_prefix="##",
        limit_alphabet=1 << 31,
        show_progress=False,
    )
    trained.train_from_iterator((text.translate(rare) for text in texts), trainer)
    model = package.models.WordPiece(trained.get_vocab(), unk_token="[UNK]", max_input_chars_per_word=100)
    tokenizer = package.Tokenizer(model)
    tokenizer.add_special_tokens(list(WORDPIECE_SPECIAL))
    tokenizer.normalizer = normaliser
    tokenizer.pre_tokenizer = package.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = package.decoders.WordPiece(prefix="##")
    special = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = package.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=special
    )
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    return SubwordTokenizer(tokenizer.to_str(pretty=True), names)


def _choose_characters(texts: Sequence[str], vocab_size: int) -> tuple[dict[int, str], list[str]]:
    """A table that replaces all but the most frequent characters, and those that occur within words."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    for blank in [character for character in counts if character.isspace()]:
        del counts[blank]
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    apart = {ord(character): f" {character} " for character in ranked if _is_punctuation(character)}
    words: Counter[str] = Counter()
    for text in texts:
        words.update(text.translate(apart).split())
    common = sum(count >= COMMON * counts.total() for count in counts.values())
    most = max(vocab_size // 8, min(common, vocab_size // 4))
    _check_coverage(words, ranked, most, vocab_size)
    rare = {ord(character): " " for character in ranked[most:]}
    continuing = {character for word in words for part in word.translate(rare).split() for character in part[1:]}
    return rare, sorted(continuing)


def _check_coverage(words: Counter[str], ranked: Sequence[str], most: int, vocab_size: int) -> None:
    """Raise if so many characters leave many of the words unknown."""
    rank = {character: number for number, character in enumerate(ranked, 1)}
    needed: Counter[int] = Counter()  # words by how many characters they need
    for word, count in words.items():
        needed[max(rank[character] for character in word)] += count
    unknown = sum(count for number, count in needed.items() if number > most)
    if unknown <= MOST_UNKNOWN * words.total():
        return
    left = unknown
    while left > MOST_UNKNOWN * words.total():
        most += 1
        left -= needed[most]
    raise ConfigError(
        f"A wordpiece tokenizer of {vocab_size} tokens would not know {unknown / words.total():.0%} of the words.",
        asked=f"vocab_size={vocab_size}",
        found=f"{len(ranked)} characters in the text",
        because="a vocabulary without a character makes [UNK] of every word that has it",
        instead=f"vocab_size={8 * most} or more",
    )


def _is_punctuation(character: str) -> bool:
    """Whether BERT's tokenizer splits words at this character."""
    is_ascii = character.isascii() and character.isprintable() and not character.isalnum()
    return is_ascii or unicodedata.category(character).startswith("P")


# Checks


def _import_tokenizers() -> Any:
    try:
        import tokenizers  # an extra, and slow to import
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.normalizers
        import tokenizers.pre_tokenizers
        import tokenizers.processors
        import tokenizers.trainers
    except ImportError as failure:
        raise ConfigError(
            "BPE and WordPiece need the package tokenizers.",
            asked="a tokenizer of subwords",
            found=f"{type(failure).__name__}: {failure}",
            because="it trains and runs them",
            instead="pip install 'regard[text]', or tokenizer='bytes' or 'characters', which need no package",
        ) from failure
    return tokenizers


def _check_vocab_size(kind: str, vocab_size: int, least: int) -> None:
    if vocab_size < least:
        raise ConfigError(
            f"A {kind} tokenizer cannot have {vocab_size} tokens.",
            asked=f"vocab_size={vocab_size}",
            because=f"its characters and special tokens alone are {least}",
            instead="vocab_size=4096",
        )


def _check_texts(kind: str, documents: Iterable[str]) -> Iterator[str]:
    count = 0
    for document in documents:
        count += bool(document.strip())
        yield document
    if not count:
        raise no_training_text(kind)
