"""Reading of answers: hostile formulas are refused within a second, matrices without pickle, functions with limits."""

from __future__ import annotations

import time
from pathlib import Path

import numpy
import pytest

from regard.book.expression import parse_formula, parse_number
from regard.book.functions import run_function
from regard.book.grading import grade
from regard.book.matrices import read_matrix
from regard.book.questions import get_question, list_questions
from regard.errors import AnswerError

HOSTILE = {
    "import": "__import__('os').system('true')",
    "attribute": "D.__class__",
    "index": "D[0]",
    "lambda": "(lambda: 1)()",
    "comprehension": "[x for x in D]",
    "text": "'a'*10**9",
    "power": "9**9**9**9",
    "power of a power": "((2**4000)**4000)**4000",
    "large": "10**400000",
    "exponential": "exp(exp(exp(100)))",
    "parentheses": "(" * 5_000 + "D" + ")" * 5_000,
    "few parentheses": "(" * 150 + "D" + ")" * 150,
    "minus signs": "-" * 900 + "D",
    "a megabyte": "D+" * 500_000 + "D",
    "a megabyte of digits": "9" * 1_000_000,
    "digits": "9" * 990,
    "function": "eval(D)",
    "keyword": "exp(x=D)",
    "assignment": "(D := 3)",
    "comparison": "D < 3",
    "walrus": "f'{D}'",
    "empty": "",
    "null": "D\0",
    "boolean": "True",
    "complex": "3j",
    "unknown": "Q + D",
    "division": "1/0",
    "infinite": "1e999",
    "zero width space": "3*D\u200b**2",
    "right to left": "\u202e3*D",
    "another letter": "3*\u0414",  # looks like a D
    "wide digits": "\uff11\uff10**\uff19\uff19\uff19\uff19\uff19\uff19",
    "dunder": "__builtins__",
    "of sympy": "Symbol('D')",
    "sympify": "S(1)",
    "rational": "Rational(1, 3)",
    "infinity of sympy": "oo",
    "imaginary unit": "I*D",
    "factorial": "D!",
    "dotted": "D.is_integer",
    "condition": "D if D else N",
    "and": "D and N",
    "matrix product": "D @ N",
    "shift": "D << 9999999",
    "set": "{D}",
    "star": "exp(*[D])",
    "await": "(yield D)",
    "backslash": "D\\\nN",
    "comment": "D # \n+1",
    "newlines": "D\n" * 400,
    "surrogate": "D\ud800",
    "brackets of other kinds": "(" * 39 + "D" + "]" * 39,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answers_are_refused_within_a_second(name):
    start = time.process_time()
    with pytest.raises(AnswerError) as caught:
        grade(get_question("udl-12.1"), HOSTILE[name])
    assert time.process_time() - start < 1
    message = str(caught.value)
    assert "because" in message
    assert "instead" in message
    assert len(message) < 1_000


HOSTILE_NUMBERS = [
    "__import__('os')", "9**9**9**9", "[" * 500_000, "7," * 500_000, "[" + "7," * 400_000 + "7", "9" * 1_000_000, "\0",
    "[NaN]", "[1e999]", '{"a": 1}', "[[1], [2, 3]]", "/dev/zero", "/dev/zero.csv", "../" * 1_500 + "a.csv",
    "a.py:f;import os",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["number", "matrix", "function"])
@pytest.mark.parametrize("text", HOSTILE_NUMBERS, ids=lambda text: f"{text[:12]!a} {len(text)}")
def test_hostile_answers_to_other_questions_are_refused_or_wrong_within_a_second(kind, text):
    question = next(question for question in list_questions().values() if question.kind == kind)
    start, message = time.process_time(), ""
    try:
        verdict = grade(question, text)
    except AnswerError as refused:
        message = str(refused)
    else:
        assert verdict.grade == "wrong"
    assert time.process_time() - start < 1
    assert len(message) < 1_000


@pytest.mark.parametrize(
    "text",
    ["D**D**D", "D**(D**D)", "exp(exp(exp(D)))", "(D+1)**63*(N+1)**63", "((D+N+1)**60)**60", "2**(2**(2**D))", "D**-D"],
)
def test_costly_formulas_are_graded_wrong_within_a_second(text):
    start = time.process_time()
    verdict = grade(get_question("udl-12.1"), text)
    assert verdict.grade == "wrong"
    assert time.process_time() - start < 1


def test_usual_spellings_are_read():
    assert parse_formula("2e3 + 3D", ["D"]).evaluate({"D": 2}) == 2006
    assert parse_formula("log2(8)D", ["D"]).evaluate({"D": 5}) == 15
    assert parse_formula("(D+1)(D-1)", ["D"]).evaluate({"D": 5}) == 24
    assert parse_formula("2^3^2", []).evaluate({}) == 512
    assert parse_number("33,554,432") == parse_number("33 554 432") == 33_554_432
    assert parse_number("-1.5e-3") == parse_number("-3/2000")
    with pytest.raises(AnswerError, match=r"N\*D"):
        parse_formula("ND", ["N", "D"])


def test_matrices_are_read_from_files(tmp_path):
    matrix = numpy.array([[1.0, -2.5], [3e-45, 4.0]])
    numpy.save(tmp_path / "a.npy", matrix)
    (tmp_path / "a.csv").write_text("1, -2.5\n3e-45, 4\n")
    (tmp_path / "a.json").write_text("[[1, -2.5], [3e-45, 4]]")
    for suffix in ("npy", "csv", "json"):
        assert numpy.array_equal(read_matrix(str(tmp_path / f"a.{suffix}")), matrix)


def test_pickles_and_broken_files_are_refused(tmp_path):
    numpy.save(tmp_path / "a.npy", numpy.array([{"a": 1}], dtype=object), allow_pickle=True)
    (tmp_path / "b.npy").write_bytes(b"\x80\x04pickle")
    (tmp_path / "c.csv").write_text("1,2\n3\n")
    (tmp_path / "d.json").write_text("[" * 100_000)
    (tmp_path / "e.csv").write_text("a,b\n")
    for name in ("a.npy", "b.npy", "c.csv", "d.json", "e.csv", "missing.csv"):
        with pytest.raises(AnswerError, match="cannot be read"):
            read_matrix(str(tmp_path / name))


COLUMNS = """
import numpy
def attention(Q, K, V, beta):
    scores = numpy.exp(SIGN * beta * (K.T @ Q))
    print("a print does no harm")
    return FORM(V @ (scores / scores.sum(0)))
"""


@pytest.mark.parametrize(
    ("sign", "form", "expected"), [("1", "", "right"), ("1", "numpy.transpose", "convention"), ("-1", "", "wrong")]
)
def test_functions_are_run_and_compared(tmp_path, sign, form, expected):
    (tmp_path / "answer.py").write_text(COLUMNS.replace("SIGN", sign).replace("FORM", form))
    verdict = grade(get_question("nyu-1.1a"), f"{tmp_path}/answer.py:attention")
    assert verdict.grade == expected
    assert expected != "wrong" or "Q (" in verdict.case


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("def f(x): return open('made', 'w')", "float"),
        ("def f(x): raise ValueError('my mistake')", "my mistake"),
        ("def g(x): return x", "KeyError"),
        ("def f(x): return [0] * 10**10", "MemoryError"),
        ("import os\ndef f(x): os._exit(7)", "code 7"),
    ],
)
def test_functions_that_fail_are_refused_with_the_reason(tmp_path, source, named):
    (tmp_path / "answer.py").write_text(source)
    with pytest.raises(AnswerError, match=named):
        run_function(f"{tmp_path}/answer.py:f", [{"x": numpy.ones(2)}])


def test_a_function_that_never_ends_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("regard.book.functions.SECONDS", 1)
    (tmp_path / "answer.py").write_text("def f(x):\n    while True: pass")
    with pytest.raises(AnswerError, match=r"seconds|code"):
        run_function(f"{tmp_path}/answer.py:f", [{"x": numpy.ones(2)}])


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc to look into")
def test_what_a_function_has_started_ends_with_it(tmp_path):
    source = "import subprocess, sys\ndef f(x):\n    code = 'import time; time.sleep(60)'\n"
    source += "    return [subprocess.Popen([sys.executable, '-c', code]).pid]\n"
    (tmp_path / "answer.py").write_text(source)
    ((child,),) = run_function(f"{tmp_path}/answer.py:f", [{"x": numpy.ones(2)}])
    state = Path(f"/proc/{int(child)}/stat")
    deadline = time.monotonic() + 30  # the signal takes a moment to arrive
    while runs := state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    assert not runs
