"""Leases calls to the front end of a client session."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final

from pawl.agent.v1.session_pb2 import ClientTool, Offer, OfferRevoked, SessionResponse
from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.api.values import ClientSession
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CallId, RunId
from pawl.chassis.process import logs
from pawl.chassis.process.clock import Clock
from pawl.chassis.process.tasks import within
from pawl.chassis.rpc.translate import seconds
from pawl.errors import DeadlineExceeded, PawlError, Unavailable
from pawl.event.v1.call_pb2 import CALL_STATE_OFFERED, Call
from pawl.event.v1.run_pb2 import OwnTools, Run
from pawl.values import CallState, CommandOutcome

# Wait after a ledger error.
RETRY_SECONDS: Final = 1.0

_EXPIRY_MARGIN_SECONDS: Final = 0.5

_log = logs.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class _Candidate:
    """An offered call that the client has not leased. Its lease is requested again at `retry_at`."""

    call: Call
    retry_at: float = 0.0


class Offers:
    """The offered calls that one session tracks, including those leased to its client.

    At most `calls_max` calls of attached runs are leased at a time. The client must have supplied their tools or
    declared that it can run them. `show` sends a frame. `replaced` is called when the client has opened a newer
    session.

    `run` needs its own task. Other tasks call the other methods.
    """

    def __init__(
        self,
        *,
        ledger: PublicLedger,
        clock: Clock,
        caller: Principal,
        client: ClientSession,
        tools: Iterable[ClientTool],
        calls_max: int,
        lease_seconds: float,
        show: Callable[[SessionResponse], Awaitable[None]],
        replaced: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._clock = clock
        self._caller = caller
        self._client = client
        self._tools = {tool.name: frozenset(tool.versions) for tool in tools}
        self._calls_max = calls_max
        self._lease_seconds = lease_seconds
        self._show = show
        self._replaced = replaced
        self._runs: dict[str, OwnTools] = {}
        self._candidates: dict[str, _Candidate] = {}
        self._held: dict[str, Call] = {}
        self._leased: dict[str, Call] = {}
        self._submitting: set[str] = set()
        self._revoked: list[OfferRevoked] = []
        self._due = asyncio.Event()

    def adopt(self, run: Run) -> None:
        """Start leasing the calls that an attached run offers."""
        self._runs[run.run_id] = run.own_tools
        for call in run.pending_calls:
            self.see(call)

    def see(self, call: Call) -> None:
        if not self._can_run(call):
            return
        held = self._held.get(call.call_id)
        if call.state != CALL_STATE_OFFERED:
            self._candidates.pop(call.call_id, None)
            self._leased.pop(call.call_id, None)
            self._revoke(call.call_id, f"the call is {CallState(call.state).name.lower().replace('_', ' ')}")
        elif held is None:
            self._candidates[call.call_id] = _Candidate(call=call, retry_at=self._retry_at(call))
        elif call.offer.offer_epoch > held.offer.offer_epoch or (
            call.offer.offer_epoch == held.offer.offer_epoch and call.offer.client_id != self._client.client_id
        ):
            # An event with an older epoch is a replay.
            self._lose(call)
        self._due.set()

    def session_of(self, call_id: str) -> ClientSession:
        """Return this session if it leased the call. Otherwise, return its client without a session."""
        return self._client if call_id in self._leased else ClientSession(client_id=self._client.client_id)

    def submitting(self, call_id: str) -> None:
        """Record that the client is submitting its own result, so that no revocation is sent when the call ends."""
        self._submitting.add(call_id)

    def submitted(self, call_id: str, offer_epoch: int, outcome: int | None) -> None:
        """Record the outcome of a result passed to `submitting`. None means that the outcome is unknown.

        The client keeps the lease if the outcome is unknown, if the result was refused, or if the result was sent under
        an earlier lease.
        """
        self._submitting.discard(call_id)
        if outcome is None or outcome == CommandOutcome.REFUSED:
            return
        held = self._held.get(call_id)
        if outcome == CommandOutcome.WRONG_HOLDER and (held is None or held.offer.offer_epoch > offer_epoch):
            # The result is outdated: the client has, or will get, another lease.
            return
        self._held.pop(call_id, None)
        self._candidates.pop(call_id, None)
        if outcome == CommandOutcome.WRONG_HOLDER and held is not None:
            # The next lease request returns the current holder.
            self._candidates[call_id] = _Candidate(call=held)
        self._due.set()

    async def leave(self, run_id: str, *, release: bool) -> None:
        """Ignore the run's offers from now on. With `release`, also release its leases."""
        self._runs.pop(run_id, None)
        self._candidates = {key: each for key, each in self._candidates.items() if each.call.run_id != run_id}
        self._leased = {key: call for key, call in self._leased.items() if call.run_id != run_id}
        held = [call.call_id for call in self._held.values() if call.run_id == run_id]
        for call_id in held:
            del self._held[call_id]
        if held and release:
            await self._release(run_id)
        self._due.set()

    async def renew(self) -> None:
        """Renew the client's leases, and notify the client of lost leases."""
        before = set(self._held)
        if not before:
            return
        try:
            calls = await self._ledger.renew_offers(self._caller, self._client, self._lease_seconds)
        except (Unavailable, DeadlineExceeded) as error:
            _log.warning("offers.not_renewed", client=self._client.client_id, error=error.message)
            return
        for run_id in {call.run_id for call in calls} - self._runs.keys():
            # The session has left the run, but releasing the lease failed.
            await self._release(run_id)
        for call_id in before - {call.call_id for call in calls}:
            if (held := self._held.get(call_id)) is not None:
                self._lose(held)
        self._due.set()

    async def release_all(self) -> None:
        if self._held:
            await self._release("")

    async def run(self) -> None:
        while True:
            self._due.clear()
            while self._revoked:
                await self._show(SessionResponse(offer_revoked=self._revoked.pop(0)))
            candidate = self._next()
            if candidate is not None:
                await self._take(candidate)
            elif not self._revoked:
                await self._wait()

    def _can_run(self, call: Call) -> bool:
        if call.run_id not in self._runs:
            return False
        own = self._runs[call.run_id]
        if own.client_id and call.tool_name in own.names:
            return own.client_id == self._client.client_id
        versions = self._tools.get(call.tool_name)
        return versions is not None and (not versions or call.tool_version in versions)

    def _revoke(self, call_id: str, message: str) -> None:
        held = self._held.pop(call_id, None)
        if held is not None and call_id not in self._submitting:
            self._revoked.append(OfferRevoked(run_id=held.run_id, call_id=call_id, message=message))

    def _lose(self, call: Call) -> None:
        self._revoke(call.call_id, "the lease was lost")
        self._candidates[call.call_id] = _Candidate(call=call, retry_at=self._retry_at(call))

    def _retry_at(self, call: Call) -> float:
        if call.offer.client_id in {"", self._client.client_id}:
            return 0.0
        return seconds(call.offer.expire_time) + _EXPIRY_MARGIN_SECONDS

    def _next(self) -> _Candidate | None:
        """Return the first call whose lease can be requested now.

        Return None if there is no such call, or if the client has no free slot.
        """
        if len(self._held) >= self._calls_max:
            return None
        now = self._clock.now()
        return next((each for each in self._candidates.values() if each.retry_at <= now), None)

    async def _take(self, candidate: _Candidate) -> None:
        call = candidate.call
        candidate.retry_at = self._clock.now() + self._lease_seconds / 3
        try:
            answer = await self._ledger.lease_offer(
                self._caller,
                RunId(call.run_id),
                CallId(call.call_id),
                client=self._client,
                lease_seconds=self._lease_seconds,
            )
        except (Unavailable, DeadlineExceeded):
            candidate.retry_at = self._clock.now() + RETRY_SECONDS
            return
        except PawlError as error:
            _log.warning("offers.refused", call=call.call_id, reason=error.reason)
            self._candidates.pop(call.call_id, None)
            return
        now = answer.call
        if answer.replaced:
            self._candidates.pop(call.call_id, None)
            self._replaced()
        elif now.state != CALL_STATE_OFFERED:
            self._candidates.pop(call.call_id, None)
        elif not answer.granted:
            candidate.call = now
            candidate.retry_at = max(candidate.retry_at, self._retry_at(now))
        elif call.run_id not in self._runs:
            await self._release(call.run_id)
        elif self._candidates.pop(call.call_id, None) is not None:
            # Skip it if an event has shown in the meantime that the call was settled.
            self._held[call.call_id] = self._leased[call.call_id] = now
            offer = Offer(call=now, offer_epoch=now.offer.offer_epoch, expire_time=now.offer.expire_time)
            await self._show(SessionResponse(offer=offer))

    async def _release(self, run_id: str) -> None:
        try:
            await self._ledger.release_offers(self._caller, self._client, RunId(run_id))
        except (Unavailable, DeadlineExceeded) as error:
            # The leases will expire on their own, just later.
            _log.warning("offers.not_released", client=self._client.client_id, error=error.message)

    async def _wait(self) -> None:
        later = [each.retry_at for each in self._candidates.values()] if len(self._held) < self._calls_max else []
        seconds = max(min(later) - self._clock.now(), 0.0) if later else None
        await within(seconds, self._due.wait())
