"""How a script gets its target: by importing it, by making it anew with the same seed, or from a pickle."""

from __future__ import annotations

import base64
import importlib
import io
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.adapters.base import Adapter
from regard.laws.recording import Inexpressible

# The largest pickle that is put into a script, in bytes after compression.
LARGEST = 4_000_000


@dataclass(frozen=True)
class TargetSource:
    """The code of a function `make()` that gives a new instance of the target; whether that is a plain function."""

    code: str
    function: bool


def find_source(view: Adapter, target: str, seed: int) -> Iterator[TargetSource]:
    """Code that builds the target, the most readable first. Raises `Inexpressible` if there is none."""
    function = not isinstance(view.target, nn.Module)
    if target and ":" in target and not target.startswith(("transformers:", "timm:")) and not Path(target).exists():
        yield TargetSource(_write_import_of_text(target, seed), function)
    elif function:
        yield TargetSource(_write_import_of_name(view._unused), function)
    if not function:
        yield TargetSource(_write_pickle(view._unused), function)


def _write_import_of_text(target: str, seed: int) -> str:
    """`module:name(arguments)` or `file.py:name`, as the command line has it; a class is built without arguments."""
    head, bracket, rest = target.partition("(")
    place, _, path = head.rpartition(":")
    call = f"module.{path}"
    return _write_loader(
        place, f"{call}({rest}" if bracket else f"{call}() if isinstance({call}, type) else {call}", seed
    )


def _write_import_of_name(function: Any) -> str:
    """A function that can be imported by its own name."""
    place, path = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not place or not path or "<" in path:
        raise Inexpressible(
            "the target is a lambda or a local function, which a script cannot import; script(target='module:name')"
        )
    module = sys.modules.get(place)
    file = getattr(module, "__file__", None)
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise Inexpressible(f"{place} has no {path} that a script could import")
    if place == "__main__":
        if file is None:
            raise Inexpressible("the target was defined in a session, which a script cannot import")
        place = str(Path(file).resolve())
    return _write_loader(place, f"module.{path}", 0)


def _write_loader(place: str, call: str, seed: int) -> str:
    """A function that imports a module anew and returns the result of `call`."""
    if place.endswith(".py"):
        file = Path(place).resolve()
        folder, spec = file.parent, f"importlib.util.spec_from_file_location({file.stem!r}, {str(file)!r})"
    else:
        folder, spec = _find_import_folder(place), f"importlib.util.find_spec({place!r})"
    insert = f"    sys.path.insert(0, {str(folder)!r})\n" if folder is not None else ""
    return (
        "\n\ndef make():\n"
        '    """The target, from a module that is imported anew."""\n'
        "    import importlib.util\n\n"
        f"{insert}    spec = {spec}\n"
        "    module = importlib.util.module_from_spec(spec)\n"
        "    spec.loader.exec_module(module)\n"
        f"    torch.manual_seed({seed})\n"
        f"    return {call}\n"
    )


def _find_import_folder(place: str) -> Path | None:
    """The folder from which a module is imported; None for what is installed."""
    module = sys.modules.get(place) or importlib.import_module(place)
    file = getattr(module, "__file__", None)
    if file is None:
        return None
    path = Path(file).resolve()
    installed = Path(sysconfig.get_paths()["purelib"]).resolve()
    if installed in path.parents:
        return None
    depth = place.count(".") + (path.name == "__init__.py")
    return path.parents[depth]


def _write_pickle(module: nn.Module) -> str:
    """A module with its weights, as Python itself writes it down; its classes are imported by name."""
    buffer = io.BytesIO()
    try:
        torch.save(module, buffer)
    except Exception as failure:
        raise Inexpressible(
            f"the target cannot be pickled ({type(failure).__name__}), nor is it named; script(target='module:name')"
        ) from failure
    packed = base64.b85encode(zlib.compress(buffer.getvalue())).decode()
    if len(packed) > LARGEST:
        raise Inexpressible(
            f"the target has {len(packed):,} bytes of weights; script(target='module:name') makes it anew"
        )
    folders = sorted(
        {str(folder) for part in module.modules() if (folder := _find_import_folder(type(part).__module__))}
    )
    inserts = "".join(f"    sys.path.insert(0, {folder!r})\n" for folder in folders)
    return (
        "\n\ndef make():\n"
        '    """The target with its weights; its class is imported by name."""\n'
        "    import base64\n    import io\n    import zlib\n\n"
        f"{inserts}    packed = {packed!r}\n"
        "    return torch.load(io.BytesIO(zlib.decompress(base64.b85decode(packed))), weights_only=False)\n"
    )
