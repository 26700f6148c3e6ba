"""ViT is that of transformers and of timm, number for number, and of the size and cost that was published."""

from __future__ import annotations

import pytest
import torch
from agreement import assert_agree, assert_gradients_agree, gradients, refused, shaken
from torch.nn.functional import linear, unfold
from torch.utils.flop_counter import FlopCounterMode
from twins import timm, transformers

from regard.errors import CheckpointError, ConfigError, InputError
from regard.models import ViT, ViTConfig

DTYPES = [torch.float64, torch.float32]
SIZES = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}
ARGUMENTS = {"img_size": (8, 12), "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3, "mlp_ratio": 20 / 12}


def hugging(dtype: torch.dtype = torch.float64, kind: str = "ViTForImageClassification", **changes):
    config = transformers().ViTConfig(**SIZES, **({"image_size": [8, 12], "patch_size": 4, "num_labels": 5} | changes))
    return shaken(getattr(transformers(), kind)(config), dtype)


def of_hugging(twin, **changes) -> ViT:
    return ViT.from_checkpoint(twin.config.to_dict() | changes, twin.state_dict(), "huggingface")


def timms(dtype: torch.dtype = torch.float64, **changes):
    build = timm().models.vision_transformer.VisionTransformer
    return shaken(build(num_classes=5, **ARGUMENTS, **changes), dtype)


def of_timm(twin, **changes) -> ViT:
    config = {"architecture": "vit_base_patch16_224", "num_classes": 5, "model_args": ARGUMENTS | changes}
    return ViT.from_checkpoint(config, twin.state_dict(), "timm")


def images(dtype: torch.dtype = torch.float64, rows: int = 8, columns: int = 12, channels: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, channels, rows, columns, generator=generator, dtype=torch.float64).to(dtype)


def read(logits: torch.Tensor) -> torch.Tensor:
    return (logits * torch.arange(1, logits.numel() + 1).view_as(logits).cos()).sum()


# Twins


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_and_gradients_are_those_of_transformers(dtype):
    twin = hugging(dtype)
    model = of_hugging(twin)
    mine, theirs = model(images(dtype)), twin(images(dtype)).logits
    assert_agree(mine, theirs)
    read(mine).backward()
    read(theirs).backward()
    found = ViT.converters["huggingface"].read_state(gradients(twin), model.config)
    assert_gradients_agree(model, found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_and_gradients_are_those_of_timm(dtype):
    twin = timms(dtype)
    model = of_timm(twin)
    mine, theirs = model(images(dtype)), twin(images(dtype))
    assert_agree(mine, theirs)
    read(mine).backward()
    read(theirs).backward()
    found = ViT.converters["timm"].read_state(gradients(twin), model.config)
    assert_gradients_agree(model, found)


@pytest.mark.parametrize("changes", [{"qkv_bias": False}, {"hidden_act": "gelu_new"}, {"num_channels": 1}], ids=str)
def test_other_choices_of_transformers(changes):
    twin = hugging(**changes)
    image = images(channels=changes.get("num_channels", 3))
    with torch.no_grad():
        assert_agree(of_hugging(twin)(image), twin(image).logits)


def test_without_biases_of_queries_keys_and_values_as_timm_has_it():
    twin = timms(qkv_bias=False)
    with torch.no_grad():
        assert_agree(of_timm(twin, qkv_bias=False)(images()), twin(images()))


def test_an_image_of_one_patch():
    twin = hugging(image_size=4)
    with torch.no_grad():
        assert_agree(of_hugging(twin)(images(rows=4, columns=4)), twin(images(rows=4, columns=4)).logits)


def test_tokens_of_a_model_without_a_head_are_those_of_transformers():
    twin = hugging(kind="ViTModel")
    model = of_hugging(twin, architectures=["ViTModel"])
    assert model.head is None
    with torch.no_grad():
        expected = twin(images()).last_hidden_state
        assert_agree(model.tokens(images()), expected)
        assert_agree(model(images()), expected[:, 0])


# What was published


def test_patches_are_flattened_and_projected():
    model = of_hugging(hugging())
    patches = unfold(images(), 4, stride=4).mT  # (batch, patch, channel * pixel), row by row
    with torch.no_grad():
        expected = linear(patches, model.patches.weight.flatten(1), model.patches.bias)
        assert_agree(model.patches(images()).flatten(1, 2), expected, 1e-14)


def test_large_patches_are_flattened_and_projected_too():
    model = shaken(ViT(ViTConfig(image=(32, 48), patch=16, dim=12, layers=1, heads=3, classes=5)))
    patches = unfold(images(rows=32, columns=48), 16, stride=16).mT
    with torch.no_grad():
        expected = linear(patches, model.patches.weight.flatten(1), model.patches.bias)
        assert_agree(model.patches(images(rows=32, columns=48)).flatten(1, 2), expected, 1e-13)


@pytest.mark.parametrize(("name", "expected"), [("Ti/16", 1.2537), ("S/16", 4.5989), ("B/16", 17.563828224)])
def test_multiplications_are_as_many_as_published(name, expected):
    with torch.device("meta"):
        model = ViT(ViTConfig.vit(name))
    model = model.to_empty(device="cpu")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        for parameter in model.parameters():
            parameter.zero_()  # drawing 86 million numbers takes longer than multiplying them
        model(torch.zeros(1, 3, 224, 224))
    found = counter.get_total_flops() / 2
    assert found == 17_563_828_224 if name == "B/16" else round(found / 1e9, 4) == expected


# Other sizes of images


def test_interpolated_positions_are_timms():
    # timm interpolates in float32, whatever the model's dtype
    twin = timms(torch.float32, dynamic_img_size=True)
    model = of_timm(twin)
    image = images(torch.float32, rows=16, columns=20)
    with torch.no_grad():
        assert_agree(model(image, resize=True), twin(image))


def test_the_learned_size_is_not_interpolated():
    model = of_hugging(hugging())
    with torch.no_grad():
        assert torch.equal(model(images(), resize=True), model(images()))
        assert torch.equal(model.positions((2, 3)), model.positions.weight)


def test_positions_learn_through_the_interpolation():
    model = of_hugging(hugging())
    read(model(images(rows=12, columns=8), resize=True)).backward()
    assert model.positions.weight.grad is not None
    assert bool((model.positions.weight.grad != 0).any(-1).all())


# Folders


def test_from_transformers_and_back_changes_no_bit():
    twin = hugging()
    model = of_hugging(twin)
    config, state = model.to_checkpoint("huggingface")
    again = ViT.from_checkpoint(config, state, "huggingface")
    assert again.config == model.config
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    theirs = twin.config.to_dict() | {"architectures": ["ViTForImageClassification"]}
    assert {name: theirs[name] for name in config if "label" not in name} == {
        name: value for name, value in config.items() if "label" not in name
    }


@pytest.mark.parametrize("kind", ["ViTForImageClassification", "ViTModel"])
def test_transformers_reads_what_we_write_and_we_read_what_it_writes(kind, tmp_path):
    twin = hugging(kind=kind)
    model = of_hugging(twin, architectures=[kind])
    model.save_pretrained(tmp_path / "ours", layout="huggingface")
    back = getattr(transformers(), kind).from_pretrained(tmp_path / "ours", dtype=torch.float64).eval()
    for (name, mine), (_, theirs) in zip(back.named_parameters(), twin.named_parameters(), strict=True):
        assert name.startswith("pooler.") or torch.equal(mine, theirs), name
    with torch.no_grad():
        assert_agree(back(images())[0], twin(images())[0], 1e-14)
    twin.save_pretrained(tmp_path / "theirs")
    again = ViT.from_pretrained(tmp_path / "theirs")
    assert again.config == model.config
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_names_of_old_versions_of_transformers_are_read():
    model = of_hugging(hugging())
    config, state = model.to_checkpoint("huggingface")
    old = {name.replace("vit.layers.", "vit.encoder.layer."): tensor for name, tensor in state.items()}
    assert "vit.encoder.layer.1.attention.attention.query.weight" in old
    again = ViT.from_checkpoint(config, old, "huggingface")
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_from_timm_and_back_changes_no_bit_and_no_name(tmp_path):
    twin = timms()
    model = of_timm(twin)
    config, state = model.to_checkpoint("timm")
    assert set(state) == set(twin.state_dict())
    assert all(torch.equal(state[name], tensor) for name, tensor in twin.state_dict().items())
    model.save_pretrained(tmp_path, layout="timm")
    again = ViT.from_pretrained(tmp_path)
    assert again.config == model.config
    with torch.no_grad():
        assert_agree(again(images()), twin(images()))
    rebuilt = timm().create_model(config["architecture"], **config["model_args"]).double()
    rebuilt.load_state_dict(state)
    with torch.no_grad():
        assert_agree(rebuilt.eval()(images()), twin(images()), 1e-14)


# of the first three, dim * (hidden / dim) is a little less than hidden
@pytest.mark.parametrize(("hidden", "dim"), [(52, 45), (185, 46), (201, 50), (53, 6), (11, 93)])
def test_the_ratio_for_timm_gives_back_the_size(hidden, dim):
    converter = ViT.converters["timm"]
    config = ViTConfig(dim=dim, heads=1, layers=1, hidden_dim=hidden)
    assert converter.read_config(converter.write_config(config)) == config


def test_our_own_folder_keeps_everything(tmp_path):
    model = of_timm(timms())
    model.save_pretrained(tmp_path)
    again = ViT.from_pretrained(tmp_path)
    assert again.config == model.config
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("layout", ["huggingface", "timm"])
def test_a_model_that_the_other_library_does_not_have_is_not_written(layout):
    model = ViT(ViTConfig(image=(8, 12), patch=4, dim=12, layers=1, heads=3, classes=5, pool="mean"))
    with refused(CheckpointError, "mean"):
        model.to_checkpoint(layout)


def test_the_mean_of_the_patches_leaves_the_class_token_out():
    model = shaken(ViT(ViTConfig(image=(8, 12), patch=4, dim=12, layers=1, heads=3, classes=5, pool="mean")))
    with torch.no_grad():
        expected = model.head(model.tokens(images())[:, 1:].mean(1))
        assert torch.equal(model(images()), expected)


# Bad input


def test_input_that_cannot_be_is_refused_in_four_parts():
    model = ViT(ViTConfig(image=(8, 12), patch=4, dim=12, layers=1, heads=3, classes=5))
    with refused(InputError, "another size", "(1, 3, 12, 8)", "8 x 12", "resize=True"):
        model(torch.zeros(1, 3, 12, 8))
    with refused(InputError, "whole number of patches"):
        model(torch.zeros(1, 3, 8, 13), resize=True)
    with refused(InputError, "3 channels"):
        model(torch.zeros(1, 1, 8, 12))
    with refused(InputError, "(3, 8, 12)"):
        model(torch.zeros(3, 8, 12))
    with refused(InputError, "uint8"):
        model(torch.zeros(1, 3, 8, 12, dtype=torch.uint8))
    with refused(InputError, "different precisions"):
        model(torch.zeros(1, 3, 8, 12, dtype=torch.float64))
    with refused(ConfigError, "has no field 'patches'"):
        ViTConfig.from_dict({"patches": 4})
    with refused(ConfigError, "not made of patches"):
        ViTConfig(image=(8, 13), patch=4)
    with refused(ConfigError, "no ViT called 'XL/16'"):
        ViTConfig.vit("XL/16")
    with refused(ConfigError, "patch=0"):
        ViTConfig(patch=0)
    with refused(ConfigError, "classes"):
        ViTConfig(classes=-1)


def test_what_would_change_the_numbers_is_refused():
    twin = timms()
    with refused(ConfigError, "global_pool"):
        of_timm(twin, global_pool="avg")
    with refused(ConfigError, "class_token"):
        of_timm(twin, class_token=False)
    with refused(ConfigError, "deit"):
        ViT.from_checkpoint({"architecture": "vit_deit_x"}, twin.state_dict(), "timm")
    with refused(ConfigError, "hidden_act"):
        of_hugging(hugging(), hidden_act="tanh")
