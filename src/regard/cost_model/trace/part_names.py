"""Names of parts: paths of modules, in which repeated layers have one name."""

from __future__ import annotations

from collections import Counter

from torch import nn


class PartNames:
    """Parts by the paths of modules: `encoder.layer.3.output` is part of `encoder.layer.*.output`.

    An index becomes a star where its siblings are of the same class and their largest parameters of the same shape.
    Stages of different widths keep their indices.
    """

    def __init__(self, root: nn.Module | None) -> None:
        self.starred: set[str] = set()
        self._known: dict[str, str] = {}
        for name, module in () if root is None else root.named_modules():
            children = {key: child for key, child in module.named_children() if key.isdigit()}
            kinds = {key: _kind_of(child) for key, child in children.items()}
            often = Counter(kinds.values())
            prefix = f"{name}." if name else ""
            self.starred |= {f"{prefix}{key}" for key, kind in kinds.items() if often[kind] > 1}

    def find_part(self, path: str, default: str) -> str:
        """The part of a path; `default` for what runs outside of every submodule."""
        if not path:
            return default
        if path not in self._known:
            words = path.split(".")
            prefixes = [".".join(words[: count + 1]) for count in range(len(words))]
            self._known[path] = ".".join(
                "*" if prefix in self.starred else word for word, prefix in zip(words, prefixes, strict=True)
            )
        return self._known[path]


def _kind_of(module: nn.Module) -> tuple[type, tuple[int, ...]]:
    largest = max(module.parameters(), key=lambda parameter: parameter.numel(), default=None)
    return type(module), () if largest is None else tuple(largest.shape)


def list_parameters(root: nn.Module | None) -> list[tuple[str, str, tuple[int, ...]]]:
    """Path of the module, name and shape of every parameter; a shared one belongs to the first module that has it."""
    found: list[tuple[str, str, tuple[int, ...]]] = []
    seen: set[int] = set()
    for path, module in () if root is None else root.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found.append((path, name, tuple(parameter.shape)))
    return found
