"""What the models of text cost: GPT, BERT and the Transformer.

Blocks of a model are alike, so that a formula has `L` times the cost of one. Matrices that are used twice, as the
embedding that also makes the logits, are counted with their first use.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

import sympy
from torch import nn

from regard.cost_model.asked import Asked, Counted
from regard.cost_model.letters import letter, letters
from regard.cost_model.part import Part, inside
from regard.cost_model.rules import pieces
from regard.cost_model.rules.layers import block_parts, norm_part, sinusoids
from regard.cost_model.rules.multihead import rotation_part
from regard.cost_model.rules.pieces import Found
from regard.cost_model.rules.reading import Numbers, Reading
from regard.cost_model.setting import Setting
from regard.errors import CostError
from regard.layers.block import TransformerBlock
from regard.layers.positions import LearnedPositions, SinusoidalPositions
from regard.models.bert import Bert, MaskedTokens
from regard.models.gpt import GPT
from regard.models.transformer import Transformer


def gpt_rule(model: GPT, asked: Asked, setting: Setting) -> Counted:
    """Embedding, blocks, norm, logits of every token; in a decoding step, of the newest.

    x = embed(tokens) + position,   x = block(x) L times,   logits = norm(x) W^T
    """
    reading = Reading.of(asked, setting)
    vocab_size, width = letters("V D")
    values = {vocab_size: model.config.vocab_size, width: model.config.dim}
    begin = [
        pieces.embedding("embedding", setting, reading.rows, vocab_size, width),
        *_positions("positions", model.positions, setting, reading, width, values),
    ]
    if model.rotary is not None:
        begin.append(rotation_part(model.rotary, setting, reading.tokens, model.rotary.dim))
    end = [norm_part("norm", model.norm, setting, reading.rows, width)]
    if model.output is not None:
        tied = model.output.weight is model.embedding.weight
        has_bias = model.output.bias is not None
        end.append(
            pieces.linear("output", setting, reading.rows, width, vocab_size, bias=has_bias, parameters=not tied)
        )
    blocks = stack_blocks("blocks", model.blocks, setting, reading, None, width)
    return reading.counted("GPT", pieces.merged(Found(begin, values), blocks, Found(end, values)))


def bert_rule(model: Bert, asked: Asked, setting: Setting) -> Counted:
    """Embedding, norm, blocks; the first token pooled; the heads for pre-training where they are.

    x = norm(embed(tokens) + position + segment),   x = block(x) L times
    pooled = tanh(x_0 W + b);   masked-token logits of every token;   two next-sentence logits
    """
    _has_no_next("Bert", setting)
    reading = Reading.of(asked, setting)
    rows = reading.rows
    vocab_size, width = letters("V D")
    values = {vocab_size: model.config.vocab_size, width: model.config.dim}
    begin = [
        pieces.embedding("embedding", setting, rows, vocab_size, width),
        *_positions("positions", model.positions, setting, reading, width, values, model.first_position),
    ]
    if model.segments is not None:
        # All tokens belong to the first sentence unless something else is said: one vector, added to all.
        segment = pieces.addition("segments", setting, rows * width)
        begin.append(dataclasses.replace(segment, parameters=model.segments.num_embeddings * width))
    begin.append(norm_part("norm", model.norm, setting, rows, width))
    blocks = stack_blocks("blocks", model.blocks, setting, reading, None, width)
    end = _bert_heads(model, setting, reading, vocab_size, width)
    return reading.counted("Bert", pieces.merged(Found(begin, values), blocks, Found(end, values)))


def _bert_heads(model: Bert, setting: Setting, reading: Reading, vocab_size: Any, width: Any) -> list[Part]:
    """What reads the last layer: the pooler, and beside it the two heads for pre-training."""
    parts = []
    rows, batch, masked = reading.rows, reading.batch, model.masked_tokens
    kept = setting.item * rows * width
    if model.pooler is not None:
        # The first token is a view of all tokens, so that all of them are kept for its gradient.
        pooler = pieces.linear("pooler.linear", setting, batch, width, width, keeps=False)
        parts.append(dataclasses.replace(pooler, kept=kept))
        follows = model.next_sentence is not None
        parts.append(pieces.bent("pooler.tanh", setting, batch * width, "tanh", result_kept=follows))
    if model.next_sentence is not None:
        parts.append(pieces.linear("next_sentence", setting, batch, width, model.next_sentence.out_features))
    if masked is not None:
        # The deeper of the two ways: the pooler and what reads it run beside it.
        parts = [pieces.aside(part) for part in parts]
        tied = masked.output.weight is model.embedding.weight
        parts += inside(
            "masked_tokens",
            pieces.linear("inner", setting, rows, width, width, keeps=model.pooler is None),
            pieces.bent("bend", setting, rows * width, model.config.activation),
            norm_part("norm", masked.norm, setting, rows, width),
            pieces.linear("output", setting, rows, width, vocab_size, parameters=not tied),
        )
    return parts


def transformer_rule(model: Transformer, asked: Asked, setting: Setting) -> Counted:
    """The encoder reads T tokens; the decoder reads N others, looks at the encoder's, and says what follows each.

    In a decoding step the encoder rests, and keys and values of its text are there already.
    """
    reading, source = Reading.of(asked, setting), Reading.of(asked, setting, "T", asked.context_tokens)
    vocab_size, width = letters("V D")
    values = {vocab_size: model.config.vocab_size, width: model.config.dim}
    shared = model.target_embedding is model.embedding
    tied = any(model.output.weight is each.weight for each in (model.embedding, model.target_embedding))

    def side(name: str, read: Reading, other: Reading | None, counts: bool) -> Found:
        """One text's way from its tokens to what the last of its blocks knows."""
        embedding = pieces.embedding("embedding", setting, read.rows, vocab_size, width, parameters=counts)
        # E[token] sqrt(D): by a constant, of which nothing is kept.
        scale = pieces.elementwise("scale", setting, read.rows * width)
        places = model.source_positions if other is None else model.target_positions
        begin = inside(name, embedding, scale, *_positions("positions", places, setting, read, width, values))
        blocks = stack_blocks(f"{name}.blocks", getattr(model, name), setting, read, other, width)
        last = getattr(model, f"{name}_norm")
        end = [] if last is None else [norm_part(f"{name}.norm", last, setting, read.rows, width)]
        return pieces.merged(Found(begin, values), blocks, Found(end, values))

    encoder = side("encoder", source, None, True)
    decoder = side("decoder", reading, source, not shared)
    output = pieces.linear("output", setting, reading.rows, width, vocab_size, bias=False, parameters=not tied)
    if reading.past is not None:
        encoder = encoder._replace(parts=[pieces.resting(part) for part in encoder.parts])
    else:
        # Every block of the decoder reads what the encoder made: one tensor, which is kept once.
        encoder.parts.append(Part("encoder.output", kept=setting.item * source.rows * width))
        decoder = decoder._replace(parts=[_early(part) for part in decoder.parts])
    found = pieces.merged(encoder, decoder, Found([output], {**values, **source.values}))
    return reading.counted("Transformer", found)


def _early(part: Part) -> Part:
    """The depth of a decoder's part that waits for the encoder, which is longer than what the decoder does before.

    Its embedding, and the attention to itself of its first block, run beside the encoder; so they do on the way back.
    """
    layers = letter("L")
    if part.name.startswith("decoder.blocks."):
        own = part.name.removeprefix("decoder.blocks.").startswith("attention")
        share = (layers - 1) / layers if own else 1
    else:
        share = 1 if part.name == "decoder.norm" else 0
    ways = (dataclasses.replace(way, depth=sympy.expand(way.depth * share)) for way in (part.forward, part.backward))
    forward, backward = ways
    return dataclasses.replace(part, forward=forward, backward=backward)


# What they share


def _positions(
    name: str,
    layer: nn.Module | None,
    setting: Setting,
    reading: Reading,
    width: Any,
    values: Numbers,
    first: int = 0,
) -> list[Part]:
    """Positions that are added to the tokens, the same for every row; learned ones bring their number with them.

    first: rows at the beginning of the table that no token uses, as RoBERTa has them. Its positions depend on the
    tokens and are looked up for every row of the batch.
    """
    if layer is None:
        return []
    if isinstance(layer, SinusoidalPositions):
        # Computed while the embedding is read: no more on the longest path than the sum.
        table = pieces.aside(sinusoids(name, setting, reading.tokens, width))
    else:
        assert isinstance(layer, LearnedPositions)
        places = letter("S")
        values[places] = layer.weight.shape[0]
        _check_places(layer.weight.shape[0] - first, reading)
        rows = reading.rows if first else reading.tokens
        table = pieces.embedding(name, setting, rows, places, width, keeps=True)
    return [table + pieces.addition(name, setting, reading.rows * width)]


def _check_places(known: int, reading: Reading) -> None:
    """A text that is longer than the positions there are is refused, as the model refuses it."""
    past = 0 if reading.past is None else reading.values.get(reading.past, 0)
    if reading.count is not None and past + reading.count > known:
        raise CostError(
            "The text is longer than the context.",
            asked=f"{past + reading.count} tokens",
            found=f"a model for at most {known} tokens",
            because="there are no positions beyond the last one it has learned",
            instead=f"tokens={known - (reading.past is not None)}, or a model with a longer context",
        )


def stack_blocks(
    name: str,
    blocks: Iterable[TransformerBlock],
    setting: Setting,
    reading: Reading,
    other: Reading | None,
    width: sympy.Symbol,
) -> Found:
    """L blocks, one after the other. Where layers have descriptions of their own, those that are alike are grouped."""
    kinds = Counter[str]()
    examples: dict[str, TransformerBlock] = {}
    for block in blocks:
        kind = repr(block)
        kinds[kind] += 1
        examples[kind] = block
    layers = letter("L")
    several = []
    for kind, block in examples.items():
        found = block_parts(block, setting, reading, other, width, makes_rotation=False).inside(name)
        again = pieces.repeated(found.parts, layers)
        several.append(Found(again, {**found.values, layers: kinds[kind]}, found.notes))
    return pieces.merged(*several)


def _has_no_next(name: str, setting: Setting) -> None:
    if setting.step == "decode":
        raise CostError(
            f"{name} has no next token.",
            asked=f'cost({name}, step="decode")',
            because="it reads a text from both sides: one more token changes what it knows of all others",
            instead='step="forward" with one token more',
        )


RULES = {GPT: gpt_rule, Bert: bert_rule, Transformer: transformer_rule}
# Parts of these models that have no formula of their own.
PARTS = (MaskedTokens,)
