"""Models of timm, traced: tiny ones against torch's counter on real runs with attention written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cost_model.counting import in_input_sizes
from plain import slow_but
from torch.utils.flop_counter import FlopCounterMode
from twins import library, timm

from regard import cost
from regard.cost_model.symbols import size_symbol
from regard.errors import CostError

B = size_symbol("B")
IMAGES = {"vit": (32, 32), "swin": (32, 32), "davit": (32, 32), "convnext": (64, 96)}
# Multiply-adds of the first convolution for one image, whose input learns nothing.
STEMS = {
    "vit": 4 * 4 * 24 * 3 * 64,
    "swin": 16 * 16 * 12 * 3 * 4,
    "davit": 8 * 8 * 12 * 3 * 49,
    "convnext": 16 * 24 * 8 * 3 * 16,
}


def built(kind: str) -> Any:
    models = timm().models
    torch.manual_seed(0)
    if kind == "vit":
        return models.VisionTransformer(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5)
    if kind == "swin":
        return models.SwinTransformer(
            img_size=32, patch_size=2, window_size=4, embed_dim=12, depths=(2, 1), num_heads=(2, 4), num_classes=5
        )
    if kind == "davit":
        make = library("timm.models.davit").DaVit
        return make(depths=(1, 1), embed_dims=(12, 24), num_heads=(2, 2), num_classes=5)
    return models.ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 12, 12, 16), num_classes=5)


def counted(model: Any, x: torch.Tensor) -> int:
    """With attention written out: torch's counter knows no fused one on the CPU."""
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("kind", slow_but(("vit", "swin"), IMAGES))
def test_products_are_those_of_a_real_run(kind: str) -> None:
    model, image = built(kind), IMAGES[kind]
    found = cost(model, batch=2, image=image)
    assert found.macs == counted(model, torch.zeros(2, 3, *image))
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["vit", *(pytest.param(each, marks=pytest.mark.slow) for each in list(IMAGES)[1:])])
def test_two_products_go_back_for_each_one_forward_but_for_the_image_itself(kind: str) -> None:
    # Torch's own counter does not count grouped convolutions backward correctly, so it is not used here.
    found = cost(built(kind), batch=2, image=IMAGES[kind], step="training")
    forward = int(sum(part.forward.macs for part in found.parts).subs(found.values))
    assert found.macs == 3 * forward - 2 * STEMS[kind]


def test_an_image_has_letters_where_it_may_have_any_size() -> None:
    model = built("convnext")
    found = cost(model, image=(64, 96))
    assert {str(symbol) for symbol in in_input_sizes(found.macs).free_symbols} == {"B", "R", "W"}
    other = found.macs.at({size_symbol("R"): 160, size_symbol("W"): 32, B: 3})
    assert other == counted(model, torch.zeros(3, 3, 160, 32))


def test_sizes_that_nothing_has_are_refused() -> None:
    with pytest.raises(CostError, match=r"reads nothing that has tokens(.|\n)*\(B, 3, R, W\)(.|\n)*image=\.\.\."):
        cost(built("vit"), tokens=7)
    encoder = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    with pytest.raises(CostError, match=r"reads nothing that has an image(.|\n)*\(B, N, 8\)(.|\n)*tokens=\.\.\."):
        cost(encoder, image=(3, 5))
    with pytest.raises(CostError, match=r"nothing that has context_tokens"):
        cost(torch.nn.Conv2d(3, 5, 3), context_tokens=7)


def test_an_image_of_a_fixed_size_stays_a_number_and_says_why() -> None:
    found = cost(built("vit"), image=32)
    assert in_input_sizes(found.macs).free_symbols == {B}
    assert any(note.startswith("rows stays the number 32: another size fails") for note in found.notes)


def test_stages_of_other_widths_keep_their_numbers() -> None:
    found = cost(built("swin"), image=32).by_part()
    assert "layers.0.blocks.*.mlp.fc1" in found
    assert "layers.1.blocks.0.mlp.fc1" in found
