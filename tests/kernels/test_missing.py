"""Without the compiled library everything still runs, and the reason is reported."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from regard.kernels import library

ATTEND = """
import torch
from regard import Window, attend, explain
from regard.errors import BackendError

query, key, value = torch.randn(3, 1, 2, 40, 8)
words = dict(pattern=Window(3, 3))
output = attend(query, key, value, **words)
torch.testing.assert_close(output, attend(query, key, value, backend="reference", **words))
told = explain(query, key, value, **words)
print("runs on", told.backend)
print("reason:", told.reasons["native"])
try:
    attend(query, key, value, backend="native", **words)
except BackendError as error:
    print(error)
"""


def test_without_a_library_another_backend_runs_and_the_reason_is_reported():
    environment = {**os.environ, "REGARD_NATIVE_LIBRARY": "/nonexistent/library.so"}
    command = [sys.executable, "-W", "error", "-c", ATTEND]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert "runs on blocked" in done.stdout
    assert "'native' cannot run this attention." in done.stdout
    assert 'instead  backend="' in done.stdout
    (reason,) = [line.removeprefix("reason: ") for line in done.stdout.splitlines() if line.startswith("reason: ")]
    assert f"because  {reason}" in done.stdout
    assert "/nonexistent/library.so" in reason


def reason_for(monkeypatch: pytest.MonkeyPatch, file: str) -> str:
    """Why this file does not serve as the library."""
    monkeypatch.setenv("REGARD_NATIVE_LIBRARY", file)
    found, reason = library._load_library()
    assert found is None
    assert reason is not None
    return reason


def test_a_file_that_is_no_library_is_reported_as_such(monkeypatch, tmp_path):
    text = tmp_path / "text.so"
    text.write_text("this is no library")
    reason = reason_for(monkeypatch, str(text))
    for part in ("does not load", str(text), "install regard again"):
        assert part in reason


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the name of another library is known on Linux only")
def test_an_unrelated_library_is_reported_as_such(monkeypatch):
    """It loads, and has none of our functions."""
    with open("/proc/self/maps") as maps:
        libc = next(line.split()[-1] for line in maps if "/libc.so" in line)
    reason = reason_for(monkeypatch, libc)
    for part in ("does not load", "regard_fields", "install regard again"):
        assert part in reason


@pytest.mark.skipif(shutil.which("cc") is None, reason="a library of another version takes a compiler to make")
def test_a_library_of_another_version_is_a_reason_and_no_failed_import(monkeypatch, tmp_path):
    """Its structs have other fields: calling it would read and write anywhere."""
    functions = ["attention", "attention_backward", "decode", "linear", "linear_backward", "exp2", "peak", "use"]
    source = "".join(f"int regard_{name}(void) {{ return 0; }}\n" for name in functions)
    source += 'int regard_lanes(void) { return 4; }\nconst char* regard_name(void) { return "old"; }\n'
    source += "int regard_fields(int which) { return 1; }\n"
    (tmp_path / "old.c").write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "old.so", tmp_path / "old.c"], check=True)
    reason = reason_for(monkeypatch, str(tmp_path / "old.so"))
    for part in ("another version of regard", "install regard again"):
        assert part in reason
    if library.native is None:
        return
    monkeypatch.delenv("REGARD_NATIVE_LIBRARY")
    candidates = [tmp_path / "old.so", Path(library.native._name)]
    monkeypatch.setattr(library, "_list_candidates", lambda: candidates)
    assert library._load_library()[0] is not None, "one that fits comes after it"
