"""The in-memory ledger as clients see it: job-store's rules over the rows of the simulation.

A test plays the worker with `append`, `offer`, `settle` and `finish`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from msgspec.structs import replace

from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.api.values import ClientSession
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CallId, ClientId, ConversationId, IdSource, RunId, StoreId, UserId
from pawl.errors import DependencyUnavailable
from pawl.event.v1 import call_pb2, event_pb2, gap_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2
from pawl.job_store import wiring
from pawl.job_store.ledger.ports import Limits, LogRow
from pawl.job_store.ledger.rpc import log_rows, messages
from pawl.job_store.ledger.rpc.events import encode_event
from pawl.job_store.ledger.rules import states, turn
from pawl.job_store.ledger.rules.background import OpenJob
from pawl.job_store.ledger.rules.events import CallChanged, EventBody, OwnerEvent, RunChanged
from pawl.job_store.ledger.rules.log import changed_conversations, write
from pawl.job_store.ledger.rules.rows import (
    Attention,
    CallRow,
    ConversationKey,
    ConversationRow,
    MessageRow,
    Offer,
    RunRow,
)
from pawl.job_store.ledger.rules.slots import SlotLimits
from pawl.job_store.ledger.rules.unit_of_work import UnitOfWork
from pawl.values import CallState, RunState
from tests.fakes.manual_clock import ManualClock
from tests.fakes.session_agent import FakeLive
from tests.simulation.history import History
from tests.simulation.job_store import Channel, answer, ports_on
from tests.simulation.store import PromptDatabase, Tables, store

ME = Principal(store_id=StoreId("local"), user_id=UserId("me"), roles=frozenset({"member"}))
YOU = Principal(store_id=StoreId("local"), user_id=UserId("you"))
PAGE_EVENTS = 20
_LIMITS = Limits(crashes_max=3, queue_max=10, store_queue_max=1000, slots=SlotLimits(per_store=1000, per_user=1000))


def waiting_call(call_id: str) -> call_pb2.Call:
    return call_pb2.Call(run_id="run_1", call_id=call_id, tool_name="pay", state=call_pb2.CALL_STATE_AWAITING_APPROVAL)


class _NumberedIds(IdSource):
    """Sequential ids per prefix. A test can choose the ids of runs."""

    def __init__(self, clock: ManualClock, tables: Tables) -> None:
        super().__init__(clock)
        self._tables = tables
        self._numbers: Counter[str] = Counter()

    def new(self, prefix: str) -> str:
        last = len(self._tables.runs) if prefix in {"run", "conv"} else self._numbers[prefix]
        last = max(last, len(self._tables.conversations)) if prefix == "conv" else last
        self._numbers[prefix] = last + 1
        return f"{prefix}_{last + 1}"


class _Announcer:
    def __init__(self, live: FakeLive) -> None:
        self._live = live

    async def publish(self, events: Sequence[LogRow]) -> None:
        for row in events:
            for event in event_pb2.RunEvents.FromString(row.events).events:
                await self._live.publish(event)

    async def wake(self, wakeups: object) -> None: ...

    async def work_ready(self) -> None: ...

    async def inboxes_changed(self, inboxes: object) -> None: ...

    async def conversations_changed(self, conversations: Collection[tuple[StoreId, ConversationId]]) -> None:
        for store_id, conversation_id in conversations:
            for changed in self._live.conversations:
                changed(store_id, conversation_id)


@dataclass(frozen=True, slots=True)
class StoredRun:
    run: run_pb2.Run
    calls: dict[str, call_pb2.Call]


class PlayedLedger(PublicLedger):
    """The in-memory ledger. An async context manager. `down = True` makes every method unavailable."""

    def __init__(self, clock: ManualClock, live: FakeLive) -> None:
        channel: Any = Channel(self._call)
        super().__init__(channel)
        self.down = False
        self.reads = 0
        self.run_reads: list[str] = []
        # Accepted commands, without their ids and users
        self.commands: list[ledger_pb2.Command] = []
        self.released: list[tuple[str, str]] = []
        self._database = PromptDatabase(lambda: datetime.fromtimestamp(clock.now(), UTC), History())
        self._tables = self._database.tables
        self._ids = _NumberedIds(clock, self._tables)
        self._announcer = _Announcer(live)
        ports = ports_on(self._database, _LIMITS, ids=self._ids, announcer=self._announcer)
        self._reads: Any = ports.reads
        self._job_store = wiring.wire(ports, lambda _: _LIMITS, crashes_max=_LIMITS.crashes_max)
        self.servicers: list[object] = [*self._job_store.servicers]

    async def __aenter__(self) -> Self:
        await self._job_store.group_commit.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._job_store.group_commit.__aexit__(*error)

    @property
    def runs(self) -> dict[str, StoredRun]:
        return {
            row.run_id: StoredRun(
                run=messages.run(row),
                calls={call.call_id: messages.call(call) for call in self._tables.calls_of(row.key)},
            )
            for row in self._tables.runs.values()
        }

    def token_key(self, run_id: str) -> bytes:
        return messages.run_for_service(self._row(run_id)).workflow.token_key

    def people(self, run_id: str) -> tuple[str, ...]:
        return self._row(run_id).people

    def last_seq(self) -> int:
        return self._row("run_1").last_seq

    def log(self) -> list[event_pb2.RunEvent]:
        return [event_pb2.RunEvent.FromString(event) for event in self._tables.events[self._row("run_1").key]]

    # Actions of the worker and the ledger.

    async def add_run(self, run_id: str = "run_1", caller: Principal = ME, conversation_id: str = "conv_1") -> None:
        """Add a run that a user has started and a worker has claimed."""
        now = self._database.now()
        conversation = ConversationRow(
            store_id=StoreId(caller.store_id),
            conversation_id=ConversationId(conversation_id),
            user_id=UserId(caller.user_id),
            active_run_id=RunId(run_id),
            queue=(),
            last_number=0,
            create_time=now,
            update_time=now,
        )
        self._tables.conversations[conversation.key] = conversation
        queued = turn.queued(conversation, RunId(run_id), b"", b"", (0, 0), now=now)
        run = replace(queued, queued_message=None, worker_id="worker", epoch=1, claim_at=now + timedelta(days=1))
        await self._log(run, RunChanged(from_state=None, run=run))

    async def append(self, run_id: str = "run_1", count: int = 1, text: str = "x") -> None:
        for _ in range(count):
            await self.append_event(event_pb2.RunEvent(output_delta=event_pb2.OutputDelta(text=text)), run_id)

    async def append_event(self, event: event_pb2.RunEvent, run_id: str = "run_1") -> None:
        await self._log(self._row(run_id), OwnerEvent(type="event", body=event.SerializeToString()))

    async def change(self, run_id: str, state: RunState, **fields: Any) -> None:
        before = self._row(run_id)
        run = replace(before, state=state, **fields)
        if run.state.is_terminal:
            run = replace(run, worker_id=None, claim_at=None, end_time=self._database.now())
            key = ConversationKey(run.store_id, run.conversation_id)
            self._tables.conversations[key] = replace(self._tables.conversations[key], active_run_id=None)
        await self._log(run, RunChanged(from_state=before.state, run=run))

    async def need_attention(self, reason: run_pb2.AttentionReason.ValueType, run_id: str = "run_1") -> None:
        attention = Attention(reason=states.AttentionReason(reason), since_time=self._database.now())
        await self.change(run_id, RunState.NEEDS_ATTENTION, attention=attention)

    async def finish(self, run_id: str = "run_1") -> None:
        await self.change(run_id, RunState.COMPLETED, attention=None)

    def put_run(self, run_id: str, **fields: Any) -> None:
        run = self._row(run_id)
        self._tables.runs[run.key] = replace(run, **fields)

    def put_loop_state(self, run_id: str, data: bytes) -> None:
        self._tables.loop_states[self._row(run_id).key] = data

    def put_background(self, conversation_id: str, *job_ids: str) -> None:
        """Add open jobs of the user to a conversation."""
        key = ConversationKey(ME.store_id, ConversationId(conversation_id))
        jobs = tuple(OpenJob(run_id=RunId(job_id), user_id=ME.user_id) for job_id in job_ids)
        row = self._tables.conversations[key]
        self._tables.conversations[key] = replace(row, background=replace(row.background, open_jobs=jobs))

    def add_notice(self, conversation_id: str, text: str) -> None:
        """Add a job's report to the user's conversation."""
        key = ConversationKey(ME.store_id, ConversationId(conversation_id))
        row = self._tables.conversations[key]
        number = row.last_number + 1
        notice = message_pb2.Message(role=message_pb2.ROLE_NOTICE, text=text, notices_json=text.encode())
        message = MessageRow(
            store_id=key.store_id,
            conversation_id=key.conversation_id,
            number=number,
            message_id=f"msg_{number}",
            run_id=RunId("run_1"),
            summarised_to=0,
            body=notice.SerializeToString(),
            create_time=self._database.now(),
        )
        self._tables.messages.setdefault(key, []).append(message)
        self._tables.conversations[key] = replace(row, last_number=number)

    def put_call(self, call_id: str, **fields: Any) -> None:
        call = self._call_row(call_id)
        self._tables.calls[call.key] = replace(call, **fields)

    def trim(self, run_id: str = "run_1", to_seq: int = 0) -> None:
        run = self._row(run_id)
        self._tables.trimmed[run.key] = to_seq or run.last_seq - 1

    def gap(self, run_id: str, after_seq: int) -> gap_pb2.Gap:
        return messages.gap(self._reads.gap(self._row(run_id), after_seq))

    async def offer(self, call_id: str, tool_name: str = "show", *, run_id: str = "run_1", version: int = 1) -> None:
        await self.add_call(call_id, call_pb2.CALL_STATE_OFFERED, run_id=run_id, tool_name=tool_name, version=version)

    async def add_call(
        self,
        call_id: str,
        state: call_pb2.CallState.ValueType,
        *,
        run_id: str = "run_1",
        tool_name: str = "show",
        version: int = 1,
        spec: call_pb2.Call | None = None,
        **fields: Any,
    ) -> None:
        """Add a call of the model. The ledger stores `spec` without reading it."""
        run = self._row(run_id)
        is_offered = state == call_pb2.CALL_STATE_OFFERED
        call = CallRow(
            store_id=run.store_id,
            call_id=CallId(call_id),
            run_id=run.run_id,
            conversation_id=run.conversation_id,
            user_id=run.user_id,
            round=1,
            index=len(self._tables.calls_of(run.key)),
            state=CallState(state),
            tool_name=tool_name,
            tool_version=version,
            fallback_tool_name="",
            arguments=b"",
            attempt=0,
            digest=f"digest of {call_id}" if state == call_pb2.CALL_STATE_AWAITING_APPROVAL else "",
            decision=None,
            deadline_time=None,
            offer=Offer(client_id=ClientId(""), epoch=0, expire_time=None, lease_seconds=0.0) if is_offered else None,
            reserved_by="",
            result=None,
            spec=spec.SerializeToString() if spec else b"",
            create_time=self._database.now(),
            state_time=self._database.now(),
            start_time=None,
            end_time=None,
        )
        await self._call_changed(replace(call, **fields), None)

    async def settle(self, call_id: str, state: call_pb2.CallState.ValueType = call_pb2.CALL_STATE_CANCELLED) -> None:
        call = self._call_row(call_id)
        await self._call_changed(replace(call, state=CallState(state), reserved_by=""), call.state)

    async def lose_lease(self, call_id: str) -> None:
        call = self._call_row(call_id)
        assert call.offer is not None
        await self._call_changed(replace(call, offer=replace(call.offer, client_id="", expire_time=None)), call.state)

    # The part of the ledger port that tests inspect.

    async def send_command(
        self, caller: Principal, run_id: RunId, command: ledger_pb2.Command, **fields: Any
    ) -> ledger_pb2.SendCommandResponse:
        reply = await super().send_command(caller, run_id, command, **fields)
        if reply.outcome == ledger_pb2.COMMAND_OUTCOME_ACCEPTED:
            command.ClearField("command_id")
            command.ClearField("user_id")
            self.commands.append(command)
            match command.WhichOneof("kind"):
                case "tool_result":
                    await self.settle(command.tool_result.call_id, call_pb2.CALL_STATE_SUCCEEDED)
                case "decision":
                    rejected = command.decision.kind == call_pb2.DECISION_KIND_REJECT
                    state = call_pb2.CALL_STATE_REJECTED if rejected else call_pb2.CALL_STATE_RUNNABLE
                    await self.settle(command.decision.call_id, state)
                case _:
                    pass
        return reply

    async def release_offers(self, caller: Principal, client: ClientSession, run_id: RunId = RunId("")) -> None:
        await super().release_offers(caller, client, run_id)
        self.released.append((client.client_id, run_id))

    async def _call(self, method: str, request: Any, user: Principal | None) -> list[Any]:
        if method == "ListEvents":
            self.reads += 1
            request.events_max = PAGE_EVENTS
        if method == "GetRun":
            self.run_reads.append(request.run_id)
        if self.down:
            raise DependencyUnavailable
        return await answer(self.servicers, method, request, user)

    def _row(self, run_id: str) -> RunRow:
        return next(row for row in self._tables.runs.values() if row.run_id == run_id)

    def _call_row(self, call_id: str) -> CallRow:
        return next(row for row in self._tables.calls.values() if row.call_id == call_id)

    async def _call_changed(self, call: CallRow, from_state: CallState | None) -> None:
        await self._log(self._row(call.run_id), CallChanged(from_state=from_state, call=call), call=call)

    async def _log(self, run: RunRow, body: EventBody, *, call: CallRow | None = None) -> None:
        unit = UnitOfWork(self._ids)
        unit.now = self._database.now()
        unit.runs.load(run.key, run)
        if call is not None:
            unit.put_call(call)
        write(unit, run, [body])
        events = [(event, encode_event(event)) for event in unit.events.rows]
        store(self._tables, unit, events)
        await self._announcer.publish(log_rows.pack(events))
        await self._announcer.conversations_changed(changed_conversations(unit))
