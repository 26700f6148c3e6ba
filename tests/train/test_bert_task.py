"""Pre-training of BERT: the curve of Hugging Face's model, learning of every task, files, splitting of batches."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from twins import transformers

from regard.cli import main
from regard.errors import ConfigError, InputError
from regard.models import Bert, BertForPretraining
from regard.train import read_recipe, read_run, train
from regard.train.data import text
from regard.train.objectives import Corpus, Example
from regard.train.tasks.bert import TASKS, BertRecipe, BertTask, PretrainingText, encode_sequences
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


# Learning


@pytest.fixture(scope="module")
def alternating(templates) -> PretrainingText:
    """Sentences of the two templates in turn."""
    tokenizer = templates.tokenizer
    corpora = []
    for count in (300, 100):
        first, second = (write_sentences(template, count, 5 * count + template) for template in (0, 1))
        sentences = [tokenizer.encode(sentence) for pair in zip(first, second, strict=True) for sentence in pair]
        corpora.append(Corpus.from_documents([sentences]))
    return PretrainingText(tokenizer, *corpora, "1" * 64)


def chance_bound(chance: float, examples: int) -> float:
    """An accuracy that guessing exceeds less than once in three million times."""
    return chance + 5 * math.sqrt(chance * (1 - chance) / examples)


@pytest.mark.slow
def test_a_small_bert_learns_next_sentences_and_masked_tokens_of_two_templates(templates):
    recipe = BertRecipe(**SIZES, steps=170, dropout=0.0, eval_every=170, eval_batches=25)
    run = train(recipe, data=templates, progress=False)
    first, last = run.evaluations[0].metrics, run.evaluations[-1].metrics
    vocab_size = templates.tokenizer.vocab_size
    assert abs(first["mlm_loss"] - math.log(vocab_size)) < 0.1
    assert abs(first["nsp_loss"] - math.log(2)) < 0.1
    assert last["nsp_accuracy"] >= 0.95
    assert last["mlm_loss"] < 0.5 * math.log(vocab_size)
    assert last["mlm_perplexity"] == pytest.approx(math.exp(last["mlm_loss"]))
    assert last["loss"] == pytest.approx(last["mlm_loss"] + last["nsp_loss"])


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        ("mlm", {"steps": 40, "whole_words": True}),
        pytest.param("sop", {"steps": 40, "length": 19, "short": 0.0}, marks=pytest.mark.slow),
        pytest.param("inversion", {"steps": 100}, marks=pytest.mark.slow),
        pytest.param("entailment", {"steps": 150, "entailment": "pairs.tsv"}, marks=pytest.mark.slow),
        pytest.param("rtd", {"steps": 130, "share": 0.3, "learning_rate": 5e-4}, marks=pytest.mark.slow),
        ("infonce", {"steps": 40, "views": "adjacent"}),
        pytest.param("infonce", {"steps": 40, "views": "dropout", "dropout": 0.1}, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else value.get("views", ""),
)
def test_every_task_learns(templates, alternating, task: str, changes: dict[str, Any]):
    recipe = BertRecipe(tasks=(task,), **SIZES | {"dropout": 0.0, "eval_every": 1000, "eval_batches": 25} | changes)
    data = alternating if task == "sop" else templates
    run = train(recipe, data=data, progress=False)
    batches = min(25, run.task.held_out.per_epoch)
    targets = sum(len(batch.targets[task][0]) for step in range(batches) for batch in run.task.held_out.make(step))
    last = run.evaluations[-1].metrics
    if task == "infonce":
        guess = math.log(recipe.batch_size // 2)  # the least expected loss without knowledge of the texts
        assert last["infonce_loss"] < guess - 0.3
    elif task == "mlm":
        frequencies = torch.bincount(torch.from_numpy(data.train.tokens).long()).double()
        assert last["mlm_accuracy"] > chance_bound((frequencies.max() / frequencies.sum()).item(), targets)
    elif task == "rtd":
        replaced = 0.2 * targets  # less than their expected number
        assert last["rtd_accuracy"] > chance_bound(0.5, int(replaced))
    else:
        assert last[f"{task}_accuracy"] > chance_bound(0.5, targets)


def test_first_losses_with_berts_vocabulary_are_those_of_even_guesses(templates):
    """ln 30,522 = 10.326 for masked tokens, ln 2 for every pair of classes."""
    recipe = BertRecipe(
        tasks=("mlm", "nsp", "sop", "inversion", "rtd"), **SIZES | {"dim": 128, "batch_size": 64}, dropout=0.0
    )
    task = BertTask(recipe, templates)
    torch.manual_seed(0)
    model = BertForPretraining(recipe.config(30_522)).eval()
    (batch,) = task.make_batches(0)
    counts = task.count_terms(batch)
    with torch.no_grad():
        losses = {name: term.item() / counts[name] for name, term in task.compute_terms(model, batch).items()}
    assert abs(losses.pop("mlm") - 10.326) < 0.1
    assert losses == {name: pytest.approx(math.log(2), abs=0.1) for name in ("nsp", "sop", "inversion", "rtd")}


# Batches


def all_tasks(**changes: Any) -> BertRecipe:
    fields = SIZES | {"dim": 16, "heads": 2, "batch_size": 26, "entailment": "pairs.tsv", "eval_batches": 1}
    return BertRecipe(**fields | {"tasks": TASKS} | changes)


def test_batches_follow_from_the_seed_and_the_step(templates):
    first, again, other = (BertTask(all_tasks(seed=seed), templates) for seed in (0, 0, 1))
    for step in (0, 3, 40):
        (one,), (two,), (three,) = (task.make_batches(step) for task in (first, again, other))
        assert torch.equal(one.sequences.tokens, two.sequences.tokens)
        for name, (places, targets) in one.targets.items():
            assert torch.equal(places, two.targets[name][0])
            assert torch.equal(targets, two.targets[name][1])
        assert one.sequences.tokens.shape != three.sequences.tokens.shape or not torch.equal(
            one.sequences.tokens, three.sequences.tokens
        )


def test_a_batch_has_its_share_of_every_task_and_balanced_inversions(templates):
    task = BertTask(all_tasks(), templates)
    (batch,) = task.make_batches(5)
    counts = task.count_terms(batch)
    assert set(counts) == set(TASKS)
    # 26 sequences for six streams: masked tokens are those of the pairs of nsp and sop.
    assert {name: counts[name] for name in ("nsp", "sop", "inversion", "entailment", "infonce")} == {
        "nsp": 5, "sop": 5, "inversion": 4, "entailment": 4, "infonce": 2,
    }  # fmt: skip
    assert batch.targets["inversion"][1].sum() == 2
    assert task.count_units(batch) == len(batch.sequences.places)
    assert "nsp" in task.describe_batch(5)


def test_the_gradient_does_not_depend_on_the_number_of_micro_batches(templates):
    tasks = tuple(task for task in TASKS if task != "infonce")
    gradients = []
    for accumulation in (1, 3):
        recipe = all_tasks(tasks=tasks, accumulation=accumulation, dropout=0.0)
        task = BertTask(recipe, templates)
        torch.manual_seed(0)
        model = task.build_model().double()
        batches = task.make_batches(2)
        assert len(batches) == accumulation
        counts = {name: sum(task.count_terms(batch)[name] for batch in batches) for name in tasks}
        for batch in batches:
            sum(term / counts[name] for name, term in task.compute_terms(model, batch).items()).backward()
        gradients.append(torch.cat([each.grad.flatten() for each in model.parameters()]))
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


def test_packed_sequences_do_not_see_each_other(templates):
    """The hidden states of a sequence are the same alone and packed."""
    task = BertTask(all_tasks(tasks=("inversion", "mlm"), length=64, entailment=None), templates)
    model = task.build_model().double().eval()
    (batch,) = task.make_batches(0)
    packed = batch.sequences
    assert len(packed.tokens) < len(packed.firsts)
    hidden = model(packed.tokens, packed.segments, positions=packed.positions, pattern=packed.pattern).flatten(0, 1)
    flat = (packed.positions.flatten()[packed.places] == 0).nonzero().flatten().tolist()
    for start, end in itertools.pairwise([*flat, len(packed.places)]):
        own = packed.places[start:end]
        alone = model(packed.tokens.flatten()[own][None], packed.segments.flatten()[own][None])[0]
        torch.testing.assert_close(hidden[own], alone, rtol=1e-10, atol=1e-12)


# Files


def test_a_run_with_every_task_is_saved_and_read_bit_for_bit(templates, tmp_path: Path):
    recipe = all_tasks(steps=3, eval_every=3)
    run = train(recipe, tmp_path, data=templates, progress=False)
    state = run.model.state_dict()
    names = {name.split(".")[0] for name in state}
    assert names == {"bert", "pair_heads", "replaced_tokens", "projection"}
    read = BertForPretraining.from_pretrained(tmp_path / "model")
    assert read.config == run.model.config
    assert all(torch.equal(tensor, state[name]) for name, tensor in read.state_dict().items())
    assert read.bert.masked_tokens.output.weight is read.bert.embedding.weight
    encoder = Bert.from_pretrained(tmp_path / "model")
    assert encoder.config.masked_tokens
    assert encoder.config.next_sentence
    assert all(torch.equal(tensor, state[f"bert.{name}"]) for name, tensor in encoder.state_dict().items())
    encoder.save_pretrained(tmp_path / "theirs", layout="huggingface")
    theirs = Bert.from_pretrained(tmp_path / "theirs").state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in encoder.state_dict().items())
    again = read_run(tmp_path, data=templates)
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.model.state_dict().items())
    assert text.read_tokenizer(tmp_path / "model").encode("The red cat") == templates.tokenizer.encode("The red cat")
    assert read_recipe(recipe.to_json()) == recipe
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert any("[MASK]" in sample for line in samples for sample in line["samples"])


def test_a_resumed_run_is_bit_identical(templates, tmp_path: Path):
    recipe = all_tasks(steps=4, eval_every=2)
    whole = train(recipe, data=templates, progress=False).model.state_dict()
    train(recipe, tmp_path, data=templates, progress=False, minutes=0)  # stops after the first step
    resumed = train(recipe, tmp_path, data=templates, progress=False).model.state_dict()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in resumed.items())


def test_text_of_the_user_and_pairs_of_the_user(tmp_path: Path):
    documents = [" ".join(write_sentences(number % 2, 30, number)) for number in range(12)]
    pairs = [f"{a}\t{b}\t{'yes' if n % 2 else 'no'}" for n, (a, b) in enumerate(
        zip(write_sentences(0, 40, 1), write_sentences(1, 40, 2), strict=True))]  # fmt: skip
    (tmp_path / "pairs.tsv").write_text("\n".join(pairs))
    recipe = all_tasks(entailment=str(tmp_path / "pairs.tsv"), vocab_size=150, steps=1)
    task = recipe.make_task(documents)
    assert task.data.classes == ("no", "yes")
    assert len(task.data.train) + len(task.data.validation) == 12
    assert len(task.data.validation) == 2
    assert len(task.data.train_pairs) == 36
    assert task.steps_per_epoch > 1
    metrics = train(recipe, data=documents, progress=False).evaluations[-1].metrics
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tasks": ()}, "the tasks are some of mlm, nsp"),
        ({"tasks": ("mlm", "clm")}, "the tasks are some of mlm, nsp"),
        ({"tasks": ("mlm", "mlm")}, "each once"),
        ({"tasks": ("mlm", "entailment")}, "labels of entailment cannot be made"),
        ({"entailment": "pairs.tsv"}, "labels of entailment cannot be made"),
        ({"tasks": ("infonce",), "accumulation": 2}, "accumulation=1"),
        ({"tasks": ("infonce",), "dropout": 0.0}, "dropout=0.1"),
        ({"tasks": ("mlm", "sop", "rtd"), "batch_size": 4}, "batch_size=12"),
        ({"share": 0.0}, "share=0.15"),
        ({"temperature": 0.0}, "temperature=0.05"),
        ({"length": 4}, "length=64"),
        ({"short": 1.5}, "short=0.1"),
        ({"initial": 0.0}, "initial=None"),
    ],
)
def test_recipes_that_cannot_be_trained_are_refused(fields: dict[str, Any], words: str):
    with pytest.raises(ConfigError) as caught:
        BertRecipe(**fields)
    assert words in str(caught.value)


def test_a_tokenizer_without_special_tokens_is_refused():
    with pytest.raises(ConfigError, match="no token for cls, sep, pad, mask"):
        BertRecipe(tokenizer="bytes").make_task(["One. Two.", "Three. Four.", "Five.", "Six. Seven."])


def test_next_sentences_need_documents_and_blank_lines_may_separate_them(tmp_path: Path):
    paragraphs = [" ".join(write_sentences(number % 2, 12, number)) for number in range(6)]
    (tmp_path / "text.txt").write_text("\n\n".join(paragraphs))
    sizes = SIZES | {"dim": 16, "vocab_size": 150}
    with pytest.raises(InputError, match="needs four documents") as caught:
        BertRecipe(str(tmp_path / "text.txt"), **sizes).make_task()
    assert 'separator="blank_line"' in str(caught.value)
    task = BertRecipe(str(tmp_path / "text.txt"), separator="blank_line", **sizes).make_task()
    assert (len(task.data.train), len(task.data.validation)) == (4, 2)
    single = BertRecipe(str(tmp_path / "text.txt"), tasks=("mlm", "sop"), short=0.0, **sizes).make_task()
    assert len(single.data.train) == len(single.data.validation) == 1


def test_the_published_run():
    recipe = BertRecipe.paper()
    assert (recipe.learning_rate, recipe.beta1, recipe.beta2, recipe.weight_decay) == (1e-4, 0.9, 0.999, 0.01)
    assert (recipe.warmup_steps, recipe.steps, recipe.schedule, recipe.dropout) == (10_000, 1_000_000, "linear", 0.1)
    assert recipe.batch_size * recipe.length == 256 * 512
    with torch.device("meta"):
        whole = BertForPretraining(recipe.config(30_522))
    assert sum(each.numel() for each in whole.parameters()) == 110_106_428


def test_the_command_trains_on_a_text_and_its_weights_begin_a_classification(tmp_path: Path, capsys):
    lines = [json.dumps({"text": " ".join(write_sentences(number % 2, 20, number))}) for number in range(12)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    sizes = ["--vocab-size", "150", "--dim", "16", "--layers", "1", "--batch-size", "8", "--eval-batches", "1"]
    command = [
        "train",
        "bert",
        str(tmp_path / "texts.jsonl"),
        "--tasks",
        "mlm,sop",
        "--length",
        "24",
        "--steps",
        "2",
        *sizes,
    ]
    assert main([*command, "--folder", str(tmp_path / "bert")]) == 0
    assert "mlm" in capsys.readouterr().out
    run = read_run(tmp_path / "bert")
    assert run.recipe.tasks == ("mlm", "sop")
    rows = [
        json.dumps({"text": write_sentences(number % 2, 1, number)[0], "label": "ab"[number % 2]})
        for number in range(40)
    ]
    (tmp_path / "labelled.jsonl").write_text("\n".join(rows))
    command = [
        "train",
        "classify",
        str(tmp_path / "labelled.jsonl"),
        "--weights",
        str(tmp_path / "bert"),
        "--steps",
        "2",
    ]
    assert main([*command, "--batch-size", "8", "--folder", str(tmp_path / "classes")]) == 0
    assert "accuracy" in capsys.readouterr().out
    assert read_run(tmp_path / "classes").model.config.dim == 16


def test_label_smoothing_is_that_of_every_task(templates):
    """With K classes the loss is (1 - s) times the plain one plus s times the mean over classes."""
    tasks = tuple(task for task in TASKS if task != "entailment")
    sizes = SIZES | {"dim": 8, "batch_size": 24, "precision": "float64", "eval_batches": 1}
    plain, smoothed, even = (
        BertTask(BertRecipe(**sizes, tasks=tasks, label_smoothing=share), templates) for share in (0.0, 0.25, 0.5)
    )
    torch.manual_seed(0)
    model = plain.build_model().double().eval()
    (batch,) = plain.make_batches(0)
    losses = [task.compute_terms(model, batch) for task in (plain, smoothed, even)]
    for task in tasks:
        first, between, last = (found[task].item() for found in losses)
        uniform = first + 2 * (last - first)  # the loss is linear in the share
        assert between == pytest.approx(0.75 * first + 0.25 * uniform, rel=1e-9)
        assert abs(between - first) > 1e-6 * first
    assert plain.evaluate(model) == smoothed.evaluate(model)
    places, targets = batch.targets["mlm"]
    logs = model.predict_tokens(encode_sequences(model, batch.sequences)[places]).log_softmax(-1)
    expected = 0.75 * logs[torch.arange(len(targets)), targets].sum() + 0.25 * logs.mean(-1).sum()
    assert losses[1]["mlm"].item() == pytest.approx(-expected.item(), rel=1e-12)
