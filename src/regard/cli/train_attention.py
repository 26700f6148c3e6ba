"""Attention of a few heads of a trained model on a fixed sample: the first, the middle and the last layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from regard.errors import InputError
from regard.render.markup import Markup
from regard.render.page import figure, paragraph
from regard.train import DaViTRecipe, ResNetRecipe, Run
from regard.train.data.text import Tokenizer
from regard.train.tasks.bert import BertTask
from regard.train.tasks.gpt import LanguageModelTask
from regard.train.tasks.images import ImageTask
from regard.train.tasks.text_classification import TextClassificationTask
from regard.train.tasks.translate import TranslationTask
from regard.visualize import AttentionMap, Picture, attention_maps, show
from regard.visualize.token_maps import draw_matrices

MOST_HEADS, MOST_TOKENS = 3, 16  # whose labels can be read on a page
FEWEST_WORDS = 4  # of the sentence that is aligned


def render_attention(run: Run) -> list[Markup]:
    """The section of a page: pictures of chosen heads; a sentence where there is nothing to draw."""
    try:
        pictures = draw_attention(run)
    except InputError as failure:  # matplotlib is missing, or the layers of this model cannot be read
        return [paragraph(f"{failure.headline} {failure.because[:1].upper()}{failure.because[1:]}.")]
    return [figure(Markup(picture.svg), picture.caption, kind="picture") for picture in pictures]


def draw_attention(run: Run) -> list[Picture]:
    """Pictures of the attention of a trained model, on the beginning of its validation set; none without attention."""
    with torch.no_grad():
        for kind, draw in DRAWERS.items():
            if isinstance(run.task, kind):
                return draw(run.task, run.model)
    return []


def _draw_language_model(task: LanguageModelTask, model: Any) -> list[Picture]:
    length = min(MOST_TOKENS, task.recipe.context_length)
    tokens = torch.from_numpy(task.validation_store.tokens[:length].astype("int64"))
    return [_draw_text(model, {"tokens": tokens[None]}, task.tokenizer)]


def _draw_bert(task: BertTask, model: Any) -> list[Picture]:
    sequences = task.held_out.make(0)[0].sequences
    starts = (sequences.positions[0] == 0).nonzero()[:, 0].tolist()
    length = min(*starts[1:2], MOST_TOKENS, sequences.tokens.shape[1])
    inputs = {"tokens": sequences.tokens[:1, :length], "segments": sequences.segments[:1, :length]}
    return [_draw_text(model, inputs, task.data.tokenizer)]


def _draw_classifier(task: TextClassificationTask, model: Any) -> list[Picture]:
    length = min(MOST_TOKENS, int(task.held_out.lengths[0]))
    return [_draw_text(model, {"tokens": task.held_out.tokens[:1, :length]}, task.tokenizer)]


def _draw_translation(task: TranslationTask, model: Any) -> list[Picture]:
    """The cross-attention of the shortest validation sentence that has a few words."""
    sources, targets = task._sides(task.validation)
    long_enough = [number for number, source in enumerate(sources) if len(source.split()) >= FEWEST_WORDS]
    chosen = min(long_enough or range(len(sources)), key=lambda number: len(sources[number]))
    translation = task.translate(model, [sources[chosen]])[0]
    return [draw_alignment(model, task.tokenizer, sources[chosen], translation.strip() or targets[chosen])]


def _draw_images(task: ImageTask, model: Any) -> list[Picture]:
    """The weights of the query in the middle of the first test image."""
    test = task.images.test
    image = task.images.normalise(test.pixels[:1].float() / test.white).to(next(model.parameters()).dtype)
    if isinstance(task.recipe, ResNetRecipe):  # convolutions alone
        return []
    middle = image.shape[2] // 2, image.shape[3] // 2
    layers = choose_layers(len(attention_maps(model, image)))
    picture = show(model, image[0], query=middle, layer=layers)
    if isinstance(task.recipe, DaViTRecipe):
        picture.caption += (
            " Drawn are layers that attend within windows; each is followed by one that attends between channels, which"
            " has no weights between places of the image."
        )
    return [picture]


DRAWERS: dict[type, Callable[[Any, Any], list[Picture]]] = {
    LanguageModelTask: _draw_language_model,
    BertTask: _draw_bert,
    TextClassificationTask: _draw_classifier,
    TranslationTask: _draw_translation,
    ImageTask: _draw_images,
}


def _draw_text(model: Any, inputs: dict[str, Any], tokenizer: Tokenizer) -> Picture:
    words = label_tokens(tokenizer, inputs["tokens"][0].tolist())
    return _draw_heads(attention_maps(model, inputs), words)


def draw_alignment(model: Any, tokenizer: Tokenizer, source: str, target: str) -> Picture:
    """The cross-attention from each token of a translation to the source, in the order in which it is generated."""
    end = tokenizer.eos_token_id
    assert end is not None
    read, written = [*tokenizer.encode(source), end], [end, *tokenizer.encode(target)]
    maps = attention_maps(model, {"source": torch.tensor([read]), "target": torch.tensor([written])})
    crossing = [each for each in maps if "cross" in each.name]
    # A row belongs to the token that the decoder has read; it predicts the next one.
    following = [*label_tokens(tokenizer, written[1:]), "(end)"]
    picture = _draw_heads(crossing, [*label_tokens(tokenizer, read[:-1]), "(end)"], following)
    picture.caption = f"Alignment: a row is a token of the translation, a column one of the source. {picture.caption}"
    return picture


def _draw_heads(maps: list[AttentionMap], words: Sequence[str], query_words: Sequence[str] | None = None) -> Picture:
    chosen = [maps[layer] for layer in choose_layers(len(maps))]
    fewest = min(len(each.rows([0])) for each in chosen)
    return draw_matrices(chosen, list(range(min(MOST_HEADS, fewest))), words, query_words)


def choose_layers(count: int) -> list[int]:
    """The first, the middle and the last of the layers.

    >>> choose_layers(1), choose_layers(2), choose_layers(12)
    ([0], [0, 1], [0, 6, 11])
    """
    return sorted({0, count // 2, count - 1})


def label_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each token, with spaces and control characters that can be seen."""
    texts = [tokenizer.decode([number], skip_special_tokens=False).replace(" ", "·") for number in ids]
    return [
        "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text) or "''"
        for text in texts
    ]
