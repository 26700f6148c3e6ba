"""What is let in: host, origin, token, size; and what a crash of a model does."""

from __future__ import annotations

import json
import socket
import time

import pytest
from lab_client import Client


def test_the_page_and_its_files_are_served_and_forbid_other_addresses(client):
    reply = client.send("GET", "/", X_Regard_Token="-")
    assert reply.status == 200
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "http" not in policy
    assert reply.headers["cache-control"] == "no-store"
    assert reply.headers["referrer-policy"] == "no-referrer"
    assert client.send("GET", "/static/app.js").headers["content-type"].startswith("text/javascript")
    assert client.send("GET", "/components/dom.js").status == 200


def test_answers_with_data_are_not_kept_by_the_browser(client):
    assert client.send("GET", "/api/models").headers["cache-control"] == "no-store"


@pytest.mark.parametrize("token", ["-", "", "wrong", "é"])
def test_without_the_token_there_is_no_data(client, token):
    token = token if token == "-" else token.encode().decode("latin-1")
    for method, path in (("GET", "/api/models"), ("POST", "/api/open"), ("GET", "/api/runs"), ("POST", "/api/none")):
        reply = client.send(method, path, b'{"model": "gpt"}' if method == "POST" else None, X_Regard_Token=token)
        assert reply.status == 401
        assert client.server.token not in json.dumps(reply.content)


def test_the_token_in_the_address_of_a_request_does_not_count(client):
    reply = client.send("GET", f"/api/models?token={client.server.token}", X_Regard_Token="-")
    assert reply.status == 401


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "localhost:1", "127.0.0.1.evil.example:{port}", ""])
def test_another_host_is_refused_as_after_dns_rebinding(client, host):
    for path in ("/", "/api/models", "/static/app.js"):
        assert client.send("GET", path, Host=host.format(port=client.server.port)).status == 403


def test_localhost_is_this_machine_too(client):
    assert client.send("GET", "/api/models", Host=f"localhost:{client.server.port}").status == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1", ""]
)
def test_another_origin_is_refused(client, origin):
    reply = client.send("GET", "/api/models", Origin=origin.format(port=client.server.port))
    assert reply.status == 403


def test_the_own_origin_is_let_in(client):
    assert client.send("GET", "/api/models", Origin=f"http://127.0.0.1:{client.server.port}").status == 200
    assert client.send("GET", "/api/models", Sec_Fetch_Site="same-origin").status == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_request_that_the_browser_calls_cross_site_is_refused(client, site):
    assert client.send("GET", "/", Sec_Fetch_Site=site).status == 403


def test_a_form_of_another_page_is_refused_before_it_is_read(client):
    reply = client.send("POST", "/api/open", b"model=gpt", Content_Type="application/x-www-form-urlencoded")
    assert reply.status == 415
    reply = client.send("POST", "/api/open", b'{"model": "gpt"}', Content_Type="text/plain")
    assert reply.status == 415


def test_no_preflight_is_granted(client):
    reply = client.send("OPTIONS", "/api/models", Origin="http://evil.example")
    assert reply.status == 403
    assert not any(name.startswith("access-control") for name in reply.headers)


@pytest.mark.parametrize(
    "path",
    ["/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/app.py", "/components/../../errors.py",
     "/static//etc/passwd", "/etc/passwd", "/static/%2fetc%2fpasswd", "/components/..%5c..%5cerrors.py",
     "/static/app.js%00.html", "/static/", "/components/", "/static/app.py", "//etc/passwd"],
)  # fmt: skip
def test_no_path_reaches_the_file_system(client, path):
    reply = client.send("GET", path)
    assert reply.status == 404
    assert "error" in reply.content


def test_the_page_names_models_by_their_ids_only(client):
    for name in ("regard.models:GPT", "os:getcwd", "/etc", "../", "transformers:BertModel", "file.py:f"):
        assert client.refuse("open", model=name)[0] == 404
        assert client.refuse("check", model=name)[0] == 404
        assert client.refuse("input", model=name, text="1")[0] == 404
    assert client.refuse("run", run="/etc")[0] == 404


def test_the_server_listens_on_this_machine_alone(client):
    assert client.server.socket.getsockname()[0] == "127.0.0.1"
    others = {entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
    for address in others:
        with pytest.raises(OSError, match=r".*"), socket.create_connection((address, client.server.port), timeout=2):
            pass


def test_every_lab_has_a_token_of_its_own(server):
    from regard.lab.server import LabServer
    from regard.lab.state import Lab

    other = LabServer(Lab())
    other.close()
    assert other.token != server.token
    assert len(other.token) >= 32
    assert other.token in other.address


@pytest.mark.parametrize("length", ["99999999999", "-1", "1e3", "0x10"])
def test_a_body_that_announces_too_much_is_refused_before_it_is_sent(client, length):
    with socket.create_connection(("127.0.0.1", client.server.port), timeout=10) as raw:
        head = (
            f"POST /api/open HTTP/1.1\r\nHost: 127.0.0.1:{client.server.port}\r\nX-Regard-Token: {client.server.token}"
        )
        raw.sendall(f"{head}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode())
        assert raw.recv(20).startswith((b"HTTP/1.1 413", b"HTTP/1.1 400"))


def test_a_body_without_a_length_is_refused_when_it_is_too_long(client):
    with socket.create_connection(("127.0.0.1", client.server.port), timeout=20) as raw:
        head = (
            f"POST /api/open HTTP/1.1\r\nHost: 127.0.0.1:{client.server.port}\r\nX-Regard-Token: {client.server.token}"
        )
        raw.sendall(f"{head}\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        part = b"10000\r\n" + bytes(0x10000) + b"\r\n"
        try:
            for _ in range(64):
                raw.sendall(part)
        except OSError:
            pass
        assert b"413" in raw.recv(40)


def test_a_large_upload_is_refused(client):
    assert client.upload("vit", bytes(17 << 20)).status == 413


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"{", b'"x"', b"\xff\xfe", b"[" * 100_000, b"1" * 100_000])
def test_what_is_no_object_is_refused(client, body):
    reply = client.send("POST", "/api/open", body)
    assert reply.status == 400
    assert {"title", "because", "instead"} <= set(reply.content["error"])


def test_texts_come_back_as_texts(client):
    """Labels are data: escaping them is the page's work, and nothing here turns them into markup or drops them."""
    text = "<script>alert(1)</script> \u202e \ud800 & \" '"
    body = json.dumps({"model": "gpt", "text": text}).encode()
    reply = client.send("POST", "/api/input", body)
    assert reply.status == 400  # bytes beyond the vocabulary of 67
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("model", ["torch", "exit"])
def test_a_crash_in_a_model_is_an_error_of_this_request_alone(client, model):
    given = client.post("input", model=model, text="1 9 2")
    status, error = client.refuse("row", input=given["input"], attention="self", layer=0, head=0, token=0)
    assert status == 500
    assert "it blew up" in error["found"]
    assert "Traceback" not in json.dumps(error)
    whole = client.post("input", model=model, text="1 2 3")
    assert client.post("row", input=whole["input"], attention="self", layer=0, head=0, token=0)["row"]["shape"] == [3]


def test_an_error_within_a_stream_is_its_last_line(client):
    given = client.post("input", model="torch", text="1 9 3")
    body = json.dumps({"input": given["input"], "attention": "self"}).encode()
    lines = client.send("POST", "/api/overview", body).content
    assert "progress" in lines[0]
    assert "it blew up" in lines[-1]["error"]["found"]


def test_an_input_that_was_dropped_is_gone_and_memory_stays_within_its_limit(client: Client):
    store = client.server.lab.inputs
    first = client.post("input", model="gpt", text="1 2 3")["input"]
    client.post("row", input=first, attention="self", layer=0, head=0, token=0)
    for start in range(40):
        text = " ".join(str((start * place) % 67) for place in range(3001))
        given = client.post("input", model="gpt", text=text)
        client.post("row", input=given["input"], attention="self", layer=0, head=0, token=0)
        assert store.bytes <= store.limit
    status, error = client.refuse("row", input=first, attention="self", layer=0, head=0, token=0)
    assert status == 404
    assert error["title"] == "This input is no longer here."


def test_an_input_that_needs_more_than_all_memory_is_refused(models):
    import torch
    from lab_client import MAKERS, run_server

    from regard.lab.sources import Source
    from regard.lab.state import Lab

    torch.manual_seed(3)
    running = run_server(Lab([Source("gpt", "", MAKERS["gpt"])], memory=300_000))
    client = Client(next(running))
    given = client.post("input", model="gpt", text=" ".join(str(place % 67) for place in range(3000)))
    status, error = client.refuse("row", input=given["input"], attention="self", layer=0, head=0, token=0)
    assert status == 400
    assert "too long for the memory" in error["title"]
    short = client.post("input", model="gpt", text="1 2 3")
    client.post("row", input=short["input"], attention="self", layer=0, head=0, token=0)
    assert next(running, None) is None


def test_closing_a_connection_stops_its_computation(client, models):
    client.post("open", model="slow")
    module = models["slow"].module
    given = client.post("input", model="slow", text="a longer text than six bytes")
    before = module.ran
    body = json.dumps({"input": given["input"], "attention": "self"}).encode()
    for path in ("/api/overview", "/api/rollout"):
        raw = socket.create_connection(("127.0.0.1", client.server.port), timeout=10)
        fields = body[:-1] + b', "token": 1}'
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{client.server.port}\r\nX-Regard-Token: {client.server.token}"
        raw.sendall(
            f"{head}\r\nContent-Type: application/json\r\nContent-Length: {len(fields)}\r\n\r\n".encode() + fields
        )
        deadline = time.monotonic() + 20
        while module.ran == before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert module.ran > before  # it runs
        raw.close()
        client.post("input", model="slow", text="short")  # waits until the thread is free
        before = module.ran
        time.sleep(0.3)
        assert module.ran == before
    assert module.ran < 110  # of 120 layers that the two requests asked for
