"""An in-memory job-store and a channel to it without a network."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from google.protobuf.descriptor_pool import Default
from google.protobuf.message_factory import GetMessageClass

from pawl.chassis.identity import auth
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import IdSource
from pawl.chassis.process.metrics import Metrics
from pawl.job_store.ledger.cache import RunCache
from pawl.job_store.ledger.metrics import PrometheusMeter
from pawl.job_store.ledger.ports import Announcer, Limits, Ports
from pawl.values import Usage
from tests.fakes.virtual_time import VirtualClock
from tests.simulation.conversations import MemoryConversations
from tests.simulation.reads import MemoryAttentionRepository, MemoryLeases
from tests.simulation.steps import CachingReads, StepJournal
from tests.simulation.store import Database, MemoryOfferRepository


def ports_on(database: Database, limits: Limits, *, ids: IdSource, announcer: Announcer) -> Ports:
    clock = VirtualClock()
    cache = RunCache(clock.monotonic)
    return Ports(
        journal=StepJournal(database, ids, cache),
        leases=MemoryLeases(database, limits.slots, crashes_max=limits.crashes_max),
        reads=CachingReads(database, cache),
        conversations=MemoryConversations(database),
        offer_repository=MemoryOfferRepository(database),
        attention_repository=MemoryAttentionRepository(database),
        announcer=announcer,
        meter=Unmetered(),
        clock=clock,
    )


async def answer(servicers: Sequence[object], method: str, request: Any, user: Principal | None = None) -> list[Any]:
    """Serve a copy of the request by the first servicer that has the method, and return all responses.

    A forwarded call acts for `user`.
    """
    servicer = next(each for each in servicers if method in vars(type(each)))
    if user is not None:
        auth.set_principal(user)
    served = getattr(servicer, method)(type(request).FromString(request.SerializeToString()), None)
    return [part async for part in served] if isinstance(served, AsyncIterator) else [await served]


class Channel:
    """A channel for generated stubs. `call` maps a method, a request and an optional user to all responses."""

    def __init__(self, call: Callable[[str, Any, Principal | None], Awaitable[list[Any]]]) -> None:
        self._call = call

    def unary_unary(self, path: str, **_: object) -> Callable[..., Any]:
        async def call(request: Any, *, metadata: Sequence[tuple[str, bytes]] = ()) -> Any:
            if not isinstance(request, bytes):
                (response,) = await self._responses(path, request, auth.named_user(metadata))
                return response
            service, name = path[1:].split("/")
            method = Default().FindServiceByName(service).methods_by_name[name]
            parsed = GetMessageClass(method.input_type).FromString(request)
            (response,) = await self._responses(path, parsed, auth.named_user(metadata))
            return response.SerializeToString()

        return call

    def unary_stream(self, path: str, **_: object) -> Callable[..., Any]:
        async def call(request: Any, timeout: float | None = None) -> AsyncIterator[Any]:
            for response in await self._responses(path, request, None):
                yield response

        return call

    def stream_stream(self, path: str, **_: object) -> None:
        """Not supported: job-store has no streaming requests."""

    async def _responses(self, path: str, request: Any, user: Principal | None) -> list[Any]:
        responses = await self._call(path.rpartition("/")[2], request, user)
        return [type(response).FromString(response.SerializeToString()) for response in responses]


class Unmetered(PrometheusMeter):
    def __init__(self) -> None:
        super().__init__(Metrics("simulation"))

    def model_called(self, outcome: str, usage: Usage) -> None: ...

    def call_executed(self, outcome: str) -> None: ...

    def runs_held(self, count: int) -> None: ...

    def run_left(self, how: str) -> None: ...
