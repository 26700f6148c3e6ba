"""The symbols that `regard cost` takes are those that it prints, and both have conventional names."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from plain import slow_but

from regard import Attention, Causal, cost
from regard.cli import cost as cost_command
from regard.cli import cost_questions, main
from regard.cost_model.symbols import MEANINGS
from regard.models import GPT, GPTConfig

TABLES = {name: word for name, word in cost_questions.QUESTIONS.items() if word is not None}
# Words of a dialect that no reader would search for.
DIALECT = re.compile(r"that ask|looked at|nobody|somebody|rows of the batch|that leave|other text")


def given(word, example: str) -> dict[str, int]:
    """The symbols that an example gives numbers to."""
    words = shlex.split(example)
    found = {}
    for size in word.sizes:
        if f"--{size.name}" in words:
            place = words.index(f"--{size.name}")
            numbers = map(int, words[place + 1 : place + 1 + size.sides])
            found |= dict(zip(size.symbol.split(), numbers, strict=True))
        elif size.default is not None:
            found |= {size.symbol: size.default}
    return found


EXAMPLES = [(name, word.example) for name, word in TABLES.items()] + [
    ("parallel", "--X 8 --Y 4 --J 512 --K 8"),
    ("parallel", "--T 1024 --J 512 --K 8 --U 32 --I 16"),
    ("parallel", "--T 1024 --J 512 --K 8 --serial"),
    ("encoding", "--grid 16 8 --dim 64"),
    ("mha", "--tokens 251 --width 509 --heads 7 --head-dim 31"),
]


@pytest.mark.parametrize(("name", "example"), EXAMPLES)
def test_symbols_that_are_typed_are_symbols_that_are_printed(capsys, name, example):
    word = TABLES[name]
    assert main(["cost", name, *shlex.split(example), "--json", "-"]) == 0
    printed = json.loads(capsys.readouterr().out)["letters"]
    typed = given(word, example)
    meanings = {letter: size.meaning for size in word.sizes for letter in size.symbol.split()}
    for letter, about in printed.items():
        if letter in typed:
            assert about["value"] == typed[letter], letter
            if len(meanings[letter].split(" and ")) == 1:
                assert meanings[letter].startswith(about["meaning"]) or about["meaning"].startswith(
                    meanings[letter].split(" (")[0]
                ), (letter, about, meanings[letter])
        else:  # made of what was typed, and its meaning says how
            assert name in ("davit", "merge", "patterns"), letter
    assert set(typed) & set(printed) or not printed


@pytest.mark.parametrize("name", TABLES)
def test_no_symbol_of_a_table_has_two_meanings(name):
    letters = [letter for size in TABLES[name].sizes for letter in size.symbol.split()]
    assert len(letters) == len(set(letters))


def test_helps_and_tables_use_the_words_of_the_field(capsys):
    for words in (["cost", "--help"], ["cost", "curve", "--help"], ["cost", "model", "--help"],
                  *(["cost", name, "--help"] for name in TABLES)):  # fmt: skip
        assert main(words) == 0
        text = capsys.readouterr().out
        assert not DIALECT.search(text), DIALECT.search(text)
    for _, meaning in MEANINGS.values():
        assert not DIALECT.search(meaning), meaning


def test_lengths_are_called_by_what_they_are():
    def meanings(found):
        return {letter: words for letter, words, _ in found.legend()}

    assert meanings(cost(Attention(), tokens=5, dim=8))["N"] == "sequence length"
    across = meanings(cost(Attention(), tokens=5, keys=7, dim=8))
    assert (across["N"], across["M"]) == ("query length", "key length")
    step = cost(GPT(GPTConfig(vocab_size=23, context_length=16, dim=8, layers=1, heads=2)), tokens=5, step="decode")
    assert meanings(step)["N"] == "tokens in the cache"
    assert "tokens in the cache" in str(step)
    assert meanings(cost(Attention(pattern=Causal()), tokens=5, dim=8))["d"] == "head dim of queries and keys"


def examples() -> list[str]:
    """Every command that a help shows and that needs nothing but Regard."""
    texts = [cost_command.EPILOG, cost_command.MODEL_EPILOG, cost_command.CURVE_EPILOG]
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip().startswith("regard ")]
    return [line for line in lines if not re.search("transformers:|timm:|mypackage", line)]


@pytest.mark.parametrize("line", slow_but([each for each in examples() if " model " not in each], examples()))
def test_the_examples_of_the_help_run(tmp_path, monkeypatch, capsys, line):
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(line)[1:]) == 0, capsys.readouterr().err
