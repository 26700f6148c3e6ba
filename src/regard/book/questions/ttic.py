"""Questions of TTIC 31230: attention in index notation, and its parallel time."""

from __future__ import annotations

import numpy

from regard.book.questions.base import Question, Sizes, draw_normal, formula, softmax

DIVIDES = "a head has dimension J/K"


def _attention(sizes: Sizes) -> numpy.ndarray:
    """Out[t, k I + i] = sum over t' of alpha[k, t, t'] Value[k, t', i]; no output matrix and no scale."""
    query, key, value = (numpy.einsum("tj,kju->ktu", sizes["h"], sizes[name]) for name in ("WQ", "WK", "WV"))
    alpha = softmax(numpy.einsum("ktu,ksu->kts", query, key))
    made = numpy.einsum("kts,ksi->tki", alpha, value)
    return made.reshape(made.shape[0], -1)


def _scaled(sizes: Sizes) -> numpy.ndarray:
    return _attention({**sizes, "WQ": sizes["WQ"] / numpy.sqrt(sizes["WQ"].shape[2])})


def _draw_layer(generator: numpy.random.Generator) -> Sizes:
    tokens, heads, dim = int(generator.choice((2, 3, 5))), 2, int(generator.choice((2, 3)))
    width = heads * dim
    return {
        "h": draw_normal(generator, tokens, width),
        **{name: draw_normal(generator, heads, width, dim) for name in ("WQ", "WK", "WV")},
    }


LAYER = "5 + ceil(log2(J)) + ceil(log2(U)) + 2*ceil(log2(T))"

QUESTIONS = (
    formula(
        "ttic-1",
        "T tokens of width J, K heads of dimension J/K, no output matrix. How many multiply-adds: "
        "projections, scores, sums?",
        "T tokens, J width, K heads",
        "3*T*J**2 + 2*T**2*J",
        {
            "3*T*J**2": "scores and weighted sums are forgotten",
            "3*T*J**2 + T**2*J": "scores and weighted sums cost the same",
            "3*T*J**2 + 2*K*T**2*J": DIVIDES,
            "4*T*J**2 + 2*T**2*J": "the source has no output matrix",
            "3*T*J**2 + 2*T**2": "each score is an inner product",
        },
        sizes={"T": 1024, "J": 512, "K": 8},
        holds=lambda sizes: sizes["J"] % sizes["K"] == 0,
    ),
    Question(
        "ttic-1/function",
        "Write a function `attention(h, WQ, WK, WV)` for h (T, J) and matrices (K, J, U): K heads, no scale, "
        "heads concatenated to "
        "(T, K U).",
        "function",
        solve=_attention,
        conventions={"scores are divided by the square root of U": _scaled},
        draw=_draw_layer,
        tolerance=1e-9,
    ),
    formula(
        "ttic-1a",
        "One row of the softmax on a parallel machine: products and a tree sum over U, exp, a tree sum over "
        "T, a division. How many "
        "steps, with ceil(log2(n)) for a sum of n?",
        "T tokens, U head dimension",
        "3 + ceil(log2(U)) + ceil(log2(T))",
        {
            "ceil(log2(U)) + ceil(log2(T))": "product, exp and division are a step each",
            "3 + U + T": "a tree sums n numbers in log2(n) steps",
            "3 + ceil(log2(U*T))": "each tree is rounded up on its own",
            "3 + ceil(log2(T))": "the inner product sums over U",
            "3 + T*ceil(log2(U))": "all scores are computed at once",
        },
        conventions={"the maximum is subtracted first": "4 + ceil(log2(U)) + 2*ceil(log2(T))"},
    ),
    formula(
        "ttic-1b",
        "The whole layer: projections (sums over J), the softmax as before, weighted sums over T. How many steps?",
        "T tokens, J width, U head dimension, K heads",
        LAYER,
        {
            "3 + ceil(log2(U)) + ceil(log2(T))": "projections and weighted sums are forgotten",
            "4 + ceil(log2(J)) + ceil(log2(U)) + ceil(log2(T))": "the weighted sum over T is forgotten",
            "J + U + 2*T": "this is with serial inner products",
            f"K*({LAYER})": "heads run at the same time",
            "5 + ceil(log2(J)) + ceil(log2(U)) + ceil(log2(T))": "there are two sums over T",
        },
        conventions={"the maximum is subtracted first": "6 + ceil(log2(J)) + ceil(log2(U)) + 3*ceil(log2(T))"},
    ),
    formula(
        "ttic-1b/serial",
        "Every inner product is a serial sum (n steps for n terms), everything else is free: how many steps "
        "has the layer, with "
        "sums over J, over U, of the softmax and of the weighted sum?",
        "T tokens, J width, U head dimension",
        "J + U + 2*T",
        {
            "J + U + T": "softmax and weighted sum both run over T",
            "J + ceil(log2(T))": "the weighted sum is an inner product over T",
            "J + 2*T": "the scores sum over U",
            "J*U*T": "the parts follow one another",
            "J + U": "softmax and weighted sum run over T",
        },
    ),
    formula(
        "ttic-2a",
        "Attention over an image of X x Y pixels with K heads: how many attention weights alpha[k, x1, y1, x2, y2]?",
        "X columns, Y rows, K heads",
        "K*X**2*Y**2",
        {
            "K*X*Y": "a weight belongs to a pair of pixels",
            "X**2*Y**2": "each head has its own",
            "K*(X**2 + Y**2)": "both coordinates of both pixels",
            "K*X*Y*(X + Y)": "this is axial attention",
            "K*(X + Y)**2": "an image has X Y pixels",
        },
    ),
    formula(
        "ttic-2b",
        "The layer on X x Y pixels, on a parallel machine: how many steps (as in 1b, sums over all pixels are "
        "one tree)?",
        "X columns, Y rows, J width, U head dimension",
        "5 + ceil(log2(J)) + ceil(log2(U)) + 2*ceil(log2(X*Y))",
        {
            "5 + ceil(log2(J)) + ceil(log2(U)) + 2*ceil(log2(X))": "sums run over both axes",
            "5 + ceil(log2(J)) + ceil(log2(U)) + 2*X*Y": "a tree sums n numbers in log2(n) steps",
            "5 + ceil(log2(J)) + ceil(log2(U)) + ceil(log2(X*Y))": "there are two sums over the pixels",
            "3 + ceil(log2(U)) + ceil(log2(X*Y))": "this is one row of the softmax",
            "5 + ceil(log2(U)) + 2*ceil(log2(X*Y))": "the projections sum over J",
        },
        conventions={
            "rows and columns are summed one after the other": "5 + ceil(log2(J)) + ceil(log2(U)) + "
            "2*ceil(log2(X)) + "
            "2*ceil(log2(Y))",
            "the maximum is subtracted first": "6 + ceil(log2(J)) + ceil(log2(U)) + 3*ceil(log2(X*Y))",
        },
    ),
)
