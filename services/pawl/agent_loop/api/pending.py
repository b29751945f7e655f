"""The calls and runs that wait for people, as a stream: first all of them, then what comes, changes and goes.

Calls wait for people, and so do runs that have used up their tokens. The ledger
is asked again when it says that something has changed, and now and then without
that, so a stream is right after whatever was missed. It costs at most one page a
second, once for all streams that show the same: of a large inbox it keeps no more
in memory, and is that many seconds behind.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Hashable
from contextlib import aclosing
from typing import Final, TypeAlias

from pawl.agent.v1.agent_pb2 import WatchPendingResponse
from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.api.live import BusEvents
from pawl.agent_loop.api.looks import Looks, View
from pawl.chassis.identity.auth import Principal
from pawl.chassis.identity.roles import APPROVERS
from pawl.chassis.process.clock import Clock
from pawl.errors import PermissionDenied
from pawl.event.v1.call_pb2 import Call
from pawl.event.v1.run_pb2 import Run
from pawl.job.v1.ledger_pb2 import ListPendingCallsRequest, ListPendingCallsResponse

POLL_SECONDS: Final = 1.0
ITEMS_MAX: Final = 1000
"""Most calls and runs that a stream tells of: the oldest calls, then the oldest runs."""
_PART_ITEMS_MAX: Final = 4
"""So many runs and calls of the largest size that arguments can have fit into one message."""

Item: TypeAlias = Call | Run
"""A call that waits for someone, or a run that waits for tokens."""
Known: TypeAlias = dict[tuple[bool, str], Hashable]
"""What a client was sent, by whether it is a run, and id: only what can change, because they are large."""


class Pending:
    """Lists and streams what waits for people."""

    def __init__(self, *, ledger: PublicLedger, clock: Clock, poll_seconds: float = POLL_SECONDS) -> None:
        self._ledger = ledger
        self._clock = clock
        self._looks = Looks(ledger=ledger, clock=clock, poll_seconds=poll_seconds)

    async def follow(self, live: BusEvents) -> None:
        """Look only when `live` says that something has changed, or may have failed to say so; never returns."""
        await self._looks.follow(live)

    async def page(self, caller: Principal, wanted: ListPendingCallsRequest) -> ListPendingCallsResponse:
        """Return a page of what waits, oldest first.

        Raises:
            PermissionDenied: the whole store is for approvers.
            InvalidPageToken
        """
        _check_may_see(caller, wanted)
        return await self._ledger.list_pending(caller, wanted)

    async def watch(
        self, caller: Principal, wanted: ListPendingCallsRequest, *, silence_seconds: float
    ) -> AsyncGenerator[WatchPendingResponse, None]:
        """Yield what waits or has changed, and what waits no more, without end; an empty part after so much silence.

        Raises:
            PermissionDenied: the whole store is for approvers.
            DependencyUnavailable: the ledger cannot be read now.
        """
        _check_may_see(caller, wanted)
        known: Known = {}
        is_first = True
        spoke_at = self._clock.monotonic()
        async with self._looks.open(caller, wanted) as view:
            while True:
                version = view.version
                async with aclosing(_news(view, known, is_first=is_first)) as news:
                    async for part in news:
                        if (
                            part.calls
                            or part.runs
                            or part.complete
                            or self._clock.monotonic() - spoke_at >= silence_seconds
                        ):
                            yield part
                            spoke_at = self._clock.monotonic()
                is_first = False
                await view.rest(version)


async def _news(view: View, known: Known, *, is_first: bool) -> AsyncGenerator[WatchPendingResponse, None]:
    """Yield what is not as `known` has it, and bring that up to date.

    In parts of a size that can be sent, the last one complete; an empty one, which is not, if there is no news.
    """
    seen: Known = {}
    part, truncated = WatchPendingResponse(), False
    async with aclosing(_items(view, paced=not is_first)) as items:
        async for item in items:
            if len(seen) == ITEMS_MAX:
                truncated = True
                break
            key, shown = _key(item), _shown(item)
            seen[key] = shown
            if known.get(key) == shown:
                continue
            if len(part.calls) + len(part.runs) == _PART_ITEMS_MAX:
                yield part
                part = WatchPendingResponse()
            if isinstance(item, Run):
                part.runs.append(item)
            else:
                part.calls.append(item)
    gone = known.keys() - seen.keys()
    known.clear()
    known |= seen
    part.gone_call_ids.extend(name for is_run, name in gone if not is_run)
    part.gone_run_ids.extend(name for is_run, name in gone if is_run)
    part.complete, part.truncated = bool(part.calls or part.runs or gone or is_first), truncated
    yield part


async def _items(view: View, *, paced: bool) -> AsyncGenerator[Item, None]:
    """Yield what waits, page by page; `paced`, with a pause between the pages."""
    token = ""
    while True:
        page = await view.page(token)
        for call in page.calls:
            yield call
        for run in page.runs:
            yield run
        token = page.next_page_token
        if not token:
            return
        if paced:
            await view.pause()


def _check_may_see(caller: Principal, wanted: ListPendingCallsRequest) -> None:
    """Return if a caller may see what it asks for.

    Raises:
        PermissionDenied: it is the whole store, which is for approvers.
    """
    if wanted.of_all_users and not caller.roles & APPROVERS:
        raise PermissionDenied("this needs the role approver or admin")


def _key(item: Item) -> tuple[bool, str]:
    return isinstance(item, Run), item.run_id if isinstance(item, Run) else item.call_id


def _shown(item: Item) -> Hashable:
    """Return what of a thing that waits can change; a lease that is renewed is no change."""
    if isinstance(item, Run):
        return item.token_budget, item.usage.input_tokens + item.usage.output_tokens
    return (
        item.state,
        item.offer.client_id,
        item.offer.offer_epoch,
        item.approval.digest,
        len(item.approval.approvals),
        item.deadline_time.ToNanoseconds(),
    )
