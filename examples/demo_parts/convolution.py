"""A small CNN learns the digits, its convolutions become attention, and nothing changes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from regard.convert import conv_to_attention, convert_network
from regard.layers import SpatialAttention
from regard.train import Images

EPOCHS, BATCH, RATE = 12, 64, 4e-3

# Convolutions that are not the plain one.
CASES: list[tuple[str, dict]] = [
    ("3 × 3", dict(kernel_size=3, padding=1)),
    ("5 × 5, stride 2", dict(kernel_size=5, stride=2, padding=2)),
    ("3 × 3, dilation 2", dict(kernel_size=3, dilation=2, padding=2)),
    ("4 × 2, even sides", dict(kernel_size=(4, 2), padding=(2, 1))),
    ("3 × 3, 2 groups", dict(kernel_size=3, padding=1, groups=2)),
    ("3 × 3, repeated edges", dict(kernel_size=3, padding=1, padding_mode="replicate")),
    ("3 × 3, round the edges", dict(kernel_size=3, padding=1, padding_mode="circular")),
    ("3 × 3, mirrored edges", dict(kernel_size=3, padding=1, padding_mode="reflect")),
]


@dataclass
class Case:
    """A convolution beside the attention that it became, on the same image in float64."""

    name: str
    heads: int
    error: float


@dataclass
class Converted:
    """The CNN, the same network made of attention, and how far apart they are."""

    network: nn.Sequential
    attentive: nn.Sequential
    accuracy: float
    seconds: float
    error: float  # largest difference of a logit, in the network's own float32
    agreed: int  # test images whose class is the same
    images: int
    cases: list[Case]


def cnn(classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, padding=2),
        nn.GELU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(16 * 16, classes),
    )


def convert(data: Images, folder: Path, epochs: int = EPOCHS) -> Converted:
    """Train or read the CNN, convert it, compare."""
    network, seconds = learned(data, folder / "cnn.safetensors", epochs)
    attentive = convert_network(network)
    shown = data.normalise(data.test.images)
    with torch.no_grad():
        ours, theirs = attentive(shown), network(shown)
    return Converted(
        network,
        attentive,
        accuracy=float((theirs.argmax(-1) == data.test.labels).float().mean()),
        seconds=seconds,
        error=float((ours - theirs).abs().max()),
        agreed=int((ours.argmax(-1) == theirs.argmax(-1)).sum()),
        images=len(shown),
        cases=[compared(name, **words) for name, words in CASES],
    )


def compared(name: str, **words) -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        conv = nn.Conv2d(6, 4, **words).double()
        image = torch.randn(2, 6, 11, 13, dtype=torch.float64)
    layer = conv_to_attention(conv)
    assert isinstance(layer, SpatialAttention)
    with torch.no_grad():
        return Case(name, layer.heads, float((layer(image) - conv(image)).abs().max()))


def learned(data: Images, file: Path, epochs: int) -> tuple[nn.Sequential, float]:
    """The CNN after so many epochs, from a file if it is there, and how long that took."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = cnn(len(data.names))
        if file.is_file():
            try:
                state = load_file(file)
                if int(state.pop("epochs")) == epochs:
                    seconds = float(state.pop("seconds"))
                    network.load_state_dict(state)
                    return network.eval(), seconds
            except (SafetensorError, KeyError, RuntimeError):
                print(f"  {file.name} is damaged, or of another network: it is trained anew", flush=True)
        start = time.perf_counter()
        _learn(network, data.normalise(data.train.images), data.train.labels, epochs)
        seconds = time.perf_counter() - start
    extra = {"epochs": torch.tensor(epochs), "seconds": torch.tensor(seconds)}
    half = file.with_suffix(".half")
    save_file({**network.state_dict(), **extra}, half)
    half.replace(file)  # a run that is killed leaves no half of a file under its name
    return network.eval(), seconds


def _learn(network: nn.Module, images: Tensor, labels: Tensor, epochs: int) -> None:
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=0.01)
    steps = math.ceil(len(images) / BATCH) * epochs
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for chosen in torch.randperm(len(images)).split(BATCH):
            optimizer.zero_grad()
            functional.cross_entropy(network(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            schedule.step()
