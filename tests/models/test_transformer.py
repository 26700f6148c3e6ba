"""The Transformer is torch's, number for number, and writes the same with a cache as without."""

from __future__ import annotations

import warnings

import pytest
import torch
from agreement import assert_agree, assert_gradients_agree, gradients, refused, shaken
from torch import nn
from torch.nn.functional import conv1d, relu

from regard.errors import CheckpointError, ConfigError, InputError
from regard.models import Transformer, TransformerConfig
from regard.patterns import Padding

VOCABULARY, DIM = 17, 12
SOURCE_LENGTHS, TARGET_LENGTHS = [7, 3, 1], [2, 5, 4]
SIZES = {"vocab_size": VOCABULARY, "dim": DIM, "layers": 2, "heads": 3, "hidden_dim": 19}


def torchs(dtype: torch.dtype = torch.float64, **changes) -> nn.Transformer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that norms before, or odd heads, are not on torch's fast path
        sizes = {"d_model": DIM, "nhead": 3, "num_encoder_layers": 2, "num_decoder_layers": 2, "dim_feedforward": 19}
        module = nn.Transformer(**sizes | {"dropout": 0.0, "batch_first": True} | changes)
    return shaken(module, dtype).train()


def embedding(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return (torch.randn(VOCABULARY, DIM, generator=generator, dtype=torch.float64) / DIM**0.5).to(dtype)


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return tuple(torch.randint(0, VOCABULARY, (3, count), generator=generator) for count in (7, 5))


def placed(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Embeddings and positions as the paper has them, number by number."""
    places = torch.empty(tokens.shape[1], DIM, dtype=torch.float64)
    for place in range(tokens.shape[1]):
        for pair in range(DIM // 2):
            angle = torch.tensor(place / 10000 ** (2 * pair / DIM), dtype=torch.float64)
            places[place, 2 * pair], places[place, 2 * pair + 1] = angle.sin(), angle.cos()
    return table[tokens] * DIM**0.5 + places.to(table.dtype)


def logits_of_torchs(module: nn.Transformer, table: torch.Tensor) -> torch.Tensor:
    source, target = texts()
    hidden = torch.arange(7) >= torch.tensor(SOURCE_LENGTHS)[:, None]
    made = module(
        placed(source, table),
        placed(target, table),
        tgt_mask=torch.ones(5, 5).triu(1).bool(),
        src_key_padding_mask=hidden,
        tgt_key_padding_mask=torch.arange(5) >= torch.tensor(TARGET_LENGTHS)[:, None],
        memory_key_padding_mask=hidden,
    )
    return made @ table.T


def small(**changes) -> Transformer:
    return shaken(Transformer(TransformerConfig(**SIZES | changes)))


# torch's own


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("changes", [{}, {"norm_first": True}, {"activation": "gelu", "layer_norm_eps": 1e-3}], ids=str)
def test_logits_and_gradients_are_torchs(changes, dtype):
    module, table = torchs(dtype, **changes), embedding(dtype).requires_grad_()
    model = Transformer.from_torch(module, table)
    mine = model(*texts(), source_lengths=SOURCE_LENGTHS, target_lengths=TARGET_LENGTHS)
    theirs = logits_of_torchs(module, table)
    real = torch.arange(5) < torch.tensor(TARGET_LENGTHS)[:, None]
    assert_agree(mine[real], theirs[real])
    weight = torch.arange(1, real.sum() * VOCABULARY + 1).view(-1, VOCABULARY).cos().to(dtype)
    (mine[real] * weight).sum().backward()
    (theirs[real] * weight).sum().backward()
    found = gradients(module) | {"embedding.weight": table.grad}
    assert_gradients_agree(model, Transformer.converters["torch"].read_state(found, model.config))


def test_one_token_translates_to_one_token():
    module, table = torchs(), embedding()
    model = Transformer.from_torch(module, table).eval()
    source, target = torch.tensor([[5]]), torch.tensor([[3]])
    with torch.no_grad():
        expected = module(placed(source, table), placed(target, table)) @ table.T
        assert_agree(model(source, target), expected)


def test_separate_embeddings_are_read(tmp_path):
    module, table = torchs(), embedding()
    model = Transformer.from_torch(module, table, table.flip(0), table.flip(1)).eval()
    assert not model.config.shared
    source, target = texts()
    mask = torch.ones(5, 5).triu(1).bool()
    with torch.no_grad():
        made = module(placed(source, table), placed(target, table.flip(0)), tgt_mask=mask)
        assert_agree(model(source, target), made @ table.flip(1).T)
    model.save_pretrained(tmp_path)
    again = Transformer.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("norm_first", [False, True])
def test_to_torch_and_back_changes_no_bit_and_no_name(norm_first, tmp_path):
    module = torchs(norm_first=norm_first)
    model = Transformer.from_torch(module, embedding(), start=3)
    config, state = model.to_checkpoint("torch")
    assert torch.equal(state.pop("embedding.weight"), embedding())
    assert set(state) == set(module.state_dict())
    assert all(torch.equal(state[name], tensor) for name, tensor in module.state_dict().items())
    torchs(norm_first=config["norm_first"]).load_state_dict(state)
    for layout in ("torch", "regard"):
        model.save_pretrained(tmp_path / layout, layout=layout)
        again = Transformer.from_pretrained(tmp_path / layout)
        assert again.config.to_dict() == model.config.to_dict()
        assert again.config.start == 3
        assert again.output.weight is again.embedding.weight
        assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_a_module_that_is_not_ours_is_refused_in_four_parts():
    with refused(ConfigError, "num_decoder_layers"):
        Transformer.from_torch(torchs(num_decoder_layers=1), embedding())
    with refused(ConfigError, "bias"):
        Transformer.from_torch(torchs(bias=False), embedding())
    with refused(CheckpointError, "activation"):
        Transformer.from_torch(torchs(activation=torch.tanh), embedding())
    with refused(CheckpointError, "output.weight"):
        Transformer.from_torch(torchs(), embedding(), embedding())
    with refused(CheckpointError, "final_norm=False"):
        small().to_checkpoint("torch")


# What the paper says


def test_the_feed_forward_part_is_two_convolutions_of_width_one():
    part = small().encoder[0].feed_forward
    x = torch.randn(2, 7, DIM, dtype=torch.float64)
    with torch.no_grad():
        inner = relu(conv1d(x.mT, part.inner.weight[..., None], part.inner.bias))
        expected = conv1d(inner, part.outer.weight[..., None], part.outer.bias).mT
        assert_agree(part(x), expected, 1e-13)


def test_norms_leave_every_token_with_mean_zero_and_variance_one():
    model = Transformer(TransformerConfig(**SIZES)).double().eval()  # its norms have not learned anything yet
    with torch.no_grad():
        made = model.encode(texts()[0])
    assert float(made.mean(-1).abs().max()) < 1e-12
    assert float((made.var(-1, unbiased=False) - 1).abs().max()) < 1e-4


def test_a_later_token_changes_no_earlier_logits():
    model, (source, target) = small(), texts()
    other = target.clone()
    other[:, 3] = (other[:, 3] + 1) % VOCABULARY
    with torch.no_grad():
        first, second = model(source, target), model(source, other)
    assert torch.equal(first[:, :3], second[:, :3])
    assert not torch.equal(first[:, 3:], second[:, 3:])


def test_padding_never_affects_the_output():
    model, (source, target) = small(), texts()
    hidden = torch.arange(7) >= torch.tensor(SOURCE_LENGTHS)[:, None]
    with torch.no_grad():
        first = model(source, target, source_lengths=SOURCE_LENGTHS)
        other = torch.where(hidden, (source + 1) % VOCABULARY, source)
        assert torch.equal(model(other, target, source_lengths=SOURCE_LENGTHS), first)
        for row, length in enumerate(SOURCE_LENGTHS):
            alone = model(source[row : row + 1, :length], target[row : row + 1])
            assert_agree(first[row : row + 1], alone, 1e-12)


# Writing


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("changes", [{}, {"order": "pre"}, {"position": "learned", "context_length": 9}], ids=str)
@pytest.mark.parametrize("chunks", [(1, 1, 1, 1, 1), (2, 3), (5,)], ids=str)
def test_decoding_with_a_cache_equals_decoding_the_whole_sequence(changes, chunks, dtype, bound):
    model = small(**changes).to(dtype)
    source, target = texts()
    hidden = Padding(SOURCE_LENGTHS)
    with torch.no_grad():
        context = model.encode(source, pattern=hidden)
        whole = model.decode(target, context, encoder_pattern=hidden)
        cache, parts = model.new_cache(5), []
        for chunk in target.split(chunks, dim=1):
            given = context if not parts else None
            parts.append(model.decode(chunk, given, encoder_pattern=hidden, cache=cache))
    assert_agree(torch.cat(parts, 1), whole, bound)


SOURCES = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]


def written_from_scratch(model: Transformer, source: list[int], max_new_tokens: int) -> list[int]:
    """The best token each time, with everything computed anew."""
    target = [model.config.start]
    for _ in range(max_new_tokens):
        with torch.no_grad():
            target.append(int(model(torch.tensor([source]), torch.tensor([target]))[0, -1].argmax()))
    return target[1:]


@pytest.mark.parametrize(
    "changes", [{"shared": False}, {"order": "pre", "start": 5}, {"position": "learned", "context_length": 11}], ids=str
)
def test_translations_of_unequal_sources_are_those_of_each_alone(changes):
    model = small(**changes)
    found = model.generate(SOURCES, max_new_tokens=6)
    assert found.tokens == [written_from_scratch(model, source, 6) for source in SOURCES]
    assert found.sequences == found.tokens
    assert len({tuple(text) for text in found.tokens}) > 1


def test_beams_of_unequal_sources_are_those_of_each_alone():
    model = small()
    together = model.generate(SOURCES, max_new_tokens=6, num_beams=3, stop_tokens=4)
    for source, tokens, score in zip(SOURCES, together.tokens, together.scores, strict=True):
        alone = model.generate([source], max_new_tokens=6, num_beams=3, stop_tokens=4)
        assert alone.tokens == [tokens]
        assert abs(alone.scores[0] - score) < 1e-11
        greedy = model.generate([source], max_new_tokens=6, stop_tokens=4)
        assert score >= greedy.scores[0] - 1e-11 or len(tokens) != len(greedy.tokens[0])


def test_as_many_beams_as_texts_find_the_best_of_all():
    model = small(vocab_size=5)
    found = model.generate([[3, 1]], max_new_tokens=2, num_beams=25, length_penalty=0.0)
    with torch.no_grad():
        first = model(torch.tensor([[3, 1]]), torch.tensor([[0]]))[0, -1].log_softmax(-1)
        scores = torch.stack(
            [
                first[token] + model(torch.tensor([[3, 1]]), torch.tensor([[0, token]]))[0, -1].log_softmax(-1)
                for token in range(5)
            ]
        )
    best = int(scores.argmax())
    assert found.tokens == [[best // 5, best % 5]]
    assert abs(found.scores[0] - float(scores.max())) < 1e-12


# Bad input


def test_input_that_cannot_be_is_refused_in_four_parts():
    model = small(context_length=6)
    source, target = texts()
    with refused(InputError, "longer than the context"):
        model(source, target)
    with refused(InputError, "Token 17"):
        model(torch.tensor([[17]]), target[:1])
    with refused(InputError, "Token -1"):
        model(source[:1, :3], torch.tensor([[0, -1]]))
    with refused(InputError, "outgrow the context"):
        model.generate([[1, 2]], max_new_tokens=7)
    with refused(ConfigError, "has no field 'bias'"):
        TransformerConfig.from_dict({"bias": True})
    with refused(ConfigError, "context_length="):
        TransformerConfig(position="learned")
    with refused(ConfigError, '"pre" or "post"'):
        TransformerConfig(order="middle")
    with refused(ConfigError, "start token"):
        TransformerConfig(vocab_size=5, start=5)


@pytest.mark.parametrize("position", ["sinusoidal", "learned"])
def test_rows_of_unequal_length_go_on_from_their_own_positions(position):
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=11, dim=12, layers=2, heads=3, hidden_dim=20, position=position, context_length=16
    )
    model = Transformer(config).double().eval().requires_grad_(False)
    source, target = torch.randint(0, 11, (2, 5)), torch.randint(0, 11, (2, 5))
    following = torch.randint(0, 11, (2, 1))
    context, cache = model.encode(source), model.new_cache()
    model.decode(target, context, cache=cache)
    cache.crop([3, 5])
    stepped = model.decode(following, None, cache=cache)
    for row, length in enumerate((3, 5)):
        alone = torch.cat((target[row : row + 1, :length], following[row : row + 1]), 1)
        expected = model.decode(alone, context[row : row + 1])[:, -1]
        assert float((stepped[row] - expected).abs().max()) < 1e-12
