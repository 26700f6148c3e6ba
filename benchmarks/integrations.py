"""Regard inside models of Hugging Face and timm on the CPU, against the best that these libraries have built in.

python -m benchmarks.integrations [--rounds N] [--seconds S] [--repeat R] [--only TEXT] [--out FILE]

Both sides have the same weights and inputs, and their outputs or first losses are compared before they are timed. A
case that loses is printed like any other, with a mark. The exit code says whether every case ran and was correct.
"""

from __future__ import annotations

import functools
import sys

from benchmarks.runner import bind_threads, make_parser

MOST_ERROR = 1e-3  # relative: float32 through a dozen layers
MEMORY = "Llama 160M, 4,096 tokens, prefill, peak memory"


def main() -> int:
    args = make_parser(__doc__, rounds=3, seconds=8.0, out="out/benchmarks/integrations.json").parse_args()
    bind_threads()

    from benchmarks.integration_cases import CASES
    from benchmarks.model_contest import run_contests

    return run_contests(CASES, args, most_error=MOST_ERROR, warm_up=1, figures={MEMORY: measure_memory})


def measure_memory():
    """What torch's allocator gives out at most while a padded prompt is read, beside the weights: ours over sdpa's.

    Padding makes sdpa take a mask, one number for each pair of tokens.
    """
    import torch

    from benchmarks.integration_cases import draw_tokens, make_llama, use_regard
    from benchmarks.results import Result, Verdict
    from tests.cost_model.allocator import allocated

    peer, ids = make_llama(), draw_tokens(1, 4096)
    mask = torch.ones_like(ids)
    mask[:, :97] = 0
    read = {"attention_mask": mask, "logits_to_keep": 1, "use_cache": False}
    with torch.inference_mode():
        peaks = [allocated(functools.partial(model, ids, **read)).peak for model in (use_regard(peer), peer)]
    result = Result(MEMORY, "a prompt of 3,999 tokens after 97 of padding, without cache; beside the weights")
    result.notes.append(f"{peaks[0] / 1e6:.1f} MB against {peaks[1] / 1e6:.1f} MB")
    result.verdicts = [Verdict(MEMORY, "transformers sdpa", peaks[0] / peaks[1], 0.5, at_least=False)]
    return result


if __name__ == "__main__":
    sys.exit(main())
