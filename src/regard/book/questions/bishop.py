"""Questions of Bishop and Bishop, chapter 12."""

from __future__ import annotations

import numpy

from regard.book.questions.base import Question, Sizes, draw_normal, formula, softmax


def _draw_tokens(generator: numpy.random.Generator) -> Sizes:
    tokens, dim = generator.choice((2, 3, 5)), generator.choice((2, 3, 4))
    return {"X": draw_normal(generator, tokens, dim)}


def _permuted(sizes: Sizes, inverse: bool = False) -> numpy.ndarray:
    order = numpy.argsort(sizes["order"]) if inverse else numpy.asarray(sizes["order"])
    return numpy.asarray(sizes["A"])[numpy.ix_(order, order)]


def _draw_permutation(generator: numpy.random.Generator) -> Sizes:
    return {"A": numpy.round(softmax(draw_normal(generator, 4, 4)), 3), "order": generator.permutation(4)}


QUESTIONS = (
    Question(
        "bis-12.2",
        "Write a function `weights(X)` that returns the attention weights a_nm = exp(x_n . x_m) / sum over m' of "
        "exp(x_n . x_m'), for tokens in the rows of X (N, D). Scores of 1000 must not overflow.",
        "function",
        solve=lambda sizes: softmax(sizes["X"] @ sizes["X"].T),
        conventions={
            "scores are divided by the square root of D": lambda sizes: softmax(
                sizes["X"] @ sizes["X"].T / numpy.sqrt(sizes["X"].shape[1])
            ),
            "columns sum to one instead of rows": lambda sizes: softmax(sizes["X"] @ sizes["X"].T).T,
        },
        draw=_draw_tokens,
        tolerance=1e-9,
    ),
    formula(
        "bis-12.4",
        "a and b are independent with entries of mean 0 and variance 1, in D dimensions. What is E[(a . b)^2]?",
        "D dimensions",
        "D",
        {
            "1": "this is the variance after division by the square root of D",
            "sqrt(D)": "this is the standard deviation, not the variance",
            "D**2": "the cross terms have mean 0: D terms remain of D squared",
            "2*D": "E[a^2] E[b^2] is 1 for each dimension",
            "1/D": "the variance grows with the dimension",
        },
    ),
    formula(
        "bis-12.4/scale",
        "By which factor must a . b be multiplied so that its variance is 1?",
        "D dimensions",
        "1/sqrt(D)",
        {
            "1/D": "the variance would be 1/D",
            "sqrt(D)": "the factor must shrink the scores",
            "1": "without a factor the variance is D",
            "D**(-2)": "the square of the factor times D must be 1",
            "1/(2*D)": "the square of the factor times D must be 1",
        },
    ),
    formula(
        "bis-12.4/fourth",
        "a and b are also normal. What is E[(a . b)^4]?",
        "D dimensions",
        "3*D**2 + 6*D",
        {
            "3*D**2": "a . b is not normal: E[a^4] E[b^4] = 9 for each dimension adds 6 D",
            "3*D": "pairs of dimensions contribute too",
            "9*D": "pairs of dimensions contribute too",
            "D**2": "this is the square of the second moment",
            "3*D**2 + 9*D": "a dimension with itself is counted twice",
        },
    ),
    formula(
        "bis-12.5",
        "H heads of dimension D/H are merged: W^(h) = W_h^v W_h^o, each D x D. How many numbers do the H "
        "merged matrices have?",
        "D width, H heads",
        "H*D**2",
        {
            "2*D**2": "this is the count before merging",
            "D**2": "this is one head",
            "H*(D/H)**2": "a merged matrix is D x D, not D/H x D/H",
            "2*H*D**2": "value and output matrix are one matrix after merging",
            "D**2/H": "each head has a whole D x D matrix",
        },
    ),
    formula(
        "bis-12.5/break-even",
        "W^(h) (D_in x D_out) is the product of (D_in x v) and (v x D_out). For which v do both ways store "
        "equally many numbers?",
        "D_in input width, D_out output width",
        "D_in*D_out/(D_in + D_out)",
        {
            "D_in/2": "this holds only for D_out = D_in",
            "D_in + D_out": "the product D_in D_out is divided by this",
            "min(D_in, D_out)": "this is the largest rank, not the break-even",
            "D_in*D_out": "this is the count of the merged matrix",
            "(D_in + D_out)/(D_in*D_out)": "this is the inverse",
        },
    ),
    Question(
        "bis-12.7",
        "A (4 x 4) are the attention weights of four tokens. The tokens are permuted: token i of the new "
        "sequence is token "
        "order[i] of the old one (counted from 0). Give the new attention weights.",
        "matrix",
        solve=_permuted,
        conventions={"the inverse permutation": lambda sizes: _permuted(sizes, inverse=True)},
        sizes=_draw_permutation(numpy.random.default_rng(0)),
        draw=_draw_permutation,
    ),
)
