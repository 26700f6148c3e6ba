"""The loop's own mechanisms: accumulation, schedules, averages, early stop, checkpoints, and what it refuses."""

import dataclasses
import itertools
import json
import math

import pytest
import torch
from agreement import refused
from plain import slow
from torch.nn import functional

from regard.errors import ConfigError, InputError
from regard.models import ViT
from regard.models.spatial import SpatialTransformer
from regard.train import ResNetRecipe, SpatialRecipe, ViTRecipe, read_recipe, read_run, train
from regard.train.checkpoint import find_checkpoints
from regard.train.loop import Training
from regard.train.schedule import learning_rate_at

TINY = ViTRecipe(
    epochs=2, batch_size=24, layers=1, dim=8, heads=2, dropout=0.1, eval_every=3, log_every=2, precision="float64"
)


def weights_of(run):
    return {name: value.clone() for name, value in run.model.state_dict().items()}


def largest_difference(one, other):
    return max((one[name] - other[name]).abs().max().item() for name in one)


# Steps


@pytest.mark.parametrize("parts", [2, 5, 24, 100])
def test_gradient_accumulation_gives_the_gradient_of_the_whole_batch(parts, few):
    recipe = dataclasses.replace(TINY, dropout=0.0, optimizer="sgd", max_grad_norm=0.1)
    whole = train(recipe, data=few)
    split = train(dataclasses.replace(recipe, accumulation=parts), data=few)
    assert largest_difference(weights_of(whole), weights_of(split)) < 1e-13
    assert [one.loss for one in split.evaluations[1:]] == pytest.approx([one.loss for one in whole.evaluations[1:]])


def test_a_step_is_that_of_a_plain_loop(few):
    """Forty steps against torch's own cross-entropy, clipping, schedule and optimizer, in float64."""
    recipe = dataclasses.replace(TINY, epochs=10, dropout=0.0, shift=0, turn=0, stretch=0, warmup_steps=5)
    run = train(recipe, data=few)
    torch.manual_seed(recipe.seed)
    task = recipe.make_task(few)
    model = task.build_model().double().train()
    matrices = [p for n, p in model.named_parameters() if p.ndim > 1 and "position" not in n and n != "class_token"]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.99), foreach=False, fused=False)
    steps = 10 * (97 // 24)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: (s + 1) / 5 if s < 5 else 0.5 * (1 + math.cos(math.pi * (s - 5) / (steps - 5))),
    )
    for step in range(steps):
        (batch,) = task.make_batches(step)
        images = few.normalise(batch.pixels.double() / few.train.white)
        loss = functional.cross_entropy(model(images), batch.labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    # Pixels are float32 in the loop; everything else is the same.
    assert largest_difference(weights_of(run), model.state_dict()) < 1e-5


def test_the_moving_average_is_what_is_evaluated_and_saved(few, tmp_path):
    recipe = dataclasses.replace(TINY, ema_decay=0.9)
    averaged, plain = train(recipe, tmp_path / "run", data=few), dataclasses.replace(recipe, ema_decay=None)
    task = plain.make_task(few)
    training = Training(task, None)
    expected = {name: value.clone() for name, value in training.model.named_parameters()}
    for _ in range(task.steps):
        training._run_counted_step(None)
        for name, value in training.model.named_parameters():
            expected[name] = 0.9 * expected[name] + 0.1 * value.detach()
    found = dict(averaged.model.named_parameters())
    assert max((found[name] - value).abs().max().item() for name, value in expected.items()) < 1e-12
    for place in ("model", f"checkpoints/{find_checkpoints(tmp_path / 'run')[-1].name}"):
        again = ViT.from_pretrained(tmp_path / "run" / place)
        assert largest_difference(weights_of(averaged), again.state_dict()) == 0
    assert read_run(tmp_path / "run", data=few).metrics == averaged.metrics


def test_the_moving_average_has_its_own_batch_norm_statistics(few, tmp_path):
    """Statistics of the present weights do not belong to the averaged ones; they are resumed bit for bit, too."""
    recipe = ResNetRecipe(
        steps=6, batch_size=24, width=4, blocks=(1,), ema_decay=0.9, eval_every=2, precision="float64"
    )
    averaged = train(recipe, data=few)
    training = Training(dataclasses.replace(recipe, ema_decay=None).make_task(few), None)
    name = "stem_norm.running_var"
    expected = training.model.state_dict()[name].clone()
    for _ in range(recipe.steps):
        training._run_counted_step(None)
        expected = 0.9 * expected + 0.1 * training.model.state_dict()[name]
    found = averaged.model.state_dict()[name]
    assert (found - expected).abs().max() < 1e-12
    assert (found - training.model.state_dict()[name]).abs().max() > 1e-3

    def stop(evaluation):
        if evaluation.step == 2:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        train(recipe, tmp_path / "run", data=few, on_evaluation=stop)
    again = train(recipe, tmp_path / "run", data=few)
    assert largest_difference(weights_of(averaged), weights_of(again)) == 0
    assert again.metrics == averaged.metrics


@pytest.mark.parametrize("position", ["quadratic", "gaussian", "learned", "content"])
def test_positional_heads_train_in_mixed_precision_and_are_measured_in_full(position, few):
    recipe = SpatialRecipe(steps=2, batch_size=24, layers=2, dim=8, heads=3, hidden_dim=8, position=position)
    exact, mixed = (train(dataclasses.replace(recipe, precision=name), data=few) for name in ("float32", "bfloat16"))
    assert mixed.evaluations[-1].loss == pytest.approx(exact.evaluations[-1].loss, rel=0.05)
    measured = mixed.task.measure_heads(mixed.model)
    for layer, profile in mixed.evaluations[-1].head_profiles.items():
        assert torch.equal(profile.scores, measured[layer].scores)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when it first compiles
@pytest.mark.parametrize("change", [{"precision": "bfloat16"}, *slow({"precision": "float32", "compile": True})])
def test_mixed_precision_and_compilation_stay_close_to_float64(change, few):
    recipe = dataclasses.replace(TINY, dropout=0.0, epochs=1)
    exact, other = train(recipe, data=few), train(dataclasses.replace(recipe, **change), data=few)
    tolerance = 0.05 if "bfloat16" in change.values() else 1e-4
    assert other.evaluations[-1].loss == pytest.approx(exact.evaluations[-1].loss, rel=tolerance)
    assert {parameter.dtype for parameter in other.model.parameters()} == {torch.float32}


# Schedules


@dataclasses.dataclass(frozen=True)
class Published(SpatialRecipe):
    kind = "published"


def test_noams_rates_are_the_published_ones():
    base = Published(dim=512, heads=8, learning_rate=1.0, schedule="noam", warmup_steps=4000)
    expected = {
        1: 1.746928107421711e-07,
        1000: 1.746928107421711e-04,
        4000: 6.987712429686843e-04,
        8000: 4.941058844013093e-04,
        100_000: 1.3975424859373687e-04,
    }
    for step, rate in expected.items():
        assert learning_rate_at(base, step - 1, 100_000) == pytest.approx(rate, rel=1e-14)
    big = dataclasses.replace(base, dim=1024)
    assert learning_rate_at(big, 3999, 300_000) == pytest.approx(4.941058844013092e-04, rel=1e-14)


def test_linear_and_constant_schedules_and_their_floor():
    recipe = ViTRecipe(learning_rate=1.0, schedule="linear", warmup_steps=2, min_learning_rate=0.1)
    rates = [learning_rate_at(recipe, step, 12) for step in range(12)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert all(first - second == pytest.approx(0.09) for first, second in itertools.pairwise(rates[2:]))
    assert rates[-1] == pytest.approx(0.19)
    constant = dataclasses.replace(recipe, schedule="constant")
    assert [learning_rate_at(constant, step, 12) for step in (0, 1, 11)] == [0.5, 1.0, 1.0]
    cosine = dataclasses.replace(recipe, schedule="cosine")
    assert learning_rate_at(cosine, 11, 12) > 0.1


@pytest.mark.parametrize(("classes", "least"), [(37_000, 1.3769132225560563), (10, 0.5002880350577578)])
def test_label_smoothing_has_the_known_least_loss(classes, least):
    """The best logits are those of the smoothed distribution itself: its entropy is what is left."""
    share = 0.1 / classes
    logits = torch.full((1, classes), math.log(share), dtype=torch.float64)
    logits[0, 3] = math.log(0.9 + share)
    loss = functional.cross_entropy(logits, torch.tensor([3]), label_smoothing=0.1)
    assert loss.item() == pytest.approx(least, rel=1e-12)


# Stopping


def test_a_run_stops_when_it_no_longer_improves(few, tmp_path):
    recipe = dataclasses.replace(TINY, epochs=50, learning_rate=0.0, patience=2)
    run = train(recipe, tmp_path, data=few)
    assert run.done
    assert [one.number for one in run.evaluations] == [0, 1, 2]
    assert train(recipe, tmp_path, data=few).evaluations[-1].step == run.evaluations[-1].step
    assert (tmp_path / "model" / "config.json").exists()


def test_a_run_stops_after_its_time_and_goes_on_later(few, tmp_path):
    whole = train(TINY, data=few)
    steps = []
    while not steps or steps[-1] < 8:
        run = train(TINY, tmp_path, data=few, minutes=0.0)
        steps.append(run.evaluations[-1].step)
        assert run.done == (steps[-1] == 8)
    assert steps == list(range(1, 9))
    assert largest_difference(weights_of(whole), weights_of(run)) == 0


def test_a_loss_that_is_not_finite_names_the_step_the_batch_and_the_checkpoint(few, tmp_path):
    recipe = dataclasses.replace(TINY, learning_rate=1e200, warmup_steps=0.0, optimizer="sgd", max_grad_norm=None)
    with refused(InputError, "at step", "training images", "checkpoints/step-00000000", "a learning rate below 1e+200"):
        train(recipe, tmp_path, data=few)
    assert [place.name for place in find_checkpoints(tmp_path)] == ["step-00000000"]


# Files


def test_checkpoints_are_bounded_and_read_by_from_pretrained(few, tmp_path):
    recipe = SpatialRecipe(
        epochs=3, batch_size=24, layers=1, heads=2, dim=4, hidden_dim=4, eval_every=2, keep_checkpoints=3
    )
    run = train(recipe, tmp_path, data=few)
    places = find_checkpoints(tmp_path)
    assert [place.name for place in places] == ["step-00000008", "step-00000010", "step-00000012"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [place.name for place in places]
    for place in (*places, tmp_path / "best", tmp_path / "model"):
        SpatialTransformer.from_pretrained(place)
    last = SpatialTransformer.from_pretrained(places[-1])
    assert largest_difference(weights_of(run), last.state_dict()) == 0
    best = json.loads((tmp_path / "best" / "metrics.json").read_text())
    assert best["metrics"] == run.best.metrics
    assert best["step"] == run.best.step


def test_the_steps_are_logged(few, tmp_path):
    run = train(TINY, tmp_path, data=few)
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    assert all(line["gradient_norm"] > 0 and line["images_per_second"] > 0 for line in lines)
    assert lines[-1]["learning_rate"] == run.evaluations[-1].learning_rate


def test_recipes_are_read_from_json_and_toml(tmp_path):
    TINY.save(tmp_path / "recipe.json")
    assert read_recipe(tmp_path / "recipe.json") == TINY
    (tmp_path / "mine.toml").write_text('kind = "vit"\nlayers = 2\nlearning_rate = 1e-3\n')
    assert read_recipe(tmp_path / "mine.toml") == ViTRecipe(layers=2, learning_rate=1e-3)
    (tmp_path / "bad.toml").write_text("kind = ")
    with refused(ConfigError, "is not a TOML file"):
        read_recipe(tmp_path / "bad.toml")
    (tmp_path / "none.json").write_text("{}")
    with refused(ConfigError, "There is no recipe of the kind None"):
        read_recipe(tmp_path / "none.json")
