"""DaViT: against timm's, its sizes, its costs, its configurations and what it refuses."""

from __future__ import annotations

import json

import pytest
import torch
from agreement import refused
from plain import slow_but
from torch.utils.flop_counter import FlopCounterMode
from twins import timm

from regard.errors import CheckpointError, ConfigError, InputError
from regard.kernels import library
from regard.models import davit
from regard.models.converters.davit import ARCHITECTURES
from regard.models.davit import DaViT, DaViTBlock, DaViTConfig

SMALL = DaViTConfig(classes=5, dims=(6, 12, 21), heads=(2, 3, 7), depths=(1, 2, 1), window=3)
TIMM = DaViT.converters["timm"]


def twin_of(config: DaViTConfig, dtype: torch.dtype):
    """timm's model of the same sizes with random weights, and ours with the same."""
    timm()
    from timm.models.davit import DaVit

    arguments = TIMM.write_config(config).get("model_args", {})
    torch.manual_seed(0)
    twin = DaVit(num_classes=config.classes, **arguments).to(dtype)
    # Weights that matter: fresh norms are the identity and fresh biases nothing.
    state = {name: 0.3 * torch.randn_like(tensor) for name, tensor in twin.state_dict().items()}
    twin.load_state_dict(state)
    model = DaViT(config).to(dtype)
    model.load_state_dict(TIMM.read_state(state, config))
    return model.eval(), twin.eval()


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max().clamp(min=1e-30)).item()


# 37 and 50 are no multiples of 4, their grids none of 2 or of the window; 48 x 24 fits everything once.
@pytest.mark.parametrize(
    ("size", "batch"),
    [
        ((37, 50), 2),
        pytest.param((48, 24), 1, marks=pytest.mark.slow),
        pytest.param((7, 5), 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "config",
    [SMALL, DaViTConfig.from_dict(SMALL.to_dict() | {"merge": 3, "scale": "tokens", "qkv_bias": False})],
    ids=["published", "florence"],
)
def test_logits_and_gradients_are_those_of_timm(config, size, batch):
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        model, twin = twin_of(config, dtype)
        generator = torch.Generator().manual_seed(1)
        images = [torch.randn(batch, 3, *size, generator=generator).to(dtype).requires_grad_()]
        images.append(images[0].detach().clone().requires_grad_())
        outputs = [model(images[0]), twin(images[1])]
        assert distance(*outputs) < bound
        slope = torch.linspace(-1, 1, outputs[0].numel(), dtype=dtype).reshape(outputs[0].shape)
        for output in outputs:
            output.backward(slope)
        assert distance(images[0].grad, images[1].grad) < bound
        slopes = TIMM.write_state({name: p.grad for name, p in model.named_parameters()}, config)
        for name, parameter in twin.named_parameters():
            # The key bias does nothing, so that its gradient is rounding alone: it is held against the weights'.
            scale = max(
                parameter.grad.abs().max().item(), 1e-3 * max(p.grad.abs().max().item() for p in twin.parameters())
            )
            assert (slopes[name] - parameter.grad).abs().max().item() < bound * scale, name


def test_features_are_those_of_timm_and_the_pyramid_ends_with_them():
    model, twin = twin_of(SMALL, torch.float64)
    images = torch.randn(2, 3, 41, 29, dtype=torch.float64)
    features = model.features(images)
    assert distance(features.permute(0, 3, 1, 2), twin.forward_features(images)) < 1e-10
    pyramid = model.pyramid(images)
    assert [tuple(grid.shape[1:]) for grid in pyramid] == [(11, 8, 6), (6, 4, 12), (3, 2, 21)]
    assert torch.equal(pyramid[-1], features)


def test_a_wrong_role_would_be_seen():
    # Without the turn of query, key and value timm's weights make another model.
    model, twin = twin_of(SMALL, torch.float64)
    wrong = TIMM.read_state(twin.state_dict(), DaViTConfig.from_dict(SMALL.to_dict() | {"scale": "tokens"}))
    model.load_state_dict(wrong)
    images = torch.randn(1, 3, 40, 40, dtype=torch.float64)
    assert distance(model(images), twin(images)) > 1e-4


def test_names_go_to_timm_and_back_unchanged():
    model = DaViT(SMALL)
    state = model.state_dict()
    there = TIMM.write_state(state, SMALL)
    back = TIMM.read_state(there, SMALL)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())
    named = {name.replace(".1.attn", ".channel_block.attn"): tensor for name, tensor in there.items()}
    assert TIMM.read_state(named, SMALL).keys() == state.keys()


@pytest.mark.parametrize(
    "name", slow_but(("davit_tiny", "davit_base_fl"), [name for name in ARCHITECTURES if "giant" not in name])
)
def test_every_architecture_of_timm_is_listed(name):
    library_of_models = timm()
    with torch.device("meta"):
        twin = library_of_models.create_model(name, num_classes=7)
        config = TIMM.read_config({"architecture": name, "num_classes": 7})
        model = DaViT(config)
    expected = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    assert {key: tuple(t.shape) for key, t in TIMM.read_state(twin.state_dict(), config).items()} == expected
    again = TIMM.write_config(config)
    assert TIMM.matches(again)
    assert TIMM.read_config(json.loads(json.dumps(again))) == config


def test_a_folder_written_for_timm_is_read_by_timm_and_by_us(tmp_path):
    library_of_models = timm()
    from safetensors.torch import load_file

    torch.manual_seed(2)
    model = DaViT(SMALL).eval()
    model.save_pretrained(tmp_path, layout="timm")
    written = json.loads((tmp_path / "config.json").read_text())
    twin = library_of_models.create_model(
        written["architecture"], num_classes=written["num_classes"], **written["model_args"]
    ).eval()
    twin.load_state_dict(load_file(tmp_path / "model.safetensors"))
    images = torch.randn(1, 3, 30, 50)
    expected = model(images)
    assert distance(twin(images), expected) < 1e-4
    assert torch.equal(DaViT.from_pretrained(tmp_path)(images), expected)


def test_a_folder_of_ours_comes_back_the_same(tmp_path):
    model = DaViT(SMALL).eval()
    model.save_pretrained(tmp_path)
    images = torch.randn(1, 3, 30, 50)
    again = DaViT.from_pretrained(tmp_path)
    assert again.config == SMALL
    assert torch.equal(again(images), model(images))


@pytest.mark.parametrize("named", ["head.fc.weight", "stages.1.blocks.1.1.attn.qkv.weight"])
def test_a_misshapen_or_missing_tensor_is_named(named):
    model = DaViT(SMALL)
    config, state = model.to_checkpoint("timm")
    state = dict(state)
    tensor = state.pop(named)
    for given in (state, state | {named: tensor[:-1]}):
        with pytest.raises(CheckpointError) as caught:
            DaViT.from_checkpoint(config, given, "timm")
        ours = next(iter(TIMM.read_state({named: tensor}, SMALL)))
        assert ours in str(caught.value) or named in str(caught.value)


def test_what_timm_can_and_we_cannot_is_refused():
    with pytest.raises(ConfigError, match="cpe_act"):
        TIMM.read_config({"architecture": "davit_tiny", "model_args": {"cpe_act": True}})
    with pytest.raises(ConfigError, match="colour"):
        TIMM.read_config({"architecture": "davit_tiny", "model_args": {"colour": 1}})
    assert not TIMM.matches({"architecture": "vit_small_patch16_224"})


# Sizes and costs


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("tiny", 28_360_168), ("small", 49_745_896), ("base", 87_954_408), ("large", 196_811_752)],
)
def test_variants_have_as_many_parameters_as_published(name, parameters):
    with torch.device("meta"):
        model = DaViT(DaViTConfig.variant(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
@pytest.mark.parametrize(
    ("name", "size", "norms", "multiplications"),
    [
        ("tiny", 224, 3_688_704, 4_521_801_216),
        pytest.param("small", 224, 5_495_040, 8_773_012_992, marks=pytest.mark.slow),
        pytest.param("base", 224, 7_326_720, 15_473_797_120, marks=pytest.mark.slow),
        pytest.param("large", 384, 32_294_400, 102_805_204_992, marks=pytest.mark.slow),
    ],
)
def test_variants_execute_as_many_multiplications_as_published(name, size, norms, multiplications):
    with torch.device("meta"):
        model = DaViT(DaViTConfig.variant(name))
    model = model.to_empty(device="cpu").eval()  # without the time to draw weights; zeros multiply as well
    normed = []
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.register_forward_hook(lambda _, given, __: normed.append(given[0].numel()))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        for parameter in model.parameters():
            parameter.zero_()
        model(torch.zeros(1, 3, size, size))
    assert counter.get_total_flops() == 2 * multiplications
    assert sum(normed) == norms


def test_a_ragged_image_costs_the_padding_of_its_windows():
    # One stage, grid 5 x 4 padded to 6 x 6 for windows of 3: everything but window attention stays at 20 tokens.
    config = DaViTConfig(classes=0, dims=(8,), heads=(2,), depths=(1,), window=3)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        DaViT(config).eval()(torch.zeros(1, 3, 20, 16))
    tokens, padded, dim = 20, 36, 8
    windows = padded * (4 * dim**2 + 2 * 9 * dim)
    channels = tokens * (4 * dim**2 + 2 * 4 * dim)
    others = tokens * (147 * dim + 4 * 9 * dim + 2 * 8 * dim**2)
    if library.missing() is None:
        assert counter.get_total_flops() == 2 * (windows + channels + others)


# Behaviour


def test_depth_is_stochastic_in_training_only():
    torch.manual_seed(3)
    model = DaViT(DaViTConfig.from_dict(SMALL.to_dict() | {"drop_path": 0.5}))
    images = torch.randn(2, 3, 24, 36)
    rates = [module.drop_path for module in model.modules() if isinstance(module, DaViTBlock)]
    assert rates == pytest.approx([0, 0, 1 / 6, 1 / 6, 1 / 3, 1 / 3, 0.5, 0.5])
    assert not torch.equal(model(images), model(images))
    plain = DaViT(SMALL)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(images), model(images))
    assert torch.equal(model(images), plain.eval()(images))


def test_a_branch_is_left_out_for_whole_images_and_its_mean_stays():
    torch.manual_seed(4)
    model = DaViT(DaViTConfig.from_dict(SMALL.to_dict() | {"drop_path": 0.25}))
    block = [module for module in model.modules() if isinstance(module, DaViTBlock)][-1].train()
    factors = block._apply_drop_path(torch.ones(4000, 2, 3, 1)).flatten(1)
    assert torch.equal(factors, factors[:, :1].expand_as(factors))
    assert factors.unique().tolist() == pytest.approx([0, 4 / 3])
    # 4000 coins of 1/4: the mean is known to sqrt(1/4 * 3/4 / 4000) * 4/3 = 0.009; five times that is certain.
    assert factors.mean().item() == pytest.approx(1, abs=0.046)


def test_training_without_memory_of_an_earlier_call_and_with_frozen_parts():
    model = DaViT(SMALL).requires_grad_(False)
    images = torch.randn(1, 3, 24, 36, requires_grad=True)
    (slope,) = torch.autograd.grad(model(images).sum(), images)
    again = DaViT(SMALL)
    again.load_state_dict(model.state_dict())
    (expected,) = torch.autograd.grad(again(images).sum(), images)
    torch.testing.assert_close(slope, expected)


def test_evaluation_with_and_without_gradients_gives_the_same_numbers():
    model = DaViT(SMALL).double().eval()
    images = torch.randn(2, 3, 37, 50, dtype=torch.float64)
    given = images.clone()
    with torch.no_grad():
        quick = model(images)
    assert torch.equal(images, given)
    torch.testing.assert_close(quick, model(images), rtol=1e-12, atol=1e-12)
    with torch.inference_mode():
        torch.testing.assert_close(model(images), quick, rtol=1e-12, atol=1e-12)


def test_a_batch_in_pieces_gives_the_same_numbers_and_slopes(monkeypatch):
    torch.manual_seed(5)
    model = DaViT(SMALL).double()
    images = torch.randn(3, 3, 37, 50, dtype=torch.float64)
    results = []
    for piece in (1, 2 * 13 * 10 * 6 * 8 * 4, 1 << 40):  # one image at a time, two in the first stage, all at once
        monkeypatch.setattr(davit, "PIECE", piece)
        calls = []
        block = model.stages[0].blocks[0]
        hook = block.register_forward_hook(lambda _, given, __, calls=calls: calls.append(len(given[0])))
        output = model(images)
        hook.remove()
        results.append((calls, output, *torch.autograd.grad(output.square().sum(), tuple(model.parameters()))))
    assert [calls for calls, *_ in results] == [[1, 1, 1], [2, 1], [3]]
    for _, *tensors in results[:2]:
        for one, other in zip(tensors, results[2][1:], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_no_images_give_no_logits():
    assert DaViT(SMALL)(torch.zeros(0, 3, 24, 36)).shape == (0, 5)


@pytest.mark.parametrize(
    "images",
    [torch.zeros(3, 32, 32), torch.zeros(1, 1, 32, 32), torch.zeros(1, 3, 0, 32), torch.zeros(1, 3, 9, 9).byte()],
)
def test_a_wrong_image_is_refused_in_four_parts(images):
    with pytest.raises(InputError) as caught:
        DaViT(SMALL)(images)
    error = caught.value
    assert all((error.asked, error.found, error.because, error.instead))


@pytest.mark.parametrize(
    ("change", "because"),
    [
        ({"heads": (2, 3)}, "every stage"),
        ({"heads": (2, 5, 7)}, "evenly"),
        ({"merge": 4}, "merge is 2 or 3"),
        ({"drop_path": 1.0}, "probability"),
        ({"window": 0}, "positive"),
        ({"windows": 7}, "its fields are"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(change, because):
    with pytest.raises(ConfigError, match=because):
        DaViTConfig.from_dict(SMALL.to_dict() | change)


def test_an_unknown_variant_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="tiny, small, base"):
        DaViTConfig.variant("micro")


@pytest.mark.parametrize("size", [(8, 12), (9, 13)])
def test_an_image_of_another_precision_is_refused(size):
    with refused(InputError, "different precisions", "float64", "float32"):
        DaViT(SMALL)(torch.zeros(1, 3, *size, dtype=torch.float64))
