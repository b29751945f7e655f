"""An in-memory job-store, the steps that it writes with one statement, and a channel to it without a network.

Assumption about PostgreSQL, besides those of the store: the statement finds all its rows as they are at one instant.
It writes all changes of each step whose rows are unchanged, and no change of other steps. The version of a run is its
row, which every write replaces.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor_pool import Default
from google.protobuf.message_factory import GetMessageClass
from msgspec.structs import replace

from pawl.agent_loop.loop.ports import ModelTiming
from pawl.chassis.identity import auth
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import IdSource, RunKey, StoreId
from pawl.job_store.ledger.cache import RunCache
from pawl.job_store.ledger.metrics import PrometheusMeter
from pawl.job_store.ledger.ports import Announcer, GroupConflict, Limits, LogRow, Ports, Written
from pawl.job_store.ledger.reading import Loaded
from pawl.job_store.ledger.rules import steps
from pawl.job_store.ledger.rules.prefix import HistoryPrefix
from pawl.job_store.ledger.rules.rows import ConversationKey
from pawl.job_store.ledger.rules.steps import Step
from pawl.job_store.ledger.rules.unit_of_work import Operation
from pawl.server.process.metrics import Metrics
from pawl.values import Usage, WaitKind
from tests.fakes.manual_clock import VirtualClock
from tests.simulation.conversations import MemoryAttentionRepository, MemoryConversations, MemoryOfferRepository
from tests.simulation.reads import MemoryLeases, MemoryReads
from tests.simulation.store import Database, MemoryJournal

# The columns of a conversation that steps read.
_READ = ("user_id", "active_run_id", "last_number", "title", "title_run_id", "queue", "background")


class StepJournal(MemoryJournal):
    async def write_steps(self, operations: Sequence[Operation[Any]]) -> Written:
        now = self.cache.now()
        prepared = steps.prepare(operations, self.cache.get, now, self._ids) if now is not None else []
        outcomes: list[Any] = [None] * len(operations)
        if not prepared:
            return Written(outcomes=outcomes)
        await self._database.reach(writes=True)
        calls = self._database.tables.calls
        # The cache has only open calls: a settled one is found by its key.
        exists = any(call.key in calls for step in prepared for call in step.unit.calls.created())
        if exists or self._database.conflicts():
            raise GroupConflict
        rows: list[LogRow] = []
        for step in prepared:
            self.cache.drop(step.cached.key)
            if self._is_current(step):
                rows += self._store_step(step)
                outcomes[step.number] = step.outcome
                if (cached := step.written(self._database.tables.runs[step.cached.key])) is not None:
                    self.cache.put(cached)
                self._tell(operations[step.number], step.outcome)
        self.cache.note_time(self._database.now())
        await self._database.answer()
        return Written(outcomes=outcomes, events=rows, work_ready=any(step.frees_slot for step in prepared))

    def _store_step(self, step: Step) -> list[LogRow]:
        """Store a step. Fields of its conversation that the step does not use may have changed."""
        conversations = self._database.tables.conversations
        run = step.cached.run
        key = ConversationKey(run.store_id, run.conversation_id)
        current = conversations[key]
        rows = self._store(step.unit)
        conversations[key] = current
        for _, after in step.conversations:
            asks = current.title_run_id != after.title_run_id
            conversations[key] = replace(
                current,
                active_run_id=after.active_run_id,
                last_number=after.last_number,
                title_at=after.title_at if asks else current.title_at,
                title_run_id=after.title_run_id,
                update_time=max(current.update_time, after.update_time),
            )
        return rows

    def _is_current(self, step: Step) -> bool:
        tables = self._database.tables
        for before, _ in step.conversations:
            now = tables.conversations[before.key]
            if any(getattr(now, name) != getattr(before, name) for name in _READ):
                return False
        return tables.runs.get(step.cached.key) is step.cached.version


class CachingReads(MemoryReads):
    def __init__(self, database: Database, cache: RunCache) -> None:
        super().__init__(database)
        self._cache = cache

    async def load(self, key: RunKey, epoch: int, known: HistoryPrefix | None = None, last_number: int = 0) -> Loaded:
        loaded = await super().load(key, epoch, known, last_number)
        if not (loaded.commands or last_number):
            conversation = self._tables.conversation_of(loaded.run)
            self._cache.put_loaded(loaded.run, conversation, loaded.calls, loaded.run)
        return loaded

    async def load_first(self, claims: Mapping[RunKey, int]) -> dict[RunKey, Loaded]:
        return {key: await self.load(key, epoch) for key, epoch in claims.items()}


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
        """Not supported, because job-store has no streaming requests."""

    async def _responses(self, path: str, request: Any, user: Principal | None) -> list[Any]:
        responses = await self._call(path.rpartition("/")[2], request, user)
        return [type(response).FromString(response.SerializeToString()) for response in responses]


class Unmetered(PrometheusMeter):
    def __init__(self) -> None:
        super().__init__(Metrics("simulation"))

    def model_call_waits(self, limit: WaitKind) -> None: ...

    def model_called(self, store_id: StoreId, outcome: str, usage: Usage, timing: ModelTiming) -> None: ...

    def call_executed(self, outcome: str) -> None: ...

    def runs_held(self, count: int) -> None: ...

    def run_left(self, how: str) -> None: ...
