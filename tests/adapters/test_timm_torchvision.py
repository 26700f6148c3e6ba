"""Vision transformers of timm and torchvision: images hold, and a window of Swin reaches across the image."""

from __future__ import annotations

import pytest
import torch
from examination import find_violations
from twins import library, timm

from regard.adapters import adapt
from regard.laws import check


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(5)


def block(version: str, grid: tuple[int, int], **more):
    module = library(f"timm.models.swin_transformer{version}")
    cls = module.SwinTransformerV2Block if version else module.SwinTransformerBlock
    return cls(8, grid, 2, window_size=4, **more)


@pytest.mark.slow
def test_images_hold_in_timm():
    timm()
    vit = library("timm.models.vision_transformer")
    model = vit.VisionTransformer(img_size=16, patch_size=8, embed_dim=12, depth=2, num_heads=3, num_classes=5)
    assert find_violations(model) == []
    assert "fused_attn turned over" in adapt(model).variants()


@pytest.mark.slow
def test_channels_and_windows_hold_in_timm():
    timm()
    davit = library("timm.models.davit")
    assert (
        find_violations(davit.DaVit(depths=(1,), embed_dims=(8,), num_heads=(2,), window_size=3, num_classes=5)) == []
    )


@pytest.mark.slow
def test_attentions_with_masks_hold_in_timm():
    timm()
    assert find_violations(library("timm.models.vision_transformer").Attention(12, 3)) == []
    eva = library("timm.models.eva")
    assert find_violations(eva.EvaAttention(12, 3, qkv_fused=False, norm_layer=torch.nn.LayerNorm)) == []


def test_images_and_windows_hold_in_torchvision():
    vit, swin = library("torchvision.models.vision_transformer"), library("torchvision.models.swin_transformer")
    assert find_violations(vit.VisionTransformer(16, 8, 1, 3, 12, 20, num_classes=5)) == []
    subject = adapt(swin.SwinTransformerBlockV2(8, 2, [4, 4], [2, 2]))
    assert subject.grid == (9, 5)
    assert check(subject, claims=["support"], fast=True).ok


@pytest.mark.parametrize("version", ["", "_v2"])
def test_shifted_windows_of_timm_wrap_around_a_grid_that_they_do_not_divide(version: str):
    timm()
    whole = check(block(version, (8, 12), shift_size=2), claims=["support"], fast=True)
    assert whole.verdicts["support"].outcome == "holds"
    straight = check(block(version, (7, 9), shift_size=0), claims=["support"], fast=True)
    assert straight.verdicts["support"].outcome == "holds"
    dynamic = {"dynamic_mask": True} if version else {}
    cut = check(block(version, (7, 9), shift_size=2, **dynamic), claims=["support"], fast=True)
    assert cut.verdicts["support"].outcome == "broken"
