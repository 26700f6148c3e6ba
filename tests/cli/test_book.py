"""`regard problem`, `regard answer` and `regard homework` from a shell."""

from __future__ import annotations

import io

import pytest

from regard.cli import main


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.parametrize(
    ("answer", "code", "named"),
    [
        ("3*D**2 + 3*D", 0, "right: the same formula"),
        ("3*D**2", 0, "convention: biases are not counted"),
        ("3*D**2 + 3", 1, "D entries"),
        ("-3*D**2", 1, "N = 1, D = 1"),
    ],
)
def test_answers_are_graded(capsys, answer, code, named):
    found, out, _ = run(capsys, "answer", "udl-12.1", answer)
    assert (found, named in out) == (code, True), out


def test_an_answer_may_begin_with_a_minus_and_come_from_a_pipe(capsys, monkeypatch):
    assert run(capsys, "answer", "udl-12.4/off-diagonal", "-y_i*y_j")[0] == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("N^2\n"))
    assert run(capsys, "answer", "udl-12.1/attention", "-")[0] == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("N+" * 500_000))
    code, _, err = run(capsys, "answer", "udl-12.1/attention", "-")
    assert code == 2
    assert "characters" in err


def test_fresh_sizes_are_shown_and_their_value_is_right(capsys):
    code, out, _ = run(capsys, "problem", "udl-12.9", "--seed", "7")
    assert code == 0
    line = next(line for line in out.splitlines() if "its value for" in line)
    sizes = dict(part.split(" = ") for part in line.partition("for ")[2].split(", "))
    value = int(sizes["N"]) ** 2 * int(sizes["C"])
    assert run(capsys, "answer", "udl-12.9", str(value), "--seed", "7")[0] == 0
    assert run(capsys, "answer", "udl-12.9", str(value + 1), "--seed", "7")[0] == 1


def test_unknown_problems_and_questions_are_refused(capsys):
    assert run(capsys, "problem", "udl-99")[0] == 2
    code, _, err = run(capsys, "answer", "udl-12.1/biasses", "3")
    assert code == 2
    assert "udl-12.1/biases" in err


def test_homework_is_made_and_graded(capsys, tmp_path):
    folder = str(tmp_path / "hw")
    make = ("homework", "make", "--problems", "udl-12.1/attention", "--seed", "7", "--folder", folder, "--no-pdf")
    assert run(capsys, *make, "--students", "ada")[0] == 0
    (tmp_path / "hw" / "ada" / "sheet.md").write_text("answer udl-12.1/attention: N^2\n")
    code, out, err = run(capsys, "homework", "grade", folder, "--csv", str(tmp_path / "grades.csv"))
    assert (code, "1/1" in out, "grades.csv" in err) == (0, True, True)


def test_problems_are_listed(capsys):
    code, out, _ = run(capsys, "problem")
    assert code == 0
    assert "By topic" in out
    assert "Prince, Understanding Deep Learning" in out
    assert "nyu-1.5d" in out.partition("By topic")[2]


def test_a_page_is_shown_and_opened_in_a_browser(capsys, tmp_path, monkeypatch):
    code, out, _ = run(capsys, "problem", "nyu-1.3d")
    assert code == 0
    assert "regard errata nyu-1.3d" in out
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    file = tmp_path / "page.html"
    assert run(capsys, "problem", "NYU-1.3d", "--open", "-o", str(file))[0] == 0
    assert opened == [file.as_uri()]
    assert "<math" in file.read_text(encoding="utf-8")


def test_a_function_is_run_and_the_command_says_so(capsys, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "import numpy\ndef attention(Q, K, V, beta):\n"
        "    e = numpy.exp(beta * K.T @ Q)\n    return V @ (e / e.sum(0))\n"
    )
    code, out, err = run(capsys, "answer", "nyu-1.1a", f"{file}:attention")
    assert (code, out) == (0, "right: all 5 cases\n")
    assert f"running {file}, in a process of its own" in err
    file.write_text("def attention(Q, K, V, beta):\n    return V.mean(1, keepdims=True) + 0 * Q[:1]\n")
    code, out, _ = run(capsys, "answer", "nyu-1.1a", f"{file}:attention")
    assert code == 1
    assert "smallest case" in out


def test_errata_are_listed_and_run(capsys):
    code, out, _ = run(capsys, "errata")
    assert code == 0
    assert "48 entries" in out
    assert (
        out.index("bis-12.7")
        < out.index("udl-12.1:")
        < out.index("nyu-1.1a")
        < out.index("ttic-1:")
        < out.index("eth-q2")
    )
    code, out, _ = run(capsys, "errata", "udl-12.3")
    assert code == 0
    assert "Softmax[Pᵀ S P]" in out.replace("Softmax [", "Softmax[")
    assert "$" not in out
    assert run(capsys, "errata", "udl-99")[0] == 2
