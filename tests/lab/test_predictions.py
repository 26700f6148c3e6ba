"""Predictions with and without heads, and generation, against the models' own logits."""

from __future__ import annotations

import json

import pytest
import torch


def shares_of(entries):
    return {entry["id"]: entry["probability"] for entry in entries}


def test_the_next_token_is_that_of_the_model(client, models):
    given = client.post("input", model="llama", text="5 3 8 60 2")
    found = client.post("predict", input=given["input"], position=None, off=[], top=4)
    with torch.no_grad():
        expected = models["llama"].module(torch.tensor([[5, 3, 8, 60, 2]])).logits[0, -1].softmax(-1)
    assert found["kind"] == "next"
    assert found["before"] == found["after"]
    assert [entry["id"] for entry in found["after"]] == expected.topk(4).indices.tolist()
    for number, share in shares_of(found["after"]).items():
        assert share == pytest.approx(float(expected[number]), rel=1e-4)


def test_an_earlier_position_predicts_from_what_is_before_it(client, models):
    given = client.post("input", model="gpt", text="5 3 8 60 2")
    found = client.post("predict", input=given["input"], position=2, off=[], top=3)
    with torch.no_grad():
        expected = models["gpt"].module(torch.tensor([[5, 3, 8]]))[0, -1].softmax(-1)
    assert [entry["id"] for entry in found["after"]] == expected.topk(3).indices.tolist()


def test_a_guess_for_a_masked_token_is_that_of_the_model(client, models):
    given = client.post("input", model="bert", text="the cat sat on the mat")
    found = client.post("predict", input=given["input"], position=3, off=[], top=5)
    ids = torch.tensor([models["bert"].tokenizer.encode("the cat sat on the mat").ids])
    ids[0, 3] = 4
    with torch.no_grad():
        expected = models["bert"].module(ids).logits[0, 3].softmax(-1)
    assert found["kind"] == "mask"
    assert [entry["id"] for entry in found["after"]] == expected.topk(5).indices.tolist()


def test_a_mask_in_the_text_is_what_is_guessed_where_no_position_is_named(client):
    given = client.post("input", model="bert", text="the cat [MASK] on the mat")
    assert client.post("predict", input=given["input"], off=[])["position"] == 3


def test_the_next_word_of_a_translation_is_that_of_the_model(client, models):
    given = client.post("input", model="bart", source="the cat sat", target="a dog")
    found = client.post("predict", input=given["input"], off=[], top=3)
    words = models["bart"].tokenizer
    target = torch.tensor([[3, *words.encode("a dog").ids[:-1]]])
    with torch.no_grad():
        output = models["bart"].module(torch.tensor([words.encode("the cat sat").ids]), decoder_input_ids=target)
    assert [entry["id"] for entry in found["after"]] == output.logits[0, -1].softmax(-1).topk(3).indices.tolist()


def test_a_head_that_is_off_adds_nothing_in_a_hugging_face_model(client, models):
    given = client.post("input", model="llama", text="5 3 8 60 2")
    found = client.post("predict", input=given["input"], off=[["self", 1, 4], ["self", 0, 2]], top=67)
    module = models["llama"].module
    kept = {}
    for layer, head in ((1, 4), (0, 2)):
        weight = module.model.layers[layer].self_attn.o_proj.weight
        kept[layer] = weight.detach().clone()
        with torch.no_grad():
            weight[:, 4 * head : 4 * head + 4] = 0
    try:
        with torch.no_grad():
            expected = module(torch.tensor([[5, 3, 8, 60, 2]])).logits[0, -1].softmax(-1)
    finally:
        for layer, weight in kept.items():
            with torch.no_grad():
                module.model.layers[layer].self_attn.o_proj.weight.copy_(weight)
    after, before = shares_of(found["after"]), shares_of(found["before"])
    for number in range(67):
        assert after[number] == pytest.approx(float(expected[number]), rel=1e-4)
    assert max(abs(after[number] - before[number]) for number in range(67)) > 1e-4
    again = client.post("predict", input=given["input"], off=[], top=67)  # and the model is as it was
    assert shares_of(again["after"]) == before


@pytest.mark.parametrize(("model", "heads"), [("gpt", 6), ("bert", 3), ("vit", 3), ("timm", 3)])
def test_a_head_that_is_off_is_a_column_of_zeros_in_the_output_matrix(client, models, model, heads):
    if model in ("vit", "timm"):
        from regard.render.png import encode_png

        size = (12, 20) if model == "vit" else (24, 32)
        given = client.upload(
            model, encode_png(torch.rand(*size, 3, generator=torch.Generator().manual_seed(3)))
        ).content
    else:
        given = client.post("input", model=model, text="1 2 3 4" if model == "gpt" else "the cat sat on the mat")
    fields = {"input": given["input"], "top": 3}
    found = client.post("predict", **fields, off=[["self", 0, heads - 1]])
    module = models[model].module
    weight = {
        "gpt": lambda: module.blocks[0].attention.output.weight,
        "bert": lambda: module.bert.encoder.layer[0].attention.output.dense.weight,
        "vit": lambda: module.blocks[0].attention.output.weight,
        "timm": lambda: module.blocks[0].attn.proj.weight,
    }[model]()
    before = weight.detach().clone()
    dim = weight.shape[1] // heads
    try:
        with torch.no_grad():
            weight[:, -dim:] = 0
        # Another position or a new process would do; a new number of results asks for nothing that is kept.
        client.server.lab.inputs.get(given["input"]).predictions.clear()
        expected = client.post("predict", **fields, off=[])
    finally:
        with torch.no_grad():
            weight.copy_(before)
        client.server.lab.inputs.get(given["input"]).predictions.clear()
    for number, share in shares_of(expected["after"]).items():
        assert shares_of(found["after"])[number] == pytest.approx(share, rel=1e-4)
    assert shares_of(found["before"]) != pytest.approx(shares_of(found["after"]), rel=1e-7)


def test_a_head_of_torchs_own_attention_can_be_off():
    from regard.lab.record import record_run
    from regard.lab.switch import heads_off

    torch.manual_seed(5)
    layer = torch.nn.TransformerEncoderLayer(12, 3, 17, batch_first=True).eval()
    x = torch.randn(1, 5, 12)
    recorded = {"self": record_run(layer, (x,), {})}
    with torch.no_grad():
        whole = layer(x)
        with heads_off(layer, recorded, [("self", 0, 1)]):
            without = layer(x)
        layer.self_attn.out_proj.weight[:, 4:8] = 0
        torch.testing.assert_close(without, layer(x))
    assert not torch.allclose(whole, without, atol=1e-4)


def test_shared_weights_lose_a_head_only_in_the_layer_that_is_named():
    from regard.lab.record import record_run
    from regard.lab.switch import heads_off
    from regard.layers import MultiHeadAttention

    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = MultiHeadAttention(12, 3)

        def forward(self, x):
            return self.attention(x + self.attention(x))

    torch.manual_seed(7)
    model, x = Shared().eval(), torch.randn(1, 5, 12)
    recorded = {"self": record_run(model, (x,), {})}
    assert len(recorded["self"]) == 2
    with torch.no_grad():
        with heads_off(model, recorded, [("self", 1, 2)]):
            found = model(x)
        first = model.attention(x)
        second = model.attention.head_contributions(x + first)
        expected = second[0] + second[1] + model.attention.output.bias
    torch.testing.assert_close(found, expected)


def test_a_classifier_of_images_names_its_classes(client, models):
    from regard.render.png import encode_png

    given = client.upload("vit", encode_png(torch.full((12, 20, 3), 0.5))).content
    found = client.post("predict", input=given["input"], off=[], top=3)
    with torch.no_grad():
        expected = models["vit"].module(torch.full((1, 1, 12, 20), 128 / 255)).softmax(-1)[0]
    assert found["kind"] == "class"
    names = ("ant", "bee", "cow", "doe", "elk")
    assert [entry["token"] for entry in found["after"]] == [names[number] for number in expected.topk(3).indices]


@pytest.mark.parametrize("model", ["gpt", "llama", "ours", "bart"])
def test_a_text_is_continued_greedily_as_by_the_model_without_a_cache(client, models, model):
    words = models[model].tokenizer if model in models else None
    if model in ("gpt", "llama"):
        given = client.post("input", model=model, text="5 3 8")
        source, ids = None, [5, 3, 8]
    elif model == "ours":
        given = client.post("input", model=model, source="5 3 8", target="")
        source, ids = torch.tensor([[5, 3, 8]]), [models["ours"].module.config.start]
    else:
        given = client.post("input", model=model, source="the cat sat", target="a")
        words = models["bart"].tokenizer
        source, ids = torch.tensor([words.encode("the cat sat").ids]), [3, *words.encode("a").ids[:-1]]
    body = json.dumps({"input": given["input"], "steps": 5, "temperature": 0, "seed": 1}).encode()
    lines = client.send("POST", "/api/generate", body).content
    drawn = [line["id"] for line in lines[:-1]]
    module = models[model].module
    with torch.no_grad():
        for number in drawn:
            tokens = torch.tensor([ids])
            if model == "bart":
                logits = module(source, decoder_input_ids=tokens).logits
            else:
                logits = module(tokens) if source is None else module(source, tokens)
                logits = getattr(logits, "logits", logits)
            assert number == int(logits[0, -1].argmax())
            ids.append(number)
    assert 1 <= len(drawn) <= 5
    result = lines[-1]["result"]
    side = result["attentions"]["self" if source is None else "decoder"]
    assert len(side["queries"]) == len(ids)
    assert lines[0]["probabilities"][0]["id"] == drawn[0]
    row = client.post(
        "row",
        input=result["input"],
        attention="self" if source is None else "cross",
        layer=0,
        head=0,
        token=len(ids) - 1,
    )
    assert row["row"]["shape"] == [len(ids)] if source is None else source.shape[1]


def test_the_same_seed_draws_the_same_text_and_another_seed_another(client):
    given = client.post("input", model="gpt", text="5 3 8")
    texts = []
    for seed in (1, 1, 2):
        result = client.post("generate", input=given["input"], steps=12, temperature=1.5, seed=seed)
        texts.append(result["attentions"]["self"]["queries"])
    assert texts[0] == texts[1] != texts[2]


def test_what_cannot_be_predicted_is_refused(client):
    given = client.post("input", model="davit" if False else "gpt", text="1 2 3")
    for fields in ({"off": [["self", 9, 0]]}, {"off": [["cross", 0, 0]]}, {"off": [["self", 0]]}, {"off": "all"},
                   {"position": 3, "off": []}, {"off": [], "top": 0}):  # fmt: skip
        assert client.refuse("predict", input=given["input"], **fields)[0] == 400
    encoder = client.post("input", model="torch", text="1 2 3")
    assert "no predictions" in client.refuse("predict", input=encoder["input"], off=[])[1]["title"]
    assert "generates no text" in client.refuse("generate", input=encoder["input"], steps=1)[1]["title"]
