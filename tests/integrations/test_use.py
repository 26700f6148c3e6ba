"""`regard.use`, `regard.restore` and `regard.sdpa` in models of torch, timm, x-transformers and Hugging Face."""

from __future__ import annotations

import copy
import pickle
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

import regard
from regard import Causal, First, Neighborhood, Window
from regard.errors import InputError, PatternError

SDPA = F.scaled_dot_product_attention


def make_encoder(**options) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 2, 20, dropout=0.0, batch_first=True, dtype=torch.float64)
    return nn.TransformerEncoder(layer, 2, **options).eval()


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("grad", [False, True])
def test_a_pattern_in_torchs_encoder_is_its_mask(grad):
    encoder, x = make_encoder(), draw(2, 11, 12)
    padding = torch.zeros(2, 11, dtype=torch.bool)
    padding[1, 9:] = True
    with torch.set_grad_enabled(grad):
        hidden = ~Window(3, 2).matrix(11)
        expected = encoder.layers[1](encoder.layers[0](x, hidden, padding), hidden, padding)
        before = encoder(x)
        with regard.use(encoder, pattern=Window(3, 2)) as changed:
            actual = changed(x, src_key_padding_mask=padding)
        assert torch.equal(encoder(x), before)
    torch.testing.assert_close(actual[~padding], expected[~padding], rtol=0, atol=1e-12)
    assert not any("regard" in name for module in encoder.modules() for name in module.__dict__)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"mask": bool}, {"mask": float}])
@pytest.mark.parametrize("keys", [5, 7])
def test_sdpa_gives_what_torch_gives_forward_and_backward(options, keys):
    options = dict(options)
    shape = (2, 4, 5, keys)
    if (kind := options.pop("mask", None)) is not None:
        visible = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.7
        visible[..., 0] = True
        options["attn_mask"] = visible if kind is bool else draw(*shape)
    inputs = [draw(2, 4, 5, 3), draw(2, 4, keys, 3) + 1, draw(2, 4, keys, 3) - 1]
    results = []
    for mode in (None, regard.sdpa()):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        if mode is None:
            output = SDPA(*leaves, **options)
        else:
            with mode:
                output = F.scaled_dot_product_attention(*leaves, **options)
            assert mode.calls == 1
        output.square().sum().backward()
        results.append([output, *(leaf.grad for leaf in leaves)])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_sdpa_shares_key_heads_and_drops_weights():
    query, key = draw(1, 4, 5, 3), draw(1, 2, 5, 3)
    expected = SDPA(query, key, key, enable_gqa=True)
    with regard.sdpa():
        torch.testing.assert_close(F.scaled_dot_product_attention(query, key, key, enable_gqa=True), expected)
        assert not torch.allclose(
            F.scaled_dot_product_attention(query, key, key, dropout_p=0.5, enable_gqa=True), expected
        )
    assert torch.equal(SDPA(query, key, key, enable_gqa=True), expected)


def test_neighbourhoods_in_a_vision_transformer():
    timm = pytest.importorskip("timm", reason="the twins are not installed")
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=(48, 64), depth=2, embed_dim=24, num_heads=3)
    model, images = model.double().eval(), draw(2, 3, 48, 64)
    pattern = Neighborhood((3, 4), 1, start=1) | First(1)

    def attend_dense(query, key, value, attn_mask=None, **_):
        return SDPA(query, key, value, attn_mask=pattern.matrix(13))

    before = model(images)
    with mock.patch.object(F, "scaled_dot_product_attention", attend_dense):
        expected = model(images)
    with regard.use(model, pattern=pattern):
        actual = model(images)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    assert torch.equal(model(images), before)


def test_windows_of_swin_and_davit_are_layers_too():
    timm = pytest.importorskip("timm", reason="the twins are not installed")
    for name, count in (("swin_tiny_patch4_window7_224", 12), ("davit_tiny", 6)):
        with torch.device("meta"):
            model = timm.create_model(name)
        assert len(regard.use(model, scale=0.5).layers) == count
        regard.restore(model)


def test_a_window_in_a_decoder_of_x_transformers():
    library = pytest.importorskip("x_transformers", reason="the twins are not installed")
    torch.manual_seed(0)
    layers = library.Decoder(dim=16, depth=1, heads=2, attn_flash=True)
    model = library.TransformerWrapper(num_tokens=20, max_seq_len=16, attn_layers=layers).eval()
    ids = torch.randint(0, 20, (1, 12))
    with regard.use(model, pattern=Window(3, 0)):
        whole, cut = model(ids), model(torch.cat([ids[:, :1] * 0, ids[:, 1:]], 1))
    torch.testing.assert_close(cut[:, 4:], whole[:, 4:])
    assert not torch.allclose(cut[:, :4], whole[:, :4])


def test_a_window_in_a_llama_is_a_mistral():
    pytest.importorskip("transformers", reason="the twins are not installed")
    from regard.adapters.huggingface_tiny import quiet, tiny

    llama, mistral = (tiny(f"{name}ForCausalLM", attention="sdpa").double() for name in ("Llama", "Mistral"))
    mistral.load_state_dict(llama.state_dict())
    ids, mask = torch.randint(3, 80, (2, 13)), torch.ones(2, 13, dtype=torch.long)
    mask[1, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 7, "do_sample": False}
    with quiet(), torch.no_grad(), regard.use(llama, pattern=Window(4, 0)):
        difference = (llama(ids, attention_mask=mask)[0] - mistral(ids, attention_mask=mask)[0])[mask.bool()]
        assert float(difference.abs().max()) < 1e-12
        assert torch.equal(llama.generate(ids, **options), mistral.generate(ids, **options))
        with regard.use(llama, pattern=Window(4, 0) | First(2)), pytest.raises(PatternError, match="padding"):
            llama(ids, attention_mask=mask)
    assert llama.config._attn_implementation == "sdpa"


def test_layers_are_chosen_by_number_name_and_function():
    encoder = make_encoder()
    for layers in (1, -1, [1], "layers.1.*", lambda name, module: "1" in name):
        with regard.use(encoder, pattern=Causal(), layers=layers):
            assert [("_regard_override" in layer.self_attn.__dict__) for layer in encoder.layers] == [False, True]
    with pytest.raises(InputError, match="no such attention layer"):
        regard.use(encoder, pattern=Causal(), layers=5)
    with pytest.raises(InputError, match="Nothing was asked for"):
        regard.use(encoder)


@pytest.mark.parametrize("first", ["inner", "outer"])
def test_nested_uses_are_undone_one_by_one_in_any_order(first):
    encoder, x = make_encoder(), draw(2, 11, 12)
    plain = encoder(x)
    outer = regard.use(encoder, pattern=Window(3, 2))
    seen = encoder(x)
    inner = regard.use(encoder, pattern=Causal(), layers=1)
    assert not torch.allclose(encoder(x), seen)
    if first == "inner":
        inner.__exit__()
        assert torch.equal(encoder(x), seen)
        outer.__exit__()
    else:
        outer.__exit__()
        with regard.use(make_encoder(), pattern=Causal(), layers=1) as other:
            assert torch.equal(encoder(x), other(x))
        inner.__exit__()
    assert torch.equal(encoder(x), plain)
    assert not any("regard" in name for module in encoder.modules() for name in module.__dict__)


def test_an_error_inside_undoes_the_change():
    encoder, x = make_encoder(), draw(2, 11, 12)
    plain = encoder(x)
    with pytest.raises(KeyError), regard.use(encoder, pattern=Causal()):
        raise KeyError
    assert torch.equal(encoder(x), plain)


def test_copies_of_a_changed_model_are_changed_and_stand_alone():
    encoder, x = make_encoder(), draw(2, 11, 12)
    plain, names = encoder(x), set(encoder.state_dict())
    with regard.use(encoder, pattern=Window(3, 2), bias=draw(2, 11, 11)):
        changed = encoder(x)
        copies = [copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder))]
        assert set(encoder.state_dict()) == names
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.zero_()
    for twin in copies:
        assert torch.equal(twin(x), changed)
        regard.restore(twin)
        assert torch.equal(twin(x), plain)


def test_a_forward_that_someone_patched_is_called_and_comes_back():
    timm = pytest.importorskip("timm", reason="the twins are not installed")
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, embed_dim=24, num_heads=3).eval()
    layer, calls = model.blocks[0].attn, []
    forward = layer.forward

    def patched(*args, **kwargs):
        calls.append(1)
        return forward(*args, **kwargs)

    layer.forward = patched
    with regard.use(model, scale=0.5):
        model(torch.randn(1, 3, 64, 64))
    assert calls == [1]
    assert layer.forward is patched


@pytest.mark.parametrize("batch", [(), (2,)])
def test_multi_head_attention_returns_the_weights_of_the_change(batch):
    layer = nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64).eval()
    x, hidden = draw(*batch, 7, 12), ~Window(2, 1).matrix(7)
    for average in (True, False):
        expected = layer(x, x, x, attn_mask=hidden, average_attn_weights=average)
        with regard.use(layer, pattern=Window(2, 1)):
            actual = layer(x, x, x, average_attn_weights=average)
        for left, right in zip(actual, expected, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_what_is_shown_is_the_change():
    from regard.visualize.attention_map import attention_maps

    pattern = Window(2, 1)
    encoder, x = make_encoder(), draw(1, 7, 12)
    with regard.use(encoder, pattern=pattern):
        for found in attention_maps(encoder, x):
            assert not found.rows(range(7))[:, ~pattern.matrix(7)].any()
    timm = pytest.importorskip("timm", reason="the twins are not installed")
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, embed_dim=24, num_heads=3).eval()
    with regard.use(model, pattern=pattern):
        (found,) = attention_maps(model, torch.randn(1, 3, 64, 64))
    weight = found.rows([5, 2])
    assert not weight[:, ~pattern.matrix(17)[[5, 2]]].any()
    torch.testing.assert_close(weight.sum(-1), torch.ones(3, 2))


def test_a_llama_shows_its_window():
    pytest.importorskip("transformers", reason="the twins are not installed")
    from regard.adapters.huggingface_tiny import tiny
    from regard.visualize.attention_map import attention_maps

    model = tiny("LlamaForCausalLM", attention="sdpa")
    with regard.use(model, pattern=Window(2, 0)):
        found = attention_maps(model, torch.randint(3, 80, (1, 9)))
    assert len(found) == 2
    for attention in found:
        assert not attention.rows(range(9))[:, ~Window(2, 0).matrix(9)].any()


def test_another_implementation_inside_is_refused():
    pytest.importorskip("transformers", reason="the twins are not installed")
    from regard.adapters.huggingface_tiny import tiny

    model = tiny("LlamaForCausalLM", attention="eager")
    with regard.use(model, pattern=Window(2, 0)):
        model.set_attn_implementation("sdpa")
        with pytest.raises(InputError, match="LlamaAttention"):
            model(torch.randint(3, 80, (1, 9)))
    assert model.config._attn_implementation == "eager"


def test_wrong_arguments_are_explained():
    encoder = make_encoder()
    wrong = {"pattern": torch.ones(3, 3), "bias": "alibi", "scale": "big"}
    for name, value in wrong.items():
        with pytest.raises(InputError, match=f"This is no {name}"):
            regard.use(encoder, **{name: value})
    with pytest.raises(InputError, match="str is not a module"):
        regard.use("bert", scale=2.0)  # type: ignore[arg-type]
    for layers in ([1, 99], "nothing*", 3.5, True):
        with pytest.raises(InputError, match="no such attention layer"):
            regard.use(encoder, scale=2.0, layers=layers)
    with pytest.raises(InputError, match="Sequential has no attention layer that can be changed"):
        regard.use(nn.Sequential(nn.Linear(3, 3)), scale=2.0)


def test_a_mask_that_is_no_plain_tensor_is_refused_where_a_pattern_was_asked_for():
    class CausalAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(3, 3)

        def forward(self, x):
            mask = causal_lower_right(4, 4)
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    model = nn.Sequential(CausalAttention())
    with regard.use(model, pattern=Window(1, 0)), pytest.raises(InputError, match="CausalBias"):
        model(torch.randn(1, 2, 4, 3))


def test_a_compiled_model_has_the_pattern():
    timm = pytest.importorskip("timm", reason="the twins are not installed")
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, embed_dim=24, num_heads=3).eval()
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad(), regard.use(model, pattern=Window(2, 1)):
        expected = model(images)
        actual = torch.compile(model, backend="eager")(images)
    torch.testing.assert_close(actual, expected)


def test_the_cost_of_a_changed_model_has_the_pattern():
    encoder = make_encoder().float()
    dense = regard.cost(encoder, tokens=101, batch=1).macs
    with regard.use(encoder, pattern=Window(3, 2)):
        assert int(regard.cost(encoder, tokens=101, batch=1).macs) < int(dense)


def test_a_layer_that_does_not_call_torchs_function_is_named():
    class OwnAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(3, 3)

        def forward(self, x):
            return self.proj(x)

    model = nn.Sequential(OwnAttention())
    with regard.use(model, scale=2.0), pytest.raises(InputError, match="The layer 0 does not call"):
        model(torch.randn(2, 3))
