"""Questions of NYU's homework 4, parts 1.1 to 1.3: attention, heads, self-attention."""

from __future__ import annotations

import numpy

from regard.book.questions.base import Question, Sizes, draw_normal, formula, softmax

SIGN = "the sign of β: this is softargmin"


def _attention(sizes: Sizes) -> numpy.ndarray:
    return sizes["V"] @ softmax(sizes["beta"] * (sizes["K"].T @ sizes["Q"]), axis=0)


def _draw_attention(generator: numpy.random.Generator) -> Sizes:
    n, m, d, t = (int(size) for size in generator.permutation((2, 3, 4, 5)))
    return {
        "Q": draw_normal(generator, d, n),
        "K": draw_normal(generator, d, m),
        "V": draw_normal(generator, t, m),
        "beta": float(generator.choice((0.5, 1.0, 2.0))),
    }


def _hard(sizes: Sizes) -> numpy.ndarray:
    scores = sizes["K"].T @ sizes["Q"]
    return sizes["V"] @ (scores == scores.max(axis=0)).astype(float)


def _draw_hard(generator: numpy.random.Generator) -> Sizes:
    sizes = _draw_attention(generator)
    return {name: sizes[name] for name in "QKV"}


def _encoding(sizes: Sizes) -> numpy.ndarray:
    p, d = sizes["p"], sizes["d"]
    angles = p / 10_000 ** (numpy.arange(0, d, 2) / d)
    return numpy.stack([numpy.sin(angles), numpy.cos(angles)], axis=1).reshape(-1)


def _halves(sizes: Sizes) -> numpy.ndarray:
    made = _encoding(sizes)
    return numpy.concatenate([made[0::2], made[1::2]])


QUESTIONS = (
    Question(
        "nyu-1.1a",
        "Write a function `attention(Q, K, V, beta)` that returns H = V softargmax_beta(K^T Q), for Q (d, n), "
        "K (d, m), V (t, m).",
        "function",
        solve=_attention,
        conventions={"tokens are in rows: H is transposed": lambda sizes: _attention(sizes).T},
        draw=_draw_attention,
        tolerance=1e-9,
    ),
    formula(
        "nyu-1.1a/entries",
        "Q is d x n, K is d x m, V is t x m. How many entries has H?",
        "n queries, m keys, d dimension, t value dimension",
        "t*n",
        {
            "m*n": "this is the matrix A of the weights",
            "t*m": "this is V: H has a column for each query",
            "d*n": "this is Q: the columns of H are mixtures of values",
            "t*m*n": "the sum over the keys removes m",
            "t*d": "the columns belong to the queries",
        },
    ),
    formula(
        "nyu-1.1b",
        "Two scores z1 and z2. What is the weight of the first, softargmax_beta(z)_1?",
        "z1:real first score, z2:real second score, beta:positive inverse temperature",
        "exp(beta*z1)/(exp(beta*z1) + exp(beta*z2))",
        {
            "exp(-beta*z1)/(exp(-beta*z1) + exp(-beta*z2))": SIGN,
            "exp(z1)/(exp(z1) + exp(z2))": "β is forgotten",
            "exp(beta*z1)": "it is not normalised",
            "exp(beta*z2)/(exp(beta*z1) + exp(beta*z2))": "this is the weight of the second",
            "beta*exp(z1)/(exp(z1) + exp(z2))": "β belongs into the exponent",
        },
        conventions={"β is a temperature, not its inverse": "exp(z1/beta)/(exp(z1/beta) + exp(z2/beta))"},
    ),
    Question(
        "nyu-1.1b/values",
        "Give softargmax_beta(z).",
        "matrix",
        solve=lambda sizes: softmax(sizes["beta"] * numpy.asarray(sizes["z"])),
        conventions={
            "β is a temperature, not its inverse": lambda sizes: softmax(numpy.asarray(sizes["z"]) / sizes["beta"])
        },
        sizes={"z": numpy.array([1.0, 2.0, 3.0]), "beta": 10.0},
        draw=lambda generator: {"z": draw_normal(generator, 4), "beta": float(generator.choice((0.5, 2.0, 3.0)))},
    ),
    formula(
        "nyu-1.1b/scale",
        "Queries and keys have d independent entries of mean 0 and variance 1. Which β gives scores of variance 1?",
        "d dimension",
        "1/sqrt(d)",
        {
            "1/d": "the variance would be 1/d",
            "sqrt(d)": "the factor must shrink the scores",
            "1": "without a factor the variance is d",
            "d": "the factor must shrink the scores",
            "1/d**2": "β squared times d must be 1",
        },
    ),
    Question(
        "nyu-1.1c",
        "Write a function `hard_attention(Q, K, V)` (columns are tokens) that returns the limit of H for beta "
        "to infinity.",
        "function",
        solve=_hard,
        conventions={"tokens are in rows: H is transposed": lambda sizes: _hard(sizes).T},
        draw=_draw_hard,
        tolerance=1e-9,
    ),
    formula(
        "nyu-1.1c/nonzero",
        "Hard attention is a fully connected layer from vec(V) to vec(H). How many of its weights are 1 (no ties)?",
        "n queries, m keys, t value dimension",
        "n*t",
        {
            "n*t*m*t": "this is all weights; nearly all are 0",
            "n": "each selected vector has t entries",
            "m*t": "there is one selected vector for each query, not for each key",
            "n*m*t": "each query selects one key",
            "n*t**2": "an entry of a value goes to the same entry of the output only",
        },
    ),
    formula(
        "nyu-1.1d",
        "What is each entry of A (m x n) for beta = 0?",
        "n queries, m keys, d dimension",
        "1/m",
        {
            "1/d": "the weights of a column sum to one over the m keys",
            "1/n": "the columns sum to one, not the rows",
            "0": "exp(0) is 1",
            "1": "exp(0) is 1, but the column is normalised",
            "1/(m*n)": "each column sums to one on its own",
        },
    ),
    formula(
        "nyu-1.1e",
        "A key k_a becomes k_a + e. Its weight was a; s = beta e . q. What is its new weight?",
        "a:share weight, s:real change of the score",
        "a*exp(s)/(1 - a + a*exp(s))",
        {
            "a*exp(s)": "it is not normalised: the other weights shrink",
            "a + s": "s is added to the score, not to the weight",
            "a + a*(1 - a)*s": "this is the first order only",
            "a*exp(-s)/(1 - a + a*exp(-s))": "the sign: a larger score gives a larger weight",
            "a/(1 + s)": "the weight may rise or fall, by the sign of s",
        },
    ),
    formula(
        "nyu-1.1e/first-order",
        "What is the change of the weight a to first order in s = beta e . q?",
        "a:share weight, s:real change of the score",
        "a*(1 - a)*s",
        {
            "a*s": "the normalisation is forgotten: factor 1 - a",
            "-a*(1 - a)*s": "the sign: a larger score gives a larger weight",
            "s": "the derivative of the softmax is a (1 - a)",
            "(1 - a)*s": "this is the relative change",
            "-a**2*s": "this is the change of another weight that is equally large",
        },
    ),
    formula(
        "nyu-1.1e/output",
        "The weight a of the value v becomes a1. By which multiple of v - h does the output h move?",
        "a:share weight before, a1:share weight after",
        "(a1 - a)/(1 - a)",
        {
            "a1 - a": "h contains v: divide by 1 - a",
            "(a1 - a)/a": "divide by the weight of the others, 1 - a",
            "a1/a": "without a change the output does not move",
            "(a - a1)/(1 - a)": "the sign: a larger weight moves the output towards v",
            "(1 - a1)/(1 - a)": "this is the factor of the other weights",
        },
    ),
    formula(
        "nyu-1.1f",
        "A key k_a becomes alpha k_a. Its weight was a, and c = k_a . q. What is its new weight?",
        "a:share weight, alpha:positive factor, beta:positive inverse temperature, c:real inner product",
        "a*exp(beta*(alpha - 1)*c)/(1 - a + a*exp(beta*(alpha - 1)*c))",
        {
            "alpha*a": "the score is multiplied, not the weight",
            "a/alpha": "the weight rises or falls by the sign of k . q",
            "a*exp(beta*alpha*c)/(1 - a + a*exp(beta*alpha*c))": "the score rises by α - 1 times, not by α times",
            "a*exp(beta*(alpha - 1)*c)": "it is not normalised",
            "a*exp((alpha - 1)*c)/(1 - a + a*exp((alpha - 1)*c))": "β is forgotten",
        },
    ),
    formula(
        "nyu-1.1f/others",
        "The weight a of one key becomes a1. By which factor is every other weight multiplied?",
        "a:share weight before, a1:share weight after",
        "(1 - a1)/(1 - a)",
        {
            "a/a1": "the others together are 1 - a",
            "1 - a1": "divide by what they were together",
            "(1 - a)/(1 - a1)": "this is the inverse",
            "a1/a": "this is the factor of the key itself",
            "1": "the weights sum to one",
        },
    ),
    formula(
        "nyu-1.2a",
        "Multi-head attention of width e with biases: queries, keys, values and output, h heads of dimension "
        "e/h. How many parameters?",
        "e width, h heads",
        "4*e**2 + 4*e",
        {
            "3*e**2 + 3*e": "the output matrix is forgotten",
            "4*h*e**2 + 4*h*e": "a head has dimension e/h, not e",
            "4*e**2/h + 4*e": "the matrix of a head is e/h x e, and there are h heads",
            "4*e**2 + 4": "each bias is a vector",
            "e**2 + e": "there are four matrices",
        },
        conventions={"biases are not counted": "4*e**2"},
        sizes={"e": 512, "h": 8},
        holds=lambda sizes: sizes["e"] % sizes["h"] == 0,
    ),
    formula(
        "nyu-1.2b",
        "A 1-D convolution from c to f channels with kernel size k and g groups: how many weights, without biases?",
        "c input channels, f output channels, k kernel size, g groups",
        "c*f*k/g",
        {
            "c*f*k": "each output channel sees c/g channels",
            "c*f*k*g": "groups make it smaller",
            "c*f/g": "the kernel size is forgotten",
            "c*f*k/g**2": "there are g groups of c/g times f/g",
            "(c + f)*k/g": "channels multiply",
        },
        conventions={"biases are counted": "c*f*k/g + f"},
        holds=lambda sizes: sizes["c"] % sizes["g"] == 0 and sizes["f"] % sizes["g"] == 0,
    ),
    formula(
        "nyu-1.3a",
        "h heads on inputs of dimension e: queries and keys of dimension d1, values of dimension d2, output "
        "back to e. How many weights?",
        "e width, h heads, d1 query dimension, d2 value dimension",
        "2*h*e*(d1 + d2)",
        {
            "h*e*(2*d1 + d2)": "the output matrix is forgotten",
            "2*e*(d1 + d2)": "each head has its own matrices",
            "4*e**2": "this holds only for d1 = d2 = e/h",
            "h*e*(d1 + 2*d2)": "queries and keys have a matrix each",
            "3*h*e*d1 + h*e*d2": "values have dimension d2",
        },
    ),
    formula(
        "nyu-1.3b",
        "Sinusoidal position encoding in d dimensions: what is the squared norm of the encoding of any position?",
        "d dimensions",
        "d/2",
        {
            "d": "sin² + cos² is 1 for each pair",
            "1": "there are d/2 pairs",
            "sqrt(d/2)": "this is the norm",
            "sqrt(d)": "sin² + cos² is 1 for each pair, and the norm is squared",
            "2*d": "sin² + cos² is 1 for each pair",
        },
        holds=lambda sizes: sizes["d"] % 2 == 0,
    ),
    Question(
        "nyu-1.3b/values",
        "Give the sinusoidal encoding of position p in d dimensions: sin and cos alternate.",
        "matrix",
        solve=_encoding,
        conventions={"all sines, then all cosines": _halves},
        sizes={"p": 1, "d": 4},
        draw=lambda generator: {"p": int(generator.choice((2, 3, 5, 7, 11))), "d": int(generator.choice((4, 6, 8)))},
    ),
    formula(
        "nyu-1.3c",
        "A token's score with itself exceeds that with each of the n - 1 others by at least g. Which β makes "
        "the weights of the "
        "others together at most eps (by the bound (n - 1) exp(-beta g))?",
        "n tokens, g:positive gap, eps:share tolerance",
        "log((n - 1)/eps)/g",
        {
            "log(1/eps)/g": "there are n - 1 others",
            "log((n - 1)/eps)*g": "a larger gap needs a smaller β",
            "log(eps/(n - 1))/g": "the sign of the logarithm",
            "log(n*eps)/g": "a smaller eps needs a larger β",
            "(n - 1)/(eps*g)": "the weights fall exponentially",
        },
        conventions={"the token itself is counted": "log(n/eps)/g"},
        holds=lambda sizes: sizes["n"] > 1,
    ),
    formula(
        "nyu-1.3d",
        "A linear layer from e to f dimensions runs over n positions. How many weights (no biases) has it?",
        "n positions, e input dimension, f output dimension",
        "e*f",
        {
            "n*e*f": "all positions share the weights; this is the cost",
            "n**2*e*f": "this is a fully connected layer over positions",
            "e": "there are f outputs",
            "e + f": "a weight for each pair",
            "3*e*f": "the kernel has size 1",
        },
        conventions={"biases are counted": "e*f + f"},
    ),
    formula(
        "nyu-1.3e",
        "Hard shifts express a 2-D convolution with a k x k kernel. How many heads are needed?",
        "k kernel side",
        "k**2",
        {
            "k": "this is one axis: one head for each tap",
            "1": "one hard head reads one position",
            "2*k": "rows and columns multiply",
            "k**2 - 1": "the middle tap needs a head too",
            "2*k + 1": "one head for each tap of the kernel",
        },
    ),
)
