"""A ledger in memory, as the public side of agent-loop sees it.

Only what clients can observe: a test plays the worker by calling `append`,
`offer`, `settle` and `finish`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from google.protobuf.timestamp_pb2 import Timestamp

from pawl.agent_loop.adapters import wire
from pawl.agent_loop.adapters.views import call_view, log_gap, logged_event, run_view
from pawl.agent_loop.app.public_values import (
    Caller,
    CallView,
    CancelCommand,
    ClientSession,
    DecisionCommand,
    EventPage,
    LeaseAnswer,
    MessagePolicy,
    NewMessage,
    Outcome,
    Page,
    PendingFilter,
    ProgressCommand,
    PublicCommand,
    RedriveCommand,
    Reply,
    ResultCommand,
    RunView,
    TopUpCommand,
)
from pawl.agent_loop.domain.call import CallState, DecisionKind
from pawl.agent_loop.domain.run import ENDED, RunState
from pawl.agent_loop.domain.undo import UndoSource
from pawl.errors import (
    AttentionNotNeeded,
    CallNotFound,
    CallNotPending,
    ConversationBusy,
    ConversationNotFound,
    DependencyUnavailable,
    InvalidPageToken,
    NoTokenBudget,
    RequestIdReused,
    RunEnded,
    RunNotFound,
    SeqBeyondEnd,
    TokenCeiling,
)
from pawl.event.v1 import call_pb2, event_pb2, gap_pb2, message_pb2, run_pb2
from tests.fakes.live_events import FakeLive
from tests.fakes.manual_clock import ManualClock
from tests.fakes.undo_sources import sources

T = TypeVar("T")

ME = Caller(store_id="local", user_id="me", roles=frozenset({"member"}))
PENDING = {call_pb2.CALL_STATE_OFFERED, call_pb2.CALL_STATE_AWAITING_APPROVAL, call_pb2.CALL_STATE_ASKED}
PAGE_EVENTS = 20


@dataclass(slots=True)
class StoredRun:
    """A run with its log and its calls."""

    run: run_pb2.Run
    events: list[event_pb2.RunEvent] = field(default_factory=list)
    calls: dict[str, call_pb2.Call] = field(default_factory=dict)
    replies: dict[str, tuple[object, Reply]] = field(default_factory=dict)
    sessions: dict[str, str] = field(default_factory=dict)
    trimmed_seq: int = 0


class FakeLedger:
    """A `PublicLedger`. `down = True` makes every method unavailable."""

    def __init__(self, clock: ManualClock, live: FakeLive) -> None:
        self._clock = clock
        self._live = live
        self.down = False
        self.runs: dict[str, StoredRun] = {}
        self.reads = 0
        self.commands: list[PublicCommand] = []
        self.released: list[tuple[str, str]] = []
        self._requests: dict[str, tuple[NewMessage, str]] = {}

    # What the worker and the ledger itself do.

    async def add_run(self, run_id: str = "run_1", caller: Caller = ME, conversation_id: str = "conv_1") -> StoredRun:
        run = run_pb2.Run(
            store_id=caller.store_id,
            user_id=caller.user_id,
            conversation_id=conversation_id,
            run_id=run_id,
            state=run_pb2.RUN_STATE_QUEUED,
        )
        stored = self.runs[run_id] = StoredRun(run)
        await self._changed(stored, run_pb2.RUN_STATE_QUEUED)
        return stored

    async def append(self, run_id: str = "run_1", count: int = 1, text: str = "x") -> None:
        """Append output deltas."""
        for _ in range(count):
            await self._log(self.runs[run_id], event_pb2.RunEvent(output_delta=event_pb2.OutputDelta(text=text)))

    async def tell(self, event: event_pb2.RunEvent, run_id: str = "run_1") -> None:
        """Append an event of the owner."""
        await self._log(self.runs[run_id], event)

    async def change(self, run_id: str, state: RunState) -> None:
        """Let the run change its state."""
        await self._changed(self.runs[run_id], run_pb2.RunState.Value(f"RUN_STATE_{state}"))

    async def need_attention(self, reason: run_pb2.AttentionReason.ValueType, run_id: str = "run_1") -> None:
        """Let the run need an operator."""
        self.runs[run_id].run.attention.reason = reason
        await self.change(run_id, RunState.NEEDS_ATTENTION)

    async def finish(self, run_id: str = "run_1") -> None:
        """Let the run complete."""
        await self.change(run_id, RunState.COMPLETED)

    def trim(self, run_id: str = "run_1", to_seq: int = 0) -> None:
        """Remove the events up to `to_seq`, or all but the last."""
        stored = self.runs[run_id]
        stored.trimmed_seq = to_seq or len(stored.events) - 1

    async def offer(self, call_id: str, tool_name: str = "show", *, run_id: str = "run_1", version: int = 1) -> None:
        """Let the model have asked for a front-end call."""
        await self.add_call(call_id, call_pb2.CALL_STATE_OFFERED, run_id=run_id, tool_name=tool_name, version=version)

    async def add_call(
        self,
        call_id: str,
        state: call_pb2.CallState.ValueType,
        *,
        run_id: str = "run_1",
        tool_name: str = "show",
        version: int = 1,
    ) -> None:
        stored = self.runs[run_id]
        call = stored.calls[call_id] = call_pb2.Call(
            store_id=stored.run.store_id,
            conversation_id=stored.run.conversation_id,
            run_id=run_id,
            call_id=call_id,
            tool_name=tool_name,
            tool_version=version,
            state=state,
        )
        if state == call_pb2.CALL_STATE_AWAITING_APPROVAL:
            call.approval.digest = f"digest of {call_id}"
        await self._call_changed(stored, call)

    async def settle(self, call_id: str, state: call_pb2.CallState.ValueType = call_pb2.CALL_STATE_CANCELLED) -> None:
        """Let a call leave OFFERED."""
        stored, call = self._call(call_id)
        call.state = state
        await self._call_changed(stored, call)

    async def lose_lease(self, call_id: str) -> None:
        """Let the lease of a call run out, as the ledger's sweep does."""
        stored, call = self._call(call_id)
        call.offer.client_id = ""
        await self._call_changed(stored, call)

    # The port.

    async def submit_message(self, caller: Caller, message: NewMessage) -> tuple[RunView, bool]:
        self._check_up()
        if message.request_id in self._requests:
            before, run_id = self._requests[message.request_id]
            if replace(before, options=message.options) != message:
                raise RequestIdReused
            return self._view(self.runs[run_id]), False
        same = [each.run for each in self.runs.values() if each.run.conversation_id == message.conversation_id]
        if any((run.store_id, run.user_id) != (caller.store_id, caller.user_id) for run in same):
            raise ConversationNotFound
        if message.conversation_must_exist and not same:
            raise ConversationNotFound
        if message.policy is MessagePolicy.REJECT and any(run.end_time.seconds == 0 for run in same):
            raise ConversationBusy
        number = len(self.runs) + 1
        stored = await self.add_run(f"run_{number}", caller, message.conversation_id or f"conv_{number}")
        stored.run.options.CopyFrom(wire.OPTIONS.write(message.options))
        stored.run.user_roles.extend(sorted(caller.roles))
        if message.undo is not None:
            stored.run.undo.CopyFrom(wire.UNDO.write(message.undo))
        if message.request_id:
            self._requests[message.request_id] = (message, stored.run.run_id)
        return self._view(stored), message.policy is MessagePolicy.STEER

    async def send_command(
        self, caller: Caller, run_id: str, command_id: str, command: PublicCommand, *, as_operator: bool = False
    ) -> Reply:
        self._check_up()
        stored = self.runs.get(run_id)
        if stored is None or not (
            self._belongs(stored, caller) or (as_operator and stored.run.store_id == caller.store_id)
        ):
            return Reply(outcome=Outcome.UNKNOWN, reason=RunNotFound.reason)
        if command_id in stored.replies:
            before, reply = stored.replies[command_id]
            if before != command:
                raise RequestIdReused
            outcome = Outcome.DUPLICATE if reply.outcome is Outcome.ACCEPTED else reply.outcome
            return Reply(outcome=outcome, reason=reply.reason, message=reply.message, run=self._view(stored))
        if self._is_replaced(stored, command):
            return self._reply(stored, Outcome.WRONG_HOLDER, CallNotPending.reason)
        reply = await self._apply(stored, command)
        stored.replies[command_id] = (command, reply)
        self.commands.append(command)
        return reply

    async def lease_offer(
        self, caller: Caller, run_id: str, call_id: str, *, client: ClientSession, lease_seconds: float
    ) -> LeaseAnswer:
        self._check_up()
        stored = self.runs[run_id]
        call = stored.calls.get(call_id)
        if call is None or not self._belongs(stored, caller):
            return LeaseAnswer(granted=False, call=None)
        held = call.offer.client_id and call.offer.expire_time.seconds > self._clock.now()
        if call.state != call_pb2.CALL_STATE_OFFERED or (held and call.offer.client_id != client.client_id):
            return LeaseAnswer(granted=False, call=_shown(call))
        if held and client.session_id < stored.sessions[call_id]:
            return LeaseAnswer(granted=False, call=_shown(call), replaced=True)
        stored.sessions[call_id] = client.session_id
        self._extend(call, lease_seconds)
        if call.offer.client_id != client.client_id:
            call.offer.client_id = client.client_id
            call.offer.offer_epoch += 1
            await self._call_changed(stored, call)
        return LeaseAnswer(granted=True, call=_shown(call))

    async def renew_offers(self, caller: Caller, client: ClientSession, lease_seconds: float) -> tuple[CallView, ...]:
        self._check_up()
        held = [call for _, call in self._held(caller, client)]
        for call in held:
            self._extend(call, lease_seconds)
        return tuple(_shown(call) for call in held)

    async def release_offers(self, caller: Caller, client: ClientSession, run_id: str = "") -> None:
        self._check_up()
        self.released.append((client.client_id, run_id))
        for stored, call in self._held(caller, client):
            if run_id in {"", stored.run.run_id}:
                call.offer.client_id = ""
                call.offer.ClearField("expire_time")
                await self._call_changed(stored, call)

    async def get_run(self, caller: Caller, run_id: str) -> RunView:
        return self._view(self._stored(caller, run_id))

    async def get_call(self, caller: Caller, call_id: str, *, for_approval: bool = False) -> CallView:
        self._check_up()
        for stored in self.runs.values():
            if call_id not in stored.calls:
                continue
            is_gated = stored.calls[call_id].approval.digest != ""
            is_shown = for_approval and is_gated and stored.run.store_id == caller.store_id
            if is_shown or self._belongs(stored, caller):
                return _shown(stored.calls[call_id])
        raise CallNotFound

    async def list_events(self, caller: Caller, run_id: str, after_seq: int) -> EventPage:
        self.reads += 1
        stored = self._stored(caller, run_id)
        last_seq = len(stored.events)
        if after_seq > last_seq:
            raise SeqBeyondEnd(last_seq=last_seq)
        start = max(after_seq, stored.trimmed_seq)
        return EventPage(
            events=tuple(logged_event(event) for event in stored.events[start : start + PAGE_EVENTS]),
            last_seq=last_seq,
            ended=run_view(stored.run).state in ENDED,
            gap=log_gap(self.gap(run_id, after_seq)) if after_seq < start else None,
        )

    def gap(self, run_id: str, after_seq: int) -> gap_pb2.Gap:
        """Return what stands for the removed events after `after_seq`."""
        stored = self.runs[run_id]
        return gap_pb2.Gap(
            run_id=run_id,
            from_seq=after_seq + 1,
            to_seq=stored.trimmed_seq,
            snapshot=gap_pb2.RunSnapshot(run=stored.run, calls=stored.calls.values()),
        )

    async def list_runs(
        self, caller: Caller, *, page_size: int, page_token: str, conversation_id: str, states: tuple[RunState, ...]
    ) -> Page[RunView]:
        runs = [self._view(stored) for stored in self.runs.values() if self._belongs(stored, caller)]
        return self._page(page_token, (run for run in runs if not states or run.state in states))

    async def list_calls(self, caller: Caller, run_id: str, *, page_size: int, page_token: str) -> Page[CallView]:
        stored = self._stored(caller, run_id)
        return self._page(page_token, (_shown(call) for call in stored.calls.values()))

    async def undo_sources(self, caller: Caller, run_id: str) -> tuple[UndoSource, ...]:
        everything = (call for each in self.runs.values() for call in each.calls.values())
        return sources(self._stored(caller, run_id).calls.values(), everything)

    async def list_messages(
        self, caller: Caller, conversation_id: str, *, page_size: int, page_token: str
    ) -> Page[object]:
        if not any(self._belongs(run, caller) for run in self.runs.values()):
            raise ConversationNotFound
        return self._page(page_token, (message_pb2.Message(message_id="msg_1", text="Hello"),))

    async def list_attention(self, caller: Caller, *, run_id: str, page_size: int, page_token: str) -> Page[RunView]:
        runs = [
            self._view(stored)
            for stored in self.runs.values()
            if stored.run.store_id == caller.store_id and stored.run.HasField("attention")
        ]
        return self._page(page_token, (run for run in runs if run_id in {"", run.run_id}))

    async def list_pending(
        self, caller: Caller, wanted: PendingFilter, *, page_size: int, page_token: str
    ) -> Page[CallView | RunView]:
        stored = [each for each in self.runs.values() if each.run.store_id == caller.store_id]
        if not wanted.of_store:
            stored = [each for each in stored if self._belongs(each, caller)]
        calls = [call for each in stored for call in self._view(each).pending_calls]
        if wanted.of_store:
            calls = [call for call in calls if call.state is CallState.AWAITING_APPROVAL]
        short = [self._view(each) for each in stored if each.run.waits == [run_pb2.WAIT_KIND_BUDGET]]
        chosen = [
            call
            for call in calls
            if (not wanted.states or call.state in wanted.states) and wanted.tool_name in {"", call.tool_name}
        ]
        return self._page(page_token, (*chosen, *short))

    # Inside.

    async def _apply(self, stored: StoredRun, command: PublicCommand) -> Reply:
        ended = run_view(stored.run).state in ENDED
        if ended:
            return self._reply(stored, Outcome.LATE, RunEnded.reason)
        if isinstance(command, RedriveCommand):
            if stored.run.attention.reason != run_pb2.ATTENTION_REASON_QUARANTINED:
                return self._reply(stored, Outcome.REFUSED, AttentionNotNeeded.reason)
            stored.run.ClearField("attention")
            await self._changed(stored, run_pb2.RUN_STATE_QUEUED)
            return self._reply(stored, Outcome.ACCEPTED)
        if isinstance(command, CancelCommand):
            await self._changed(stored, run_pb2.RUN_STATE_CANCELLING)
            return self._reply(stored, Outcome.ACCEPTED)
        if isinstance(command, TopUpCommand):
            if not stored.run.token_budget:
                return self._reply(stored, Outcome.REFUSED, NoTokenBudget.reason)
            ceiling = stored.run.options.limits.topped_up_tokens_max
            if ceiling and stored.run.token_budget + command.tokens > ceiling:
                return self._reply(stored, Outcome.REFUSED, TokenCeiling.reason)
            stored.run.token_budget += command.tokens
            return self._reply(stored, Outcome.ACCEPTED)
        call = stored.calls.get(command.call_id)
        if call is None:
            return Reply(outcome=Outcome.UNKNOWN, reason=CallNotFound.reason, message=CallNotFound.reason)
        if call.state not in PENDING:
            return self._reply(stored, Outcome.LATE, CallNotPending.reason)
        if isinstance(command, ResultCommand):
            if command.client_id and (command.client_id, command.offer_epoch) != (
                call.offer.client_id,
                call.offer.offer_epoch,
            ):
                return self._reply(stored, Outcome.WRONG_HOLDER, CallNotPending.reason)
            await self.settle(call.call_id, call_pb2.CALL_STATE_SUCCEEDED)
        if isinstance(command, DecisionCommand):
            if call.approval.digest != command.digest:
                reason = "DIGEST_MISMATCH" if command.digest else "DIGEST_REQUIRED"
                return self._reply(stored, Outcome.REFUSED, reason)
            rejected = command.kind is DecisionKind.REJECT
            await self.settle(call.call_id, call_pb2.CALL_STATE_REJECTED if rejected else call_pb2.CALL_STATE_RUNNABLE)
        return self._reply(stored, Outcome.ACCEPTED)

    @staticmethod
    def _is_replaced(stored: StoredRun, command: PublicCommand) -> bool:
        if not isinstance(command, ResultCommand | ProgressCommand) or not command.session_id:
            return False
        call = stored.calls[command.call_id]
        holds = (call.offer.client_id, call.offer.offer_epoch) == (command.client_id, command.offer_epoch)
        return call.state in PENDING and holds and stored.sessions[call.call_id] != command.session_id

    def _reply(self, stored: StoredRun, outcome: Outcome, reason: str = "") -> Reply:
        return Reply(outcome=outcome, reason=reason, message=reason, run=self._view(stored))

    def _view(self, stored: StoredRun) -> RunView:
        run = run_pb2.Run()
        run.CopyFrom(stored.run)
        run.last_seq = len(stored.events)
        run.pending_calls.extend(call for call in stored.calls.values() if call.state in PENDING)
        return run_view(run)

    def _stored(self, caller: Caller, run_id: str) -> StoredRun:
        self._check_up()
        stored = self.runs.get(run_id)
        if stored is None or not self._belongs(stored, caller):
            raise RunNotFound
        return stored

    def _call(self, call_id: str) -> tuple[StoredRun, call_pb2.Call]:
        return next((stored, stored.calls[call_id]) for stored in self.runs.values() if call_id in stored.calls)

    def _held(self, caller: Caller, client: ClientSession) -> list[tuple[StoredRun, call_pb2.Call]]:
        return [
            (stored, call)
            for stored in self.runs.values()
            if self._belongs(stored, caller)
            for call in stored.calls.values()
            if call.offer.client_id == client.client_id and stored.sessions[call.call_id] == client.session_id
            if call.state == call_pb2.CALL_STATE_OFFERED
        ]

    @staticmethod
    def _belongs(stored: StoredRun, caller: Caller) -> bool:
        return stored.run.store_id == caller.store_id and caller.user_id in {"", stored.run.user_id}

    def _extend(self, call: call_pb2.Call, lease_seconds: float) -> None:
        call.offer.expire_time.CopyFrom(Timestamp(seconds=int(self._clock.now() + lease_seconds)))

    def _check_up(self) -> None:
        if self.down:
            raise DependencyUnavailable

    def _page(self, page_token: str, items: Iterable[T]) -> Page[T]:
        self._check_up()
        if page_token:
            raise InvalidPageToken
        return Page(items=tuple(items), next_page_token="")

    async def _changed(self, stored: StoredRun, state: run_pb2.RunState.ValueType) -> None:
        before, stored.run.state = stored.run.state, state
        if run_view(stored.run).state in ENDED:
            stored.run.end_time.seconds = int(self._clock.now())
        change = event_pb2.RunChanged(from_state=before, run=stored.run)
        await self._log(stored, event_pb2.RunEvent(run_changed=change))

    async def _call_changed(self, stored: StoredRun, call: call_pb2.Call) -> None:
        await self._log(stored, event_pb2.RunEvent(call_changed=event_pb2.CallChanged(call=call)))

    async def _log(self, stored: StoredRun, event: event_pb2.RunEvent) -> None:
        event.store_id, event.run_id = stored.run.store_id, stored.run.run_id
        event.seq = len(stored.events) + 1
        stored.events.append(event)
        await self._live.publish(event)


def _shown(call: call_pb2.Call) -> CallView:
    copy = call_pb2.Call()
    copy.CopyFrom(call)
    return call_view(copy)
