"""Load the function or module that the text TARGET of a command line names. The text is parsed, never evaluated."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from regard.adapters.third_party_imports import import_quietly
from regard.errors import InputError, RegardError

FORMS = """mypackage.attention:attend        a function, or a module that exists
mypackage.attention:Attention     a class, built without arguments
"mypackage:Attention(24, heads=3)" a class or a function that makes one, with plain values
path/to/file.py:attend            the same from a file
transformers:GPT2LMHeadModel      a tiny random model of a class of Hugging Face
timm:vit_tiny_patch16_224         a model of timm, with random weights
path/to/checkpoint                a folder with a config.json, or a file of weights"""


def load_target(text: str, seed: int = 0, full_size: bool = False, empty: bool = False) -> Any:
    """The target that a text names; random weights depend on the seed alone.

    full_size: build a class of Hugging Face with its default configuration instead of a tiny one.
    empty: build models of libraries and checkpoints on the meta device, where their constructors allow it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if ":" not in text or Path(text).exists():
            return _load_checkpoint(text, empty)
        place, _, name = text.rpartition(":") if "(" not in text else text[: text.index("(")].rpartition(":")
        if not name or not place:
            raise _make_target_error(text, "a place and a name are needed, on either side of the colon")
        if "(" in text:
            name += text[text.index("(") :]
        if place == "transformers":
            return _load_hugging_face(text, name, empty) if full_size else _load_tiny_hugging_face(text, name, seed)
        if place == "timm":
            return _load_timm(text, name, empty)
        return _load_from_module(text, place, name, seed)


def set_attention(target: Any, name: str) -> None:
    """Let a model of Hugging Face use this implementation of attention."""
    if not hasattr(target, "set_attn_implementation"):
        raise InputError(
            f"{type(target).__name__} has no implementations of attention.",
            asked=f"--attn {name}",
            because="only models of Hugging Face choose theirs by name",
            instead="transformers:LlamaForCausalLM, say, or no --attn",
        )
    if name == "regard":
        importlib.import_module("regard.integrations.transformers")  # registers it
    try:
        target.set_attn_implementation(name)
    except (ValueError, KeyError, ImportError) as failure:
        raise InputError(
            f"{type(target).__name__} does not take this attention.",
            asked=f"--attn {name}",
            found=f"{type(failure).__name__}: {failure}",
            because="the model, or its library, refuses it",
            instead="--attn eager",
        ) from failure


def make_target(target: Any, seed: int = 0) -> Any:
    """The target of an argument: itself, what a text names, or what a class or function without arguments returns."""
    if isinstance(target, str):
        return load_target(target, seed)
    if isinstance(target, nn.Module) or not callable(target) or not _needs_no_arguments(target):
        return target
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return target()


def _needs_no_arguments(target: Any) -> bool:
    """Whether a call without arguments is complete, and meant: `f(*args)` takes none by accident."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if inspect.isclass(target):
        return all(p.default is not p.empty or p.kind in variadic for p in parameters)
    return all(p.default is not p.empty and p.kind not in variadic for p in parameters)


# Names in modules


def _load_from_module(text: str, place: str, name: str, seed: int) -> Any:
    path, arguments = _parse_name(text, name)
    found: Any = _import_module(text, place)
    torch.manual_seed(seed)  # importing may have drawn random numbers
    for depth, part in enumerate(path):
        try:
            found = getattr(found, part)
        except AttributeError as failure:
            owner = ".".join([place, *path[:depth]])
            raise InputError(
                f"{owner} has no {part!r}.",
                asked=text,
                found=_list_callables(found),
                because="the name after the colon is looked up in the module before it",
                instead="one of these, or another module",
            ) from failure
    if arguments is not None:
        return _call_constructor(text, found, *arguments)
    if not inspect.isclass(found):
        return found
    if not _needs_no_arguments(found):
        needed = ", ".join(_list_required_arguments(found))
        raise InputError(
            f"{found.__name__} cannot be built without arguments.",
            asked=text,
            because=f"it needs {needed}",
            instead=f'"{place}:{name}(...)" with plain values for {needed}, or a function that makes one',
        )
    return _call_constructor(text, found, [], {})


def _parse_name(text: str, name: str) -> tuple[list[str], tuple[list[Any], dict[str, Any]] | None]:
    """`a.b` is a path; `a.b(1, c=2)` is a path and arguments."""
    try:
        tree = ast.parse(name, mode="eval").body
        arguments = None
        if isinstance(tree, ast.Call):
            if any(keyword.arg is None for keyword in tree.keywords):
                raise ValueError("**")
            values = [ast.literal_eval(argument) for argument in tree.args]
            arguments = values, {str(word.arg): ast.literal_eval(word.value) for word in tree.keywords}
            tree = tree.func
        path: list[str] = []
        while isinstance(tree, ast.Attribute):
            path.insert(0, tree.attr)
            tree = tree.value
        if not isinstance(tree, ast.Name):
            raise ValueError(name)
        return [tree.id, *path], arguments
    except (SyntaxError, ValueError, TypeError) as failure:
        raise _make_target_error(
            text, "after the colon comes a name, optionally with literal arguments in parentheses"
        ) from failure


def _import_module(text: str, place: str) -> ModuleType:
    """Import a module by its name or file; the current folder comes first, as in Python."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        if place.endswith(".py"):
            return _import_file(text, Path(place))
        if not all(part.isidentifier() for part in place.split(".")):
            raise _make_target_error(text, f"{place!r} is the name of no module")
        return importlib.import_module(place)
    except RegardError:
        raise
    except (Exception, SystemExit) as failure:  # a user's module may fail in any way while it is imported
        missing = isinstance(failure, ModuleNotFoundError) and place.startswith(failure.name or "\0")
        raise InputError(
            f"there is no module {failure.name!r}." if missing else f"{place} cannot be imported.",  # type: ignore[attr-defined]
            asked=text,
            found=f"{type(failure).__name__}: {failure}",
            because=f"it is neither in {here} nor installed" if missing else "importing it fails",
            instead="the module's full name, from the folder that holds it; or path/to/file.py:name"
            if missing
            else f"python {place} shows where"
            if place.endswith(".py")
            else f"python -c 'import {place}' shows where",
        ) from failure


def _import_file(text: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(
            f"there is no file {path}.",
            asked=text,
            because=f"the current folder is {os.getcwd()}",
            instead="check the path",
        )
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # the file's own imports
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _call_constructor(text: str, maker: Any, values: list[Any], words: dict[str, Any]) -> Any:
    name = getattr(maker, "__name__", type(maker).__name__)
    try:
        return maker(*values, **words)
    except (Exception, SystemExit) as failure:  # the constructor's own error; its message is passed on
        given = ", ".join([*map(repr, values), *(f"{key}={value!r}" for key, value in words.items())])
        raise InputError(
            f"{name}({given}) failed.",
            asked=text,
            found=f"{type(failure).__name__}: {failure}",
            because="there is no target if its constructor fails",
            instead=f"other arguments, or a function without arguments that makes one: {text.split('(')[0]}()",
        ) from failure


def _list_required_arguments(kind: Any) -> list[str]:
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):
        return ["arguments"]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        parameter.name for parameter in parameters if parameter.default is parameter.empty and parameter.kind in kinds
    ]


def _list_callables(owner: Any) -> str:
    names = [name for name, value in vars(owner).items() if callable(value) and not name.startswith("_")]
    own = [
        name for name in names if getattr(getattr(owner, name), "__module__", "") == getattr(owner, "__name__", None)
    ]
    shown = (own or names)[:12]
    return ", ".join(shown) + (", ..." if len(own or names) > 12 else "") if shown else "nothing callable"


# Third-party models


def _load_tiny_hugging_face(text: str, name: str, seed: int) -> nn.Module:
    _import_library("transformers", text)
    from regard.adapters.huggingface import tiny

    name, words = _parse_keywords(text, name)
    return tiny(name, seed=seed, **words)


def _load_hugging_face(text: str, name: str, empty: bool) -> nn.Module:
    """A class of Hugging Face with its default configuration: `BertModel` is BERT-base."""
    transformers = _import_library("transformers", text)
    name, words = _parse_keywords(text, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names are imported on first use, with the warnings of what they need
        kind: Any = getattr(transformers, name, None)
    if getattr(kind, "config_class", None) is None:
        raise InputError(
            f"transformers has no model {name!r}.",
            asked=text,
            because=f"transformers {transformers.__version__} has no such class of models",
            instead="a class with a configuration, such as GPT2LMHeadModel or BertModel",
        )
    config = _call_constructor(text, kind.config_class, [], words)
    return _build_model(text, kind, [config], {}, empty).eval()


def _build_model(text: str, maker: Any, values: list[Any], words: dict[str, Any], empty: bool) -> nn.Module:
    """The model that a constructor builds; `empty` on the meta device, unless the constructor needs real values."""
    if empty:
        try:
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # initialising weights on the meta device warns
                return maker(*values, **words)
        except Exception:  # a constructor that reads values of tensors
            pass
    return _call_constructor(text, maker, values, words)


def _load_timm(text: str, name: str, empty: bool = False) -> nn.Module:
    timm = _import_library("timm", text)
    name, words = _parse_keywords(text, name)
    if not timm.is_model(name):
        close = timm.list_models(f"*{name.split('_')[0]}*")[:6]
        raise InputError(
            f"timm has no model {name!r}.",
            asked=text,
            found=f"timm {timm.__version__}",
            because="it is not in the list of timm.list_models()",
            instead=", ".join(close) or "vit_tiny_patch16_224",
        )
    return _build_model(text, timm.create_model, [name], {"pretrained": False, **words}, empty)


def _parse_keywords(text: str, name: str) -> tuple[str, dict[str, Any]]:
    """`name(argument=value)` as the name and its keyword arguments."""
    if "(" not in name:
        return name, {}
    path, arguments = _parse_name(text, name)
    if arguments is None or arguments[0]:
        raise _make_target_error(text, "the model of a library takes keyword arguments: name(argument=value)")
    return ".".join(path), arguments[1]


def _import_library(name: str, asked: str) -> Any:
    try:
        return import_quietly(name)
    except Exception as failure:  # an import may fail with anything
        raise InputError(
            f"{name} cannot be imported.",
            asked=asked,
            found=f"{type(failure).__name__}: {failure}",
            because="the target is a model of this library",
            instead=f"pip install {name}",
        ) from failure


# Checkpoints


def _load_checkpoint(text: str, empty: bool = False) -> nn.Module:
    path = Path(text).expanduser()
    if not path.exists():
        raise _make_target_error(text, "it has no colon (module:name), and there is no such file or folder")
    if path.is_dir() and not (path / "config.json").is_file():
        raise InputError(
            f"{path} is no checkpoint.",
            asked=text,
            found="a folder without a config.json" if any(path.iterdir()) else "an empty folder",
            because="config.json names the model class",
            instead="the folder that save_pretrained wrote",
        )
    config = _read_config(path)
    kind = str(config.get("model_type", ""))
    if path.is_dir() and kind and not kind.startswith("regard."):
        try:
            transformers = import_quietly("transformers")
        except Exception:  # without transformers, try the converters of regard.models
            return _load_regard_checkpoint(path, text, config)
        try:
            # The class that was saved, with its head; code in the folder is never run.
            named = [str(name) for name in config.get("architectures") or ()]
            kind_of_model = getattr(transformers, named[0], None) if named else None
            loaded = kind_of_model or transformers.AutoModel
            if empty and kind_of_model is not None:
                config = kind_of_model.config_class.from_pretrained(path, local_files_only=True)
                return _build_model(text, kind_of_model, [config], {}, empty).eval()
            return loaded.from_pretrained(path, local_files_only=True, trust_remote_code=False).eval()
        except Exception as failure:  # its own errors, of many kinds
            raise InputError(
                f"transformers does not read {path}.",
                asked=text,
                found=f"{type(failure).__name__}: {str(failure).strip().splitlines()[0]}",
                because=f"its config.json says model_type {kind!r}",
                instead="a folder that AutoModel.from_pretrained reads",
            ) from failure
    return _load_regard_checkpoint(path, text, config)


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path.with_name("config.json")
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as failure:
        raise InputError(
            f"{file} cannot be read.",
            found=f"{type(failure).__name__}: {failure}",
            because="config.json names the model class",
            instead="the folder that save_pretrained wrote",
        ) from failure
    return config if isinstance(config, dict) else {}


def _load_regard_checkpoint(path: Path, text: str, config: dict[str, Any]) -> nn.Module:
    """Load a checkpoint with the first class of regard.models that can read it."""
    from regard import models
    from regard.models.pretrained import Pretrained

    kinds = [kind for kind in vars(models).values() if inspect.isclass(kind) and issubclass(kind, Pretrained)]
    refusals = []
    for kind in kinds:
        if str(config.get("model_type", "")) not in ("", f"regard.{kind.__name__.lower()}") and not any(
            converter.matches(config) for converter in kind.converters.values()
        ):
            continue
        try:
            return kind.from_pretrained(path)
        except RegardError as refusal:
            refusals.append(f"{kind.__name__}: {refusal.headline}")
    raise InputError(
        f"no model class reads {path}.",
        asked=text,
        found="\n".join(refusals) or f"model_type {config.get('model_type')!r}",
        because=f"known are {', '.join(kind.__name__ for kind in kinds)}",
        instead="a function that loads it: mymodule:load()",
    )


def _make_target_error(text: str, because: str) -> InputError:
    return InputError(f"{text!r} is no target.", because=because, instead=FORMS)
