"""`regard show` on text: token ids, tokenizers, and captions of untrained weights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from twins import library, transformers

from regard import downloads
from regard.cli import main
from regard.models import GPT, GPTConfig

WORDS = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "the", "key", "##s", "to", "cabinet", "are", "on", "table"]
TEXT = "the keys to the cabinet"


def word_pieces(folder: Path) -> None:
    """The tokenizer of a BERT, which puts special tokens around a text."""
    tokenizers = library("tokenizers")
    vocab_size = {word: number for number, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab_size, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.add_special_tokens(WORDS[:4])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.enable_padding(length=64, pad_id=3, pad_token="[PAD]")
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A GPT of ours and a BERT of Hugging Face with a tokenizer, and a GPT without."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(vocab_size=len(WORDS), context_length=16, dim=8, layers=3, heads=2))
    for name in ("gpt", "mute"):
        gpt.save_pretrained(root / name)
    word_pieces(root / "gpt")
    hugging = transformers()
    sizes = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 8}
    config = hugging.BertConfig(vocab_size=len(WORDS), max_position_embeddings=16, **sizes)
    hugging.BertModel(config).save_pretrained(root / "bert")
    word_pieces(root / "bert")
    return root


def labels(svg: Path) -> list[str]:
    """The texts of a drawing: matplotlib writes each one down as a comment beside its outline."""
    return re.findall(r"<!-- (.*?) -->", svg.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_a_text_is_read_by_the_tokenizer_of_the_folder(folders, tmp_path, capsys, name):
    out = tmp_path / "text.svg"
    words = ["show", str(folders / name), "--text", TEXT, "--layer", "2", "--head", "1", "-o", str(out)]
    assert main(words) == 0
    drawn = labels(out)
    for label in ("[CLS]", "the", "key", "s", "to", "cabinet", "[SEP]", "layer 2", "head 1"):
        assert label in drawn
    assert "[PAD]" not in drawn
    assert "random" not in capsys.readouterr().out
    assert main([*words, "--token", "3"]) == 0
    assert "token 3 's'" in capsys.readouterr().out


def test_a_file_of_weights_finds_the_tokenizer_beside_it(folders, tmp_path):
    file = folders / "gpt" / "model.safetensors"
    assert file.is_file()
    assert main(["show", str(file), "--text", TEXT, "-o", str(tmp_path / "text.svg")]) == 0


@pytest.mark.parametrize(("package", "file"), [("smollm2", ""), ("minilm", "")])
@pytest.mark.slow
def test_real_models_read_a_text(tmp_path, package, file):
    found = downloads.find(package)
    if found is None:
        pytest.skip(f"{package} is not here: python -m regard.downloads {package}")
    out = tmp_path / "text.svg"
    assert main(["show", str(found), "--text", "The keys to the cabinet", "--layer", "2", "-o", str(out)]) == 0
    drawn = [label.lower() for label in labels(out)]
    assert {"the", "keys", "to", "cabinet", "layer 2"} <= set(drawn)
    assert not any("ġ" in label for label in drawn)


def refused(capsys, words: list[str], *parts: str) -> None:
    assert main(["show", *words]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "\n  asked " in said or "\n  found " in said, said
    for part in ("\n  because ", "\n  instead ", *parts):
        assert part in said, said


def test_a_text_without_a_tokenizer_is_refused(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    refused(capsys, [str(folders / "mute"), "--text", TEXT], "needs a tokenizer", "no tokenizer in")
    refused(capsys, [str(folders / "mute" / "model.safetensors"), "--text", TEXT], "needs a tokenizer")
    refused(capsys, ["transformers:GPT2Model", "--text", TEXT], "needs a tokenizer", "--ids")
    refused(capsys, ["no/such/folder", "--text", TEXT], "needs a tokenizer")
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "model.safetensors"):
        (broken / name).write_bytes((folders / "mute" / name).read_bytes())
    (broken / "tokenizer.json").write_text("{}")
    refused(capsys, [str(broken), "--text", TEXT], "tokenizer.json cannot be read")
    (broken / "tokenizer.json").unlink()
    (broken / "vocab.txt").write_text("a\nb\n")
    refused(capsys, [str(broken), "--text", TEXT], "needs a tokenizer", "vocab.txt")


def test_texts_that_a_model_cannot_read_are_refused(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    refused(capsys, [str(folders / "gpt"), "--text", "the " * 20], "too long", "22 tokens", "16")
    refused(capsys, ["timm:vit_tiny_patch16_224(img_size=32)", "--ids", "1,2,3"], "cannot read this input")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("ids", "parts"),
    [
        ("1,2,99999999", ("no token 99999999", "vocabulary of")),
        ("1,-2,3", ("no token -2",)),
        ("1,two,3", ("'1,two,3' is not a list of integers",)),
        ("", ("is not a list of integers", "it is empty")),
        ("1,,3", ("is not a list of integers",)),
        ("1.5", ("is not a list of integers",)),
        ("99999999999999999999999", ("is not a list of integers", "more than 64 bits")),
        (",".join(["1"] * 5000), ("too long", "5,000 tokens")),
    ],
)
@pytest.mark.parametrize("target", ["ours", "transformers:GPT2Model", "transformers:BertModel"])
def test_ids_that_are_no_tokens_are_refused(folders, tmp_path, monkeypatch, capsys, target, ids, parts):
    monkeypatch.chdir(tmp_path)
    refused(capsys, [str(folders / "gpt") if target == "ours" else target, f"--ids={ids}"], *parts)
    assert list(tmp_path.iterdir()) == []


def test_indices_of_the_command_are_those_of_the_picture(folders, tmp_path):
    out = tmp_path / "heads.svg"
    for layer, head in ((0, 1), (2, 0)):
        words = ["--ids", "5,3,8", "--layer", str(layer), "--head", str(head), "--token", "2", "-o", str(out)]
        assert main(["show", str(folders / "gpt"), *words]) == 0
        drawn = labels(out)
        assert [label for label in drawn if label.startswith(("layer", "head"))] == [f"layer {layer}", f"head {head}"]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("transformers:GPT2Model", ["--ids", "5,3,8"]),
        ("timm:vit_tiny_patch16_224(img_size=32)", ["--image", "image.png"]),
        ("regard.layers:MultiHeadAttention(6, 2)", None),
    ],
)
def test_untrained_weights_are_labelled_random(tmp_path, monkeypatch, capsys, target, words):
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (31, 17), (10, 200, 30)).save("image.png")
    if words is None:
        from regard.cli.show import _is_untrained

        assert _is_untrained(target)
        return
    for out in ("a.svg", "a.html"):
        assert main(["show", target, *words, "--layer", "0", "-o", out]) == 0
        assert "Random weights (not trained)." in capsys.readouterr().out
        assert "andom weights (not trained)" in Path(out).read_text(encoding="utf-8")
    assert "random weights (not trained)" in labels(Path("a.svg"))


def test_loaded_weights_are_not_called_random(folders, tmp_path, capsys):
    for target in ("gpt", "bert"):
        out = tmp_path / "a.svg"
        assert main(["show", str(folders / target), "--ids", "5,3,8", "-o", str(out)]) == 0
        assert "andom" not in capsys.readouterr().out + out.read_text(encoding="utf-8")
