"""Errors that say what was asked, what was found, why that cannot be, and what to do instead."""

from __future__ import annotations


class RegardError(Exception):
    """The family of every error Regard raises on purpose.

    The message has one headline and up to four labelled parts:

        BackendError: 'sdpa' cannot run this attention.
          asked    pattern Window(3, 0) | scale inf
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
        super().__init__(_format_parts(headline, asked=asked, found=found, because=because, instead=instead))


def _format_parts(headline: str, **parts: str) -> str:
    """A headline and its labelled parts, those without words left out."""
    lines = [headline]
    for label, text in parts.items():
        if text:
            first, *rest = text.split("\n")
            lines.append(f"  {label:<8} {first}")
            lines.extend(" " * 11 + line for line in rest)
    return "\n".join(lines)


class PatternError(RegardError, ValueError):
    """A pattern that cannot exist, or that does not fit the lengths it is used with."""


class BiasError(RegardError, ValueError):
    """A bias that cannot exist, or that does not fit the attention it is added to."""


class MaskWarning(UserWarning):
    """A bias that looks like a mask of zeros and ones: added to the scores, it hides nothing."""


class ShapeError(RegardError, ValueError):
    """Tensors whose shapes, dtypes or devices do not belong together."""


class BackendError(RegardError, RuntimeError):
    """The named backend cannot run this attention."""


class CalculusError(RegardError, ValueError):
    """An argument outside the domain of a formula."""


class ConfigError(RegardError, ValueError):
    """A configuration that names something unknown, or whose sizes do not belong together."""


class ProcessError(RegardError, RuntimeError):
    """Another process of a run that died or does not answer."""


class CheckpointError(RegardError, ValueError):
    """Files or tensors that do not fit the model."""


class InputError(RegardError, ValueError):
    """Tokens, images or lengths that a model cannot read."""


class CacheError(RegardError, ValueError):
    """A cache that does not hold what is needed."""


class CostError(RegardError, ValueError):
    """A cost that cannot be computed: a size is missing, or the target cannot be traced."""


class PageError(RegardError, AssertionError):
    """A page of the book that cannot be parsed, or whose code fails; also an AssertionError, for test runners."""


class AnswerError(RegardError, ValueError):
    """An answer to a problem that cannot be read: not a formula, number or matrix, or a function that does not run."""


class LawViolation(RegardError, AssertionError):
    """A law that is claimed and does not hold; also an AssertionError, for test runners.

        LawViolation: causality - a later token changed an earlier output.
          subject  SelfAttention(dim=7, heads=1)
          smallest batch=1, tokens=2, prefix=1
                   # batch: fails at every size tried: 1, 2, 3
          meaning  batch: batch size, tokens: sequence length, prefix: tokens before those that are replaced
          changed  input[:, 1]  ->  output[0, 0] moved by 3.1e-02, bound 1.2e-06
          replay   regard check mymodule:attention --law causality --seed 7

    Attributes:
        law: its slug.
        parts: what is printed after each label: subject, smallest, meaning, changed, because, likely, replay.
        others: the violations beside this one, if several laws are broken; the message has them all.
    """

    def __init__(self, law: str, headline: str, parts: dict[str, str], others: tuple[LawViolation, ...] = ()) -> None:
        self.law = law
        self.headline = headline
        self.parts = parts
        self.others = others
        alone = _format_parts(f"{law} - {headline}", **parts)
        Exception.__init__(self, "\n\n".join([alone, *(f"{type(other).__name__}: {other}" for other in others)]))

    def __reduce__(self) -> tuple[type[LawViolation], tuple[object, ...]]:
        return type(self), (self.law, self.headline, self.parts, self.others)
