"""Formulas against fresh traces at many other sizes: those of every remainder by a window, a patch or a stride.

A formula is found from a few runs. It must hold at every size, or the notes say at which it does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from twins import library, timm, transformers

from regard import Attention, Blocks, Strided, Window, cost
from regard.adapters.fake_copies import TracedTarget
from regard.cost_model.cost import Cost
from regard.cost_model.run_mode import RunMode
from regard.cost_model.sizes import Sizes
from regard.cost_model.symbols import size_symbol
from regard.cost_model.trace.inputs import make_example_inputs
from regard.cost_model.trace.operator_costs import OperatorCosts
from regard.cost_model.trace.runner import Runner
from regard.cost_model.trace.size_space import SizeSpace
from regard.errors import CostError
from regard.layers import MultiHeadAttention, PatchEmbedding, TransformerBlock, WindowAttention
from regard.models import GPT, Bert, BertConfig, DaViT, DaViTConfig, GPTConfig

QUANTITIES = ("macs", "exponentials", "bytes", "pairs")


def traced(module: torch.nn.Module, step: str = "forward", **sizes: Any) -> dict[str, int]:
    """The quantities of one run at these sizes, added up over its operations: no formula is involved."""
    mode, target = RunMode(step=step), TracedTarget(module, torch.float32)
    inputs = make_example_inputs(target, Sizes(**sizes))
    trace, costs = Runner(target, inputs, mode).run(inputs.sizes), OperatorCosts(mode, {})
    totals = dict.fromkeys(QUANTITIES, 0)
    for operation in trace.operations:
        for each in costs.known[costs.key(operation)]:
            for name in QUANTITIES:
                totals[name] += int(getattr(each, name))
    return totals | {"activation_bytes": sum(operand.bytes for *_, operand in trace.saved)}


def predicted(found: Cost, sizes: dict[str, int]) -> dict[str, int]:
    """The same from the formulas, with other numbers for some symbols."""
    numbers = {size_symbol(name): size for name, size in sizes.items()}
    return {name: found.quantity(name).at(numbers).value for name in (*QUANTITIES, "activation_bytes")}


def holds(module: torch.nn.Module, found: Cost, image: tuple[int, int], step: str = "forward") -> bool:
    rows, columns = image
    return predicted(found, {"R": rows, "W": columns}) == traced(module, step, batch=2, image=image)


def any_size(rows: int, columns: int) -> bool:
    return True


IMAGES = [*itertools.product((5, 8, 9, 12), (8, 10, 12, 13))]


def both_padded(row: int, column: int) -> Callable[[int, int], bool]:
    return lambda r, w: bool(r % row and w % column)


def both_whole(row: int, column: int) -> Callable[[int, int], bool]:
    return lambda r, w: not (r % row or w % column)


SLOW = pytest.mark.slow
RAGGED_COLUMNS = "formulas hold for columns that are no multiples of"
BOTH = "formulas hold for rows and columns that are"


# In training the bytes differ as soon as rows or columns are whole, so that the formulas hold for fewer sizes.
@pytest.mark.parametrize(
    ("step", "window", "image", "domain", "note"),
    [
        ("forward", 3, (7, 7), lambda r, w: w % 3, f"{RAGGED_COLUMNS} 3"),
        ("forward", 3, (8, 8), lambda r, w: w % 3, f"{RAGGED_COLUMNS} 3"),
        ("forward", 3, (8, 9), lambda r, w: r % 3, "formulas hold for rows that are no multiples of 3"),
        ("forward", 3, (9, 12), both_whole(3, 3), f"{BOTH} multiples of 3"),
        ("forward", (4, 6), (8, 12), both_whole(4, 6), f"{BOTH} multiples of 4 and 6"),
        ("forward", (2, 5), (7, 11), lambda r, w: w % 5, f"{RAGGED_COLUMNS} 5"),
        pytest.param("training", 3, (7, 7), both_padded(3, 3), f"{BOTH} no multiples of 3", marks=SLOW),
        pytest.param("training", 3, (8, 8), both_padded(3, 3), f"{BOTH} no multiples of 3", marks=SLOW),
        pytest.param(
            "training", 3, (8, 9), lambda r, w: r % 3 and not w % 3, "columns that are multiples of 3", marks=SLOW
        ),
        pytest.param("training", 3, (9, 12), both_whole(3, 3), f"{BOTH} multiples of 3", marks=SLOW),
        pytest.param("training", (4, 6), (8, 12), both_whole(4, 6), f"{BOTH} multiples of 4 and 6", marks=SLOW),
        pytest.param("training", (2, 5), (7, 11), both_padded(2, 5), f"{BOTH} no multiples of 2 and 5", marks=SLOW),
    ],
)
def test_windows_are_counted_whole(step: str, window: Any, image: Any, domain: Callable[..., Any], note: str) -> None:
    layer = WindowAttention(12, 2, window)
    found = cost(layer, batch=2, image=image, step=step)
    assert any(note in each for each in found.notes), found.notes
    inside = [image for image in IMAGES if domain(*image)]
    assert len(inside) >= 2
    assert [image for image in inside if not holds(layer, found, image, step)] == []
    outside = [image for image in IMAGES if not domain(*image)]
    assert not all(holds(layer, found, image, step) for image in outside)  # so that the note is needed


def test_windows_that_are_smaller_at_the_edge_have_one_formula_for_every_grid() -> None:
    layer = WindowAttention(12, 2, 3, sees_padding=False)
    found = cost(layer, batch=2, image=(7, 8))
    assert found.notes == ()
    assert [image for image in IMAGES if not holds(layer, found, image)] == []


@pytest.mark.parametrize("image", [(16, 24), (17, 22)])
def test_patches_that_overlap_are_rounded_up(image: tuple[int, int]) -> None:
    layer = PatchEmbedding(3, 8, 7, 4, 3)
    found = cost(layer, batch=2, image=image)
    whole = image == (16, 24)
    assert found.notes == (("formulas hold for rows and columns that are multiples of 4",) if whole else ())
    for image in itertools.product((16, 17, 18, 19, 20), (21, 24, 28)):
        assert holds(layer, found, image) == (not whole or not (image[0] % 4 or image[1] % 4)), image


def test_patches_side_by_side_refuse_other_images_and_need_no_note() -> None:
    layer = PatchEmbedding(3, 8, 4)
    found = cost(layer, batch=2, image=(16, 24))
    assert found.notes == ()
    assert holds(layer, found, (20, 36))
    with pytest.raises(CostError, match="cannot be traced"):
        holds(layer, found, (17, 24))


@pytest.mark.parametrize("pattern", [Window(4, 0), Window(3, 2, step=2), Blocks(4), Strided(3)])
@pytest.mark.parametrize("tokens", [12, 13])
def test_patterns_say_for_which_lengths_their_formulas_hold(pattern: Any, tokens: int) -> None:
    layer = MultiHeadAttention(12, 3, attention=Attention(pattern=pattern))
    found = cost(layer, batch=2, tokens=tokens)
    wrong = [n for n in range(8, 32) if predicted(found, {"N": n}) != traced(layer, batch=2, tokens=n)]
    period = {Blocks(4): 4, Strided(3): 3}.get(pattern)
    if period is None:
        assert wrong == []
    else:
        assert any(f"N mod {period} = {tokens % period}" in note for note in found.notes)
        assert all(n % period != tokens % period for n in wrong)


def halved(tokens: int) -> Any:
    return Attention(pattern=Window(tokens // 2, 0))


class HalfOfTheText(torch.nn.Module):
    """A window that grows with the text: a formula of the window at one length holds at no other."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.attention.attention = halved(x.shape[1])
        return self.attention(x)


def test_a_window_that_depends_on_the_length_leaves_the_length_a_number() -> None:
    found = cost(HalfOfTheText(), inputs=(2, "N", 12), tokens=16)
    assert size_symbol("N") not in found.macs.formula.free_symbols
    assert any(note.startswith("tokens stays the number 16") for note in found.notes)


class PadsToEven(torch.nn.Module):
    """Odd lengths have a token more, so that no polynomial holds for all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.nn.functional.pad(x, (0, 0, 0, x.shape[1] % 2)))


@pytest.mark.parametrize("tokens", [13, 14])
def test_a_length_that_is_rounded_up_stays_a_number(tokens: int) -> None:
    found = cost(PadsToEven(), inputs=(2, "N", 6), tokens=tokens)
    assert found.macs == 2 * 14 * 36
    assert size_symbol("N") not in found.macs.formula.free_symbols
    assert any(note.startswith(f"tokens stays the number {tokens}") for note in found.notes)


# Sizes of the configuration


def gpt(V: int = 11, D: int = 12, L: int = 2, H: int = 3, F: int = 40) -> GPT:
    return GPT(GPTConfig(vocab_size=V, context_length=64, dim=D, layers=L, heads=H, hidden_dim=F))


def bert(V: int = 11, D: int = 12, L: int = 2, H: int = 3, F: int = 40) -> Bert:
    return Bert(BertConfig(vocab_size=V, context_length=64, dim=D, layers=L, heads=H, hidden_dim=F))


def block(D: int = 12, H: int = 3, F: int = 40) -> TransformerBlock:
    from regard.layers import FeedForward

    return TransformerBlock(MultiHeadAttention(D, H), FeedForward(D, F))


def hugging_face_bert(V: int = 11, D: int = 12, L: int = 2, H: int = 3, F: int = 40) -> Any:
    config = transformers().BertConfig(
        vocab_size=V, hidden_size=D, num_hidden_layers=L, num_attention_heads=H, intermediate_size=F
    )
    return transformers().BertModel(config)


def hugging_face_encoder(**sizes: int) -> Any:
    return transformers().BertModel(hugging_face_bert(**sizes).config, add_pooling_layer=False)


OTHERS: list[dict[str, int]] = [
    {"D": 20, "H": 5},
    {"D": 14, "H": 2, "F": 33},
    {"D": 8, "H": 2, "F": 64, "N": 6},
    {"D": 9, "H": 3, "N": 22},
    {"D": 16, "H": 4, "F": 41, "N": 17},
]


@pytest.mark.parametrize(
    "build",
    [gpt, block, hugging_face_encoder, *(pytest.param(e, marks=pytest.mark.slow) for e in (bert, hugging_face_bert))],
)
def test_sizes_of_the_configuration_hold_at_many_others(build: Callable[..., Any]) -> None:
    found = cost(build(), batch=2, tokens=13)
    deep = [{"L": 1}, {"L": 5, "V": 12}] if build is not block else []
    assert not any("stays the number" in note for note in found.notes), found.notes
    for others in [*OTHERS, *deep]:
        sizes = {name: size for name, size in others.items() if name != "N"}
        expected = traced(build(**sizes), batch=2, tokens=others.get("N", 13))
        assert predicted(found, others) == expected, others


@pytest.mark.slow
@pytest.mark.parametrize("image", [(64, 64), (70, 90)])
def test_widths_of_stages_hold_at_many_others(image: tuple[int, int]) -> None:
    found = cost(davit(), batch=2, image=image)
    assert {"D_1", "D_2", "A", "C"} <= {str(symbol) for symbol in found.macs.formula.free_symbols}
    for first, second in ((14, 18), (10, 40), (16, 30)):
        config = DaViTConfig(dims=(first, second), depths=(1, 1), heads=(2, 2), window=4, classes=7)
        expected = traced(DaViT(config), batch=2, image=image)
        assert predicted(found, {"D_1": first, "D_2": second, "A": 7}) == expected


def test_no_two_symbols_rise_in_proportion() -> None:
    """12, 13, 17, 19 are 6, 7, 11, 13 and six more: a formula in one would pass for a formula in the other."""
    sizes = {"B": 1, "D": 6, "F": 12, "O": 12, "V": 42, "S": 40}
    for start in (1, 2):
        runs = [sizes | {"B": start}, *SizeSpace(sizes).points(set(sizes), 3)]
        rises = [[run[name] - runs[0][name] for run in runs[1:3]] for name in sizes]
        for one, other in itertools.combinations(rises, 2):
            assert one[0] * other[1] != one[1] * other[0]


# Models of other libraries, and DaViT


def swin() -> Any:
    config = transformers().SwinConfig(
        image_size=64, patch_size=4, embed_dim=12, depths=[1, 2], num_heads=[2, 4], window_size=4
    )
    return transformers().SwinModel(config)


def timm_davit() -> Any:
    make = library("timm.models.davit").DaVit
    return make(depths=(1, 1), embed_dims=(12, 24), num_heads=(2, 2), num_classes=5, window_size=4)


def convnext() -> Any:
    return timm().models.ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 12, 12, 16), num_classes=5)


def davit() -> Any:
    return DaViT(DaViTConfig(dims=(12, 24), depths=(1, 1), heads=(2, 2), window=4, classes=5))


def whole(rows: int, columns: int) -> bool:
    return not (rows % 32 or columns % 32)


@pytest.mark.parametrize(
    ("build", "image", "domain"),
    [
        (swin, (64, 64), whole),
        (convnext, (70, 90), any_size),
        (timm_davit, (64, 96), whole),
        pytest.param(davit, (64, 64), whole, marks=pytest.mark.slow),
        pytest.param(convnext, (64, 96), whole, marks=pytest.mark.slow),
    ],
)
def test_images_of_many_sizes(build: Callable[[], Any], image: tuple[int, int], domain: Callable[..., bool]) -> None:
    model = build().eval()
    found = cost(model, batch=2, image=image)
    noted = "formulas hold for rows and columns that are multiples of 32" in found.notes
    assert noted == (domain is whole)
    images = [(64, 64), (128, 64), (96, 160), (160, 192), (65, 96), (70, 91), (80, 80), (112, 48)]
    assert [image for image in images if domain(*image) and not holds(model, found, image)] == []
    assert not noted or not all(holds(model, found, image) for image in images if not domain(*image))


@pytest.mark.slow
@pytest.mark.parametrize("build", [swin, timm_davit, davit])
def test_an_image_that_no_formula_holds_for_stays_numbers(build: Callable[[], Any]) -> None:
    model = build().eval()
    found = cost(model, batch=2, image=(70, 90))
    for name, size in (("rows", 70), ("columns", 90)):
        assert any(note.startswith(f"{name} stays the number {size}: ") for note in found.notes), found.notes
    assert not {"R", "W"} & {str(symbol) for symbol in found.macs.formula.free_symbols}
    assert predicted(found, {"B": 3}) == traced(model, batch=3, image=(70, 90))
