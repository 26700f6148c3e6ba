"""Questions on self-attention and convolution (ETH; Cordonnier, Loukas and Jaggi 2020)."""

from __future__ import annotations

from regard.book.questions.base import formula

WIDTHS = "N_h heads, D_in input width, D_hid query dimension, D_o value dimension, D_out output width"
SHIFT = "alpha:positive width, d1:real row of the shift, d2:real column, c1:real centre row, c2:real centre column"

QUESTIONS = (
    formula(
        "eth-a1",
        "Multi-head self-attention without biases but for the output: queries and keys of dimension D_hid, "
        "values of dimension D_o, "
        "N_h heads, output D_out. How many parameters?",
        WIDTHS,
        "N_h*D_in*(2*D_hid + D_o) + N_h*D_o*D_out + D_out",
        {
            "N_h*D_in*(2*D_hid + D_o) + D_o*D_out + D_out": "the output matrix reads all heads",
            "D_in*(2*D_hid + D_o) + D_o*D_out + D_out": "there are N_h heads",
            "N_h*D_in*(D_hid + D_o) + N_h*D_o*D_out + D_out": "queries and keys have a matrix each",
            "N_h*D_in*3*D_hid + N_h*D_o*D_out + D_out": "values have dimension D_o",
            "N_h*D_in*(2*D_hid + D_o)": "the output matrix is forgotten",
        },
        conventions={"the bias of the output is not counted": "N_h*D_in*(2*D_hid + D_o) + N_h*D_o*D_out"},
        sizes={"N_h": 9, "D_in": 400, "D_hid": 400, "D_o": 400, "D_out": 400},
    ),
    formula(
        "eth-a2",
        "The output of one pixel of an image of H x W pixels, N_h heads: how many attention weights does it need?",
        "H rows, W columns, N_h heads",
        "N_h*H*W",
        {
            "N_h*H**2*W**2": "this is all pixels",
            "H*W": "each head has its own",
            "N_h": "each key of the image has a weight",
            "N_h*(H + W)": "an image has H W pixels",
            "N_h*H*W + 1": "there is no token beside the pixels",
        },
    ),
    formula(
        "eth-b1",
        "Quadratic encoding: v = -alpha (1, -2 c1, -2 c2) and r = (|d|^2, d1, d2). What is the score v . r?",
        SHIFT,
        "-alpha*(d1**2 + d2**2 - 2*d1*c1 - 2*d2*c2)",
        {
            "alpha*(d1**2 + d2**2 - 2*d1*c1 - 2*d2*c2)": "the sign: near the centre the score is largest",
            "-alpha*(d1**2 + d2**2 - 2*d1*c1 - 2*d2*c1)": "the third entry of v has the column of the centre",
            "-alpha*(d1**2 + d2**2)": "the centre is forgotten",
            "-alpha*(d1**2 + d2**2 + 2*d1*c1 + 2*d2*c2)": "the sign of the centre",
            "-alpha*(d1**2 + d2**2 - d1*c1 - d2*c2)": "the factor 2 of the mixed terms",
        },
        conventions={"completed square, a constant that the softmax removes": "-alpha*((d1 - c1)**2 + (d2 - c2)**2)"},
    ),
    formula(
        "eth-b2",
        "One score by the four-term formula without anything stored: each of the four terms is two D x D "
        "matrices times vectors "
        "(D (2 D - 1) each) and an inner product (2 D - 1), and three additions join them. How many operations?",
        "D width",
        "16*D**2 - 1",
        {
            "16*D**2 - 4*D - 4": "the inner product costs 2 D - 1, not D - 1",
            "4*D**2": "each term has two matrices, with products and additions",
            "16*D**3": "a matrix times a vector is quadratic",
            "4*(2*D*(2*D - 1))": "inner products and additions are forgotten",
            "16*D**2": "n terms are summed by n - 1 additions",
        },
        conventions={"the three additions are not counted": "16*D**2 - 4"},
    ),
    formula(
        "eth-b2/distinct",
        "A relative encoding on an image of H x W pixels: how many different shifts are there?",
        "H rows, W columns",
        "(2*H - 1)*(2*W - 1)",
        {
            "H**2*W**2": "many pairs have the same shift",
            "H*W": "shifts are negative too",
            "4*H*W": "the shift 0 is counted once",
            "(2*H + 1)*(2*W + 1)": "the largest shift is H - 1",
            "(2*H - 1) + (2*W - 1)": "rows and columns multiply",
        },
    ),
    formula(
        "eth-b2/stored",
        "Queries and keys of N pixels are computed once (2 D^2 operations each, for each pixel), then N^2 "
        "inner products of 2 D "
        "operations. How many operations?",
        "N pixels, D width",
        "4*N*D**2 + 2*N**2*D",
        {
            "16*N**2*D**2": "this is without storing anything",
            "2*N*D**2 + 2*N**2*D": "queries and keys",
            "4*N*D**2 + N**2*D": "an inner product has products and additions",
            "2*N**2*D": "queries and keys must be computed once",
            "4*D**2 + 2*N**2*D": "each pixel has a query and a key",
        },
        sizes={"N": 1024, "D": 64},
    ),
    formula(
        "eth-c1",
        "Values and output matrix of each head are merged (D_in x D_out each); the output has a bias. How "
        "many numbers?",
        "N_h heads, D_in input width, D_out output width",
        "N_h*D_in*D_out + D_out",
        {
            "D_in*D_out + D_out": "each head has its own matrix",
            "N_h*D_in*D_out + N_h*D_out": "the bias is added once",
            "N_h*(D_in + D_out) + D_out": "a matrix has D_in D_out entries",
            "N_h*D_in*D_out + D_in": "the bias has D_out entries",
            "N_h**2*D_in*D_out + D_out": "each head has one matrix",
        },
        conventions={"the bias is not counted": "N_h*D_in*D_out"},
    ),
    formula(
        "eth-c2",
        "Heads with exact shifts express every K x K convolution from D_in to D_out channels. What is the "
        "smallest value dimension "
        "D_o that always suffices?",
        "K kernel side, D_in input channels, D_out output channels",
        "min(D_in, D_out)",
        {
            "max(D_in, D_out)": "the rank of a D_in x D_out matrix is at most the smaller",
            "D_in": "the rank is also at most D_out",
            "D_out": "the rank is also at most D_in",
            "K**2": "this is the number of heads",
            "D_in*D_out": "the rank is at most the smaller of both",
        },
    ),
    formula(
        "eth-c2/heads",
        "Every head has one fixed shift. How many heads does a K x K convolution take of which no tap is zero?",
        "K kernel side, D_in input channels",
        "K**2",
        {
            "K": "both axes",
            "2*K": "rows and columns multiply",
            "K**2*D_in": "a head reads all channels",
            "(K - 1)**2": "one head for each tap",
            "K**2 + 1": "one head for each tap",
        },
    ),
    formula(
        "eth-d1",
        "Scores -alpha |d - c|^2, centre c on a pixel. What is the weight of a neighbour at distance 1, "
        "relative to that of the centre?",
        "alpha:positive width",
        "exp(-alpha)",
        {
            "exp(alpha)": "the sign: it falls with alpha",
            "exp(-alpha/2)": "the source has no factor 1/2",
            "exp(-2*alpha)": "this is a diagonal neighbour",
            "-alpha": "the weight is the exponential of the score",
            "1/alpha": "it falls exponentially",
        },
    ),
    formula(
        "eth-d2",
        "-alpha (|d|^2 - 2 d . c) = -alpha (|d - c|^2 + x). What is x?",
        "c1:real centre row, c2:real centre column",
        "-(c1**2 + c2**2)",
        {
            "c1**2 + c2**2": "the sign: |d - c|^2 has one |c|^2 too many",
            "0": "|d - c|^2 has one |c|^2 too many",
            "-(c1 + c2)**2": "the norm has no mixed term",
            "-2*(c1**2 + c2**2)": "|c|^2 occurs once",
            "-c1*c2": "the norm is a sum of squares",
        },
    ),
    formula(
        "eth-e1",
        "A convolution of kernel side K (odd) and dilation d keeps the size of the image: how many zeros on each side?",
        "K kernel side, d dilation",
        "d*(K - 1)/2",
        {
            "(K - 1)/2": "the dilation is forgotten",
            "d*K": "half of the kernel on each side",
            "d*(K - 1)": "this is both sides together",
            "K/2": "K is odd, and the dilation",
            "d + (K - 1)/2": "the dilation multiplies",
        },
        holds=lambda sizes: sizes["K"] % 2 == 1,
    ),
    formula(
        "eth-e2",
        "A kernel with K taps a side and dilation d: how many pixels a side does it span?",
        "K kernel side, d dilation",
        "d*(K - 1) + 1",
        {
            "d*K": "d - 1 pixels lie between two taps, none behind the last",
            "K": "this is without dilation",
            "d*(K - 1)": "the first pixel counts too",
            "K + d": "there are d - 1 pixels in each of K - 1 gaps",
            "K + d - 1": "there are K - 1 gaps",
        },
    ),
    formula(
        "eth-e3",
        "An axis of H pixels, padded so that stride 1 keeps it: how many outputs with stride s?",
        "H pixels, s stride",
        "ceil(H/s)",
        {
            "H/s": "the queries are 0, s, 2 s, ...: round up",
            "floor(H/s)": "the first query is 0: round up",
            "H - s": "every s-th query remains",
            "H": "this is stride 1",
            "floor(H/s) + 1": "this is one too many when s divides H",
        },
    ),
    formula(
        "eth-q2",
        "A head with scores -alpha |d - c|^2: what is its standard deviation along one axis, as a continuous Gaussian?",
        "alpha:positive width",
        "1/sqrt(2*alpha)",
        {
            "1/sqrt(alpha)": "alpha = 1 / (2 sigma^2)",
            "1/(2*alpha)": "this is the variance",
            "sqrt(2*alpha)": "it shrinks with alpha",
            "sqrt(alpha)": "it shrinks with alpha",
            "1/alpha": "alpha = 1 / (2 sigma^2)",
        },
    ),
    formula(
        "eth-q2/peak",
        "The same head in two dimensions: what is the weight of the centre pixel, as a continuous Gaussian?",
        "alpha:positive width",
        "alpha/pi",
        {
            "sqrt(alpha/pi)": "this is one dimension",
            "1/(2*pi)": "this is alpha = 1/2 alone",
            "alpha/(2*pi)": "the density is 1/(2 pi sigma^2) with sigma^2 = 1/(2 alpha)",
            "pi/alpha": "this is the inverse",
            "alpha": "the density is normalised",
        },
    ),
)
