"""Language models and translation: the same losses as other people's models, and they learn."""

import collections
import dataclasses
import json
import math
import random
import warnings

import pytest
import torch
from agreement import refused
from plain import slow
from torch import nn
from torch.nn import functional

from regard.cli import main
from regard.errors import InputError
from regard.models import GPT, Transformer
from regard.patterns import Segments
from regard.train import GPTRecipe, TranslationRecipe, read_run, train
from regard.train.averaging import average_checkpoints
from regard.train.checkpoint import find_checkpoints
from regard.train.loop import Training
from regard.train.schedule import learning_rate_at
from regard.train.task import is_exempt
from regard.train.tasks.translate import score_translations

STEPS = 50
SMALL = GPTRecipe(
    steps=STEPS, batch_size=4, context_length=16, dim=16, layers=2, heads=2, bias=True, eval_every=25, eval_batches=2,
    warmup_steps=5, sample_tokens=8, log_every=1, precision="float64",
)  # fmt: skip


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A text of sentences that a context predicts much better than frequencies do."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = random.Random(1)
    lines = [f"{words.choice(['the cat', 'a dog'])} {words.choice(['sat', 'lay'])} on the mat." for _ in range(600)]
    path = tmp_path / "book.txt"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def pairs(tmp_path, monkeypatch):
    """A language of words and its translation: other words, in reverse order."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chance = random.Random(2)
    words = {"red": "rot", "blue": "blau", "dog": "hund", "cat": "katze", "big": "gross", "small": "klein"}
    path = tmp_path / "pairs.jsonl"
    with path.open("w") as file:
        for _ in range(1500):
            source = chance.choices(list(words), k=chance.randint(2, 5))
            target = [words[word] for word in reversed(source)]
            file.write(json.dumps({"source": " ".join(source), "target": " ".join(target)}) + "\n")
    return path


def optimize(twin, groups, task, forward):
    """Fifty steps of a plain loop with torch's own optimizer; the loss of every step."""
    recipe, losses = task.recipe, []
    betas = (recipe.beta1, recipe.beta2)
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=betas, eps=recipe.eps, foreach=False, fused=False)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(recipe, step, STEPS)
        (batch,) = task.make_batches(step)
        loss = forward(twin, batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), recipe.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def run_losses(task):
    """The same steps by our loop, and the state dict at their beginning."""
    with torch.random.fork_rng():
        training = Training(task, None)
        start = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
        losses = []
        for step in range(STEPS):
            losses.append(training._run_step(step)[0]["loss"])
    return losses, start


def test_fifty_steps_of_gpt_are_those_of_hugging_faces_gpt2(book):
    transformers = pytest.importorskip("transformers")
    task = SMALL.make_task(book)
    losses, start = run_losses(task)
    ours = GPT(SMALL.config(task.tokenizer.vocab_size)).double()
    ours.load_state_dict(start)
    config, state = ours.to_checkpoint("huggingface")
    names = set(transformers.GPT2Config().to_dict())
    chosen = {name: value for name, value in config.items() if name in names} | {"attn_implementation": "eager"}
    twin = transformers.GPT2LMHeadModel(transformers.GPT2Config(**chosen)).double().train()
    missing = twin.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    decayed = [p for n, p in twin.named_parameters() if p.ndim > 1 and "wpe" not in n]
    others = [p for n, p in twin.named_parameters() if p.ndim == 1 or "wpe" in n]
    groups = [{"params": decayed, "weight_decay": SMALL.weight_decay}, {"params": others, "weight_decay": 0.0}]
    theirs = optimize(twin, groups, task, lambda model, b: functional.cross_entropy(
        model(b.tokens).logits.flatten(0, 1), b.targets.flatten()))  # fmt: skip
    assert losses == pytest.approx(theirs, rel=1e-9)
    assert losses[-1] < losses[0]


def test_fifty_steps_of_the_transformer_are_those_of_torchs(pairs):
    recipe = TranslationRecipe(
        steps=STEPS, vocab_size=300, tokens_per_batch=64, dim=16, layers=2, heads=2, hidden_dim=32, dropout=0.0,
        order="pre", warmup_steps=20, precision="float64", eval_pairs=0, weight_decay=0.01,
    )  # fmt: skip
    task = recipe.make_task(pairs)
    losses, start = run_losses(task)
    ours = Transformer(recipe.config(task.tokenizer.vocab_size, task.end)).double()
    ours.load_state_dict(start)
    _, state = ours.to_checkpoint("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # norms before each part are not on torch's fast path
        twin = nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True, norm_first=True).double()
    table = nn.Parameter(state.pop("embedding.weight").clone())
    twin.load_state_dict({name: tensor for name, tensor in state.items() if name in twin.state_dict()})
    twin.register_parameter("table", table)
    angles = torch.arange(64).double()[:, None] / 10000 ** (torch.arange(0, 16, 2).double() / 16)
    places = torch.stack((angles.sin(), angles.cos()), -1).flatten(1)

    def forward(model, batch):
        embedded = [model.table[t] * 4 + places[: t.shape[1]] for t in (batch.source, batch.target)]
        hidden = [
            torch.arange(t.shape[1]) >= lengths[:, None]
            for t, lengths in ((batch.source, batch.source_lengths), (batch.target, batch.target_lengths))
        ]
        causal = torch.ones(batch.target.shape[1], batch.target.shape[1]).triu(1).bool()
        made = model(
            *embedded, tgt_mask=causal, src_key_padding_mask=hidden[0], tgt_key_padding_mask=hidden[1],
            memory_key_padding_mask=hidden[0],
        )  # fmt: skip
        logits = made @ model.table.T
        return functional.cross_entropy(logits.flatten(0, 1), batch.next_tokens.flatten(), label_smoothing=0.1)

    groups = [
        {"params": [p for p in twin.parameters() if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in twin.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    theirs = optimize(twin, groups, task, forward)
    assert losses == pytest.approx(theirs, rel=1e-9)
    assert losses[-1] < losses[0]


# Learning


def entropy(text):
    counts = collections.Counter(text)
    return -sum(n / len(text) * math.log(n / len(text)) for n in counts.values())


@pytest.mark.parametrize("packing", ["windows", "documents"])
@pytest.mark.parametrize("tokenizer", ["characters", *slow("bytes", "bpe")])
def test_a_gpt_learns_more_than_frequencies(tokenizer, packing, book):
    """The entropy of single characters is the least loss of a model that sees no context."""
    recipe = dataclasses.replace(
        SMALL, tokenizer=tokenizer, packing=packing, steps=120, batch_size=8, dim=32, learning_rate=3e-3,
        precision="float32", vocab_size=280 if tokenizer == "bpe" else None, sample_tokens=0, eval_every=60,
    )  # fmt: skip
    run = train(recipe, data=book)
    bits = entropy(book.read_text()) / math.log(2)
    if tokenizer != "bpe":  # whose tokens are several bytes long
        assert run.evaluations[0].metrics["bits_per_byte"] > bits
    assert run.metrics["bits_per_byte"] < 0.6 * bits


def test_packed_documents_are_learned_apart(book, tmp_path):
    """The loss of packed documents is the mean over documents that are run alone."""
    task = dataclasses.replace(SMALL, packing="documents", context_length=64).make_task(book)
    (batch,) = task.make_batches(3)
    assert isinstance(batch.pattern, Segments)
    torch.manual_seed(0)
    model = task.build_model().double().eval()
    loss = task.compute_terms(model, batch)["loss"].item() / task.count_terms(batch)["loss"]
    packed = task.packed.make_batch(3)
    total = count = 0
    for row in range(len(packed.tokens)):
        for segment in range(int(packed.segment_ids[row].max()) + 1):
            tokens = packed.tokens[row][packed.segment_ids[row] == segment][None]
            if tokens.shape[1] > 1:
                logits = model(tokens[:, :-1])[0]
                total += functional.cross_entropy(logits, tokens[0, 1:], reduction="sum").item()
                count += tokens.shape[1] - 1
    assert count == task.count_terms(batch)["loss"]
    assert loss == pytest.approx(total / count, rel=1e-12)


@pytest.mark.slow
def test_a_translator_learns_and_its_checkpoints_are_averaged(pairs, tmp_path, capsys):
    recipe = TranslationRecipe(
        steps=300, vocab_size=290, tokens_per_batch=256, dim=32, layers=2, heads=2, hidden_dim=64, dropout=0.0,
        schedule="cosine", learning_rate=3e-3, warmup_steps=40, eval_every=100, eval_pairs=40, keep_checkpoints=3,
    )  # fmt: skip
    run = train(recipe, tmp_path / "run", data=pairs)
    # Without the source, each of a sentence's words is one of six: ln 6 nats for as many tokens as a word has.
    held = run.task.validation.targets
    tokens = sum(len(run.task.tokenizer.encode(text)) + 1 for text in held)
    assert run.metrics["loss"] < 0.6 * sum(len(text.split()) for text in held) * math.log(6) / tokens
    assert run.metrics["chrf"] > 60 > 30 > run.evaluations[0].metrics["chrf"]
    averaged = average_checkpoints(tmp_path / "run", Transformer)
    states = [Transformer.from_pretrained(place).state_dict() for place in find_checkpoints(tmp_path / "run")]
    assert len(states) == 3
    for name, tensor in averaged.state_dict().items():
        assert torch.allclose(tensor, torch.stack([state[name].double() for state in states]).mean(0).float())
    with refused(InputError, "not that many checkpoints", "3 checkpoints"):
        average_checkpoints(tmp_path / "run", Transformer, last=4)
    assert main(["translate", str(tmp_path / "run"), "red dog", "small blue cat", "--average"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    samples = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[-1])["samples"]
    assert "reference" in samples[0]


def test_bleu_is_sacrebleus():
    same = ["the cat sat on the mat"]
    assert score_translations(same, same) == {"bleu": pytest.approx(100), "chrf": pytest.approx(100)}
    assert score_translations(["a dog"], same)["bleu"] < 5


# Files and commands


@pytest.mark.parametrize("kind", ["gpt", *slow("translate")])
def test_a_text_run_stopped_at_every_step_ends_with_the_same_weights(kind, book, pairs, tmp_path):
    if kind == "gpt":
        recipe, data = dataclasses.replace(SMALL, steps=6, dropout=0.1, accumulation=2), book
    else:
        recipe, data = TranslationRecipe(
            steps=6, vocab_size=280, tokens_per_batch=64, dim=8, layers=1, heads=2, hidden_dim=8, eval_pairs=2,
            accumulation=2, ema_decay=0.5,
        ), pairs  # fmt: skip
    whole = train(recipe, data=data)
    while not (run := train(recipe, tmp_path / "run", data=data, minutes=0.0)).done:
        pass
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, run.model.state_dict()[name]), name
    assert read_run(tmp_path / "run", data=data).metrics == whole.metrics


def test_the_command_trains_and_continues_a_text(book, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = [
        "train",
        "gpt",
        str(book),
        "--steps",
        "20",
        "--eval-every",
        "10",
        "--dim",
        "16",
        "--layers",
        "1",
        "--no-laws",
    ]
    command += ["--heads", "2", "--context-length", "32", "--eval-batches", "2", "--folder", "run"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "step 20: loss" in err
    assert "gpt on book.txt: validation loss" in out
    page = (tmp_path / "run" / "report.html").read_text()
    assert all(
        word in page for word in ("training loss", "bits per byte", "After step 20:", "parameters", "context_length")
    )
    assert main(["generate", "run", "the ", "--max-new-tokens", "9", "--seed", "3"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("the ")
    assert len(first) == len("the ") + 9 + 1
    assert main(["generate", "run", "the ", "--max-new-tokens", "9", "--seed", "3"]) == 0
    assert capsys.readouterr().out == first
    assert main(["generate", "run", ""]) == 2
    assert "The prompt has no tokens" in capsys.readouterr().err
    (tmp_path / "mine.toml").write_text('kind = "gpt"\nlayers = 3\nsteps = 7\n')
    assert main([*command[:3], "--recipe", "mine.toml", "--layers", "1", "--dim", "16", "--heads", "2",
                 "--context-length", "16", "--folder", "other", "--eval-batches", "1"]) == 0  # fmt: skip
    assert (read_run("other").recipe.layers, read_run("other").recipe.steps) == (1, 7)
    assert main(["train", "vit", "--recipe", "mine.toml"]) == 2
    assert "another kind of model" in capsys.readouterr().err
    (tmp_path / "short.txt").write_text("a short text. " * 30)
    assert main(["train", "gpt", "short.txt", "--folder", "short"]) == 2
    assert "too short" in capsys.readouterr().err


def test_weight_decay_leaves_out_positions():
    assert is_exempt("positions.weight")
    assert is_exempt("blocks.0.attention.position.centre")
    assert not is_exempt("blocks.0.attention.output.weight")
