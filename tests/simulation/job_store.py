"""job-store over rows in memory, and a channel to it without a wire."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from pawl.chassis.ids import IdSource
from pawl.errors import PawlError
from pawl.job_store.app.ports import Announcer, Limits, Ports
from pawl.values import Usage
from tests.fakes.virtual_time import VirtualClock
from tests.simulation.conversations import MemoryConversations
from tests.simulation.reads import MemoryAttentionRepository, MemoryLeases, MemoryReads
from tests.simulation.store import Database, MemoryJournal, MemoryOfferRepository


def ports_on(database: Database, limits: Limits, *, ids: IdSource, announcer: Announcer) -> Ports:
    """Return the outside of a job store whose database is in memory."""
    leases = MemoryLeases(database, limits.places, crashes_max=limits.crashes_max)
    return Ports(
        journal=MemoryJournal(database, ids),
        leases=leases,
        due_times=leases,
        reads=MemoryReads(database),
        conversations=MemoryConversations(database),
        offer_repository=MemoryOfferRepository(database),
        attention_repository=MemoryAttentionRepository(database),
        announcer=announcer,
        meter=Unmetered(),
        clock=VirtualClock(),
    )


async def answer(servicer: object, method: str, request: Any) -> list[Any]:
    """Serve a copy of a request, which is taken apart; return all responses."""
    served = getattr(servicer, method)(type(request).FromString(request.SerializeToString()), None)
    return [part async for part in served] if isinstance(served, AsyncIterator) else [await served]


class Channel:
    """A channel as generated stubs use it. `call` gets a method and a request, and returns all responses."""

    def __init__(self, call: Callable[[str, Any], Awaitable[list[Any]]]) -> None:
        self._call = call

    def unary_unary(self, path: str, **_: object) -> Callable[..., Any]:
        async def call(request: Any) -> Any:
            (response,) = await self._responses(path, request)
            return response

        return call

    def unary_stream(self, path: str, **_: object) -> Callable[..., Any]:
        async def call(request: Any, timeout: float | None = None) -> AsyncIterator[Any]:
            for response in await self._responses(path, request):
                yield response

        return call

    async def _responses(self, path: str, request: Any) -> list[Any]:
        responses = await self._call(path.rpartition("/")[2], request)
        return [type(response).FromString(response.SerializeToString()) for response in responses]


class Unmetered:
    """All meters; nobody looks."""

    def group_written(self, *, operations: int, seconds: float) -> None: ...

    def refused(self, error: PawlError) -> None: ...

    def quarantined(self, runs: int) -> None: ...

    def relayed(self, events: int) -> None: ...

    def schedule_fired(self, outcome: str, delay_seconds: float) -> None: ...

    def trigger_fired(self, outcome: str) -> None: ...

    def mailbox_unreachable(self) -> None: ...

    def webhook_refused(self, error: PawlError) -> None: ...

    def ledger_counted(self, counts: Mapping[str, float]) -> None: ...

    def model_called(self, outcome: str, usage: Usage) -> None: ...

    def call_executed(self, outcome: str) -> None: ...

    def runs_held(self, count: int) -> None: ...

    def run_left(self, how: str) -> None: ...
