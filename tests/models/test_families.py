"""Mistral, Qwen2, RoBERTa and DistilBERT of Hugging Face are our GPT and Bert by configuration: number for number."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import assert_agree, assert_gradients_agree, gradients, refused, shaken
from plain import long, slow_but
from torch import Tensor, nn
from twins import transformers

from regard import cost
from regard.errors import CheckpointError, ConfigError, InputError
from regard.laws import check
from regard.models import GPT, Bert, BertConfig, DaViT, GPTConfig, SpatialTransformer, Transformer, ViT
from regard.models.pretrained import Pretrained

# Every model that is read from files.
KINDS = (GPT, Bert, ViT, DaViT, Transformer, SpatialTransformer)

VOCABULARY, CONTEXT, TOKENS = 53, 31, 17
LENGTHS = [17, 11, 2]
DTYPES = [torch.float64, torch.float32]

DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
}
ENCODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 12,
    "intermediate_size": 19,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
}
DISTILLED = {"vocab_size": VOCABULARY, "dim": 12, "hidden_dim": 19, "n_layers": 2, "n_heads": 3}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", DECODER | {"sliding_window": 5}),
    "mistral, window 1": ("Mistral", DECODER | {"sliding_window": 1}),
    "mistral, wide heads, no window": ("Mistral", DECODER | {"sliding_window": None, "head_dim": 10}),
    "mistral, narrow heads": ("Mistral", DECODER | {"sliding_window": 7, "head_dim": 2}),
    "mistral, tied": ("Mistral", DECODER | {"sliding_window": 3, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", DECODER),
    "qwen2, tied": ("Qwen2", DECODER | {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "qwen2, window": ("Qwen2", DECODER | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
    "qwen2, window above": (
        "Qwen2",
        DECODER | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "llama, biases of attention only": ("Llama", DECODER | {"attention_bias": True}),
    "llama, wide heads": ("Llama", DECODER | {"head_dim": 6}),
}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "roberta": ("Roberta", ENCODER | {"max_position_embeddings": 21, "type_vocab_size": 1}),
    "roberta, two segments, another padding": (
        "Roberta",
        ENCODER | {"max_position_embeddings": 25, "pad_token_id": 5, "layer_norm_eps": 1e-5},
    ),
    "xlm-roberta": ("XLMRoberta", ENCODER | {"max_position_embeddings": 21, "type_vocab_size": 1}),
    "camembert": ("Camembert", ENCODER | {"max_position_embeddings": 21, "type_vocab_size": 1}),
    "distilbert": ("DistilBert", DISTILLED | {"max_position_embeddings": 19}),
    "distilbert, relu, sinusoids": (
        "DistilBert",
        DISTILLED | {"max_position_embeddings": 19, "activation": "relu", "sinusoidal_pos_embds": True},
    ),
}


def make_twin(family: str, head: str, config: dict[str, Any], dtype: torch.dtype = torch.float64) -> Any:
    """Their model with random numbers everywhere."""
    library = transformers()
    made = getattr(library, f"{family}Config")(**config)
    return shaken(getattr(library, f"{family}{head}")(made), dtype)


class ExactNorm(nn.Module):
    """An RMS norm that computes in the dtype of its input: theirs computes in float32 whatever that is."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.weight, self.eps = theirs.weight, theirs.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class ExactAngles(nn.Module):
    """Their rotary angles in float64."""

    def __init__(self, size: int, base: float) -> None:
        super().__init__()
        self.size, self.base = size, base

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        speeds = self.base ** (-torch.arange(0, self.size, 2, dtype=torch.float64) / self.size)
        angle = (position_ids[..., None].double() * speeds).repeat(1, 1, 2)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def sharpen(twin: Any) -> Any:
    """Their decoder with the two parts in float64 that it computes in float32; masks, heads and wiring stay theirs."""
    for name, module in list(twin.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            twin.set_submodule(name, ExactNorm(module))
    base = getattr(twin, "model", twin)
    config = twin.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    base.rotary_emb = ExactAngles(size, config.rope_parameters["rope_theta"])
    return twin


def draw_tokens() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(6, VOCABULARY, (3, TOKENS), generator=generator)


def read(cls: type[Pretrained], twin: Any) -> Any:
    return cls.from_checkpoint(twin.config.to_dict(), twin.state_dict())


def weigh(*outputs: Tensor) -> Tensor:
    """A loss in which every number has a weight of its own."""
    generator = torch.Generator().manual_seed(5)
    return sum(
        (output * torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)).sum()
        for output in outputs
    )


# Decoders


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_has_their_logits_states_and_gradients_beyond_its_window(name, dtype):
    family, config = DECODERS[name]
    twin = make_twin(family, "ForCausalLM", config, dtype)
    twin = sharpen(twin) if dtype == torch.float64 else twin
    model, tokens = read(GPT, twin), draw_tokens()
    out = twin(tokens, output_hidden_states=True)
    logits = model(tokens)
    assert_agree(logits, out.logits)
    assert_agree(model.hidden(tokens), out.hidden_states[-1])
    weigh(logits).backward()
    weigh(out.logits).backward()
    assert_gradients_agree(model, GPT.converters["huggingface"].read_state(gradients(twin), model.config))


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_both_of_their_implementations_have_our_window(kind):
    twin = sharpen(make_twin("Mistral", "ForCausalLM", DECODER | {"sliding_window": 4}))
    twin.set_attn_implementation(kind)
    # eager computes its softmax in float32 whatever the dtype
    assert_agree(read(GPT, twin)(draw_tokens()), twin(draw_tokens()).logits, 1e-10 if kind == "sdpa" else 1e-5)


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_padded_rows_have_their_logits(name):
    family, config = DECODERS[name]
    twin = sharpen(make_twin(family, "ForCausalLM", config))
    model, tokens = read(GPT, twin), draw_tokens()
    real = torch.arange(TOKENS) >= TOKENS - torch.tensor(LENGTHS)[:, None]
    theirs = twin(tokens, attention_mask=real.long(), position_ids=(real.cumsum(1) - 1).clamp(min=0)).logits
    assert_agree(model(tokens, lengths=LENGTHS)[real], theirs[real])


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_decoding_with_a_cache_has_their_logits_of_every_step(name):
    family, config = DECODERS[name]
    twin = sharpen(make_twin(family, "ForCausalLM", config))
    model, tokens = read(GPT, twin), draw_tokens()
    cache, past = model.new_cache(), None
    whole = twin(tokens).logits
    for first, last in [(0, 7), *((place, place + 1) for place in range(7, TOKENS))]:
        out = twin(tokens[:, first:last], past_key_values=past, use_cache=True)
        past = out.past_key_values
        # their cache keeps all tokens where the window is one, and then its steps are not those of the whole text
        theirs = whole[:, first:last] if config.get("sliding_window") == 1 else out.logits
        assert_agree(model(tokens[:, first:last], cache=cache), theirs)


def save_and_load(kind, twin, head, folder: Path):
    """The twin, after our model of it was saved in the layout of transformers; and what its loader reports."""
    twin.save_pretrained(folder / "theirs")
    model = kind.from_pretrained(folder / "theirs")
    model.save_pretrained(folder / "ours", layout="huggingface")
    back = kind.from_pretrained(folder / "ours")
    assert back.config == model.config
    assert all(torch.equal(tensor, back.state_dict()[key]) for key, tensor in model.state_dict().items())
    loader = getattr(transformers(), "AutoModel" if head == "Model" else f"AutoModel{head}")
    again, info = loader.from_pretrained(folder / "ours", output_loading_info=True)
    assert not info["missing_keys"]
    return again.eval(), info


@pytest.mark.parametrize(
    ("name", "head"), [*((name, "ForCausalLM") for name in DECODERS), ("mistral", "Model"), ("qwen2, tied", "Model")]
)
@torch.no_grad()
def test_a_decoder_is_written_as_transformers_reads_it(tmp_path: Path, name, head):
    family, config = DECODERS[name]
    twin, tokens = make_twin(family, head, config), draw_tokens()
    again, _ = save_and_load(GPT, twin, head, tmp_path)
    for mine, theirs in zip(again(tokens)[:1], twin(tokens)[:1], strict=True):
        assert_agree(mine, theirs, 1e-14)


@torch.no_grad()
def test_a_bare_decoder_has_hidden_states_and_does_not_write():
    twin = sharpen(make_twin("Qwen2", "Model", DECODER))
    model = read(GPT, twin)
    assert not model.config.logits
    assert_agree(model(draw_tokens()), twin(draw_tokens()).last_hidden_state)
    assert model(draw_tokens(), last_only=True).shape == (3, 1, 24)
    with refused(ConfigError, "logits=False", "ForCausalLM"):
        model.generate([[7, 8]], max_new_tokens=2)


def test_a_decoder_with_a_head_that_lacks_its_matrix_is_refused_by_name():
    twin = make_twin("Mistral", "ForCausalLM", DECODER)
    state = {name: tensor for name, tensor in twin.state_dict().items() if name != "lm_head.weight"}
    with refused(CheckpointError, "missing: output.weight"):
        GPT.from_checkpoint(twin.config.to_dict(), state)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"sliding_window": 0}),
        ("mistral", {"sliding_window": -3}),
        ("mistral", {"sliding_window": "wide"}),
        ("mistral", {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}),
        ("mistral", {"attention_bias": True}),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}),
        ("qwen2", {"layer_types": ["full_attention"] * 2}),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}),
        ("qwen2", {"num_hidden_layers": 10**12}),
        ("qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}),
    ],
    ids=str,
)
def test_what_has_no_counterpart_is_refused(family, changes):
    with refused(ConfigError):
        GPT.from_checkpoint({"model_type": family, **DECODER, **changes}, {})


# Encoders


def pad(twin: Any) -> tuple[Tensor, Tensor]:
    """Three texts of unequal length, padded on the right with their own padding token, and which places are real."""
    real = torch.arange(TOKENS) < torch.tensor(LENGTHS)[:, None]
    return torch.where(real, draw_tokens(), twin.config.pad_token_id), real


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head", ["Model", "ForMaskedLM"])
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_has_their_outputs_and_gradients(name, head, dtype):
    family, config = ENCODERS[name]
    twin = make_twin(family, head, config, dtype)
    model = read(Bert, twin)
    tokens, real = pad(twin)
    out = twin(tokens, attention_mask=real.long())
    made = model(tokens, lengths=LENGTHS)
    if head == "ForMaskedLM":
        pairs = [(made.masked_tokens[real], out.logits[real])]
    else:
        pairs = [(made.hidden[real], out.last_hidden_state[real])]
        assert (made.pooled is None) == (family == "DistilBert")
        pairs += [] if made.pooled is None else [(made.pooled, out.pooler_output)]
    for mine, theirs in pairs:
        assert_agree(mine, theirs)
    weigh(*(mine for mine, _ in pairs)).backward()
    weigh(*(theirs for _, theirs in pairs)).backward()
    found = Bert.converters["huggingface"].read_state(gradients(twin), model.config)
    if "embedding.weight" not in found:  # one tensor by two names, of which theirs has the other first
        found["embedding.weight"] = found.pop("masked_tokens.output.weight")
    assert_gradients_agree(model, found)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("head", ["Model", "ForMaskedLM"])
@torch.no_grad()
def test_an_encoder_is_written_as_transformers_reads_it(tmp_path: Path, name, head):
    family, config = ENCODERS[name]
    twin = make_twin(family, head, config)
    again, info = save_and_load(Bert, twin, head, tmp_path)
    assert not info["unexpected_keys"]
    tokens, real = pad(twin)
    expected, found = (each(tokens, attention_mask=real.long()) for each in (twin, again))
    for mine, theirs in zip(found.to_tuple(), expected.to_tuple(), strict=True):
        assert_agree(mine, theirs, 1e-14)


@torch.no_grad()
def test_positions_of_roberta_count_the_tokens_that_are_not_padding():
    twin = make_twin("Roberta", "Model", ENCODERS["roberta"][1])
    model, tokens = read(Bert, twin), draw_tokens()
    tokens[0, :4], tokens[1, 5], tokens[2, 7:9] = 1, 1, 1  # in front, inside, and several
    assert_agree(model(tokens).hidden, twin(tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state)
    assert model.config.context_length == 21 - 2
    model(torch.full((1, 19), 7))
    with refused(InputError, "at most 19 tokens"):
        model(torch.full((1, 20), 7))


@torch.no_grad()
def test_packed_texts_have_the_positions_of_roberta():
    model = read(Bert, make_twin("Roberta", "Model", ENCODERS["roberta"][1]))
    texts = [row[:length].tolist() for row, length in zip(draw_tokens(), LENGTHS, strict=True)]
    alone = torch.cat([model(torch.tensor([text])).hidden.mean(1) for text in texts])
    assert_agree(model.embed(texts, normalise=False), alone)
    with refused(InputError, "padding token"):
        model.embed([[7, 8], [9, 1]])


def test_segments_are_refused_by_a_model_without_them():
    model = read(Bert, make_twin("DistilBert", "Model", DISTILLED))
    with refused(InputError, "leave segments out"):
        model(torch.tensor([[7, 8]]), torch.tensor([[0, 0]]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"segments": 0}, "DistilBERT has no pooler=True"),
        ({"padding_token": 1, "next_sentence": True}, "RoBERTa has no next_sentence=True"),
        ({"padding_token": 1, "masked_tokens": True, "activation": "relu"}, "activation='relu'"),
        ({"segments": 0, "pooler": False, "norm_eps": 1e-5}, "norm_eps=1e-05"),
    ],
)
def test_an_encoder_that_none_of_them_has_is_not_written(tmp_path: Path, changes, words):
    sizes = {"vocab_size": 7, "context_length": 5, "dim": 6, "layers": 1, "heads": 2}
    with refused(CheckpointError, words):
        Bert(BertConfig.from_dict(sizes | changes)).save_pretrained(tmp_path, layout="huggingface")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("changes", [{"hidden_act": "relu"}, {"pad_token_id": None}, {"max_position_embeddings": "x"}])
def test_what_roberta_cannot_be_here_is_refused(changes):
    twin = make_twin("Roberta", "ForMaskedLM", ENCODERS["roberta"][1])
    with refused(ConfigError):
        Bert.from_checkpoint(twin.config.to_dict() | changes, twin.state_dict())


# Both


def test_an_unknown_model_type_is_refused_with_those_that_are_read(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    for kind, words in {
        "gemma": "gpt2, llama, mistral, qwen2",
        "roberta": "Bert.from_pretrained(...)",
        "vit": "ViT.from_pretrained(...)",
    }.items():
        (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
        with refused(CheckpointError, f"model_type={kind!r}", words, "regard.gpt"):
            GPT.from_pretrained(tmp_path)
    with refused(CheckpointError, "bert, roberta, xlm-roberta, camembert, distilbert"):
        (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
        Bert.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_model_lists_the_checkpoints_it_reads(tmp_path: Path, kind: type[Pretrained]):
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    (tmp_path / "config.json").write_text('{"model_type": "gemma", "architecture": "swin_tiny"}')
    with pytest.raises(CheckpointError) as caught:
        kind.from_pretrained(tmp_path)
    text = caught.value.because
    assert f"model_type regard.{kind.__name__.lower()}" in text
    for layout, converter in kind.converters.items():
        named = re.search(rf"(model_type|architecture) (\S[^;]*) \({layout}\)", text)
        assert named is not None, text
        assert list(converter.model_types) == (named[2].split(", ") if named[1] == "model_type" else [])


def test_the_readme_lists_the_model_types_that_are_read():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    for kind in KINDS:
        row = re.search(rf"^\| `{kind.__name__}` \|([^|]*)\|", readme, flags=re.M)
        converter = kind.converters.get("huggingface")
        read = [] if converter is None else list(converter.model_types)
        assert re.findall(r"`([^`]+)`", row[1] if row else "") == read, kind


def family_models() -> dict[str, Pretrained]:
    torch.manual_seed(7)
    decoder = {"vocab_size": 31, "context_length": 64, "dim": 12, "layers": 2, "heads": 3}
    mistral = GPTConfig.llama(**decoder, window=5, head_dim=6, tie_embeddings=False)
    qwen2 = GPTConfig.llama(**decoder, attention_bias="qkv", window=3, window_layers=(1,))
    bare = GPTConfig.llama(**decoder, logits=False)
    roberta = BertConfig(**decoder, segments=1, padding_token=1, masked_tokens=True)
    distilbert = BertConfig(**decoder, segments=0, pooler=False)
    return {
        "mistral": GPT(mistral),
        "qwen2": GPT(qwen2),
        "bare": GPT(bare),
        "roberta": Bert(roberta),
        "distilbert": Bert(distilbert),
    }


@pytest.mark.parametrize("name", slow_but(("mistral", "distilbert"), family_models()))
def test_their_cost_counts_their_parameters(name):
    model = family_models()[name].eval()
    priced = cost(model, tokens=11)
    assert priced.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "distilbert", *long("bare", "qwen2", "roberta")])
def test_they_keep_the_laws(name):
    report = check(family_models()[name].eval())
    assert not report.violations, str(report)
