"""Many requests at once, and many that are wrong: every one is answered, and none with another's answer."""

from __future__ import annotations

import json
import os
import random
import resource
import socket
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from lab_client import Client, decode

CONCURRENT = 1000
FUZZED = 10_000


def memory_in_use() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def make_row_request(client: Client, number: int, inputs: list[str]) -> tuple[bytes, tuple[int, int, int]]:
    """A request for a row, as it goes over the wire, and which row it asks for."""
    draw = random.Random(number)
    place, head, token = draw.randrange(len(inputs)), draw.randrange(6), draw.randrange(20, 60)
    fields = {"input": inputs[place], "attention": "self", "layer": 1, "head": head, "token": token, "side": "query"}
    body = json.dumps(fields).encode()
    head_lines = (
        f"POST /api/row HTTP/1.1\r\nHost: 127.0.0.1:{client.server.port}\r\nX-Regard-Token: {client.server.token}\r\n"
        f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head_lines.encode() + body, (place, head, token)


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.fixture
def inputs(client):
    """Texts of which each row differs from each of the others, and the rows themselves."""
    found, expected = [], []
    for number in range(7):
        text = " ".join(str((number * 13 + place * place) % 67) for place in range(60 + number))
        found.append(client.post("input", model="gpt", text=text)["input"])
        recorded = client.post("row", input=found[-1], attention="self", layer=0, head=0, token=0)
        assert recorded
        layer = client.server.lab.inputs.get(found[-1]).layers["self"][1]
        expected.append(layer.rows(range(layer.queries)))
    return found, expected


def run_at_once(client: Client, inputs: Any, count: int) -> Counter:
    """So many connections that are open at once, each with a request; how many were answered, and how many refused."""
    found, expected = inputs
    requests = [make_row_request(client, number, found) for number in range(count)]
    connections = []
    try:
        for _ in range(count):
            connections.append(socket.create_connection(("127.0.0.1", client.server.port), timeout=120))
        start = threading.Barrier(16)

        def send(part: int) -> list[tuple[int, bytes]]:
            start.wait(60)
            mine = range(part, count, 16)
            for number in mine:
                connections[number].sendall(requests[number][0])
            return [(number, read_all(connections[number])) for number in mine]

        with ThreadPoolExecutor(16) as pool:
            answers = [answer for part in pool.map(send, range(16)) for answer in part]
    finally:
        for connection in connections:
            connection.close()
    counts: Counter = Counter()
    for number, content in answers:
        head, _, body = content.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        counts[status] += 1
        place, row_head, token = requests[number][1]
        if status == 200:
            row = decode(json.loads(body)["row"])
            torch.testing.assert_close(row, expected[place][row_head, token], atol=1e-6, rtol=1e-5)
        else:
            assert json.loads(body)["error"]["title"] == "The lab is busy."
            assert b"retry-after" in head.lower()
    assert sum(counts.values()) == count
    assert set(counts) <= {200, 503}
    return counts


def test_requests_at_once_get_their_own_answers_or_a_clear_refusal(client, inputs):
    assert run_at_once(client, inputs, 48)[200] == 48


def test_a_full_queue_refuses_with_503_and_recovers(client, models):
    """More requests than may wait for a slow model: the rest are told so at once."""
    client.post("open", model="slow")
    given = client.post("input", model="slow", text="a longer text than six bytes, again")
    waiting = client.server.lab.workers.most_in_lane
    fields = {"input": given["input"], "attention": "self", "layer": 0, "head": 0, "token": 1}
    with ThreadPoolExecutor(waiting + 30) as pool:
        replies = list(
            pool.map(lambda _: client.send("POST", "/api/row", json.dumps(fields).encode()), range(waiting + 30))
        )
    counts = Counter(reply.status for reply in replies)
    assert set(counts) == {200, 503}
    assert counts[503] >= 20
    assert {json.dumps(reply.content) for reply in replies if reply.status == 200} == {
        json.dumps(client.post("row", **fields))
    }
    assert client.server.lab.workers.waiting == 0


@pytest.mark.slow  # a thousand connections
def test_a_thousand_connections_at_once_are_all_answered(client, inputs, record_property):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * CONCURRENT + 512
    if soft < needed:
        if hard < needed:
            pytest.skip(f"this process may open {hard} files, and both ends of the connections need {needed}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    before, begin = memory_in_use(), time.monotonic()
    counts = run_at_once(client, inputs, CONCURRENT)
    seconds, grown = time.monotonic() - begin, memory_in_use() - before
    print(f"{CONCURRENT} at once: {dict(counts)} in {seconds:.1f} s, memory {grown / 2**20:+.0f} MB", file=sys.stderr)
    record_property("answers", dict(counts))
    assert counts[200] >= 100  # what waits is answered
    assert grown < 256 << 20
    assert client.post("open", model="gpt")["kind"] == "decoder"  # and the server is as before


# Fuzz

NAMES = ("open", "input", "overview", "tile", "row", "rollout", "predict", "generate", "pattern", "quadratic", "cost",
         "run", "check", "time", "models", "runs", "none")  # fmt: skip


def fuzz_value(draw: random.Random, known: list[Any], depth: int = 0) -> Any:
    """A value of any type, often one that means something."""
    kind = draw.randrange(12 if depth < 3 else 9)
    if kind < 3:
        return draw.choice(known)
    if kind == 3:
        return draw.choice([0, 1, 2, 5, 128, -1, 2**31, 2**63, -(2**70), 10**40])
    if kind == 4:
        return draw.choice([0.5, -0.0, 1e308, 1e-300, 3.0])
    if kind == 5:
        return draw.choice([None, True, False])
    if kind == 6:
        return "".join(chr(draw.randrange(1, 0xD7FF)) for _ in range(draw.randrange(40)))
    if kind == 7:
        return draw.choice(
            ["Causal()", "Window(3, 0)", "~Causal() | First(1)", "../../etc/passwd", "os:system", "\x00"]
        )
    if kind == 8:
        return draw.choice(["<script>alert(1)</script>", "{}", "[]", "' OR 1=1", "%s%n", "${x}", "\ud800", "A" * 3000])
    if kind == 9:
        return [fuzz_value(draw, known, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 10:
        return {f"k{place}": fuzz_value(draw, known, depth + 1) for place in range(draw.randrange(3))}
    return [[fuzz_value(draw, known, depth + 1)], draw.randrange(70)]


def fuzz_request(draw: random.Random, known: list[Any]) -> tuple[str, str, bytes, dict[str, str]]:
    """A request with fields of the right names and any values; sometimes broken in its form, too."""
    name = draw.choice(NAMES)
    names = ("model", "text", "source", "target", "input", "attention", "layer", "head", "weighting", "token", "side",
             "rows", "columns", "size", "position", "off", "top", "steps", "temperature", "seed", "expression",
             "tokens", "grid", "heads", "query", "laws", "sizes", "devices", "strategy", "run", "since")  # fmt: skip
    fields = {each: fuzz_value(draw, known) for each in draw.sample(names, draw.randrange(2, 12))}
    plausible = {"model": "gpt", "text": "1 2 3", "input": known[0], "attention": "self", "layer": 0, "head": 0}
    fields = {**{each: plausible[each] for each in plausible if draw.random() < 0.6}, **fields}
    fields["tokens"] = fields.get("tokens") if not isinstance(fields.get("tokens"), int) else fields["tokens"] % 200
    fields["steps"] = fields.get("steps") if not isinstance(fields.get("steps"), int) else fields["steps"] % 9
    if fields.get("model") not in ("gpt", "torch") or name == "check":
        fields["laws"] = ["causality"] if draw.random() < 0.5 else fields.get("laws", 3)
    body = json.dumps(fields).encode()
    headers: dict[str, str] = {}
    form = draw.randrange(20)
    if form == 0:
        body = body[: draw.randrange(len(body))]
    elif form == 1:
        body = bytes(draw.randrange(256) for _ in range(draw.randrange(200)))
    elif form == 2:
        headers["Content_Type"] = draw.choice(
            ["multipart/form-data; boundary=x", "text/plain", "multipart/form-data", ""]
        )
    elif form == 3:
        headers["X_Regard_Token"] = draw.choice(["", "x" * 40, "-"])
    elif form == 4:
        headers["Origin"] = draw.choice(["null", "http://evil.example", "http://127.0.0.1"])
    method = draw.choice(["GET", "PUT", "DELETE", "HEAD"]) if draw.randrange(25) == 0 else "POST"
    path = f"/api/{name}" if draw.randrange(12) else "/" + "".join(draw.choice("ab./%2eé\\?#") for _ in range(12))
    return method, path.encode("ascii", "replace").decode().replace("?", "x").replace("#", "y"), body, headers


def run_fuzz(client: Client, count: int, first: int = 0) -> Counter:
    known: list[Any] = [client.post("input", model="gpt", text="5 3 8 60 2")["input"], "gpt", "self", 0, 1, 2, "5 3 8",
                        "query", "weights", [0, 3], "torch"]  # fmt: skip

    def ask(number: int) -> tuple[int, str, int]:
        method, path, body, headers = fuzz_request(random.Random(number), known)
        reply = client.send(method, path, body, **headers)
        if method != "HEAD" and reply.status >= 400:
            assert {"title"} <= set(reply.content["error"]), (number, path, reply)
        return number, path, reply.status

    counts: Counter = Counter()
    with ThreadPoolExecutor(8) as pool:
        for number, path, status in pool.map(ask, range(first, first + count)):
            assert status in (200, 400, 401, 403, 404, 405, 413, 415, 503), (number, path, status)
            counts[status] += 1
    return counts


def test_wrong_requests_are_refused_and_none_is_an_internal_error(client):
    counts = run_fuzz(client, 300)
    assert counts[200] > 10
    assert counts[400] > 50


@pytest.mark.slow  # ten thousand requests
def test_ten_thousand_fuzzed_requests_leave_the_server_as_it_was(client):
    before, begin = memory_in_use(), time.monotonic()
    counts = run_fuzz(client, FUZZED, first=1000)
    seconds, grown = time.monotonic() - begin, memory_in_use() - before
    print(f"{FUZZED} fuzzed: {dict(counts)} in {seconds:.0f} s, memory {grown / 2**20:+.0f} MB", file=sys.stderr)
    assert grown < 512 << 20
    given = client.post("input", model="gpt", text="1 2 3")
    assert decode(client.post("row", input=given["input"], attention="self", layer=0, head=0, token=0)["row"])[0] == 1
    assert client.server.lab.workers.waiting == 0
