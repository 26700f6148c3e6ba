"""Models with real weights in the lab; those that are not downloaded are skipped."""

from __future__ import annotations

import pytest
import torch
from lab_client import Client, decode, run_server
from twins import transformers

from regard.cli.lab import make_source
from regard.downloads import find
from regard.lab.sources import find_downloaded
from regard.lab.state import Lab

SENTENCE = "The keys to the cabinet are on the table, and the keys to the door are lost."


@pytest.fixture(scope="module")
def client():
    sources = find_downloaded()
    place = find("minilm")
    if place is not None:
        sources.append(make_source(str(place)))  # the same folder by Hugging Face's own class
    running = run_server(Lab(sources))
    yield Client(next(running))
    assert next(running, None) is None


def require(client, name):
    if name not in client.server.lab.sources:
        pytest.skip(f"python -m regard.downloads {name}")


def test_minilm_shows_the_attention_of_hugging_face_by_our_class_and_by_theirs(client):
    require(client, "minilm")
    library, place = transformers(), find("minilm")
    tokenizer = library.AutoTokenizer.from_pretrained(place, local_files_only=True)
    model = library.AutoModel.from_pretrained(place, local_files_only=True, attn_implementation="eager").eval()
    encoded = tokenizer(SENTENCE, return_tensors="pt")
    with torch.no_grad():
        expected = model(**encoded, output_attentions=True).attentions
    (other,) = [name for name, source in client.server.lab.sources.items() if source.place == str(place)]
    for name in ("minilm", other):
        given = client.post("input", model=name, text=SENTENCE)
        side = given["attentions"]["self"]["keys"]
        assert len(side) == encoded["input_ids"].shape[1]
        for layer, head, token in ((0, 0, 0), (2, 5, 7), (5, 11, len(side) - 1)):
            fields = {"input": given["input"], "attention": "self", "layer": layer, "head": head, "token": token}
            row = decode(client.post("row", **fields, side="query")["row"])
            torch.testing.assert_close(row, expected[layer][0, head, token], atol=2e-5, rtol=1e-3)
            column = decode(client.post("row", **fields, side="key")["row"])
            torch.testing.assert_close(column, expected[layer][0, head, :, token], atol=2e-5, rtol=1e-3)
            length = expected[layer].shape[-1]
            tile = client.post("tile", **fields, rows=[0, length], columns=[0, length], size=128)["tile"]
            torch.testing.assert_close(decode(tile), expected[layer][0, head], atol=2e-5, rtol=1e-3)


def test_rxnfp_guesses_atoms_of_a_reaction(client):
    require(client, "rxnfp")
    reaction = "CC(=O)O.OCC>>CC(=O)OCC"
    given = client.post("input", model="rxnfp", text=reaction)
    tokens = given["attentions"]["self"]["keys"]
    assert tokens[1:-1] == [*"CC(=O)O.OCC", ">>", *"CC(=O)OCC"]
    place = tokens.index("=")
    found = client.post("predict", input=given["input"], position=place, off=[], top=3)
    assert found["after"][0]["token"] == "="
    masked = client.post("input", model="rxnfp", text="CC([MASK]O)O.OCC>>CC(=O)OCC")
    assert masked["attentions"]["self"]["keys"][4] == "[MASK]"
    assert client.post("predict", input=masked["input"], off=[], top=3)["position"] == 4


def test_stories15m_tells_a_story_token_by_token(client):
    require(client, "stories15m")
    given = client.post("input", model="stories15m", text="Once upon a time, there was a little girl named")
    found = client.post("predict", input=given["input"], off=[], top=5)
    assert found["after"][0]["token"] == "L"  # and then "ily"
    result = client.post("generate", input=given["input"], steps=3, temperature=0, seed=0)
    assert result["attentions"]["self"]["queries"][-3:-1] == ["L", "ily"]
    changed = client.post("predict", input=given["input"], off=[["self", 5, head] for head in range(6)], top=5)
    assert changed["before"][0] == found["after"][0]
    assert changed["after"] != found["after"]


def test_smollm2_attends_with_shared_keys_as_its_layer_says(client):
    require(client, "smollm2")
    given = client.post("input", model="smollm2", text="The capital of France is")
    assert client.post("predict", input=given["input"], off=[], top=1)["after"][0]["token"] == "Paris"
    module = client.server.lab.opened["smollm2"].module
    tokens = client.server.lab.inputs.get(given["input"]).arguments[0]
    seen = {}
    attention = module.blocks[11].attention
    hook = attention.register_forward_pre_hook(
        lambda m, args, kwargs: seen.update(x=args[0], rotation=kwargs["rotation"]), with_kwargs=True
    )
    with torch.no_grad():
        module(tokens, last_only=True)
        hook.remove()
        expected = attention.weights(seen["x"], rotation=seen["rotation"])[0, 7]
    for token in range(tokens.shape[1]):
        fields = {"input": given["input"], "attention": "self", "layer": 11, "head": 7, "token": token}
        torch.testing.assert_close(decode(client.post("row", **fields)["row"]), expected[token], atol=1e-5, rtol=1e-4)
