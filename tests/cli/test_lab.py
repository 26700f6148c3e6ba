"""`regard lab`: what may be opened, and the address that is printed."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.request

import pytest

from regard.cli import main
from regard.cli.lab import find_runs, make_source
from regard.models import ViT, ViTConfig

pytest.importorskip("starlette", reason="the extra lab is not installed")


def test_the_command_prints_an_address_that_answers_and_ends_with_an_interrupt(tmp_path):
    ViT(ViTConfig(image=(8, 12), channels=1, patch=4, classes=3, dim=8, layers=1, heads=2)).save_pretrained(
        tmp_path / "vit"
    )
    command = [sys.executable, "-m", "regard", "lab", str(tmp_path / "vit"), "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            line = running.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+/\?token=([\w-]+)", line)
            assert found, line
            with urllib.request.urlopen(found[0], timeout=20) as page:
                assert b"<html" in page.read()
            models = found[0].partition("?")[0] + "api/models"
            request = urllib.request.Request(models, headers={"X-Regard-Token": found[1]})
            with urllib.request.urlopen(request, timeout=20) as answer:
                assert b'"vit"' in answer.read()
        finally:
            running.send_signal(2)
            deadline = time.monotonic() + 30
            while running.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            running.kill()
    assert running.returncode in (0, 130)


@pytest.mark.parametrize("target", ["no/such/folder", "minilm9", ""])
def test_a_model_that_does_not_exist_is_refused(target, capsys):
    assert main(["lab", target, "--no-open"]) == 2
    assert "is no model" in capsys.readouterr().err


def test_a_port_that_is_taken_is_refused(capsys):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["lab", "--no-open", "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot be used" in capsys.readouterr().err
    assert main(["lab", "--no-open", "--port", "99999999"]) == 2


def test_models_of_libraries_and_modules_are_sources_that_load_when_opened():
    source = make_source("regard.models:ViT(config=1)")
    assert source.name == "regard.models:ViT(config=1)"
    assert not source.has_real_weights
    loaded = make_source("torch.nn:Identity").load()
    assert type(loaded.module).__name__ == "Identity"


def test_two_runs_of_one_name_are_both_listed(tmp_path):
    for parent in ("a", "b"):
        place = tmp_path / parent / "run"
        place.mkdir(parents=True)
        (place / "recipe.json").write_text("{}")
    found = find_runs([str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run"), str(tmp_path)])
    assert list(found) == ["run", "run (2)"]


def test_images_are_normalised_as_the_model_was_trained(tmp_path):
    import json

    import torch
    from twins import library

    from regard.cli.lab import find_normalization

    timm = library("timm")
    source = make_source("timm:vit_tiny_patch16_224(depth=1)")
    loaded = source.load()
    image = torch.rand(1, 3, 8, 12)
    config = timm.data.resolve_model_data_config(loaded.module)
    mean, std = (torch.tensor(config[name])[:, None, None] for name in ("mean", "std"))
    assert loaded.normalize is not None
    torch.testing.assert_close(loaded.normalize(image), (image - mean) / std)
    written = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(written))
    normalize = find_normalization(torch.nn.Identity(), str(tmp_path))
    assert normalize is not None
    torch.testing.assert_close(normalize(image)[0, 2], (image[0, 2] - 0.3) / 0.7)
    assert find_normalization(torch.nn.Identity(), "") is None
