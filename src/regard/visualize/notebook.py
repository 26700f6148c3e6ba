"""Attention in a notebook: the figure of the lab's page as a widget of Jupyter, VS Code, marimo or Colab."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import InputError
from regard.visualize.attention_map import AttentionMap, attention_maps
from regard.visualize.interactive import MOST_WEIGHTS, attention_data, fits_a_page
from regard.visualize.labels import label_tokens
from regard.visualize.text_input import encode_text, find_tokenizer
from regard.visualize.token_grid import find_token_grid


def widget(model: nn.Module, text: Any, *, words: Any = None) -> Any:
    """A widget that shows what every head of a model attends to: `regard.widget(model, "The keys to the cabinet")`.

    It shows the same figure as `regard lab`, needs no server and loads nothing from any address. Its traits `layer`,
    `head`, `token` and `view` ("matrix", "lines", "image") follow what is clicked, and can be set.

    Args:
        model: any that `regard.visualize.attention_maps` reads, ours, torch's, timm's or Hugging Face's.
        text: a text; or the input of the model itself: token ids, or an image `(channel, row, column)`.
        words: the tokenizer of the text. By default that in the folder from which the model was read.
    """
    ids: list[int] | None = None
    if isinstance(text, str):
        words = _find_tokenizer(model) if words is None else words
        ids = encode_text(words, text)
        given: Any = torch.tensor([ids])
    else:
        given = torch.as_tensor(text)
        if not given.is_floating_point():
            ids = given.flatten().tolist()
    maps = attention_maps(model, given)
    heads = [attention.rows([0]).shape[0] for attention in maps]
    if not fits_a_page(maps, heads):
        raise InputError(
            "These weights do not fit into one widget.",
            asked=f"{len(maps)} layers with {maps[0].queries:,} queries and {maps[0].keys:,} keys",
            because=f"a widget holds at most {MOST_WEIGHTS:,} weights, of layers of one size",
            instead="a shorter input; or regard lab, which computes the rows that are looked at",
        )
    labels = None if ids is None or words is None else label_tokens(words, ids)
    return _make_widget(attention_data(maps, words=labels, **_find_image(model, given, maps)))


def _find_image(model: nn.Module, given: Tensor, maps: list[AttentionMap]) -> dict[str, Any]:
    """The image and its grid of tokens, where the input is one."""
    if not given.is_floating_point() or given.ndim not in (3, 4):
        return {}
    image = given[0] if given.ndim == 4 else given
    try:
        tokens = find_token_grid(model, maps[0].keys, (int(image.shape[1]), int(image.shape[2])))
    except InputError:  # tokens that are no grid are shown without the image
        return {}
    return {"image": image, "tokens": tokens}


def _find_tokenizer(model: Any) -> Any:
    """The tokenizer that lay beside a model of ours or of Hugging Face when it was read."""
    content = getattr(model, "companions", {}).get("tokenizer.json")
    if content is not None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(content.decode("utf-8"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer
    place = getattr(model, "name_or_path", "")
    if place and Path(place).exists():
        return find_tokenizer(place)
    raise InputError(
        "A text needs a tokenizer.",
        asked=f"widget({type(model).__name__}, text)",
        because="none lay beside the model where it was read",
        instead="widget(model, text, words=tokenizer), or the token ids in place of the text",
    )


def _make_widget(data: dict[str, Any]) -> Any:
    try:
        import anywidget
        import traitlets
    except ImportError as failure:
        raise InputError(
            "The widget needs anywidget.",
            asked="regard.widget(model, text)",
            found=f"{type(failure).__name__}: {failure}",
            because="it connects the figure with Jupyter, VS Code, marimo and Colab",
            instead='pip install "regard[lab]"',
        ) from failure
    from regard.render.components import notebook_module, notebook_style

    class AttentionWidget(anywidget.AnyWidget):
        _esm = notebook_module()
        _css = notebook_style()
        data = traitlets.Dict().tag(sync=True)
        layer = traitlets.Int(0).tag(sync=True)
        head = traitlets.Int(0).tag(sync=True)
        token = traitlets.Int(None, allow_none=True).tag(sync=True)
        view = traitlets.Unicode("").tag(sync=True)

    return AttentionWidget(data=data)
