"""Tensor files: round trips, and errors that name the damaged file."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from checkpoints import CONFIG, assert_four_parts, assert_same, made, shards
from twins import library

from regard.errors import CheckpointError
from regard.models.io import read_checkpoint, read_safetensors, read_torch, write_folder
from regard.models.io.tensors import INDEX, SINGLE, write_safetensors

# Reading and writing


def test_tensors_of_every_kind_come_back_as_they_were(tmp_path: Path):
    write_safetensors(tmp_path / "x.safetensors", made())
    assert_same(read_safetensors(tmp_path / "x.safetensors"), made())


def test_what_we_write_is_read_by_the_library_of_the_format(tmp_path: Path):
    write_safetensors(tmp_path / "x.safetensors", made())
    assert_same(library("safetensors.torch").load_file(tmp_path / "x.safetensors"), made())


def test_views_that_share_memory_are_written_each_for_itself(tmp_path: Path):
    whole = torch.arange(30.0).reshape(5, 6)
    state = {"top": whole[:2], "rest": whole[2:], "turned": whole.T, "whole": whole, "again": whole}
    write_safetensors(tmp_path / "x.safetensors", state)
    assert_same(read_safetensors(tmp_path / "x.safetensors"), state)
    assert (tmp_path / "x.safetensors").stat().st_size < 4 * 4 * 30 + 1000


def test_reading_maps_the_file_and_does_not_load_it(tmp_path: Path):
    write_safetensors(tmp_path / "x.safetensors", {"large": torch.zeros(1 << 24)})

    def resident() -> int:
        """ModelCache of this process that no file backs, in bytes."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    if not Path("/proc/self/status").exists():
        pytest.skip("this system does not say how much memory a process has")
    before = resident()
    state = read_safetensors(tmp_path / "x.safetensors")
    assert state["large"].numel() == 1 << 24
    assert resident() - before < 1 << 24  # a quarter of the tensor


def test_a_mapped_tensor_may_be_changed_without_changing_the_file(tmp_path: Path):
    write_safetensors(tmp_path / "x.safetensors", made())
    read_safetensors(tmp_path / "x.safetensors")["a"].zero_()
    assert_same(read_safetensors(tmp_path / "x.safetensors"), made())


@pytest.mark.parametrize("old", [True, False])
def test_torch_files_are_read(tmp_path: Path, old: bool):
    torch.save(made(), tmp_path / "x.pt", _use_new_zipfile_serialization=not old)
    assert_same(read_torch(tmp_path / "x.pt"), made())
    torch.save({"state_dict": made(), "step": 3}, tmp_path / "y.pt")
    assert_same(read_torch(tmp_path / "y.pt"), made())


class Trap:
    """A pickle that would make a folder if it were run."""

    def __reduce__(self):
        return os.mkdir, ("trapped",)


def test_a_torch_file_with_code_in_it_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Trap()}, "x.bin")
    Path("config.json").write_text("{}")
    for protocol in range(6):
        Path(f"y{protocol}.bin").write_bytes(pickle.dumps({"a": Trap()}, protocol=protocol))
    for name in ("x.bin", *(f"y{protocol}.bin" for protocol in range(6))):
        with pytest.raises(CheckpointError, match="contains code, which is never run") as caught:
            read_checkpoint(name)
        assert_four_parts(caught.value, name, "a safetensors version")
        assert "weights_only" not in str(caught.value)
        assert caught.value.__suppress_context__
    assert not Path("trapped").exists()


@pytest.mark.parametrize("width", [640, 896, 1152, 1408])
def test_the_width_of_a_llama_is_not_taken_for_the_start_of_a_pickle(tmp_path: Path, width: int):
    (tmp_path / "x.bin").write_bytes(width.to_bytes(4, "little") + bytes(99))
    with pytest.raises(CheckpointError, match=r"file of llama2\.c"):
        read_checkpoint(tmp_path / "x.bin")


ODD = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.empty(5, device="meta"),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(7), 0.5, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")  # torch makes such tensors no longer, but reads them
@pytest.mark.parametrize("sort", ODD)
def test_tensors_that_are_not_plain_are_refused_by_name(tmp_path: Path, sort: str):
    tensor = ODD[sort]()
    torch.save({"good": torch.ones(2), "odd.weight": tensor}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"odd\.weight") as caught:
        read_torch(tmp_path / "x.pt")
    assert_four_parts(caught.value, sort)
    with pytest.raises(CheckpointError, match=r"odd\.weight"):
        write_safetensors(tmp_path / "x.safetensors", {"odd.weight": tensor})


def test_names_that_are_no_text_are_refused(tmp_path: Path):
    torch.save({3: torch.ones(2)}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="no tensors by name"):
        read_torch(tmp_path / "x.pt")


def test_a_torch_file_without_tensors_is_refused(tmp_path: Path):
    torch.save([torch.ones(2)], tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="holds no tensors by name"):
        read_torch(tmp_path / "x.pt")


# Damage


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
@pytest.mark.parametrize("cut", [0, 4, 40, -5])
def test_a_file_cut_short_is_refused_by_name(tmp_path: Path, name: str, cut: int):
    file = tmp_path / name
    torch.save(made(), file) if name == "x.pt" else write_safetensors(file, made())
    content = file.read_bytes()
    file.write_bytes(content[:cut])
    with pytest.raises(CheckpointError) as caught:
        read_torch(file) if name == "x.pt" else read_safetensors(file)
    assert_four_parts(caught.value, str(file), f"{len(content[:cut]):,} bytes")


@pytest.mark.parametrize("place", [0, 8, 12])
def test_a_damaged_header_is_refused_by_name(tmp_path: Path, place: int):
    file = tmp_path / "x.safetensors"
    write_safetensors(file, made())
    content = bytearray(file.read_bytes())
    content[place : place + 8] = b"\xff" * 8
    file.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_safetensors(file)
    assert_four_parts(caught.value, str(file))


def test_missing_files_are_refused_and_the_neighbours_named(tmp_path: Path):
    (tmp_path / "other.txt").write_text("")
    for path in (tmp_path / "x.safetensors", tmp_path / "x.gguf", tmp_path / "x.bin"):
        with pytest.raises(CheckpointError) as caught:
            read_checkpoint(path)
        assert_four_parts(caught.value, path.name, "other.txt")
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not exist"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '"x"', "\ufffd{", "[" * 100_000, '{"dim": ' + "1" * 5000 + "}"])
def test_an_unreadable_configuration_is_refused_by_name(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(tmp_path)
    assert_four_parts(caught.value, str(tmp_path / "config.json"))


def test_a_configuration_that_is_no_text_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        read_checkpoint(tmp_path)


def test_a_file_of_no_known_kind_is_refused(tmp_path: Path):
    (tmp_path / "x.onnx").write_text("")
    with pytest.raises(CheckpointError, match="no checkpoint that is known"):
        read_checkpoint(tmp_path / "x.onnx")


def test_several_unnamed_files_are_refused_and_one_is_taken(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(tmp_path / "x.safetensors", made())
    assert_same(read_checkpoint(tmp_path)[1], made())
    torch.save(made(1), tmp_path / "y.pt")
    with pytest.raises(CheckpointError, match="several files"):
        read_checkpoint(tmp_path)
    assert_same(read_checkpoint(tmp_path / "y.pt")[1], made(1))


# Folders and shards


@pytest.mark.parametrize("limit", [1, 70, 10_000])
def test_a_folder_comes_back_in_one_file_or_in_shards(tmp_path: Path, limit: int):
    write_folder(tmp_path, CONFIG, made(), shard_bytes=limit)
    config, state = read_checkpoint(tmp_path)
    assert config == CONFIG
    assert_same(state, made())
    assert bool(shards(tmp_path)) == (limit < 10_000) != (tmp_path / SINGLE).exists()


def test_saving_over_shards_leaves_no_old_files(tmp_path: Path):
    for seed, limit in enumerate((60, 90, 10_000, 60)):
        write_folder(tmp_path, CONFIG, made(seed), shard_bytes=limit)
        assert_same(read_checkpoint(tmp_path)[1], made(seed))
        named = set(json.loads((tmp_path / INDEX).read_text())["weight_map"].values()) if limit < 10_000 else set()
        assert set(shards(tmp_path)) == named
        assert (tmp_path / INDEX).exists() == bool(named)


def test_shards_of_torch_are_read(tmp_path: Path):
    state = made()
    torch.save({"a": state["a"]}, tmp_path / "pytorch_model-1.bin")
    torch.save({name: state[name] for name in state if name != "a"}, tmp_path / "pytorch_model-2.bin")
    where = {name: f"pytorch_model-{1 if name == 'a' else 2}.bin" for name in state}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert_same(read_checkpoint(tmp_path)[1], state)


def test_an_index_with_missing_tensors_is_refused(tmp_path: Path):
    write_folder(tmp_path, CONFIG, made(), shard_bytes=60)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["ghost"] = index["weight_map"]["a"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="no ghost"):
        read_checkpoint(tmp_path)


def test_a_missing_shard_is_refused_by_name(tmp_path: Path):
    write_folder(tmp_path, CONFIG, made(), shard_bytes=60)
    gone = shards(tmp_path)[0]
    (tmp_path / gone).unlink()
    with pytest.raises(CheckpointError, match=gone) as caught:
        read_checkpoint(tmp_path)
    assert_four_parts(caught.value, "get all files of the checkpoint")


def test_metadata_of_the_wrong_kind_are_refused_by_name(tmp_path: Path):
    write_folder(tmp_path, CONFIG, made(), shard_bytes=60)
    index = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / INDEX).write_text(json.dumps(index | {"metadata": [1]}))
    with pytest.raises(CheckpointError, match="metadata that is a list"):
        read_checkpoint(tmp_path)


BAD_NAMES = ["../x.safetensors", "", "..", ".", "/x", "a\\b", "a\0b", "x" * 300, 3, None]
BAD_PLACES = [None, [], *({"a": name} for name in BAD_NAMES)]


@pytest.mark.parametrize("where", BAD_PLACES)
def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, where: object):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": where}))
    with pytest.raises(CheckpointError, match="no index of shards"):
        read_checkpoint(tmp_path)


def test_saving_onto_a_file_is_refused(tmp_path: Path):
    (tmp_path / "x").write_text("precious")
    with pytest.raises(CheckpointError, match="is a file"):
        write_folder(tmp_path / "x", CONFIG, made())
    assert (tmp_path / "x").read_text() == "precious"


@pytest.mark.parametrize("under", ["x/model", "x/a/b"])
def test_saving_under_a_file_is_refused_in_four_parts(tmp_path: Path, under: str):
    (tmp_path / "x").write_text("precious")
    with pytest.raises(CheckpointError, match="Nothing can be saved") as caught:
        write_folder(tmp_path / under, CONFIG, made())
    assert_four_parts(caught.value, str(tmp_path / under))
    assert caught.value.found


def test_saving_where_nothing_may_be_written_is_refused_in_four_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_folder(tmp_path, CONFIG, made())

    def forbid(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:  # root may write everywhere, so the system is asked to be stricter
        patch.setattr(Path, "mkdir", forbid)
        with pytest.raises(CheckpointError, match="PermissionError") as caught:
            write_folder(tmp_path / "new", CONFIG, made())
        assert_four_parts(caught.value, str(tmp_path / "new"))
    assert_same(read_checkpoint(tmp_path)[1], made())


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "x.gguf", "x.bin", "folder"])
def test_a_file_without_read_permission_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    write_folder(tmp_path / "folder", CONFIG, made())
    (tmp_path / "config.json").write_text("{}")
    if name != "folder":
        (tmp_path / name).write_bytes(bytes(100))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(CheckpointError, match="may not be opened by this user") as caught:
        read_checkpoint(tmp_path / name)
    assert_four_parts(caught.value, name)
