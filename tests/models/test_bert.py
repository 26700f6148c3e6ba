"""Bert is Hugging Face's, number for number, and packing its texts changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from agreement import assert_agree, assert_gradients_agree, gradients, refused, shaken
from twins import transformers

from regard.errors import CheckpointError, ConfigError, InputError, RegardError
from regard.kernels import library
from regard.models import Bert, BertConfig
from regard.models.sequence_packing import pack_texts

VOCABULARY, CONTEXT, DIM = 31, 13, 12
LENGTHS = [7, 5, 1]
DTYPES = [torch.float64, torch.float32]


def hugging(kind: str, dtype: torch.dtype = torch.float64, **changes):
    """A random twin, with every dropout there, so that a mode that is wrong shows."""
    library = transformers()
    sizes = {"vocab_size": VOCABULARY, "hidden_size": DIM, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = library.BertConfig(**sizes, intermediate_size=19, max_position_embeddings=CONTEXT, **changes)
    return shaken(getattr(library, kind)(config), dtype)


def ours(twin) -> Bert:
    return Bert.from_checkpoint(twin.config.to_dict(), twin.state_dict())


def batch():
    """Tokens and segments of three texts of unequal length, padded on the right, and which places are real."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCABULARY, (3, 7), generator=generator)
    segments = torch.randint(0, 2, (3, 7), generator=generator)
    return tokens, segments, torch.arange(7) < torch.tensor(LENGTHS)[:, None]


def weighed(real, *outputs):
    """A loss that looks at every real number of every output, each with a weight of its own."""
    generator = torch.Generator().manual_seed(5)
    loss = 0.0
    for output in outputs:
        weights = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
        loss = loss + (output * (weights * real[..., None] if output.ndim == 3 else weights)).sum()
    return loss


# Twins


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "kind", ["BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForNextSentencePrediction"]
)
def test_outputs_and_gradients_are_hugging_faces(kind, dtype):
    twin = hugging(kind, dtype)
    model = ours(twin)
    tokens, segments, real = batch()
    out = twin(tokens, attention_mask=real.long(), token_type_ids=segments)
    made = model(tokens, segments, lengths=LENGTHS)
    pairs = {
        "BertModel": lambda: [(made.hidden, out.last_hidden_state), (made.pooled, out.pooler_output)],
        "BertForMaskedLM": lambda: [(made.masked_tokens, out.logits)],
        "BertForPreTraining": lambda: [
            (made.masked_tokens, out.prediction_logits),
            (made.next_sentence, out.seq_relationship_logits),
        ],
        "BertForNextSentencePrediction": lambda: [(made.next_sentence, out.logits)],
    }[kind]()
    for mine, theirs in pairs:
        assert_agree(*((mine[real], theirs[real]) if mine.ndim == 3 else (mine, theirs)))
    weighed(real, *(mine for mine, _ in pairs)).backward()
    weighed(real, *(theirs for _, theirs in pairs)).backward()
    found = Bert.converters["huggingface"].read_state(gradients(twin), model.config)
    assert_gradients_agree(model, found)


def test_parts_that_a_twin_has_not_are_none():
    made = ours(hugging("BertForMaskedLM"))(torch.tensor([[1, 2]]))
    assert made.pooled is None
    assert made.next_sentence is None


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu", "silu"])
def test_one_token_and_other_activations(activation):
    twin = hugging("BertForPreTraining", hidden_act=activation)
    tokens = torch.tensor([[17]])
    with torch.no_grad():
        out, made = twin(tokens), ours(twin)(tokens)
    assert_agree(made.masked_tokens, out.prediction_logits)
    assert_agree(made.next_sentence, out.seq_relationship_logits)


def test_padding_never_affects_the_output():
    model = ours(hugging("BertModel"))
    tokens, segments, real = batch()
    other = torch.where(real, tokens, (tokens + 1) % VOCABULARY)
    with torch.no_grad():
        first = model(tokens, segments, lengths=LENGTHS).hidden[real]
        assert torch.equal(model(other, segments, lengths=LENGTHS).hidden[real], first)
        assert not torch.equal(model(other, segments).hidden[real], model(tokens, segments).hidden[real])


def test_training_drops_and_evaluating_does_not():
    model = ours(hugging("BertModel"))
    tokens = batch()[0]
    assert torch.equal(model(tokens).hidden, model(tokens).hidden)
    model.train()
    torch.manual_seed(1)
    first = model(tokens).hidden
    assert not torch.equal(model(tokens).hidden, first)


# Folders


@pytest.mark.parametrize(
    "kind", ["BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForNextSentencePrediction"]
)
def test_to_regard_and_back_changes_no_bit_and_no_name(kind):
    twin = hugging(kind)
    config, state = ours(twin).to_checkpoint("huggingface")
    # the embedding is stored once
    expected = {name: tensor for name, tensor in twin.state_dict().items() if name != "cls.predictions.decoder.weight"}
    assert set(state) == set(expected)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    theirs = twin.config.to_dict() | {"architectures": [kind]}
    assert {name: theirs[name] for name in config} == config
    assert Bert.from_checkpoint(config, state).config == ours(twin).config


@pytest.mark.parametrize("kind", ["BertModel", "BertForMaskedLM", "BertForPreTraining"])
def test_transformers_reads_what_we_write_and_we_read_what_it_writes(kind, tmp_path):
    twin = hugging(kind)
    model = ours(twin)
    model.save_pretrained(tmp_path / "ours", layout="huggingface")
    back = getattr(transformers(), kind).from_pretrained(tmp_path / "ours", dtype=torch.float64).eval()
    tokens, segments, real = batch()
    with torch.no_grad():
        expected = twin(tokens, attention_mask=real.long(), token_type_ids=segments)
        found = back(tokens, attention_mask=real.long(), token_type_ids=segments)
    for mine, theirs in zip(found.to_tuple(), expected.to_tuple(), strict=True):
        assert_agree(mine, theirs, 1e-14)  # the same tensors; where they lie in memory may move a last bit
    twin.save_pretrained(tmp_path / "theirs")
    again = Bert.from_pretrained(tmp_path / "theirs")
    assert again.config == model.config
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_our_own_folder_keeps_everything(tmp_path):
    model = ours(hugging("BertForPreTraining"))
    model.save_pretrained(tmp_path)
    again = Bert.from_pretrained(tmp_path)
    assert again.config == model.config
    assert again.masked_tokens is not None
    assert again.masked_tokens.output.weight is again.embedding.weight
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_a_tensor_by_two_names_is_refused():
    twin = hugging("BertModel")
    state = twin.state_dict()
    state["bert.pooler.dense.bias"] = state["pooler.dense.bias"] + 1
    with refused(CheckpointError, "pooler.dense.bias"):
        Bert.from_checkpoint(twin.config.to_dict(), state)


def test_old_names_of_the_released_checkpoints_are_read():
    twin = hugging("BertForPreTraining")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in twin.state_dict().items()
        if not name.startswith("cls.predictions.decoder.")
    }
    old["bert.embeddings.position_ids"] = torch.arange(CONTEXT)[None]
    model = Bert.from_checkpoint(twin.config.to_dict(), old)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in ours(twin).state_dict().items())


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_a_masked_token_head_of_its_own_is_refused(part):
    twin = hugging("BertForMaskedLM")
    state = {name: tensor.clone() for name, tensor in twin.state_dict().items()}
    state[f"cls.predictions.decoder.{part}"] += 1
    with refused(CheckpointError, "output.weight" if part == "weight" else "decoder.bias"):
        Bert.from_checkpoint(twin.config.to_dict(), state)


@pytest.mark.parametrize(
    ("change", "name"),
    [({"position_embedding_type": "relative_key"}, "position_embedding_type"), ({"hidden_act": "tanh"}, "hidden_act")],
)
def test_what_would_change_the_numbers_is_refused(change, name):
    twin = hugging("BertModel")
    with refused(ConfigError, name):
        Bert.from_checkpoint(twin.config.to_dict() | change, twin.state_dict())


# Sentence embeddings


TEXTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8], [4, 6], [2, 6, 4, 3, 3]]


def alone(model: Bert, text: list[int], pooling: str) -> torch.Tensor:
    out = model(torch.tensor([text]))
    return {"mean": out.hidden[0].mean(0), "first": out.hidden[0, 0], "pooled": out.pooled[0]}[pooling]


@pytest.mark.parametrize("tokens_at_once", [1, 3, 11, 2048])
@pytest.mark.parametrize("pooling", ["mean", "first", "pooled"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
def test_packed_texts_are_what_each_is_alone(pooling, tokens_at_once, dtype, bound):
    model = ours(hugging("BertModel", dtype))
    found = model.embed(TEXTS, pooling=pooling, normalise=False, tokens_at_once=tokens_at_once)
    with torch.no_grad():
        expected = torch.stack([alone(model, text, pooling) for text in TEXTS])
    assert_agree(found, expected, bound)


def test_embeddings_have_norm_one_by_default():
    model = ours(hugging("BertModel"))
    unit = model.embed(TEXTS)
    assert_agree(unit.norm(dim=-1), torch.ones(5, dtype=torch.float64), 1e-14)
    raw = model.embed(TEXTS, normalise=False)
    assert_agree(unit * raw.norm(dim=-1, keepdim=True), raw, 1e-14)


def test_every_token_is_computed_once_and_no_text_is_cut():
    rows = list(pack_texts(TEXTS, 11, CONTEXT))
    assert sum(row.tokens.numel() for row in rows) == sum(map(len, TEXTS))
    assert sorted(index for row in rows for index in row.texts.tolist()) == list(range(5))
    for row in rows:
        assert row.tokens.shape[1] <= 11 or len(row.texts) == 1
        for place, index in enumerate(row.texts.tolist()):
            start, stop = row.starts[place : place + 2].tolist()
            assert row.tokens[0, start:stop].tolist() == TEXTS[index]
            assert row.positions[0, start:stop].tolist() == list(range(len(TEXTS[index])))


@pytest.mark.parametrize("training", [False, True])
def test_embedding_keeps_the_mode_and_leaves_the_model_fit_to_learn(training):
    model = ours(hugging("BertModel")).train(training)
    expected = copy.deepcopy(model).eval().embed(TEXTS)
    with torch.no_grad():
        assert torch.equal(model.embed(TEXTS), expected)
    assert model.training is training
    model(torch.tensor(TEXTS[:1]), lengths=[5]).hidden.sum().backward()
    assert not model.eval().embed(TEXTS).requires_grad


def test_embedding_in_a_training_loop_warns_that_the_model_does_not_learn():
    model = ours(hugging("BertModel")).train()
    with pytest.warns(UserWarning, match=r"only what follows it learns.*model\(tokens, lengths=\.\.\.\)") as warned:
        assert not model.embed(TEXTS).requires_grad
    assert warned[0].filename == __file__  # the line of the caller, not one of ours
    with torch.no_grad():  # nothing is expected to learn; warnings are errors here
        model.embed(TEXTS)
    model.requires_grad_(False).embed(TEXTS)


@pytest.mark.skipif(library.missing() is not None, reason=f"no kernels: {library.missing()}")
def test_a_packed_row_makes_nothing_of_its_square():
    """1500 texts of 2 tokens in a row of 3000: a square of scores of one head alone would have 9 million numbers."""
    model = ours(hugging("BertModel", torch.float32))
    texts = [[1 + index % 7, 2] for index in range(1500)]
    row = next(pack_texts(texts, 3000, CONTEXT))
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operator, kinds, arguments=(), words=None):
            nonlocal largest
            made = operator(*arguments, **(words or {}))
            for tensor in torch.utils._pytree.tree_leaves(made):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.untyped_storage().nbytes() // tensor.element_size())
            return made

    with torch.no_grad(), Watch():
        model.hidden(row.tokens, positions=row.positions, pattern=row.pattern)
    assert 3000 * DIM * 3 <= largest <= 3000 * 3 * DIM * 2


# Bad input


def test_input_that_cannot_be_is_refused_in_four_parts():
    model = Bert(
        BertConfig(vocab_size=VOCABULARY, context_length=CONTEXT, dim=DIM, layers=1, heads=3, pooler=False)
    ).eval()
    with refused(InputError, "Token 31", "tokens[0, 1] = 31"):
        model(torch.tensor([[1, 31]]))
    with refused(InputError, "longer than the context", "14 tokens"):
        model(torch.ones(1, CONTEXT + 1, dtype=torch.long))
    with refused(InputError, "Expected token ids", "float32"):
        model(torch.ones(1, 3))
    with refused(InputError, "segments", "no sentence 2"):
        model(torch.tensor([[1, 2]]), torch.tensor([[0, 2]]))
    with refused(InputError, "segments (1, 3)", "tokens (1, 2)"):
        model(torch.tensor([[1, 2]]), torch.tensor([[0, 1, 1]]))
    with refused(InputError, "The text has no tokens"):
        model(torch.ones(2, 0, dtype=torch.long))
    with refused(RegardError, "longer than"):
        model(torch.tensor([[1, 2]]), lengths=[3])
    with refused(ConfigError, "segments=-1"):
        BertConfig(segments=-1)
    with refused(ConfigError, "has no field 'dims'"):
        BertConfig.from_dict({"dims": 12})
    with refused(ConfigError, "no BERT called 'huge'"):
        BertConfig.bert("huge")
    with refused(ConfigError, "cannot be built"):
        BertConfig(next_sentence=True, pooler=False)


def test_texts_that_cannot_be_embedded_are_refused_in_four_parts():
    model = Bert(
        BertConfig(vocab_size=VOCABULARY, context_length=CONTEXT, dim=DIM, layers=1, heads=3, pooler=False)
    ).eval()
    with refused(InputError, "texts[1][0] = 31"):
        model.embed([[1, 2, 3], [31]])
    with refused(InputError, "text 1 of 14 tokens"):
        model.embed([[1], [1] * 14])
    with refused(InputError, "text 0 of 0 tokens"):
        model.embed([[], [1]])
    with refused(ConfigError, "no pooler"):
        model.embed(TEXTS, pooling="pooled")
    with refused(ConfigError, "no such pooling"):
        model.embed(TEXTS, pooling="last")


def test_no_texts_make_no_vectors():
    model = Bert(BertConfig(vocab_size=VOCABULARY, context_length=CONTEXT, dim=DIM, layers=1, heads=3)).eval()
    assert model.embed([]).shape == (0, DIM)


def test_a_probe_learns_from_embeddings_and_frozen_parts_stay_frozen():
    model = Bert(BertConfig(vocab_size=31, context_length=16, dim=8, layers=2, heads=2))
    model.blocks[0].eval()
    with torch.no_grad():
        vectors = model.embed([[1, 2, 3], [4, 5]])
    assert model.training
    assert not model.blocks[0].training
    probe = torch.nn.Linear(8, 2)
    probe(vectors).sum().backward()
    assert probe.weight.grad is not None
