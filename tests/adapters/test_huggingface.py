"""Models of transformers are recognised, called as documented, and compared in true double precision."""

from __future__ import annotations

import pytest
import torch
from twins import transformers

from regard.adapters import adapt
from regard.adapters.float64 import float64_casts
from regard.adapters.huggingface import is_decoder, tiny
from regard.adapters.mask_patterns import count_positions
from regard.adapters.rng import Rng
from regard.errors import InputError
from regard.laws import check

DECODERS = ["GPT2LMHeadModel", "LlamaForCausalLM", "BloomForCausalLM", "BertLMHeadModel"]
ENCODERS = ["BertModel", "RobertaModel", "DebertaV2Model", "XLNetLMHeadModel"]


@pytest.fixture(scope="module", autouse=True)
def library():
    return transformers()


@pytest.fixture(scope="module")
def llama(library):
    return adapt(tiny("LlamaForCausalLM"))


def test_a_tiny_model_is_the_same_for_the_same_seed_and_leaves_the_random_numbers_alone():
    before = torch.get_rng_state()
    one, two, other = (tiny("GPT2LMHeadModel", seed=seed).lm_head.weight for seed in (0, 0, 1))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.get_rng_state())


def test_a_class_that_does_not_exist_is_refused_by_name():
    with pytest.raises(InputError, match="no model 'Attention'"):
        tiny("Attention")


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_claims_causality_and_a_cache(name):
    subject = adapt(tiny(name))
    assert is_decoder(subject.target)
    assert {"causality", "cache", "cache-algebra", "padding"} <= set(subject.claims)
    assert {"aligned", "cache", "mask"} <= subject.abilities


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_claims_no_causality(name):
    subject = adapt(tiny(name))
    assert "causality" not in subject.claims
    assert subject.caching is None


def test_a_family_of_encoders_decodes_only_when_its_configuration_says_so():
    assert is_decoder(tiny("BertLMHeadModel"))
    assert not is_decoder(tiny("BertLMHeadModel", is_decoder=False))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "T5ForConditionalGeneration", "MixtralForCausalLM", "ViTModel"])
def test_float64_runs_stay_in_float64_although_norms_and_rotations_cast_to_float32(name):
    subject = adapt(tiny(name))
    double = subject.at(torch.float64)
    assert double is not None
    assert double.eps == torch.finfo(torch.float64).eps
    assert torch.get_default_dtype() == torch.float32


def test_widening_changes_nothing_outside_float64():
    x = torch.randn(3, dtype=torch.float64)
    with float64_casts(torch.float32):
        assert x.float().dtype == torch.float32
    with float64_casts(torch.float64):
        assert x.float().dtype == x.to(torch.float32).dtype == torch.zeros(2).dtype == torch.float64
        assert x.softmax(0, dtype=torch.float32).dtype == x.type_as(torch.zeros(1)).dtype == torch.float64


def test_special_tokens_are_never_drawn(llama):
    drawn = llama.draw(7, 131, Rng(0, "special"))
    assert not set(drawn.unique().tolist()) & {0, 1, 2}
    assert drawn.max() < llama.vocab_size


def test_positions_count_real_tokens():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    assert count_positions(mask)[mask].tolist() == [0, 1, 2, 0, 1, 2]


def test_a_mask_comes_with_positions_so_that_padding_on_the_left_is_nothing():
    subject = adapt(tiny("GPT2LMHeadModel"))  # its table of positions does not forgive a wrong count
    x = subject.draw(1, 7, Rng(0, "left"))
    mask = torch.arange(7)[None] >= 3
    torch.testing.assert_close(subject.run(x, mask)[:, 3:], subject.run(x[:, 3:]), rtol=1e-4, atol=1e-4)


def test_a_window_of_transformers_counts_the_token_itself_and_grows_with_the_layers():
    pattern = adapt(tiny("MistralForCausalLM", sliding_window=4, num_hidden_layers=3)).conventions.pattern
    assert pattern.matrix(23)[..., 22, :].flatten().nonzero().flatten().tolist() == list(range(22 - 3 * 3, 23))


def test_weights_are_seen_although_the_fused_kernel_hides_them(llama):
    weights = llama.weights(llama.draw(2, 5, Rng(0, "weights")))
    assert llama.target.config._attn_implementation == "sdpa"
    assert [each.shape for each in weights] == [(2, 4, 5, 5)] * 2


def test_variants_of_a_decoder_are_implementations_and_caches(llama):
    assert {"attn_implementation='eager'", "use_cache=True", "static cache"} <= set(llama.variants())


def test_a_cache_is_cropped_to_tokens_and_the_first_one_stays_as_it_was(llama):
    caching = llama.caching
    with torch.no_grad():
        _, state = caching.step(caching.start(2, 9), llama.draw(2, 7, Rng(0, "crop")))
    assert caching.crop(state, 3).get_seq_length() == 3
    assert state.get_seq_length() == 7
    swapped = caching.reorder(state, torch.tensor([1, 0]))
    assert torch.equal(swapped.layers[1].keys, state.layers[1].keys.flip(0))


def test_a_window_that_forgot_its_past_cannot_be_cropped():
    caching = adapt(tiny("MistralForCausalLM")).caching
    with torch.no_grad():
        _, state = caching.step(None, caching.adapter.draw(1, 11, Rng(0, "window")))
    assert caching.crop(state, 9) is None


def test_an_encoder_decoder_is_seen_from_both_sides():
    subject = adapt(tiny("T5ForConditionalGeneration"))
    (source,) = subject.parts
    assert "cache" in subject.abilities
    assert "aligned" not in source.abilities
    x = source.draw(2, 7, Rng(0, "source"))
    assert source.run(x).shape[1] == 3
    assert subject.run(x).shape[1] == 7
    assert not torch.equal(source.run(x), source.run(x.roll(1, 1)))


def test_a_model_of_pictures_is_called_with_pictures():
    subject = adapt(tiny("ViTModel"))
    assert subject.draw(2, 1, Rng(0, "picture")).shape == (2, 3, 24, 24)
    assert "padding" not in subject.claims
    assert "attn_implementation='eager'" in subject.variants()


def blind(query, key, value, *args, **more):
    """Attention without any mask."""
    weights = (query @ key.transpose(-1, -2) * more.get("scaling", 1.0)).softmax(-1)
    return (weights @ value).transpose(1, 2), weights


def test_a_released_decoder_keeps_the_laws():
    report = check(tiny("GPT2LMHeadModel"), claims=["causality", "cache"], fast=True)
    assert report.ok, str(report)


def test_a_decoder_that_drops_its_mask_is_caught(library):
    functions = library.AttentionInterface()
    functions.register("blind", lambda module, *tensors, **more: blind(*tensors, **more))
    library.AttentionMaskInterface.register("blind", library.masking_utils.sdpa_mask)
    model = tiny("GPT2LMHeadModel", attention="blind")
    report = check(model, claims=["causality"], fast=True)
    assert report.verdicts["causality"].outcome == "broken"
