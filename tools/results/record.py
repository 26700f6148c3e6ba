"""What a run computed: named tensors, and named facts that JSON can hold."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

# Failures of the process, not answers of the library.
FATAL = (KeyboardInterrupt, SystemExit, MemoryError)


class Record:
    """Results by name; the first word of a name, up to its slash, is the section it is reported in."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.facts: dict[str, Any] = {}

    def add(self, name: str, result: Any) -> None:
        """A tensor, a fact, or a dict or sequence of results."""
        if isinstance(result, Tensor):
            assert name not in self.tensors, f"{name} twice"
            self.tensors[name] = result.detach().clone().contiguous()
        elif isinstance(result, dict):
            for key, each in result.items():
                self.add(f"{name} {key}", each)
        elif isinstance(result, list | tuple) and any(isinstance(each, Tensor) for each in result):
            self.add(name, dict(enumerate(result)))
        else:
            assert name not in self.facts, f"{name} twice"
            self.facts[name] = json.loads(json.dumps(result))

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """What is refused inside is recorded by the name of its error: a refusal is a result too."""
        try:
            yield
        except FATAL:
            raise
        except Exception as error:
            self.add(f"{name} raises", type(error).__name__)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors, folder / "tensors.safetensors")
        (folder / "facts.json").write_text(json.dumps(self.facts, indent=1, sort_keys=True) + "\n")


def load(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return load_file(folder / "tensors.safetensors"), json.loads((folder / "facts.json").read_text())


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers that depend on shape and seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def fill_parameters(module: nn.Module) -> None:
    """Give every parameter numbers that depend on its name and shape alone, not on how the module was initialised."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            centre = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0
            parameter.copy_(centre + 0.3 * draw(*parameter.shape, seed=zlib.crc32(name.encode())))


def grad_output(output: Tensor) -> Tensor:
    return torch.linspace(-1, 1, output.numel(), dtype=torch.float64).reshape(output.shape).cos().to(output.dtype)


def run_backward(run: Callable[[], Any], inputs: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Output and the gradients of the named inputs, for a fixed gradient of the output."""
    output = run()
    found = {"output": output}
    wanted = [(name, tensor) for name, tensor in inputs if tensor.requires_grad]
    if output.requires_grad and wanted:
        grads = torch.autograd.grad(output, [tensor for _, tensor in wanted], grad_output(output), allow_unused=True)
        found |= {f"grad {name}": grad for (name, _), grad in zip(wanted, grads, strict=True) if grad is not None}
    return found
