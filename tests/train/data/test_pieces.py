"""Pieces and units: cutting a document changes neither its text nor its tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.train.data import text
from regard.train.data.text import pieces
from regard.train.data.text.pieces import Piece, cut_document, split_units

PROSE = (
    'It was cold. "Why?" asked Dr. Who.\nNobody knew;  it\n\nwas 3.5 degrees.   New line\n\n\n'
    "J. Smith left! Then, night…\n"
)


def joined(found) -> str:
    return "".join(piece.text for piece in found)


@given(blocks=st.lists(st.text("ab .\n", max_size=9), max_size=30), size=st.integers(3, 20))
def test_pieces_join_to_the_document(blocks: list[str], size: int):
    before = pieces.PIECE
    try:
        pieces.PIECE = size
        found = list(cut_document(blocks))
    finally:
        pieces.PIECE = before
    assert joined(found) == "".join(blocks)
    assert [piece.is_last for piece in found] == [False] * (len(found) - 1) + [True]
    assert all(len(piece.text) <= size for piece in found[:-1])


@pytest.mark.parametrize("kind", ["bytes", "characters", "bpe", "wordpiece"])
def test_cutting_changes_no_token(kind: str, monkeypatch: pytest.MonkeyPatch):
    tokenizer = text.make_tokenizer(kind, [PROSE * 3], 400)
    whole = PROSE * 40
    monkeypatch.setattr(pieces, "PIECE", 151)
    found = list(cut_document([whole]))
    assert len(found) > 25
    assert [each for piece in found for each in tokenizer.encode(piece.text)] == tokenizer.encode(whole)


def test_cutting_anywhere_would_change_tokens():
    tokenizer = text.make_tokenizer("bpe", [PROSE * 3], 400)
    whole = PROSE * 40
    parts = [whole[start : start + 151] for start in range(0, len(whole), 151)]
    assert [each for part in parts for each in tokenizer.encode(part)] != tokenizer.encode(whole)


@pytest.mark.parametrize("unit", ["paragraph", "line", "sentence"])
@pytest.mark.parametrize("size", [40, 97, 1000])
def test_units_do_not_depend_on_the_pieces(unit: str, size: int, monkeypatch: pytest.MonkeyPatch):
    whole = PROSE * 5
    wanted = [piece.text for piece in split_units([Piece(whole, True, True)], unit) if piece.text]
    monkeypatch.setattr(pieces, "PIECE", size)
    found = list(split_units(cut_document([whole]), unit))
    assert [piece.text for piece in found if piece.text] == wanted
    assert [piece.is_last for piece in found].count(True) == found[-1].is_last == 1


def test_units_by_hand():
    def units(unit: str) -> list[str]:
        return [piece.text for piece in split_units([Piece(PROSE, True, True)], unit) if piece.text]

    assert units("line") == [
        "It was cold. \"Why?\" asked Dr. Who.", "Nobody knew;  it", "was 3.5 degrees.   New line",
        "J. Smith left! Then, night…",
    ]  # fmt: skip
    assert units("paragraph") == [
        "It was cold. \"Why?\" asked Dr. Who.\nNobody knew;  it", "was 3.5 degrees.   New line",
        "J. Smith left! Then, night…",
    ]  # fmt: skip
    assert units("sentence") == text.split_sentences(PROSE) == [
        "It was cold.", '"Why?" asked Dr. Who.', "Nobody knew; it", "was 3.5 degrees.", "New line", "J. Smith left!",
        "Then, night…",
    ]  # fmt: skip


@pytest.mark.parametrize("unit", ["document", "paragraph", "line", "sentence"])
def test_documents_stay_apart(unit: str):
    documents = ["One. Two.\n\nThree", "", "Four.\nFive"]
    source = [Piece(document, True, True) for document in documents]
    found = list(split_units(source, unit))
    assert sum(piece.is_last for piece in found) == 3
    ends = [number for number, piece in enumerate(found) if piece.is_last]
    assert "Five" in found[ends[2]].text
    assert found[ends[1]].text == ""
    assert "Three" in found[ends[0]].text
