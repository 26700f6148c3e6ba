"""Training against its peers: the same initial weights and the same data, the first losses compared before timing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.model_cases import library, sentences
from benchmarks.model_contest import ModelCase
from benchmarks.timing import Run
from regard.models import BertConfig
from regard.models.bert_heads import BertForPretraining, BertForPretrainingConfig
from regard.models.gpt import GPT
from regard.train import GPTRecipe
from regard.train.data import text
from regard.train.loop import Training
from regard.train.objectives.sequences import Sequences, pack_sequences

IGNORED = -100
MASK = 103


class PlainGPT(nn.Module):
    """GPT as nanoGPT writes it: torch's own layers and scaled_dot_product_attention."""

    def __init__(self, ours: GPT) -> None:
        super().__init__()
        config = ours.config
        self.heads, self.dim = config.heads, config.dim
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.positions = nn.Embedding(config.context_length, config.dim)
        self.blocks = nn.ModuleList(PlainBlock(config.dim, config.heads, config.bias) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.output.weight = self.tokens.weight
        # A window has no flag in SDPA: the mask is made once, of one number for each pair.
        places = torch.arange(config.context_length)
        back = places[:, None] - places
        self.mask = None if config.window is None else (back >= 0) & (back <= config.window)
        self._copy(ours)

    @torch.no_grad()
    def _copy(self, ours: GPT) -> None:
        self.tokens.weight.copy_(ours.embedding.weight)
        self.positions.weight.copy_(ours.positions.weight)  # pyright: ignore[reportOptionalMemberAccess, reportArgumentType]
        self.norm.load_state_dict(ours.norm.state_dict())
        for mine, block in zip(self.blocks, ours.blocks, strict=True):
            pairs = (
                (mine.joint, block.attention.projections),
                (mine.merge, block.attention.output),
                (mine.inner, block.feed_forward.inner),
                (mine.outer, block.feed_forward.outer),
                (mine.first_norm, block.attention_norm),
                (mine.second_norm, block.feed_forward_norm),
            )
            for target, source in pairs:
                target.weight.copy_(source.weight)  # pyright: ignore[reportCallIssue, reportArgumentType]
                if target.bias is not None:
                    target.bias.copy_(source.bias)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, self.mask)
        return self.output(self.norm(x))


class PlainBlock(nn.Module):
    def __init__(self, dim: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.first_norm, self.second_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.joint, self.merge = nn.Linear(dim, 3 * dim, bias=bias), nn.Linear(dim, dim, bias=bias)
        self.inner, self.outer = nn.Linear(dim, 4 * dim, bias=bias), nn.Linear(4 * dim, dim, bias=bias)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        batch, tokens, dim = x.shape
        split = self.joint(self.first_norm(x)).split(dim, dim=2)
        query, key, value = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in split)
        made = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        x = x + self.merge(made.transpose(1, 2).contiguous().view(batch, tokens, dim))
        return x + self.outer(functional.gelu(self.inner(self.second_norm(x)), approximate="tanh"))


def make_loop(model: nn.Module, loss_of: Callable[[], Tensor], rate: float = 1e-4) -> Run:
    """A plain training step: loss, backward, clipping, fused AdamW."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)

    def run() -> Tensor:
        loss = loss_of()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return run


def gpt(name: str, bar: float, **sizes: Any) -> ModelCase:
    """A GPT on random characters by the engine of `regard.train`, against a plain loop over a plain model."""
    recipe = GPTRecipe(**{"learning_rate": 1e-4, "sample_tokens": 0, **sizes})
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(32, 97, (1 << 18,), generator=generator).tolist()
    task = recipe.make_task(text.Documents.from_texts(["".join(map(chr, letters))]))
    training = Training(task, None)
    assert isinstance(training.model, GPT)
    peer = PlainGPT(training.model)
    step = 0

    def batch() -> tuple[Tensor, Tensor]:
        nonlocal step
        step += 1
        made = task.make_batches(step)[0]
        return made.tokens, made.targets

    def plain_loss() -> Tensor:
        tokens, targets = batch()
        return functional.cross_entropy(peer(tokens).flatten(0, 1), targets.flatten())

    tokens, targets = batch()
    with torch.no_grad():
        losses = [functional.cross_entropy(m(tokens).flatten(0, 1), targets.flatten()) for m in (training.model, peer)]

    def ours() -> Tensor:
        line, _ = training._run_step(training.position.step)
        training.position.step = (training.position.step + 1) % task.steps
        return torch.tensor(line["loss"])

    count = recipe.batch_size * recipe.context_length
    parameters = sum(p.numel() for p in peer.blocks.parameters()) + peer.tokens.weight.numel()
    return ModelCase(
        name,
        f"{recipe.layers} layers, {recipe.dim} wide, context {recipe.context_length}, batch {recipe.batch_size}"
        + ("" if recipe.window is None else f", window {recipe.window}")
        + "; float32, AdamW (fused), clipping",
        ours,
        {"eager torch, SDPA" + ("" if recipe.window is None else " with a mask"): make_loop(peer, plain_loss)},
        bar,
        float((losses[0] - losses[1]).abs() / losses[1]),
        "plain torch",
        (count, "tokens"),
        compared="first losses",
        gflop=6e-9 * parameters * count,  # 6 for each parameter and token: forward and backward
    )


def bert() -> ModelCase:
    """BERT-mini, masked tokens of 32 sentences of mixed length: ours in packed rows, Hugging Face's padded."""
    transformers = library("transformers")
    torch.manual_seed(0)
    config = BertConfig.bert("mini")
    fields = {name: getattr(config, name) for name in ("vocab_size", "dim", "layers", "heads", "context_length")}
    ours = BertForPretraining(BertForPretrainingConfig(**fields, masked_tokens=True, pooler=False, dropout=0.0))
    settings = transformers.BertConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=4 * config.dim,
        max_position_embeddings=config.context_length,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    peer = transformers.BertForMaskedLM._from_config(settings, attn_implementation="sdpa")
    encoder = type(ours.bert).from_checkpoint(settings.to_dict(), peer.state_dict())
    ours.bert = copy.deepcopy(encoder)
    texts = sentences(32)
    lengths = torch.tensor([len(each) for each in texts])
    flat = torch.tensor([token for each in texts for token in each])
    chosen = torch.rand(len(flat), generator=torch.Generator().manual_seed(1)) < 0.15
    masked = torch.where(chosen, MASK, flat)
    packed = pack_sequences(Sequences(masked, torch.zeros_like(masked), lengths), 512, 0)
    places, targets = packed.places[chosen], flat[chosen]

    rows = [row.tolist() for row in masked.split(lengths.tolist())]
    labels = [row.tolist() for row in torch.where(chosen, flat, IGNORED).split(lengths.tolist())]
    longest = int(lengths.max())
    padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    goal = torch.tensor([row + [IGNORED] * (longest - len(row)) for row in labels])

    def our_loss() -> Tensor:
        hidden = ours(packed.tokens, packed.segments, positions=packed.positions, pattern=packed.pattern)
        return functional.cross_entropy(ours.predict_tokens(hidden.flatten(0, 1)[places]), targets)

    chosen_places = goal != IGNORED
    short = copy.deepcopy(peer)  # the same, but for the logits of tokens that are not masked

    def peer_loss() -> Tensor:
        return peer(padded, attention_mask=mask, labels=goal).loss

    def short_loss() -> Tensor:
        hidden = short.bert(padded, attention_mask=mask).last_hidden_state
        return functional.cross_entropy(short.cls(hidden[chosen_places]), goal[chosen_places])

    for model in (ours, peer, short):
        model.eval()
    with torch.no_grad():
        losses = [our_loss(), peer_loss(), short_loss()]
    error = float((losses[0] - torch.stack(losses)).abs().max() / losses[0])
    return ModelCase(
        "BERT-mini, masked tokens, packed",
        f"{len(texts)} sentences of {int(lengths.min())} to {longest} tokens, {len(flat)} in all; dropout 0.1",
        make_loop(ours, our_loss),
        {
            "Hugging Face sdpa, padded": make_loop(peer, peer_loss),
            "the same, masked tokens' logits": make_loop(short, short_loss),
        },
        1.5,
        error,
        "Hugging Face",
        (len(flat), "tokens"),
        compared="first losses",
        notes=[f"{packed.tokens.numel()} tokens with padding in ours, {padded.numel()} in the peer's"],
    )


CASES: dict[str, Callable[[], ModelCase]] = {
    "GPT small": lambda: gpt("GPT 4 x 128, context 64", 1.4, layers=4, dim=128, context_length=64, batch_size=12),
    "GPT medium": lambda: gpt(
        "GPT 6 x 384, context 256", 1.15, layers=6, dim=384, heads=6, context_length=256, batch_size=16
    ),
    "GPT window": lambda: gpt(
        "GPT 6 x 384, context 4,096, window 256", 3.0, layers=6, dim=384, heads=6, context_length=4096, batch_size=1,
        window=256,
    ),
    "BERT packed": bert,
}  # fmt: skip
