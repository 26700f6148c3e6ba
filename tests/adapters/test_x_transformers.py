"""x-transformers: what holds, and what shifting tokens breaks."""

from __future__ import annotations

import pytest
import torch
from examination import find_violations
from twins import library

from regard.adapters import adapt
from regard.adapters.rng import Rng
from regard.laws import check


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(5)


@pytest.fixture(scope="module")
def x():
    found = library("x_transformers")
    library("loguru").logger.disable("x_transformers")  # it advises on sizes that are small on purpose
    return found


def wrapped(x, layers: str, **more):
    stack = getattr(x, layers)(dim=24, depth=2, heads=4, attn_dim_head=8, **more)
    return x.TransformerWrapper(num_tokens=23, max_seq_len=40, attn_layers=stack)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("layers", "options"),
    [
        pytest.param("Decoder", {"rotary_pos_emb": True, "attn_flash": True}, marks=pytest.mark.slow),
        pytest.param("Decoder", {"alibi_pos_bias": True, "attn_kv_heads": 2}, marks=pytest.mark.slow),
        pytest.param("Decoder", {"rotary_pos_emb": True, "cross_attend": True}, marks=pytest.mark.slow),
        pytest.param("Decoder", {"attn_max_attend_past": 3, "attn_num_mem_kv": 2}, marks=pytest.mark.slow),
        pytest.param("Encoder", {"attn_flash": True}, marks=pytest.mark.slow),
    ],
)
def test_encoders_and_decoders_hold(x, layers: str, options: dict):
    assert find_violations(wrapped(x, layers, **options)) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_both_sides_hold(x):
    sizes = {"num_tokens": 23, "depth": 1, "heads": 4, "max_seq_len": 40}
    sides = {f"{side}_{name}": size for side in ("enc", "dec") for name, size in sizes.items()}
    assert find_violations(x.XTransformer(dim=24, **sides)) == []


@pytest.mark.filterwarnings("ignore")
def test_an_attention_alone_widens_bfloat16(x):
    # With a mask, einx.where(mask, output, 0.) turns a bfloat16 output into float32.
    alone = find_violations(x.Attention(dim=24, heads=3, dim_head=8, causal=True, flash=True))
    assert alone == ["shape: broken, output is float32, not bfloat16"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_layers_alone_hold(x):
    assert find_violations(x.Encoder(dim=24, depth=1, heads=3, attn_dim_head=8)) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_images_hold(x):
    layers = x.Encoder(dim=24, depth=1, heads=3, attn_dim_head=8)
    assert find_violations(x.ViTransformerWrapper(image_size=16, patch_size=8, num_classes=5, attn_layers=layers)) == []


@pytest.mark.filterwarnings("ignore")
def test_the_cache_of_a_wrapped_model_is_found(x):
    subject = adapt(x.AutoregressiveWrapper(wrapped(x, "Decoder")))
    assert {"cache", "mask", "aligned"} <= subject.abilities
    ids = subject.draw(2, 7, Rng(0))
    state, rows = subject.caching.start(2, 7), []
    for piece in (ids[:, :4], ids[:, 4:5], ids[:, 5:]):
        output, state = subject.caching.step(state, piece)
        rows.append(output)
    torch.testing.assert_close(torch.cat(rows, 1), subject.run(ids))


@pytest.mark.filterwarnings("ignore")
def test_shifted_tokens_break_the_cache_and_let_padding_in(x):
    decoder = check(wrapped(x, "Decoder", shift_tokens=1), claims=["causality", "cache"], fast=True)
    assert decoder.verdicts["causality"].outcome == "holds"
    assert decoder.verdicts["cache"].outcome == "broken"
    encoder = check(wrapped(x, "Encoder", shift_tokens=1), claims=["padding"], fast=True)
    assert encoder.verdicts["padding"].outcome == "broken"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_data_dependent_alibi_breaks_the_cache_and_memory_tokens_break_padding(x):
    gated = check(wrapped(x, "Decoder", attn_data_dependent_alibi=True), claims=["cache"], fast=True)
    assert gated.verdicts["cache"].outcome == "broken"
    stack = x.Decoder(dim=24, depth=2, heads=4, attn_dim_head=8)
    model = x.TransformerWrapper(num_tokens=23, max_seq_len=40, num_memory_tokens=2, attn_layers=stack)
    counterexample = check(model, claims=["padding"], fast=True).verdicts["padding"].counterexample
    assert counterexample is not None
    assert counterexample.case["side"] == "left"
