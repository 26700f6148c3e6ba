"""Numerical faults: empty rows, overflow, normalisation, temperature."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from zoo.exhibit import Exhibit, given, report

# NA1, and our own: a query that may see nothing


def empty_row_is_nan(q, k, v, mask=None):
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


def empty_row_is_zero(q, k, v, mask=None):
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])
    if mask is not None:
        empty = ~mask.any(-1, keepdim=True)
        scores = scores.masked_fill(~mask, float("-inf")).masked_fill(empty, 0.0)
        return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1).masked_fill(empty, 0.0), v)
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


def empty_row_is_mean(q, k, v, mask=None):
    """Finite, and not what it says: the values of hidden keys come back as their mean."""
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -1e9)
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


def empty_row_patched(q, k, v, mask=None):
    """What is no number is replaced afterwards, which the gradient does not notice."""
    out = empty_row_is_nan(q, k, v, mask)
    return torch.where(out.isnan(), torch.zeros_like(out), out)


# NA4, and our own: a block of keys in which nothing is seen


def _lazy(q, k, v, mask, safe, block=16):
    b, h, n, d = q.shape
    top = torch.full((b, h, n, 1), -torch.inf, dtype=q.dtype)
    total = torch.zeros_like(top)
    acc = torch.zeros(b, h, n, v.shape[-1], dtype=q.dtype)
    for c in range(0, k.shape[2], block):
        s = q @ k[:, :, c : c + block].mT / math.sqrt(d)
        if mask is not None:
            part = mask[..., c : c + block] if mask.shape[-1] > 1 else mask
            s = s.masked_fill(~part, -torch.inf)
        new = torch.maximum(top, s.amax(-1, keepdim=True))
        shift = new.masked_fill(new == -torch.inf, 0.0) if safe else new
        p, fade = (s - shift).exp(), (top - shift).exp()
        total = total * fade + p.sum(-1, keepdim=True)
        acc = acc * fade + p @ v[:, :, c : c + block]
        top = new
    return acc, total


def lazy_softmax(q, k, v, mask=None):
    acc, total = _lazy(q, k, v, mask, safe=True)
    return acc / total.masked_fill(total == 0, 1.0)


def lazy_softmax_unsafe(q, k, v, mask=None):
    acc, total = _lazy(q, k, v, mask, safe=False)
    return acc / total


def lazy_softmax_for_whole_rows(q, k, v, mask=None):
    """Rows that see nothing at all are mended, those that see nothing in the first block are not."""
    acc, total = _lazy(q, k, v, mask, safe=False)
    out = acc / total
    return out if mask is None else out.masked_fill(~mask.any(-1, keepdim=True), 0.0)


# NA9, and our own: how large a score may be


def half_by_half(q, k, v):
    """Mixed precision: inputs are rounded to half, products are summed in single."""
    q, k = q.half().float(), k.half().float()
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1).to(v.dtype) @ v


def half_all_the_way(q, k, v):
    scores = q.half() @ k.half().mT
    return (scores.float() / math.sqrt(q.shape[-1])).softmax(-1).to(v.dtype) @ v


def without_the_maximum(q, k, v):
    weights = torch.exp(q @ k.mT / math.sqrt(q.shape[-1]))
    return (weights / weights.sum(-1, keepdim=True)) @ v


def with_the_maximum(q, k, v):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (weights / weights.sum(-1, keepdim=True)) @ v


def clamped(q, k, v):
    """Large scores are cut off so that the exponential stays small."""
    weights = torch.exp((q @ k.mT / math.sqrt(q.shape[-1])).clamp(-60.0, 60.0))
    return (weights / weights.sum(-1, keepdim=True)) @ v


# SM1, and our own: weights that do not sum to one


def masked_after_softmax(q, k, v, mask=None):
    weights = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)
    if mask is not None:
        weights = weights.masked_fill(~mask, 0.0)
    return weights @ v


def masked_before_softmax(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def with_an_epsilon(q, k, v):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (weights / (weights.sum(-1, keepdim=True) + 1e-6)) @ v


def signed_features(q, k, v):
    """Linear attention with features that may be negative, so weights may be as well."""
    q, k = 1.5 * q, 1.5 * k
    fq, fk = torch.cat([q, -q], -1) + 1.0, torch.cat([k, -k], -1) + 1.0
    scores = fq @ fk.mT
    return scores / scores.sum(-1, keepdim=True) @ v


def positive_features(q, k, v):
    fq, fk = F.elu(torch.cat([q, -q], -1)) + 1.0, F.elu(torch.cat([k, -k], -1)) + 1.0
    scores = fq @ fk.mT
    return scores / scores.sum(-1, keepdim=True) @ v


# SC1, SC2, SC4, and our own: the temperature


def scaled_in_the_fallback(q, k, v, mask=None, fused=False):
    if fused:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1) @ v


def unscaled_in_the_fallback(q, k, v, mask=None, fused=False, sm_scale=1.0):
    if fused:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    scores = q @ k.mT * sm_scale
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1) @ v


def scale_of_the_whole_width(q, k, v):
    dim = q.shape[1] * q.shape[-1]  # all heads together
    return (torch.einsum("bhid,bhjd->bhij", q, k) * dim**-0.5).softmax(-1) @ v


def scale_of_one_head(q, k, v):
    return (torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5).softmax(-1) @ v


def scale_on_both_sides(q, k, v):
    q, k = q * q.shape[-1] ** -0.5, k * k.shape[-1] ** -0.5
    return (q @ k.mT).softmax(-1) @ v


def configured(query_pre_attn_scalar):
    """Attention whose scale comes from a configuration file."""

    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, scale=query_pre_attn_scalar**-0.5)

    return attention


PLAIN = ("permutation", "determinism", "batch-independence")

EXHIBITS = [
    Exhibit(
        "NA1",
        report("pytorch/pytorch/issues/103963"),
        "A row of the mask without any True is a softmax over nothing.",
        "operator",
        given(empty_row_is_nan),
        given(empty_row_is_zero),
        ("empty-rows",),
        ("empty-rows", "padding", "permutation"),
    ),
    Exhibit(
        "L6-mean",
        "",
        "A row that sees nothing sees everything a little.",
        "operator",
        given(empty_row_is_mean),
        given(empty_row_is_zero),
        ("empty-rows",),
        ("empty-rows", "padding"),
    ),
    Exhibit(
        "L6-gradient",
        "",
        "Empty rows are mended after the softmax, and their gradient is no number.",
        "operator",
        given(empty_row_patched),
        given(empty_row_is_zero),
        ("empty-rows",),
        ("empty-rows", "padding"),
    ),
    Exhibit(
        "NA4",
        report("pytorch/pytorch/issues/127055"),
        "A softmax by blocks takes minus infinity from minus infinity where a whole block is hidden.",
        "operator",
        given(lazy_softmax_unsafe),
        given(lazy_softmax),
        ("empty-rows",),
        ("empty-rows", "padding", "batch-independence"),
    ),
    Exhibit(
        "L6-block",
        "",
        "Rows that see nothing are mended, rows whose first block of keys is hidden are not.",
        "operator",
        given(lazy_softmax_for_whole_rows),
        given(lazy_softmax),
        ("empty-rows",),
        ("empty-rows", "padding"),
    ),
    Exhibit(
        "NA9",
        report("pytorch/pytorch/issues/119131"),
        "The product of queries and keys leaves the range of half precision before it is scaled.",
        "operator",
        given(half_all_the_way),
        given(half_by_half),
        ("range",),
        ("range", "permutation"),
    ),
    Exhibit(
        "L17-maximum",
        "",
        "The exponential is taken without subtracting the maximum.",
        "operator",
        given(without_the_maximum),
        given(with_the_maximum),
        ("range",),
        ("row-stochasticity", "permutation", "range"),
    ),
    Exhibit(
        "L17-clamp",
        "",
        "Scores are clamped, so that adding the same to all of them changes the weights.",
        "operator",
        given(clamped),
        given(with_the_maximum),
        ("range",),
        ("row-stochasticity", "range"),
    ),
    Exhibit(
        "SM1",
        report("huggingface/pytorch-image-models/pull/2236"),
        "The mask is applied after the softmax.",
        "operator",
        given(masked_after_softmax),
        given(masked_before_softmax),
        ("row-stochasticity", "padding"),
        ("row-stochasticity", "padding", "permutation"),
    ),
    Exhibit(
        "L7-epsilon",
        "",
        "A small number is added to the sum that the weights are divided by.",
        "operator",
        given(with_an_epsilon),
        given(with_the_maximum),
        ("row-stochasticity",),
        ("row-stochasticity", "permutation"),
    ),
    Exhibit(
        "L7-signed",
        "",
        "The features of a linear attention can be negative, and so can its weights.",
        "operator",
        given(signed_features),
        given(positive_features),
        ("row-stochasticity",),
        ("row-stochasticity", "permutation"),
    ),
    Exhibit(
        "SC1",
        report("mlc-ai/mlc-llm/pull/3426"),
        "The fallback has a default scale of one.",
        "operator",
        given(unscaled_in_the_fallback),
        given(scaled_in_the_fallback),
        ("scale", "paths"),
        ("scale", "paths", "permutation"),
    ),
    Exhibit(
        "SC2",
        report("lucidrains/vit-pytorch/issues/65"),
        "The scale is that of all heads together.",
        "operator",
        given(scale_of_the_whole_width),
        given(scale_of_one_head),
        ("scale",),
        ("scale", "permutation"),
    ),
    Exhibit(
        "SC4",
        report("huggingface/transformers/issues/31891"),
        "The configuration says 224 where it was trained with 256.",
        "operator",
        lambda: configured(224),
        lambda: configured(256),
        ("scale",),
        ("scale", "permutation"),
        {"scale": 1 / 16},
    ),
    Exhibit(
        "L14-twice",
        "",
        "Queries are scaled, and so are keys.",
        "operator",
        given(scale_on_both_sides),
        given(scale_of_one_head),
        ("scale",),
        ("scale", "permutation"),
    ),
]
