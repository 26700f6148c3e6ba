# slow
# weights: minilm
"""Fine-tune a BERT of Hugging Face on BBC news, with torch's attention and with Regard's: the same curve.

    python examples/finetune_huggingface.py [--steps 12] [--tokens 512] [--only regard]

The model is all-MiniLM-L6-v2 with a new head for the five classes; the texts come by `regard data bbc`. Both runs begin
with the same weights, see the same batches and draw the same dropout of hidden states. Dropout of attention weights is
off: the two implementations would draw other ones.
"""

from __future__ import annotations

import argparse
import logging
import time
from typing import Any

import torch
from torch import Tensor

import regard.integrations.transformers  # noqa: F401  registers attn_implementation="regard"
from regard import downloads
from regard.train.data import text

ROWS, RATE = 8, 5e-5


def main(arguments: list[str] | None = None) -> dict[str, list[float]]:
    """The losses of both."""
    parser = argparse.ArgumentParser(description="Fine-tune a BERT of Hugging Face on BBC news.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=512, help="longer articles are cut")
    parser.add_argument("--only", choices=["sdpa", "regard"], help="one of the two")
    options = parser.parse_args(arguments)
    curves = {}
    for attention in [options.only] if options.only else ["sdpa", "regard"]:
        curves[attention] = fine_tune(attention, options.steps, options.tokens)
    if len(curves) == 2:
        apart = max(abs(left - right) for left, right in zip(*curves.values(), strict=True))
        print(f"losses differ by at most {apart:.1e}")
    return curves


def fine_tune(attention: str, steps: int, tokens: int) -> list[float]:
    """The loss of every step; prints the time and the accuracy on articles that were not trained on."""
    batches, held_out, names = make_batches(steps, tokens)
    model = make_model(attention, len(names))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    losses = []
    torch.manual_seed(1)
    model.train()
    start = time.perf_counter()
    for ids, mask, labels in batches:
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss))
    seconds = time.perf_counter() - start
    model.eval()
    with torch.inference_mode():
        right = sum(int((model(ids, mask).logits.argmax(-1) == labels).sum()) for ids, mask, labels in held_out)
    count = sum(len(labels) for *_, labels in held_out)
    shown = ", ".join(f"{loss:.4f}" for loss in losses[:: max(1, steps // 6)])
    print(f"{attention:<7} {seconds / steps:6.2f} s a step, losses {shown}; {right} of {count} held-out articles right")
    return losses


def make_model(attention: str, classes: int) -> Any:
    from transformers import BertForSequenceClassification

    folder = downloads.fetch("minilm")
    torch.manual_seed(0)
    logging.getLogger("transformers").setLevel(logging.ERROR)  # the head is new, which is said at length
    return BertForSequenceClassification.from_pretrained(
        folder, num_labels=classes, attn_implementation=attention, attention_probs_dropout_prob=0.0
    )


def make_batches(steps: int, tokens: int) -> tuple[list[tuple[Tensor, ...]], list[tuple[Tensor, ...]], tuple[str, ...]]:
    """Batches of ids, mask and labels to train on and to test with, padded to their longest article."""
    from transformers import PreTrainedTokenizerFast

    news, folder = text.load_labelled("bbc"), downloads.fetch("minilm")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json", pad_token="[PAD]")
    order = torch.randperm(len(news.texts), generator=torch.Generator().manual_seed(0)).tolist()

    def make_batch(chosen: list[int]) -> tuple[Tensor, ...]:
        encoded = tokenizer(
            [news.texts[i] for i in chosen], padding=True, truncation=True, max_length=tokens, return_tensors="pt"
        )
        return encoded["input_ids"], encoded["attention_mask"], torch.tensor([news.labels[i] for i in chosen])

    held_out, trained = order[:80], order[80:]
    rows = [trained[(n * ROWS + i) % len(trained)] for n in range(steps) for i in range(ROWS)]
    train = [make_batch(rows[start : start + ROWS]) for start in range(0, len(rows), ROWS)]
    return train, [make_batch(held_out[start : start + ROWS]) for start in range(0, 80, ROWS)], news.names


if __name__ == "__main__":
    main()
