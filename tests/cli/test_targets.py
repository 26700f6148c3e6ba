"""From the text of a target to the target, and the errors for malformed ones."""

from __future__ import annotations

import functools
import json
import sys

import pytest
import torch
from torch import nn
from twins import library

from regard.cli.targets import load_target, make_target
from regard.errors import InputError
from regard.models import GPT, GPTConfig

MODULE = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self, width=5, *, deep=False):
        super().__init__()
        self.width, self.deep = width, deep
        self.map = nn.Linear(width, width)

class Sized(nn.Module):
    def __init__(self, width, heads):
        super().__init__()

class space:
    @staticmethod
    def attend(query, key, value):
        return query

def build():
    return Layer(11)

def fails():
    raise RuntimeError("no weights here")

layer = Layer(3)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a module; its imports are undone afterwards."""
    (tmp_path / "a_module_to_find.py").write_text(MODULE)
    (tmp_path / "a_module_that_fails.py").write_text("import torch\n1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("a_module_")]:
        del sys.modules[name]


def refused(text: str) -> str:
    with pytest.raises(InputError) as caught:
        load_target(text)
    return str(caught.value)


def test_names_classes_and_makers_are_found(folder):
    import importlib

    layer = load_target("a_module_to_find:layer")
    module = importlib.import_module("a_module_to_find")
    assert layer is module.layer
    assert load_target("a_module_to_find:space.attend") is module.space.attend
    assert load_target("a_module_to_find:build") is module.build
    assert load_target("a_module_to_find:Layer").width == 5
    assert load_target("a_module_to_find:build()").width == 11
    made_so = load_target("a_module_to_find:Layer(7, deep=True)")
    assert (made_so.width, made_so.deep) == (7, True)


def test_a_file_is_found_from_another_folder(folder, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_target("../a_module_to_find.py:Layer").width == 5
    assert "there is no file nowhere.py" in refused("nowhere.py:Layer")


def test_the_same_seed_makes_the_same_weights_and_touches_no_other_numbers(folder):
    state = torch.get_rng_state()
    one, two, other = (load_target("a_module_to_find:Layer", seed).map.weight for seed in (3, 3, 4))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nothing_of_this_name:f", ["there is no module 'nothing_of_this_name'", "nor installed"]),
        ("a_module_to_find.inner:f", ["there is no module 'a_module_to_find.inner'"]),
        ("a_module_to_find:nothing", ["a_module_to_find has no 'nothing'", "Layer, Sized"]),
        ("a_module_to_find:space.nothing", ["a_module_to_find.space has no 'nothing'", "attend"]),
        ("a_module_that_fails:f", ["a_module_that_fails cannot be imported", "ZeroDivisionError"]),
        ("a_module_to_find:Sized", ["Sized cannot be built without arguments", "it needs width, heads"]),
        ("a_module_to_find:Sized(3)", ["Sized(3) failed", "missing 1 required positional argument: 'heads'"]),
        ("a_module_to_find:fails()", ["fails() failed", "RuntimeError: no weights here"]),
        ("nowhere", ["'nowhere' is no target", "no such file or folder", "transformers:GPT2LMHeadModel"]),
        (":f", ["is no target", "on either side of the colon"]),
        ("a_module_to_find:", ["is no target"]),
        ("a module:f", ["is no target", "'a module' is the name of no module"]),
    ],
)
def test_malformed_targets_are_refused_with_a_reason(folder, text, words):
    message = refused(text)
    for word in [*words, "because", "instead"]:
        assert word in message


@pytest.mark.parametrize(
    "name",
    [
        "build(__import__('os').system('touch ran'))",
        "build(open('ran', 'w'))",
        "build(*[1])",
        "build(**{'a': 1})",
        "build()()",
        "[open('ran', 'w')][0]",
        "build(",
    ],
)
def test_the_text_is_parsed_and_never_run(folder, name):
    assert "is no target" in refused(f"a_module_to_find:{name}")
    assert not (folder / "ran").exists()


# Checkpoints


def test_a_folder_of_ours_is_read(folder):
    model = GPT(GPTConfig(vocab_size=13, context_length=17, dim=8, layers=1, heads=2))
    model.save_pretrained(folder / "checkpoint")
    found = load_target("checkpoint")
    assert isinstance(found, GPT)
    state = found.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])


def test_a_folder_that_is_no_checkpoint_is_refused(folder):
    (folder / "empty").mkdir()
    assert "an empty folder" in refused("empty")
    assert "a folder without a config.json" in refused(".")
    (folder / "empty" / "config.json").write_text("{")
    assert "config.json cannot be read" in refused("empty")
    (folder / "empty" / "config.json").write_text(json.dumps({"model_type": "regard.unknown"}))
    message = refused("empty")
    assert "no model class reads empty" in message
    assert "GPT" in message


# Other people's models


def test_a_tiny_model_of_hugging_face_is_made():
    transformers = library("transformers")
    assert isinstance(load_target("transformers:GPT2LMHeadModel"), transformers.GPT2LMHeadModel)
    assert load_target("transformers:GPT2LMHeadModel(n_layer=3)").config.n_layer == 3
    assert "transformers has no model 'NoSuchModel'" in refused("transformers:NoSuchModel")


def test_a_folder_of_hugging_face_is_read_by_its_own_library(tmp_path):
    transformers = library("transformers")
    load_target("transformers:GPT2LMHeadModel").save_pretrained(tmp_path / "checkpoint")
    assert isinstance(load_target(str(tmp_path / "checkpoint")), transformers.GPT2LMHeadModel)


def test_a_model_of_timm_is_made():
    timm = library("timm")
    model = load_target("timm:vit_tiny_patch16_224(img_size=32, depth=1)")
    assert isinstance(model, timm.models.VisionTransformer)
    assert "timm has no model 'vit_of_nobody'" in refused("timm:vit_of_nobody")
    assert "takes keyword arguments" in refused("timm:vit_tiny_patch16_224(3)")


def test_a_library_that_is_missing_is_named_with_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    message = refused("timm:vit_tiny_patch16_224")
    assert "timm cannot be imported" in message
    assert "pip install timm" in message


# Targets given in Python


def test_a_function_without_arguments_is_a_maker_and_any_other_a_target():
    def operator(query, key, value, mask=None):
        return value

    def anything(*given, **words):
        return given

    layer = nn.Linear(3, 3)
    for target in (operator, anything, layer, 3):
        assert make_target(target) is target
    assert make_target(lambda: layer) is layer
    assert make_target(lambda width=5: nn.Linear(width, 7)).in_features == 5
    assert isinstance(make_target(functools.partial(nn.Linear, 3, 7)), nn.Linear)
