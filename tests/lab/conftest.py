"""A lab on a loopback port with small models of several libraries, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from lab_client import MAKERS, Client, run_server

from regard.lab.server import LabServer
from regard.lab.sources import LoadedModel, Source
from regard.lab.state import Lab


@pytest.fixture(scope="session")
def models() -> dict[str, LoadedModel]:
    """The models of the lab, as they are loaded: the tests compute with the same ones."""
    return {}


@pytest.fixture(scope="session")
def server(models: dict[str, LoadedModel]) -> Iterator[LabServer]:
    def make_loader(name: str) -> Callable[[], LoadedModel]:
        def load() -> LoadedModel:
            if name not in models:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(sum(map(ord, name)))
                    models[name] = MAKERS[name]()
            return models[name]

        return load

    sources = [Source(name, f"test {name}", make_loader(name)) for name in MAKERS]
    yield from run_server(Lab(sources, memory=32 << 20))


@pytest.fixture
def client(server: LabServer) -> Client:
    return Client(server)
