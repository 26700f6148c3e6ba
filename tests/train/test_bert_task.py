"""Pre-training of BERT: the curve of Hugging Face's model, learning of every task, files, splitting of batches."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from twins import transformers

from regard.train import train
from regard.train.data import text
from regard.train.objectives import Corpus, Example
from regard.train.tasks.bert import BertRecipe, BertTask, PretrainingText
from regard.train.tasks.bert_batches import BertBatch

pytest.importorskip("tokenizers")

TEMPLATES = (
    ("The {} cat sees the {} bird.", ("red", "old", "big", "shy", "sad", "wet")),
    ("A {} ship sails over a {} sea.", ("fast", "blue", "long", "calm", "deep", "cold")),
)
SIZES: dict[str, Any] = {"length": 24, "dim": 64, "layers": 2, "heads": 4, "batch_size": 16, "learning_rate": 2e-3}


def write_sentences(template: int, count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    form, words = TEMPLATES[template]
    return [form.format(rng.choice(words), rng.choice(words)) for _ in range(count)]


@pytest.fixture(scope="module")
def templates() -> PretrainingText:
    """Two documents, each of one template: text of another document is always of the other template."""
    written = [[write_sentences(template, count, 2 * count + template) for template in (0, 1)] for count in (400, 100)]
    tokenizer = text.make_tokenizer("wordpiece", [" ".join(document) for document in written[0]], 200)
    corpora = [
        Corpus.from_documents([[tokenizer.encode(sentence) for sentence in document] for document in part])
        for part in written
    ]
    rng = random.Random(0)
    pairs = []
    for _ in range(600):
        template, label = rng.randrange(2), rng.randrange(2)
        first, second = (write_sentences(t, 1, rng.getrandbits(30))[0] for t in (template, template ^ label))
        pairs.append(Example(tokenizer.encode(first), tokenizer.encode(second), label))
    return PretrainingText(tokenizer, *corpora, "0" * 64, pairs[:500], pairs[500:], ("same", "other"))


def unpack(batch: BertBatch) -> dict[str, torch.Tensor]:
    """A packed batch as Hugging Face takes it: padded rows, labels of the tokens and of the pairs."""
    packed = batch.sequences
    tokens, segments, positions = (
        getattr(packed, name).flatten()[packed.places] for name in ("tokens", "segments", "positions")
    )
    flat = torch.full((packed.tokens.numel(),), -100)
    flat[batch.targets["mlm"][0]] = batch.targets["mlm"][1]
    starts = [*(positions == 0).nonzero().flatten().tolist(), len(tokens)]
    rows = [slice(start, end) for start, end in itertools.pairwise(starts)]
    columns = {"input_ids": tokens, "token_type_ids": segments, "labels": flat[packed.places]}
    made = {
        name: torch.nn.utils.rnn.pad_sequence(
            [values[row] for row in rows], batch_first=True, padding_value=-100 if name == "labels" else 0
        )
        for name, values in columns.items()
    }
    made["attention_mask"] = torch.nn.utils.rnn.pad_sequence(
        [torch.ones(row.stop - row.start, dtype=torch.long) for row in rows], batch_first=True
    )
    return made


def test_50_steps_have_the_losses_of_hugging_faces_bert_trained_by_a_plain_loop(templates, tmp_path: Path):
    hugging = transformers()
    changes = {"dim": 16, "length": 48, "batch_size": 6, "weight_decay": 0.1, "dropout": 0.0, "precision": "float64"}
    recipe = BertRecipe(
        **SIZES | changes, short=0.5, steps=50, warmup_steps=10, log_every=1, eval_every=50, eval_batches=1
    )
    task = BertTask(recipe, templates)
    torch.manual_seed(recipe.seed)
    config, state = task.build_model().double().bert.to_checkpoint("huggingface")
    twin = hugging.BertForPreTraining(hugging.BertConfig(**config)).double().train()
    missing = twin.load_state_dict({name: tensor.clone() for name, tensor in state.items()}, strict=False)
    assert not missing.unexpected_keys
    assert all("position_ids" in name or "decoder" in name for name in missing.missing_keys)
    # Theirs gives the padding token no gradient, but a random token may be the padding token.
    twin.bert.embeddings.word_embeddings.padding_idx = None
    decayed, others = [], []
    for name, parameter in twin.named_parameters():
        (decayed if parameter.ndim > 1 and "position" not in name else others).append(parameter)
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.999), eps=1e-6)
    expected = []
    packed_rows = 0
    for step in range(50):
        (batch,) = task.make_batches(step)
        packed_rows += len(batch.sequences.tokens)
        rows = unpack(batch)
        made = twin(**{name: rows[name] for name in ("input_ids", "token_type_ids", "attention_mask")})
        labels, pairs = rows["labels"], batch.targets["nsp"][1]
        tokens = functional.cross_entropy(made.prediction_logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss = tokens + functional.cross_entropy(made.seq_relationship_logits, pairs)
        expected.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min((step + 1) / 10, (50 - step) / 40)
        optimizer.step()
    assert packed_rows < 6 * 50  # some rows hold several pairs
    train(recipe, tmp_path, data=templates, progress=False)
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    losses = torch.tensor([line["loss"] for line in lines], dtype=torch.float64)
    difference = (losses - torch.tensor(expected, dtype=torch.float64)).abs().max()
    # Losses of about 5 are rounded to 1e-15; Adam divides by a root of at least eps = 1e-6, so that a step enlarges
    # rounding errors by at most a thousand (the rate over eps), and of most parameters not at all.
    assert difference < 1e-11, difference
    assert losses[-1] < losses[0] - 0.5
