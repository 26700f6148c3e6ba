"""Saving and loading a model: the same model comes back, and what does not fit is named."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from regard.errors import CheckpointError, ConfigError
from regard.models import GPT, GPTConfig
from regard.models.config import Config
from regard.models.converters.base import Converter, ConverterGroup, State
from regard.models.io import read_safetensors, write_safetensors
from regard.models.io.tensors import INDEX, SINGLE
from regard.models.pretrained import Pretrained


@dataclass(frozen=True)
class LadderConfig(Config):
    vocab_size: int = 13
    dim: int = 5
    layers: int = 2
    tied: bool = True
    norm: str = "layer"


class Reversed(Converter):
    """Another library, which spells every name backwards, transposes matrices, and has no RMS norm."""

    def matches(self, config: dict[str, Any]) -> bool:
        return config.get("model_type") == "reddal"

    def read_config(self, config: dict[str, Any]) -> LadderConfig:
        return LadderConfig.from_dict({name[::-1]: value for name, value in config.items() if name != "model_type"})

    def write_config(self, config: LadderConfig) -> dict[str, Any]:
        return {"model_type": "reddal"} | {name[::-1]: value for name, value in config.to_dict().items()}

    def read_state(self, state: State, config: LadderConfig) -> State:
        return {name[::-1]: tensor.T if tensor.ndim == 2 else tensor for name, tensor in state.items()}

    def write_state(self, state: State, config: LadderConfig) -> State:
        return self.read_state(state, config)

    def explain_unsupported(self, config: LadderConfig) -> str:
        return "reddal has no RMS norm" if config.norm == "rms" else ""


class Rung(nn.Module):
    """A layer with all that a state can hold: parameters, a frozen one, a buffer, and one that is recomputed."""

    ramp: Tensor
    seen: Tensor

    def __init__(self, dim: int, norm: str) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim) if norm == "layer" else nn.RMSNorm(dim)
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("ramp", torch.empty(0), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        weight = self.linear.weight
        self.ramp = torch.arange(weight.shape[0], dtype=weight.dtype, device=weight.device)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.norm(self.linear(x) + self.ramp)


class Ladder(Pretrained):
    Config: ClassVar = LadderConfig
    converters: ClassVar = {"reddal": ConverterGroup(Reversed(LadderConfig))}

    def __init__(self, config: LadderConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.rungs = nn.ModuleList(Rung(config.dim, config.norm) for _ in range(config.layers))
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for rung in self.rungs:
            x = rung(x)
        return self.output(x)


class Other(Ladder):
    pass


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


TOKENS = torch.tensor([[1, 7, 12], [0, 3, 3]])


def ladder(**changes: Any) -> Ladder:
    torch.manual_seed(3)
    model = Ladder(LadderConfig(**changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 8)
        for rung in model.rungs:
            rung.seen += 17
    return model


def assert_same_model(found: Ladder, expected: Ladder) -> None:
    assert found.config == expected.config
    assert found.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    assert torch.equal(found(TOKENS), expected(TOKENS))
    for name, parameter in expected.named_parameters():
        assert found.get_parameter(name).requires_grad == parameter.requires_grad, name


# The way there and back


@pytest.mark.parametrize("layout", ["regard", "reddal"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_model_comes_back_bit_for_bit(tmp_path: Path, layout: str, tied: bool, dtype: torch.dtype):
    model = ladder(tied=tied).to(dtype)
    model.save_pretrained(tmp_path, layout=layout)
    found = Ladder.from_pretrained(tmp_path)
    assert_same_model(found, model)
    assert not found.training
    assert (found.output.weight is found.embedding.weight) == tied


@pytest.mark.parametrize("layout", ["regard", "reddal"])
def test_a_model_comes_back_from_shards(tmp_path: Path, layout: str):
    ladder().save_pretrained(tmp_path, layout=layout, shard_bytes=150)
    assert (tmp_path / INDEX).exists()
    assert_same_model(Ladder.from_pretrained(str(tmp_path)), ladder())


def test_the_configuration_names_its_model(tmp_path: Path):
    ladder().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {"model_type": "regard.ladder", **LadderConfig().to_dict()}


def test_a_tied_tensor_is_saved_once(tmp_path: Path):
    ladder(tied=True).save_pretrained(tmp_path)
    assert "output.weight" not in read_safetensors(tmp_path / SINGLE)
    ladder(tied=False).save_pretrained(tmp_path)
    assert "output.weight" in read_safetensors(tmp_path / SINGLE)


def test_tied_weights_stay_tied_after_loading(tmp_path: Path):
    ladder().save_pretrained(tmp_path)
    model = Ladder.from_pretrained(tmp_path)
    model(TOKENS).logsumexp(-1).sum().backward()
    expected = ladder()
    expected(TOKENS).logsumexp(-1).sum().backward()
    for name, parameter in expected.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(model.get_parameter(name).grad, parameter.grad), name


def test_one_of_two_names_of_a_tied_tensor_is_enough_and_both_must_agree(tmp_path: Path):
    ladder().save_pretrained(tmp_path)
    state = {name: tensor.clone() for name, tensor in read_safetensors(tmp_path / SINGLE).items()}
    shared = state["embedding.weight"]
    write_safetensors(tmp_path / SINGLE, state | {"output.weight": shared.clone()})
    assert_same_model(Ladder.from_pretrained(tmp_path), ladder())
    del state["embedding.weight"]
    write_safetensors(tmp_path / SINGLE, state | {"output.weight": shared})
    assert_same_model(Ladder.from_pretrained(tmp_path), ladder())
    write_safetensors(tmp_path / SINGLE, state | {"output.weight": shared, "embedding.weight": shared + 1})
    with pytest.raises(CheckpointError, match=r"tied, yet different: embedding\.weight and output\.weight"):
        Ladder.from_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_dtype_may_be_chosen_and_counters_stay_whole_numbers(tmp_path: Path, dtype: torch.dtype):
    ladder().save_pretrained(tmp_path)
    model = Ladder.from_pretrained(tmp_path, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model.rungs[0].ramp.dtype == dtype
    assert model.rungs[0].seen.dtype == torch.int64
    assert torch.equal(model.embedding.weight, ladder().embedding.weight.to(dtype))


@pytest.mark.parametrize(
    ("some", "others", "common"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float16, torch.bfloat16, torch.float32),
        (torch.float32, torch.float64, torch.float64),
    ],
)
def test_weights_of_several_dtypes_are_widened_to_one_without_loss(tmp_path: Path, some, others, common):
    ladder().save_pretrained(tmp_path)
    stored = {
        name: tensor.to(others if "bias" in name else some) if tensor.is_floating_point() else tensor
        for name, tensor in ladder().state_dict().items()
    }
    write_safetensors(tmp_path / "model.safetensors", stored)
    model = Ladder.from_pretrained(tmp_path)
    assert {parameter.dtype for parameter in model.parameters()} == {common}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, stored[name].to(tensor.dtype))
    assert {parameter.dtype for parameter in Ladder.from_pretrained(tmp_path, dtype=some).parameters()} == {some}


def test_a_loaded_model_does_not_depend_on_its_file(tmp_path: Path):
    ladder().save_pretrained(tmp_path)
    model = Ladder.from_pretrained(tmp_path)
    (tmp_path / SINGLE).write_bytes(b"\0" * (tmp_path / SINGLE).stat().st_size)
    assert_same_model(model, ladder())


def test_nothing_is_initialised_in_vain(tmp_path: Path):
    ladder().save_pretrained(tmp_path)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    Ladder.from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_state_in_memory_is_read_and_copied():
    model = ladder()
    config, state = model.to_checkpoint("reddal")
    kept = {name: tensor.clone() for name, tensor in state.items()}
    found = Ladder.from_checkpoint(config, kept, "reddal", dtype=torch.float64)
    for tensor in kept.values():
        tensor.zero_()
    assert kept.keys() == state.keys()
    assert torch.equal(found.embedding.weight, model.embedding.weight.double())


# What does not fit


def changed(folder: Path, **tensors: Tensor | None) -> None:
    """Save a ladder, then exchange some of its tensors, or take them out."""
    ladder().save_pretrained(folder)
    state = {name: tensor.clone() for name, tensor in read_safetensors(folder / SINGLE).items()} | tensors
    write_safetensors(folder / SINGLE, {name: tensor for name, tensor in state.items() if tensor is not None})


def test_missing_extra_and_misshapen_tensors_are_all_named_with_their_shapes(tmp_path: Path):
    changed(
        tmp_path,
        **{
            "rungs.0.linear.weight": None,
            "rungs.1.linear.bias": torch.zeros(7),
            "rungs.2.linear.bias": torch.zeros(3),
            "rungs.1.seen": None,
        },
    )
    with pytest.raises(CheckpointError) as caught:
        Ladder.from_pretrained(tmp_path)
    assert caught.value.found.splitlines() == [
        "missing: rungs.0.linear.weight (5, 5)",
        "missing: rungs.1.seen ()",
        "extra: rungs.2.linear.bias (3,)",
        "misshapen: rungs.1.linear.bias (7,), not (5,)",
    ]
    assert str(tmp_path) in caught.value.asked


@pytest.mark.parametrize("layout", ["regard", "reddal"])
def test_a_model_changed_by_hand_is_not_written(tmp_path: Path, layout: str):
    def untie(model: Ladder) -> None:
        model.output.weight = nn.Parameter(model.output.weight.detach() + 1)

    def tie(model: Ladder) -> None:
        model.rungs[1].linear.bias = model.rungs[0].linear.bias

    def fold(model: Ladder) -> None:
        model.rungs[1].linear.bias = None

    def widen(model: Ladder) -> None:
        model.rungs[0].linear = nn.Linear(5, 7)

    faults = {
        untie: ["tied, yet different: embedding.weight and output.weight"],
        tie: ["tied here, but not by the configuration: rungs.0.linear.bias and rungs.1.linear.bias"],
        fold: ["missing: rungs.1.linear.bias (5,)"],
        widen: [
            "misshapen: rungs.0.linear.weight (7, 5), not (5, 5)",
            "misshapen: rungs.0.linear.bias (7,), not (5,)",
        ],
    }
    for change, expected in faults.items():
        model = ladder()
        change(model)
        with pytest.raises(CheckpointError, match="no longer the one of its configuration") as caught:
            model.save_pretrained(tmp_path / "new", layout=layout)
        assert caught.value.found.splitlines() == expected
        assert "tied=True" in caught.value.asked
        assert not (tmp_path / "new").exists()


def test_a_head_tied_by_hand_and_a_folded_attention_are_not_written(tmp_path: Path):
    sizes: dict[str, Any] = dict(vocab_size=11, context_length=7, dim=6, layers=1, heads=2)
    tied = GPT(GPTConfig(**sizes, tie_embeddings=False))
    tied.output.weight = tied.embedding.weight
    with pytest.raises(CheckpointError, match=r"not by the configuration: embedding\.weight and output\.weight"):
        tied.save_pretrained(tmp_path / "tied")
    folded = GPT(GPTConfig(**sizes))
    folded.blocks[0].attention = folded.blocks[0].attention.fold_biases()
    with pytest.raises(CheckpointError, match=r"misshapen: blocks\.0\.attention\.projections\.bias"):
        folded.save_pretrained(tmp_path / "folded")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e5m2, "bfloat16", float])
def test_a_model_is_loaded_in_floating_point_numbers_only(tmp_path: Path, dtype: Any):
    ladder().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="layers compute in float16"):
        Ladder.from_pretrained(tmp_path, dtype=dtype)
    with pytest.raises(CheckpointError, match="layers compute in float16"):
        Ladder.from_checkpoint(*ladder().to_checkpoint("reddal"), "reddal", dtype=dtype)


def test_many_faults_are_counted(tmp_path: Path):
    changed(tmp_path, **{f"more.{number}": torch.zeros(1) for number in range(11)})
    with pytest.raises(CheckpointError) as caught:
        Ladder.from_pretrained(tmp_path)
    assert len(caught.value.found.splitlines()) == 9
    assert caught.value.found.endswith("extra: 3 more")


def test_an_unknown_key_of_the_configuration_is_refused(tmp_path: Path):
    ladder().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer": 3}))
    with pytest.raises(ConfigError, match="has no field 'layer'"):
        Ladder.from_pretrained(tmp_path)


def test_another_model_is_refused(tmp_path: Path):
    ladder().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="another class than Other") as caught:
        Other.from_pretrained(tmp_path)
    assert caught.value.instead == "Ladder.from_pretrained(...)"


def test_an_unknown_layout_is_refused_in_both_directions(tmp_path: Path):
    with pytest.raises(CheckpointError, match="has no layout 'timm'"):
        ladder().save_pretrained(tmp_path, layout="timm")
    assert not list(tmp_path.iterdir())
    ladder().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "walrus"}')
    with pytest.raises(CheckpointError, match="model_type='walrus'"):
        Ladder.from_pretrained(tmp_path)


def test_a_configuration_without_counterpart_is_not_written(tmp_path: Path):
    with pytest.raises(CheckpointError, match="reddal has no RMS norm"):
        ladder(norm="rms").save_pretrained(tmp_path, layout="reddal")
    assert not list(tmp_path.iterdir())


def test_a_table_computed_while_building_is_found_out(tmp_path: Path):
    class Forgetful(Ladder):
        def __init__(self, config: LadderConfig) -> None:
            super().__init__(config)
            self.rungs[1].table = torch.arange(5.0)

    model = Forgetful(LadderConfig())
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"rungs\.1\.table"):
        Forgetful.from_pretrained(tmp_path)


# Where models come from


def test_a_path_that_is_not_there_is_refused(tmp_path: Path):
    for source in (tmp_path / "nothing", str(tmp_path / "nothing"), "nothing.gguf"):
        with pytest.raises(CheckpointError, match=r"nothing(\.gguf)? does not exist"):
            Ladder.from_pretrained(source)


def test_a_name_of_the_hub_comes_from_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hub = pytest.importorskip("huggingface_hub")
    ladder().save_pretrained(tmp_path)
    names = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        names.append(name)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    assert_same_model(Ladder.from_pretrained("owner/ladder"), ladder())
    assert names == ["owner/ladder"]


def test_a_name_that_the_hub_does_not_give_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="could not be loaded from the hub") as caught:
        Ladder.from_pretrained("owner/nothing-of-the-kind")
    assert caught.value.because
    assert "local cache" in caught.value.instead


def test_without_the_package_of_the_hub_a_name_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"regard\[hub\]"):
        Ladder.from_pretrained("owner/ladder")


def test_a_crash_while_saving_keeps_the_previous_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ladder().save_pretrained(tmp_path)

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            Ladder(LadderConfig(dim=7)).save_pretrained(tmp_path)
    assert_same_model(Ladder.from_pretrained(tmp_path), ladder())
    Ladder(LadderConfig(dim=7)).save_pretrained(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", SINGLE]
