"""Attention maps equal the weights that the models use, for Regard's and third-party models."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from twins import timm, transformers

from regard import Attention, Causal, Neighborhood, Quadratic, RegardError, Window, show
from regard.convert import conv_to_attention
from regard.errors import InputError
from regard.layers import GridAttention, MultiHeadAttention
from regard.layers.profiles import head_profile
from regard.models import GPT, Bert, BertConfig, GPTConfig, Transformer, TransformerConfig, ViT, ViTConfig
from regard.models.spatial import POSITIONS, SpatialConfig, SpatialTransformer
from regard.visualize import attention_maps
from regard.visualize.attention_map import grid_weights

EXACT = 1e-12
TIGHT = 1e-5  # float32, weights of at most one, sums of a few dozen products


def tokens(count: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(vocab_size, (1, count), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_are_those_of_the_square_and_sum_to_one(dtype):
    layer = MultiHeadAttention(12, 3, attention=Attention(pattern=Causal() & Window(4, 0))).to(dtype)
    x = torch.randn(1, 11, 12, dtype=dtype)
    (attention,) = attention_maps(layer, x)
    rows = attention.rows([10, 3])
    assert rows.shape == (3, 2, 11)
    torch.testing.assert_close(rows, layer.weights(x)[0][:, [10, 3]])
    torch.testing.assert_close(rows.sum(-1), torch.ones(3, 2, dtype=dtype))


def test_attention_maps_of_a_model_explain_its_output():
    """Weights times values, put through the output matrix, is what the attention of the model gave."""
    model = GPT(GPTConfig(vocab_size=23, context_length=19, dim=12, layers=2, heads=3)).double().eval()
    text = tokens(13, 23)
    given = []
    layer = model.blocks[1].attention
    hook = layer.register_forward_hook(lambda module, inputs, output: given.append((inputs[0], output)))
    attention = attention_maps(model, text)[1]
    hook.remove()
    x, output = given[0]
    _, _, value = layer.projections(x)
    mixed = attention.rows(range(13)) @ value[0]
    torch.testing.assert_close(layer.output(mixed.transpose(0, 1).flatten(1)), output[0], rtol=0, atol=EXACT)


@pytest.mark.parametrize("position", POSITIONS)
def test_attention_maps_of_a_spatial_transformer(position):
    config = SpatialConfig(position, image=(5, 7), channels=1, patch=1, dim=4, layers=2, heads=3, hidden_dim=5)
    model = SpatialTransformer(config).double()
    image = torch.randn(1, 1, 5, 7, dtype=torch.float64)
    given = []
    hook = model.blocks[1].attention.register_forward_pre_hook(lambda module, inputs: given.append(inputs[0]))
    attention = attention_maps(model, image)[1]
    hook.remove()
    expected = model.blocks[1].attention.weights(given[0])[0]
    torch.testing.assert_close(attention.rows([0, 34, 17]), expected[:, [0, 34, 17]].detach(), rtol=0, atol=EXACT)


def test_a_head_profile_is_seen_from_every_place_of_the_grid():
    bias = Quadratic(2, grid=(3, 5)).double()
    place = torch.arange(15)
    square = bias.scores(place[:, None], place).softmax(-1)
    for query in (0, 7, 14):
        found = grid_weights(head_profile(bias), divmod(query, 5)).flatten(1)
        torch.testing.assert_close(found, square[:, query].detach(), rtol=0, atol=EXACT)


def test_a_converted_convolution_attends_to_its_taps():
    layer = conv_to_attention(nn.Conv2d(2, 3, 3, padding=1))
    (attention,) = attention_maps(layer, torch.randn(1, 2, 5, 7))
    rows = attention.rows([0, 17])
    assert rows[:, 1].nonzero()[:, 1].tolist() == [9, 10, 11, 16, 17, 18, 23, 24, 25]
    assert float(rows[:, 0].sum()) == 4  # the other five look beyond the corner
    picture = show(layer, torch.rand(2, 5, 7), query=(2, 3))
    assert next(iter(picture.data["layers"].values())).shape == (9, 5, 7)


def test_training_is_interrupted_and_goes_on_as_it_was():
    model = ViT(ViTConfig(image=(4, 6), patch=2, classes=3, dim=8, layers=1, heads=2, dropout=0.9)).train()
    model.norm.eval()
    one, two = (attention_maps(model, torch.ones(1, 3, 4, 6))[0].rows([1]) for _ in range(2))
    assert torch.equal(one, two)
    assert model.training
    assert not model.norm.training
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_memory_grows_with_the_requested_rows_not_with_the_square():
    count = 20_000  # whose square would take 1.6 GB for each head
    layer = MultiHeadAttention(8, 2, attention=Attention(pattern=Window(50, 50)))
    (attention,) = attention_maps(layer, torch.randn(1, count, 8))
    row = attention.rows([12_345])
    assert row.shape == (2, 1, count)
    assert int((row > 0).sum(-1).max()) <= 101


def test_tiles_hold_the_largest_weight_of_their_pairs():
    layer = MultiHeadAttention(8, 2)
    (attention,) = attention_maps(layer, torch.randn(1, 11, 8))
    square = layer.weights(torch.zeros(1, 11, 8)) * 0 + attention.rows(range(11))
    pooled = attention.pooled(4)
    assert pooled.shape == (2, 3, 3)
    for row in range(3):
        for column in range(3):
            tile = square[0, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            assert torch.equal(pooled[:, row, column], tile.amax((1, 2)))


# Others' modules


def test_torchs_attention_is_read_with_its_masks():
    layer = nn.MultiheadAttention(12, 3, batch_first=True).eval()
    x = torch.randn(1, 7, 12)
    mask = torch.ones(7, 7).triu(1).bool()
    hidden = torch.tensor([[False] * 6 + [True]])
    (attention,) = attention_maps(layer, x, x, x, attn_mask=mask, key_padding_mask=hidden)
    expected = layer(x, x, x, attn_mask=mask, key_padding_mask=hidden, average_attn_weights=False)[1][0]
    torch.testing.assert_close(attention.rows([6, 2]), expected[:, [6, 2]], rtol=0, atol=TIGHT)


def test_torchs_encoder_is_seen_layer_by_layer():
    layer = nn.TransformerEncoderLayer(12, 3, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    found = attention_maps(encoder, torch.randn(1, 7, 12))
    assert [attention.name for attention in found] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert show(encoder, torch.randn(1, 7, 12)).data["layers"]["layers.1.self_attn"].shape == (3, 7, 7)


def test_attention_maps_of_timm_equal_those_without_fused_attention():
    model = timm().create_model("vit_tiny_patch16_224", img_size=(32, 48), depth=2, num_classes=3).eval()
    image = torch.randn(1, 3, 32, 48)
    found = attention_maps(model, image)
    kept = []
    model.blocks[1].attn.fused_attn = False
    model.blocks[1].attn.attn_drop.register_forward_hook(lambda module, inputs, output: kept.append(output))
    model(image)
    torch.testing.assert_close(found[1].rows(range(7)), kept[0][0].detach(), rtol=0, atol=TIGHT)
    picture = show(model, image[0], query=(20, 40))
    assert picture.data["token"] == 1 + 1 * 3 + 2
    assert picture.data["layers"]["blocks.0.attn"].shape == (3, 2, 3)


def hugging_face(name: str):
    library = transformers()
    small = dict(hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=16)
    if name == "bert":
        return library.BertModel(library.BertConfig(vocab_size=31, **small))
    if name == "llama":
        small["num_attention_heads"], small["hidden_size"] = 4, 16
        return library.LlamaModel(library.LlamaConfig(vocab_size=31, num_key_value_heads=2, **small))
    if name == "gemma2":
        return library.Gemma2Model(
            library.Gemma2Config(vocab_size=31, num_key_value_heads=1, head_dim=4, sliding_window=4, **small)
        )
    if name == "t5":
        return library.T5EncoderModel(
            library.T5Config(vocab_size=31, d_model=12, d_kv=4, d_ff=16, num_layers=2, num_heads=3)
        )
    return library.GPT2Model(library.GPT2Config(vocab_size=31, n_embd=12, n_layer=2, n_head=3))


@pytest.mark.parametrize("name", ["bert", "llama", "gemma2", "t5", "gpt2"])
def test_attention_maps_of_hugging_face_equal_output_attentions(name):
    model = hugging_face(name).eval()
    text = tokens(9, 31)
    before = model.config._attn_implementation
    found = attention_maps(model, input_ids=text)
    assert model.config._attn_implementation == before
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(input_ids=text, output_attentions=True).attentions
    assert len(found) == len(expected) == 2
    for attention, square in zip(found, expected, strict=True):
        assert attention.name
        torch.testing.assert_close(attention.rows([0, 8, 4]), square[0][:, [0, 8, 4]], rtol=0, atol=TIGHT)


def test_a_model_of_hugging_face_can_be_shown():
    model = hugging_face("bert")
    words = ["[CLS]", "who", "attention_maps", "at", "whom", "?", "[SEP]"]
    picture = show(model, {"input_ids": tokens(7, 31)}, query=4, head=1, layer=[0, 1], words=words)
    assert "token 4 'whom'" in picture.caption
    assert [tuple(rows.shape) for rows in picture.data["layers"].values()] == [(1, 7), (1, 7)]


# Refusals


def test_what_does_not_attend_is_refused():
    with pytest.raises(RegardError, match="No attention layer"):
        attention_maps(nn.Sequential(nn.Linear(3, 3)), torch.randn(1, 5, 3))


def test_a_batch_is_refused():
    model = ViT(ViTConfig(image=(4, 6), patch=2, classes=3, dim=8, layers=1, heads=2))
    with pytest.raises(RegardError, match="at a time"):
        show(model, torch.randn(2, 3, 4, 6))


def test_a_layer_on_a_grid_is_seen_on_its_grid():
    layer = GridAttention(8, 2, attention=Attention(pattern=Neighborhood((3, 5), 1)))
    picture = show(layer, torch.randn(3, 5, 8), query=(1, 2))
    (seen_by,) = picture.data["layers"].values()
    assert (seen_by > 0).sum((1, 2)).tolist() == [9, 9]


def test_attention_maps_of_bert_are_labelled_by_tokens():
    model = Bert(BertConfig(vocab_size=31, context_length=16, dim=12, layers=2, heads=3, hidden_dim=16))
    picture = show(model, tokens(5, 31)[0], words=list("abcde"))
    assert [text.get_text() for text in picture.figure.axes[0].get_yticklabels()] == list("abcde")
    assert [tuple(square.shape) for square in picture.data["layers"].values()] == [(3, 5, 5), (3, 5, 5)]


# Inputs


def test_whatever_show_accepts_attention_maps_accepts():
    sizes = {"vocab_size": 31, "dim": 12, "layers": 2, "heads": 3, "hidden_dim": 7}
    translator = Transformer(TransformerConfig(**sizes)).eval()
    source, target = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[0, 7, 8]])
    by_name = {"source": source, "target": target}
    found = {tuple(look.name for look in attention_maps(translator, by_name))}
    found |= {tuple(look.name for look in attention_maps(translator, source, target))}
    found |= {tuple(look.name for look in attention_maps(translator, **by_name))}
    assert len(found) == 1
    assert list(show(translator, by_name).data["layers"])
    for one, other in zip(attention_maps(translator, by_name), attention_maps(translator, source, target), strict=True):
        assert torch.equal(one.rows([0, 2]), other.rows([0, 2]))
    gpt = GPT(GPTConfig(vocab_size=31, context_length=16, dim=12, layers=2, heads=3))
    for given in ([1, 2, 3], torch.tensor([1, 2, 3]), torch.tensor([[1, 2, 3]]), {"tokens": torch.tensor([[1, 2, 3]])}):
        assert [look.keys for look in attention_maps(gpt, given)] == [3, 3]
        show(gpt, given)
    for given in ("a text", object()):
        for ask in (attention_maps, show):
            with pytest.raises(InputError, match="a tensor, an array or a dict"):
                ask(gpt, given)


def test_a_module_of_tokens_is_read_with_and_without_a_batch_axis():
    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.MultiheadAttention(6, 2, batch_first=True)

        def forward(self, x):
            return self.inner(x, x, x)[0]

    torch.manual_seed(3)
    model, x = Wrapped().eval(), torch.randn(1, 5, 6)
    expected = model.inner(x, x, x, average_attn_weights=False)[1][0]
    for given in (x, x[0]):
        torch.testing.assert_close(attention_maps(model, given)[0].rows(range(5)), expected)
        torch.testing.assert_close(show(model, given).data["layers"]["inner"], expected)
    with pytest.raises(InputError, match="at a time"):
        show(model, x.expand(3, 5, 6))
