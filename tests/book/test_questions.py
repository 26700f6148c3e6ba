"""Every question: five right and five wrong answers or more, conventions, mistakes, and values by other means."""

from __future__ import annotations

import ast
import json

import numpy
import pytest
import sympy
import torch

from regard.book.expression import parse_formula
from regard.book.grading import grade
from regard.book.questions import find_questions, get_question, list_questions
from regard.book.questions.base import to_exact
from regard.errors import AnswerError, InputError

FORMULAS = [question for question in list_questions().values() if question.kind == "formula"]
OTHERS = [question for question in list_questions().values() if question.kind in ("number", "matrix")]
# Other ways to write the answer; five more are made from every expected formula.
WRITTEN_BY_HAND = {
    "udl-12.1": ["3D^2 + 3D", "3*D*(D+1)", "3(D² + D)", "3*(D^2+D)", "D*D*3 + D*3", "3 × D × (D + 1)"],
    "udl-12.1/attention": ["N*N", "N^2", "N²", "(N)**2", "N*(N-1) + N"],
    "udl-12.1/fc-weights": ["(D*N)**2", "(N*D)^2", "D²*N²", "D*N*D*N", "(D*N)*(N*D)"],
    "udl-12.4/diagonal": ["y_i - y_i**2", "y_i - y_i^2", "y_i(1-y_i)"],
    "udl-12.7": ["3D^2 + 2D(N+1)", "D*(3*D + 2*N + 2)", "3*D*D + (N+1)*D + (N+1)*D"],
    "udl-12.10/features": ["(D+1)*(D+2)/2", "1 + 1.5*D + 0.5*D**2", "(D**2 + 3*D + 2)/2"],
    "nyu-1.1b": ["1/(1 + exp(beta*(z2 - z1)))", "sigmoid(beta*(z1 - z2))", "1/(1 + exp(-β*(z1 - z2)))"],
    "nyu-1.1e": ["1/(1 + (1 - a)/a*exp(-s))", "sigmoid(log(a/(1-a)) + s)", "a/(a + (1-a)*exp(-s))"],
    "nyu-1.3c": ["(log(n-1) - log(eps))/g", "ln((n - 1)/ε)/g"],
    "ttic-1a": ["3 + ⌈lg(U)⌉ + ⌈lg(T)⌉", "(1 + ceil(lg(U))) + 1 + ceil(lg(T)) + 1"],
    "eth-d1": ["1/exp(alpha)", "exp(-α)"],
    "eth-e3": ["floor((H - 1)/s) + 1", "(H + s - 1)//s", "-floor(-H/s)"],
}


def ways_to_write(text: str, symbols: list[str]) -> list[str]:
    """The same formula written by other hands: by sympy, with ^, with spaces, moved and split."""
    formula = parse_formula(text, symbols)
    made = [text, f"({text})", text.replace("**", "^"), text.replace(" ", ""), f" {text} + 0", f"2*({text})/2"]
    made += [f"({text})**1", f"0.5*({text}) + ({text})/2", f"-(-({text}))"]
    expression = formula.to_sympy()
    if not any(name in text for name in ("ceil", "floor", "min", "max", "log2")):
        made += [str(sympy.expand(expression)), str(sympy.factor(expression))]
    return made


@pytest.mark.parametrize("question", FORMULAS, ids=lambda question: question.id)
def test_right_answers_are_right_and_wrong_ones_are_wrong(question):
    symbols = [symbol.name for symbol in question.symbols]
    right = [*ways_to_write(question.expected, symbols), *WRITTEN_BY_HAND.get(question.id, [])]
    assert len(set(right)) >= 5
    for answer in right:
        assert grade(question, answer).grade == "right", answer
    wrong = [
        *question.mistakes,
        f"{question.expected} + 1",
        f"3*({question.expected})",
        f"-({question.expected}) - 1/7",
    ]
    assert len(question.mistakes) >= 5
    for answer in wrong:
        verdict = grade(question, answer)
        assert verdict.grade == "wrong", f"{answer}: {verdict}"
        assert verdict.case or question.sizes, answer
        assert verdict.found != verdict.expected, answer
    for answer, why in question.mistakes.items():
        assert grade(question, answer).because in question.mistakes.values(), f"{answer}: {why}"
    for name, answer in question.conventions.items():
        verdict = grade(question, answer)
        assert (verdict.grade, verdict.because) == ("convention", name)


@pytest.mark.parametrize("question", FORMULAS, ids=lambda question: question.id)
def test_a_number_for_fresh_sizes_is_graded(question):
    sizes = question.fresh_sizes(7)
    assert sizes == question.fresh_sizes(7)
    formula = parse_formula(question.expected, list(sizes))
    value = formula.evaluate(to_exact(sizes))
    assert grade(question, str(value), seed=7).grade == "right"
    assert grade(question, str(value + 1), seed=7).grade == "wrong"


@pytest.mark.parametrize("question", OTHERS, ids=lambda question: question.id)
@pytest.mark.parametrize("seed", [None, 7])
def test_numbers_and_matrices_are_graded(question, seed):
    solved = numpy.asarray(question.solve(question.fresh_sizes(seed)), dtype=float)
    assert grade(question, json.dumps(solved.tolist()), seed).grade == "right"
    assert grade(question, json.dumps((solved + 1).tolist()), seed).grade == "wrong"
    for name, solve in question.conventions.items():
        other = json.dumps(numpy.asarray(solve(question.fresh_sizes(seed))).tolist())
        verdict = grade(question, other, seed)
        assert verdict.because == name or verdict.grade == "right", name  # an involution is its own inverse


def test_the_smallest_case_is_the_smallest():
    verdict = grade(get_question("udl-12.1/attention"), "N")
    assert (verdict.case, verdict.found, verdict.expected) == ("N = 2, D = 1", "2", "4")
    assert grade(get_question("udl-12.1"), "3*D**2").because == "biases are not counted"


def test_every_part_has_a_problem_and_an_unknown_one_is_refused():
    assert len({question.problem for question in list_questions().values()}) >= 50
    assert find_questions("udl-12.4")[0].id == "udl-12.4"
    assert get_question("UDL-12.1").id == "udl-12.1"
    with pytest.raises(InputError, match=r"udl-12\.1"):
        get_question("udl-12.1/biasses")


# Expected values by other means: modules of torch, brute force, and numbers of the sources


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def evaluate(identifier: str, **sizes: int) -> float:
    question = get_question(identifier)
    return float(parse_formula(question.expected, [symbol.name for symbol in question.symbols]).evaluate(sizes))


def test_counts_are_those_of_torch():
    nn = torch.nn
    assert evaluate("udl-12.1", N=3, D=7) == 3 * count(nn.Linear(7, 7))
    assert evaluate("udl-12.1/fc-weights", N=3, D=5) + evaluate("udl-12.1/fc-biases", N=3, D=5) == count(
        nn.Linear(15, 15)
    )
    assert evaluate("nyu-1.2a", e=12, h=3) == count(nn.MultiheadAttention(12, 3))
    assert evaluate("nyu-1.2b", c=6, f=9, k=5, g=3) == count(nn.Conv1d(6, 9, 5, groups=3, bias=False))
    assert evaluate("nyu-1.4a", d=12, f=31) == count(nn.TransformerEncoderLayer(12, 3, 31))
    assert evaluate("nyu-1.4b", d=12, f=31) == count(nn.TransformerDecoderLayer(12, 3, 31))
    assert evaluate("nyu-1.4c", d=12, f=31) == count(nn.Linear(12, 31)) + count(nn.Linear(31, 12))
    assert evaluate("nyu-1.4e/parameters", d=12) == count(nn.LayerNorm(12))
    assert evaluate("nyu-1.5a/embedding", P=5, C=3, D=7) == count(nn.Conv2d(3, 7, 5, stride=5))
    assert evaluate("nyu-1.5d", D=7, K=11, n=3) == count(nn.Linear(7, 11))


@pytest.mark.parametrize(
    ("identifier", "sizes", "value"),
    [
        ("bis-12.4/fourth", {"D": 64}, 12_672),
        ("udl-12.1/attention", {"N": 197, "D": 768}, 38_809),
        ("udl-12.5/scores", {"N": 256, "D": 512, "H": 8}, 33_554_432 / 8),
        ("udl-12.7", {"N": 255, "D": 512}, 1_048_576),
        ("udl-12.8", {"n": 16, "r": 3}, 10_000),
        ("udl-12.8/window", {"n": 16, "w": 4}, 4_096),
        ("udl-12.8/axial", {"n": 16}, 7_936),
        ("udl-12.9", {"N": 256, "C": 512}, 33_554_432),
        ("udl-12.9/channels", {"N": 256, "C": 512}, 67_108_864),
        ("udl-12.10", {"N": 256, "D": 64}, 2_129_920),
        ("udl-12.10/features", {"D": 5}, 21),
        ("nyu-1.4a", {"d": 512, "f": 2048}, 3_152_384),
        ("nyu-1.4b", {"d": 512, "f": 2048}, 4_204_032),
        ("ttic-1", {"T": 1024, "J": 512, "K": 8}, 1_879_048_192),
        ("ttic-1a", {"T": 1024, "U": 64}, 19),
        ("ttic-1b", {"T": 4096, "J": 1024, "U": 64, "K": 16}, 45),
        ("ttic-1b/serial", {"T": 1024, "J": 512, "U": 64}, 2_624),
        ("eth-a1", {"N_h": 4, "D_in": 10, "D_hid": 3, "D_o": 5, "D_out": 7}, 587),
        ("eth-b2", {"D": 64}, 65_535),
        ("eth-b2/stored", {"N": 1024, "D": 64}, 150_994_944),
        ("eth-q2", {"alpha": "1/2"}, 1.0),
    ],
)
def test_expected_answers_are_the_numbers_of_the_sources(identifier, sizes, value):
    assert evaluate(identifier, **sizes) == value


def test_the_jacobian_is_that_of_many_digits():
    question = get_question("udl-12.4")
    jacobian = question.solve(question.sizes)
    assert jacobian[2, 2] == pytest.approx(5.6377419377708341e-42, rel=1e-14)
    assert jacobian[0, 3] == pytest.approx(-1.0225689071173034e-86, rel=1e-14)
    y = torch.softmax(torch.tensor(question.sizes["z"]), 0)
    textbook = (torch.diag(y) - torch.outer(y, y)).numpy()
    verdict = grade(question, json.dumps(textbook.tolist()))
    assert verdict.grade == "wrong"
    assert verdict.case == "entry 3, 3"


def test_prompts_name_every_symbol_of_the_answer():
    for question in FORMULAS:
        names = {symbol.name for symbol in question.symbols}
        assert parse_formula(question.expected, list(names)).used <= names
        assert all(symbol.meaning for symbol in question.symbols), question.id


def test_an_answer_of_the_wrong_kind_is_refused():
    with pytest.raises(AnswerError, match=r"file\.py:function"):
        grade(get_question("nyu-1.1a"), "V*softmax(K*Q)")
    with pytest.raises(AnswerError, match="asks for a formula"):
        grade(get_question("udl-12.1"), "answer.py:count")
    with pytest.raises(AnswerError, match="run a Python file"):
        grade(get_question("nyu-1.1a"), "answer.py:attention", run_code=False)


def test_the_grader_reads_python_syntax_without_python():
    """No name of a builtin is reachable: every tree that is accepted has these nodes only."""
    allowed = {
        "BinOp",
        "UnaryOp",
        "Constant",
        "Name",
        "Call",
        "Load",
        "Add",
        "Sub",
        "Mult",
        "Div",
        "Pow",
        "USub",
        "UAdd",
    }
    for question in FORMULAS:
        tree = parse_formula(question.expected, [symbol.name for symbol in question.symbols]).tree
        assert {type(node).__name__ for node in ast.walk(tree)} <= allowed
