"""Errors that say what was asked, what was found, why that cannot be, and what to do instead."""

from __future__ import annotations


class RegardError(Exception):
    """The family of every error Regard raises on purpose.

    The message has one headline and up to four labelled parts:

        BackendError: 'sdpa' cannot run this attention.
          asked    pattern Window(3, 0) | beta inf
          found    query (2, 3, 5, 7)  key (2, 3, 11, 7)
          because  torch's SDPA has no hard limit
          instead  backend="reference", or leave backend="auto"
    """

    def __init__(self, headline: str, *, asked: str = "", found: str = "", because: str, instead: str) -> None:
        self.headline = headline
        self.asked = asked
        self.found = found
        self.because = because
        self.instead = instead
        parts = {"asked": asked, "found": found, "because": because, "instead": instead}
        lines = [headline]
        for label, text in parts.items():
            if text:
                first, *rest = text.split("\n")
                lines.append(f"  {label:<8} {first}")
                lines.extend(" " * 11 + line for line in rest)
        super().__init__("\n".join(lines))


class PatternError(RegardError, ValueError):
    """A pattern that cannot exist, or that does not fit the lengths it is used with."""


class BiasError(RegardError, ValueError):
    """A bias that cannot exist, or that does not fit the attention it is added to."""


class ShapeError(RegardError, ValueError):
    """Tensors whose shapes, dtypes or devices do not belong together."""


class BackendError(RegardError, RuntimeError):
    """A backend was named that cannot run the attention it was asked for."""


class CalculusError(RegardError, ValueError):
    """An argument outside the domain of a formula."""


class ConfigError(RegardError, ValueError):
    """A configuration that names something unknown, or whose sizes do not belong together."""


class CheckpointError(RegardError, ValueError):
    """Files or tensors that do not make the model they were asked to make."""


class InputError(RegardError, ValueError):
    """Tokens, images or lengths that a model cannot read."""


class CacheError(RegardError, ValueError):
    """A cache that is asked for what it does not hold."""
