"""`regard.widget`: the figure of the lab in a notebook."""

from __future__ import annotations

import base64

import numpy as np
import pytest
import torch

import regard
from regard.errors import InputError
from regard.models import GPT, GPTConfig, ViT, ViTConfig
from regard.visualize import attention_maps

anywidget = pytest.importorskip("anywidget", reason="the extra lab is not installed")


def decode(array):
    kinds = {"uint8": np.uint8, "float32": np.float32}
    found = np.frombuffer(base64.b64decode(array["data"]), kinds[array["dtype"]])
    return torch.from_numpy(found.reshape(array["shape"]).copy())


def make_gpt():
    torch.manual_seed(3)
    return GPT(GPTConfig(vocab_size=13, context_length=32, dim=12, layers=2, heads=3)).eval()


def test_the_widget_holds_the_weights_of_every_head():
    model, tokens = make_gpt(), torch.tensor([[1, 5, 2, 8, 3]])
    shown = regard.widget(model, tokens)
    assert isinstance(shown, anywidget.AnyWidget)
    maps = attention_maps(model, tokens)
    for layer, attention in zip(shown.data["layers"], maps, strict=True):
        weights = decode(layer["weights"]).float() / 255 * decode(layer["largest"])[..., None]
        torch.testing.assert_close(weights, attention.rows(range(5)), atol=1 / 255, rtol=0)
    assert shown.data["queries"] == shown.data["keys"] == ["0", "1", "2", "3", "4"]


def test_a_text_is_read_by_the_given_tokenizer_or_that_beside_the_model(tmp_path):
    from regard.train.data.text.characters import CharacterTokenizer

    model, tokenizer = make_gpt(), CharacterTokenizer.train(["a bad cab, deaf"])
    shown = regard.widget(model, "a bad cab", words=tokenizer)
    assert shown.data["keys"] == ["a", "␣", "b", "a", "d", "␣", "c", "a", "b"]
    model.companions = dict(tokenizer.to_files())
    model.save_pretrained(tmp_path)
    again = regard.widget(GPT.from_pretrained(tmp_path), "a bad cab")
    assert again.data == shown.data


def test_a_text_without_a_tokenizer_is_refused():
    with pytest.raises(InputError, match="needs a tokenizer"):
        regard.widget(make_gpt(), "a text")


def test_an_image_is_shown_with_its_grid():
    model = ViT(ViTConfig(image=(12, 20), channels=1, patch=4, classes=5, dim=12, layers=2, heads=3, hidden_dim=17))
    shown = regard.widget(model.eval(), torch.rand(1, 12, 20))
    assert shown.data["grid"] == [3, 5]
    assert shown.data["start"] == 1
    assert shown.data["image"].startswith("data:image/png;base64,")


def test_too_many_weights_are_refused_with_another_way():
    model = GPT(GPTConfig(vocab_size=13, context_length=2048, dim=12, layers=2, heads=3)).eval()
    with pytest.raises(InputError, match="regard lab"):
        regard.widget(model, torch.zeros(1, 1024, dtype=torch.long))


def test_the_module_of_the_widget_is_whole_and_names_no_address():
    shown = regard.widget(make_gpt(), torch.tensor([[1, 2, 3]]))
    assert "export default" in shown._esm
    assert "\nimport " not in shown._esm
    assert "http" not in shown._esm.replace("http://www.w3.org/", "")
    assert "http" not in shown._css
    shown.layer, shown.head, shown.token, shown.view = 1, 2, 0, "lines"
