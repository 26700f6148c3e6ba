"""Tokenizers: what is encoded is decoded, and what is saved beside a model is read back the same."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy
import pytest
from agreement import refused
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import CheckpointError, ConfigError, InputError
from regard.models import GPT, GPTConfig
from regard.train import BertRecipe, GPTRecipe, TextClassificationRecipe, TranslationRecipe
from regard.train.data import text
from regard.train.data.text import tokenizers as tokenizers_module
from regard.train.data.text.characters import ByteTokenizer, CharacterTokenizer
from regard.train.data.text.tokenizers import KINDS

TEXTS = [
    "The quick brown fox jumps over the lazy dog.\nAnd again: the quick, brown fox!",
    "Fünf Äpfel kosten 3,50 € — das ist nicht viel.",
    "the the the quick quick dogs and foxes of the quickest kind " * 20,
]
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, text.Tokenizer]:
    return {kind: text.make_tokenizer(kind, TEXTS, 400) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_tokenizer_is_read_back_the_same(tokenizers, kind: str, tmp_path: Path):
    one = tokenizers[kind]
    one.save(tmp_path)
    again = text.read_tokenizer(tmp_path)
    assert type(again) is type(one)
    assert (again.kind, again.vocab_size, again.digest) == (kind, one.vocab_size, one.digest)
    assert again.special_ids == one.special_ids
    for words in (*TEXTS, "unseen: ßø😀", ""):
        assert again.encode(words) == one.encode(words)
    assert text.make_tokenizer(tmp_path / "tokenizer.json").digest == one.digest


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_kept_with_the_model(tokenizers, kind: str, tmp_path: Path):
    one = tokenizers[kind]
    model = GPT(GPTConfig(vocab_size=one.vocab_size, context_length=8, dim=8, layers=1, heads=2))
    model.companions = one.to_files()
    model.save_pretrained(tmp_path / "first")
    GPT.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    assert text.read_tokenizer(tmp_path / "second").digest == one.digest


@given(words=ANY_TEXT)
def test_bytes_are_those_of_utf8(words: str):
    tokenizer = ByteTokenizer()
    assert bytes(tokenizer.encode(words)) == words.encode("utf-8")
    assert tokenizer.decode(tokenizer.encode(words)) == words


@given(words=ANY_TEXT)
def test_known_characters_come_back_and_others_are_the_unknown_one(words: str):
    tokenizer = CharacterTokenizer.train(["abc \n é"])
    known = "".join(each if each in "abc \né" else "\ufffd" for each in words)
    assert tokenizer.decode(tokenizer.encode(words)) == known
    assert len(tokenizer.encode(words)) == len(words)


@given(words=ANY_TEXT)
def test_the_package_tokenizers_reads_bytes_and_characters_alike(words: str):
    from tokenizers import Tokenizer

    for tokenizer in (ByteTokenizer(), CharacterTokenizer.train(["abc \n é\x00"])):
        other = Tokenizer.from_str(json.dumps(tokenizer.to_json()))
        ids = tokenizer.encode(words)
        assert other.encode(words).ids == ids
        assert other.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids)
        assert other.get_vocab_size() == tokenizer.vocab_size


def test_incomplete_bytes_decode_as_elsewhere():
    from tokenizers import Tokenizer

    one = ByteTokenizer()
    other = Tokenizer.from_str(json.dumps(one.to_json()))
    draws = numpy.random.default_rng(3)
    for _ in range(200):
        ids = draws.integers(0, 256, 7).tolist()
        assert one.decode(ids) == other.decode(ids)


@given(words=ANY_TEXT)
def test_no_text_is_lost_by_bpe(words: str):
    tokenizer = BPE
    assert tokenizer.decode(tokenizer.encode(words)) == words


BPE = text.make_tokenizer("bpe", TEXTS, 300)


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_special_tokens_have_the_lowest_ids_and_are_never_made_from_text(tokenizers, kind: str):
    one = tokenizers[kind]
    if kind == "bpe":
        assert (one.eos_token_id, one.bos_token_id, one.pad_token_id, one.mask_token_id) == (0, 0, 1, None)
    else:
        ids = (one.pad_token_id, one.unk_token_id, one.cls_token_id, one.sep_token_id, one.mask_token_id)
        assert ids == (0, 1, 2, 3, 4)
    found = one.encode("a <|endoftext|> [CLS] [MASK] <|pad|> b")
    assert not one.special_ids - {one.unk_token_id} & set(found)
    assert one.vocab_size <= 400


def test_more_special_tokens_are_known_by_their_roles():
    tokenizer = text.make_tokenizer("bpe", TEXTS, 300, ["<mask>", "<s>"])
    assert tokenizer.mask_token_id == 2
    assert tokenizer.bos_token_id == tokenizer.cls_token_id == 3
    assert tokenizer.eos_token_id == 0


def test_wordpiece_is_that_of_bert(tokenizers):
    one = tokenizers["wordpiece"]
    assert one.decode(one.encode("The QUICK fox!")) == "the quick fox!"
    assert one.encode("Äpfel") == one.encode("apfel")
    assert one.encode("漢") == [one.unk_token_id]


def test_wordpiece_gives_the_tokens_of_the_packages_own_training():
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    words = ["low low low low lowest lowest newer newer newer newer newer newer wider wider wider new new it's"]
    other = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    other.normalizer = normalizers.BertNormalizer(lowercase=True)
    other.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    other.train_from_iterator(
        words, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    )
    ours = text.make_tokenizer("wordpiece", words, 200)
    # Which of two equally frequent pairs is merged first depends on numbers; that all are merged does not.
    for word in words[0].split():
        assert len(ours.encode(word)) == len(other.encode(word).ids) == (3 if "'" in word else 1)
    vocabularies = (ours.backend.get_vocab(), other.get_vocab())  # type: ignore[attr-defined]
    one, two = ({name for name in each if len(name.removeprefix("##")) == 1} for each in vocabularies)
    assert one == two


@pytest.mark.parametrize(
    ("kind", "words", "starts"),
    [
        ("bytes", "a fox!", [1, 1, 1, 0, 0, 1]),
        ("characters", "a fox!", [1, 1, 1, 0, 0, 1]),
        ("wordpiece", "the zzz", [1, 1, 0, 0]),
    ],
)
def test_where_words_start(kind: str, words: str, starts: list[int]):
    tokenizer = text.make_tokenizer(kind, [*TEXTS, "z z zz z"], 100 if kind == "wordpiece" else None)
    found = tokenizer.find_word_starts(tokenizer.encode(words))
    assert found.dtype == bool
    if kind == "wordpiece":
        names = tokenizer.backend.decode_batch([[each] for each in tokenizer.encode(words)])  # type: ignore[attr-defined]
        assert found.tolist() == [not name.startswith("##") for name in names]
        assert found.sum() == 2
    else:
        assert found.tolist() == [bool(each) for each in starts]


def test_pieces_of_a_word_of_bpe_do_not_start_words(tokenizers):
    one = tokenizers["bpe"]
    ids = one.encode("the quickestly zebra")
    words = numpy.split(ids, numpy.flatnonzero(one.find_word_starts(ids))[1:])
    assert [one.decode(word) for word in words] == ["the", " quickestly", " zebra"]


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_training_is_deterministic(kind: str):
    """Many words and pairs of equal counts, and more characters of equal frequency than there is room for.

    The package's own WordPiece trainer gives another result each time, even within one process: it numbers the
    characters within words in the order of a hash table.
    """
    draws = random.Random(5)
    words = ["".join(draws.choice("abcdefgh") for _ in range(5)) for _ in range(500)]
    rare = " ".join(map(chr, [*range(0x4E00, 0x4F30), *range(0x3B1, 0x3C5)]))
    texts = [" ".join(words * 15), rare]
    assert len({text.make_tokenizer(kind, texts, 420).digest for _ in range(6)}) == 1


# Errors


def test_an_unknown_tokenizer_is_refused():
    with refused(ConfigError, "bytes, characters, bpe, wordpiece"):
        text.make_tokenizer("sentencepiece", TEXTS)


@pytest.mark.parametrize("kind", ["characters", "bpe", "wordpiece"])
def test_no_text_is_no_vocabulary(kind: str):
    with refused(InputError, "no documents"):
        text.make_tokenizer(kind, [] if kind == "characters" else ["", ""])


def test_a_vocabulary_smaller_than_its_bytes_is_refused():
    with refused(ConfigError, "vocab_size=257"):
        text.make_tokenizer("bpe", TEXTS, 257)


ENGLISH = 'The quick brown fox jumps over the lazy dog; 10 old owls, 23 pigs, 45 cats (678 or 9?) saw "it": gone!'


def test_a_small_wordpiece_vocabulary_knows_the_words_of_its_text():
    tokenizer = text.make_tokenizer("wordpiece", [ENGLISH], 200)
    assert tokenizer.unk_token_id not in tokenizer.encode(ENGLISH)
    assert tokenizer.vocab_size <= 200


def test_a_wordpiece_vocabulary_that_makes_words_unknown_is_refused():
    with pytest.raises(ConfigError) as failure:
        text.make_tokenizer("wordpiece", [ENGLISH], 60)
    assert "of the words" in str(failure.value)
    assert "characters in the text" in str(failure.value)
    size = int(failure.value.instead.split("=")[1].split()[0])
    tokenizer = text.make_tokenizer("wordpiece", [ENGLISH], size)
    found = tokenizer.encode(ENGLISH)
    assert list(found).count(tokenizer.unk_token_id) <= 0.05 * len(found)


@pytest.mark.parametrize("content", ['{"model": {"type": "Strange"}}', '{"version": "1.0"}'])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: str):
    (tmp_path / "tokenizer.json").write_text(content)
    with refused(CheckpointError, "not a file of the package"):
        text.read_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path):
    with refused(CheckpointError, "tokenizer.json"):
        text.read_tokenizer(tmp_path)


def test_roles_are_read_from_the_file_of_hugging_face(tokenizers, tmp_path: Path):
    tokenizers["bpe"].save(tmp_path)
    config = {"pad_token": {"content": "<|endoftext|>", "special": True}, "eos_token": "<|pad|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    again = text.read_tokenizer(tmp_path)
    assert (again.pad_token_id, again.eos_token_id, again.bos_token_id) == (0, 1, None)


def test_truncation_and_padding_of_a_file_are_not_applied(tokenizers, tmp_path: Path):
    from tokenizers import Tokenizer

    tokenizers["wordpiece"].save(tmp_path)
    other = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    other.enable_truncation(3)
    other.enable_padding(length=5)
    other.save(str(tmp_path / "tokenizer.json"))
    again = text.read_tokenizer(tmp_path)
    for words in ("fox", TEXTS[0]):
        assert again.encode(words) == tokenizers["wordpiece"].encode(words)


# Trained once


@pytest.fixture
def trainings(monkeypatch) -> list[str]:
    """The kinds of tokenizers that are trained from now on."""
    found: list[str] = []
    for kind in ("bpe", "wordpiece"):
        name = f"train_{kind}"
        train = getattr(tokenizers_module, name)
        monkeypatch.setattr(
            tokenizers_module, name, lambda *given, train=train, kind=kind: found.append(kind) or train(*given)
        )
    return found


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_a_tokenizer_is_trained_once_for_a_text_and_its_settings(kind: str, trainings, tmp_path: Path):
    first = text.build_tokenizer(kind, TEXTS, 400, cache=tmp_path)
    again = text.build_tokenizer(kind, TEXTS, 400, cache=tmp_path)
    assert trainings == [kind]
    assert again.digest == first.digest == text.make_tokenizer(kind, TEXTS, 400).digest
    assert (again.kind, again.vocab_size, again.special_ids) == (kind, first.vocab_size, first.special_ids)
    del trainings[:]
    text.build_tokenizer(kind, [*TEXTS, "another fox"], 400, cache=tmp_path)
    text.build_tokenizer(kind, TEXTS, 390, cache=tmp_path)
    # The same letters in other documents are another text.
    text.build_tokenizer(kind, ["".join(TEXTS)], 400, cache=tmp_path)
    text.build_tokenizer("wordpiece" if kind == "bpe" else "bpe", TEXTS, 400, cache=tmp_path)
    assert len(trainings) == 4


def test_a_changed_file_trains_its_tokenizer_again(trainings, tmp_path: Path):
    file, cache = tmp_path / "corpus.txt", tmp_path / "cache"
    file.write_text(TEXTS[0] * 9)
    for _ in range(2):
        text.build_tokenizer("bpe", text.load_documents(file), 300, cache=cache)
    assert len(trainings) == 1
    file.write_text(TEXTS[0] * 9 + "!")
    text.build_tokenizer("bpe", text.load_documents(file), 300, cache=cache)
    assert len(trainings) == 2


@pytest.mark.parametrize("make", [GPTRecipe, TranslationRecipe, BertRecipe, TextClassificationRecipe])
def test_a_task_is_made_twice_with_one_training(make, trainings, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tokenizers_module, "download_folder", lambda: tmp_path)
    fields = {GPTRecipe: {"tokenizer": "bpe"}, BertRecipe: {"tasks": ("mlm",)}}.get(make, {})
    lines = [f"{number} {words}" for number in range(40) for words in TEXTS[:2]]
    data = {
        GPTRecipe: lambda: text.Documents.from_texts(lines),
        BertRecipe: lambda: text.Documents.from_texts(lines),
        TranslationRecipe: lambda: text.TextPairs("pairs", lines, lines[::-1]),
        TextClassificationRecipe: lambda: text.LabelledTexts("news", lines, [0, 1] * 40, ("a", "b")),
    }[make]
    tasks = [make(vocab_size=300, **fields).make_task(data()) for _ in range(2)]
    assert len(trainings) == 1
    assert tasks[0].digest == tasks[1].digest


def test_a_folder_that_cannot_be_written_to_costs_the_training_alone(trainings, tmp_path: Path):
    (tmp_path / "file").write_text("no folder")
    for _ in range(2):
        text.build_tokenizer("bpe", TEXTS, 300, cache=tmp_path / "file" / "inside")
    assert len(trainings) == 2
    assert [place.name for place in tmp_path.iterdir()] == ["file"]


def test_an_interrupted_write_leaves_no_tokenizer(trainings, tmp_path: Path, monkeypatch):
    """The folder appears complete: a crash before the rename leaves none, and the next call trains again."""
    with monkeypatch.context() as patch:
        patch.setattr(
            tokenizers_module.atomic, "move_into_place", lambda *_: (_ for _ in ()).throw(OSError(28, "full"))
        )
        text.build_tokenizer("bpe", TEXTS, 300, cache=tmp_path)
    assert list(tmp_path.iterdir()) == []
    text.build_tokenizer("bpe", TEXTS, 300, cache=tmp_path)
    assert len(trainings) == 2
