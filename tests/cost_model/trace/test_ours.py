"""Regard's own models, traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain import slow
from torch.utils.flop_counter import FlopCounterMode

from regard import Attention, Causal, Quadratic, Window, cost
from regard.cost_model.symbols import size_symbol, size_symbols
from regard.cost_model.trace.runner import Runner
from regard.layers import AttentionSizes, GridPositions, Lattice, MultiHeadAttention, Rotary, SpatialAttention
from regard.models import GPT, Bert, BertConfig, GPTConfig, SpatialConfig, SpatialTransformer, ViT, ViTConfig

B, N = size_symbol("B"), size_symbol("N")


def model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gpt":
        return GPT(GPTConfig(vocab_size=11, context_length=40, dim=12, layers=2, heads=3))
    if kind == "alibi":
        return GPT(GPTConfig(vocab_size=11, context_length=40, dim=12, layers=1, heads=3, position="alibi", window=4))
    if kind == "bert":
        return Bert(BertConfig(vocab_size=11, context_length=40, dim=12, layers=2, heads=3))
    return ViT(ViTConfig(image=(8, 12), patch=4, classes=5, dim=12, layers=2, heads=3))


def real(kind: str) -> torch.Tensor:
    return torch.zeros(2, 3, 8, 12) if kind == "vit" else torch.zeros(2, 13, dtype=torch.long)


def floats(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    return [each for each in output if isinstance(each, torch.Tensor)]


@pytest.mark.parametrize("kind", ["gpt", "bert", *slow("alibi", "vit")])
def test_products_are_those_of_a_real_run_with_the_kernels(kind: str) -> None:
    sizes = {"batch": 2} if kind == "vit" else {"batch": 2, "tokens": 13}
    built, x = model(kind).eval(), real(kind)
    found = cost(built, step="training", **sizes)
    with FlopCounterMode(display=False) as counter:
        output = built(x)
        sum(each.sum() for each in floats(output)).backward()
    recomputed = 2 * found.pairs * 4  # the kernels compute the scores of 4 channels again in backward
    assert found.flops + recomputed == counter.get_total_flops()
    assert found.parameters == sum(parameter.numel() for parameter in built.parameters())
    assert built(x) is not None  # what is cached between runs still has its values


@pytest.mark.parametrize(("kind", "most"), [("gpt", 4), ("bert", 5), ("spatial", 6)])
def test_formulas_take_few_runs(kind: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run costs about as much time as all that is done with its result."""
    spatial = SpatialConfig(image=(8, 12), dim=16, layers=2, heads=3, hidden_dim=24)
    built = SpatialTransformer(spatial) if kind == "spatial" else model(kind)
    runs: list[dict[str, int]] = []
    run = Runner.run
    monkeypatch.setattr(Runner, "run", lambda self, sizes: runs.append(sizes) or run(self, sizes))
    cost(built, **({} if kind == "spatial" else {"tokens": 13}))
    assert len(runs) <= most


def test_a_causal_model_visits_half_the_square_unless_the_reference_is_asked_for() -> None:
    found = cost(model("gpt"), tokens=13)
    H, L = size_symbols("H L")
    assert (found.pairs.formula - H * L * B * N * (N + 1) / 2).expand() == 0
    assert cost(model("gpt"), tokens=13, backend="reference").exponentials == 2 * 3 * 13 * 13


def test_a_window_visits_the_window() -> None:
    layer = MultiHeadAttention(12, 3, attention=Attention(pattern=Window(4, 0)))
    found = cost(layer, batch=2, tokens=13)
    assert found.pairs == 2 * 3 * (5 * 13 - 4 * 5 // 2)


def test_decoding_sees_the_cache_and_the_token_itself() -> None:
    found = cost(model("gpt"), batch=2, tokens=13, step="decode")
    assert found.pairs == 2 * 2 * 3 * 14
    assert found.macs == 2 * (2 * (12 * 12 * 12 + 2 * 12 * 14) + 12 * 11)
    layer = MultiHeadAttention(12, 3, attention=Attention(pattern=Causal()))
    assert cost(layer, tokens=13, step="decode").pairs == 3 * 14


def test_decoding_with_cross_attention_projects_the_context_once() -> None:
    layer = MultiHeadAttention(AttentionSizes(12, 3, context=20))
    found = cost(layer, batch=2, tokens=5, keys=7, step="decode")
    assert found.macs == 2 * (2 * 12 * 12 + 2 * 7 * 12)  # query and output projection, scores and sums of values
    assert found.pairs == 2 * 3 * 7


def test_separable_heads_attend_to_every_pair_of_pixels() -> None:
    model = SpatialTransformer(SpatialConfig(image=(8, 12), dim=16, layers=1, heads=3, hidden_dim=24))
    found = cost(model, batch=2)
    assert found.pairs == 2 * 3 * (4 * 6) ** 2
    assert found.exponentials == 3 * (4**2 + 6**2)  # a softmax over rows and one over columns


@pytest.mark.parametrize("edges", ["zeros", "replicate"])
def test_soft_spatial_attention_attends_to_every_pair_of_pixels(edges: str) -> None:
    layer = SpatialAttention(3, 5, [(0, -1), (0, 0), (0, 1)], alpha=0.5, lattice=Lattice(edges=edges))
    found = cost(layer, inputs=("B", 3, "R", "W"), batch=2, image=(4, 6))
    R, W = size_symbols("R W")
    assert (found.pairs.formula - 3 * B * (R * W) ** 2).expand() == 0
    assert found.exponentials == 3 * (4**2 + 6**2)
    assert cost(layer.with_alpha(float("inf")), inputs=("B", 3, "R", "W"), batch=2, image=(4, 6)).pairs == 0
    bare = cost(Attention(scale=0.0, bias=Quadratic(3, grid=(4, 6))), batch=2, tokens=24, heads=3, dim=3)
    assert found.pairs == bare.pairs


def test_queries_at_every_second_pixel_meet_every_pixel() -> None:
    layer = SpatialAttention(3, 5, [(0, 0), (1, 1)], alpha=0.5, lattice=Lattice(stride=2))
    found = cost(layer, inputs=("B", 3, "R", "W"), batch=2, image=(4, 6))
    assert found.pairs == 2 * 2 * (2 * 3) * (4 * 6)
    line = SpatialAttention(3, 5, [-1, 0, 1], alpha=0.5)
    assert cost(line, inputs=("B", 3, "N"), batch=2, tokens=7).pairs == 2 * 3 * 7 * 7


def test_rotary_embedding_reads_tables_of_its_positions() -> None:
    found = cost(Rotary(8), batch=2, tokens=5, heads=3)
    assert found.macs == 0
    assert found.depth == 2  # a product and a sum
    assert found.bytes.formula.free_symbols == {B, N, size_symbol("H")}


def test_positions_on_a_grid_are_resized_to_an_image() -> None:
    positions = GridPositions((5, 7), 12, first=1)
    assert cost(positions, image=(5, 7)).bytes == 0
    found = cost(positions, image=(9, 11))
    assert found.parameters == positions.weight.numel()
    assert found.bytes > 4 * 12 * (5 * 7 + 9 * 11)


def test_what_is_kept_is_what_autograd_saves_on_a_real_run() -> None:
    built, x = model("gpt").train(), real("gpt")
    given = {tensor.untyped_storage().data_ptr() for tensor in (x, *built.parameters(), *built.buffers())}
    saved: dict[int, int] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        # The kernel's program, whole numbers, is remembered by its pattern and no run's own.
        if storage.data_ptr() not in given and tensor.dtype not in (torch.int32,) and not _is_masks(tensor):
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = built(x)
    assert output.requires_grad
    assert cost(built, batch=2, tokens=13).activation_bytes == sum(saved.values())


def _is_masks(tensor: torch.Tensor) -> bool:
    """Masks of a program are 64-bit words; indices of positions are too, but count from zero."""
    return tensor.dtype == torch.int64 and not torch.equal(tensor.flatten(), torch.arange(tensor.numel()))
