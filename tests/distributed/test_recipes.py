"""Every kind of recipe runs on several processes, with the losses and weights of one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.train import (
    BertRecipe,
    DaViTRecipe,
    Parallelism,
    Recipe,
    ResNetRecipe,
    SpatialRecipe,
    TextClassificationRecipe,
    TranslationRecipe,
    ViTRecipe,
    train,
)
from regard.train.data import Images, ImageSplit, digits
from tests.distributed.processes import Processes
from tests.train.test_bert_classification import make_texts
from tests.train.test_kill import write_texts

STEPS: dict[str, Any] = {"precision": "float64", "steps": 4, "eval_every": 2, "warmup_steps": 0}
SIZES: dict[str, Any] = {"layers": 1, "dim": 8, "heads": 2, "dropout": 0.0}
PAIRS = {"tokens_per_batch": 64, "vocab_size": 300, "hidden_dim": 8, "eval_pairs": 2}
TEXTS = {"batch_size": 8, "length": 16, "vocab_size": 100}
# Of 65 images, the last batch of an epoch has one row for two processes.
RECIPES: dict[str, Recipe] = {
    "vit": ViTRecipe(batch_size=32, **SIZES, **STEPS),
    "davit": DaViTRecipe(batch_size=22, dims=(8, 16), heads=(2, 2), **STEPS),
    "spatial": SpatialRecipe(batch_size=22, layers=1, heads=4, dim=8, hidden_dim=8, **STEPS),
    "bert": BertRecipe(separator="blank_line", eval_batches=1, **TEXTS, **SIZES, **STEPS),
    "masked": BertRecipe(separator="blank_line", tasks=("mlm",), eval_batches=4, **TEXTS, **SIZES, **STEPS),
    "classify": TextClassificationRecipe(**TEXTS | {"vocab_size": 150}, **SIZES, **STEPS),
    "translate": TranslationRecipe(**PAIRS, **SIZES, **STEPS),
}


def take_images() -> Images:
    whole = digits()
    parts = ((whole.train, 65), (whole.test, 11))
    return Images("few", *(ImageSplit(p.pixels[:n], p.labels[:n], p.white) for p, n in parts), names=whole.names)


def run_recipe(rank: int, size: int, recipe: Recipe, folder: str, options: dict) -> tuple[list[float], dict]:
    data: Any = None
    if recipe.kind in ("bert", "translate"):
        recipe = dataclasses.replace(recipe, data=f"{folder}/{'text.txt' if recipe.kind == 'bert' else 'pairs.tsv'}")
    else:
        data = make_texts(60) if recipe.kind == "classify" else take_images()
    run = train(recipe, data=data, progress=False, parallelism=Parallelism(**options))
    weights = {} if rank else {name: each.detach().clone() for name, each in run.model.named_parameters()}
    return [each.loss for each in run.evaluations[1:]], weights


def assert_like_one(made: list[tuple[list[float], dict]], expected: tuple[list[float], dict]) -> None:
    assert all(losses == pytest.approx(expected[0], rel=1e-9) for losses, _ in made)
    for name, weight in expected[1].items():
        torch.testing.assert_close(made[0][1][name], weight, atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_the_losses_of_one_process(two: Processes, tmp_path: Path, name: str) -> None:
    """Heads that are called after the forward pass and odd last batches included."""
    if RECIPES[name].kind in ("bert", "classify", "translate"):
        pytest.importorskip("tokenizers")
    write_texts(tmp_path)
    common = {"recipe": RECIPES[name], "folder": str(tmp_path)}
    expected = run_recipe(0, 1, options={}, **common)
    assert_like_one(two.run(run_recipe, options={}, **common), expected)
    assert_like_one(two.run(run_recipe, options={"strategy": "fsdp", "recompute": True}, **common), expected)


@pytest.mark.parametrize("name", ["vit", "bert", "classify", "translate"])
def test_mixed_precision_of_sharded_models(two: Processes, tmp_path: Path, name: str) -> None:
    """FSDP gathers in bfloat16; patterns of the batch, padding and segments, are left as they are."""
    if name != "vit":
        pytest.importorskip("tokenizers")
    write_texts(tmp_path)
    common = {"recipe": dataclasses.replace(RECIPES[name], precision="bfloat16"), "folder": str(tmp_path)}
    expected, _ = run_recipe(0, 1, options={}, **common)
    for losses, _ in two.run(run_recipe, options={"strategy": "fsdp"}, **common):
        assert losses == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("options", [{}, {"strategy": "fsdp"}, {"strategy": "fsdp", "recompute": True}])
def test_batch_norms_see_the_rows_of_their_process(two: Processes, tmp_path: Path, options: dict) -> None:
    """Those of a micro-batch: two processes are as one that accumulates twice. In eval mode they would not be."""
    recipe = ResNetRecipe(batch_size=22, width=4, blocks=(1,), **STEPS)
    made = two.run(run_recipe, recipe=recipe, folder=str(tmp_path), options=options)
    assert_like_one(made, run_recipe(0, 1, dataclasses.replace(recipe, accumulation=2), str(tmp_path), {}))


def test_recomputed_blocks_count_a_batch_once(tmp_path: Path) -> None:
    recipe = ResNetRecipe(batch_size=22, width=4, blocks=(1,), **STEPS)
    states = []
    for recompute in (False, True):
        run = train(recipe, data=take_images(), progress=False, parallelism=Parallelism(recompute=recompute))
        states.append(run.model.state_dict())
    torch.testing.assert_close(*states, atol=0, rtol=0)
    assert int(states[1]["blocks.0.first_norm.num_batches_tracked"]) == 4


def run_resnet(rank: int, size: int, folder: str | None, options: dict, minutes: float | None) -> dict:
    recipe = ResNetRecipe(batch_size=22, width=4, blocks=(1,), ema_decay=0.9, **STEPS | {"eval_every": 1})
    words = {"minutes": minutes, "parallelism": Parallelism(**options)}
    run = train(recipe, folder, data=take_images(), progress=False, **words)
    return {} if rank else {name: each.detach().clone() for name, each in run.model.state_dict().items()}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_statistics_of_batch_norms_are_resumed_bit_for_bit(two: Processes, tmp_path: Path, strategy: str) -> None:
    """Each process has its own; a checkpoint has those of the first, which evaluates and saves them."""
    common = {"options": {"strategy": strategy}}
    expected = two.run(run_resnet, folder=None, minutes=None, **common)[0]
    for minutes in (0.0, 0.0, None):
        found = two.run(run_resnet, folder=str(tmp_path / "run"), minutes=minutes, **common)[0]
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


def run_dropout(rank: int, size: int, dropout: float) -> list[float]:
    recipe = ViTRecipe(batch_size=22, **SIZES | {"dropout": dropout}, **STEPS)
    return [each.loss for each in train(recipe, data=take_images(), progress=False).evaluations[1:]]


def test_dropout_drops_after_an_evaluation(two: Processes) -> None:
    plain, dropped = (two.run(run_dropout, dropout=dropout)[0] for dropout in (0.0, 0.5))
    assert all(abs(one - other) > 1e-3 for one, other in zip(plain, dropped, strict=True))
