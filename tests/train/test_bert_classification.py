"""Classification of texts by a BERT, from scratch and from weights."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from regard import downloads
from regard.errors import ConfigError, InputError
from regard.models import Bert, BertForClassification
from regard.train import BertRecipe, TextClassificationRecipe, train
from regard.train.data import text
from regard.train.tasks.text_classification import find_weights

pytest.importorskip("tokenizers")

WORDS = {"cats": "purr meow claw fur", "ships": "sail mast deck keel", "tea": "leaf cup brew pot"}
SIZES: dict[str, Any] = {"length": 16, "dim": 32, "layers": 1, "heads": 2, "vocab_size": 150, "batch_size": 16}


def make_texts(count: int = 150) -> text.LabelledTexts:
    """Texts with two words of their class among eight that say nothing."""
    rng = random.Random(0)
    names, texts, labels = tuple(WORDS), [], []
    for number in range(count):
        label = number % len(names)
        words = rng.choices(["some", "word", "that", "has", "no", "meaning", "here", "at", "all"], k=6)
        words += rng.choices(WORDS[names[label]].split(), k=2)
        rng.shuffle(words)
        texts.append(" ".join(words))
        labels.append(label)
    return text.LabelledTexts("made", texts, labels, names)


def chance_bound(chance: float, examples: int) -> float:
    """An accuracy that guessing exceeds less than once in three million times."""
    return chance + 5 * math.sqrt(chance * (1 - chance) / examples)


@pytest.mark.parametrize("pooling", ["mean", "first", "pooled"])
def test_a_small_bert_learns_to_classify(pooling, tmp_path: Path):
    recipe = TextClassificationRecipe(
        **SIZES, pooling=pooling, epochs=12, learning_rate=2e-3, dropout=0.0, eval_every=90
    )
    run = train(recipe, tmp_path, data=make_texts(), progress=False)
    assert abs(run.evaluations[0].metrics["loss"] - math.log(3)) < 0.1
    assert run.evaluations[-1].metrics["accuracy"] > chance_bound(1 / 3, 30)
    read = BertForClassification.from_pretrained(tmp_path / "model")
    state = run.model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in read.state_dict().items())
    assert read.config.classes == ("cats", "ships", "tea")
    tokenizer = text.read_tokenizer(tmp_path / "model")
    tokens = [tokenizer.cls_token_id, *tokenizer.encode("here brew word leaf at all"), tokenizer.sep_token_id]
    with torch.no_grad():
        assert read.config.classes[read(torch.tensor([tokens])).argmax()] == "tea"
    encoder = Bert.from_pretrained(tmp_path / "model")
    assert all(torch.equal(tensor, state[f"bert.{name}"]) for name, tensor in encoder.state_dict().items())


def test_padding_does_not_change_a_class():
    torch.manual_seed(0)
    task = TextClassificationRecipe(**SIZES).make_task(make_texts(60))
    model = task.build_model().double().eval()
    tokens, lengths = torch.randint(5, 30, (2, 11)), [7, 11]
    with torch.no_grad():
        together = model(tokens, lengths=lengths)
        padded_left = model(tokens, attention_mask=torch.tensor([[0] * 4 + [1] * 7, [1] * 11]))
        alone = model(tokens[:1, :7])
        right = model.bert.hidden(tokens)[1].mean(0)
    torch.testing.assert_close(together[:1], alone, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(together[1], model.classifier(right), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(padded_left[1], together[1], rtol=1e-12, atol=1e-14)
    assert not torch.allclose(padded_left[0], together[0])


def test_a_head_on_the_weights_of_a_pre_trained_run(tmp_path: Path):
    documents = [" ".join(f"{each.capitalize()}." for each in make_texts(40).texts[number::8]) for number in range(8)]
    sizes = {name: SIZES[name] for name in ("dim", "layers", "heads", "vocab_size")}
    pretraining = BertRecipe(**sizes, steps=2, length=20, batch_size=8, eval_batches=1)
    train(pretraining, tmp_path / "bert", data=documents, progress=False)
    recipe = TextClassificationRecipe.on("made", weights=str(tmp_path / "bert"), length=99, pooling="pooled")
    assert (recipe.learning_rate, recipe.epochs) == (5e-5, 3)
    task = recipe.make_task(make_texts())
    assert task.length == 20
    model = task.build_model()
    encoder = Bert.from_pretrained(find_weights(str(tmp_path / "bert")))
    kept = encoder.state_dict()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.bert.state_dict().items())
    assert model.bert.masked_tokens is None
    assert model.config.classes == ("cats", "ships", "tea")
    assert task.digest != TextClassificationRecipe(**SIZES).make_task(make_texts()).digest
    run = train(recipe, data=make_texts(), progress=False)
    assert math.isfinite(run.evaluations[-1].metrics["loss"])


def test_long_texts_are_cut_into_passages_and_classified_by_all_of_them():
    long = text.LabelledTexts(
        "long", [" ".join(["word"] * (10 * number + 3)) for number in range(20)], [0, 1] * 10, ("a", "b")
    )
    recipe = TextClassificationRecipe(**SIZES | {"batch_size": 4}, passages=3, held_out=0.5)
    task = recipe.make_task(long)
    lengths = [len(task.tokenizer.encode(each)) for each in long.split(validation=0.5, test=0).train.texts]
    assert task.train.texts.bincount().tolist() == [min(3, math.ceil(length / 14)) for length in lengths]
    assert int(task.train.lengths.max()) == 16
    metrics = task.evaluate(task.build_model().eval())
    assert 0 <= metrics["accuracy"] <= 1
    assert abs(metrics["loss"] - math.log(2)) < 0.1


def test_a_file_of_the_user(tmp_path: Path):
    made = make_texts(60)
    lines = [{"text": each, "label": made.names[label]} for each, label in zip(made.texts, made.labels, strict=True)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    recipe = TextClassificationRecipe.on(str(tmp_path / "texts.jsonl"), **SIZES, steps=1)
    assert sorted(recipe.make_task().data.names) == ["cats", "ships", "tea"]
    assert recipe.make_task().steps_per_epoch == 3


def test_what_cannot_be_classified_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"held_out=0.2"):
        TextClassificationRecipe(held_out=0.0)
    with pytest.raises(InputError, match="batch is larger"):
        TextClassificationRecipe(**SIZES | {"batch_size": 100}).make_task(make_texts(60))
    with pytest.raises(InputError, match="There are no weights 'nonsense'"):
        find_weights("nonsense")
    with pytest.raises(ConfigError, match="no special tokens"):
        TextClassificationRecipe(**SIZES, tokenizer="bytes").make_task(make_texts(60))


@pytest.mark.slow
@pytest.mark.skipif(downloads.find("minilm") is None, reason="minilm is not downloaded")
def test_minilms_weights_and_tokenizer_begin_a_classification():
    recipe = TextClassificationRecipe.on(
        "made", weights="minilm", length=16, batch_size=12, steps=8, learning_rate=3e-4
    )
    data = make_texts(60)
    run = train(recipe, data=data, progress=False)
    assert run.model.config.dim == 384
    assert run.evaluations[-1].metrics["accuracy"] > chance_bound(1 / 3, 30)
