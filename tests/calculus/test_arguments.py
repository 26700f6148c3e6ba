"""Every public function takes lists of numbers where it takes tensors, and refuses anything else in four parts."""

import inspect
import math

import numpy as np
import pytest
import torch
from agreement import refused
from torch import Tensor

import regard.calculus
from regard import calculus
from regard.errors import CalculusError

ROW, OTHER = [1.0, -2.0, 0.5], [0.25, 1.0, -1.5]
OUTPUT, LSE, SCORE, VALUE = [[1.0, 2.0], [3.0, -1.0], [0.5, 4.0]], [0.5, 1.5, -2.0], [0.1, -0.3, 2.0], [2.0, 5.0]
WEIGHT = [0.5, 0.25, 0.9]
QUERY, KEY = [[1.0, 2.0], [0.0, -1.0], [3.0, 0.5]], [1.0, -0.5]
KEYS, VALUES = [[1.0, 0.0], [0.5, 2.0]], [[1.0, 0.0, 2.0], [3.0, -1.0, 1.0]]
FACTOR, ACROSS = [[[0.5, 0.5], [0.25, 0.75]]], [[[0.2, 0.3, 0.5]]]
GRID = [[[[1.0], [2.0], [3.0]], [[4.0], [5.0], [6.0]]]]

# A call of every public function in plain lists, and which of its arguments are tensors.
CALLS = {
    "softmax": ({"scores": ROW}, ["scores"]),
    "logsumexp": ({"scores": ROW}, ["scores"]),
    "entropy": ({"scores": ROW}, ["scores"]),
    "entropy_slope": ({"scores": ROW}, ["scores"]),
    "jacobian": ({"scores": ROW}, ["scores"]),
    "jvp": ({"scores": ROW, "tangent": OTHER}, ["scores", "tangent"]),
    "vjp": ({"scores": ROW, "cotangent": OTHER}, ["scores", "cotangent"]),
    "merge": ({"output_a": OUTPUT, "lse_a": LSE, "output_b": OUTPUT[::-1], "lse_b": SCORE}, ...),
    "append_key": ({"output": OUTPUT, "lse": LSE, "score": SCORE, "value": VALUE}, ...),
    "remove_key": ({"output": OUTPUT, "lse": [2.5, 1.5, 4.0], "score": SCORE, "value": VALUE}, ...),
    "perturb_key": ({"weight": WEIGHT, "output": OUTPUT, "value": VALUE, "score_change": SCORE}, ...),
    "perturb_key_first_order": ({"weight": WEIGHT, "output": OUTPUT, "value": VALUE, "score_change": SCORE}, ...),
    "score_change": ({"query": QUERY, "key": KEY, "shift": [0.5, 1.0]}, ...),
    "perturb_attention": (
        {"query": QUERY, "key": KEYS, "value": VALUES, "index": 1, "shift": [0.5, 1.0]},
        ["query", "key", "value", "shift"],
    ),
    "separable_attention": ({"rows": FACTOR, "columns": ACROSS, "x": GRID}, ...),
    "separable_weights": ({"rows": FACTOR, "columns": ACROSS}, ...),
    "axis_weights": ({"rows": FACTOR, "columns": ACROSS}, ...),
    "sinusoidal": ({"positions": [0.0, 1.0, 2.5], "dim": 4}, ["positions"]),
    "sinusoidal_rotation": ({"shift": [0.0, 1.0, 2.5], "dim": 4}, ["shift"]),
    "dot_product_moments": ({"dim": 3}, []),
    "connected_weight": ({"weights": [[0.25, 0.75], [0.5, 0.5]], "value_dim": 3}, ["weights"]),
    "perturb_key_gaussian": (
        {"weight": WEIGHT, "output": OUTPUT, "value": VALUE, "deviation": [0.1, 0.0, 2.0]}, ...,
    ),
    "skip_keys": ({"scores": [0.0, -5.0, -20.0], "tolerance": 1e-3}, ["scores"]),
    "straight_through": ({"scores": ROW}, ["scores"]),
}  # fmt: skip
FUNCTIONS = [name for name in regard.calculus.__all__ if inspect.isfunction(getattr(calculus, name))]
ARGUMENTS = [
    (name, argument) for name, (words, kinds) in CALLS.items() for argument in (words if kinds is ... else kinds)
]
# What takes positions takes whole numbers too: they count tokens.
WHOLE = {("sinusoidal", "positions"), ("sinusoidal_rotation", "shift")}


def flat(result) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def test_every_public_function_is_called_here():
    assert sorted(CALLS) == sorted(FUNCTIONS)
    for name, (words, _) in CALLS.items():
        assert set(words) <= set(inspect.signature(getattr(calculus, name)).parameters)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "dot_product_moments"])
@pytest.mark.parametrize("form", [torch.tensor, np.array, lambda values: torch.tensor(values).double()])
def test_lists_arrays_and_tensors_are_the_same_numbers(name, form):
    words, kinds = CALLS[name]
    tensors = {key: form(value) if kinds is ... or key in kinds else value for key, value in words.items()}
    for one, other in zip(
        flat(getattr(calculus, name)(**words)), flat(getattr(calculus, name)(**tensors)), strict=True
    ):
        assert one.dtype == (torch.bool if name == "skip_keys" else torch.get_default_dtype())
        torch.testing.assert_close(one, other.to(one.dtype))


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
@pytest.mark.parametrize(
    "wrong",
    [None, "1, 2, 3", b"1", ["a", "b"], [[1.0], [1.0, 2.0]], [None], {"a": 1.0}, object(), [True, False], [1j, 2j],
     torch.tensor([True, False, True]), torch.tensor([1, 2, 3]), torch.tensor([1j, 2.0]), np.array([1, 2], dtype=bool),
     lambda: 0],
    ids=lambda wrong: type(wrong).__name__,
)  # fmt: skip
def test_what_is_no_tensor_of_real_numbers_is_refused(name, argument, wrong):
    if (name, argument) in WHOLE and isinstance(wrong, Tensor) and wrong.dtype == torch.int64:
        return
    words = {**CALLS[name][0], argument: wrong}
    with refused(CalculusError):
        getattr(calculus, name)(**words)


@pytest.mark.parametrize(
    ("name", "argument"), [(name, argument) for name, argument in ARGUMENTS if (name, argument) not in WHOLE]
)
def test_shapes_that_do_not_belong_together_are_refused(name, argument):
    words, _ = CALLS[name]
    alone = len([each for each in ARGUMENTS if each[0] == name]) == 1 or name == "axis_weights"
    # No axis; a prime number of entries that nothing else has, on the last axis and on the first.
    for change in ("none", "last", "first"):
        value = torch.tensor(words[argument])
        if change == "none":
            value = torch.tensor(1.0)
        elif alone:
            continue
        elif change == "last":
            value = torch.ones(*value.shape[:-1], 11)
        else:
            value = torch.ones(11, *value.shape)
            words_batch = {key: torch.ones(7, *torch.tensor(own).shape) if (name, key) in ARGUMENTS else own
                           for key, own in words.items()}  # fmt: skip
            with refused(CalculusError):
                getattr(calculus, name)(**{**words_batch, argument: value})
            continue
        if change == "none" and name in ("jvp", "vjp") and argument != "scores":
            continue  # a number broadcasts
        if change == "last" and FREE.get((name, argument)):
            continue
        with refused(CalculusError):
            getattr(calculus, name)(**{**words, argument: value})


# The last axis of these is no other argument's: queries of factors, channels.
FREE = {("separable_attention", "x"): True, ("separable_weights", "rows"): True, ("separable_weights", "columns"): True,
        ("perturb_attention", "value"): True}  # fmt: skip


@pytest.mark.parametrize("name", ["softmax", "logsumexp", "entropy", "entropy_slope"])
def test_axes_masks_and_temperatures_are_refused_with_a_reason(name):
    function = getattr(calculus, name)
    scores = torch.randn(3, 5)
    for dim in (2, -3, 1.5, "last", None, True):
        with refused(CalculusError, "dim"):
            function(scores, dim=dim)
    for where in ("all", [1, 0, 1, 0, 1], torch.ones(3, 5), [True, False], torch.ones(4, 1, dtype=torch.bool)):
        with refused(CalculusError, "where"):
            function(scores, where=where)
    for beta in ("one", None, 1j, math.nan, True, torch.ones(5), torch.ones(3, 5), torch.ones(4, 1), ["a"]):
        with refused(CalculusError, "beta"):
            function(scores, beta=beta)
    visible = [True, False, True, True, False]
    assert torch.equal(function(scores, where=visible), function(scores, where=torch.tensor(visible)))
    assert torch.equal(function(scores, beta=[[1.0], [2.0], [3.0]])[1], function(scores[1], beta=2.0))
    assert torch.equal(function(scores, beta=torch.tensor(2)), function(scores, beta=2))


@pytest.mark.parametrize("name", ["softmax", "logsumexp", "entropy", "entropy_slope"])
def test_an_axis_counted_from_the_front_is_the_same_when_beta_adds_axes(name):
    function = getattr(calculus, name)
    scores, beta = torch.randn(5, 3, dtype=torch.float64), torch.rand(7, 1, 3, dtype=torch.float64)
    expected = torch.stack([torch.stack([function(scores[:, k], float(b[0, k])) for k in range(3)], -1) for b in beta])
    for dim in (0, -2):
        torch.testing.assert_close(function(scores, beta, dim), expected)


def test_numbers_that_are_none_are_refused():
    for words in ({"dim": "three"}, {"dim": 2.5}, {"dim": True}, {"dim": 3, "beta": "one"}, {"dim": 3, "beta": None}):
        with refused(CalculusError):
            calculus.dot_product_moments(**words)
    for samples in ("many", 1.5, None):
        with refused(CalculusError):
            calculus.dot_product_moments(3).standard_error(samples)
    for function in (calculus.sinusoidal, calculus.sinusoidal_rotation):
        for dim, base in (("four", 10.0), (4.0, 10.0), (4, "ten"), (4, None), (4, math.inf), (4, math.nan), (4, -1)):
            with refused(CalculusError):
                function([0.0, 1.0], dim, base=base)
    assert torch.equal(calculus.sinusoidal(torch.arange(5), 4), calculus.sinusoidal(range(5), 4))
    for index in ("first", 1.0, None, True, 2, -3):
        with refused(CalculusError, "index"):
            calculus.perturb_attention(QUERY, KEYS, VALUES, index, shift=[0.5, 1.0])
    for words in ({"stretch": "two"}, {"stretch": True}, {"shift": [0.5, 1.0], "beta": "one"}):
        with refused(CalculusError):
            calculus.score_change(QUERY, KEY, **words)
    double = torch.tensor(QUERY).double()
    for words in ({"query": double}, {"shift": torch.ones(2).double()}):
        with refused(CalculusError, "one dtype"):
            calculus.score_change(**{"query": torch.tensor(QUERY), "key": torch.tensor(KEY), "shift": [1, 2], **words})


def test_a_list_keeps_all_its_digits_beside_a_tensor_of_doubles():
    given = calculus.jvp(torch.zeros(2, dtype=torch.float64), [0.1, 0.0])
    assert given[0].item() == 0.25 * 0.1
