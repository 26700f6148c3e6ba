"""`regard generate FOLDER PROMPT` and `regard translate FOLDER SENTENCE`: text from a trained model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.cli.output import check_writable, report_written
from regard.errors import InputError
from regard.render.files import check_suffix

if TYPE_CHECKING:
    from regard.models.pretrained import Pretrained
    from regard.train.data.text import Tokenizer

GENERATE = """Continue a text by a language model, token by token.

FOLDER is a folder of `regard train gpt` (its best model is used), or any checkpoint of a GPT with a tokenizer:
GPT-2, LLaMA, Mistral or Qwen2 as Hugging Face saves them. A text may be longer than the model's context: whenever
that is full, the model goes on from the last half of it.
"""
# What to do with the model in a folder.
COMMANDS = {
    "regard.gpt": 'regard generate {folder} "Once upon a time"',
    "regard.transformer": 'regard translate {folder} "In the beginning"',
}
TRANSLATE = """Translate sentences by a model of `regard train translate`: those given, or the lines of stdin."""


def add(commands: Any) -> None:
    """Add the commands `generate` and `translate`."""
    parser = commands.add_parser(
        "generate",
        help="continue a text by a language model",
        description=GENERATE,
        epilog='examples:\n  regard generate runs/shakespeare "ROMEO:" --max-new-tokens 300 --temperature 0.8',
    )
    parser.add_argument("folder", metavar="FOLDER", help="the model")
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", default="\n", help="how the text begins (a new line)")
    parser.add_argument("--max-new-tokens", metavar="N", type=int, default=200, help="(200)")
    parser.add_argument("--temperature", metavar="T", type=float, default=0.8, help="0 is greedy decoding (0.8)")
    parser.add_argument("--top-k", metavar="N", type=int, help="sample from the N likeliest tokens")
    parser.add_argument("--top-p", metavar="P", type=float, help="sample from the likeliest tokens of this mass")
    parser.add_argument("--seed", metavar="N", type=int, help="the same seed writes the same text")
    parser.set_defaults(run=run_generate)
    parser = commands.add_parser(
        "translate",
        help="translate sentences",
        description=TRANSLATE,
        epilog='examples:\n  regard translate runs/translate-kjv-luther-seed0 "In the beginning"',
    )
    parser.add_argument("folder", metavar="FOLDER", help="the model")
    parser.add_argument("sentences", metavar="SENTENCE", nargs="*", help="what is translated; lines of stdin if none")
    parser.add_argument("--num-beams", metavar="N", type=int, default=4, help="(4)")
    parser.add_argument("--length-penalty", metavar="A", type=float, default=0.6, help="(0.6)")
    parser.add_argument("--average", action="store_true", help="the average of the run's checkpoints")
    parser.add_argument("--alignment", metavar="FILE", type=Path, help="draw the cross-attention of the first sentence")
    parser.set_defaults(run=run_translate)


def find_model_folder(folder: str) -> Path:
    """The folder of the model: of a run its best model, its final one, or its newest checkpoint."""
    from regard.train.checkpoint import BEST, find_checkpoints
    from regard.train.loop import MODEL

    place = Path(folder).expanduser()
    for found in (place / BEST, place / MODEL, *find_checkpoints(place)[-1:]):
        if (found / "config.json").is_file():
            return found
    return place


def load(folder: str, kind: type[Pretrained]) -> tuple[Any, Tokenizer]:
    """A model and its tokenizer; raises for a model of another class."""
    from regard.models.io.atomic import read_json
    from regard.train.data.text import read_tokenizer

    place = find_model_folder(folder)
    found = read_json(place / "config.json").get("model_type") if (place / "config.json").is_file() else None
    if found in COMMANDS and found != f"regard.{kind.__name__.lower()}":
        raise InputError(
            f"{folder} is not the folder of a {kind.__name__}.",
            asked=str(place),
            found=f"model_type {found!r}",
            because="another kind of model was saved there",
            instead=COMMANDS[found].format(folder=folder),
        )
    return kind.from_pretrained(place).eval(), read_tokenizer(place)


def run_generate(args: argparse.Namespace) -> int:
    """Write the text as it is generated."""
    from regard.models import GPT

    model, tokenizer = load(args.folder, GPT)
    prompt = tokenizer.encode(args.prompt)
    if not prompt:
        raise InputError(
            "The prompt has no tokens.",
            asked=f"PROMPT {args.prompt!r}",
            because="a text is continued from at least one token",
            instead='regard generate FOLDER "Once upon a time"',
        )
    stop = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    options = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "seed": args.seed}
    written = generate_beyond_context(model, prompt, args.max_new_tokens, stop, options)
    tokens, shown = list(prompt), tokenizer.decode(prompt)
    print(shown, end="", flush=True)
    for token in written:
        tokens.append(token)
        text = tokenizer.decode(tokens)
        if not text.endswith("�"):  # the first bytes of a character
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print(tokenizer.decode(tokens)[len(shown) :])
    return 0


def generate_beyond_context(
    model: Any, prompt: list[int], max_new_tokens: int, stop: list[int], options: dict[str, Any]
) -> Iterator[int]:
    """New tokens after a prompt, of which the model sees as many as its context holds; ends before a stop token.

    When the context is full, the last half of it is the next prompt: tokens are generated with a cache, and each has
    seen half a context at least.
    """
    from regard.models import stream

    def begin(text: list[int], count: int, number: int) -> tuple[Iterator[tuple[int, int]], int]:
        """A stream of at most `count` tokens after the end of the text, and how many it may yield."""
        limit, recent, seed = model.context_length, text, options["seed"]
        if limit is not None and len(text) + count > limit:
            recent = text[-max(limit // 2, 1) :] if len(text) >= limit else text
            count = min(count, max(limit - len(recent), 1))
        given: dict[str, Any] = options | {"seed": None if seed is None else seed + number}
        return stream(model, [recent], max_new_tokens=count, stop_tokens=stop, **given), count

    first = begin(prompt, max_new_tokens, 0)  # checks the options before anything is written

    def generate() -> Iterator[int]:
        text, left, number, (tokens, count) = list(prompt), max_new_tokens, 0, first
        while True:
            for _, token in tokens:
                if token in stop:
                    return
                text.append(token)
                yield token
            left -= count
            if left <= 0:
                return
            number += 1
            tokens, count = begin(text, left, number)

    return generate()


def run_translate(args: argparse.Namespace) -> int:
    """Print a translation for each sentence."""
    from regard.models import Transformer
    from regard.train.averaging import average_checkpoints
    from regard.train.tasks.translate import translate

    if args.alignment is not None:
        check_suffix(args.alignment, (".svg", ".png", ".pdf", ".html"))
        check_writable(str(args.alignment))
    model, tokenizer = load(args.folder, Transformer)
    if args.average:
        model = average_checkpoints(args.folder, Transformer)
    assert isinstance(model, Transformer)
    sentences = args.sentences or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not sentences or not all(sentence.strip() for sentence in sentences):
        raise InputError(
            "There is nothing to translate.",
            asked="a SENTENCE without words" if sentences else "no SENTENCE, and no lines on stdin",
            because="sentences are arguments or lines",
            instead='regard translate FOLDER "In the beginning"',
        )
    options = {"num_beams": args.num_beams, "length_penalty": args.length_penalty}
    translations = translate(model, tokenizer, sentences, **options)
    for translation in translations:
        print(translation)
    if args.alignment is not None:
        _draw_alignment(model, tokenizer, sentences[0], translations[0], args.alignment)
    return 0


def _draw_alignment(model: Any, tokenizer: Tokenizer, source: str, target: str, file: Path) -> None:
    """Draw the cross-attention from each token of the translation to the source."""
    from regard.cli.train_attention import draw_alignment

    report_written(draw_alignment(model, tokenizer, source, target).save(file))
