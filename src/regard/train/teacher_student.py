"""Teacher-student experiment: positional heads recover the kernel of a random convolution."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from regard.errors import ConfigError
from regard.layers.profiles import HeadProfile
from regard.models.config import Config
from regard.models.spatial import SpatialConfig, SpatialHeads
from regard.models.validation import check_sizes
from regard.train.progress import StepReport, progress_bar
from regard.train.recipe import check_seed


@dataclass(frozen=True)
class TeacherRecipe(Config):
    """Configuration: a random convolution as the teacher, and an attention layer as the student.

    Attributes:
        kernel: rows and columns of the teacher's kernel.
        canvas: rows and columns of the images, which are noise, N(0, 1).
        margin: pixels beyond the image that heads may attend to. They are 0, as in a convolution with zero padding, so
            that borders do not distort the attention weights.
        channels: input and output channels.
        heads, position: of the student; its centres start as N(0, 2^2), its steepness as 1/2.
        steps, batch_size, learning_rate: of Adam, on new images in every step, with cosine decay of the learning rate.
        record_every: number of steps between recordings of the head positions.
        seed: of the random generator.
    """

    kernel: int = 3
    channels: int = 4
    canvas: tuple[int, int] = (10, 10)
    margin: int = 4
    heads: int = 9
    position: str = "quadratic"
    steps: int = 1500
    batch_size: int = 64
    learning_rate: float = 0.1
    record_every: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        check_sizes(self, "kernel", "channels", "heads", "steps", "batch_size", "record_every")
        check_seed(self.seed)
        because = ""
        if self.kernel % 2 == 0:
            because = "the kernel size must be odd, for a pixel in its middle"
        elif self.position == "content":
            because = "a convolution depends on position only"
        elif min(self.canvas) < 1 or self.margin < 0:
            because = "canvas must be at least 1 x 1 and margin at least 0"
        elif not 0 < self.learning_rate < math.inf:
            because = "the learning rate must be positive and finite"
        if because:
            raise ConfigError(
                "This recipe has no convolution to learn.",
                asked=f"kernel={self.kernel}, position={self.position!r}, canvas={self.canvas}, "
                f"learning_rate={self.learning_rate}",
                because=because,
                instead="TeacherRecipe(kernel=3)",
            )


@dataclass(frozen=True, eq=False)
class TeacherResult:
    """The result of the experiment.

    Attributes:
        teacher: the convolution's kernel, `(out, in, kernel, kernel)`.
        losses: relative loss of every step: squared error over the squared norm of the teacher's output.
        recorded: `(step, HeadProfile)`, the head positions at the start, every `record_every` steps, and at the end.
        loss: the relative loss on new images, after the last step.
        student: the layer.
    """

    recipe: TeacherRecipe
    teacher: Tensor
    losses: list[float]
    recorded: list[tuple[int, HeadProfile]]
    loss: float
    seconds: float
    student: SpatialHeads

    @property
    def head_profile(self) -> HeadProfile:
        """The final head positions."""
        return self.recorded[-1][1]

    @property
    def kernel(self) -> Tensor:
        """The student's effective kernel, `(out, in, 2 R - 1, 2 C - 1)`."""
        return self.head_profile.kernel

    @property
    def target_kernel(self) -> Tensor:
        """The teacher's kernel, zero-padded to the size of the student's."""
        rows, columns = (size - 1 - self.recipe.kernel // 2 for size in self.head_profile.grid)
        return functional.pad(self.teacher, (columns, columns, rows, rows))

    @property
    def kernel_error(self) -> float:
        """`|student - teacher| / |teacher|`, over all relative positions."""
        return ((self.kernel - self.target_kernel).norm() / self.target_kernel.norm()).item()

    @property
    def distances(self) -> Tensor:
        """The distance from each head's centre (its centre of mass, for tables) to the nearest pixel, `(head,)`.

        It need not become small: heads between pixels span the same filters once `W` mixes them, so only the effective
        kernel is identifiable.
        """
        centre = self.head_profile.mean if self.head_profile.centre is None else self.head_profile.centre
        return (centre - centre.round()).norm(dim=-1)

    def __repr__(self) -> str:
        return f"TeacherResult(loss={self.loss:.2g}, kernel_error={self.kernel_error:.2g})"


def train_student(recipe: TeacherRecipe | None = None, *, progress: bool = True) -> TeacherResult:
    r"""Train attention heads to reproduce the output of a random convolution on noise.

        minimise |student(x) - K * x|^2 / |K * x|^2,     student(x) = sum_h A_h x W_h

    over centres, spreads and `W`, in float64 and from one seed; the weights `A_h` are those without borders
    (`HeadProfile.weights`).

    Source: the question of Cordonnier, Loukas and Jaggi (ICLR 2020), section 4.2, with a known answer.

        >>> from regard.train import TeacherRecipe, train_student
        >>> result = train_student(TeacherRecipe(steps=20))
        >>> result.losses[-1] < result.losses[0], len(result.recorded)
        (True, 2)
    """
    recipe = TeacherRecipe() if recipe is None else recipe
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return _train_student(recipe, progress)


def _train_student(recipe: TeacherRecipe, progress: bool) -> TeacherResult:
    canvas, channels = recipe.canvas, recipe.channels
    grid = (canvas[0] + recipe.margin, canvas[1] + recipe.margin)
    config = SpatialConfig(
        recipe.position, image=grid, patch=1, dim=channels, heads=recipe.heads, layers=1, attention_dropout=0.0
    )
    student = SpatialHeads(config).double()
    torch.nn.init.zeros_(student.value.bias)
    student.value.bias.requires_grad_(False)  # the teacher has no bias
    kernel = torch.randn(channels, channels, recipe.kernel, recipe.kernel, dtype=torch.float64)
    learned = [parameter for parameter in student.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(learned, lr=recipe.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.steps)
    pixels = torch.cartesian_prod(*map(torch.arange, canvas))
    row, column = (pixels - pixels[:, None] + torch.tensor(grid) - 1).unbind(-1)  # relative position of each pair

    def relative_loss() -> Tensor:
        x = torch.randn(recipe.batch_size, channels, *canvas, dtype=torch.float64)
        target = functional.conv2d(x, kernel, padding=recipe.kernel // 2)
        weights = student.relative_weights()[:, row, column]  # (head, query, key); the keys beyond the canvas are 0
        # All images at once: (query, head) by key, times key by (image, channel).
        heads = weights.transpose(0, 1).flatten(0, 1) @ x.flatten(2).permute(2, 0, 1).flatten(1)
        heads = heads.unflatten(0, (-1, recipe.heads)).unflatten(2, (-1, channels))  # (query, head, image, channel)
        output = student.value(heads.permute(2, 0, 1, 3).flatten(2)).mT.unflatten(2, canvas)
        return (output - target).square().sum() / target.square().sum()

    recorded, losses = [(0, student.head_profile())], []
    start = time.perf_counter()
    with progress_bar(recipe.steps, 0, "images", progress) as report:
        for step in range(1, recipe.steps + 1):
            loss = relative_loss()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            if report is not None:
                report(StepReport(step, losses[-1]))
            if step % recipe.record_every == 0 and step < recipe.steps:
                recorded.append((step, student.head_profile()))
    recorded.append((recipe.steps, student.head_profile()))
    with torch.no_grad():
        final = sum(relative_loss().item() for _ in range(8)) / 8
    return TeacherResult(recipe, kernel, losses, recorded, final, time.perf_counter() - start, student.eval())
