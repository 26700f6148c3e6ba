"""GPT is Hugging Face's GPT-2 and LLaMA, number for number, and a cache changes nothing but the time."""

from __future__ import annotations

import pytest
import torch
from agreement import assert_agree, assert_gradients_agree, gradients, refused, shaken
from twins import transformers
from writers import left_padded

from regard.errors import CacheError, CheckpointError, ConfigError, InputError
from regard.models import GPT, GPTConfig
from regard.models.generation import PowerPenalty
from regard.models.gpt import POSITIONS
from regard.patterns import Blocks, Segments

VOCABULARY, CONTEXT = 31, 23
DTYPES = [torch.float64, torch.float32]
LENGTHS = [7, 4, 1]
NO_ENDS = {"bos_token_id": None, "eos_token_id": None}


def gpt2(dtype: torch.dtype = torch.float64, **changes):
    sizes = {"vocab_size": VOCABULARY, "n_positions": CONTEXT, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_inner": 19}
    config = transformers().GPT2Config(**sizes | NO_ENDS | changes)
    return shaken(transformers().GPT2LMHeadModel(config), dtype)


def llama(dtype: torch.dtype = torch.float64, **changes):
    """LLaMA's twin. Its rotary tables and norms are computed in float32; for float64 they are done anew."""
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "hidden_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 19}
    config = transformers().LlamaConfig(**sizes | NO_ENDS | changes)
    twin = shaken(transformers().LlamaForCausalLM(config), dtype)
    if dtype == torch.float64:
        for module in twin.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                module.forward = exact_norm(module)
        half = config.hidden_size // config.num_attention_heads // 2
        twin.model.rotary_emb.forward = exact_rotary(config.rope_parameters["rope_theta"], half)
    return twin


def exact_norm(module):
    return lambda x: x / (x.square().mean(-1, keepdim=True) + module.variance_epsilon).sqrt() * module.weight


def exact_rotary(base: float, half: int):
    def tables(x, position_ids):
        speeds = base ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = (position_ids[..., None].double() * speeds).repeat(1, 1, 2)
        return angle.cos(), angle.sin()

    return tables


def ours(twin) -> GPT:
    return GPT.from_checkpoint(twin.config.to_dict(), twin.state_dict())


def small(dtype: torch.dtype = torch.float64, **changes) -> GPT:
    sizes = {"vocab_size": VOCABULARY, "context_length": CONTEXT, "dim": 12, "layers": 2, "heads": 3, "hidden_dim": 19}
    return shaken(GPT(GPTConfig(**sizes | changes)), dtype)


def tokens(rows: int = 3, count: int = 7, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(seed))


def assert_twins(model: GPT, mine: torch.Tensor, twin, theirs: torch.Tensor) -> None:
    """Logits, and the gradients of a loss that weighs each of them differently."""
    assert_agree(mine, theirs)
    weight = torch.arange(1, mine.numel() + 1).view_as(mine).cos().to(mine.dtype)
    (mine * weight).sum().backward()
    (theirs * weight).sum().backward()
    assert_gradients_agree(model, GPT.converters["huggingface"].read_state(gradients(twin), model.config))


TWINS = {
    "gpt2": (gpt2, {}),
    "gpt2 untied": (gpt2, {"tie_word_embeddings": False}),
    "gpt2 relu": (gpt2, {"activation_function": "relu", "n_inner": None}),
    "gpt2 gelu": (gpt2, {"activation_function": "gelu", "layer_norm_epsilon": 1e-3}),
    "llama": (llama, {}),
    "llama tied": (llama, {"tie_word_embeddings": True}),
    "llama of one key head": (llama, {"num_key_value_heads": 1}),
    "llama of equal heads": (llama, {"num_key_value_heads": 6, "rms_norm_eps": 1e-3}),
    "llama with biases": (llama, {"attention_bias": True, "mlp_bias": True}),
    "llama with another base": (llama, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
}


@pytest.fixture(params=TWINS)
def twin(request):
    build, changes = TWINS[request.param]
    return build(**changes)


# Twins


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TWINS)
def test_logits_and_gradients_are_hugging_faces(name, dtype):
    build, changes = TWINS[name]
    twin = build(dtype, **changes)
    model = ours(twin)
    assert_twins(model, model(tokens()), twin, twin(tokens()).logits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_texts_padded_on_the_left_are_hugging_faces(name, dtype):
    twin = TWINS[name][0](dtype)
    model = ours(twin)
    real = torch.arange(7) >= 7 - torch.tensor(LENGTHS)[:, None]
    positions = (real.long().cumsum(-1) - 1).clamp(min=0)
    theirs = twin(tokens(), attention_mask=real.long(), position_ids=positions).logits
    mine = model(tokens(), lengths=LENGTHS)
    assert_twins(model, mine[real], twin, theirs[real])


def test_one_token(twin):
    with torch.no_grad():
        assert_agree(ours(twin)(torch.tensor([[17]])), twin(torch.tensor([[17]])).logits)


def test_last_only_computes_the_last_logits():
    model = small()
    with torch.no_grad():
        assert_agree(model(tokens(), last_only=True), model(tokens())[:, -1:], 1e-13)


def test_texts_end_to_end_are_what_each_is_alone():
    model = small(position="alibi")
    with torch.no_grad():
        packed = model(tokens(1, 7), pattern=Segments([0, 0, 0, 1, 1, 1, 1]))
        assert_agree(packed[:, :3], model(tokens(1, 7)[:, :3]), 1e-12)
        assert_agree(packed[:, 3:], model(tokens(1, 7)[:, 3:]), 1e-12)


def test_computed_positions_are_a_sinusoidal_table():
    computed, learned = small(position="sinusoidal"), small()
    channels = torch.arange(12)
    angles = torch.arange(CONTEXT)[:, None] * 10000.0 ** (-(channels - channels % 2).double() / 12)
    state = computed.state_dict() | {"positions.weight": torch.where(channels % 2 == 0, angles.sin(), angles.cos())}
    learned.load_state_dict(state)
    with torch.no_grad():
        assert_agree(computed(tokens()), learned(tokens()), 1e-13)


def test_a_window_covers_its_number_of_tokens():
    model = small(layers=1, window=2)
    other = tokens()
    other[:, 3] = (other[:, 3] + 1) % VOCABULARY
    with torch.no_grad():
        moved = (model(tokens()) - model(other)).abs().amax((0, 2)) > 0
    assert moved.tolist() == [False, False, False, True, True, True, False]


# ModelCache


KINDS = {
    "learned": {"position": "learned"},
    "rotary": {"position": "rotary", "dim": 24, "heads": 6, "kv_heads": 2, "norm": "rms", "feed_forward": "swiglu"},
    "sinusoidal": {"position": "sinusoidal"},
    "alibi": {"position": "alibi"},
    "none": {"position": "none"},
    "learned, window": {"position": "learned", "window": 3},
    "rotary, window": {"position": "rotary", "dim": 24, "window": 2},
    "alibi, window": {"position": "alibi", "window": 3},
}
STEPS = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunks", [(1,) * 17, (7, 1, 5, 4), (17,)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_with_a_cache_equals_the_whole_sequence(kind, chunks, dtype):
    model = small(dtype, **KINDS[kind])
    text = tokens(2, 17)
    cache = model.new_cache()
    with torch.no_grad():
        whole = model(text)
        parts = [model(chunk, cache=cache) for chunk in text.split(chunks, 1)]
    assert cache.length == 17
    assert_agree(torch.cat(parts, 1), whole, STEPS[dtype])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_unequal_length_are_decoded_as_each_alone(kind):
    model = small(**KINDS[kind])
    text, later = tokens(), tokens(3, 6, seed=9)
    cache = model.new_cache(13)
    with torch.no_grad():
        first = model(text, cache=cache, lengths=LENGTHS)
        steps = [model(token, cache=cache) for token in later.split(1, 1)]
        padded = model(torch.cat((text, later), 1), lengths=[length + 6 for length in LENGTHS])
        for row, length in enumerate(LENGTHS):
            alone = model(torch.cat((text[row, 7 - length :], later[row]))[None])[0]
            assert_agree(torch.cat((first[row, 7 - length :], *(step[row] for step in steps))), alone, 1e-12)
            assert_agree(padded[row, 7 - length :], alone, 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_be_reordered_and_the_end_taken_back(kind):
    model = small(**KINDS[kind])
    text = tokens(3, 11)
    cache = model.new_cache()
    with torch.no_grad():
        model(text[:, :5], cache=cache)
        cache.reorder(torch.tensor([2, 0, 0, 1]))
        turned = text[[2, 0, 0, 1]]
        assert_agree(model(turned[:, 5:6], cache=cache), model(turned[:, :6])[:, 5:], 1e-12)
        model(tokens(4, 1), cache=cache)
        if "window" not in kind:
            cache.crop(6)
            assert_agree(model(turned[:, 6:], cache=cache), model(turned)[:, 6:], 1e-12)


def test_a_new_token_leaves_every_old_number_as_it_was():
    """Bit by bit: what was said of a prefix, and what is remembered of it."""
    model = small(torch.float32)
    text = tokens(2, 9)
    long, short = model.new_cache(9), model.new_cache(9)
    with torch.no_grad():
        said = [model(token, cache=short) for token in text[:, :8].split(1, 1)]
        kept = [cache._storage[0][:, :, :8].clone() for cache in short.layers]
        again = [model(token, cache=long) for token in text.split(1, 1)]
    assert all(torch.equal(first, second) for first, second in zip(said, again[:8], strict=True))
    for cache, keys in zip(long.layers, kept, strict=True):
        assert torch.equal(cache._storage[0][:, :, :8], keys)


def test_without_a_cache_later_tokens_change_no_earlier_logits():
    model, text = small(), tokens()
    other = text.clone()
    other[:, 4] = (other[:, 4] + 1) % VOCABULARY
    with torch.no_grad():
        first, second = model(text), model(other)
    assert torch.equal(first[:, :4], second[:, :4])
    assert not torch.equal(first[:, 4:], second[:, 4:])


# Writing


PROMPTS = [[3, 14, 15, 9], [2], [6, 5, 3], [22, 0, 1, 2, 3, 4, 5]]


def test_greedy_texts_are_hugging_faces(twin):
    theirs = twin.generate(**left_padded(PROMPTS), max_new_tokens=9, do_sample=False, pad_token_id=0)
    found = ours(twin).generate(PROMPTS, max_new_tokens=9)
    assert found.tokens == theirs[:, 7:].tolist()
    assert found.sequences == [prompt + text for prompt, text in zip(PROMPTS, found.tokens, strict=True)]


@pytest.mark.parametrize("name", ["gpt2 untied", "llama"])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_beams_are_hugging_faces(name, alpha):
    build, changes = TWINS[name]
    twin = build(**changes)
    theirs = twin.generate(
        **left_padded(PROMPTS),
        max_new_tokens=9,
        num_beams=3,
        do_sample=False,
        early_stopping="never",
        length_penalty=alpha,
        eos_token_id=5,
        pad_token_id=0,
    )
    found = ours(twin).generate(
        PROMPTS, max_new_tokens=9, num_beams=3, length_penalty=PowerPenalty(alpha), stop_tokens=5
    )
    for row, text in zip(theirs[:, 7:].tolist(), found.tokens, strict=True):
        assert row[: len(text)] == text
        assert set(row[len(text) :]) <= {0, 5}  # theirs fills up


def test_what_is_drawn_depends_on_the_seed_and_on_nothing_else():
    model = small()
    words = {"max_new_tokens": 9, "temperature": 1.3, "top_p": 0.95}
    first = model.generate(PROMPTS, seed=3, **words)
    torch.manual_seed(8)
    assert model.generate(PROMPTS, seed=3, **words) == first
    assert model.generate(PROMPTS[:2], seed=3, **words).tokens == first.tokens[:2]
    assert model.generate(PROMPTS, seed=4, **words).tokens != first.tokens


def test_generation_runs_in_eval_mode_and_leaves_training_mode_and_gradients_as_they_were():
    model = small(dropout=0.5).train()
    assert model.generate(PROMPTS, max_new_tokens=5).tokens == model.generate(PROMPTS, max_new_tokens=5).tokens
    assert model.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    model(tokens()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# Folders


def test_to_hugging_face_and_back_changes_no_bit(twin, tmp_path):
    model = ours(twin)
    config, state = model.to_checkpoint("huggingface")
    tied = config["tie_word_embeddings"]
    expected = {name: tensor for name, tensor in twin.state_dict().items() if not (tied and name == "lm_head.weight")}
    assert set(state) == set(expected)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    model.save_pretrained(tmp_path / "ours", layout="huggingface")
    back = type(twin).from_pretrained(tmp_path / "ours", dtype=torch.float64).eval()
    assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in twin.state_dict().items())
    twin.save_pretrained(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "regard")
    for folder in ("ours", "theirs", "regard"):
        again = GPT.from_pretrained(tmp_path / folder)
        assert again.config == model.config
        assert (again.output.weight is again.embedding.weight) == tied
        assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("changes", [{"position": "alibi"}, {"window": 3}], ids=str)
def test_a_model_that_hugging_face_does_not_have_is_not_written(changes):
    with refused(CheckpointError, *(f"{name}={value!r}" for name, value in changes.items())):
        small(**changes).to_checkpoint("huggingface")


# Bad input


def test_input_that_cannot_be_is_refused_in_four_parts():
    model = small()
    with refused(InputError, "longer than the context", "24 tokens"):
        model(tokens(1, 24))
    with refused(InputError, "Token 31", "tokens[1, 0] = 31"):
        model(torch.tensor([[1], [31]]))
    with refused(InputError, "Token -1"):
        model(torch.tensor([[-1]]))
    with refused(InputError, "Expected token ids", "(3,)"):
        model(torch.tensor([1, 2, 3]))
    with refused(InputError, "outgrow the context"):
        model.generate([[1] * 20], max_new_tokens=4)
    with refused(InputError, "prompts[0][1] = 31"):
        model.generate([[1, 31]], max_new_tokens=4)
    cache = model.new_cache()
    with torch.no_grad():
        model(tokens(1, 20), cache=cache)
        with refused(InputError, "longer than the context", "4 tokens after 20"):
            model(tokens(1, 4), cache=cache)
    with refused(CacheError, "gradient"):
        model(tokens(), cache=model.new_cache())
    with refused(InputError, "The text has no tokens"):
        model(tokens(2, 0))
    with refused(InputError, "2 lengths", "tokens (3, 7)"):
        model(tokens(), lengths=[7, 7])


def test_configurations_that_cannot_be_are_refused_in_four_parts():
    with refused(ConfigError, "has no field 'n_layer'"):
        GPTConfig.from_dict({"n_layer": 3})
    with refused(ConfigError, "layers=0"):
        GPTConfig(layers=0)
    with refused(ConfigError, "dropout=1.5"):
        GPTConfig(dropout=1.5)
    with refused(ConfigError, "no such part"):
        GPTConfig(position="absolute")
    with refused(ConfigError, "no GPT-2 called 'huge'"):
        GPTConfig.gpt2("huge")
    with refused(ConfigError, "heads"):
        GPT(GPTConfig(dim=10, heads=3))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("position", POSITIONS)
def test_every_kind_of_position_is_saved_and_loaded(position, window, tmp_path):
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=11, context_length=16, dim=12, layers=1, heads=3, position=position, window=window)
    model = GPT(config).eval()
    model.save_pretrained(tmp_path)
    tokens = torch.randint(0, 11, (2, 7))
    with torch.no_grad():
        assert torch.equal(GPT.from_pretrained(tmp_path)(tokens), model(tokens))


@pytest.mark.parametrize("position", POSITIONS)
def test_texts_packed_into_one_row_are_as_each_alone(position):
    torch.manual_seed(0)
    model = (
        GPT(GPTConfig(vocab_size=11, context_length=16, dim=12, layers=2, heads=3, position=position)).double().eval()
    )
    texts = [torch.randint(0, 11, (1, length)) for length in (3, 5)]
    positions = torch.cat([torch.arange(text.shape[1]) for text in texts])
    with torch.no_grad():
        packed = model(torch.cat(texts, 1), pattern=Segments([0] * 3 + [1] * 5), positions=positions)
        alone = torch.cat([model(text) for text in texts], 1)
    assert float((packed - alone).abs().max()) < 1e-12


def test_a_pattern_that_counts_positions_refuses_unequal_texts():
    model = GPT(GPTConfig(vocab_size=11, context_length=16, dim=12, layers=1, heads=3)).eval()
    with pytest.raises(CacheError, match="depends on distances only"):
        model(torch.randint(0, 11, (2, 7)), lengths=[7, 4], pattern=Blocks(4))
