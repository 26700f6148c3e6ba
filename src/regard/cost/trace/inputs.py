"""What to feed a target: given by the caller, or guessed from what the module says of itself."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regard.cost.asked import Asked
from regard.cost.letters import MEANINGS
from regard.cost.trace.subject import Subject
from regard.errors import CostError

TOKENS, CONTEXT, PIXELS = 128, 96, 64  # where nobody says how many; they stay letters
STRIDE = 32  # pixels by which images are varied: what most networks for images are built for


@dataclass(frozen=True, eq=False)
class Shape:
    """A tensor to be made: sizes, some of them letters; in which numbers, `None` for the module's; whether it learns.

    What learns is what something before it would have made: tokens inside a network do, images and ids do not.
    """

    axes: tuple[int | str, ...]
    dtype: torch.dtype | None = None
    learns: bool = False

    def at(self, sizes: Mapping[str, int], dtype: torch.dtype) -> Tensor:
        shape = tuple(sizes[axis] if isinstance(axis, str) else axis for axis in self.axes)
        made = torch.zeros(shape, dtype=self.dtype or dtype)
        return made.requires_grad_() if self.learns and made.is_floating_point() else made


@dataclass
class Fed:
    """Arguments with `Shape` in place of tensors, and the letters in them.

    Attributes:
        sizes: a number for every letter.
        known: letters whose number the caller gave, or the module has.
        steps: by how much a letter is varied, where not by one.
        limits: the largest number of a letter that the module is for.
        otherwise: the same with letters on more axes, if those here do not go together.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    steps: dict[str, int] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    otherwise: Fed | None = None

    def made(self, sizes: Mapping[str, int], dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments; one `Shape` in two places is one tensor."""
        tensors: dict[int, Tensor] = {}

        def make(value: Any) -> Any:
            if isinstance(value, Shape):
                if id(value) not in tensors:
                    tensors[id(value)] = value.at(sizes, dtype)
                return tensors[id(value)]
            if isinstance(value, Mapping):
                return {key: make(each) for key, each in value.items()}
            if isinstance(value, list | tuple):
                return type(value)(make(each) for each in value)
            return value

        return tuple(make(value) for value in self.args), {key: make(value) for key, value in self.kwargs.items()}

    @property
    def letters(self) -> list[str]:
        """The letters that occur."""
        return [name for name in self.sizes if any(name in shape.axes for shape in self.shapes())]

    def shapes(self) -> list[Shape]:
        found: list[Shape] = []

        def look(value: Any) -> None:
            if isinstance(value, Shape):
                found.append(value)
            elif isinstance(value, Mapping | list | tuple):
                for each in value.values() if isinstance(value, Mapping) else value:
                    look(each)

        look(self.args)
        look(self.kwargs)
        return found


def feed(subject: Subject, asked: Asked) -> Fed:
    """What to feed a subject."""
    if asked.inputs is not None:
        return given(asked)
    fed = _guessed(subject, asked)
    if fed is None:
        raise CostError(
            f"Nobody knows what {subject.name} reads.",
            asked=f"cost({subject.name})",
            because="it is no model or layer that says what its input is, and no inputs were given",
            instead='cost(..., inputs=(1, 128, 512)), or with letters: inputs=("B", "N", 512), tokens=128; '
            "from a shell --input 1,128,512, once for each input",
        )
    return fed


# Given by the caller


def given(asked: Asked) -> Fed:
    """Tensors, shapes, and tuples or dictionaries of them. Sizes in a shape may be letters: `("B", "N", 512)`."""
    sizes = _sizes_of(asked)
    known: set[str] = {"B"} | {name for name in _asked_sizes(asked)}
    inputs = asked.inputs

    def read(value: Any) -> Any:
        if isinstance(value, Tensor):
            return Shape(tuple(value.shape), value.dtype, value.requires_grad)
        if _is_shape(value):
            axes = tuple(_axis(size) for size in value)
            return Shape(axes, None, learns=len(axes) != 4)
        if isinstance(value, Mapping):
            return {key: read(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(read(each) for each in value)
        return value

    if isinstance(inputs, Mapping):
        fed = Fed((), {key: read(value) for key, value in inputs.items()}, sizes, known)
    else:
        alone = isinstance(inputs, Tensor) or _is_shape(inputs)
        fed = Fed((read(inputs),) if alone else tuple(read(value) for value in inputs), {}, sizes, known)
    if not any(isinstance(axis, str) for shape in fed.shapes() for axis in shape.axes):
        return _lettered(fed, asked)
    return fed


def _is_shape(value: Any) -> bool:
    whole = isinstance(value, list | tuple) and len(value) > 0
    return whole and all(isinstance(size, int | str) and not isinstance(size, bool) for size in value)


def _axis(size: int | str) -> int | str:
    if isinstance(size, int):
        return size
    for letter, (keyword, _) in MEANINGS.items():
        if size in (letter, keyword) and letter in KEYWORDS:
            return letter
    raise CostError(
        f"No input has {size!r} on an axis.",
        asked=f"{size!r} in a shape",
        because=f"sizes that vary are {', '.join(f'{letter} ({keyword})' for letter, keyword in KEYWORDS.items())}",
        instead='inputs=("B", "N", 512)',
    )


def _lettered(fed: Fed, asked: Asked) -> Fed:
    """Letters for shapes of plain numbers: N where a size is the `tokens` asked for, B for a first size they share.

    A weight may have as many channels as there are tokens, so that N is first put where the first input has it, and on
    the same axis of those that have as many axes; on every axis of that size only if this does not go together.
    """
    shapes = fed.shapes()
    first = {shape.axes[0] for shape in shapes if len(shape.axes) > 1}
    shared = len(first) == 1 and all(len(shape.axes) > 1 for shape in shapes)
    batch = next(iter(first)) if shared else None
    numbers = {asked.tokens: "N", asked.context_tokens: "T", asked.keys: "M"}
    numbers.pop(None, None)
    homes: dict[str, tuple[int, int]] = {}
    for shape in shapes:
        for place, axis in enumerate(shape.axes):
            if axis in numbers and not (place == 0 and axis == batch and len(shape.axes) > 2):
                homes.setdefault(numbers[axis], (len(shape.axes), place))

    def named(shape: Shape, everywhere: bool) -> Shape:
        axes: list[int | str] = []
        for place, axis in enumerate(shape.axes):
            name = numbers.get(axis)  # type: ignore[call-overload]
            at_home = name is not None and homes.get(name) == (len(shape.axes), place)
            if name is not None and (everywhere or at_home):
                axes.append(name)
            else:
                axes.append("B" if place == 0 and batch is not None and axis == batch else axis)
        return Shape(tuple(axes), shape.dtype, shape.learns)

    def read(value: Any, everywhere: bool) -> Any:
        if isinstance(value, Shape):
            return named(value, everywhere)
        if isinstance(value, Mapping):
            return {key: read(each, everywhere) for key, each in value.items()}
        return type(value)(read(each, everywhere) for each in value) if isinstance(value, list | tuple) else value

    sizes = {**fed.sizes, **({"B": int(batch)} if isinstance(batch, int) else {})}
    all_of_them = Fed(read(fed.args, True), read(fed.kwargs, True), sizes, fed.known)
    made = Fed(read(fed.args, False), read(fed.kwargs, False), sizes, fed.known)
    if [shape.axes for shape in made.shapes()] != [shape.axes for shape in all_of_them.shapes()]:
        made.otherwise = all_of_them
    return made


KEYWORDS = {"B": "batch", "N": "tokens", "M": "keys", "T": "context_tokens", "R": "rows", "W": "columns"}


def _asked_sizes(asked: Asked) -> dict[str, int]:
    """Letters that the caller gave a number."""
    rows, columns = asked.image or (None, None)
    every = {"N": asked.tokens, "M": asked.keys, "T": asked.context_tokens, "R": rows, "W": columns}
    return {name: size for name, size in every.items() if size is not None}


def _sizes_of(asked: Asked) -> dict[str, int]:
    base = {"N": TOKENS, "M": CONTEXT, "T": CONTEXT, "R": PIXELS, "W": PIXELS}
    return {"B": asked.batch, **base, **_asked_sizes(asked)}


# Guessed


def _guessed(subject: Subject, asked: Asked) -> Fed | None:
    module = subject.module
    if module is None or subject.target is not module:
        return None
    sizes, known = _sizes_of(asked), {"B", *_asked_sizes(asked)}
    config = getattr(module, "config", None)
    if hasattr(config, "model_type"):
        return _hugging_face(module, config, Fed((), {}, sizes, known), subject)
    for describe in (_configured, _for_images, _torch_module, _by_first_layer):
        fed = describe(module, Fed((), {}, sizes, known))
        if fed is not None:
            return fed
    return None


def _limited(fed: Fed, limit: Any, letter: str = "N") -> None:
    """A text that is no longer than the positions there are, where nobody says how long it is."""
    if isinstance(limit, int) and limit > 0:
        fed.limits[letter] = limit
        if letter not in fed.known:
            fed.sizes[letter] = min(fed.sizes[letter], limit)


def _hugging_face(module: nn.Module, config: Any, fed: Fed, subject: Subject) -> Fed:
    """By the name of the main input, which every model of transformers has."""
    main = getattr(module, "main_input_name", "input_ids")
    accepted = subject.accepts
    if "use_cache" in accepted:
        fed.kwargs["use_cache"] = False
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    _limited(fed, limit)
    ids = Shape(("B", "N"), torch.int64)
    if main == "pixel_values":
        _image(fed, getattr(config, "image_size", None) or 224, int(getattr(config, "num_channels", 3)))
        fed.kwargs["pixel_values"] = fed.args[0]
        fed.args = ()
    elif main == "input_features":
        bins, frames = getattr(config, "num_mel_bins", 80), 2 * int(getattr(config, "max_source_positions", 1500))
        fed.kwargs["input_features"] = Shape(("B", bins, frames))
    elif main == "input_values":
        fed.sizes["N"] = fed.sizes["N"] if "N" in fed.known else 16000
        fed.kwargs["input_values"] = Shape(("B", "N"))
    elif getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        _limited(fed, limit, "T")
        fed.kwargs["input_ids"] = Shape(("B", "T"), torch.int64)
    else:
        fed.kwargs["input_ids"] = ids
        if "pixel_values" in accepted and hasattr(config, "vision_config"):
            seen = config.vision_config
            _image(fed, getattr(seen, "image_size", 224), int(getattr(seen, "num_channels", 3)))
            fed.kwargs["pixel_values"], fed.args = fed.args[0], ()
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        fed.kwargs["decoder_input_ids"] = ids
    return fed


def _image(fed: Fed, size: Any, channels: int, channels_last: bool = False) -> Fed:
    """An image of the size asked for, or of the size that the module is for."""
    rows, columns = (size, size) if isinstance(size, int) else tuple(size)[:2]
    for letter, number in (("R", rows), ("W", columns)):
        if letter not in fed.known:
            fed.sizes[letter] = int(number)
        fed.known.add(letter)
        fed.steps[letter] = STRIDE
    axes = ("B", "R", "W", channels) if channels_last else ("B", channels, "R", "W")
    fed.args = (Shape(axes, learns=channels_last),)
    return fed


def _configured(module: nn.Module, fed: Fed) -> Fed | None:
    """Models of Regard: their forward names tokens, a source and a target, or images."""
    config, names = getattr(module, "config", None), _parameters(module)
    if not type(module).__module__.startswith("regard.models") or config is None:
        return None
    _limited(fed, getattr(config, "context", None))
    _limited(fed, getattr(config, "context", None), "T")
    if names[:2] == ["source", "target"]:
        fed.args = Shape(("B", "T"), torch.int64), Shape(("B", "N"), torch.int64)
    elif names[:1] == ["tokens"]:
        fed.args = (Shape(("B", "N"), torch.int64),)
    elif names[:1] in (["image"], ["images"]):
        return _image(fed, getattr(config, "image", None) or 224, int(getattr(config, "channels", 3)))
    else:
        return None
    return fed


def _for_images(module: nn.Module, fed: Fed) -> Fed | None:
    """timm says what a model is for; torchvision's models begin with a convolution."""
    says = getattr(module, "pretrained_cfg", None) or getattr(module, "default_cfg", None)
    if isinstance(says, Mapping) and len(says.get("input_size") or ()) == 3:
        channels, *size = says["input_size"]
        own = getattr(getattr(module, "patch_embed", None), "img_size", None)  # built for another size than pretrained
        first = next((each for each in module.modules() if isinstance(each, nn.Conv2d)), None)
        return _image(fed, own or size, channels if first is None else first.in_channels)
    return None


def _torch_module(module: nn.Module, fed: Fed) -> Fed | None:
    """Layers of torch and of Regard."""
    if isinstance(module, nn.MultiheadAttention):
        x = _tokens(module.embed_dim, module.batch_first)
        if "M" in fed.known or not module._qkv_same_embed_dim:
            key = _tokens(module.kdim or module.embed_dim, module.batch_first, "M")
            value = _tokens(module.vdim or module.embed_dim, module.batch_first, "M")
            fed.args = x, key, value
        else:
            fed.args = x, x, x
    elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerEncoder):
        attention = _first(module, nn.MultiheadAttention)
        fed.args = (_tokens(attention.embed_dim, attention.batch_first),)
    elif isinstance(module, nn.TransformerDecoderLayer | nn.TransformerDecoder):
        attention = _first(module, nn.MultiheadAttention)
        fed.args = tuple(_tokens(attention.embed_dim, attention.batch_first, letter) for letter in "NT")
    elif isinstance(module, nn.Transformer):
        fed.args = tuple(_tokens(module.d_model, module.batch_first, letter) for letter in "TN")
    elif isinstance(module, nn.RNNBase):
        fed.args = (_tokens(module.input_size, module.batch_first),)
    elif type(module).__name__ in ("GridAttention", "WindowAttention") and type(module).__module__.startswith("regard"):
        inner: Any = getattr(getattr(module, "attention", None), "sizes", None)
        dim = inner.input if inner is not None else int(module.dim)  # type: ignore[arg-type]
        _image(fed, PIXELS, dim, channels_last=True)
        fed.steps["R"], fed.steps["W"] = getattr(module, "window", (1, 1))  # type: ignore[misc]
    elif type(module).__name__ == "MultiHeadAttention" and hasattr(module, "sizes"):
        sizes: Any = module.sizes
        fed.args = (_tokens(sizes.input),)
        if "M" in fed.known or "T" in fed.known or sizes.context != sizes.input:
            letter = "T" if "T" in fed.known else "M"
            fed.args += (_tokens(sizes.context, letter=letter),)
            if sizes.values != sizes.context:
                fed.args += (_tokens(sizes.values, letter=letter),)
    elif type(module).__name__ == "Block" and hasattr(module, "attention_norm"):
        fed.args = (_tokens(module.attention.sizes.input),)  # type: ignore[union-attr]
        if getattr(module, "cross", None) is not None:
            fed.kwargs["context"] = _tokens(module.cross.sizes.context, letter="T")  # type: ignore[union-attr]
    elif type(module).__name__ == "ChannelAttention" and hasattr(module, "dim"):
        fed.args = (_tokens(int(module.dim)),)  # type: ignore[arg-type]
    else:
        return None
    return fed


def _by_first_layer(module: nn.Module, fed: Fed) -> Fed | None:
    """A module that takes one input is fed what its first layer reads."""
    required = [
        parameter
        for parameter in inspect.signature(module.forward).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if len(required) > 1:
        return None
    if isinstance(module, nn.Sequential):
        for child in module:
            nested = _torch_module(child, fed) if any(True for _ in child.parameters()) else None
            if nested is not None:
                return nested
            if any(True for _ in child.parameters()):
                break
    for layer in module.modules():
        fed_layer = _layer(layer, fed)
        if fed_layer is not None:
            return fed_layer
    return None


def _layer(layer: nn.Module, fed: Fed) -> Fed | None:
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        fed.args = (Shape(("B", "N"), torch.int64),)
    elif isinstance(layer, nn.Linear):
        fed.args = (_tokens(layer.in_features),)
    elif isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        fed.args = (Shape(("B", "N", *layer.normalized_shape), learns=True),)
    elif isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
        return _image(fed, 224, layer.in_channels)
    elif isinstance(layer, nn.Conv1d | nn.ConvTranspose1d):
        fed.args = (Shape(("B", layer.in_channels, "N"), learns=True),)
    elif isinstance(layer, nn.BatchNorm2d):
        return _image(fed, 224, layer.num_features)
    elif isinstance(layer, nn.BatchNorm1d):
        fed.args = (Shape(("B", layer.num_features, "N"), learns=True),)
    elif isinstance(layer, nn.GroupNorm):
        return _image(fed, 224, layer.num_channels)
    else:
        return None
    return fed


def _tokens(channels: int, batch_first: bool = True, letter: str = "N") -> Shape:
    axes = ("B", letter, channels) if batch_first else (letter, "B", channels)
    return Shape(axes, learns=True)


def _first(module: nn.Module, kind: type) -> Any:
    return next(each for each in module.modules() if isinstance(each, kind))


def _parameters(module: nn.Module) -> list[str]:
    try:
        return list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return []
