"""What waits for people, as a stream: all of it first, then what comes, changes and goes.

The ledger is asked again and again, because what makes a call wait, or not, may
happen in any run of the store. So a stream is right after whatever was missed,
and costs one read a second.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Hashable, Iterable
from dataclasses import dataclass
from typing import Final

from services.agent_loop.app import approvers
from services.agent_loop.app.public_ports import PublicLedger
from services.agent_loop.app.public_values import Caller, CallView, Page, PendingFilter
from services.chassis.clock import Clock

POLL_SECONDS: Final = 1.0
CALLS_MAX: Final = 1000
"""Most calls that a stream tells of: the oldest."""
_PAGE_SIZE: Final = 200
_PART_CALLS_MAX: Final = 4
"""So many calls of the largest size that arguments can have fit into one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingPart:
    """What is new: calls that wait or have changed, ids of those that wait no more. Empty to show life."""

    calls: tuple[CallView, ...] = ()
    gone: tuple[str, ...] = ()
    complete: bool = False
    truncated: bool = False


class Pending:
    """Lists and streams what waits for people."""

    def __init__(self, *, ledger: PublicLedger, clock: Clock, poll_seconds: float = POLL_SECONDS) -> None:
        self._ledger = ledger
        self._clock = clock
        self._poll_seconds = poll_seconds

    async def page(self, caller: Caller, wanted: PendingFilter, *, page_size: int, page_token: str) -> Page[CallView]:
        """Return a page of what waits, oldest first.

        Raises:
            PermissionDenied: the whole store is for approvers.
            InvalidPageToken
        """
        if wanted.of_store:
            approvers.require_approver(caller)
        return await self._ledger.list_pending(caller, wanted, page_size=page_size, page_token=page_token)

    async def watch(
        self, caller: Caller, wanted: PendingFilter, *, silence_seconds: float
    ) -> AsyncGenerator[PendingPart, None]:
        """Yield parts without end; an empty one after so much silence.

        Raises:
            PermissionDenied: the whole store is for approvers.
            DependencyUnavailable: the ledger cannot be read now.
        """
        known: dict[str, Hashable] | None = None
        spoke_at = self._clock.monotonic()
        while True:
            calls, truncated = await self._read(caller, wanted)
            shown = {call.call_id: _shown(call) for call in calls}
            before = known or {}
            changed = [call for call in calls if before.get(call.call_id) != shown[call.call_id]]
            gone = tuple(call_id for call_id in before if call_id not in shown)
            said = False
            for part in _parts(changed, gone, first=known is None, truncated=truncated):
                said = True
                yield part
            known = shown
            now = self._clock.monotonic()
            if said:
                spoke_at = now
            elif now - spoke_at >= silence_seconds:
                spoke_at = now
                yield PendingPart(truncated=truncated)
            await self._clock.sleep(self._poll_seconds)

    async def _read(self, caller: Caller, wanted: PendingFilter) -> tuple[list[CallView], bool]:
        calls: list[CallView] = []
        token = ""
        while True:
            page = await self.page(caller, wanted, page_size=_PAGE_SIZE, page_token=token)
            calls += page.items
            token = page.next_page_token
            if not token or len(calls) >= CALLS_MAX:
                return calls[:CALLS_MAX], bool(token) or len(calls) > CALLS_MAX


def _shown(call: CallView) -> Hashable:
    """Return what of a waiting call can change; a lease that is renewed is no change."""
    return (
        call.state,
        call.holder_client_id,
        call.offer_epoch,
        call.approval_digest,
        call.approval_count,
        call.deadline_time,
    )


def _parts(calls: list[CallView], gone: tuple[str, ...], *, first: bool, truncated: bool) -> Iterable[PendingPart]:
    """Yield what there is to say in parts of a size that can be sent; the first time at least one, complete."""
    rest = calls[_PART_CALLS_MAX:]
    part = calls[:_PART_CALLS_MAX]
    while rest:
        yield PendingPart(calls=tuple(part))
        part, rest = rest[:_PART_CALLS_MAX], rest[_PART_CALLS_MAX:]
    if part or gone or first:
        yield PendingPart(calls=tuple(part), gone=gone, complete=True, truncated=truncated)
