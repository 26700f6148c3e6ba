"""Regard's own models: texts with their padding and memory, both sides of a translation, and images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.errors import CacheError
from regard.laws.law import Dice
from regard.laws.subjects.base import Conventions, Subject, Way
from regard.laws.subjects.known import READERS, SOBER, conventions_of
from regard.laws.subjects.model import Images, Model
from regard.laws.subjects.remembering import Remembering
from regard.laws.subjects.seen import is_padding, positions, seen
from regard.layers.cache import Memory
from regard.models import GPT, Bert, DaViT, SpatialTransformer, Transformer, ViT

OTHER = 7  # tokens of the text on the other side
WRITERS = ("causality", "cache", "cache-algebra", *READERS)


def recognise(target: Any, name: str, options: dict[str, Any]) -> Subject | None:
    """The subject of one of Regard's models, or None."""
    if isinstance(target, GPT):
        relative = ("relative-position",) if target.config.position in ("rotary", "alibi", "none") else ()
        claims = (*WRITERS, *relative)
        subject = Writer(target, name, conventions_of(options), claims=claims, longest=target.config.context)
    elif isinstance(target, Bert):
        subject = Reader(target, name, conventions_of(options), claims=READERS, longest=target.config.context)
    elif isinstance(target, Transformer):
        longest = target.config.context
        own = conventions_of(options, left=False)
        subject = Written(target, name, own, claims=WRITERS, longest=longest)
        subject.parts = [
            Encoded(target, f"{name}, its encoder", Conventions(), claims=READERS, longest=longest),
            Read(target, f"{name}, the text it reads", Conventions(), claims=READERS, longest=longest),
        ]
    elif isinstance(target, ViT | DaViT | SpatialTransformer):
        config: Any = target.config
        rows, columns = getattr(config, "image", (37, 53))
        image = options.get("image") or (config.channels, rows, columns)
        subject = Pictures(target, name, conventions_of(options), image=image)
        subject.claims = (*SOBER, "paths")
    else:
        return None
    subject.declared = f"Regard's {type(target).__name__}"
    return subject


class Text(Model):
    """Ids in, a row for each out."""

    def __init__(
        self, target: Any, name: str, conventions: Conventions, *, claims: tuple[str, ...], longest: int | None
    ) -> None:
        super().__init__(target, name, conventions, vocabulary=target.config.vocabulary, longest=longest)
        self.longest = longest
        self.claims = claims

    def find_abilities(self) -> None:
        self.abilities |= {"aligned", "lengths", "gradients", "mask"}

    @property
    def channels(self) -> int:
        return max(64, self.target.config.dim)


class Writer(Text):
    """A GPT: lengths for padding on the left, patterns and positions for any other."""

    def find_abilities(self) -> None:
        super().find_abilities()
        self.caching = Remembered(self)
        self.abilities.add("cache")

    def call(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        if mask is not None and is_padding(mask, "left"):
            return self.target(x, lengths=mask.sum(-1), **more)
        return self._by_pattern(x, mask, **more)

    def _by_pattern(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        if mask is not None:
            more |= {"pattern": seen(mask[:, None], *x.shape), "positions": positions(mask)}
        return self.target(x, **more)

    def ways(self) -> dict[str, Way]:
        return {"pattern and positions": self._by_pattern, "the last place alone": self._last}

    def _last(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        output = self.run(x, mask)
        if mask is None:
            output = torch.cat((output[:, :-1], self.target(x, last=True)), 1)
        return output


class Reader(Text):
    """A BERT: lengths for padding on the right, patterns and positions for any other."""

    def call(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Any:
        if mask is None:
            return self.target(x).hidden
        if is_padding(mask, "right"):
            return self.target(x, lengths=mask.sum(-1)).hidden
        return self._by_pattern(x, mask)

    def _by_pattern(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return self.target.hidden(x)
        return self.target.hidden(x, positions=positions(mask), pattern=seen(mask[:, None], *x.shape))

    def ways(self) -> dict[str, Way]:
        return {"pattern and positions": self._by_pattern}


class Written(Text):
    """The text that a translator writes; the one it reads is the same for every row."""

    def find_abilities(self) -> None:
        super().find_abilities()
        self.caching = Continued(self)
        self.abilities.add("cache")

    def other(self, batch: int) -> Tensor:
        return Dice(0, "other").integers(0, self.vocabulary, 1, OTHER).expand(batch, OTHER)

    def call(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        source, target = self.other(x.shape[0]), self.target
        if mask is None or is_padding(mask, "right"):
            return target(source, x, target_lengths=None if mask is None else mask.sum(-1))
        pattern = seen(mask[:, None], *x.shape)
        return target.output(target.decode(x, target.encode(source), pattern=pattern))


class Encoded(Text):
    """What a translator's encoder makes of the text it reads."""

    def call(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        if mask is None:
            return self.target.encode(x)
        return self.target.encode(x, pattern=seen(mask[:, None], *x.shape), positions=positions(mask))


class Read(Text):
    """The text that a translator reads; what it writes stays the same, and so the output has its rows."""

    def find_abilities(self) -> None:
        self.abilities |= {"lengths", "gradients", "mask"}

    def call(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        target = self.target
        written = Dice(0, "other").integers(0, self.vocabulary, 1, OTHER).expand(x.shape[0], OTHER)
        if mask is None or is_padding(mask, "right"):
            return target(x, written, source_lengths=None if mask is None else mask.sum(-1))
        pattern = seen(mask[:, None], *x.shape)
        context = target.encode(x, pattern=pattern, positions=positions(mask))
        hidden = seen(mask[:, None], x.shape[0], OTHER)
        return target.output(target.decode(written, context, context_pattern=hidden))


class Pictures(Images):
    """Images, in whichever order memory keeps their channels."""

    def ways(self) -> dict[str, Way]:
        return {"channels last": lambda x, mask=None: self.run(x.contiguous(memory_format=torch.channels_last))}


class Remembered(Remembering):
    """The memory of a GPT."""

    def start(self, batch: int, tokens: int) -> Memory:
        return self.subject.target.new_memory()

    def step(self, state: Any, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        return self.subject.target(x, memory=state, **self.padding(x, mask)), state


class Continued(Remembered):
    """The memory of a translator, who read the other text at the first step."""

    def step(self, state: Any, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        target = self.subject.target
        context = target.encode(self.subject.other(x.shape[0])) if state.length == 0 else None
        if mask is not None and not bool(mask.all()):
            raise CacheError(
                "A translator does not pad what it writes.",
                asked=f"a mask of {mask.sum(-1).tolist()} real tokens out of {mask.shape[1]}",
                because="every translation begins with its first token",
                instead="padding of the text that it reads",
            )
        return target.output(target.decode(x, context, memory=state)), state


__all__ = ["recognise"]
