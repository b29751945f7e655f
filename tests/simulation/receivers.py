"""Receivers of webhooks: some answer, some fail, hang, answer too late, or say that they are gone."""

from __future__ import annotations

import asyncio
import base64
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

from pawl.chassis.egress_requests import OutboundRequest, OutboundResponse, RequestFailed
from pawl.chassis.ids import StoreId
from pawl.chassis.tasks import shield
from tests.simulation.chance import Chance
from tests.simulation.history import History, Received
from tests.simulation.process import Process

_WAY_SECONDS = 0.005
_GONE_AFTER = 2
_HANGS_SECONDS = 40.0
KINDS = ("well", "well", "well", "failing", "gone", "busy")
"""How receivers are: `failing` and `gone` never get well, all others are once all is calm."""


@dataclass
class Receivers:
    """All receivers there are, by URL. They are no process of Pawl, and outlive all of them."""

    chance: Chance
    history: History
    kinds: dict[str, str] = field(default_factory=dict)
    secrets: list[bytes] = field(default_factory=list)
    """Those that channels were ever given."""
    process: Process = field(default_factory=lambda: Process("receivers"))

    async def receive(self, request: OutboundRequest, *, hangs: bool, fails: bool) -> int:
        """Take a request, and return the status of the answer."""
        if hangs:
            draw = self.chance.stream("hang", len(self.history.received))
            await asyncio.sleep(_HANGS_SECONDS * draw.random())
            fails = fails or draw.random() < 0.5
        url = request.url
        kind = self.kinds[url]
        before = sum(each.url == url for each in self.history.received)
        status = 500 if kind == "failing" or fails else 200
        if kind == "gone" and before >= _GONE_AFTER:
            status = 410
        if kind == "busy" and not self.chance.calm:
            status = 503
        headers, body = request.headers, request.body or b""
        received = Received(
            time=asyncio.get_running_loop().time(),
            url=url,
            webhook_id=headers["webhook-id"],
            body=body,
            status=status,
            is_signed=self._is_signed(headers, body),
        )
        self.history.received.append(received)
        self.history.tell(f"received {received.webhook_id} at {url}, answered {status}")
        return status

    def _is_signed(self, headers: Mapping[str, str], body: bytes) -> bool:
        """Return whether one of the secrets has signed a request, by the specification."""
        signed = headers["webhook-signature"].split()
        return any(
            _signature(secret, headers["webhook-id"], headers["webhook-timestamp"], body) in signed
            for secret in self.secrets
        )


def _signature(secret: bytes, webhook_id: str, timestamp: str, body: bytes) -> str:
    digest = hmac.digest(secret, f"{webhook_id}.{timestamp}.".encode() + body, "sha256")
    return f"v1,{base64.b64encode(digest).decode()}"


class WayOut:
    """See `Egress`: the way of one process to the receivers, on which requests and answers get lost."""

    def __init__(self, receivers: Receivers, process: Process) -> None:
        self._receivers = receivers
        self._draw = receivers.chance.stream("way out", process.name)

    def check(self, store_id: StoreId, url: str, *, with_secrets: bool = False) -> None:
        """Allow everything."""

    async def send(self, store_id: StoreId, request: OutboundRequest) -> OutboundResponse:
        draw, strikes = self._draw, self._receivers.chance.strikes
        is_refused = strikes(draw, "receiver unreachable", 0.05)
        hangs = strikes(draw, "receiver hangs", 0.1)
        fails = strikes(draw, "receiver fails", 0.05)
        is_lost = strikes(draw, "answer of a receiver lost", 0.05)
        await asyncio.sleep(_WAY_SECONDS * (0.5 + draw.random()))
        if is_refused:
            raise RequestFailed("the connection was refused", was_sent=False)
        work = self._receivers.process.spawn(self._receivers.receive(request, hangs=hangs, fails=fails))
        try:
            async with asyncio.timeout(request.timeout_seconds):
                status = await shield(work)
        except TimeoutError:
            raise RequestFailed("no answer came in time", was_sent=True) from None
        if is_lost:
            raise RequestFailed("the connection broke", was_sent=True)
        return OutboundResponse(
            status=status, url=request.url, content_type="", body=b"", is_cut=False, retry_after="7"
        )
