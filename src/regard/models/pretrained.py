"""`save_pretrained` and `from_pretrained`, as in Hugging Face."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from regard.errors import CheckpointError, ConfigError
from regard.kernels.quantized import QuantizedTensor
from regard.models.config import Config
from regard.models.converters.base import Converter, convert_config, convert_tensors
from regard.models.io.folder import COMPANIONS, read_checkpoint, read_companions, write_folder
from regard.models.io.tensors import SHARD_BYTES
from regard.models.load_state import (
    build_from_state,
    check_dtype,
    check_layers,
    check_matches_config,
    find_stored_names,
)
from regard.models.quantization import (
    KEY,
    dequantize_model,
    from_stored,
    is_quantized,
    pack_blocks,
    quantize_model,
    to_stored,
)

State = dict[str, Tensor]

# A source that ends so is a file, whether it is there or not.
FILES = (".gguf", ".safetensors", ".bin", ".data", ".pt", ".pth")
# A name on the hub: an owner and a model, or a model alone.
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class Pretrained(nn.Module):
    """A model with a configuration, that can be written to a folder and read from one.

    A subclass names its `Config`, builds itself in `__init__(config)`, and lists in `converters` the layouts of other
    libraries it can be read from and written to, by name ("huggingface", "timm").

    A model is loaded without being initialised first: it is built on the meta device, where tensors have shapes and no
    memory, and then given the tensors of the file. So no module may compute values in its `__init__` other than the
    initial values of its parameters. Tables (rotary, sinusoidal) are computed on first use. A module that must keep a
    computed buffer registers it with `persistent=False` and has a method `reset_buffers()`, which computes it anew on
    the device of the module's parameters; loading calls it. What is still without memory afterwards is an error.

    Parameters that are one and the same in the model (tied) are saved once, and are the same again after loading.
    """

    Config: ClassVar[type[Config]]
    converters: ClassVar[Mapping[str, Converter]] = {}

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._check_config(config)
        self.config = config
        # Files that lay beside the model where it was read, by name: its tokenizer and the like.
        self.companions: dict[str, bytes] = {}

    # Folders and files

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, layout: str = "regard", shard_bytes: int = SHARD_BYTES
    ) -> None:
        """Write `config.json` and `model.safetensors` (in shards above `shard_bytes`) to a folder.

        layout: "regard", or the name of another library that shall be able to read the folder. A crash while saving
        leaves the previous checkpoint of the folder whole. The files of the tokenizer that lay beside the model where
        `from_pretrained` read it are written, too. A model that was changed by hand, so that it is no longer
        what its configuration builds, is refused: it could not be read again. So is a description of attention
        that has no text form (`Where`, a function as feature map, a tensor as bias), or no place in the other layout.
        """
        config, state = self.to_checkpoint(layout)
        write_folder(folder, config, state, shard_bytes=shard_bytes, companions=self.companions)

    @classmethod
    def from_pretrained(
        cls, source: str | os.PathLike[str], *, dtype: torch.dtype | None = None, quantized: bool | None = None
    ) -> Self:
        """The model in a folder (ours, Hugging Face's or timm's), a `.gguf`, a `.bin` of llama2.c, or on the hub.

        source: a path; a name that is no path, such as "owner/model", is looked up in the local cache of the hub and
        then on the hub itself, if the package huggingface_hub is installed.
        dtype: of the floating-point tensors; None keeps the file's. A file of several (norms in float32, all else in
        bfloat16) is widened without loss to one that holds them all.
        quantized: True keeps the blocks of a `.gguf` as they are stored, without a float copy; the model is then for
        inference. False dequantises what is quantised. None dequantises a `.gguf`, and keeps what `save_pretrained`
        wrote of a quantised model.

        The model is in evaluation mode.
        """
        check_dtype(dtype)
        path = Path(source).expanduser()
        if not path.exists() and isinstance(source, str) and HUB_ID.fullmatch(source) and path.suffix not in FILES:
            path = _download_from_hub(source)
        # Nothing here keeps the tensors as they were read: quantised ones are moved.
        model = cls._load(*read_checkpoint(path, quantized=bool(quantized)), dtype, str(path))
        model.companions = read_companions(path)
        if is_quantized(model):
            model.requires_grad_(False)
            if quantized is False:
                model.dequantize(dtype or torch.float32)
            else:
                pack_blocks(model)
        return model

    # Quantised weights

    def quantize(self, format: str = "int8") -> Self:
        """Round the matrices of linear layers and token embeddings in place, for inference on the CPU; returns self.

        format: "bf16" (half the memory), "int8" (GGUF's q8_0: 8.5 bits a weight) or "int4" (q4_1: 5 bits a weight), or
        the name of a format of GGUF: "q8_0", "q4_0", "q4_1".

        Each block of 32 channels of a row has its own scale, so that a weight is off by half a step at most. Products
        with blocks round activations to 8 bits, too, 32 at a time; `csrc/quantized.h` has the bound. Beside matrices of
        4 bits, token embeddings (and an output matrix that is the same) have 8, as in llama.cpp's files. Norms, biases,
        positions and convolutions stay as they are. `save_pretrained` keeps the blocks.
        """
        quantize_model(self, format)
        return self.eval()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Self:
        """Floating-point weights again, which can be trained: the rounded ones, not those before; returns self."""
        check_dtype(dtype)
        dequantize_model(self, dtype)
        return self

    @property
    def is_quantized(self) -> bool:
        """Whether some weights are blocks."""
        return is_quantized(self)

    def train(self, mode: bool = True) -> Self:
        if mode and self.is_quantized:
            raise ConfigError(
                f"A quantised {type(self).__name__} cannot be trained.",
                asked="train()",
                found=", ".join(sorted({str(p) for p in self.parameters() if isinstance(p, QuantizedTensor)})[:3]),
                because="a step of training is far smaller than the steps that blocks can hold",
                instead="model.dequantize().train(), and quantize(...) after training",
            )
        return super().train(mode)

    # Tensors in memory

    @classmethod
    def from_checkpoint(
        cls,
        config: dict[str, Any],
        state: Mapping[str, Tensor],
        layout: str = "huggingface",
        *,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """The model of another library's configuration and state dict; the tensors are copied."""
        check_dtype(dtype)
        return cls._load_converted(
            cls._find_converter(layout), config, dict(state), dtype, f"a {layout} state in memory"
        )

    def describe_config(self) -> dict[str, Any]:
        """What `config.json` holds, in the layout "regard"."""
        kind: Any = type(self)
        if any(base.__name__ == "FSDPModule" for base in kind.__bases__):
            kind = kind.__bases__[-1]  # FSDP gives a model a class below the one that it was built with
        return {"model_type": kind._model_type(), **self.config.to_dict()}

    def to_checkpoint(self, layout: str = "huggingface") -> tuple[dict[str, Any], State]:
        """Configuration and tensors as another library has them; the tensors may share memory with the model's."""
        fields = self.describe_config()  # first: what cannot be written is named, whatever the layout
        check_matches_config(self, type(self), self.config)
        stored = find_stored_names(self)
        state, described = to_stored({name: tensor for name, tensor in self.state_dict().items() if name in stored})
        if layout == "regard":
            return {**fields, **({KEY: described} if described else {})}, state
        if described:
            raise CheckpointError(
                f"A quantised {type(self).__name__} cannot be written in the layout {layout!r}.",
                asked=f"layout={layout!r}",
                found=f"{len(described)} matrices of blocks",
                because="other libraries have other blocks, or none",
                instead='layout="regard", or model.dequantize() first',
            )
        converter, config = self._find_converter(layout), self.config.simplify()
        described = ", ".join(f"{name}={value!r}" for name, value in config.attentions().items())
        reason = f"it has no {described}" if described else converter.explain_unsupported(config)
        if reason:
            raise CheckpointError(
                f"This {type(self).__name__} cannot be written in the layout {layout!r}.",
                asked=repr(self.config),
                because=reason,
                instead='layout="regard"',
            )
        return converter.write_config(config), converter.write_state(state, config)

    @classmethod
    def _load(cls, config: dict[str, Any], state: State, dtype: torch.dtype | None, source: str) -> Self:
        kind = config.get("model_type")
        if isinstance(kind, str) and kind.startswith("regard."):
            if kind != cls._model_type():
                owners = [each.__name__ for each in Pretrained.__subclasses__() if each._model_type() == kind]
                raise CheckpointError(
                    f"This checkpoint belongs to another class than {cls.__name__}.",
                    asked=f"{cls.__name__} from {source}",
                    found=f"model_type {kind!r}",
                    because="another model was saved there",
                    instead=f"{owners[0]}.from_pretrained(...)" if owners else f"the class that wrote {kind!r}",
                )
            fields = {name: value for name, value in config.items() if name not in ("model_type", KEY)}
            if KEY in config:
                state = from_stored(state, config[KEY], source)
            return build_from_state(cls, cls.Config.from_dict(fields), state, dtype, source)
        for converter in cls.converters.values():
            if converter.matches(config):
                return cls._load_converted(converter, config, state, dtype, source)
        given = {name: config[name] for name in ("model_type", "architectures", "architecture") if name in config}
        others = [kind.__name__ for kind in Pretrained.__subclasses__() if kind is not cls and kind._can_read(config)]
        reads = [f"{converter.supported} ({layout})" for layout, converter in cls.converters.items()]
        raise CheckpointError(
            f"{cls.__name__} does not read this model.",
            asked=f"{cls.__name__} from {source}",
            found=", ".join(f"{name}={value!r}" for name, value in given.items()) or "a configuration of no known kind",
            because=f"{cls.__name__} reads {'; '.join([f'model_type {cls._model_type()}', *reads])}",
            instead=f"{others[0]}.from_pretrained(...)" if others else "a checkpoint of such a model",
        )

    @classmethod
    def _can_read(cls, config: dict[str, Any]) -> bool:
        return any(converter.matches(config) for converter in cls.converters.values())

    @classmethod
    def _load_converted(
        cls, converter: Converter, config: dict[str, Any], state: State, dtype: torch.dtype | None, source: str
    ) -> Self:
        ours = convert_config(cls.__name__, converter, converter.infer_heads(config, state))
        check_layers(ours, state, source)
        return build_from_state(cls, ours, convert_tensors(cls.__name__, converter, state, ours, source), dtype, source)

    @classmethod
    def _find_converter(cls, layout: str) -> Converter:
        if layout not in cls.converters:
            raise CheckpointError(
                f"{cls.__name__} has no layout {layout!r}.",
                asked=f"layout={layout!r}",
                because=f"it has {', '.join(['regard', *cls.converters])}",
                instead='layout="regard"',
            )
        return cls.converters[layout]

    @classmethod
    def _check_config(cls, config: object) -> None:
        """Refuse what is not a configuration of this model, and say what it may have been meant for."""
        if isinstance(config, cls.Config):
            return
        name, wanted = cls.__name__, cls.Config.__name__
        instead = f"{name}({wanted}(...))"
        if isinstance(config, str | os.PathLike):
            instead = f"{name}.from_pretrained({os.fspath(config)!r}) for a checkpoint, or {instead}"
        elif isinstance(config, dict):
            instead = f"{name}({wanted}.from_dict(...)) for a dict of its fields"
        elif isinstance(config, Config):
            models = [kind.__name__ for kind in Pretrained.__subclasses__() if isinstance(config, kind.Config)]
            instead = f"{models[0]}(...) for this configuration" if models else instead
        elif config is cls.Config:
            instead = f"{name}({wanted}()), with brackets"
        text = repr(config)
        raise ConfigError(
            f"{name} is built from a {wanted}.",
            asked=f"{name}({text if len(text) <= 80 else text[:76] + ' ...'})",
            found=f"a {type(config).__name__}",
            because=f"a {wanted} holds the sizes of the model",
            instead=instead,
        )

    @classmethod
    def _model_type(cls) -> str:
        return f"regard.{cls.__name__.lower()}"


def _download_from_hub(name: str) -> Path:
    """The folder of a model of the hub, from the local cache or downloaded now."""
    try:
        from huggingface_hub import snapshot_download  # an extra, and imported only where the hub is used
    except ImportError as failure:
        raise CheckpointError(
            f"{name!r} does not exist, and loading it from the hub needs the package huggingface_hub.",
            asked=repr(name),
            found=f"no such file or folder in {Path.cwd()}",
            because=f"{type(failure).__name__}: {failure}",
            instead="check the path, or pip install 'regard[hub]'",
        ) from failure
    try:
        folder = Path(
            snapshot_download(
                name, allow_patterns=["config.json", "*.safetensors", "*.safetensors.index.json", *COMPANIONS]
            )
        )
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=["config.json", "pytorch_model*", *COMPANIONS]))
    except Exception as failure:  # the client, the network and the hub each have errors of their own
        first = str(failure).strip().splitlines()
        raise CheckpointError(
            f"{name!r} does not exist, and could not be loaded from the hub.",
            asked=repr(name),
            found=f"no such file or folder in {Path.cwd()}",
            because=f"{type(failure).__name__}: {first[0] if first else ''}",
            instead="check the path or the name; without a network only models in the local cache are available",
        ) from failure
    return folder
