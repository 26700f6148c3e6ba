"""The laws on a loaded model, and what it costs, over HTTP."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from regard import Attention, Causal, Window, cost


class Leaky(nn.Module):
    """A language model whose tokens see later ones: the mean over all tokens is added."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(19, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.output = nn.Linear(8, 19)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.output(x)


def test_every_law_that_is_asked_for_gets_a_verdict_as_soon_as_it_is_found(client):
    body = json.dumps({"model": "gpt", "laws": ["causality", "batch-independence"]}).encode()
    lines = client.send("POST", "/api/check", body).content
    sent = [line["verdict"] for line in lines if "verdict" in line]
    result = lines[-1]["result"]
    assert sent == result["verdicts"]
    assert [verdict["law"] for verdict in sent] == ["causality", "batch-independence"]
    assert {verdict["verdict"] for verdict in sent} == {"holds"}
    assert all(verdict["cases"] > 0 for verdict in sent)
    assert result["counterexample"] is None


def test_a_law_that_is_broken_comes_with_the_page_of_its_counterexample():
    from lab_client import Client, run_server

    from regard.lab.sources import LoadedModel, Source
    from regard.lab.state import Lab

    torch.manual_seed(3)
    running = run_server(Lab([Source("leaky", "", lambda: LoadedModel(Leaky().eval()))]))
    client = Client(next(running))
    found = client.post("check", model="leaky", laws=["causality"])
    (verdict,) = found["verdicts"]
    assert verdict["verdict"] == "broken"
    assert verdict["message"]
    assert "<svg" in found["counterexample"]
    assert "http://" not in found["counterexample"].replace("http://www.w3.org/", "")
    assert next(running, None) is None


def test_an_unknown_law_is_refused(client):
    status, error = client.refuse("check", model="gpt", laws=["gravity"])
    assert status == 400
    assert "gravity" in json.dumps(error)


def test_the_cost_of_a_model_is_that_of_the_library_at_every_size(client, models):
    client.post("open", model="gpt")
    found = client.post("cost", model="gpt", sizes={"tokens": 37, "batch": 3})
    expected = cost(models["gpt"].module, tokens=37, batch=3)
    (whole,) = [part for part in found["parts"] if part["name"] == "all"]
    assert whole["macs"] == expected.macs.value
    assert whole["bytes"] == expected.bytes.value
    assert whole["activations"] == expected.activation_bytes.value
    assert whole["parameters"] == sum(parameter.numel() for parameter in models["gpt"].module.parameters())
    assert found["sizes"]["tokens"] == {"value": 37, "least": 1, "most": 4096}
    curve = dict(map(tuple, found["curves"]["macs"]))
    assert curve[64] == cost(models["gpt"].module, tokens=64, batch=3).macs.value
    assert max(curve) == 4096
    assert found["parallel"] is None


def test_the_cost_of_a_pattern_follows_its_sliders(client):
    found = client.post("cost", expression="Causal() & Window(31, 0)", sizes={"tokens": 211, "heads": 5, "dim": 16})
    described = Attention(pattern=Causal() & Window(31, 0))
    expected = cost(described, tokens=211, heads=5, dim=16, batch=1)
    (whole,) = [part for part in found["parts"] if part["name"] == "all"]
    assert whole["macs"] == expected.macs.value
    assert "N" in found["formulas"]["macs"]
    assert dict(map(tuple, found["curves"]["macs"]))[1024] == cost(described, tokens=1024, heads=5, dim=16).macs.value


def test_pairs_without_a_formula_are_counted(client):
    found = client.post("cost", expression="Random(3, seed=1)", sizes={"tokens": 97, "heads": 2, "dim": 8})
    (whole,) = [part for part in found["parts"] if part["name"] == "all"]
    assert whole["macs"] == 2 * 2 * 8 * 3 * 97
    assert dict(map(tuple, found["curves"]["macs"]))[256] == 2 * 2 * 8 * 3 * 256


def test_a_step_on_several_devices_says_what_each_holds_and_sends(client, models):
    client.post("open", model="gpt")
    fields = {"sizes": {"tokens": 64, "batch": 2}, "devices": 4, "strategy": "fsdp", "link_gbps": 100}
    found = client.post("cost", model="gpt", **fields)["parallel"]
    spread = cost(models["gpt"].module, devices=4, strategy="fsdp", link_gbps=100, tokens=64, batch=2)
    assert found["memory"] == spread.memory_total.value
    sent = {each["name"]: each["bytes"] for each in found["collectives"]}
    assert sent == {name: number.value for name, number in spread.sent_by_collective.items()}
    assert found["compute_ms"] > 0


@pytest.mark.parametrize("sizes", [{"tokens": 0}, {"tokens": 1.5}, {"batch": "2"}, {"heads": 10**9}])
def test_sizes_that_are_none_are_refused(client, sizes):
    assert client.refuse("cost", expression="Causal()", sizes=sizes)[0] == 400
