"""Labels are right: indices, shared axes, formats of weights, and tokens."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import numpy
import pytest
import torch
from agreement import refused
from twins import library, transformers

from regard import Alibi, show
from regard.errors import InputError
from regard.layers.profiles import head_profiles
from regard.models import GPT, GPTConfig, Transformer, TransformerConfig, ViT, ViTConfig
from regard.models.io import SentencePieceTokenizer
from regard.models.spatial import SpatialConfig, SpatialTransformer
from regard.render.svg import spread_labels
from regard.visualize import ExplorerModel, animate_heads, attention_maps, draw_head_paths, make_explorer, make_player
from regard.visualize.labels import Percent, axis_end, label_tokens

ROOT = Path(__file__).resolve().parent.parent.parent
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])


@pytest.fixture(scope="module")
def gpt():
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=23, context_length=16, dim=33, layers=3, heads=11))


@pytest.fixture(scope="module")
def spatial():
    torch.manual_seed(0)
    return SpatialTransformer(SpatialConfig(image=(5, 7), channels=1, patch=1, dim=4, layers=3, heads=11, hidden_dim=4))


def titles(picture) -> tuple[list[str], list[str]]:
    """The labels of the rows and of the columns."""
    panels = picture.figure.axes
    return [p.get_ylabel() for p in panels if p.get_ylabel()], [p.get_title() for p in panels if p.get_title()]


# Layers and heads


@pytest.mark.parametrize(("layer", "head"), [(0, 0), (2, 9), ([1, 2], [10, 3]), (numpy.int64(1), 5)])
def test_what_is_drawn_has_the_indices_that_chose_it(gpt, spatial, layer, head):
    several = ([layer] if isinstance(layer, int | numpy.int64) else layer), ([head] if isinstance(head, int) else head)
    pictures = [
        (gpt, IDS, show(gpt, IDS, layer=layer, head=head), None),
        (gpt, IDS, show(gpt, IDS, layer=layer, head=head, query=4), 4),
        (spatial, torch.rand(1, 1, 5, 7), show(spatial, torch.rand(1, 5, 7), layer=layer, head=head, query=(1, 2)), 9),
    ]
    for model, input, picture, query in pictures:
        assert titles(picture) == ([f"layer {n}" for n in several[0]], [f"head {n}" for n in several[1]])
        found = attention_maps(model, input)
        for index, drawn in zip(several[0], picture.data["layers"].values(), strict=True):
            rows = found[index].rows(range(found[index].queries) if query is None else [query])[list(several[1])]
            torch.testing.assert_close(drawn.flatten(), rows.flatten())


def test_heads_of_an_animation_have_their_indices_too(spatial):
    epochs = [head_profiles(spatial)] * 2
    picture = show(epochs, layer=[2, 0])
    assert [panel.get_title() for panel in picture.figure.axes] == ["layer 2", "layer 0"]
    assert list(picture.data["layers"]) == ["blocks.2.attention", "blocks.0.attention"]
    for panel, drawn in zip(picture.figure.axes, picture.data["layers"].values(), strict=True):
        for number in panel.texts:
            torch.testing.assert_close(
                torch.tensor(number.xy), drawn["mean"][-1, int(number.get_text())].flip(0).float(), rtol=1e-5, atol=1e-5
            )
        assert sorted(int(number.get_text()) for number in panel.texts) == list(range(11))


def test_a_page_numbers_layers_and_heads_as_the_arguments_do(spatial):
    figure = make_player([head_profiles(spatial)] * 2, ["a", "b"], "", layers=[1])
    assert re.findall("<h3>(.*?)</h3>", figure) == ["Layer 1"]
    numbers = dict(re.findall(r'data-head="(\d+)".*?<text[^>]*>(\d+)</text>', figure))
    assert numbers == {str(head): str(head) for head in range(11)}
    mean = head_profiles(spatial)["blocks.1.attention"].mean[10]
    assert f"head 10 at {mean[0]:.1f}, {mean[1]:.1f}" in figure
    images = torch.rand(1, 1, 5, 7)
    page = make_explorer([ExplorerModel("spatial", spatial, images, ["?"])], images, ["noise"], "")
    assert '"layers":["layer 0","layer 1","layer 2"]' in page


def test_the_lines_of_a_bias_have_the_indices_of_its_heads():
    panel = show(Alibi(3), 7).figure.axes[0]
    assert [text.get_text() for text in panel.texts] == ["head 0", "head 1", "head 2"]


def test_labels_are_spaced_out_in_their_order():
    generator = torch.Generator().manual_seed(0)
    for count in (1, 2, 5, 11):
        places = (torch.randn(count, generator=generator) ** 3).tolist()
        moved = spread_labels(places, 0.5)
        order = sorted(range(count), key=lambda index: places[index])
        assert sorted(range(count), key=lambda index: moved[index]) == order
        between = [moved[b] - moved[a] for a, b in pairwise(order)]
        assert min(between, default=1.0) > 0.5 - 1e-9
        assert sum(moved) == pytest.approx(sum(places), abs=1e-6)
    assert spread_labels([3.0, 1.0], 0.5) == [3.0, 1.0]


def test_no_source_counts_layers_heads_or_pixels_from_one():
    wrong = re.compile(r"\b(layer|head|row|column)s?\b[^\n]*\{[^}]*\+ 1\}")
    files = [
        *ROOT.glob("src/regard/visualize/**/*"),
        *ROOT.glob("src/regard/cli/*.py"),
        *ROOT.glob("src/regard/train/*.py"),
    ]
    files += [
        *ROOT.glob("src/regard/laws/**/*.py"),
        *ROOT.glob("src/regard/cost_model/**/*.py"),
        *ROOT.glob("examples/**/*.py"),
    ]
    found = [
        f"{path.name}: {line.strip()}"
        for path in files
        if path.suffix in (".py", ".js")
        for line in path.read_text(encoding="utf-8").splitlines()
        if wrong.search(line)
    ]
    assert found == []
    assert wrong.search('panel.set_title(f"head {numbers[place] + 1}")')
    assert wrong.search("`row ${state.row + 1}, column`")


def test_modules_with_other_numbers_are_named_beside_their_index():
    model = Transformer(TransformerConfig(vocab_size=11, context_length=16, dim=8, layers=2, heads=2, hidden_dim=8))
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    found = attention_maps(model, tokens, tokens)
    assert [attention.title.split("\n")[0] for attention in found] == [f"layer {index}" for index in range(len(found))]
    for attention in found:
        assert attention.title.split("\n")[1].lstrip("…") in attention.name


def test_a_module_that_runs_twice_is_drawn_twice(gpt):
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.MultiheadAttention(6, 2, batch_first=True)

        def forward(self, x):
            x = self.layer(x, x, x)[0]
            return self.layer(x, x, x)[0]

    picture = show(Twice(), {"x": torch.randn(1, 5, 6)})
    assert list(picture.data["layers"]) == ["layer", "layer (run 1)"]
    first, second = picture.data["layers"].values()
    assert not torch.equal(first, second)


# Bars and numbers


def bars(panel) -> dict[str, list[float]]:
    return {kind.get_label(): [bar.get_width() for bar in kind] for kind in panel.containers}


def test_all_bars_share_one_labelled_axis(gpt):
    picture = show(gpt, IDS, query=6)
    end = picture.data["axis"]
    largest = max(float(weights.max()) for weights in picture.data["layers"].values())
    assert largest <= end == axis_end([largest])
    for panel in picture.figure.axes:
        assert panel.get_xlim() == (0, end)
        assert [label.get_text() for label in panel.get_xticklabels()] == ["0", f"{end:.0%}"]
        assert bars(panel)["axis"] == [end] * len(bars(panel)["weight"])
    assert f"from 0 to {end:.0%}" in picture.caption


def test_keys_that_are_not_seen_are_not_listed(gpt):
    picture = show(gpt, IDS, query=2, layer=0, head=0)
    (panel,) = picture.figure.axes
    assert len(bars(panel)["weight"]) == 3


@pytest.mark.parametrize("largest", [1.0, 0.14, 0.05, 0.004, 0.0003])
def test_weights_of_a_picture_have_one_format(largest):
    percent = Percent([largest, 0.0])
    texts = [percent(largest * share) for share in (1.0, 0.5, 0.03, 1e-3, 1e-9, 0.0)]
    decimals = {len(text.rstrip("%").split(".")[1]) for text in texts}
    assert len(decimals) == 1
    assert "e" not in "".join(texts)
    assert float(texts[0][:-1]) == pytest.approx(100 * largest, rel=0.06)
    assert texts[-2].startswith("<")
    assert not texts[-1].startswith("<")


# Words


@pytest.mark.parametrize("words", [["a"] * 6, ["a"] * 8, [], "seven..", b"seven..", 7, {"a": 1}])
def test_labels_that_do_not_match_the_tokens_are_refused(gpt, words):
    for query in (None, 3):
        with refused(InputError, "ords"):
            show(gpt, IDS, words=words, query=query)


def test_labels_that_no_picture_shows_are_refused(gpt, spatial):
    vit = ViT(ViTConfig(image=(8, 12), patch=4, channels=1, classes=5, dim=8, layers=2, heads=2))
    for target, *input in ((spatial,), (vit, torch.rand(1, 8, 12)), (Alibi(2), 7), ([head_profiles(spatial)] * 2,)):
        with refused(InputError, "no tokens to label"):
            show(target, *input, words=["a"] * 7)
    picture = show(GPT(GPTConfig(vocab_size=23, context_length=64, dim=8, layers=1, heads=2)), torch.ones(1, 37).long(),
                   words=["a"] * 37)  # fmt: skip
    assert "Words are left out" in picture.caption


def test_labels_are_drawn_beside_their_tokens(gpt):
    words = ["Tom", "owes", "me", "$", "$_{x", "東", "🙂"]
    picture = show(gpt, IDS, words=words, layer=1, head=3)
    (panel,) = picture.figure.axes
    drawn = ["Tom", "owes", "me", "$", "$_{x", "\\u6771", "\\U0001f642"]
    assert [label.get_text() for label in panel.get_xticklabels()] == drawn
    assert [label.get_text() for label in panel.get_yticklabels()] == drawn
    picture.svg  # noqa: B018  draws it: no formula, no missing letter
    picture = show(gpt, IDS, words=words, layer=1, head=3, query=6)
    (panel,) = picture.figure.axes
    texts = [text.get_text() for text in panel.texts]
    weights = picture.data["layers"]["blocks.1.attention"][0]
    percent = Percent([float(weights.max())])
    for position, word, weight in zip(texts[::3], texts[1::3], texts[2::3], strict=True):
        assert word == drawn[int(position)]
        assert weight == percent(float(weights[int(position)]))


def test_labels_of_cross_attention_are_of_keys_alone():
    layer = torch.nn.MultiheadAttention(6, 2, batch_first=True)
    input = {"query": torch.randn(1, 5, 6), "key": torch.randn(1, 3, 6), "value": torch.randn(1, 3, 6)}
    (panel, _) = show(layer, input, words=["a", "b", "c"]).figure.axes
    assert [label.get_text() for label in panel.get_xticklabels()] == ["a", "b", "c"]
    assert list(panel.get_yticklabels()) == []
    with refused(InputError, "do not fit"):
        show(layer, input, words=["a", "b", "c", "d", "e"])


# Tokens


TEXT = "The keys, naïve €5\n\t东  end"


def byte_level():
    tokenizers = library("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280, show_progress=False, special_tokens=["<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(["The keys keys keys", "The keys"] * 9, trainer)
    return tokenizer


def word_piece():
    tokenizers = library("tokenizers")
    vocab_size = {word: number for number, word in enumerate(["[UNK]", "[CLS]", "key", "##s", "##", "the"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab_size, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.add_special_tokens(["[CLS]", "[UNK]"])
    return tokenizer


def sentence_piece():
    tokenizers = library("tokenizers")
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁key", "s"]
    vocab_size = [(piece, 0.0 if number < 258 else -float(number)) for number, piece in enumerate(pieces)]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(vocab_size, 0, byte_fallback=True))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    parts = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    tokenizer.decoder = tokenizers.decoders.Sequence([*parts, tokenizers.decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def test_byte_level_tokens_are_read():
    tokenizer = byte_level()
    ids = tokenizer.encode(TEXT).ids
    labels = label_tokens(tokenizer, ids)
    assert labels[:3] == ["The", "keys", ","]
    assert tokenizer.id_to_token(ids[1]) == "Ġkeys"
    assert not any(mark in label for label in labels for mark in "ĠĊ�▁")
    assert "\\xe2" in labels
    assert "\\n" in labels
    assert "\\t" in labels
    assert "␣" in labels
    assert label_tokens(tokenizer, [0, 10**6]) == ["<|end|>", "[1000000]"]
    quick = transformers().PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    assert label_tokens(quick, ids) == labels


def test_word_pieces_are_read():
    tokenizer = word_piece()
    ids = [1, *tokenizer.encode("the keys").ids, 4]
    assert [tokenizer.id_to_token(number) for number in ids] == ["[CLS]", "the", "key", "##s", "##"]
    assert label_tokens(tokenizer, ids) == ["[CLS]", "the", "key", "s", "##"]


def test_sentence_pieces_are_read():
    tokenizer = sentence_piece()
    ids = [1, *tokenizer.encode("keys €").ids]
    labels = label_tokens(tokenizer, ids)
    assert labels[:3] == ["<s>", "key", "s"]
    assert "<0xE2>" in labels or "\\xe2" in labels
    assert "�" not in "".join(labels)
    assert "␣" in labels


def test_tokens_that_merge_by_score_are_read():
    signs = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % byte for byte in range(256))]
    tokenizer = SentencePieceTokenizer([*signs, b" ", b"a", b"b", b"ab", b" ab"], [0.0] * 262 + [-1.0, -2.0])
    assert label_tokens(tokenizer, tokenizer.encode("abé")) == ["<s>", "ab", "\\xc3", "\\xa9"]


def test_what_a_tokenizer_calls_its_tokens_is_made_readable(gpt):
    def drawn(words):
        (panel,) = show(gpt, IDS, words=words, layer=0, head=0).figure.axes
        return [label.get_text() for label in panel.get_xticklabels()]

    assert drawn(["The", "Ġkeys", "Ċ", "âĤ", "<|end|>", "Ġ", "s"]) == [
        "The",
        "keys",
        "\\n",
        "\\xe2\\x82",
        "<|end|>",
        "␣",
        "s",
    ]
    assert drawn(["▁The", "▁key", "s", "▁", "<s>", "x", "y"]) == ["The", "key", "s", "␣", "<s>", "x", "y"]
    assert drawn(["[CLS]", "key", "##s", "#", "the", "a", "b"]) == ["[CLS]", "key", "s", "#", "the", "a", "b"]
    assert drawn(["#", "## Title", "a_b", "ab", "x" * 40, "", "  "])[:4] == ["#", "## Title", "a_b", "ab"]


def test_a_tokenizer_labels_the_ids_it_reads(gpt):
    tokenizer = byte_level()
    model = GPT(GPTConfig(vocab_size=280, context_length=64, dim=8, layers=1, heads=2))
    ids = tokenizer.encode("The keys, The").ids
    picture = show(model, ids, words=tokenizer)
    labels = [label.get_text() for label in picture.figure.axes[0].get_xticklabels()]
    assert labels == ["The", "keys", ",", "␣", "The"]
    with refused(InputError, "tokenizer cannot label"):
        show(torch.nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), torch.randn(1, 5, 6), words=tokenizer)


# Players


def test_a_picture_of_several_epochs_is_a_player_on_a_page(spatial, tmp_path):
    epochs = [head_profiles(spatial)] * 3
    for picture in (draw_head_paths(epochs, [1]), show(epochs, layer=1)):
        page = picture.save(tmp_path / "heads.html").read_text(encoding="utf-8")
        assert page == animate_heads(epochs, layers=[1]).page
        assert 'class="player"' in page
    assert 'class="player"' not in show(epochs[:1]).save(tmp_path / "heads.html").read_text(encoding="utf-8")


def test_a_layer_whose_heads_changed_is_static_in_the_player_until_then(spatial):
    torch.manual_seed(1)
    fewer = SpatialTransformer(SpatialConfig(image=(5, 7), channels=1, patch=1, dim=4, layers=3, heads=2, hidden_dim=4))
    film = animate_heads([head_profiles(spatial), head_profiles(fewer), head_profiles(fewer)])
    assert "stands still" in film.caption
    assert film.page.count("<polyline") == 6
