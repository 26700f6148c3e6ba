"""Questions of NYU's homework 4, parts 1.4 and 1.5: the Transformer and the vision transformer."""

from __future__ import annotations

from regard.book.questions.base import formula

NO_BIASES = "biases are not counted"

QUESTIONS = (
    formula(
        "nyu-1.4a",
        "An encoder layer of the Transformer: multi-head attention of width d, feed-forward network of width "
        "f, two layer norms; "
        "all with biases. How many parameters?",
        "d width, f feed-forward width",
        "4*d**2 + 4*d + 2*d*f + d + f + 4*d",
        {
            "4*d**2 + 4*d + 2*d*f + d + f + 2*d": "there are two layer norms, of two vectors each",
            "4*d**2 + 2*d*f": "biases and layer norms are forgotten",
            "4*d**2 + 4*d + 4*d": "the feed-forward network is forgotten",
            "3*d**2 + 3*d + 2*d*f + d + f + 4*d": "the output matrix of attention is forgotten",
            "8*d**2 + 8*d + 2*d*f + d + f + 6*d": "this is a decoder layer",
        },
        conventions={"attention without biases": "4*d**2 + 2*d*f + d + f + 4*d"},
        sizes={"d": 512, "f": 2048},
    ),
    formula(
        "nyu-1.4b",
        "A decoder layer of the Transformer: self-attention, cross-attention, feed-forward network, three "
        "layer norms; all with "
        "biases. How many parameters?",
        "d width, f feed-forward width",
        "8*d**2 + 8*d + 2*d*f + d + f + 6*d",
        {
            "4*d**2 + 4*d + 2*d*f + d + f + 4*d": "the cross-attention is forgotten: this is an encoder layer",
            "8*d**2 + 8*d + 2*d*f + d + f": "the layer norms are forgotten",
            "8*d**2 + 8*d + 2*d*f + d + f + 4*d": "there are three layer norms",
            "8*d**2 + 8*d + 6*d": "the feed-forward network is forgotten",
            "8*d**2 + 2*d*f": "biases and layer norms are forgotten",
        },
        conventions={"attention without biases": "8*d**2 + 2*d*f + d + f + 6*d"},
        sizes={"d": 512, "f": 2048},
    ),
    formula(
        "nyu-1.4c",
        "The feed-forward network max(0, x W1 + b1) W2 + b2 of widths d, f, d. How many parameters?",
        "d width, f feed-forward width",
        "2*d*f + d + f",
        {
            "d*f": "there are two matrices",
            "2*d*f + 2*d": "the first bias has f entries",
            "2*d*f + 2*f": "the second bias has d entries",
            "d*f + d + f": "there are two matrices",
            "2*d**2 + 2*d": "the hidden layer has width f",
        },
        conventions={NO_BIASES: "2*d*f"},
        sizes={"d": 512, "f": 2048},
    ),
    formula(
        "nyu-1.4d",
        "h heads of dimension d/h over n tokens: how many multiply-adds do scores and weighted sums of all "
        "heads take together?",
        "n tokens, d width, h heads",
        "2*n**2*d",
        {
            "2*h*n**2*d": "a head has d/h channels",
            "2*n**2*d/h": "this is one head",
            "n**2*d": "scores and weighted sums",
            "2*n*d": "each query meets n keys",
            "2*n*d**2": "these are projections",
        },
        conventions={"projections are counted too": "2*n**2*d + 4*n*d**2"},
        holds=lambda sizes: sizes["d"] % sizes["h"] == 0,
    ),
    formula(
        "nyu-1.4e",
        "Layer norm of an entry x of a token with mean mu and variance v over its features: the value before "
        "scale and shift, with eps.",
        "x:real entry, mu:real mean, v:positive variance, eps:share small number",
        "(x - mu)/sqrt(v + eps)",
        {
            "(x - mu)/(v + eps)": "divide by the standard deviation",
            "x/sqrt(v + eps)": "the mean is forgotten: this is RMS norm, nearly",
            "x - mu": "divide by the standard deviation",
            "(x + mu)/sqrt(v + eps)": "the mean is subtracted",
            "(x - mu)*sqrt(v + eps)": "divide by the standard deviation",
        },
        conventions={
            "eps is added to the standard deviation": "(x - mu)/(sqrt(v) + eps)",
            "eps is left out": "(x - mu)/sqrt(v)",
        },
    ),
    formula(
        "nyu-1.4e/parameters",
        "How many parameters has a layer norm of width d with scale and shift?",
        "d width",
        "2*d",
        {
            "2": "one scale and one shift for each feature",
            "d": "scale and shift",
            "d**2": "each feature is scaled on its own",
            "2*d**2": "each feature is scaled on its own",
            "0": "scale and shift are learned",
        },
    ),
    formula(
        "nyu-1.5a",
        "An image of H x W pixels in patches of P x P, and a class token. How many tokens?",
        "H rows, W columns, P patch side",
        "H*W/P**2 + 1",
        {
            "H*W/P + 1": "a patch has P^2 pixels",
            "H*W + 1": "tokens are patches, not pixels",
            "(H + W)/P + 1": "rows and columns multiply",
            "P**2 + 1": "this is the number of pixels of a patch",
            "H*W/P**2 - 1": "the class token is added",
        },
        conventions={"the class token is not counted": "H*W/P**2"},
        sizes={"H": 224, "W": 224, "P": 16},
        holds=lambda sizes: sizes["H"] % sizes["P"] == 0 and sizes["W"] % sizes["P"] == 0,
    ),
    formula(
        "nyu-1.5a/embedding",
        "Patches of P x P pixels with C colors are projected to D dimensions, with a bias. How many parameters?",
        "P patch side, C colors, D width",
        "P**2*C*D + D",
        {
            "P*C*D + D": "a patch has P^2 pixels",
            "P**2*D + D": "each pixel has C colors",
            "P**2*C*D + P**2*C": "the bias has D entries",
            "P**2*C + D": "a weight for each input and each output",
            "P**2*C*D + 1": "the bias has D entries",
        },
        conventions={NO_BIASES: "P**2*C*D"},
    ),
    formula(
        "nyu-1.5b",
        "A k x k convolution sees (k - 1)/2 pixels in each direction; after L layers, how many pixels a side "
        "does an output see?",
        "k kernel side, L layers",
        "L*(k - 1) + 1",
        {
            "k**L": "the receptive field grows linearly without strides",
            "L*k": "neighbouring windows overlap",
            "k": "this is one layer",
            "L*(k - 1)": "the pixel itself",
            "L*(k - 1)/2 + 1": "in both directions",
        },
        holds=lambda sizes: sizes["k"] % 2 == 1,
    ),
    formula(
        "nyu-1.5c",
        "Learned position embeddings of width D for n patches and a class token. How many parameters?",
        "n patches, D width",
        "(n + 1)*D",
        {
            "n + 1": "each position has a vector",
            "D": "each position has its own",
            "(n + 1)**2*D": "positions are absolute, not pairs",
            "2*n*D": "one vector for each position of the sequence",
            "n*D + 1": "the class token has a position vector too",
        },
        conventions={"the class token has no position": "n*D"},
    ),
    formula(
        "nyu-1.5d",
        "The head is one linear layer from the class token of width D to K classes, with a bias. How many parameters?",
        "D width, K classes, n patches",
        "D*K + K",
        {
            "n*D*K + K": "only the class token is read",
            "D*K + D": "the bias has an entry for each class",
            "D + K": "a weight for each pair",
            "(n + 1)*D*K + K": "only the class token is read",
            "D*K + 1": "the bias has an entry for each class",
        },
        conventions={NO_BIASES: "D*K"},
    ),
)
