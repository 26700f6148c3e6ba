"""`regard cost QUESTION`: every table, to the unit, as printed and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from regard.cli import main


def told(capsys, *words: str) -> str:
    """What it prints, where it ends well and says nothing else."""
    assert main(["cost", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def plain(capsys, *words: str) -> dict:
    return json.loads(told(capsys, *words, "--json", "-"))


def counts(capsys, *words: str) -> dict[str, int | float]:
    """The first number of every row, by its label; each is also in the printed table."""
    rows = plain(capsys, *words)["rows"]
    found = {label: next(iter(cells.values()))["value"] for label, cells in rows.items()}
    out = told(capsys, *words)
    for label, value in found.items():
        (line,) = [line for line in out.splitlines() if line.startswith(f"{label}  ")]
        assert not isinstance(value, int) or f" {value:,}" in line
    return found


@pytest.mark.parametrize(
    ("tokens", "width", "expected"),
    [
        (3, 4, [48, 12, 9, 144, 12]),
        (256, 512, [786_432, 1_536, 65_536, 17_179_869_184, 131_072]),
        (197, 768, [1_769_472, 2_304, 38_809, 22_890_479_616, 151_296]),
        (1024, 512, [786_432, 1_536, 1_048_576, 274_877_906_944, 524_288]),
    ],
)
def test_attention(capsys, tokens, width, expected):
    assert list(counts(capsys, "attention", "--tokens", f"{tokens}", "--width", f"{width}").values()) == expected


@pytest.mark.parametrize("heads", [1, 8, 32])
def test_mha(capsys, heads):
    found = counts(capsys, "mha", "--tokens", "256", "--width", "512", "--heads", f"{heads}")
    assert found["query, key and value weights"] == 786_432
    assert found["projection MAC"] == 201_326_592
    assert found["score MAC"] == 33_554_432
    assert found["score MAC of a head"] == 33_554_432 // heads
    assert found["stored attention weights"] == 65_536 * heads
    assert found["weights with full heads"] == 786_432 * heads
    assert found["score MAC with full heads"] == 33_554_432 * heads


def test_every_question_of_the_textbook_has_a_command_and_is_named_by_the_help(capsys):
    from regard.cli import cost_questions
    from regard.cost_model.textbook import QUESTIONS

    assert {name for name, question in cost_questions.QUESTIONS.items() if question is not None} == set(QUESTIONS)
    assert main(["--help"]) == 0
    top = capsys.readouterr().out
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    question = readme[readme.index("Textbook questions") : readme.index("docs/cost.md](docs/cost.md) answers")]
    for name in QUESTIONS:
        assert f" {name}" in top[top.index("textbook questions") :]
        assert f"`{name} " in question


def test_merge(capsys):
    """8 heads of 512 channels: two matrices of 512 x 64 for each, or one of 512 x 512."""
    found = counts(capsys, "merge", "--tokens", "256", "--width", "512", "--heads", "8")
    assert found["weights apart"] == 2 * 8 * 512 * 64
    assert found["weights merged"] == 8 * 512 * 512
    assert found["weights saved"] == found["weights apart"] - found["weights merged"]
    assert found["MAC apart"] == 2 * 256 * 512 * 8 * 64 + 256 * 256 * 8 * 64
    assert found["MAC merged"] == 256 * 8 * 512 * 512 + 256 * 256 * 8 * 512
    full = counts(capsys, "merge", "--tokens", "256", "--width", "512", "--heads", "8", "--value-dim", "512")
    assert full["weights saved"] == 8 * 512 * 512
    assert main(["cost", "merge", "--tokens", "256", "--width", "512", "--heads", "7"]) == 2
    assert "evenly" in capsys.readouterr().err


def test_mha_with_heads_of_any_size(capsys):
    found = counts(capsys, "mha", "--tokens", "5", "--width", "7", "--heads", "3", "--head-dim", "11")
    assert found["query, key and value weights"] == 3 * 7 * 3 * 11
    assert main(["cost", "mha", "--tokens", "5", "--width", "7", "--heads", "3"]) == 2
    assert "because  7 is no multiple of 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "width", "step", "scratch"),
    [(255, 512, 1_048_576, 268_435_456), (1023, 768, 3_342_336, 3_422_552_064)],
)
def test_append(capsys, tokens, width, step, scratch):
    found = counts(capsys, "append", "--tokens", f"{tokens}", "--width", f"{width}")
    assert (found["one token more"], found["all from the beginning"]) == (step, scratch)
    assert found["times as much"] == tokens + 1


@pytest.mark.parametrize(
    ("tokens", "softmax", "linear"), [(256, 8_388_608, 2_129_920), (4096, 2_147_483_648, 34_078_720)]
)
def test_linear(capsys, tokens, softmax, linear):
    found = counts(capsys, "linear", "--tokens", f"{tokens}", "--width", "64")
    assert (found["softmax MAC"], found["linear MAC"]) == (softmax, linear)
    assert found["equal at so many tokens"] == 65
    assert found["recurrent step MAC"] == 2 * 64**2
    assert found["state numbers"] == 64 * 65
    assert round(found["times as much"], 1) == round(softmax / linear, 1)


def test_davit(capsys):
    from regard.cost_model import textbook

    words = ("davit", "--grid", "16", "16", "--channels", "512")
    found = counts(capsys, *words)
    assert counts(capsys, *words, "--window", "7", "--group-dim", "32") == found
    expected = {row.label: row.quantity.value for row in textbook.davit((16, 16), 512).rows}
    assert {label: found[label] for label in expected} == expected
    for window, both in ((8, 16_777_216), (4, 4_194_304)):
        assert counts(capsys, *words, "--window", f"{window}")["windows: scores and values"] == both


def test_encoding(capsys):
    found = counts(capsys, "encoding", "--tokens", "1024", "--dim", "64")
    assert found["one entry, naively"] == 65_535
    assert found["all entries, naively"] == 68_719_476_736
    assert found["queries and keys made once"] == 150_994_944
    assert int(found["times as much"]) == 455
    assert found["exponent of D"] == pytest.approx(2.0, abs=0.02)
    grid = counts(capsys, "encoding", "--grid", "32", "32", "--d", "64")
    assert grid["queries and keys made once"] == 150_994_944
    assert grid["quadratic encoding, different scores"] == 63 * 63
    assert grid["sums over values, rows and columns apart"] == 2 * 1024 * 64 * 64
    assert main(["cost", "encoding", "--dim", "64"]) == 2
    assert "--tokens 1024, or --grid 32 32" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("books", "ours"),
    [
        ("attention --n 256 --d 512", "attention --tokens 256 --width 512"),
        ("mha --n 256 --d 512 --heads 8", "mha --tokens 256 --width 512 --heads 8"),
        ("append --n 255 --d 512", "append --tokens 255 --width 512"),
        ("linear --n 256 --d 64", "linear --tokens 256 --width 64"),
        ("encoding --n 1024 --d 64", "encoding --tokens 1024 --dim 64"),
        ("parallel --T 1024 --J 512 --K 8 --serial-dot", "parallel --T 1024 --J 512 --K 8 --serial"),
    ],
)
def test_sizes_may_be_given_by_the_symbols_of_the_textbooks(capsys, books, ours):
    assert counts(capsys, *books.split()) == counts(capsys, *ours.split())


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1024, 512, 8), [19, 30, 40, 51]),
        ((16, 64, 4), [11, 16, 23, 28]),
        ((512, 768, 12), [18, 28, 39, 49]),
        ((4096, 1024, 16), [21, 34, 45, 58]),
    ],
)
def test_parallel(capsys, sizes, expected):
    words = ["parallel", *(word for name, size in zip("TJK", sizes, strict=True) for word in (f"--{name}", f"{size}"))]
    tokens, width, heads = sizes
    work = 3 * tokens * width**2 + 2 * tokens**2 * width
    found = counts(capsys, *words)
    assert list(found.values()) == [*expected, work]
    assert list(counts(capsys, *words, "--U", f"{width // heads}", "--I", f"{width // heads}").values()) == [
        *expected,
        work,
    ]
    chains = counts(capsys, *words, "--serial")
    assert chains["sums as chains"] == width + width // heads + 2 * tokens
    assert "the layer" not in chains


def test_parallel_first_case_as_the_requirements_have_it(capsys):
    found = counts(capsys, "parallel", "--T", "1024", "--J", "512", "--K", "8", "--serial")
    assert (found["sums as chains"], found["work (MAC)"]) == (2_624, 1_879_048_192)


def test_parallel_on_a_grid_has_one_tree_over_all_tokens(capsys):
    grid = counts(capsys, "parallel", "--X", "5", "--Y", "7", "--J", "64", "--K", "4", "--I", "3")
    line = counts(capsys, "parallel", "--T", "35", "--J", "64", "--K", "4", "--I", "3")
    assert list(grid.values()) == list(line.values())
    assert line["work (MAC)"] == 35 * 64 * 4 * (2 * 16 + 3) + 35**2 * 4 * (16 + 3)
    # lg 35 rounds up to 6; lg 5 and lg 7 to 3 each, the same here, but not for 5 x 5
    five = counts(capsys, "parallel", "--X", "5", "--Y", "5", "--J", "64", "--K", "4")
    assert five["a row of weights"] == (1 + 4) + 1 + 5 + 1


def test_patterns(capsys):
    rows = plain(capsys, "patterns", "--grid", "16", "16", "--channels", "512")["rows"]
    found = {
        label: (cells["pairs"]["value"], cells["MAC"]["value"], (cells["layers until connected"] or {}).get("value"))
        for label, cells in rows.items()
    }
    assert found == {
        "full": (65_536, 67_108_864, 1),
        "neighbours 1 away": (2_116, 2_166_784, 15),
        "neighbours 2 away": (5_476, 5_607_424, 8),
        "neighbours 3 away": (10_000, 10_240_000, 5),
        "row and column": (7_936, 8_126_464, 2),
        "windows of 4 x 4": (4_096, 4_194_304, None),
        "windows of 8 x 8": (16_384, 16_777_216, None),
        "every 4th": (4_096, 4_194_304, None),
        "windows of 4 x 4, then every 4th": (4_096, 4_194_304, 2),
        "2 global tokens, neighbours 1 away": (3_144, 3_219_456, 2),
    }
    out = told(capsys, "patterns", "--grid", "16", "16", "--channels", "512")
    assert "never" in out
    assert "2,166,784" in out


def test_the_table_of_patterns_fits_eighty_columns():
    from regard.cost_model import textbook
    from regard.render.terminal import plain_text

    told = plain_text(textbook.patterns((16, 16), 512).render(80))
    assert max(map(len, told.splitlines())) <= 80
    assert "67,108,864" in told
    davit = plain_text(textbook.davit((16, 16), 512).render(80))
    assert max(map(len, davit.splitlines())) <= 80
    assert "462,422,016" in davit


def test_panels_and_parameters(capsys):
    assert list(counts(capsys, "panels", "--tokens", "256").values()) == [
        65_536,
        32_896,
        766,
        765,
        762,
        759,
        8703,
        1780,
    ]
    for sizes, total in (
        ((8, 512, 64, 64, 512), 1_049_088),
        ((9, 400, 400, 400, 400), 5_760_400),
        ((4, 10, 3, 5, 7), 587),
    ):
        names = ("heads", "input", "hidden", "value", "output")
        words = [word for name, size in zip(names, sizes, strict=True) for word in (f"--{name}", f"{size}")]
        assert counts(capsys, "parameters", *words)["parameters"] == total


@pytest.mark.parametrize(
    ("words", "parameters", "macs"),
    [
        (["bert-base"], 109_482_240, None),
        pytest.param(["gpt2"], 124_439_808, None, marks=pytest.mark.slow),
        pytest.param(["gpt2-xl"], 1_557_611_200, None, marks=pytest.mark.slow),
        pytest.param(["vit-b16"], 86_567_656, 17_563_828_224, marks=pytest.mark.slow),
        pytest.param(["vit-b16", "--image", "384"], 86_859_496, None, marks=pytest.mark.slow),
        pytest.param(["davit-tiny"], 28_360_168, 4_521_801_216, marks=pytest.mark.slow),
        pytest.param(["davit-large"], 196_811_752, 102_805_204_992, marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param(["transformer-base"], 63_082_496, None, marks=pytest.mark.slow),
        pytest.param(["transformer-big"], 214_245_376, None, marks=pytest.mark.slow),
        pytest.param(["cordonnier"], 12_086_844, None, marks=pytest.mark.slow),
        pytest.param(["cordonnier-gaussian"], 12_087_006, None, marks=pytest.mark.slow),
        pytest.param(["cordonnier-content"], 29_484_282, None, marks=pytest.mark.slow),
    ],
)
def test_model(capsys, words, parameters, macs):
    out = told(capsys, "model", *words, "--levels", "1")
    assert out.startswith(f"{words[0]}  forward, float32\n")
    (line,) = [line for line in out.splitlines() if line.startswith("parameters ")]
    assert f" {parameters:,} " in line
    if macs is not None:
        assert f" {macs:,} " in out


def test_a_model_decodes_with_a_cache(capsys):
    found = plain(capsys, "model", "gpt2", "--tokens", "1023", "--step", "decode")
    # One token through 12 layers and the vocabulary; its query meets 1,024 keys.
    macs = 12 * (12 * 768**2 + 2 * 1024 * 768) + 768 * 50257
    assert found["quantities"]["macs"]["value"] == macs
    assert found["name"] == "gpt2"
