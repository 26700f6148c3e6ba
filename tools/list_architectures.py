"""docs/architectures.md: every architecture of Hugging Face transformers, with our attention against its eager one.

    python tools/list_architectures.py [--only llama bert] [--page docs/architectures.md]

Each architecture runs in a process of its own, with a limit of time; `tests/architectures.py` has the comparison.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
SECONDS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="model types; default: all")
    parser.add_argument("--results", type=Path, help="a JSON file, which a later run continues")
    parser.add_argument("--page", type=Path, help="write the page here")
    arguments = parser.parse_args()
    found = json.loads(arguments.results.read_text()) if arguments.results and arguments.results.exists() else {}
    checks: Any = importlib.import_module("architectures")
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    importlib.import_module("regard.integrations.transformers")
    every = checks.list_architectures()
    for model_type, class_name in every.items():
        if (arguments.only and model_type not in arguments.only) or (model_type in found and not arguments.only):
            continue
        start = time.perf_counter()
        found[model_type] = run_alone(checks, model_type, class_name)
        outcome = found[model_type]
        seconds = time.perf_counter() - start
        line = f"{outcome['status']:<14} {model_type:<28} {outcome['largest']:.0e} {seconds:5.1f}s"
        print(line, outcome["reason"][:110], flush=True)
        if arguments.results:
            arguments.results.write_text(json.dumps(found, indent=1))
    counts = {status: sum(o["status"] == status for o in found.values()) for status in STATUSES}
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    if arguments.page:
        library: Any = importlib.import_module("transformers")
        arguments.page.write_text(write_page(found, library.__version__))


def run_alone(checks: Any, model_type: str, class_name: str) -> dict[str, Any]:
    """The outcome of one architecture, from a forked process."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        sender.send(dataclasses.asdict(checks.check_architecture(model_type, class_name)))

    process = context.Process(target=work)
    process.start()
    sender.close()
    try:
        if receiver.poll(SECONDS):
            return receiver.recv()
        reason = f"no result within {SECONDS} seconds"
    except EOFError:
        reason = "the process ended without a result"
    finally:
        process.kill()
        process.join()
    return dataclasses.asdict(checks.Outcome(model_type, class_name, "not built", reason))


STATUSES = {
    "equal": "Logits, gradients and tokens equal those of eager attention.",
    "differs": "They do not.",
    "refused": "An error is raised where eager attention has none.",
    "own attention": "The model computes attention by itself and reads no table; `regard.use` says so, and "
    "`attn_implementation` has no effect.",
    "not built": "There was no tiny random model, or no input, to compare with; nothing is known.",
}


def write_page(found: dict[str, dict[str, Any]], version: str) -> str:
    lines = [
        "# Architectures",
        "",
        f'Every model type of transformers {version} as a tiny random model, `attn_implementation="regard"` against '
        '`"eager"`: logits and the gradients of',
        "all parameters in float64 (largest difference relative to the largest number at most 1e-10, 1e-6 where eager "
        "attention computes a part in float32; ten times that for gradients), without padding and with padding on",
        "either side, then greedy tokens of `generate` with a growing and with a static cache. Written by "
        "`python tools/list_architectures.py --page docs/architectures.md`.",
        "",
        "| outcome | architectures | meaning |",
        "|---|---|---|",
    ]
    for status, meaning in STATUSES.items():
        lines.append(f"| {status} | {sum(o['status'] == status for o in found.values())} | {meaning} |")
    for status in STATUSES:
        chosen = [outcome for outcome in found.values() if outcome["status"] == status]
        if not chosen:
            continue
        lines += ["", f"## {status.capitalize()}", ""]
        if status == "equal":
            lines += ["| model type | class | largest difference | compared |", "|---|---|---|---|"]
            for o in chosen:
                tokens = sum(check.startswith("tokens") for check in o["checks"])
                calls = sum(check.startswith("logits") for check in o["checks"])
                compared = f"{calls} of logits and gradients" + (f", {tokens} of tokens" if tokens else "")
                lines.append(f"| {o['model_type']} | {o['class_name']} | {o['largest']:.0e} | {compared} |")
        else:
            lines += ["| model type | class | why |", "|---|---|---|"]
            for o in chosen:
                reason = o["reason"].replace("|", "\\|").replace("<", "&lt;")
                lines.append(f"| {o['model_type']} | {o['class_name']} | {reason} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
