"""A mask given in place of a pattern or a bias: the error names the right argument, and that call runs."""

import re
import warnings

import pytest
import torch
from agreement import refused

from regard import BiasError, MaskWarning, PatternError, attend
from regard.backends import BACKENDS


def tensors(queries=5, keys=7):
    made = torch.Generator().manual_seed(3)
    shapes = [(2, 3, queries, 4), (2, 3, keys, 4), (2, 3, keys, 6)]
    return [torch.randn(shape, generator=made, dtype=torch.float64) for shape in shapes]


def visible(shape, seed=1):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[..., 0] = True
    return mask


def by_hand(query, key, value, mask):
    scores = query @ key.mT / 2
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value


def advised(error, name):
    """The value that the error recommends for an argument, as text."""
    return re.search(rf"{name}=(.*)", error.instead).group(1)  # type: ignore[union-attr]


@pytest.mark.parametrize("argument", ["pattern", "bias"])
@pytest.mark.parametrize("shape", [(5, 7), (2, 1, 5, 7), (3, 5, 7), (2, 3, 1, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=str)
def test_a_mask_is_refused_with_advice_that_runs_as_it_stands(argument, shape, dtype):
    query, key, value = tensors()
    mask = visible(shape).to(dtype)
    kind = PatternError if argument == "pattern" else BiasError
    with refused(kind, "Padding(lengths)", str(tuple(shape))):
        attend(query, key, value, **{argument: mask})
    with pytest.raises(kind) as caught:
        attend(query, key, value, **{argument: mask})
    expected = by_hand(query, key, value, mask.bool())
    advice = eval(advised(caught.value, "mask"), {"mask": mask})
    for backend in ("auto", *(each.name for each in BACKENDS if each.name not in ("linear", "positional", "sdpa"))):
        torch.testing.assert_close(attend(query, key, value, mask=advice, backend=backend), expected)


def test_a_bias_of_zeros_and_ones_warns_once_for_a_tensor_and_names_the_line_that_gave_it():
    query, key, value = tensors()
    mask = visible((5, 7)).double()
    with pytest.warns(MaskWarning, match=r"mask=mask.bool\(\)") as caught:
        attend(query, key, value, bias=mask)
    assert caught[0].filename == __file__
    attend(query, key, value, bias=mask)  # warnings are errors here: the second call has none
    torch.testing.assert_close(attend(query, key, value, mask=mask.bool()), by_hand(query, key, value, mask.bool()))


def test_large_masks_are_recognised_from_a_sample():
    x = torch.randn(1, 1, 300, 2)
    with pytest.warns(MaskWarning):
        attend(x, x, x, bias=visible((300, 300)).float())


@pytest.mark.parametrize(
    "bias",
    [
        torch.zeros(5, 7),
        torch.ones(5, 7),
        torch.zeros(5, 7).masked_fill(visible((5, 7)), -torch.inf),
        torch.randn(5, 7, generator=torch.Generator().manual_seed(0)),
        torch.eye(5, 7) * 2,
        torch.tensor([[0.0], [1.0], [0.0], [1.0], [1.0]]),  # does not span the keys
        torch.nn.Parameter(torch.eye(5, 7)),  # is learned
    ],
    ids=["zeros", "ones", "minus infinity", "normal", "twos", "one column", "learned"],
)
def test_other_biases_do_not_warn(bias):
    query, key, value = (tensor.float() for tensor in tensors())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = attend(query, key, value, bias=bias)
    torch.testing.assert_close(output, (query @ key.mT / 2 + bias).softmax(-1).nan_to_num() @ value)


def test_a_compiled_operator_takes_a_mask_of_numbers_in_one_graph():
    query, key, value = tensors()
    run = torch.compile(lambda bias: attend(query, key, value, bias=bias), backend="eager", fullgraph=True)
    mask = visible((5, 7)).double()
    expected = (query @ key.mT / 2 + mask).softmax(-1) @ value
    torch.testing.assert_close(run(mask), expected)


@pytest.mark.parametrize("argument", ["pattern", "bias"])
@pytest.mark.parametrize("dtype", ["bool", "int64", "uint8"])
def test_an_array_of_numpy_is_refused_as_the_mask_that_it_is(argument, dtype):
    query, key, value = tensors()
    mask = visible((5, 7)).numpy().astype(dtype)
    with pytest.raises(PatternError if argument == "pattern" else BiasError) as caught:
        attend(query, key, value, **{argument: mask})
    assert "torch.as_tensor(mask).bool()" in str(caught.value)
    advice = eval(advised(caught.value, "mask"), {"mask": mask, "torch": torch})
    torch.testing.assert_close(attend(query, key, value, mask=advice), by_hand(query, key, value, advice))


def test_lists_of_a_mask_and_arrays_of_scores_are_refused_with_what_makes_tensors_of_them():
    query, key, value = tensors()
    mask = visible((5, 7))
    with refused(PatternError, "a list of 5 rows", "torch.as_tensor(mask).bool()"):
        attend(query, key, value, pattern=mask.tolist())  # type: ignore[arg-type]
    for bias in (mask.double().numpy(), mask.double().tolist()):
        with refused(BiasError, "torch.as_tensor(bias)"):
            attend(query, key, value, bias=bias)  # type: ignore[arg-type]
