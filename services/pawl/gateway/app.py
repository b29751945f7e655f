"""The gateway's routes, and the checks that apply to every request."""

from __future__ import annotations

import time
from collections.abc import Collection
from functools import partial
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pawl.chassis.ids import IdSource
from pawl.chassis.process import logs
from pawl.chassis.process.address import join_address
from pawl.chassis.rpc.trace_context import TRACEPARENT_KEY, set_traceparent, valid
from pawl.errors import ForeignHost, Internal, InvalidField, MethodNotFound, PawlError
from pawl.gateway.agui import http as agui
from pawl.gateway.hooks import webhooks
from pawl.gateway.hooks.webhooks import unsubscribe
from pawl.gateway.login.callers import Callers
from pawl.gateway.login.http import OpenIdLogins
from pawl.gateway.metrics import Counters
from pawl.gateway.services import CLIENT, CallsOfStore, Services, find, write
from pawl.gateway.web import hosts as host_rules
from pawl.gateway.web.answers import NOT_FOUND, Pages, answer, read_json, refusal
from pawl.gateway.web.streams import Streams
from pawl.server.process.http_server import Page

_DEADLINE_SECONDS: Final = 15.0
_DEADLINE_SECONDS_MAX: Final = 60.0
# Responses are data. Browsers must not interpret them as anything else.
_HEADERS: Final = (
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'; sandbox"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)

_STREAMS: Final = frozenset({"/stream", "/runs/{run_id}/events", "/agui"})

# Routes that authenticate with a key and never with a cookie. Pages from other origins may use them.
_CROSS_ORIGIN: Final = frozenset({"/agui", "/agui/cancel"})

_log = logs.get_logger(__name__)


async def _call(callers: Callers, services: Services, bytes_max: int, request: Request) -> Response:
    """Handle `POST /rpc/{service}/{method}`: call a public method, with JSON as in the Connect protocol."""
    metadata = callers.credential(request)
    method = find(f"{request.path_params['service']}/{request.path_params['method']}", streams=False)
    asked = method.read(await read_json(request, bytes_max))
    # A request with `wait_seconds` gets that much extra time.
    seconds = _DEADLINE_SECONDS + max(0.0, min(_DEADLINE_SECONDS_MAX, getattr(asked, "wait_seconds", 0.0)))
    if (given := request.headers.get("connect-timeout-ms", "")).isdecimal() and len(given) <= 10:  # noqa: PLR2004
        seconds = min(int(given) / 1000, _DEADLINE_SECONDS_MAX)
    return answer(write(await services.call(method.name, asked, metadata, timeout_seconds=seconds)))


def application(
    *,
    callers: Callers,
    logins: OpenIdLogins,
    services: Services,
    streams: Streams,
    calls_of_store: CallsOfStore,
    counters: Counters,
    ids: IdSource,
    hosts: Collection[str],
    origins: Collection[str],
    health: Page,
    bytes_max: int,
) -> ASGIApp:
    async def fail(_: Request, error: Exception) -> Response:
        if isinstance(error, PawlError):
            return refusal(error)
        error_id = ids.new("err")
        _log.error("http.failed", error_id=error_id, exc_info=error)
        return refusal(Internal(f"internal error {error_id}", error_id=error_id))

    async def miss(request: Request, error: Exception) -> Response:
        allowed = ", ".join(sorted((getattr(error, "headers", None) or {}).get("Allow", "").split(", ")))
        if allowed:
            text = f"{request.method} is not allowed here. Use {allowed}."
            return refusal(MethodNotFound(text), status=405, headers={"Allow": allowed})
        return pages.page(request) if request.method in {"GET", "HEAD"} else refusal(NOT_FOUND)

    async def check(_: Request) -> Response:
        page = health()
        return Response(page.body, page.status, media_type=page.content_type)

    pages = Pages()
    routes = [
        Route("/rpc/{service}/{method}", partial(_call, callers, services, bytes_max), methods=["POST"]),
        Route("/stream", streams.many, methods=["POST"]),
        Route("/runs/{run_id}/events", streams.run, methods=["GET"]),
        Route("/agui", partial(agui.run, callers, services, streams, bytes_max), methods=["POST"]),
        Route("/agui/cancel", partial(agui.cancel, callers, services, bytes_max), methods=["POST"]),
        Route("/login", callers.log_in, methods=["POST"]),
        Route("/login/state", callers.state, methods=["GET"]),
        Route("/login/providers", logins.list, methods=["GET"]),
        Route("/login/openid/{name}", logins.redirect, methods=["GET"]),
        Route("/login/return/{name}", logins.finish, methods=["GET"]),
        Route("/login/renew", logins.renew, methods=["POST"]),
        Route("/login/out", logins.log_out, methods=["POST"]),
        Route("/hooks/{store_id}/{trigger_id}", partial(webhooks.deliver, calls_of_store), methods=["POST"]),
        Route("/completions/{store_id}/{token}", partial(webhooks.complete, calls_of_store), methods=["POST"]),
        Route("/unsubscribe/{store_id}/{token}", partial(unsubscribe, calls_of_store), methods=["GET", "POST"]),
        Route("/healthz", check, methods=["GET"]),
    ]
    handlers: dict[Any, Any] = {PawlError: fail, HTTPException: miss, Exception: fail}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return _Guard(_with_cors(app, origins), counters, hosts)


def _with_cors(app: ASGIApp, origins: Collection[str]) -> ASGIApp:
    with_cors = CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["POST"],
        allow_headers=["Authorization", "pawl-store", "pawl-user", TRACEPARENT_KEY],
        allow_private_network=True,
    )

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        await (with_cors if scope["path"] in _CROSS_ORIGIN else app)(scope, receive, send)

    return serve if origins else app


class _Guard:
    def __init__(self, app: ASGIApp, counters: Counters, hosts: Collection[str]) -> None:
        self._app = app
        self._counters = counters
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        start, status = time.monotonic(), 499

        async def guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                given = {name.lower() for name, _ in message.get("headers", ())}
                message["headers"] = [
                    *message.get("headers", ()),
                    *((name, value) for name, value in _HEADERS if name not in given),
                ]
            await send(message)

        request = Request(scope)
        CLIENT.set(_peer(request))
        if header := request.headers.get(TRACEPARENT_KEY, ""):
            set_traceparent(traceparent := valid(header))
            self._counters.trace_contexts_ignored.inc(not traceparent)
        try:
            host_rules.check_host(request.headers.get("host", ""), self._hosts)
            host_rules.check_frame(request.headers)
        except ForeignHost as error:
            await refusal(error)(scope, receive, guarded)
        except InvalidField as error:
            await refusal(error, headers={"Connection": "close"})(scope, receive, guarded)
        else:
            await self._app(scope, receive, guarded)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self._counters.requests.labels(route, str(status)).inc()
            if route not in _STREAMS:
                self._counters.seconds.labels(route).observe(time.monotonic() - start)


def _peer(request: Request) -> str:
    """Return the client's address in gRPC format, or an empty string if it is unknown."""
    if (client := request.client) is None:
        return ""
    return f"{'ipv6' if ':' in client.host else 'ipv4'}:{join_address(client.host, client.port)}"
