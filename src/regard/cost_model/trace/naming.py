"""Names of parts: paths of modules, in which layers that are alike have one name."""

from __future__ import annotations

from collections import Counter

from torch import nn


class Names:
    """Parts by the paths of modules: `encoder.layer.3.output` is part of `encoder.layer.*.output`.

    A number becomes a star where the modules beside it are of the same class and their largest parameters of the same
    shape. Stages of different widths keep their numbers.
    """

    def __init__(self, root: nn.Module | None) -> None:
        self.starred: set[str] = set()
        self._known: dict[str, str] = {}
        for name, module in () if root is None else root.named_modules():
            children = {key: child for key, child in module.named_children() if key.isdigit()}
            kinds = {key: _kind(child) for key, child in children.items()}
            often = Counter(kinds.values())
            prefix = f"{name}." if name else ""
            self.starred |= {f"{prefix}{key}" for key, kind in kinds.items() if often[kind] > 1}

    def part(self, path: str, alone: str) -> str:
        """The part of a path; what runs outside of every module inside is called `alone`."""
        if not path:
            return alone
        if path not in self._known:
            words = path.split(".")
            whole = [".".join(words[: count + 1]) for count in range(len(words))]
            self._known[path] = ".".join(
                "*" if prefix in self.starred else word for word, prefix in zip(words, whole, strict=True)
            )
        return self._known[path]


def _kind(module: nn.Module) -> tuple[type, tuple[int, ...]]:
    largest = max(module.parameters(), key=lambda parameter: parameter.numel(), default=None)
    return type(module), () if largest is None else tuple(largest.shape)


def parameters_by_part(root: nn.Module | None, names: Names) -> dict[str, int]:
    """How many numbers each part learns; what two parts share belongs to the first."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    for path, module in () if root is None else root.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            part = names.part(path, name)
            found[part] = found.get(part, 0) + parameter.numel()
    return found
