"""What the lab holds: models that may be opened and those that are, inputs, runs, and the threads that work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.errors import InputError
from regard.lab.answers import Refused
from regard.lab.inputs import InputStore, LabInput
from regard.lab.jobs import Job, Workers
from regard.lab.layer_heads import LayerHeads
from regard.lab.opened import OpenedModel
from regard.lab.sources import Source, number_sources

DEFAULT_BYTES = 2 << 30  # of inputs and what their attention holds


class Lab:
    """The state of a server; every method but `workers.run` is called in the thread of a job.

    Args:
        sources: the models that the page may open, in the order of its list.
        runs: folders of `regard train` by their names.
        memory: how many bytes inputs and their queries, keys and values may take.
        workers: the threads.
    """

    def __init__(
        self,
        sources: Sequence[Source] = (),
        runs: Mapping[str, Path] | None = None,
        memory: int = DEFAULT_BYTES,
        workers: Workers | None = None,
    ) -> None:
        self.sources = number_sources(sources)
        self.runs = dict(runs or {})
        self.inputs = InputStore(memory)
        self.workers = workers or Workers()
        self.opened: dict[str, OpenedModel] = {}
        self.costs: dict[str, Any] = {}
        self.frames: dict[str, dict[int, Any]] = {}

    def list_models(self) -> list[dict[str, Any]]:
        return [
            {
                "id": id,
                "name": source.name,
                "kind": self.opened[id].kind if id in self.opened else source.kind,
                "source": source.place,
                "loaded": id in self.opened,
                "real_weights": source.has_real_weights,
            }
            for id, source in self.sources.items()
        ]

    def find_source(self, id: str) -> Source:
        source = self.sources.get(id)
        if source is None:
            raise Refused(
                "There is no such model.",
                status=404,
                asked=f"model {id[:60]!r}",
                found=", ".join(self.sources) or "no models",
                because="the models of the lab are those of its command line, and those that are downloaded",
                instead="regard lab with the model among its arguments",
            )
        return source

    def open(self, id: str, job: Job) -> OpenedModel:
        """The model, loaded if it is not yet. Jobs of one model run one after the other, so that it loads once."""
        source = self.find_source(id)
        if id not in self.opened:
            job.check()
            loaded = source.load()
            self.opened[id] = OpenedModel(id, source, loaded, job.check)
        return self.opened[id]

    def record(self, given: LabInput, job: Job) -> dict[str, list[LayerHeads]]:
        """The heads of every attention on an input; the model runs at the first time."""
        if given.layers is None:
            given.layers = self.open(given.model, job).record(given, job.check, self.inputs.limit)
            self.inputs.put(given)
        return given.layers

    def find_layer(self, given: LabInput, attention: str, layer: int, head: int, job: Job) -> LayerHeads:
        layers = self.find_attention(given, attention, job)
        _check_index("layer", layer, len(layers))
        _check_index("head", head, layers[layer].heads)
        return layers[layer]

    def find_attention(self, given: LabInput, attention: str, job: Job) -> list[LayerHeads]:
        recorded = self.record(given, job)
        if attention not in recorded:
            raise InputError(
                "There is no such attention.",
                asked=f"attention {attention[:40]!r}",
                because=f"this model has {', '.join(recorded)}",
                instead=next(iter(recorded)),
            )
        return recorded[attention]


def _check_index(name: str, number: int, count: int) -> None:
    if not 0 <= number < count:
        raise InputError(
            f"There is no {name} {number}.",
            asked=f"{name} {number}",
            because=f"there are {count}, counted from 0",
            instead=f"a number from 0 to {count - 1}",
        )
