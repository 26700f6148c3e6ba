"""The application: a table of requests, each answered by a function that runs in the queue of its model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from regard.errors import RegardError
from regard.lab import check, look, play, predictions, price, runs
from regard.lab.answers import Refused, describe_error, encode_json, error_response, json_response
from regard.lab.fields import Fields
from regard.lab.files import read_static
from regard.lab.jobs import Cancelled, Job
from regard.lab.state import Lab

LOG = logging.getLogger("regard.lab")
Work = Callable[[Lab, Fields, Job], Any]


@dataclass(frozen=True)
class Endpoint:
    """A request for data.

    Attributes:
        work: what answers it, in a thread.
        lane: the field that names whose queue it waits in: "model", "input", or "" for a queue of its own.
        streams: whether lines of progress come before the result.
    """

    work: Work
    lane: str = "input"
    streams: bool = False


ENDPOINTS: dict[str, Endpoint] = {
    "open": Endpoint(look.open_model, "model", streams=True),
    "input": Endpoint(look.read_input, "model"),
    "overview": Endpoint(look.make_overview, streams=True),
    "tile": Endpoint(look.make_tile),
    "row": Endpoint(look.make_row),
    "rollout": Endpoint(look.make_rollout),
    "predict": Endpoint(predictions.predict),
    "generate": Endpoint(predictions.generate, streams=True),
    "pattern": Endpoint(play.describe_pattern, ""),
    "time": Endpoint(play.measure_time, "", streams=True),
    "quadratic": Endpoint(play.slide_heads, ""),
    "check": Endpoint(check.check_model, "model", streams=True),
    "cost": Endpoint(price.price, "model"),
    "run": Endpoint(runs.read_run, ""),
}


def make_app(lab: Lab) -> Starlette:
    """The application without its guard, which `regard.lab.server` puts around it."""

    async def list_models(request: Request) -> Response:
        return json_response({"models": lab.list_models()})

    async def list_runs(request: Request) -> Response:
        return json_response({"runs": runs.list_runs(lab)})

    async def send_file(request: Request) -> Response:
        folder = request.path_params.get("folder", "static")
        content, media_type = read_static(folder, request.path_params.get("name", "index.html"))
        return Response(content, media_type=media_type)

    routes = [
        Route("/", send_file),
        Route("/api/models", list_models),
        Route("/api/runs", list_runs),
        *(
            Route(f"/api/{name}", _Answer(lab, name, endpoint), methods=["POST"])
            for name, endpoint in ENDPOINTS.items()
        ),
        Route("/{folder}/{name}", send_file),
    ]
    handlers: dict[Any, Any] = {HTTPException: _answer_http_error, RegardError: _answer_error, Exception: _answer_error}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False  # no answer sends the browser to an address that a request has named
    return app


async def _answer_error(request: Request, failure: Exception) -> Response:
    if not isinstance(failure, RegardError):
        LOG.error("%s failed", request.url.path, exc_info=failure)
    return error_response(failure)


async def _answer_http_error(request: Request, failure: Exception) -> Response:
    assert isinstance(failure, HTTPException)
    refusal = Refused(
        str(failure.detail),
        status=failure.status_code,
        asked=f"{request.method} {request.url.path[:80]}",
        because="the lab has no such address, or not for this method",
        instead="the page at /",
    )
    return error_response(refusal)


class _Answer:
    """Answers one kind of request: reads its fields, waits for its turn, and stops the work if the page goes away."""

    def __init__(self, lab: Lab, name: str, endpoint: Endpoint) -> None:
        self.lab, self.name, self.endpoint = lab, name, endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            fields = await _read_fields(request, self.name == "input")
            lane = self._find_lane(fields)
        except ClientDisconnect:
            return
        except RegardError as refusal:
            await error_response(refusal)(scope, receive, send)
            return
        lines: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def report(line: dict[str, Any]) -> None:  # in the thread of the job
            loop.call_soon_threadsafe(lines.put_nowait, line)

        job = Job(report)
        run = asyncio.create_task(self.lab.workers.run(lane, self._guard(fields), job))
        gone = asyncio.create_task(_wait_until_gone(receive))
        try:
            if self.endpoint.streams:
                await self._send_lines(run, gone, lines, send)
            else:
                await asyncio.wait({run, gone}, return_when=asyncio.FIRST_COMPLETED)
                if run.done():
                    await self._make_response(run)(scope, receive, send)
        finally:
            job.cancel()
            for task in (run, gone):
                task.cancel()
            await asyncio.gather(run, gone, return_exceptions=True)

    def _guard(self, fields: Fields) -> Callable[[Job], Any]:
        """The work; whatever a model raises, SystemExit too, becomes an error of this request alone."""

        def work(job: Job) -> Any:
            try:
                return self.endpoint.work(self.lab, fields, job)
            except (Cancelled, RegardError):
                raise
            except BaseException as failure:
                LOG.error("/api/%s failed", self.name, exc_info=failure)
                raise _Crash(failure) from failure

        return work

    def _find_lane(self, fields: Fields) -> str:
        if self.endpoint.lane == "model" and (fields.has("model") or not fields.has("expression")):
            id = fields.text("model")
            self.lab.find_source(id)
            return f"model {id}"
        if self.endpoint.lane == "input":
            return f"model {self.lab.inputs.get(fields.text('input')).model}"
        return self.name

    def _make_response(self, run: asyncio.Task) -> Response:
        failure = None if run.cancelled() else run.exception()
        if failure is None and not run.cancelled():
            return json_response(run.result())
        return error_response(_unwrap(failure))

    async def _send_lines(self, run: asyncio.Task, gone: asyncio.Task, lines: asyncio.Queue, send: Send) -> None:
        """Lines of progress as they come, then the result; a refusal before the first line has its own status."""
        started = False

        async def send_line(line: dict[str, Any]) -> None:
            nonlocal started
            if not started:
                headers = [(b"content-type", b"application/x-ndjson")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                started = True
            await send({"type": "http.response.body", "body": encode_json(line) + b"\n", "more_body": True})

        waiting = asyncio.create_task(lines.get())
        try:
            while not gone.done():
                await asyncio.wait({run, gone, waiting}, return_when=asyncio.FIRST_COMPLETED)
                if waiting.done():
                    await send_line(waiting.result())
                    waiting = asyncio.create_task(lines.get())
                elif run.done():
                    break
        finally:
            waiting.cancel()
        if gone.done() or run.cancelled():
            return
        failure = run.exception()
        if failure is not None and not started:
            await error_response(_unwrap(failure))({"type": "http"}, _no_message, send)
            return
        await send_line({"result": run.result()} if failure is None else describe_error(_unwrap(failure)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Crash(Exception):
    """What a model raised, so that no SystemExit passes through a future."""


def _unwrap(failure: BaseException | None) -> BaseException:
    if isinstance(failure, _Crash) and failure.__cause__ is not None:
        return failure.__cause__
    return failure or Cancelled()


async def _no_message() -> Any:
    raise AssertionError("an error has no body to read")


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_fields(request: Request, takes_images: bool) -> Fields:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data" and takes_images:
        return await _read_upload(request)
    if kind != "application/json":
        raise Refused(
            "The request is not JSON.",
            status=415,
            found=f"Content-Type: {kind[:60] or 'none'}",
            because="a request is one JSON object; only images are uploaded as a form",
            instead="Content-Type: application/json",
        )
    return Fields.parse(await request.body())


async def _read_upload(request: Request) -> Fields:
    try:
        async with request.form(max_files=1, max_fields=4, max_part_size=64 << 10) as form:
            image, model = form.get("image"), form.get("model")
            if image is None or isinstance(image, str) or not isinstance(model, str):
                raise Refused(
                    "The upload is not complete.",
                    status=400,
                    found=", ".join(str(name)[:40] for name in form) or "an empty form",
                    because="a form has an image as the file `image`, and the id of a model as the field `model`",
                    instead="both fields",
                )
            return Fields({"model": model, "image": await image.read()})
    except HTTPException as failure:  # of the parser: a damaged form
        raise Refused(
            "The form cannot be read.",
            status=400,
            found=str(failure.detail)[:120],
            because="it is damaged, or has too many fields",
            instead="the fields image and model",
        ) from None
