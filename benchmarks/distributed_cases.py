"""What `benchmarks.distributed` runs inside its processes: a training step, or an attention with its gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard import attend
from regard.distributed import SequenceLayout, ring_attend
from regard.patterns import Causal, Pattern, Window
from regard.train import GPTRecipe
from regard.train.data import text
from regard.train.loop import Training
from regard.train.parallel import Parallelism, Workers


@dataclass(frozen=True)
class TrainingStep:
    """An optimizer step of a GPT."""

    about: str
    bar: float
    parallelism: Parallelism
    recipe: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-4

    def build(self, rank: int, size: int) -> Any:
        names = {"steps": 10_000, "layers": 6, "dim": 384, "heads": 6, "context_length": 256, "batch_size": 16}
        recipe = GPTRecipe(**(names | self.recipe))
        generator = torch.Generator().manual_seed(0)
        letters = torch.randint(97, 122, (200_000,), generator=generator).tolist()
        task = recipe.make_task(text.Documents.from_texts(["".join(map(chr, letters))]))
        training = Training(task, None, workers=Workers(self.parallelism))
        steps = iter(range(recipe.steps or 0))

        def run() -> float:
            return training._run_step(next(steps))[0]["loss"]

        return run


@dataclass(frozen=True)
class RingStep:
    """Forward and backward of an attention of one long sequence."""

    about: str
    bar: float
    pattern: Pattern
    tokens: int
    kind: str
    heads: int = 8
    dim: int = 64
    tolerance: float = 1e-4

    def build(self, rank: int, size: int) -> Any:
        layout = SequenceLayout(self.tokens, size, self.kind)
        generator = torch.Generator().manual_seed(0)
        inputs = []
        for _ in range(4):  # one after the other, so that no process ever holds more than one whole tensor
            whole = torch.randn(1, self.heads, self.tokens, self.dim, generator=generator)
            inputs.append(layout.take(whole, rank).contiguous())
            del whole
        *tensors, grad = inputs
        for tensor in tensors:
            tensor.requires_grad_()

        def run() -> Tensor:
            for tensor in tensors:
                tensor.grad = None
            if size == 1:
                output = attend(*tensors, pattern=self.pattern)
            else:
                output = ring_attend(*tensors, pattern=self.pattern, layout=layout)
            output.backward(grad)
            return output.detach()

        run.resident = sum(tensor.nbytes for tensor in inputs)  # type: ignore[attr-defined]
        return run


WINDOW = Causal() & Window(256, 0)
SPEED = {
    "DDP": TrainingStep("GPT 6x384, context 256, batch 16, a step", 0.85, Parallelism("ddp")),
    "FSDP": TrainingStep("GPT 6x384, context 256, batch 16, a step", 0.75, Parallelism("fsdp")),
    "ring, window": RingStep("Window(256, 0), 65,536 tokens, forward and backward", 0.85, WINDOW, 65_536, "contiguous"),
    "ring, causal": RingStep("Causal, 16,384 tokens, forward and backward", 0.75, Causal(), 16_384, "zigzag"),
}  # fmt: skip
MEMORY = {
    "ring, window, memory": RingStep("peak, Window(256, 0), 65,536 tokens", 0.35, WINDOW, 65_536, "contiguous"),
    "ring, causal, memory": RingStep("peak, Causal, 16,384 tokens", 0.35, Causal(), 16_384, "zigzag"),
}  # fmt: skip

_prepared: Any = None


def prepare(rank: int, size: int, case: TrainingStep | RingStep) -> None:
    """Build a case in a process, to be run many times."""
    global _prepared
    _prepared = None
    torch.manual_seed(0)
    _prepared = case.build(rank, size)


def run_once(rank: int, size: int) -> Any:
    """The result of one run."""
    return _prepared()


def step(rank: int, size: int) -> None:
    """One run, whose result stays in the process."""
    _prepared()


def compare(case: TrainingStep | RingStep, single: list[Any], shared: list[Any]) -> float:
    """The largest difference of the results of one process and of several, relative to the largest number."""
    if isinstance(case, TrainingStep):
        return max(abs(each - single[0]) for each in shared) / abs(single[0])
    joined = SequenceLayout(case.tokens, len(shared), case.kind).join(shared)
    return float((joined - single[0]).abs().max() / single[0].abs().max())


def measure_peak(rank: int, size: int, case: RingStep) -> int:
    """The largest sum of bytes that torch's allocator has given out at once in a run, inputs included."""
    from tests.cost_model.allocator import allocated

    prepare(rank, size, case)
    _prepared()  # plans and caches
    return _prepared.resident + allocated(_prepared).peak
