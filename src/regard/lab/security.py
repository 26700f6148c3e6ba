"""What is let in: the right host, the page's own origin, its token, and bodies of bounded size.

The server listens on 127.0.0.1, but any page of the browser may try to reach that address. Three checks stop it:

    Host      the name in the request is this server's own address: a foreign name that was made to resolve to
              127.0.0.1 (DNS rebinding) is another
    Origin    where a browser names the page that asks, it is the lab's own page
    token     a random word in the address that `regard lab` prints, and in a header of every request for data, which
              a foreign page neither knows nor may send
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from regard.errors import InputError
from regard.lab.answers import Refused, error_response

TOKEN_HEADER = "x-regard-token"
MOST_BYTES = 2 << 20  # of a request with text
MOST_UPLOAD_BYTES = 16 << 20  # of a request with an image
MOST_HEADER_BYTES = 32 << 10

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """Lets through what belongs to the lab's own page, and gives every answer the headers that protect it."""

    def __init__(self, app: ASGIApp, token: str, hosts: Iterable[str]) -> None:
        self.app, self.token = app, token.encode()
        self.hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # no web socket is served here
            if scope["type"] == "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1008})
            return

        async def send_protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        try:
            self._check(scope)
        except InputError as refusal:
            await error_response(refusal)(scope, receive, send_protected)
            return
        most = MOST_UPLOAD_BYTES if scope["path"] == "/api/input" else MOST_BYTES
        await self.app(scope, _limit(receive, most), send_protected)

    def _check(self, scope: Scope) -> None:
        request = Request(scope)
        headers = request.headers
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in self.hosts:
            raise _refuse("The request names another host.", "Host", ", ".join(hosts))
        origins = headers.getlist("origin")
        if origins and (len(origins) > 1 or origins[0].lower() not in {f"http://{host}" for host in self.hosts}):
            raise _refuse("The request comes from another page.", "Origin", ", ".join(origins))
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise _refuse("The request comes from another page.", "Sec-Fetch-Site", headers["sec-fetch-site"])
        if scope["path"].startswith("/api/"):
            given = headers.getlist(TOKEN_HEADER)
            if len(given) != 1 or not secrets.compare_digest(given[0].encode(), self.token):
                raise Refused(
                    "The token is missing or wrong.",
                    status=401,
                    asked=f"{scope['method']} {scope['path'][:80]}",
                    because=f"every request for data has the token of the address in the header {TOKEN_HEADER}",
                    instead="the address that regard lab printed",
                )
        length = headers.get("content-length", "0")
        most = MOST_UPLOAD_BYTES if scope["path"] == "/api/input" else MOST_BYTES
        if not length.isascii() or not length.isdigit() or int(length[:20]) > most:
            raise too_long(most)


def _refuse(headline: str, header: str, found: str) -> Refused:
    return Refused(
        headline,
        status=403,
        found=f"{header}: {found[:100] or 'none'}",
        because="the lab answers its own page on this machine, and no other",
        instead="the address that regard lab printed",
    )


def too_long(most: int) -> Refused:
    return Refused(
        "The request is too long.",
        status=413,
        because=f"a request has at most {most >> 20} MB",
        instead="a shorter text, or a smaller image",
    )


def _limit(receive: Receive, most: int) -> Receive:
    """The body, refused once it has more bytes than allowed, whatever its header said."""
    seen = 0

    async def limited() -> Message:
        nonlocal seen
        message = await receive()
        if message["type"] == "http.request":
            seen += len(message.get("body", b""))
            if seen > most:
                raise too_long(most)
        return message

    return limited
