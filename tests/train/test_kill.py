"""SIGKILL at random moments, and resumption: the final weights are bit-identical to those of an undisturbed run."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from regard.train import BertRecipe, GPTRecipe, TranslationRecipe, ViTRecipe, train
from regard.train.checkpoint import find_checkpoints

# Imports once; then forks a process for each line of its input, which trains, and prints its id and how it ended.
SERVER = """
import os, sys, torch
torch.set_num_threads(1)
import tokenizers, sacrebleu, regard.train.tasks
from regard.train import read_recipe, train
for _ in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            train(read_recipe(sys.argv[2]), sys.argv[1], progress=False)
            os._exit(0)
        finally:
            os._exit(1)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "old", "owls", "sleep"]
SMALL = {"layers": 1, "dim": 8, "heads": 2, "dropout": 0.1, "eval_every": 2, "keep_checkpoints": 2}


def write_texts(folder):
    """Documents and sentence pairs of random words."""
    draw = random.Random(0)
    sentences = [" ".join(draw.choices(WORDS, k=draw.randint(3, 7))) for _ in range(240)]
    blocks = ["\n".join(f"{sentence}." for sentence in sentences[start : start + 6]) for start in range(0, 240, 6)]
    (folder / "text.txt").write_text("\n\n".join(blocks))
    (folder / "pairs.tsv").write_text("".join(f"{one}\t{' '.join(one.split()[::-1])}\n" for one in sentences))


def make_recipe(kind, folder, steps):
    text, pairs = str(folder / "text.txt"), str(folder / "pairs.tsv")
    if kind == "vit":
        return ViTRecipe(epochs=1, steps=steps, batch_size=16, ema_decay=0.9, **SMALL)
    if kind == "gpt":
        return GPTRecipe(data=text, steps=steps, batch_size=4, accumulation=2, context_length=8, eval_batches=2,
                         sample_tokens=4, **SMALL)  # fmt: skip
    if kind == "bert":
        return BertRecipe(data=text, separator="blank_line", steps=steps, batch_size=8, length=16, vocab_size=100,
                          eval_batches=1, **SMALL)  # fmt: skip
    return TranslationRecipe(data=pairs, steps=steps, tokens_per_batch=64, vocab_size=300, hidden_dim=8, eval_pairs=2,
                             warmup_steps=5, **SMALL)  # fmt: skip


def _run_until_killed(server, folder, delay):
    """Start or resume the run, and kill it some time after its next checkpoint; False if it was complete before."""
    before = find_checkpoints(folder)
    server.stdin.write("\n")
    server.stdin.flush()
    child = int(server.stdout.readline())
    deadline = time.monotonic() + 300
    while find_checkpoints(folder) == before and os.path.exists(f"/proc/{child}") and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(delay)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    status = int(server.stdout.readline())
    assert status in (0, -signal.SIGKILL)
    return status != 0


DEATHS = [2, pytest.param(20, marks=pytest.mark.long)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vit", "gpt", "bert", "translate"])
@pytest.mark.parametrize("deaths", DEATHS)
def test_a_run_killed_at_random_moments_ends_with_the_same_weights(deaths, kind, tmp_path):
    """Checkpoints every 2 steps of about 10 ms: kills hit steps, evaluations, and files half written."""
    write_texts(tmp_path)
    recipe = make_recipe(kind, tmp_path, steps=60 + 20 * deaths)
    recipe.save(tmp_path / "recipe.json")
    expected = train(recipe)
    folder, moments = tmp_path / "run", random.Random(deaths)
    command = [sys.executable, "-c", SERVER, str(folder), str(tmp_path / "recipe.json")]
    server = subprocess.Popen(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    killed = 0
    try:
        for _ in range(deaths):
            killed += _run_until_killed(server, folder, moments.uniform(0, 0.1))
    finally:
        server.communicate()  # its input ends, and so does it
    assert killed >= deaths // 2  # on a fast machine the last ones may find the run complete
    run = train(recipe, folder)
    weights, others = run.model.state_dict(), expected.model.state_dict()
    assert all(torch.equal(tensor, others[name]) for name, tensor in weights.items())
    assert [repr(one.loss) for one in run.evaluations] == [repr(one.loss) for one in expected.evaluations]
    assert [one.metrics for one in run.evaluations] == [one.metrics for one in expected.evaluations]
    assert len(find_checkpoints(folder)) == 2
    assert not [path.name for path in folder.rglob(".*")]
