"""How fast the lab's server answers, over HTTP and without a browser: `python -m benchmarks.lab_server`.

The first picture of a text is its tokens, the run of the model, and the thumbnails and numbers of every head. Rows,
columns and tiles of a long text follow from its queries and keys; the square of all heads is never built.
"""

from __future__ import annotations

import http.client
import json
import resource
import statistics
import threading
import time
from typing import Any

SENTENCE = "The old keys to the cabinet in the hall are on the table where she left them before dinner last night ."
LENGTHS = (4096, 8000)
ROUNDS = 9


class Page:
    """What the page does: requests on a connection that stays open."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)

    def ask(self, name: str, **fields: Any) -> Any:
        headers = {"X-Regard-Token": self.server.token, "Content-Type": "application/json"}
        self.connection.request("POST", f"/api/{name}", json.dumps(fields).encode(), headers)
        lines = self.connection.getresponse().read().splitlines()
        answer = json.loads(lines[-1])
        assert "error" not in answer, answer
        return answer.get("result", answer)

    def time(self, name: str, **fields: Any) -> float:
        begin = time.perf_counter()
        self.ask(name, **fields)
        return 1000 * (time.perf_counter() - begin)


def main() -> None:
    from regard.lab.server import LabServer
    from regard.lab.sources import find_downloaded
    from regard.lab.state import Lab

    server = LabServer(Lab(find_downloaded()))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.is_running:
        time.sleep(0.05)
    try:
        page = Page(server)
        measure_sentence(page)
        for length in LENGTHS:
            measure_long_text(page, length)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"peak memory of the process: {peak:.2f} GB")
    finally:
        server.stop()
        thread.join(20)


def measure_sentence(page: Page) -> None:
    page.ask("open", model="minilm")
    times = []
    for number in range(ROUNDS):
        begin = time.perf_counter()
        given = page.ask("input", model="minilm", text=SENTENCE.replace("night", f"night {number}"))
        page.ask("overview", input=given["input"], attention="self")
        times.append(1000 * (time.perf_counter() - begin))
    count = len(given["attentions"]["self"]["queries"])
    print(f"minilm, {count} tokens: text to thumbnails and numbers of all 72 heads in {describe(times)}")
    fields = {"input": given["input"], "attention": "self", "weighting": "weights", "side": "query"}
    rows = [page.time("row", **fields, layer=number % 6, head=number, token=number) for number in range(ROUNDS)]
    print(f"minilm: a row in {describe(rows)}")


def measure_long_text(page: Page, length: int) -> None:
    page.ask("open", model="smollm2")
    words = ("one two three four five six seven eight nine ten " * length).split()[:length]
    begin = time.perf_counter()
    given = page.ask("input", model="smollm2", text=" ".join(words))
    read = 1000 * (time.perf_counter() - begin)
    count = len(given["attentions"]["self"]["queries"])
    fields = {"input": given["input"], "attention": "self", "layer": 17, "head": 4, "weighting": "weights"}
    first = page.time("row", **fields, token=count // 2, side="query")
    print(f"smollm2, {count:,} tokens: read in {read:.0f} ms; the run and the first row in {first / 1000:.1f} s")
    for side in ("query", "key"):
        times = [page.time("row", **fields, token=37 * number, side=side) for number in range(ROUNDS)]
        print(f"smollm2, {count:,} tokens: a row by {side} in {describe(times)}")
    part = {"rows": [count - 128, count], "columns": [0, 128]}
    exact = [page.time("tile", **fields, **part, size=128) for _ in range(ROUNDS)]
    print(f"smollm2, {count:,} tokens: an exact tile of 128 x 128 in {describe(exact)}")
    whole = page.time("tile", **fields, rows=[0, count], columns=[0, count], size=128)
    print(f"smollm2, {count:,} tokens: the whole head pooled to 128 x 128 in {whole:.0f} ms")
    overview = page.time("overview", input=given["input"], attention="self")
    held = page.server.lab.inputs.get(given["input"]).bytes / 2**20
    print(f"smollm2, {count:,} tokens: all 270 heads in {overview / 1000:.1f} s; {held:.0f} MB held")


def describe(milliseconds: list[float]) -> str:
    return f"{statistics.median(milliseconds):.1f} ms (worst of {len(milliseconds)}: {max(milliseconds):.1f})"


if __name__ == "__main__":
    main()
