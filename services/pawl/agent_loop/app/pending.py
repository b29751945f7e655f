"""The calls and runs that wait for people, as a stream: first all of them, then what comes, changes and goes.

Calls wait for people, and so do runs that have used up their tokens. The ledger
is asked again and again, because what makes them wait, or not, may happen in any
run of the store. So a stream is right after whatever was missed,
and costs one read a second.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Hashable, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from pawl.agent_loop.app import approvers
from pawl.agent_loop.app.public_ports import PublicLedger
from pawl.agent_loop.app.public_values import Caller, CallView, Page, PendingFilter, RunView
from pawl.chassis.clock import Clock

POLL_SECONDS: Final = 1.0
ITEMS_MAX: Final = 1000
"""Most calls and runs that a stream tells of: the oldest calls, then the oldest runs."""
_PAGE_SIZE: Final = 200
_PART_ITEMS_MAX: Final = 4
"""So many runs and calls of the largest size that arguments can have fit into one message."""


Item: TypeAlias = CallView | RunView
"""A call that waits for someone, or a run that waits for tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingPart:
    """The news: what waits or has changed, and what waits no more, as it was. Empty to show life."""

    items: tuple[Item, ...] = ()
    gone: tuple[Item, ...] = ()
    complete: bool = False
    truncated: bool = False


class Pending:
    """Lists and streams what waits for people."""

    def __init__(self, *, ledger: PublicLedger, clock: Clock, poll_seconds: float = POLL_SECONDS) -> None:
        self._ledger = ledger
        self._clock = clock
        self._poll_seconds = poll_seconds

    async def page(self, caller: Caller, wanted: PendingFilter, *, page_size: int, page_token: str) -> Page[Item]:
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
        known: dict[str, Item] | None = None
        spoke_at = self._clock.monotonic()
        while True:
            items, truncated = await self._read(caller, wanted)
            now_waiting = {_id(item): item for item in items}
            before = known or {}
            changed = [item for name, item in now_waiting.items() if not _is_same(before.get(name), item)]
            gone = tuple(item for name, item in before.items() if name not in now_waiting)
            said = False
            for part in _parts(changed, gone, first=known is None, truncated=truncated):
                said = True
                yield part
            known = now_waiting
            now = self._clock.monotonic()
            if said:
                spoke_at = now
            elif now - spoke_at >= silence_seconds:
                spoke_at = now
                yield PendingPart(truncated=truncated)
            await self._clock.sleep(self._poll_seconds)

    async def _read(self, caller: Caller, wanted: PendingFilter) -> tuple[list[Item], bool]:
        items: list[Item] = []
        token = ""
        while True:
            page = await self.page(caller, wanted, page_size=_PAGE_SIZE, page_token=token)
            items += page.items
            token = page.next_page_token
            if not token or len(items) >= ITEMS_MAX:
                return items[:ITEMS_MAX], bool(token) or len(items) > ITEMS_MAX


def _id(item: Item) -> str:
    return item.call_id if isinstance(item, CallView) else item.run_id


def _is_same(before: Item | None, item: Item) -> bool:
    return before is not None and _shown(before) == _shown(item)


def _shown(item: Item) -> Hashable:
    """Return what of a thing that waits can change; a lease that is renewed is no change."""
    if isinstance(item, RunView):
        return item.token_budget, item.tokens_used
    return (
        item.state,
        item.holder_client_id,
        item.offer_epoch,
        item.approval_digest,
        item.approval_count,
        item.deadline_time,
    )


def _parts(items: list[Item], gone: tuple[Item, ...], *, first: bool, truncated: bool) -> Iterable[PendingPart]:
    """Yield what there is to say in parts of a size that can be sent; the first time at least one, complete."""
    rest = items[_PART_ITEMS_MAX:]
    part = items[:_PART_ITEMS_MAX]
    while rest:
        yield PendingPart(items=tuple(part))
        part, rest = rest[:_PART_ITEMS_MAX], rest[_PART_ITEMS_MAX:]
    if part or gone or first:
        yield PendingPart(items=tuple(part), gone=gone, complete=True, truncated=truncated)
