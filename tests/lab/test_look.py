"""Inputs, thumbnails, tiles, rows and rollout over HTTP, against the models' own weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lab_client import decode
from torch import Tensor


def ask_row(client: Any, input: str, **fields: Any) -> Tensor:
    given = {"attention": "self", "layer": 0, "head": 0, "weighting": "weights", "side": "query", **fields}
    return decode(client.post("row", input=input, **given)["row"])


def eager(model: Any, **inputs: Any) -> Any:
    """The outputs of a Hugging Face model with the attentions that it computes itself."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return model(**inputs, output_attentions=True)
    finally:
        model.set_attn_implementation(before)


def test_every_source_is_listed_and_loads_when_it_is_opened(client):
    listed = {entry["id"]: entry for entry in client.send("GET", "/api/models").content["models"]}
    assert {"gpt", "bert", "bart", "timm", "vit", "davit"} <= set(listed)
    opened = client.post("open", model="bert")
    assert opened["kind"] == "encoder"
    assert opened["attentions"] == [{"name": "self", "heads": [3, 3]}]
    assert {"mlm", "weighted", "output_weighted", "switch_off", "check", "cost"} <= set(opened["abilities"])
    assert opened["max_tokens"] == 61
    again = {entry["id"]: entry for entry in client.send("GET", "/api/models").content["models"]}
    assert again["bert"]["loaded"]
    assert again["bert"]["kind"] == "encoder"


@pytest.mark.parametrize(
    ("model", "kind"),
    [("gpt", "decoder"), ("llama", "decoder"), ("bart", "translation"), ("ours", "translation"), ("timm", "image"),
     ("vit", "image"), ("davit", "image"), ("torch", "encoder")],
)  # fmt: skip
def test_the_kind_of_a_model_follows_from_the_model(client, model, kind):
    assert client.post("open", model=model)["kind"] == kind


def test_rows_of_an_encoder_are_those_that_hugging_face_computes(client, models):
    given = client.post("input", model="bert", text="the cat sat on the mat .")
    assert given["attentions"]["self"]["queries"] == ["[CLS]", "the", "cat", "sat", "on", "the", "mat", ".", "[SEP]"]
    tokens = torch.tensor([models["bert"].tokenizer.encode("the cat sat on the mat .").ids])
    expected = eager(models["bert"].module, input_ids=tokens).attentions
    for layer in range(2):
        for head in range(3):
            for token in (0, 4, 8):
                row = ask_row(client, given["input"], layer=layer, head=head, token=token)
                torch.testing.assert_close(row, expected[layer][0, head, token], atol=1e-6, rtol=1e-5)
                column = ask_row(client, given["input"], layer=layer, head=head, token=token, side="key")
                torch.testing.assert_close(column, expected[layer][0, head, :, token], atol=1e-6, rtol=1e-5)


def test_rows_with_shared_key_heads_are_those_that_hugging_face_computes(client, models):
    given = client.post("input", model="llama", text="5 3 8 60 2 5 3")
    assert given["attentions"]["self"]["causal"]
    expected = eager(models["llama"].module, input_ids=torch.tensor([[5, 3, 8, 60, 2, 5, 3]])).attentions
    for head in range(6):
        row = ask_row(client, given["input"], layer=1, head=head, token=4)
        torch.testing.assert_close(row, expected[1][0, head, 4], atol=1e-6, rtol=1e-5)
        column = ask_row(client, given["input"], layer=1, head=head, token=2, side="key")
        torch.testing.assert_close(column, expected[1][0, head, :, 2], atol=1e-6, rtol=1e-5)


def test_both_sides_of_a_translation_and_the_attention_between_them(client, models):
    opened = client.post("open", model="bart")
    assert {each["name"]: each["heads"] for each in opened["attentions"]} == {
        "encoder": [2, 2],
        "decoder": [4, 4, 4],
        "cross": [4, 4, 4],
    }
    given = client.post("input", model="bart", source="the cat sat on the mat", target="a dog ran")
    cross = given["attentions"]["cross"]
    assert cross["keys"] == given["attentions"]["encoder"]["keys"]
    assert cross["queries"] == given["attentions"]["decoder"]["queries"]
    words = models["bart"].tokenizer
    source = torch.tensor([words.encode("the cat sat on the mat").ids])
    target = torch.tensor([[3, *words.encode("a dog ran").ids[:-1]]])
    assert len(cross["queries"]) == target.shape[1]
    found = eager(models["bart"].module, input_ids=source, decoder_input_ids=target)
    every = {"encoder": found.encoder_attentions, "decoder": found.decoder_attentions, "cross": found.cross_attentions}
    for name, expected in every.items():
        for layer, weights in enumerate(expected):
            row = ask_row(client, given["input"], attention=name, layer=layer, head=1, token=2)
            torch.testing.assert_close(row, weights[0, 1, 2], atol=1e-6, rtol=1e-5)


def test_our_own_translation_model_has_the_same_three_attentions(client, models):
    given = client.post("input", model="ours", source="5 3 8 9 2", target="4 6")
    model = models["ours"].module
    context = model.encode(torch.tensor([[5, 3, 8, 9, 2]]))
    row = ask_row(client, given["input"], attention="cross", layer=0, head=2, token=1)
    assert row.shape == (5,)
    with torch.no_grad():
        target = torch.tensor([[model.config.start, 4, 6]])
        y = model._embed_tokens(target, model.target_embedding, model.target_positions, torch.arange(3))
        block = model.decoder[0]
        normed = y if block.order == "post" else block.attention_norm(y)
        y = y + block.attention(normed)
        y = block.attention_norm(y) if block.order == "post" else y
        query = y if block.order == "post" else block.cross_norm(y)
        expected = block.cross.weights(query, context)[0, 2, 1]
    torch.testing.assert_close(row, expected, atol=1e-6, rtol=1e-5)


def test_a_long_input_is_served_in_tiles_that_agree_with_its_rows(client, models):
    count = 1511
    text = " ".join(str((7 * place) % 67) for place in range(count))
    given = client.post("input", model="gpt", text=text)
    given_ids = torch.tensor([[(7 * place) % 67 for place in range(count)]])
    model = models["gpt"].module
    seen = {}
    hook = model.blocks[1].attention.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(x=args[0], rotation=kwargs["rotation"]), with_kwargs=True
    )
    with torch.no_grad():
        model(given_ids, last_only=True)
    hook.remove()
    with torch.no_grad():
        expected = model.blocks[1].attention.weights(seen["x"], rotation=seen["rotation"])[0, 4]
    fields = {"input": given["input"], "attention": "self", "layer": 1, "head": 4, "weighting": "weights"}
    exact = client.post("tile", **fields, rows=[1100, 1180], columns=[1000, 1117], size=128)
    assert exact["exact"]
    torch.testing.assert_close(decode(exact["tile"]), expected[1100:1180, 1000:1117], atol=1e-6, rtol=1e-4)
    whole = client.post("tile", **fields, rows=[0, count], columns=[0, count], size=64)
    assert not whole["exact"]
    pooled = decode(whole["tile"])
    cell = -(-count // 64)
    assert pooled.shape == (-(-count // cell),) * 2
    for row, column in ((0, 0), (11, 3), (62, 62), (3, 40)):
        part = expected[row * cell : (row + 1) * cell, column * cell : (column + 1) * cell]
        assert pooled[row, column] == pytest.approx(float(part.mean()), rel=1e-4, abs=1e-8)
    assert whole["max"] == pytest.approx(float(expected.max()), rel=1e-5)
    above = client.post("tile", **fields, rows=[0, 100], columns=[700, 800], size=128)
    assert not decode(above["tile"]).any()  # later keys of a causal model


@pytest.mark.parametrize("model", ["bert", "gpt", "timm", "torch"])
def test_value_and_output_weightings_multiply_by_the_lengths_of_what_is_added(client, models, model):
    module = models[model].module if model in models else None
    if model == "timm":
        given = upload_image(client, model, (24, 32), 3)
    else:
        given = client.post("input", model=model, text={"bert": "the cat ran"}.get(model, "1 2 3 4 5"))
    module = models[model].module
    plain, value, output = (
        ask_row(client, given["input"], layer=0, head=1, token=2, weighting=name)
        for name in ("weights", "value", "output")
    )
    parts = observe_parts(module, model, given)
    head_value, matrix = parts
    torch.testing.assert_close(value, plain * head_value.norm(dim=-1), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(output, plain * (head_value @ matrix.T).norm(dim=-1), atol=1e-6, rtol=1e-4)


def observe_parts(module: Any, model: str, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Values of head 1 of the first layer, and its columns of the output matrix, from the weights of the model."""
    seen: dict[str, Tensor] = {}
    layer = {
        "bert": lambda: module.bert.encoder.layer[0].attention.self,
        "gpt": lambda: module.blocks[0].attention,
        "timm": lambda: module.blocks[0].attn,
        "torch": lambda: module.attention,
    }[model]()
    hook = layer.register_forward_pre_hook(
        lambda m, args, kwargs: seen.update(x=args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    with torch.no_grad():
        if model == "timm":
            module(torch.linspace(0, 1, 24 * 32).reshape(1, 1, 24, 32).mul(255).round().div(255).expand(1, 3, 24, 32))
        else:
            ids = [2, 5, 6, 13, 3] if model == "bert" else [1, 2, 3, 4, 5]
            module(torch.tensor([ids]))
    hook.remove()
    x = seen["x"][0]
    with torch.no_grad():
        if model == "bert":
            return layer.value(x)[:, 8:16], module.bert.encoder.layer[0].attention.output.dense.weight[:, 8:16]
        if model == "timm":
            return layer.qkv(x)[:, 48 + 8 : 48 + 16], layer.proj.weight[:, 8:16]
        if model == "torch":
            whole = torch.nn.functional.linear(x, layer.in_proj_weight, layer.in_proj_bias)
            return whole[:, 16 + 4 : 16 + 8], layer.out_proj.weight[:, 4:8]
        value = layer.projections(x[None])[2][0, 0]  # heads 0, 1 and 2 share the first
        return value, layer.output.weight[:, 4:8]


def test_head_contributions_are_sums_of_what_the_output_weighting_measures(client, models):
    """The vectors whose lengths are drawn sum to `head_contributions`, the summands of the layer's output."""
    from regard.lab.inputs import LabInput
    from regard.lab.opened import OpenedModel
    from regard.lab.sources import Source

    client.post("open", model="vit")
    module = models["vit"].module
    image = torch.rand(1, 1, 12, 20)
    opened = OpenedModel("vit", Source("vit", "", lambda: models["vit"]), models["vit"])
    layer = opened.record(LabInput("", "vit", (image,)), lambda: None, None)["self"][0]
    seen = {}
    attention = module.blocks[0].attention
    hook = attention.register_forward_pre_hook(lambda m, args: seen.update(x=args[0]))
    with torch.no_grad():
        module(image)
    hook.remove()
    with torch.no_grad():
        expected = attention.head_contributions(seen["x"])[:, 0]
        for head in range(3):
            value = layer.value[head] @ layer.output[:, head * 4 : head * 4 + 4].T
            torch.testing.assert_close(layer.rows(range(layer.queries), head)[0] @ value, expected[head])
            torch.testing.assert_close(layer.key_factors(head, "output"), value.norm(dim=-1))


def test_rollout_is_the_product_of_the_mean_matrices(client, models):
    given = client.post("input", model="bert", text="the cat sat on the mat")
    ids = torch.tensor([models["bert"].tokenizer.encode("the cat sat on the mat").ids])
    attentions = eager(models["bert"].module, input_ids=ids).attentions
    product = torch.eye(8)
    for weights in attentions:
        product = (0.5 * torch.eye(8) + 0.5 * weights[0].mean(0)) @ product
    for token in (0, 5):
        row = decode(client.post("rollout", input=given["input"], attention="self", token=token)["row"])
        torch.testing.assert_close(row, product[token], atol=1e-6, rtol=1e-5)
        assert float(row.sum()) == pytest.approx(1, abs=1e-5)


def test_rollout_between_two_sequences_is_refused(client):
    given = client.post("input", model="bart", source="the cat sat", target="a dog")
    status, error = client.refuse("rollout", input=given["input"], attention="cross", token=0)
    assert status == 400
    assert "to itself" in error["title"]


def test_the_overview_has_a_thumbnail_and_numbers_for_every_head(client, models):
    text = "the cat sat on the mat . the dog sat"
    given = client.post("input", model="bert", text=text)
    ids = models["bert"].tokenizer.encode(text).ids
    weights = eager(models["bert"].module, input_ids=torch.tensor([ids])).attentions
    count = len(ids)
    layers = client.post("overview", input=given["input"], attention="self")["layers"]
    assert [[head["head"] for head in layer] for layer in layers] == [[0, 1, 2], [0, 1, 2]]
    place = torch.arange(count)
    same = (torch.tensor(ids)[:, None] == torch.tensor(ids)) & (place[:, None] != place)
    for layer, found in enumerate(layers):
        for head in range(3):
            square = weights[layer][0, head]
            numbers = found[head]["numbers"]
            expected = {
                "entropy": -(square * square.log()).sum(-1).mean(),
                "distance": (square * (place[:, None] - place).abs()).sum(-1).mean(),
                "self": square.diagonal().mean(),
                "previous": square.diagonal(-1).mean(),
                "next": square.diagonal(1).mean(),
                "first": square[:, 0].mean(),
                "delimiter": square[:, [0, 7, count - 1]].sum(-1).mean(),
                "same_word": (square * same).sum() / same.any(1).sum(),
            }
            assert set(numbers) == set(expected)
            for name, value in expected.items():
                assert numbers[name] == pytest.approx(float(value), rel=1e-4, abs=1e-6), name
            thumbnail = decode(found[head]["thumbnail"])
            torch.testing.assert_close(thumbnail, (255 * square / square.max()).round().to(torch.uint8), atol=1, rtol=0)


def test_the_overview_of_a_long_input_pools_and_sends_each_layer_as_it_is_ready(client):
    given = client.post("input", model="gpt", text=" ".join(str(place % 61) for place in range(1031)))
    body = f'{{"input": "{given["input"]}", "attention": "self"}}'.encode()
    lines = client.send("POST", "/api/overview", body).content
    sent = [line for line in lines if "heads" in line]
    assert [line["layer"] for line in sent] == [0, 1]
    assert sent[1]["heads"] == lines[-1]["result"]["layers"][1]
    assert all(max(head["thumbnail"]["shape"]) <= 32 for head in sent[0]["heads"])
    numbers = sent[0]["heads"][0]["numbers"]
    assert numbers["next"] == 0
    assert 0 < numbers["previous"] < 1


def upload_image(client: Any, model: str, size: tuple[int, int], channels: int) -> dict[str, Any]:
    """A ramp of gray of the size that the model reads, as a PNG."""
    from regard.render.png import encode_png

    ramp = torch.linspace(0, 1, size[0] * size[1]).reshape(*size, 1).expand(*size, 3)
    reply = client.upload(model, encode_png(ramp))
    assert reply.status == 200, reply.content
    return reply.content


def test_an_image_has_a_grid_and_a_class_token(client, models):
    given = upload_image(client, "timm", (24, 32), 3)
    side = given["attentions"]["self"]
    assert side["grid"] == [3, 4]
    assert side["start"] == 1
    assert side["keys"][0] == "class token"
    assert side["keys"][6] == "row 1, column 1"
    assert given["image"].startswith("data:image/png;base64,")
    module = models["timm"].module
    seen = {}
    hook = module.blocks[1].attn.register_forward_pre_hook(lambda m, args: seen.update(x=args[0]))
    image = torch.linspace(0, 1, 24 * 32).reshape(1, 1, 24, 32).mul(255).round().div(255).expand(1, 3, 24, 32)
    with torch.no_grad():
        module(image)
        layer = module.blocks[1].attn
        query, key, _ = layer.qkv(seen["x"]).reshape(1, 13, 3, 3, 8).permute(2, 0, 3, 1, 4)
        expected = (query @ key.transpose(-1, -2) / 8**0.5).softmax(-1)[0]
    hook.remove()
    for head in range(3):
        row = ask_row(client, given["input"], layer=1, head=head, token=5)
        torch.testing.assert_close(row, expected[head, 5], atol=1e-6, rtol=1e-4)
    numbers = client.post("overview", input=given["input"], attention="self")["layers"][1][0]["numbers"]
    row, column = torch.arange(12) // 4, torch.arange(12) % 4
    distance = ((row[:, None] - row) ** 2 + (column[:, None] - column) ** 2).sqrt()
    patches = expected[0, 1:, 1:]
    assert numbers["distance"] == pytest.approx(float((patches * distance).sum() / patches.sum()), rel=1e-4)
    assert "same_word" not in numbers


def test_a_model_with_several_grids_has_an_attention_for_each(client):
    given = upload_image(client, "davit", (224, 224), 3)
    names = [each["name"] for each in client.post("open", model="davit")["attentions"]]
    assert names == list(given["attentions"])
    assert given["attentions"]["56x56"]["grid"] == [56, 56]
    row = ask_row(client, given["input"], attention="56x56", layer=0, head=1, token=57)
    seen = row.reshape(56, 56).nonzero()
    assert seen.max() <= 2  # the window of three rows and columns
    assert float(row.sum()) == pytest.approx(1, abs=1e-5)


def test_an_image_of_another_size_is_resized_and_one_that_is_damaged_refused(client):
    upload_image(client, "vit", (300, 500), 1)
    for content in (b"", b"GIF89a", b"\x89PNG\r\n\x1a\n" + bytes(100)):
        reply = client.upload("vit", content)
        assert reply.status == 400
        assert reply.content["error"]["title"] == "The image cannot be read."


def test_a_decompression_bomb_is_refused_before_it_is_decoded(client):
    import struct
    import zlib

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    for side in (8_000, 60_000):
        header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
        packed = zlib.compress(bytes(1000))
        bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
        reply = client.upload("vit", bomb)
        assert reply.status in (400, 413)
        assert "error" in reply.content


def test_a_text_longer_than_the_model_is_cut_and_says_so(client):
    given = client.post("input", model="bert", text="cat " * 100)
    assert len(given["attentions"]["self"]["queries"]) == 61
    assert "102 tokens" in given["cut"]


def test_the_same_input_has_the_same_id_and_another_another(client):
    first, again, other = (client.post("input", model="gpt", text=text)["input"] for text in ("1 2", "1 2", "1 3"))
    assert first == again != other
    assert client.post("input", model="llama", text="1 2")["input"] != first


@pytest.mark.parametrize(
    "fields",
    [{"token": 99}, {"token": -1}, {"token": "2"}, {"token": True}, {"layer": 7}, {"head": 3}, {"head": 0.5},
     {"attention": "cross"}, {"weighting": "sum"}, {"side": 3}, {"token": None}, {"layer": 10**30}],
)  # fmt: skip
def test_a_row_that_does_not_exist_is_refused(client, fields):
    given = client.post("input", model="bert", text="the cat")
    whole = {"input": given["input"], "attention": "self", "layer": 0, "head": 0, "token": 0, **fields}
    status, error = client.refuse("row", **whole)
    assert status == 400
    assert {"title", "because", "instead"} <= set(error)


def test_the_python_of_an_input_runs(client, models):
    import matplotlib.pyplot as plt

    from regard.lab.opened import OpenedModel
    from regard.lab.sources import LoadedModel, Source

    loaded = LoadedModel(models["gpt"].module if "gpt" in models else __import__("regard").models.GPT, None)
    opened = OpenedModel("gpt", Source("gpt", "", lambda: loaded), loaded)
    lines = opened.read_texts(["5 3 8"], "x").python
    space: dict[str, Any] = {"model": loaded.module}
    exec("\n".join(lines), space)
    plt.close("all")
