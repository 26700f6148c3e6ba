"""Self-attention written index by index, the oracle for softmax over the right axis."""

import torch

from regard.calculus import softmax


def ttic_attention(h, w_query, w_key, w_value):
    """Self-attention of TTIC 31230 in index notation: no output matrix, no scale.

    Query[k, t, i] = sum_J WQ[k, i, J] h[t, J]      Key, Value alike
    alpha[k, t1, t2] = softmax over t2 of sum_I Query[k, t1, I] Key[k, t2, I]
    out[k, t, i] = sum_T alpha[k, t, T] Value[k, T, i]
    """
    query = torch.einsum("kij,tj->kti", w_query, h)
    key = torch.einsum("kij,tj->kti", w_key, h)
    value = torch.einsum("kij,tj->kti", w_value, h)
    power = torch.einsum("ksi,kti->kst", query, key).exp()
    return torch.einsum("kst,kti->ksi", power / torch.einsum("kst->ks", power)[..., None], value)


def problem():
    generator = torch.Generator().manual_seed(2)
    heads, dim, tokens, inner = 3, 5, 7, 11
    h = torch.randn(tokens, dim, dtype=torch.float64, generator=generator)
    return h, *(torch.randn(heads, inner, dim, dtype=torch.float64, generator=generator) / dim for _ in range(3))


def test_row_layout_attention_with_unit_beta_is_the_index_notation():
    h, w_query, w_key, w_value = problem()
    query, key, value = (h @ weight.mT for weight in (w_query, w_key, w_value))
    output = softmax(query @ key.mT, beta=1.0) @ value
    torch.testing.assert_close(output, ttic_attention(h, w_query, w_key, w_value), rtol=0, atol=1e-12)


def test_softmax_over_queries_is_not():
    h, w_query, w_key, w_value = problem()
    query, key, value = (h @ weight.mT for weight in (w_query, w_key, w_value))
    output = softmax(query @ key.mT, beta=1.0, dim=-2) @ value
    assert (output - ttic_attention(h, w_query, w_key, w_value)).abs().max() > 1e-2
