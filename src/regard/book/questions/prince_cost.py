"""Questions of Prince, Understanding Deep Learning, chapter 12: what attention costs, and how to make it cheaper."""

from __future__ import annotations

import numpy

from regard.book.questions.base import Question, Sizes, draw_normal, formula

BOTH = "scores and weighted sum are both counted"


def _phi(x: numpy.ndarray) -> numpy.ndarray:
    """elu + 1."""
    return numpy.where(x > 0, x + 1, numpy.exp(numpy.minimum(x, 0)))


def _linear_attention(sizes: Sizes) -> numpy.ndarray:
    weights = _phi(sizes["Q"]) @ _phi(sizes["K"]).T
    return weights @ sizes["V"] / weights.sum(axis=1, keepdims=True)


def _draw_attention(generator: numpy.random.Generator) -> Sizes:
    tokens, dim = (int(size) for size in generator.choice((2, 3, 5, 7), 2))
    return {name: draw_normal(generator, tokens, dim) for name in "QKV"}


QUESTIONS = (
    formula(
        "udl-12.7",
        "Masked self-attention of N tokens is computed; one token is added. How many multiply-adds are new: "
        "its query, key and "
        "value (D x D each), its scores and its weighted sum?",
        "N tokens before, D dimension",
        "3*D**2 + 2*(N + 1)*D",
        {
            "2*(N + 1)*D": "the query, key and value of the new token are forgotten",
            "3*D**2 + (N + 1)*D": "scores and weighted sum cost (N + 1) D each",
            "(N + 1)*(3*D**2 + 2*(N + 1)*D)": "this is everything from scratch",
            "3*D**2 + 2*(N + 1)**2*D": "the old rows are masked at the new key and do not change",
            "3*(N + 1)*D**2 + 2*(N + 1)*D": "the old keys and values are kept",
        },
        conventions={"N counts the new token": "3*D**2 + 2*N*D"},
        sizes=None,
    ),
    formula(
        "udl-12.7/scores",
        "How many new scores does the added token have that are not masked?",
        "N tokens before, D dimension",
        "N + 1",
        {
            "2*N + 1": "the scores of old queries with the new key are masked",
            "(N + 1)**2": "the old scores do not change",
            "N**2": "the old scores do not change",
            "1": "the new query meets all keys",
            "(N + 1)*D": "a score is one number",
        },
        conventions={"the score of the token with itself is not counted": "N"},
    ),
    formula(
        "udl-12.8",
        "An image has n x n patches. Each attends to the patches at most r rows and r columns away (2 r < n). "
        "How many pairs?",
        "n patches a side, r radius",
        "(n*(2*r + 1) - r*(r + 1))**2",
        {
            "n**2*(2*r + 1)**2": "at the border a part of the window is outside",
            "n**4": "this is full attention",
            "n**2*r**2": "the window has 2 r + 1 patches a side",
            "n*(2*r + 1) - r*(r + 1)": "this is one axis; rows and columns multiply",
            "(2*r + 1)**2": "this is one patch",
        },
        holds=lambda sizes: 2 * sizes["r"] < sizes["n"],
    ),
    formula(
        "udl-12.8/window",
        "An image has n x n patches in windows of w x w (w divides n). How many pairs does attention within "
        "windows have?",
        "n patches a side, w window side",
        "n**2*w**2",
        {
            "w**4": "this is one window; there are (n/w)^2",
            "n**4/w**2": "each patch sees w^2 patches",
            "n**2*w": "a window has w^2 patches",
            "n**4": "this is full attention",
            "n**2": "each patch sees w^2 patches",
        },
        holds=lambda sizes: sizes["n"] % sizes["w"] == 0,
    ),
    formula(
        "udl-12.8/axial",
        "An image has n x n patches. Each attends to its row and its column. How many pairs?",
        "n patches a side",
        "n**2*(2*n - 1)",
        {
            "2*n**3": "the patch itself is in its row and its column",
            "n**3": "row and column",
            "n**4": "this is full attention",
            "2*n": "this is one patch, which is counted twice",
            "n*(2*n - 1)": "there are n^2 patches",
        },
    ),
    formula(
        "udl-12.9",
        "N patches with C channels. How many multiply-adds do the scores take when patches attend to patches?",
        "N patches, C channels",
        "N**2*C",
        {
            "C**2*N": "this is the attention of channels",
            "N*C": "each of the N patches meets N patches",
            "N**2": "each score is an inner product over C channels",
            "N**2*C**2": "each score is one inner product",
            "4*N*C**2": "these are the projections",
        },
        conventions={BOTH: "2*N**2*C", "projections are counted too": "2*N**2*C + 4*N*C**2"},
        sizes={"N": 256, "C": 512},
    ),
    formula(
        "udl-12.9/channels",
        "N patches with C channels. How many multiply-adds do the scores take when channels attend to channels?",
        "N patches, C channels",
        "C**2*N",
        {
            "N**2*C": "this is the attention of patches",
            "N*C": "each of the C channels meets C channels",
            "C**2": "each score is an inner product over N patches",
            "N**2*C**2": "each score is one inner product",
            "4*N*C**2": "these are the projections",
        },
        conventions={BOTH: "2*C**2*N", "projections are counted too": "6*N*C**2"},
        sizes={"N": 256, "C": 512},
    ),
    formula(
        "udl-12.9/ratio",
        "How many times as much do the scores of channel attention cost as those of patch attention?",
        "N patches, C channels",
        "C/N",
        {
            "N/C": "this is the inverse",
            "C**2/N**2": "one factor of each cancels",
            "1": "they are equal only for N = C",
            "C*N": "it is a quotient",
            "C - N": "it is a quotient",
        },
        sizes={"N": 256, "C": 512},
    ),
    formula(
        "udl-12.10",
        "Linear attention sums g(k_m) v_m^T (D x D) and g(k_m) (D) once, and multiplies each g(q_n) with "
        "both. How many "
        "multiply-adds for N tokens?",
        "N tokens, D dimension",
        "2*N*D**2 + 2*N*D",
        {
            "N*D**2 + N*D": "there are two products: the sums, and with each query",
            "2*N**2*D": "this is softmax attention",
            "2*D**2": "this is one token",
            "2*N**2*D**2": "no N x N matrix is built",
            "2*N*D": "the state is D x D",
        },
        conventions={"the denominator is not counted": "2*N*D**2"},
    ),
    formula(
        "udl-12.10/break-even",
        "For which N do linear attention (denominator included) and softmax attention (2 N^2 D) cost the same?",
        "D dimension",
        "D + 1",
        {
            "D": "the denominator is forgotten: 2 N D more",
            "D**2": "divide both by 2 N D",
            "2*D": "both have two products",
            "D - 1": "the denominator makes linear attention dearer, not cheaper",
            "2*D + 1": "both have two products",
        },
    ),
    formula(
        "udl-12.10/features",
        "How many features has the Taylor polynomial of degree 2 of exp(q . k), products x_i x_j and x_j x_i "
        "counted once?",
        "D dimension",
        "1 + D + D*(D + 1)/2",
        {
            "D*(D + 1)/2": "the constant and the linear terms are forgotten",
            "1 + D + D*(D - 1)/2": "the squares x_i^2 are forgotten",
            "D**2": "the constant and the linear terms, and each product once",
            "2*D + 1": "products of different entries are forgotten",
            "D + D*(D + 1)/2": "the constant is forgotten",
        },
        conventions={"x_i x_j and x_j x_i are counted twice": "1 + D + D**2"},
    ),
    Question(
        "udl-12.10/function",
        "Write a function `linear_attention(Q, K, V)` with tokens in rows and g(x) = elu(x) + 1 for each entry.",
        "function",
        solve=_linear_attention,
        draw=_draw_attention,
        tolerance=1e-9,
    ),
)
