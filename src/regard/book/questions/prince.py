"""Questions of Prince, Understanding Deep Learning, chapter 12: parameters, softmax, heads."""

from __future__ import annotations

import math

import numpy

from regard.book.questions.base import Question, Sizes, draw_normal, formula, softmax

NO_BIASES = "the biases are forgotten"


def _jacobian(sizes: Sizes) -> numpy.ndarray:
    """y_i (delta_ij - y_j); the diagonal as y_i times the sum of the other y, which 1 - y would round to zero."""
    y = softmax(numpy.asarray(sizes["z"], dtype=float))
    jacobian = -numpy.outer(y, y)
    numpy.fill_diagonal(jacobian, [y[i] * numpy.delete(y, i).sum() for i in range(len(y))])
    return jacobian


def _permute_columns(sizes: Sizes, inverse: bool = False) -> numpy.ndarray:
    order = numpy.argsort(sizes["order"]) if inverse else numpy.asarray(sizes["order"])
    return numpy.asarray(sizes["Sa"])[:, order]


def _draw_columns(generator: numpy.random.Generator) -> Sizes:
    return {"Sa": draw_normal(generator, 3, 5), "order": generator.permutation(5)}


QUESTIONS = (
    formula(
        "udl-12.1",
        "How many parameters (weights and biases) do queries, keys and values of self-attention with N tokens "
        "of dimension D have?",
        "N tokens, D dimension",
        "3*D**2 + 3*D",
        {
            "3*D": "the weights are forgotten",
            "3*D**2 + 3": "each of the three biases is a vector with D entries",
            "3*D**2 + 3*D + N**2": "attention weights are computed, not learned",
            "3*N**2 + 3*D": "the matrices are D x D, whatever the number of tokens",
            "4*D**2 + 4*D": "the source has no output matrix",
            "D**2 + D": "there are three of them: queries, keys and values",
        },
        conventions={"biases are not counted": "3*D**2"},
    ),
    formula(
        "udl-12.1/biases",
        "How many biases do queries, keys and values have?",
        "N tokens, D dimension",
        "3*D",
        {
            "3": "a bias is a vector with D entries",
            "D": "there are three of them",
            "3*N": "all tokens share the biases",
            "3*N*D": "all tokens share the biases",
            "N*D": "this is the count of the fully connected layer",
        },
    ),
    formula(
        "udl-12.1/attention",
        "How many attention weights a[x_m, x_n] are there?",
        "N tokens, D dimension",
        "N**2",
        {
            "N": "each of the N tokens has a weight for each of the N tokens",
            "N*(N-1)": "a token attends to itself too",
            "N*D": "a weight belongs to a pair of tokens, not to a channel",
            "D**2": "a weight belongs to a pair of tokens",
            "N*(N+1)/2": "this is the count with a causal mask; the weights are not symmetric",
        },
    ),
    formula(
        "udl-12.1/fc-weights",
        "How many weights has a fully connected layer from all D N inputs to all D N outputs?",
        "N tokens, D dimension",
        "D**2*N**2",
        {
            "D*N": "this is the number of biases",
            "D**2*N": "each output sees the inputs of all N tokens",
            "D*N**2": "each output sees all D channels",
            "2*D*N": "a weight for each pair of input and output, not for each input and output",
            "D**2 + N**2": "the pairs multiply",
        },
        conventions={"biases are counted": "D**2*N**2 + D*N"},
    ),
    formula(
        "udl-12.1/fc-biases",
        "How many biases has the fully connected layer from all D N inputs to all D N outputs?",
        "N tokens, D dimension",
        "D*N",
        {
            "N**2": "there is one bias for each of the D N outputs",
            "D": "each token has outputs of its own",
            "N": "each token has D outputs",
            "D**2*N**2": "this is the number of weights",
            "3*D": "this is self-attention",
        },
    ),
    Question(
        "udl-12.3",
        "Sa (3 x 5) is the output of self-attention for the tokens in the columns of X. Column i of the new "
        "input X' is column "
        "order[i] of X (counted from 0). Give the output for X'.",
        "matrix",
        solve=_permute_columns,
        conventions={"the inverse permutation": lambda sizes: _permute_columns(sizes, inverse=True)},
        sizes=_draw_columns(numpy.random.default_rng(0)),
        draw=_draw_columns,
    ),
    Question(
        "udl-12.4",
        "Give the 5 x 5 matrix of the derivatives dy_i/dz_j of y = softmax(z).",
        "matrix",
        solve=_jacobian,
        sizes={"z": numpy.array([-3.0, 1.0, 100.0, 5.0, -1.0])},
        draw=lambda generator: {"z": numpy.round(5 * generator.standard_normal(5), 1)},
    ),
    formula(
        "udl-12.4/diagonal",
        "What is dy_i/dz_i of y = softmax(z), in y_i?",
        "y_i:share the value",
        "y_i*(1 - y_i)",
        {
            "y_i**2": "the numerator depends on z_i too",
            "-y_i**2": "this is the rule for i and j that differ",
            "y_i": "the sum in the denominator depends on z_i too",
            "1 - y_i": "a factor y_i is missing",
            "y_i*(1 + y_i)": "the derivative of the denominator has a minus sign",
        },
    ),
    formula(
        "udl-12.4/off-diagonal",
        "What is dy_i/dz_j of y = softmax(z) for two different i and j?",
        "y_i:share the value at i, y_j:share the value at j",
        "-y_i*y_j",
        {
            "y_i*y_j": "the sign: a larger z_j takes from y_i",
            "0": "the sum in the denominator depends on z_j",
            "y_i*(1 - y_j)": "this is the rule for i = j",
            "-y_i": "a factor y_j is missing",
            "-y_j*(1 - y_i)": "the numerator does not depend on z_j",
        },
    ),
    Question(
        "udl-12.4/function",
        "Write a function `jacobian(z)` that returns dy_i/dz_j for any number of scores z, with all digits "
        "also where one y is "
        "nearly 1.",
        "function",
        solve=_jacobian,
        draw=lambda generator: {"z": numpy.round(30 * generator.standard_normal(generator.integers(2, 6)), 1)},
        tolerance=1e-6,
    ),
    formula(
        "udl-12.5",
        "H heads have queries, keys and values of dimension D/H. How many weights (no biases) do all heads "
        "have together?",
        "D dimension, H heads",
        "3*D**2",
        {
            "3*D**2/H": "the matrix of a head is D/H x D, not D/H x D/H",
            "3*H*D**2": "this is with heads of dimension D",
            "3*(D/H)**2": "the matrix of a head is D/H x D, and there are H heads",
            "D**2": "there are queries, keys and values",
            "3*D**2/H**2": "the matrix of a head is D/H x D, and there are H heads",
        },
        conventions={"the output matrix is counted": "4*D**2"},
        holds=lambda sizes: sizes["D"] % sizes["H"] == 0,
    ),
    formula(
        "udl-12.5/scores",
        "How many multiply-adds (MACs) do the scores of one head of dimension D/H take, for N tokens?",
        "N tokens, D dimension, H heads",
        "N**2*D/H",
        {
            "N**2*D": "this is all heads together",
            "N**2*(D/H)**2": "a score is one inner product over D/H channels",
            "N*D/H": "each of the N queries meets N keys",
            "(D/H)**2": "the number of tokens is missing",
            "H*N**2*D": "a head has D/H channels, and this question is about one head",
        },
        conventions={"multiplications and additions are counted separately": "2*N**2*D/H"},
        holds=lambda sizes: sizes["D"] % sizes["H"] == 0,
    ),
    formula(
        "udl-12.5/memory",
        "How many attention weights do all H heads have, for N tokens?",
        "N tokens, D dimension, H heads",
        "H*N**2",
        {
            "N**2": "each head has its own",
            "N**2/H": "each head has N x N of them, whatever its dimension",
            "H*N": "each query has N weights",
            "N**2*D": "this is the cost of the scores",
            "H*N**2*D": "a weight is one number, not one for each channel",
        },
    ),
    formula(
        "udl-12.6",
        "An untrained masked language model guesses uniformly among V tokens. What is its cross-entropy loss?",
        "V vocabulary",
        "log(V)",
        {
            "1/V": "this is the probability, the loss is minus its logarithm",
            "-log(V)": "the sign: the loss is positive",
            "V": "the loss is a logarithm",
            "log(2)": "this is next sentence prediction",
            "log(1/V)": "the sign: the loss is positive",
        },
        conventions={"in bits": "log2(V)"},
    ),
    formula(
        "udl-12.6/altered",
        "A token is chosen with probability p; of the chosen, 80 % become [MASK], 10 % a uniform token of the "
        "vocabulary (V "
        "tokens, the same one included) and 10 % stay. With which probability does a token change?",
        "p:share probability, V vocabulary",
        "p*(0.8 + 0.1*(1 - 1/V))",
        {
            "p": "a tenth of the chosen tokens stays",
            "0.8*p": "random tokens are changes too",
            "p*(0.8 + 0.1/V)": "a random token is the same one with probability 1/V, a change with 1 - 1/V",
            "0.9": "the tokens that are not chosen do not change",
            "0.8 + 0.1*(1 - 1/V)": "only the chosen tokens change",
        },
        conventions={"the random token is never the same one": "0.9*p"},
    ),
    Question(
        "udl-12.6/chosen",
        "How many tokens does BERT choose in a sequence of `length` tokens (15 %, rounded, at least one, at most 20)?",
        "number",
        solve=lambda sizes: min(20, max(1, math.floor(0.15 * sizes["length"] + 0.5))),
        sizes={"length": 128},
        draw=lambda generator: {"length": int(generator.choice((11, 47, 61, 97, 113, 256)))},
    ),
)
