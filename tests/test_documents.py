"""Documents and examples run as tests (see conftest.py); these tests prove that both can fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from forked_programs import ForkedPrograms

from regard import downloads

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# A guard against programs that hang; a loaded machine is no reason to fail.
SECONDS, SLOW_SECONDS = 300, 1800


def is_slow(source: str) -> bool:
    """An example says that it is heavy by a line `# slow` before its first code."""
    for line in source.splitlines():
        if line.strip() == "# slow":
            return True
        if line.strip() and not line.startswith("#"):
            return False
    return False


def weights_of(source: str) -> str | None:
    """An example says which real weights it reads by a line `# weights: name`; without them it cannot run here."""
    named = (line.removeprefix("# weights: ") for line in source.splitlines() if line.startswith("# weights: "))
    return next(named, None)


@pytest.fixture(scope="module")
def programs():
    forked = ForkedPrograms()
    yield forked
    forked.close()


def run(programs: ForkedPrograms, program: Path, folder: Path, seconds: float) -> None:
    """Run a program in `folder`, so that what it saves stays out of the repository, and check it."""
    code, printed = programs.run(program, folder, seconds)
    assert code == 0, f"{program.name} failed:\n{printed}"
    assert printed.strip(), f"{program.name} printed nothing: does it call main()?"


def as_parameter(program: Path):
    marks = [pytest.mark.slow] if is_slow(program.read_text()) else []
    name = weights_of(program.read_text())
    if name is not None and downloads.find(name) is None:
        reason = f"{name} is not installed: python -m regard.downloads {name}"
        marks.append(pytest.mark.skip(reason=reason))
    return pytest.param(program, id=program.name, marks=marks)


@pytest.mark.parametrize("program", [as_parameter(program) for program in EXAMPLES])
def test_every_example_runs(programs, program, tmp_path):
    run(programs, program, tmp_path, SLOW_SECONDS if is_slow(program.read_text()) else SECONDS)


@pytest.mark.parametrize("source", ["raise SystemExit(3)", "1 / 0", "def main(): print('never called')"])
def test_an_example_that_fails_or_does_nothing_is_caught(programs, source, tmp_path):
    (tmp_path / "example.py").write_text(source)
    with pytest.raises(AssertionError, match=r"example\.py"):
        run(programs, tmp_path / "example.py", tmp_path, SECONDS)


def test_an_example_that_hangs_is_caught(programs, tmp_path):
    (tmp_path / "example.py").write_text("while True: pass")
    with pytest.raises(subprocess.TimeoutExpired):
        run(programs, tmp_path / "example.py", tmp_path, seconds=0.3)


def test_an_example_names_the_weights_it_reads():
    assert weights_of("# weights: minilm\nimport torch") == "minilm"
    assert weights_of("import torch  # weights: minilm") is None
    for program in EXAMPLES:
        source = program.read_text()
        assert ("fetch(" in source) == (weights_of(source) is not None), program.name


def test_the_slow_line_counts_only_before_the_code():
    assert is_slow('# slow\n"""Train."""\n')
    assert is_slow("# Two minutes of training.\n# slow\nimport torch\n")
    assert not is_slow('"""Quick."""\n# slow\n')
    assert not is_slow("")


DOCUMENT = """
# Title

```python
x = 7
open("left_behind.txt", "w").close()
```

```python
assert x == 7  # the blocks of one document share their names
```

<!-- skip: next "shows a mistake" -->

```python
this would not even parse
```

```python
>>> x
8
```

```sh
exit 1
```
"""


def test_documents_run_and_a_wrong_one_fails(tmp_path):
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "README.md").write_text(DOCUMENT)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "words.md").write_text("A page without any code.\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "README.md", "docs"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert "1 failed, 3 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "Expected:\n" in done.stdout
    assert not (tmp_path / "left_behind.txt").exists()
