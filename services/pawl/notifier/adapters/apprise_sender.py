"""Deliveries by services of Apprise: its plug-ins say what is sent, and the guarded way out sends it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pawl.chassis import logs
from pawl.chassis.clock import Clock
from pawl.chassis.egress_requests import Egress, OutboundRequest, OutboundResponse, RequestFailed
from pawl.chassis.egress_rules import EgressRefused
from pawl.chassis.ids import StoreId
from pawl.chassis.retry import asked_seconds
from pawl.errors import InvalidField
from pawl.notifier.adapters.webhook_sender import TRY_SECONDS
from pawl.notifier.domain.delivery import TRIES_MAX_AT_ONCE, Attempt, DeliveryId, Outcome
from pawl.notifier.domain.mail import texts

if TYPE_CHECKING:
    from apprise import NotifyBase
    from requests import PreparedRequest, Response

_ANSWER_BYTES_MAX: Final = 64 * 1024
_REQUESTS_MAX: Final = 8
"""Requests of one try."""
_OURS: Final = frozenset(
    {"host", "connection", "content-length", "transfer-encoding", "te", "trailer", "upgrade", "expect"}
)
"""Headers that are not the plug-ins' to set."""

_log = logs.get_logger(__name__)
_at_work = threading.local()
_loading = threading.Lock()


class AppriseServices:
    """See `ports.ChannelSender` and `ports.Services`; the schemes that the deployment allows.

    A plug-in works in a thread of its own; there are as many as tries, so none waits for another. Whatever it requests
    goes out through the guard, as the store of its user may: to addresses that were judged, over TLS that was checked,
    whatever its URL says. Its time and its requests are limited, and it neither sleeps nor tries again by itself.
    """

    def __init__(self, allowed: frozenset[str], egress: Egress, clock: Clock) -> None:
        self._allowed = allowed
        self._egress = egress
        self._clock = clock
        self._threads = concurrent.futures.ThreadPoolExecutor(TRIES_MAX_AT_ONCE["all"], thread_name_prefix="apprise")
        self._leftovers: dict[DeliveryId, Sequence[asyncio.Future[Any]]] = {}

    async def check(self, url: str) -> None:
        if url.partition(":")[0].lower() not in self._allowed:
            named = ", ".join(f"{scheme}://" for scheme in sorted(self._allowed)) or "none"
            raise InvalidField(f"the deployment does not allow this service; of Apprise it allows {named}", field="url")
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, _plugin, url)
        except ValueError as error:
            raise InvalidField(f"url: {error}", field="url") from None

    async def send(self, attempt: Attempt) -> Outcome:
        if attempt.url.partition(":")[0].lower() not in self._allowed:
            return Outcome(error="the deployment does not allow this service any more")
        loop, started = asyncio.get_running_loop(), self._clock.monotonic()
        requests = _Requests(
            store_id=attempt.candidate.inbox.store_id, egress=self._egress, clock=self._clock, loop=loop
        )
        work = loop.run_in_executor(self._threads, requests.make, attempt)
        try:
            await asyncio.wait({work}, timeout=TRY_SECONDS)
        finally:
            requests.end()
            self._leftovers[attempt.candidate.delivery_id] = (work, *requests.lookups)
        if not work.done():
            return Outcome(error="no answer in time", latency_seconds=self._clock.monotonic() - started)
        return requests.outcome(was_taken=work.result(), latency_seconds=self._clock.monotonic() - started)

    async def rest(self, attempt: Attempt) -> None:
        leftovers = self._leftovers.pop(attempt.candidate.delivery_id, ())
        if leftovers:
            await asyncio.wait(leftovers)


@dataclass(slots=True, kw_only=True)
class _Requests:
    """The requests of one try, made in a thread and sent by the loop."""

    store_id: StoreId
    egress: Egress
    clock: Clock
    loop: asyncio.AbstractEventLoop
    lookups: list[asyncio.Future[Sequence[str]]] = field(default_factory=list)
    _count: int = 0
    _over: threading.Event = field(default_factory=threading.Event)
    _pending: concurrent.futures.Future[OutboundResponse] | None = None
    _last: OutboundResponse | None = None
    _error: str = ""

    def make(self, attempt: Attempt) -> bool:
        """Have the plug-in of an attempt tell it; returns whether the service took it. Called in a thread."""
        _at_work.requests = self
        try:
            title, *parts = texts(attempt)
            return _tell(_plugin(attempt.url), title, "\n\n".join(part for part in parts if part))
        except Exception as error:  # noqa: BLE001  # a plug-in fails in ways of its own
            self._error = self._error or "it could not be told by Apprise"
            _log.warning("apprise.failed", delivery=attempt.candidate.delivery_id, error=type(error).__name__)
            return False
        finally:
            _at_work.requests = None

    def end(self) -> None:
        """Send no more."""
        self._over.set()
        if self._pending is not None:
            self._pending.cancel()

    def send(self, request: PreparedRequest) -> OutboundResponse | None:
        """Send a request; None if there was no answer. Called in the thread."""
        self._count += 1
        body = request.body.encode() if isinstance(request.body, str) else request.body
        if self._over.is_set() or self._count > _REQUESTS_MAX or not isinstance(body, bytes | None):
            self._error = "it makes too many requests, or ones of a kind that is not sent"
            return None
        outbound = OutboundRequest(
            url=request.url or "",
            method=request.method or "GET",
            headers=_headers(request.headers),
            body=body,
            timeout_seconds=TRY_SECONDS,
            bytes_max=_ANSWER_BYTES_MAX,
        )
        try:
            self.egress.check(self.store_id, outbound.url, with_secrets=True)
            self._pending = asyncio.run_coroutine_threadsafe(self.egress.send(self.store_id, outbound), self.loop)
            if self._over.is_set():
                self._pending.cancel()
            self._last, self._error = self._pending.result(), ""
        except EgressRefused as refused:
            self._error = f"the deployment does not allow it: {refused}"
        except RequestFailed as failed:
            self._error = str(failed)
            if failed.lookup is not None:
                self.lookups.append(failed.lookup)
        except concurrent.futures.CancelledError:
            self._error = "no answer in time"
        return None if self._error else self._last

    def outcome(self, *, was_taken: bool, latency_seconds: float) -> Outcome:
        """Return what came of the try."""
        last = None if self._error else self._last
        status = last.status if last is not None else 0
        # A service may refuse in the text of a good answer.
        was_refused = status in range(200, 300) and not was_taken
        return Outcome(
            status=0 if was_refused else status,
            error=self._error or "the service did not take it" * (was_refused or not status),
            latency_seconds=latency_seconds,
            retry_after_seconds=asked_seconds(last.retry_after, now=self.clock.now()) if last is not None else None,
        )


def _headers(given: Mapping[str, str | bytes]) -> dict[str, str]:
    texts = {name: value.decode("latin-1") if isinstance(value, bytes) else value for name, value in given.items()}
    return {name: value for name, value in texts.items() if name.lower() not in _OURS}


def _plugin(url: str) -> NotifyBase:
    """Return the plug-in that a URL names.

    Raises:
        ValueError: it cannot be used.
    """
    with _loading:
        _lead_to_the_guard()
        import apprise  # noqa: PLC0415  # it takes a second, and most deployments do without

        # A template is a file of this machine, and a plug-in that has time of its own has a thread of its own.
        asset = apprise.AppriseAsset(async_mode=False, allow_templates=False, service_timeout=0, storage_mode="memory")
        found = apprise.Apprise.instantiate(url, asset=asset)
    if found is None or getattr(found, "template", None):
        raise ValueError("it is no URL of the service as Apprise has them, or has a template")
    found.retry = 0
    found.throttle = lambda *_, **__: None  # type: ignore[method-assign]
    return found


def _tell(plugin: NotifyBase, title: str, body: str) -> bool:
    import apprise  # noqa: PLC0415

    told = apprise.Apprise(asset=plugin.asset)
    told.add(plugin)
    return bool(told.notify(body=body, title=title, body_format=apprise.NotifyFormat.TEXT))


def _lead_to_the_guard() -> None:
    """Have every request of this process that is made with `requests` be one of a try, or none."""
    import requests  # noqa: PLC0415

    requests.Session.get_adapter = _guarded  # type: ignore[method-assign, assignment]
    # Passwords of the machine are for nobody's services.
    requests.sessions.get_netrc_auth = lambda *_, **__: None  # type: ignore[attr-defined]
    logger = logging.getLogger("apprise")
    logger.disabled = True  # It quotes URLs.


def _guarded(_session: object, url: object) -> Any:  # noqa: ARG001  # called by its name
    import requests  # noqa: PLC0415

    class Guarded(requests.adapters.BaseAdapter):
        """Sends requests as the thread may that makes them."""

        def send(self, request: PreparedRequest, *_: object, **__: object) -> Response:
            allowed: _Requests | None = getattr(_at_work, "requests", None)
            answered = allowed.send(request) if allowed is not None else None
            if answered is None:
                raise requests.ConnectionError("not sent, or not answered")
            response = requests.Response()
            response.status_code = answered.status
            response.url = answered.url
            response.request = request
            response.headers.update({"content-type": answered.content_type, "retry-after": answered.retry_after})
            response.encoding = requests.utils.get_encoding_from_headers(response.headers)
            response._content = answered.body  # noqa: SLF001  # as requests reads it
            return response

        def close(self) -> None:
            """Nothing is kept."""

    return Guarded()
