# slow
"""Hold the laws against released architectures, and print what each of them says.

    python examples/check_world.py                                  a choice of families
    python examples/check_world.py FalconForCausalLM --seed 1       some of your own
    python examples/check_world.py --law causality --law cache      some laws only

Models of transformers are built tiny and with random weights, nothing is fetched. What is broken is explained in
docs/findings.md. Without the library nothing is checked, and that is said.
"""

from __future__ import annotations

import argparse
import importlib
import time
import warnings

from regard.adapters import adapt
from regard.adapters.huggingface import tiny
from regard.errors import RegardError
from regard.laws import LAWS, check
from regard.laws.claims import infer_claims

FAMILIES = """
GPT2LMHeadModel LlamaForCausalLM MistralForCausalLM FalconForCausalLM BertModel T5ForConditionalGeneration YosoModel
ViTModel
"""


def missing(library: str) -> str | None:
    """Why a library cannot be used, or None if it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(library)
    except Exception as failure:  # an import may fail with anything
        return f"{type(failure).__name__}: {failure}"
    return None


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("names", nargs="*", default=FAMILIES.split(), help="classes of transformers")
    words.add_argument("--law", action="append", choices=[law.slug for law in LAWS], help="this law; may be repeated")
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--full", action="store_true", help="search longer")
    given = words.parse_args()

    reason = missing("transformers.modeling_utils")  # which transformers itself imports late
    if reason is not None:
        print(f"transformers is left out: {reason}")
        return
    broken = 0
    for name in given.names:
        start = time.perf_counter()
        try:
            model = tiny(name)
            claims = [slug for slug in infer_claims(adapt(model)) if given.law is None or slug in given.law]
            report = check(model, claims=claims, seed=given.seed, fast=not given.full)
        except RegardError as refusal:
            print(f"{name:<34} {refusal.headline}")
            continue
        failed = report.failed
        broken += bool(failed)
        held = sum(verdict.outcome == "holds" for verdict in report.verdicts)
        words_of = ", ".join(f"{verdict.slug} {verdict.outcome}" for verdict in failed) or "nothing broken"
        print(f"{name:<34} {held:>2} hold   {words_of}   ({time.perf_counter() - start:.0f} s)", flush=True)
        for verdict in failed:
            print(f"    {verdict}")
    print(f"{len(given.names)} models, {broken} with a law that is broken")


if __name__ == "__main__":
    main()
