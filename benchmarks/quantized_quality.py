"""What quantised weights cost: perplexity on real text, largest logit difference, and the memory of a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import downloads
from regard.models import GPT
from regard.models.io.gguf import read_tokenizer

WINDOWS, LENGTH = 4, 512  # texts, and tokens of each


def find_text() -> str:
    """A novel, where it was downloaded; else the documentation of this program."""
    folder = downloads.find("gutenberg")
    if folder is not None:
        return (Path(folder) / "corpus.txt").read_text(errors="replace")[600:]
    return "".join(file.read_text() for file in sorted(Path("docs").glob("*.md")))


@torch.no_grad()
def measure_perplexity(model: GPT, texts: Tensor) -> tuple[float, Tensor]:
    """exp of the mean cross-entropy of each next token, and the logits."""
    logits = model(texts)
    return float(F.cross_entropy(logits[:, :-1].flatten(0, 1), texts[:, 1:].flatten()).exp()), logits


def compare_quality(word: str | None) -> list[str]:
    """SmolLM2 against itself in float32: rounded by `quantize(word)`, or as its file is stored for `None`."""
    file = downloads.find("smollm2")
    if file is None:
        return ["quality not measured: SmolLM2 is not here (python -m regard.downloads smollm2)"]
    ids = read_tokenizer(file).encode(find_text()[: 20 * WINDOWS * LENGTH]).ids[: WINDOWS * LENGTH]
    texts = torch.tensor(ids[: len(ids) // WINDOWS * WINDOWS]).view(WINDOWS, -1)
    exact, logits = measure_perplexity(GPT.from_pretrained(file), texts)
    model = GPT.from_pretrained(file, quantized=True) if word is None else GPT.from_pretrained(file).quantize(word)
    made, others = measure_perplexity(model, texts)
    off = others - logits
    return [
        f"SmolLM2 on {texts.numel()} tokens of a novel: perplexity {made:.3f} {'as stored' if word is None else word}, "
        f"{exact:.3f} in float32 ({100 * (made / exact - 1):+.2f} %)",
        f"its logits differ by at most {off.abs().max():.2f}, {off.square().mean().sqrt():.3f} root mean square; the "
        f"largest is {logits.abs().max():.1f}; {100 * (others.argmax(-1) == logits.argmax(-1)).float().mean():.1f} % "
        "of the best tokens are the same",
    ]


MEMORY = """
import gc
import sys
import tempfile
import torch
from regard.models import GPT

def used():
    gc.collect()
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

def write(model):
    model.generate([[1, 2, 3, 4]], max_new_tokens=16)
    return model

with tempfile.TemporaryDirectory() as folder:  # what libraries need once is there before the file is loaded
    small = GPT(GPT.Config.llama(vocab_size=99, context_length=64, dim=64, layers=2, heads=2)).quantize("int4")
    write(small).save_pretrained(folder)
    write(GPT.from_pretrained(folder))
before = used()
model = write(GPT.from_pretrained(sys.argv[1], quantized=True))
print(used() - before)
"""


def measure_memory(file: Path) -> float:
    """Bytes by which a process grows that loads this file and writes a text."""
    ran = subprocess.run([sys.executable, "-c", MEMORY, str(file)], capture_output=True, text=True, check=True)
    return float(ran.stdout)
