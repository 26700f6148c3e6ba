"""`attention_mask` as Hugging Face gives it: their outputs with padding on either side, and `lengths` bit for bit."""

from __future__ import annotations

import pytest
import torch
from agreement import assert_agree, gradients, refused, shaken
from twins import transformers

from regard.attention import Attention
from regard.errors import InputError
from regard.models import GPT, Bert, BertConfig, GPTConfig, Transformer, TransformerConfig
from regard.models.generation import beam_search, stream
from regard.models.padding import find_padding
from regard.patterns import First, Mask, Padding, Window

VOCABULARY, COUNT = 31, 7
LENGTHS = [7, 4, 1]
SIDES = ["left", "right"]
NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def tokens(rows: int = 3, count: int = COUNT, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(seed))


def mask(side: str, lengths=LENGTHS, count: int = COUNT) -> torch.Tensor:
    place, real = torch.arange(count), torch.tensor(lengths)[:, None]
    return (place < real if side == "right" else place >= count - real).long()


def moved_right(x: torch.Tensor, lengths=LENGTHS) -> torch.Tensor:
    """Rows that are padded on the left, padded on the right instead."""
    return torch.stack([row.roll(-(len(row) - length), 0) for row, length in zip(x, lengths, strict=True)])


def small_gpt(dtype=torch.float64, **changes) -> GPT:
    sizes = {"vocab_size": VOCABULARY, "context_length": 23, "dim": 12, "layers": 2, "heads": 3, "hidden_dim": 19}
    return shaken(GPT(GPTConfig(**sizes | changes)), dtype)


def small_bert(**changes) -> Bert:
    sizes = {"vocab_size": VOCABULARY, "context_length": 13, "dim": 12, "layers": 2, "heads": 3, "dropout": 0.0}
    return shaken(Bert(BertConfig(**sizes | changes)), torch.float64)


def small_transformer(**changes) -> Transformer:
    sizes = {"vocab_size": VOCABULARY, "dim": 12, "layers": 2, "heads": 3, "hidden_dim": 19, "dropout": 0.0}
    return shaken(Transformer(TransformerConfig(**sizes | changes)), torch.float64)


def hugging_gpt2():
    sizes = {"vocab_size": VOCABULARY, "n_positions": 23, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_inner": 19}
    return shaken(transformers().GPT2LMHeadModel(transformers().GPT2Config(**sizes | NO_ENDS)), torch.float64)


def weigh(output: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """A loss that reads every real position with a weight of its own."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return (output * weights * real[..., None]).sum()


# Twins


@pytest.mark.parametrize("side", SIDES)
def test_a_gpt_with_padding_is_hugging_faces(side):
    twin = hugging_gpt2()
    model = GPT.from_checkpoint(twin.config.to_dict(), twin.state_dict())
    given, real = tokens(), mask(side)
    positions = (real.cumsum(1) - 1).clamp(min=0)  # as their `generate` counts them
    theirs = twin(given, attention_mask=real, position_ids=positions).logits
    mine = model(given, attention_mask=real)
    assert_agree(mine[real.bool()], theirs[real.bool()])
    weigh(theirs, real).backward()
    weigh(mine, real).backward()
    assert_agree(model.embedding.weight.grad, twin.transformer.wte.weight.grad)
    assert_agree(model.blocks[0].attention.output.weight.grad, twin.transformer.h[0].attn.c_proj.weight.grad.T)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", ["BertModel", "RobertaModel", "DistilBertModel"])
def test_a_bert_with_padding_is_hugging_faces(kind, side):
    library = transformers()
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 17}
    if kind == "DistilBertModel":
        sizes |= {"dim": 12, "hidden_dim": 19, "n_layers": 2, "n_heads": 3}
    else:
        sizes |= {"hidden_size": 12, "intermediate_size": 19, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = getattr(library, kind.replace("Model", "Config"))(**sizes, attn_implementation="eager")
    twin = shaken(getattr(library, kind)(config), torch.float64)
    model = Bert.from_checkpoint(twin.config.to_dict(), twin.state_dict())
    given, real = tokens(), mask(side)
    if kind == "RobertaModel":
        given = given.clamp(min=2).where(real.bool(), 1)  # its positions count the tokens that are not padding
    theirs = twin(given, attention_mask=real).last_hidden_state
    assert_agree(model(given, attention_mask=real).hidden[real.bool()], theirs[real.bool()])


def test_generating_from_padded_prompts_is_hugging_faces():
    twin = hugging_gpt2()
    model = GPT.from_checkpoint(twin.config.to_dict(), twin.state_dict())
    given, real = tokens(), mask("left")
    theirs = twin.generate(given, attention_mask=real, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert model.generate(given, attention_mask=real, max_new_tokens=6).tokens == theirs[:, COUNT:].tolist()
    beams = {"num_beams": 3, "early_stopping": "never", "length_penalty": 0.0}
    theirs = twin.generate(given, attention_mask=real, max_new_tokens=6, do_sample=False, pad_token_id=0, **beams)
    mine = model.generate(given, attention_mask=real, max_new_tokens=6, num_beams=3, length_penalty=0.0)
    assert mine.tokens == theirs[:, COUNT:].tolist()


# Lengths, bit for bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("position", ["learned", "rotary", "sinusoidal", "alibi", "none"])
def test_a_left_mask_of_a_gpt_is_its_lengths(position, dtype):
    model = small_gpt(dtype, position=position)
    given, real = tokens(), mask("left")
    for kind in (real, real.bool(), real.to(dtype)):
        assert torch.equal(model(given, attention_mask=kind), model(given, lengths=LENGTHS))
    found = {}
    for name, padding in {"mask": {"attention_mask": real}, "lengths": {"lengths": LENGTHS}}.items():
        model.zero_grad()
        model(given, **padding).square().sum().backward()
        found[name] = {key: gradient.clone() for key, gradient in gradients(model).items()}
    assert all(torch.equal(gradient, found["lengths"][key]) for key, gradient in found["mask"].items())


def test_a_right_mask_of_a_bert_is_its_lengths():
    model, given, real = small_bert(), tokens(), mask("right")
    assert torch.equal(model(given, attention_mask=real).hidden, model(given, lengths=LENGTHS).hidden)
    near = Window(2, 2)
    both = model(given, attention_mask=real, pattern=near).hidden
    assert torch.equal(both, model(given, lengths=LENGTHS, pattern=near).hidden)


def test_right_masks_of_a_transformer_are_its_lengths():
    model, source, target = small_transformer(), tokens(), tokens(count=5, seed=4)
    lengths = [2, 5, 4]
    masks = {"attention_mask": mask("right"), "decoder_attention_mask": mask("right", lengths, 5)}
    expected = model(source, target, source_lengths=LENGTHS, target_lengths=lengths)
    assert torch.equal(model(source, target, **masks), expected)


def test_a_mask_of_ones_is_no_mask():
    ones, given = torch.ones(3, COUNT).long(), tokens()
    gpt, bert, transformer = small_gpt(), small_bert(), small_transformer()
    assert torch.equal(gpt(given, attention_mask=ones), gpt(given))
    assert_agree(gpt(given, attention_mask=ones), gpt(given, lengths=[COUNT] * 3))
    assert torch.equal(bert(given, attention_mask=ones).hidden, bert(given).hidden)
    assert torch.equal(transformer(given, given, attention_mask=ones), transformer(given, given))


# Sides


def test_a_gpt_gives_the_same_logits_with_padding_on_either_side():
    model, given = small_gpt(), tokens()
    left, right = mask("left").bool(), mask("right").bool()
    expected = model(given, attention_mask=left)
    found = model(moved_right(given), attention_mask=right)
    assert_agree(found[right], moved_right(expected)[right])


@pytest.mark.parametrize("attention", [None, Attention(pattern=Window(2, 2) | First(1))], ids=["all", "absolute"])
def test_a_transformer_gives_the_same_logits_with_padding_on_either_side(attention):
    model = small_transformer(encoder_attention=attention)
    source, target, lengths = tokens(), tokens(count=5, seed=4), [2, 5, 4]
    real = mask("left", lengths, 5).bool()
    expected = model(moved_right(source), moved_right(target, lengths), source_lengths=LENGTHS, target_lengths=lengths)
    found = model(source, target, attention_mask=mask("left"), decoder_attention_mask=real)
    ends = mask("right", lengths, 5).bool()
    assert_agree(moved_right(found, lengths)[ends], expected[ends])


# Caches and generation


def test_the_mask_of_a_cached_gpt_grows_with_its_tokens():
    model, given = small_gpt().requires_grad_(False), tokens()
    real, later = mask("left"), tokens(3, 3, seed=8)
    masked, plain = model.new_cache(), model.new_cache()
    assert torch.equal(model(given, cache=masked, attention_mask=real), model(given, cache=plain, lengths=LENGTHS))
    for step in range(3):
        real = torch.cat((real, torch.ones(3, 1).long()), 1)
        token = later[:, step : step + 1]
        given_mask = real if step < 2 else torch.ones(3, 1).long()  # of all tokens, or of the new ones alone
        assert torch.equal(model(token, cache=masked, attention_mask=given_mask), model(token, cache=plain))
    with refused(InputError):
        model(later[:, :1], cache=masked, attention_mask=torch.ones(3, 11).long())
    with refused(InputError):
        model(later[:, :1], cache=masked, attention_mask=torch.zeros(3, 1).long())


@pytest.mark.parametrize("side", SIDES)
def test_generating_from_padded_prompts_is_generating_from_their_tokens(side):
    given, real = tokens(), mask(side)
    lists = [row[keep].tolist() for row, keep in zip(given, real.bool(), strict=True)]
    for model in (small_gpt(), small_transformer()):
        for options in ({}, {"num_beams": 3}, {"temperature": 0.9, "seed": 3}):
            expected = model.generate(lists, max_new_tokens=5, **options)
            assert model.generate(given, attention_mask=real, max_new_tokens=5, **options) == expected
        assert list(stream(model, given, max_new_tokens=4, attention_mask=real)) == list(
            stream(model, lists, max_new_tokens=4)
        )
        expected = beam_search(model, lists, max_new_tokens=4)
        assert beam_search(model, given, max_new_tokens=4, attention_mask=real) == expected


# Refusals


HOLE = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 0, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0]])
MIXED = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1]])
WRONG = {
    "a hole": HOLE,
    "zeros at both ends": HOLE.roll(1, 1),
    "rows padded on different sides": MIXED,
    "another length": mask("right", count=8),
    "another number of rows": mask("right")[:2],
    "four axes": mask("right")[:, None, None],
    "an additive mask": (1.0 - mask("right").float()) * -1e9,
    "other numbers": 2 * mask("right"),
    "a list": mask("right").tolist(),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_padding_is_refused_in_four_parts(name):
    given = tokens()
    gpt, bert, transformer = small_gpt(), small_bert(), small_transformer()
    with refused(InputError):
        gpt(given, attention_mask=WRONG[name])
    with refused(InputError):
        bert(given, attention_mask=WRONG[name])
    with refused(InputError):
        transformer(given, given, attention_mask=WRONG[name])
    with refused(InputError, "decoder_attention_mask"):
        transformer(given, given, decoder_attention_mask=WRONG[name])
    with refused(InputError):
        gpt.generate(given, attention_mask=WRONG[name], max_new_tokens=2)


def test_a_hole_can_be_given_as_a_pattern():
    model, given = small_bert(), tokens()
    pattern = Mask(HOLE.bool()[:, None, None, :].expand(-1, 1, COUNT, -1))
    found = model(given, pattern=pattern).hidden
    changed = given.clone()
    changed[1, 1] = (changed[1, 1] + 1) % VOCABULARY  # hidden, so that it changes no other token
    assert torch.equal(model(changed, pattern=pattern).hidden[1, [0, 2]], found[1, [0, 2]])


def test_arguments_that_do_not_go_together_are_refused():
    model, given = small_gpt().requires_grad_(False), tokens()
    with refused(InputError):
        model(given, attention_mask=mask("left"), lengths=LENGTHS)
    with refused(InputError):
        model(given, attention_mask=mask("right"), cache=model.new_cache())
    with refused(InputError):
        model(given, attention_mask=mask("right"), last_only=True)
    with refused(InputError):
        model.generate([[1, 2], [3]], attention_mask=mask("right"), max_new_tokens=2)
    empty = mask("left", [7, 4, 0])
    with refused(InputError):
        model.generate(given, attention_mask=empty, max_new_tokens=2)


def test_the_side_is_read_off_the_mask():
    given = tokens()
    assert find_padding(given, None, mask("left"), side="right") == Padding(LENGTHS, side="left")
    assert find_padding(given, None, mask("right"), side="left") == Padding(LENGTHS)
    assert find_padding(given, LENGTHS, None, side="left") == Padding(LENGTHS, side="left")
    assert find_padding(given, None, torch.ones(3, COUNT), side="left") is None
