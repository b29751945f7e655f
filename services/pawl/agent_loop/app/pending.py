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

import msgspec

from pawl.agent_loop.adapters.public_ledger import PublicLedger
from pawl.agent_loop.app import approvers
from pawl.agent_loop.app.looks import Item, Looks, View
from pawl.agent_loop.app.public_ports import LiveEvents
from pawl.agent_loop.app.public_values import CallView, Page, PageAsked, PendingFilter, RunView
from pawl.chassis.auth import Principal
from pawl.chassis.clock import Clock
from pawl.chassis.ids import CallId, RunId

POLL_SECONDS: Final = 1.0
ITEMS_MAX: Final = 1000
"""Most calls and runs that a stream tells of: the oldest calls, then the oldest runs."""
_PART_ITEMS_MAX: Final = 4
"""So many runs and calls of the largest size that arguments can have fit into one message."""

Known: TypeAlias = dict[tuple[type[Item], str], Hashable]
"""The things that a client was told of, by kind and id: only what can change of them, because they are large."""


class PendingPart(msgspec.Struct, frozen=True, kw_only=True):
    """The news: what waits or has changed, and the ids of what waits no more. Empty to show life."""

    items: tuple[Item, ...] = ()
    gone_call_ids: tuple[CallId, ...] = ()
    gone_run_ids: tuple[RunId, ...] = ()
    complete: bool = False
    truncated: bool = False


class Pending:
    """Lists and streams what waits for people."""

    def __init__(self, *, ledger: PublicLedger, clock: Clock, poll_seconds: float = POLL_SECONDS) -> None:
        self._ledger = ledger
        self._clock = clock
        self._looks = Looks(ledger=ledger, clock=clock, poll_seconds=poll_seconds)

    async def follow(self, live: LiveEvents) -> None:
        """Look only when `live` says that something has changed, or may have failed to say so; never returns."""
        await self._looks.follow(live)

    async def page(self, caller: Principal, wanted: PendingFilter, page: PageAsked) -> Page[Item]:
        """Return a page of what waits, oldest first.

        Raises:
            PermissionDenied: the whole store is for approvers.
            InvalidPageToken
        """
        _check_may_see(caller, wanted)
        return await self._ledger.list_pending(caller, wanted, page)

    async def watch(
        self, caller: Principal, wanted: PendingFilter, *, silence_seconds: float
    ) -> AsyncGenerator[PendingPart, None]:
        """Yield parts without end; an empty one after so much silence.

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
                        if part.items or part.complete or self._clock.monotonic() - spoke_at >= silence_seconds:
                            yield part
                            spoke_at = self._clock.monotonic()
                is_first = False
                await view.rest(version)


async def _news(view: View, known: Known, *, is_first: bool) -> AsyncGenerator[PendingPart, None]:
    """Yield what is not as `known` has it, and bring that up to date.

    In parts of a size that can be sent, the last one complete; an empty one, which is not, if there is no news.
    """
    seen: Known = {}
    part: list[Item] = []
    truncated = False
    async with aclosing(_items(view, paced=not is_first)) as items:
        async for item in items:
            if len(seen) == ITEMS_MAX:
                truncated = True
                break
            key, shown = _key(item), _shown(item)
            seen[key] = shown
            if known.get(key) == shown:
                continue
            if len(part) == _PART_ITEMS_MAX:
                yield PendingPart(items=tuple(part))
                part.clear()
            part.append(item)
    gone = known.keys() - seen.keys()
    known.clear()
    known |= seen
    yield PendingPart(
        items=tuple(part),
        gone_call_ids=tuple(CallId(name) for kind, name in gone if kind is CallView),
        gone_run_ids=tuple(RunId(name) for kind, name in gone if kind is RunView),
        complete=bool(part or gone or is_first),
        truncated=truncated,
    )


async def _items(view: View, *, paced: bool) -> AsyncGenerator[Item, None]:
    """Yield what waits, page by page; `paced`, with a pause between the pages."""
    token = ""
    while True:
        page = await view.page(token)
        for item in page.items:
            yield item
        token = page.next_page_token
        if not token:
            return
        if paced:
            await view.pause()


def _check_may_see(caller: Principal, wanted: PendingFilter) -> None:
    """Return if a caller may see what it asks for.

    Raises:
        PermissionDenied: it is the whole store, which is for approvers.
    """
    if wanted.of_store:
        approvers.require_approver(caller)


def _key(item: Item) -> tuple[type[Item], str]:
    return type(item), item.call_id if isinstance(item, CallView) else item.run_id


def _shown(item: Item) -> Hashable:
    """Return what of a thing that waits can change; a lease that is renewed is no change."""
    if isinstance(item, RunView):
        return item.token_budget, item.tokens_used
    return (
        item.state,
        item.offer.client_id,
        item.offer.offer_epoch,
        item.approval_digest,
        item.approval_count,
        item.deadline_time,
    )
