"""Why an attention runs where it runs, and what it costs there."""

from __future__ import annotations

from dataclasses import dataclass

from regard.backends import BACKENDS, choose
from regard.backends.base import Request
from regard.backends.tiles import tile_height
from regard.planner import Plan, plan


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`; prints as a table.

    Attributes:
        backend: the name of the backend that `attend` takes.
        merit: what was measured that puts it first, where something was.
        reasons: for every other backend, why it is not the one.
        macs: multiply-adds of scores and weighted sums, over the pairs the pattern allows (for linear attention, of
            its sums; without content, of what positions leave to do).
        plan: the tiles of the pattern, if the backend computes pairs.
    """

    asked: str
    backend: str
    merit: str | None
    reasons: dict[str, str]
    macs: int
    plan: Plan | None

    @staticmethod
    def of(request: Request) -> Explanation:
        chosen = choose(request)
        reasons: dict[str, str] = {}
        for backend in BACKENDS:
            if backend is not chosen:
                reason = backend.refuse(request) or backend.reluctance(request)
                reasons[backend.name] = reason or f"could run it, but {chosen.name} comes first"
        laid_out, counted = chosen.plan(request), chosen.macs(request)
        if laid_out is None and counted is None and request.feature_map is None:
            height = tile_height(request.pattern, request.lengths, request.group)
            laid_out = plan(request.pattern, *request.lengths, block=height)
        macs = _macs(request, chosen.name) if counted is None else counted
        return Explanation(request.describe(), chosen.name, chosen.merit(request), reasons, macs, laid_out)

    def __str__(self) -> str:
        chosen = self.backend if self.merit is None else f"{self.backend}: {self.merit}"
        lines = ["asked    " + self.asked.replace("\n", "\n         "), f"runs on  {chosen}"]
        lines += [f"   not   {name}: {reason}" for name, reason in self.reasons.items()]
        if self.plan is not None:
            lines.append("plan     " + str(self.plan).replace("\n", "\n         "))
        lines.append(f"cost     {self.macs:,} multiply-adds forward")
        return "\n".join(lines)

    __repr__ = __str__


def _macs(request: Request, backend: str) -> int:
    dim, value_dim = request.query.shape[-1], request.value.shape[-1]
    if request.feature_map is not None:
        dim = request.feature_map.width(dim)
    if backend == "linear":
        keys, queries = request.kv_heads * request.lengths.keys, request.heads * request.lengths.queries
        return request.batch * (keys + queries) * dim * (value_dim + 1)
    rows = request.batch // (request.pattern.rows or 1)
    return rows * request.heads * request.pattern.pairs(*request.lengths) * (dim + value_dim)
