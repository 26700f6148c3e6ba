"""The training loop of every task: seeded, resumable, interruptible."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.distributed.launch import explain_lost_processes
from regard.errors import CheckpointError, InputError
from regard.layers.profiles import HeadProfile
from regard.models.pretrained import Pretrained
from regard.train import checkpoint, history
from regard.train.checkpoint_store import Store
from regard.train.optimizer import make_optimizer
from regard.train.parallel import Parallelism, Workers
from regard.train.progress import ReportStep, StepReport, defer_interrupt, progress_bar
from regard.train.recipe import Recipe
from regard.train.resume_point import ResumePoint
from regard.train.run import Evaluation, Run
from regard.train.schedule import learning_rate_at
from regard.train.task import DROPOUT, Task, seed_of
from regard.train.tensorboard import TensorBoardLog
from regard.train.throughput import Throughput

MODEL = "model"
MeasurePeak = Callable[[Task, nn.Module, Any], tuple[float, float]]
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}


class Interrupted(KeyboardInterrupt):
    """Training was interrupted by Ctrl-C; the message says how to resume."""


@explain_lost_processes()
def train(
    recipe: Recipe | Task,
    folder: str | os.PathLike[str] | None = None,
    *,
    data: Any = None,
    start: Pretrained | None = None,
    progress: bool = True,
    resume: bool = True,
    minutes: float | None = None,
    parallelism: Parallelism | None = None,
    on_evaluation: Callable[[Evaluation], None] | None = None,
    measure_peak: MeasurePeak | None = None,
) -> Run:
    """Train a model by a recipe.

    recipe: the configuration, or the task that its `make_task` made.
    folder: where the run is saved: `recipe.json`, `history.jsonl` (a line for each evaluation), `steps.jsonl` (a line
        every few steps), `checkpoints/`, `best/` and, at the end, `model/` (all for `from_pretrained`), TensorBoard
        files. A folder with a run of the same recipe is resumed, bit-identical to an uninterrupted run. A run that is
        killed loses the steps since the last checkpoint, Ctrl-C loses nothing.
    data: data in place of those the recipe names.
    start: a model of the recipe's kind to start from, in place of a random initialisation.
    progress: show a progress bar if stderr is a terminal.
    resume: if False, a folder that already has a run raises.
    minutes: stop after this time, and after one step at least, evaluated and saved; the same call goes on from there.
    parallelism: how the run is spread over the processes that torchrun started. The losses are those of one process up
        to rounding, if there is no dropout, and a run may be resumed on another number of processes. All of them see
        the folder; the first one has the whole model at the end.
    on_evaluation: called with every new evaluation.
    measure_peak: operations of one token or image and of the machine in a second, by task, model and micro-batch; the
        progress bar then shows the share of the peak.

    All randomness comes from the recipe's seed; the state of torch's global generator is restored.

        >>> from regard.train import SpatialRecipe, train
        >>> run = train(SpatialRecipe(epochs=1, layers=1, heads=4, dim=8, hidden_dim=8))
        >>> [each.number for each in run.evaluations], list(run.evaluations[-1].head_profiles)
        ([0, 1], ['blocks.0.attention'])
    """
    if minutes is not None and not minutes >= 0:
        raise InputError(
            f"A run cannot take {minutes} minutes.",
            asked=f"minutes={minutes}",
            because="it stops after this time",
            instead="minutes=30, or None to run all steps",
        )
    task = recipe if isinstance(recipe, Task) else recipe.make_task(data)
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    settings = {
        "progress": progress,
        "deadline": deadline,
        "on_evaluation": on_evaluation,
        "measure_peak": measure_peak,
    }
    place = None if folder is None else Path(folder).expanduser()
    with torch.random.fork_rng(devices=[]):
        workers = Workers(parallelism or Parallelism())
        workers.check_same({"minutes": minutes, "folder": place is not None, "start": start is not None})
        training = Training(task, place, start, workers)  # before there is a folder: a model may be refused
        if place is None:
            return training.run(**settings)
    try:
        if not workers.is_main:
            with torch.random.fork_rng(devices=[]):
                workers.wait()  # for the first process to claim the folder
                return training.run(**settings)
        place.mkdir(parents=True, exist_ok=True)
        if not resume and (place / checkpoint.RECIPE).exists():
            raise CheckpointError(
                f"There is a run in {place}.",
                asked="resume=False",
                because="its files would be overwritten",
                instead="resume=True to continue it, or another folder",
            )
        checkpoint.claim_folder(place, task.recipe, task.digest, None if start is None else hash_state_dict(start))
        with checkpoint.lock_folder(place), torch.random.fork_rng(devices=[]):
            workers.wait()
            return training.run(**settings)
    except (OSError, CheckpointError) as failure:
        refusal = failure if isinstance(failure, OSError) else failure.__cause__
        if not isinstance(refusal, OSError) or isinstance(refusal, BlockingIOError):  # a lock says it in its own words
            raise
        raise CheckpointError(
            f"The run cannot be saved in {place}.",
            asked=f"a run in {place}",
            found=f"{type(refusal).__name__}: {refusal}",
            because="the operating system refuses to write there",
            instead="another folder, or free some space: the same call resumes from the last checkpoint",
        ) from refusal


def hash_state_dict(model: Pretrained) -> str:
    """A sha256 of the model's state."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Training:
    """The state of a run in progress."""

    def __init__(
        self, task: Task, folder: Path | None, start: Pretrained | None = None, workers: Workers | None = None
    ) -> None:
        workers = workers or Workers(Parallelism())
        self.task, self.recipe, self.workers = task, task.recipe, workers
        self.folder = folder if workers.is_main else None  # where this process writes
        self.store = Store(folder, workers, task)
        workers.check_task(task)
        task.micro_batches = self.recipe.accumulation * workers.data_size
        if workers.data_size > 1:
            workers.check_batch(len(task.make_batches(0)), lambda: task.describe_batch(0))
        torch.manual_seed(self.recipe.seed)
        self.model: Pretrained = task.build_model()
        if start is not None:
            self._load_initial_model(start)
        self.model.to(DTYPES[self.recipe.precision])
        self.model.companions |= task.companions()
        self.forward: nn.Module = workers.spread(self.model, self.recipe.precision)
        self.optimizer = make_optimizer(task, self.model)  # of the parameters as they are sharded
        self.average = self._copy_weights() if self.recipe.ema_decay is not None else None
        if self.recipe.compile:
            self.forward = torch.compile(self.forward)  # pyright: ignore[reportAttributeAccessIssue]
        self.position = ResumePoint()
        self.evaluations: list[Evaluation] = []
        self.throughput = Throughput()
        self._lines: list[dict[str, Any]] = []  # of steps.jsonl, written with the next checkpoint

    def _copy_weights(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in checkpoint.averaged_tensors(self.model).items()}

    def _load_initial_model(self, start: Pretrained) -> None:
        if start.config != self.model.config:
            raise InputError(
                "`start` does not fit the recipe.",
                asked=repr(start.config),
                found=repr(self.model.config),
                because="the recipe builds a model with another configuration",
                instead="the recipe with the sizes of the model",
            )
        self.model.load_state_dict(start.state_dict())

    def _resume(self) -> None:
        if self.store.folder is None:
            return
        self.store.check_folder()
        found = self.store.find_newest()
        if found is not None:
            self.position = self.store.restore(found, self.model, self.optimizer, self.average)
            self.evaluations = history.read_evaluations(self.store.folder, self.position.evaluations)
        self.workers.wait()
        if self.folder is not None:
            # What was written after the checkpoint, or before the first one, is written again.
            history.truncate_history(self.folder, self.position.evaluations, self.position.step)

    @property
    def eval_every(self) -> int:
        return self.recipe.eval_every or self.task.steps_per_epoch

    def run(
        self,
        progress: bool,
        deadline: float | None = None,
        on_evaluation: Callable[[Evaluation], None] | None = None,
        measure_peak: MeasurePeak | None = None,
    ) -> Run:
        self._resume()
        total, position = self.task.steps, self.position
        shown = progress and self.workers.is_main and position.step < total and not position.finished
        with (
            TensorBoardLog(self.folder, position.step if self.evaluations else -1) as log,
            progress_bar(total, position.step, self.task.unit, shown) as report,
            defer_interrupt() as stopped,
        ):
            record = _Recorder(self, log, on_evaluation)
            if report is not None and measure_peak is not None and not self.workers.is_sharded:
                self.model.train()
                batch = self.task.make_batches(position.step)[0]
                self.throughput = Throughput(*measure_peak(self.task, self.model, batch))
            if not self.evaluations:
                record(self._evaluate())
            while not position.finished and position.step < total:
                self._run_counted_step(report)
                expired = deadline is not None and self.workers.any(time.monotonic() >= deadline)
                if position.step % self.eval_every == 0 or position.step == total or expired:
                    record(self._evaluate())
                if self.workers.any(stopped()) and position.step < total:
                    raise self._interrupt_error()
                if expired:
                    break
        done = position.finished or position.step >= total
        return Run(self.recipe, self._finish(done), self.evaluations, self.task, self.store.folder, done)

    def _finish(self, done: bool) -> Pretrained:
        """The model as it is used: in eval mode, averaged, and saved if the run is complete.

        The first process has all of it; the others have their own part where it is sharded.
        """
        self.store.finish()
        if self.average is not None:
            checkpoint.copy_weights(self.model, self.average)
        self.model.eval()
        with self._whole_model() as model:
            if done and self.folder is not None and not (self.folder / MODEL / "config.json").is_file():
                assert model is not None
                model.save_pretrained(self.folder / MODEL)
        return self.model if model is None else model

    # A step

    def _run_counted_step(self, report: ReportStep | None) -> None:
        """Run a step, and add it to the sums since the last evaluation."""
        position, began = self.position, time.perf_counter()
        line, units = self._run_step(position.step)
        seconds = time.perf_counter() - began
        position.step += 1
        position.steps += 1
        position.loss += line["loss"]
        position.units += units
        position.seconds += seconds
        self.throughput.add(units, seconds)
        if position.step % self.recipe.log_every == 0:
            rate = self.throughput.units_per_second
            self._lines.append({"step": position.step, **line, f"{self.task.unit}_per_second": rate})
        if report is not None:
            metrics = self.evaluations[-1].metrics if self.evaluations else {}
            speed = self.throughput.units_per_second, self.throughput.peak_share
            report(StepReport(position.step, line["loss"], metrics, *speed))

    def _run_step(self, step: int) -> tuple[dict[str, float], int]:
        """One optimizer step: its loss, each term of it, the norm of the gradient and the rate; and its units."""
        recipe, task = self.recipe, self.task
        rate = learning_rate_at(recipe, step, task.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("share", 1.0)
        batches = task.make_batches(step)
        terms = self.workers.sum(self._backward(step, batches))
        norm = self._clip_gradients()
        weights = {name: task.term_weights.get(name, 1.0) for name in terms}
        loss = sum(weights[name] * value for name, value in terms.items())
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise self._divergence_error(step, loss, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None and recipe.ema_decay is not None:
            checkpoint.update_average(self.average, self.model, 1 - recipe.ema_decay)
        single = terms if len(terms) > 1 else {}
        line = {"loss": loss, **single, "gradient_norm": norm, "learning_rate": rate}
        return line, sum(map(task.count_units, batches))

    def _backward(self, step: int, batches: Any) -> dict[str, float]:
        """Accumulate the gradient of a step's batches, and return the mean of each term."""
        task = self.task
        # Dropout follows from the seed and the step, so that no state of a generator is saved.
        # Processes that share a block drop the same; others, which see other rows or tokens, do not.
        number = self.workers.rank // self.workers.parallelism.tensor
        stream = f"{DROPOUT} {number}" if number else DROPOUT
        torch.manual_seed(seed_of(self.recipe.seed, stream, step))
        if not self.model.training:  # what is around it may not have noticed an evaluation
            self.forward.train()
        counts: dict[str, int] = {}
        for batch in batches:
            for name, count in task.count_terms(batch).items():
                counts[name] = counts.get(name, 0) + count
        means = dict.fromkeys(counts, 0.0)
        share = self.workers.take_share(batches)
        for number, (batch, counted) in enumerate(share, 1):
            sequences = self.workers.cut_sequences(task.count_tokens(batch))
            with self.workers.micro_batch(self.forward, number == len(share)), sequences as layout:
                part = batch if layout is None else task.take_tokens(batch, layout, self.workers.context_rank)
                with self._autocast():
                    terms = task.compute_terms(self.forward, part)
                terms = terms if counted else {name: 0 * term for name, term in terms.items()}
                self._add_terms(terms, counts, means).backward()
        return means

    def _add_terms(self, terms: dict[str, Tensor], counts: dict[str, int], means: dict[str, float]) -> Tensor:
        """The loss of a micro-batch, whose terms are added to their means."""
        loss = None
        for name, term in terms.items():
            mean = term / max(counts[name], 1)
            means[name] += mean.item()
            weight = self.task.term_weights.get(name, 1.0) * self.workers.averaged  # over these processes
            weighted = mean if weight == 1 else weight * mean
            loss = weighted if loss is None else loss + weighted
        assert loss is not None
        return loss

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.recipe.precision == "bfloat16":
            return torch.autocast("cpu", torch.bfloat16)
        return contextlib.nullcontext()

    def _clip_gradients(self) -> float:
        """Clip the gradients if the recipe says so, and return their norm before."""
        limit = math.inf if self.recipe.max_grad_norm is None else self.recipe.max_grad_norm
        gradients = {name: each.grad for name, each in self.model.named_parameters() if each.grad is not None}
        norm = self.workers.find_norm(gradients)
        if math.isfinite(norm) and norm > limit:
            torch._foreach_mul_(list(gradients.values()), limit / (norm + 1e-6))  # pyright: ignore[reportPrivateImportUsage]
        return norm

    def _divergence_error(self, step: int, loss: float, norm: float) -> InputError:
        saved, recipe = self.store.find_newest(), self.recipe
        return InputError(
            f"The {'loss is ' + str(loss) if not math.isfinite(loss) else 'gradient norm is ' + str(norm)} "
            f"at step {step + 1}.",
            asked=f"learning_rate={recipe.learning_rate}, max_grad_norm={recipe.max_grad_norm}",
            found=f"{self.task.describe_batch(step)}; last checkpoint: {saved or 'none'}",
            because="the training diverged, or the data hold a value that is not finite",
            instead=f"a learning rate below {recipe.learning_rate}, a longer warmup_steps, or max_grad_norm=1.0",
        )

    # Evaluation

    def _evaluate(self) -> Evaluation:
        """Evaluate the model, or its moving average, and begin new sums."""
        position = self.position
        metrics: dict[str, float] = {}
        profiles: dict[str, HeadProfile] = {}
        samples: list[str] = []
        with self._whole_model() as model, torch.no_grad(), torch.random.fork_rng(devices=[]):
            if model is not None:
                with self._autocast():
                    metrics = self.task.evaluate(model)
                    samples = self.task.make_samples(model) if self.folder is not None else []
                profiles = self.task.measure_heads(model)
        metrics = self.workers.share(metrics)
        if self.folder is not None and samples:
            history.append_lines(self.folder / history.SAMPLES, [{"step": position.step, "samples": samples}])
        evaluation = Evaluation(
            number=len(self.evaluations),
            step=position.step,
            loss=position.loss / position.steps if position.steps else math.nan,
            metrics=metrics,
            seconds=position.seconds,
            learning_rate=learning_rate_at(self.recipe, position.step - 1, self.task.steps) if position.step else 0.0,
            units=position.units,
            head_profiles=profiles,
        )
        position.loss, position.steps, position.units, position.seconds = 0.0, 0, 0, 0.0
        return evaluation

    @contextlib.contextmanager
    def _whole_model(self) -> Iterator[Pretrained | None]:
        """The model, or its moving average, in eval mode, with all its parameters; None where another evaluates it."""
        if not self.workers.is_sharded:
            with checkpoint.swapped_weights(self.model, self.average):
                self.model.eval()
                yield self.model if self.workers.is_main else None
            return
        weights = self.workers.gather_weights(self.average or checkpoint.averaged_tensors(self.model))
        if weights is None:
            yield None
            return
        with torch.random.fork_rng(devices=[]):
            whole = self.task.build_model().to(DTYPES[self.recipe.precision])
        whole.companions |= self.model.companions
        checkpoint.copy_buffers(whole, self.model, self.workers.splits)
        checkpoint.copy_weights(whole, weights)
        yield whole.eval()

    def save(self) -> None:
        """Write the lines of the steps and a checkpoint."""
        if self.folder is not None:
            history.append_lines(self.folder / history.STEPS, self._lines)
        self.store.save(self.model, self.optimizer, self.position, self.average, self.recipe.keep_checkpoints)
        self._lines = []

    def _interrupt_error(self) -> Interrupted:
        self.save()
        self.store.finish()
        where = f"step {self.position.step} of {self.task.steps}"
        if self.store.folder is None:
            return Interrupted(f"interrupted at {where}; without a folder nothing is saved")
        return Interrupted(
            f"interrupted at {where}; saved in {self.store.folder}, from where train(recipe, folder) resumes"
        )


class _Recorder:
    """Records an evaluation: heads, its line, the best model, then the checkpoint, which commits it."""

    def __init__(self, training: Training, log: TensorBoardLog, notify: Callable[[Evaluation], None] | None) -> None:
        self.training, self.log, self.notify = training, log, notify

    def __call__(self, evaluation: Evaluation) -> None:
        training, position = self.training, self.training.position
        training.evaluations.append(evaluation)
        position.evaluations = len(training.evaluations)
        self._compare_with_best(evaluation)
        self.log.write_steps(training._lines)
        self.log.write_evaluation(evaluation)
        if training.folder is not None:
            history.write_heads(training.folder, evaluation.number, evaluation.head_profiles)
            history.append_evaluation(training.folder, evaluation)
        training.save()
        if self.notify is not None:
            self.notify(evaluation)

    def _compare_with_best(self, evaluation: Evaluation) -> None:
        """Keep the best model, and finish after `patience` evaluations without a better one."""
        training, task, position = self.training, self.training.task, self.training.position
        value = evaluation.metrics[task.metric]
        sign = 1 if task.higher_is_better else -1
        if position.best is not None and not sign * value > sign * position.best:
            position.waited += 1
            position.finished = training.recipe.patience is not None and position.waited >= training.recipe.patience
            return
        position.best, position.waited = value, 0
        metrics = {"step": evaluation.step, "metrics": evaluation.metrics}
        with training._whole_model() as model:
            if training.folder is not None and model is not None:
                checkpoint.save_best(training.folder, model, metrics)
