"""Models of text: their formulas against what they have and do, and against what was published."""

from __future__ import annotations

import random

import pytest
import torch
from cost_model.counting import count
from torch import nn

from regard.cost_model import cost
from regard.cost_model.letters import letters
from regard.errors import CostError
from regard.models import GPT, Bert, BertConfig, GPTConfig, Transformer, TransformerConfig

SMALL = {"vocab_size": 11, "dim": 12, "layers": 2, "heads": 6}


def words(batch: int, count: int) -> torch.Tensor:
    return torch.randint(0, 11, (batch, count))


def built(model, config):
    """A model that has shapes and no memory."""
    with torch.device("meta"):
        return model(config)


def assert_counted(model: nn.Module, *texts: torch.Tensor, **sizes: int) -> None:
    found = cost(model, trace=False, backend="reference", **sizes)
    back = cost(model, trace=False, backend="reference", step="backward", **sizes)
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert found.macs == count(model, *texts).macs
    assert back.macs == count(model, *texts, backward=True).macs
    parts = found.by_part().values()
    for name in ("parameters", "macs", "activation_bytes", "pairs"):
        assert sum(part.quantity(name).value for part in parts) == found.quantity(name)


# GPT


def some_gpt(chance: random.Random) -> GPT:
    return GPT(
        GPTConfig(
            **SMALL,
            context_length=16,
            kv_heads=chance.choice([None, 1, 3]),
            hidden_dim=chance.choice([None, 7]),
            norm=chance.choice(["layer", "rms"]),
            position=chance.choice(["learned", "rotary", "sinusoidal", "alibi", "none"]),
            feed_forward=chance.choice(["gelu_tanh", "swiglu"]),
            bias=chance.choice([True, False]),
            tie_embeddings=chance.choice([True, False]),
            window=chance.choice([None, 3]),
        )
    )


@pytest.mark.parametrize("seed", range(8))
def test_gpts(seed):
    chance = random.Random(seed)
    model, batch, tokens = some_gpt(chance), chance.randint(1, 3), chance.choice([1, 5, 7])
    assert_counted(model, words(batch, tokens), batch=batch, tokens=tokens)


@pytest.mark.parametrize("seed", range(6))
def test_gpts_that_write(seed):
    chance = random.Random(seed)
    model, batch, past = some_gpt(chance).double(), chance.randint(1, 3), chance.choice([1, 4, 7])
    cache = model.new_cache()
    with torch.no_grad():
        model(words(batch, past), cache=cache)
    found = cost(model, step="decode", backend="reference", batch=batch, tokens=past)
    assert found.macs == count(model, words(batch, 1), cache=cache).macs
    assert found.activation_bytes == 0


@pytest.mark.parametrize(
    ("size", "parameters"),
    [("small", 124_439_808), ("medium", 354_823_168), ("large", 774_030_080), ("xl", 1_557_611_200)],
)
def test_gpt2s_as_published(size, parameters):
    found = cost(built(GPT, GPTConfig.gpt2(size)))
    assert found.parameters == parameters
    layers, width, hidden, places, vocab_size = letters("L D F S V")
    # Four square matrices and two of the feed-forward part with their biases, two norms; the ends.
    layer = 4 * width**2 + 4 * width + 2 * width * hidden + hidden + width + 4 * width
    whole = layers * layer + vocab_size * width + places * width + 2 * width
    assert (found.parameters.formula - whole).expand() == 0


def test_the_products_of_gpt2():
    """A causal square of N (N + 1) / 2 pairs, twelve D^2 in each layer, and the logits."""
    batch, tokens, layers, width, hidden, vocab_size = letters("B N L D F V")
    found = cost(built(GPT, GPTConfig.gpt2()))
    layer = 4 * width**2 + 2 * width * hidden + (tokens + 1) * width
    assert (found.macs.formula - batch * tokens * (layers * layer + width * vocab_size)).expand() == 0
    asked = found.at(tokens=1024)
    assert asked.macs == 1024 * (12 * (12 * 768**2 + 1025 * 768) + 768 * 50257)
    assert asked.exponentials == asked.pairs == 12 * 12 * 1024 * 1025 // 2
    assert asked.normalised == 25 * 1024 * 768


def test_a_model_without_sizes_has_formulas_and_no_numbers():
    found = cost(built(GPT, GPTConfig.gpt2()))
    assert {str(letter) for letter in found.macs.formula.free_symbols} == set("BNLDFV")
    with pytest.raises(CostError, match="how large N is"):
        found.macs.value  # noqa: B018


def test_layers_that_were_changed_by_hand_count_for_themselves():
    model = GPT(GPTConfig(**SMALL, context_length=16))
    model.blocks[1].feed_forward = GPT(GPTConfig(**SMALL, hidden_dim=5, context_length=16)).blocks[0].feed_forward
    assert_counted(model, words(2, 5), batch=2, tokens=5)


def test_tied_weights_count_once():
    tied, free = (cost(built(GPT, GPTConfig(**SMALL, tie_embeddings=tied))) for tied in (True, False))
    assert free.parameters - tied.parameters == 11 * 12


# BERT


@pytest.mark.parametrize(
    "heads",
    [
        {},
        {"pooler": False},
        {"next_sentence": True},
        {"masked_tokens": True, "pooler": False, "activation": "relu"},
        {"masked_tokens": True, "next_sentence": True},
    ],
    ids=str,
)
def test_berts(heads):
    model = Bert(BertConfig(**SMALL, context_length=7, hidden_dim=5, **heads))
    assert_counted(model, words(3, 7), batch=3, tokens=7)


BERTS = {
    "tiny": (4_385_920, 4_433_468),
    "mini": (11_170_560, 11_267_900),
    "small": (28_763_648, 29_058_876),
    "medium": (41_373_184, 41_668_412),
    "base": (109_482_240, 110_106_428),
    "large": (335_141_888, 336_226_108),
}


@pytest.mark.parametrize("size", BERTS)
def test_berts_as_published(size):
    alone, with_heads = BERTS[size]
    assert cost(built(Bert, BertConfig.bert(size))).parameters == alone
    whole = BertConfig.bert(size, masked_tokens=True, next_sentence=True)
    assert cost(built(Bert, whole)).parameters == with_heads


def test_the_parts_of_bert_base():
    parts = cost(built(Bert, BertConfig.bert("base"))).by_part(1)
    begin = sum(parts[name].parameters.value for name in ("embedding", "positions", "segments", "norm"))
    assert (begin, parts["blocks"].parameters.value, parts["pooler"].parameters.value) == (
        23_837_184,
        85_054_464,
        590_592,
    )


def test_bert_has_no_next_token():
    with pytest.raises(CostError, match="no next token"):
        cost(built(Bert, BertConfig.bert("tiny")), step="decode", tokens=5)


# The Transformer


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"order": "pre"},
        {"order": "pre", "final_norm": False},
        {"shared": False, "position": "learned", "context_length": 9, "activation": "swiglu", "attention_bias": False},
    ],
    ids=str,
)
@pytest.mark.parametrize(("source", "target"), [(7, 5), (1, 3)])
def test_transformers(choices, source, target):
    model = Transformer(TransformerConfig(**SMALL, hidden_dim=5, **choices))
    assert_counted(model, words(2, source), words(2, target), batch=2, tokens=target, context_tokens=source)


class Writing(nn.Module):
    """A step of a translation as a module, so that it is counted like one."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens, cache):
        return self.model.decode_step(tokens, cache)


@pytest.mark.parametrize("order", ["pre", "post"])
def test_a_transformer_that_writes(order):
    model = Transformer(TransformerConfig(**SMALL, hidden_dim=5, order=order, dropout=0.0)).double()
    cache = model.new_cache()
    with torch.no_grad():
        model.decode(words(3, 4), model.encode(words(3, 7)), cache=cache)
    found = cost(model, step="decode", backend="reference", batch=3, tokens=4, context_tokens=7)
    assert found.macs == count(Writing(model), words(3, 1), cache).macs
    assert found.by_part(1)["encoder"].macs == 0
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_transformers_as_published():
    base, big = TransformerConfig.base(), TransformerConfig.big()
    found = cost(built(Transformer, base))
    assert found.parameters == 63_082_496
    assert cost(built(Transformer, big)).parameters == 214_245_376
    assert cost(built(Transformer, TransformerConfig.base(attention_bias=False))).parameters == 63_045_632
    parts = found.by_part(2)
    assert parts["encoder.blocks"].parameters == 6 * 3_152_384
    assert parts["decoder.blocks"].parameters == 6 * 4_204_032


def test_the_decoder_does_not_wait_for_the_encoder_with_its_first_attention():
    sizes = {"tokens": 5, "context_tokens": 7}
    one, two = (cost(built(Transformer, TransformerConfig(layers=layers)), **sizes) for layers in (1, 2))
    own = "decoder.blocks.attention"
    assert sum(part.depth.value for name, part in one.by_part().items() if name.startswith(own)) == 0
    attention = sum(part.depth.value for name, part in two.by_part().items() if name.startswith(own))
    block = sum(part.depth.value for name, part in two.by_part().items() if ".blocks." in name)
    assert block == 2 * sum(part.depth.value for name, part in one.by_part().items() if ".blocks." in name) + attention
    assert attention > 0
