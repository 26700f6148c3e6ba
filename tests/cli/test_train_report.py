"""The report page of a run: attention of chosen heads, laws, answers about heads; nothing from elsewhere."""

import json
import random
import re

import pytest
import torch

from regard.cli import main
from regard.cli.train_attention import draw_alignment, draw_attention, label_tokens
from regard.cli.train_heads import answer_questions
from regard.cli.train_laws import check_laws
from regard.cli.train_report import _draw
from regard.models import Transformer, TransformerConfig
from regard.train import read_run
from regard.train.data.text import make_tokenizer

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "old", "owls", "sleep"]
TINY = ["--layers", "1", "--dim", "8", "--heads", "2", "--steps", "4", "--eval-every", "2"]
IMAGES = ["--dim", "8", "--steps", "4", "--eval-every", "2", "--batch-size", "16"]
COMMANDS = {
    "gpt": ["gpt", "text.txt", *TINY, "--context-length", "16", "--eval-batches", "1", "--sample-tokens", "3"],
    "bert": ["bert", "text.txt", *TINY, "--separator", "blank_line", "--vocab-size", "240", "--eval-batches", "1"],
    "classify": ["classify", "labels.tsv", *TINY, "--vocab-size", "240", "--batch-size", "8"],
    "translate": ["translate", "pairs.tsv", *TINY, "--vocab-size", "300", "--hidden-dim", "8", "--eval-pairs", "2"],
    "vit": ["vit", *IMAGES, "--layers", "4", "--heads", "2"],
    "davit": ["davit", "--dims", "12,12", "--heads", "3,3", *IMAGES[2:]],
    "spatial": ["spatial", *IMAGES, "--layers", "2", "--heads", "5", "--hidden-dim", "8"],
    "resnet": ["resnet", "--width", "4", *IMAGES[2:]],
}
LAWS = {
    "gpt": {"causality", "cache", "padding", "batch-independence", "determinism"},
    "translate": {"causality", "cache", "padding", "batch-independence", "determinism"},
    "bert": {"padding", "batch-independence", "determinism"},
    "classify": {"padding", "batch-independence", "determinism"},
    "resnet": set(),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place, draw = tmp_path_factory.mktemp("reports"), random.Random(0)
    sentences = [" ".join(draw.choices(WORDS, k=draw.randint(4, 7))) for _ in range(240)]
    blocks = [". ".join(sentences[start : start + 6]) for start in range(0, 240, 6)]
    (place / "text.txt").write_text("\n\n".join(blocks))
    (place / "pairs.tsv").write_text("".join(f"{one}\t{' '.join(one.split()[::-1])}\n" for one in sentences))
    (place / "labels.tsv").write_text("".join(f"{number % 2}\t{one}\n" for number, one in enumerate(sentences)))
    return place


SLOW = ("gpt", "bert", "classify", "davit", "resnet", "translate", "vit")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind in SLOW else kind for kind in COMMANDS]
)
def test_the_report_has_attention_and_laws(kind, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    torch.set_num_threads(1)
    assert main(["train", *COMMANDS[kind], "--folder", kind, "--json", f"{kind}.json"]) == 0
    out = capsys.readouterr().out
    page = (folder / kind / "report.html").read_text()
    told = json.loads((folder / f"{kind}.json").read_text())
    assert not re.search(r"""(src|href)=["']?(https?:)?//|url\((?!#)|@import""", page)
    assert ('id="attention"' in page) == (kind != "resnet")
    if kind != "resnet":
        attention = page[page.index('id="attention"') :].split("</section>")[0]
        assert "<svg" in attention
        assert ("attends between channels, which has no weights" in attention) == (kind == "davit")
    assert ('id="heads"' in page) == (kind == "spatial")
    laws = LAWS.get(kind, {"batch-independence", "determinism"})
    assert set(told["laws"]) == laws
    for slug, verdict in told["laws"].items():
        assert verdict["verdict"] == "holds", slug
        assert verdict["cases"] > 0
        assert re.search(rf"{slug}.*holds.*{verdict['cases']}", page[page.index('id="laws"') :], re.DOTALL)
    assert ("laws: " in out) == bool(laws)
    assert bool(told["answers"]) == (kind == "spatial")


def test_the_laws_are_left_out_on_request(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(["train", *COMMANDS["gpt"], "--folder", "unchecked", "--no-laws"]) == 0
    assert "laws" not in capsys.readouterr().out
    assert 'id="laws"' not in (folder / "unchecked" / "report.html").read_text()


@pytest.mark.slow
def test_a_broken_model_is_reported(folder, monkeypatch):
    """The report of a GPT whose later tokens change earlier logits says so."""
    monkeypatch.chdir(folder)
    if not (folder / "gpt").exists():
        assert main(["train", *COMMANDS["gpt"], "--folder", "gpt", "--no-laws"]) == 0
    run = read_run(folder / "gpt")
    forward = type(run.model).forward

    def leak(self, tokens, **options):
        logits = forward(self, tokens, **options)
        return logits + logits[:, -1:].mean()

    monkeypatch.setattr(type(run.model), "forward", leak)
    verdicts = {verdict.slug: verdict.outcome for verdict in check_laws(run).verdicts}
    assert verdicts["causality"] == "broken"


def test_attention_is_drawn_of_the_first_middle_and_last_layer_on_the_validation_text(folder, monkeypatch):
    monkeypatch.chdir(folder)
    command = [word if word != "1" else "5" for word in COMMANDS["gpt"]]
    assert main(["train", *command, "--folder", "deep", "--no-laws"]) == 0
    run = read_run(folder / "deep")
    (picture,) = draw_attention(run)
    assert list(picture.data["layers"]) == ["blocks.0.attention", "blocks.2.attention", "blocks.4.attention"]
    weights = picture.data["layers"]["blocks.2.attention"]
    assert weights.shape == (2, 16, 16)
    assert weights.triu(1).abs().max() == 0
    assert answer_questions(run) == []


def test_curves_lie_at_the_steps_of_their_values(folder, monkeypatch):
    """Lines of steps 2, 4 and 6 of a run of 7 are not stretched over the whole axis; the evaluated part is named."""
    monkeypatch.chdir(folder)
    command = ["vit", *IMAGES, "--layers", "1", "--heads", "2", "--steps", "7", "--eval-every", "3", "--log-every", "2"]
    assert main(["train", *command, "--folder", "curves", "--no-laws"]) == 0
    page = (folder / "curves" / "report.html").read_text()
    found = [
        [point.split(",")[0] for point in line.split()] for line in re.findall(r'<polyline points="([^"]*)"', page)
    ]
    assert found == [["28.57", "57.14", "85.71"], *2 * [["0.00", "42.86", "85.71", "100.00"]]]
    assert "Accuracy on the test set." in page


def test_an_axis_of_accuracies_ends_at_100_percent_and_close_ends_differ():
    assert ">100%<" in str(_draw("accuracy", [(0, 1.0), (3, 1.0)], "accuracy", 3))
    close = str(_draw("loss", [(0, 3.3990), (3, 3.3989)], "loss", 3))
    assert ">3.399<" in close
    assert ">3.3989<" in close


def test_spaces_and_control_characters_of_tokens_can_be_seen():
    tokenizer = make_tokenizer("bytes")
    assert label_tokens(tokenizer, tokenizer.encode("a \nb\0")) == ["a", "·", "\\n", "b", "\\x00"]


def test_an_alignment_has_the_translation_in_rows_and_the_source_in_columns():
    """Only the cross-attention is drawn; its row is the token that is predicted there."""
    tokenizer = make_tokenizer("bpe", [" ".join(WORDS)] * 9, 300)
    torch.manual_seed(0)
    sizes = {"vocab_size": tokenizer.vocab_size, "dim": 8, "layers": 2, "heads": 2, "hidden_dim": 8}
    model = Transformer(TransformerConfig(start=tokenizer.eos_token_id, **sizes)).eval()
    source, target = "the quick fox", "sleep owls"
    picture = draw_alignment(model, tokenizer, source, target)
    rows, columns = ([*label_tokens(tokenizer, tokenizer.encode(text)), "(end)"] for text in (target, source))
    assert len(rows) != len(columns)
    panel = picture.figure.axes[0]
    assert [label.get_text() for label in panel.get_yticklabels()] == rows
    assert [label.get_text() for label in panel.get_xticklabels()] == columns
    assert [name.count("cross") for name in picture.data["layers"]] == [1, 1]
    for weights in picture.data["layers"].values():
        assert weights.shape == (2, len(rows), len(columns))
        assert torch.allclose(weights.sum(-1), torch.ones(2, len(rows)))
