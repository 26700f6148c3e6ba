"""A torchvision whose compiled library does not load with the installed torch, made importable.

    python tools/mend_torchvision.py

The torchvision of the package registry is built for torch with CUDA. With a CPU build of torch its compiled library
does not load, and `import torchvision` ends in "operator torchvision::nms does not exist"; so do `import timm` and
`from transformers import BertModel`. The import needs only the declarations of two operators for boxes. The command
adds them to the installed `torchvision/extension.py`; `make` runs it in the environment that it builds. It changes
nothing where torchvision works, is absent, or fails for another reason. The two operators still cannot be called.

The other remedy is torchvision's own CPU build.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from regard.adapters.third_party_imports import SCHEMAS, SYMPTOM

MARK = "# Added by Regard: "
DECLARATIONS = f"""

{MARK}the compiled library of this torchvision does not load with the installed torch.
# Importing torchvision needs these operators declared; calling them raises.
if not _has_ops():
    _declared_operators = torch.library.Library("torchvision", "FRAGMENT")
    for _schema in {SCHEMAS!r}:
        _declared_operators.define(_schema)
"""


def mend_installation() -> str:
    """Add the declarations to the installed torchvision if its import fails without them; one line on what was done."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return "torchvision is not installed; nothing was changed"
    failure = find_import_failure()
    if not failure:
        return "torchvision can be imported; nothing was changed"
    if SYMPTOM not in failure:
        return f"torchvision cannot be imported, for a reason that is not mended here: {failure}"
    extension = Path(found.origin).with_name("extension.py")
    source = extension.read_text(encoding="utf-8")
    if MARK not in source:
        # A new file takes its place: installers may share the old one with other environments by a hard link.
        staged = extension.with_name(f"extension.py.{os.getpid()}")
        staged.write_text(source + DECLARATIONS, encoding="utf-8")
        os.replace(staged, extension)
    failure = find_import_failure()
    if failure:
        return f"torchvision still cannot be imported: {failure}"
    return f"torchvision: two operators are declared in {extension}, since its compiled library does not fit this torch"


def find_import_failure() -> str:
    """The last line of the error of `import torchvision` in a new interpreter; empty where it succeeds."""
    done = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, text=True, check=False)
    lines = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else lines[-1] if lines else f"exit code {done.returncode}"


if __name__ == "__main__":
    print(mend_installation())
