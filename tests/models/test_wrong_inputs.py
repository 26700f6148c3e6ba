"""Wrong configurations, tokens and images are refused with errors in four parts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import refused

import regard.models
from regard.errors import ConfigError, InputError, RegardError
from regard.models import (
    GPT,
    Bert,
    BertConfig,
    DaViT,
    DaViTConfig,
    GPTConfig,
    SpatialConfig,
    SpatialTransformer,
    Transformer,
    TransformerConfig,
    ViT,
    ViTConfig,
)
from regard.models.pretrained import Pretrained

MODELS = [kind for kind in vars(regard.models).values() if isinstance(kind, type) and issubclass(kind, Pretrained)]
TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]])
IMAGES = torch.ones(2, 3, 8, 8)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("hello", "from_pretrained('hello')"),
        (Path("/tmp"), "from_pretrained('/tmp')"),
        ({"dim": 8}, "from_dict"),
        (None, "a NoneType"),
        (7, "a int"),
        ([7], "a list"),
        (torch.zeros(3), "a Tensor"),
    ],
    ids=str,
)
def test_what_is_no_configuration_is_refused(kind: type[Pretrained], given: Any, words: str):
    with refused(ConfigError, words, kind.Config.__name__, kind.__name__):
        kind(given)


def test_a_class_and_the_configuration_of_another_model_are_refused():
    with refused(ConfigError, "GPT(GPTConfig())"):
        GPT(GPTConfig)  # type: ignore[arg-type]
    with refused(ConfigError, "instead  Bert(...)"):
        GPT(BertConfig(dim=12))  # type: ignore[arg-type]


@cache
def models() -> dict[str, Any]:
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "dim": 8, "layers": 1, "heads": 2}
    made = {
        "gpt": GPT(GPTConfig(**sizes, context_length=8)),
        "llama": GPT(GPTConfig.llama(**sizes, context_length=8)),
        "bert": Bert(BertConfig(**sizes, context_length=8)),
        "roberta": Bert(BertConfig(**sizes, context_length=8, padding_token=1)),
        "transformer": Transformer(TransformerConfig(**sizes, hidden_dim=12)),
        "vit": ViT(ViTConfig(image=(8, 8), patch=4, dim=8, layers=1, heads=2, classes=3)),
        "davit": DaViT(DaViTConfig(dims=(8, 16), depths=(1, 1), heads=(2, 2), classes=3, window=2)),
        "spatial": SpatialTransformer(SpatialConfig(layers=1, heads=2, dim=4, hidden_dim=5)),
    }
    return {name: model.eval() for name, model in made.items()}


# Every place where a text enters a model.
CALLS: dict[str, Callable[[Any], Any]] = {
    "gpt": lambda x: models()["gpt"](x),
    "llama": lambda x: models()["llama"](x),
    "bert": lambda x: models()["bert"](x),
    "bert with lengths": lambda x: models()["bert"](x, lengths=[3, 2]),
    "roberta": lambda x: models()["roberta"](x),
    "source": lambda x: models()["transformer"](x, TOKENS),
    "target": lambda x: models()["transformer"](TOKENS, x),
    "encode": lambda x: models()["transformer"].encode(x),
    "hidden": lambda x: models()["gpt"].hidden(x),
    "decode_step": lambda x: models()["gpt"].decode_step(x, models()["gpt"].new_cache()),
    "generate": lambda x: models()["gpt"].generate(x, max_new_tokens=1),
    "translate": lambda x: models()["transformer"].generate(x, max_new_tokens=1),
    "embed": lambda x: models()["bert"].embed(x),
}
ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    "segments": lambda x: models()["bert"](TOKENS, x),
    "lengths of gpt": lambda x: models()["gpt"](TOKENS, lengths=x),
    "lengths of bert": lambda x: models()["bert"](TOKENS, lengths=x),
    "lengths of a source": lambda x: models()["transformer"](TOKENS, TOKENS, source_lengths=x),
    "positions of gpt": lambda x: models()["gpt"](TOKENS, positions=x),
    "positions of llama": lambda x: models()["llama"](TOKENS, positions=x),
    "positions of bert": lambda x: models()["bert"].hidden(TOKENS, positions=x),
    "cache": lambda x: models()["gpt"](TOKENS, cache=x),
    "cache of a decoder": lambda x: models()["transformer"].decode(TOKENS, None, cache=x),
    "pattern of gpt": lambda x: models()["gpt"](TOKENS, pattern=x),
    "pattern of bert": lambda x: models()["bert"](TOKENS, pattern=x),
}
PICTURES: dict[str, Callable[[Any], Any]] = {
    "vit": lambda x: models()["vit"](x),
    "davit": lambda x: models()["davit"](x),
    "pyramid": lambda x: models()["davit"].pyramid(x),
    "spatial": lambda x: models()["spatial"](x),
}


def wrong_texts() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about kinds of tensors that torch will drop
        return {
            "a string": "hello",
            "None": None,
            "a number": 3,
            "floats": TOKENS.float(),
            "halves": TOKENS.half(),
            "booleans": TOKENS > 2,
            "complex numbers": TOKENS.to(torch.complex64),
            "a number on no axis": torch.tensor(1),
            "three axes": TOKENS[None],
            "beyond the vocabulary": TOKENS + 100,
            "far beyond": torch.tensor([[2**40]]),
            "negative": TOKENS - 5,
            "no tokens": TOKENS[:, :0],
            "a dict": {"input_ids": TOKENS},
            "a tuple of a tensor": (TOKENS,),
            "sparse": TOKENS.to_sparse(),
            "nested": torch.nested.nested_tensor([TOKENS[0], TOKENS[1, :2]]),
            "jagged": torch.nested.nested_tensor([TOKENS[0], TOKENS[1, :2]], layout=torch.jagged),
            "quantised": torch.quantize_per_tensor(TOKENS.float(), 1.0, 0, torch.qint8),
        }


@pytest.mark.parametrize("call", CALLS)
def test_tokens_that_a_model_cannot_read_are_refused(call: str):
    for name, given in wrong_texts().items():
        assert_refused(f"{call}, {name}", CALLS[call], given)


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_other_arguments_that_a_model_cannot_read_are_refused(argument: str):
    for name, given in {**wrong_texts(), "another length": [1], "lists": [[1, 2], [3, 4]]}.items():
        if given is None or (argument == "segments" and name == "no tokens"):
            continue  # not given; and segments of nothing are tried with tokens
        assert_refused(f"{argument}, {name}", ARGUMENTS[argument], given, or_taken=True)


@pytest.mark.parametrize("call", PICTURES)
def test_images_that_a_model_cannot_read_are_refused(call: str):
    wrong = {
        "a string": "cat.png",
        "None": None,
        "a list": [1],
        "an array": IMAGES.numpy(),
        "a dict": {"pixel_values": IMAGES},
        "bytes": IMAGES.to(torch.uint8),
        "complex numbers": IMAGES.to(torch.complex64),
        "one image": IMAGES[0],
        "another number of channels": IMAGES[:, :2],
        "channels last": IMAGES.permute(0, 2, 3, 1),
        "no pixels": IMAGES[:, :, :0],
        "sparse": IMAGES.to_sparse(),
    }
    for name, given in wrong.items():
        assert_refused(f"{call}, {name}", PICTURES[call], given)


def assert_refused(name: str, call: Callable[[Any], Any], given: Any, *, or_taken: bool = False) -> None:
    """The call ends in an error of four parts, and in none of torch's or Python's."""
    error: Exception | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call(given)
        except Exception as failure:  # of any kind: it is judged below
            error = failure
    if error is None and or_taken:
        return
    assert isinstance(error, RegardError), f"{name}: {error!r}"
    assert error.asked or error.found, name
    assert error.because, name
    assert error.instead, name


def test_a_tokenizer_dict_gets_an_error_that_names_its_key():
    with refused(InputError, "tokens['input_ids']"):
        models()["gpt"]({"input_ids": TOKENS})
