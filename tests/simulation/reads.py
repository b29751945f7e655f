"""In-memory leases and reads of the ledger, used by job-store."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TypeVar

from msgspec.structs import replace

from pawl.chassis.ids import CallId, CallKey, CommandId, ConversationId, RunId, RunKey, StoreId, UserId, WorkerId
from pawl.chassis.labels import has_all
from pawl.errors import CallNotFound, ConversationNotFound, LeaseLost, RunNotFound
from pawl.event.v1 import run_pb2
from pawl.job_store.ledger.reading import (
    NOTICES_MAX,
    OPEN_CALLS_MAX,
    Claimed,
    Loaded,
    LogGap,
    LogPart,
    MessagePage,
    Page,
    PendingFilter,
    PendingNotices,
    Renewed,
    RunFilter,
    RunView,
    view_of,
)
from pawl.job_store.ledger.rules.offers import is_pending
from pawl.job_store.ledger.rules.prefix import HistoryPrefix
from pawl.job_store.ledger.rules.rows import CallRow, CommandKey, CommandRow, ConversationKey, RunRow
from pawl.job_store.ledger.rules.slots import DueRun, Line, SlotLimits, Turns, assign_slots
from pawl.job_store.ledger.rules.waiting import Situation
from pawl.values import CallState, CommandOutcome, RunState, StopCause, WaitKind
from tests.simulation.conversations import MemoryChanges, crashes, page
from tests.simulation.store import Database, continues, reached

R = TypeVar("R")

_IN_MOTION = frozenset({"RUNNING", "CANCELLING"})


class MemoryLeases:
    def __init__(self, database: Database, limits: SlotLimits, *, crashes_max: int) -> None:
        self._memory = database
        self._limits = limits
        self._crashes_max = crashes_max
        self._turns = Turns()

    @reached(writes=True, answers=True)
    def claim(
        self, worker_id: WorkerId, *, runs_max: int, lease_seconds: float, background_runs_max: int
    ) -> list[Claimed]:
        runs, time = self._memory.tables.runs, self._memory.now()
        holds_one = any(row.worker_id == worker_id and self._is_last_chance(row.crashes) for row in runs.values())
        held = sum(row.worker_id == worker_id and row.in_background for row in runs.values())
        assigned = assign_slots(
            self._lines(time),
            self._turns,
            runs_max=runs_max,
            last_chances_max=0 if holds_one else 1,
            background_max=max(0, background_runs_max - held),
        )
        self._turns = assigned.turns
        claimed = []
        for due in assigned.runs:
            row = with_lease(runs[due.key], worker_id, time, lease_seconds)
            self._memory.history.owners[row.run_id, row.epoch] = worker_id
            runs[due.key] = row
            is_quiet = row.last_commit is None or row.waits == (WaitKind.TIME,)
            conversation = self._memory.tables.conversations[ConversationKey(row.store_id, row.conversation_id)]
            claimed.append(
                dataclasses.replace(
                    _claimed(row),
                    is_quiet=is_quiet,
                    conversation_id=row.conversation_id,
                    last_number=conversation.last_number,
                )
            )
            self._memory.history.tell(f"ledger claim {row.run_id} by {worker_id} epoch {row.epoch}")
            if not due.is_active:
                self._check_slots(row)
        return claimed

    async def wait_seconds(self) -> float | None:
        await self._memory.reach()
        times = [row.claim_at for row in self._memory.tables.runs.values() if row.claim_at is not None]
        await self._memory.answer()
        return min((time - self._memory.now()).total_seconds() for time in times) if times else None

    def _lines(self, time: datetime) -> list[Line]:
        """Return the due runs of each store, starting with the store whose turn it is."""
        rows = self._memory.tables.runs.values()
        due = [row for row in rows if row.claim_at is not None and row.claim_at <= time and not self._is_doomed(row)]
        due.sort(key=lambda row: (not row.is_active, row.in_background, crashes(row), row.claim_at, row.run_id))
        stores = sorted({row.store_id for row in due}, key=lambda store: (store <= self._turns.after, store))
        active = [row for row in rows if row.is_active and not row.in_background]
        background = Counter(row.store_id for row in rows if row.is_active and row.in_background)
        return [
            Line(
                due=[self._due_run(row) for row in due if row.store_id == store],
                limits=self._limits,
                used=sum(row.store_id == store for row in active),
                used_by_user=Counter(row.user_id for row in active if row.store_id == store),
                used_background=background[store],
            )
            for store in stores
        ]

    def _due_run(self, row: RunRow) -> DueRun:
        return DueRun(
            key=row.key,
            user_id=row.user_id,
            is_active=row.is_active,
            is_background=row.in_background,
            at_last_chance=self._is_last_chance(crashes(row)),
        )

    def _is_last_chance(self, crashes: int) -> bool:
        return crashes + 1 >= self._crashes_max

    def _is_doomed(self, row: RunRow) -> bool:
        return row.worker_id is not None and crashes(row) >= self._crashes_max

    def _check_slots(self, row: RunRow) -> None:
        """LOOP-14, checked immediately: a run gets a slot only if one is free."""
        active = [
            run.user_id
            for run in self._memory.tables.runs.values()
            if run.store_id == row.store_id
            and (run.worker_id is not None or run.state.name in _IN_MOTION)
            and run.in_background == row.in_background
        ]
        if row.in_background:
            if len(active) > self._limits.background_per_store:
                self._memory.history.violation("limits_hold", f"{row.run_id} started alongside {len(active) - 1} jobs")
        elif len(active) > self._limits.per_store or active.count(row.user_id) > self._limits.per_user:
            self._memory.history.violation(
                "limits_hold", f"{row.run_id} started alongside {len(active) - 1} other runs"
            )

    @reached(writes=True, answers=True)
    def renew(self, worker_id: WorkerId, *, lease_seconds: float) -> Renewed:
        tables, time = self._memory.tables, self._memory.now()
        held = [row for row in tables.runs.values() if row.worker_id == worker_id]
        for row in held:
            tables.runs[row.key] = replace(row, claim_at=time + timedelta(seconds=lease_seconds))
        return Renewed(
            runs=tuple(map(_claimed, held)),
            with_commands=tuple(_claimed(row) for row in held if tables.unread(row.key)),
            time=time,
        )

    @reached(writes=True, answers=True)
    def release(self, worker_id: WorkerId) -> int:
        runs = self._memory.tables.runs
        held = [row for row in runs.values() if row.worker_id == worker_id]
        for row in held:
            runs[row.key] = replace(row, worker_id=None, claim_at=self._memory.now())
            self._memory.history.tell(f"ledger release {row.run_id} by {worker_id}")
        return len(held)

    @reached(writes=True)
    def times(self) -> tuple[datetime, datetime]:
        tables, time = self._memory.tables, self._memory.now()
        seen_time = tables.seen_time
        if seen_time is None or seen_time < time - timedelta(seconds=5):
            tables.seen_time = time
        return time, seen_time or time

    @reached(writes=True)
    def bring_forward(self, seconds: float) -> int:
        runs, now, back = self._memory.tables.runs, self._memory.now(), timedelta(seconds=seconds)
        self._memory.tables.seen_time = now
        leased = min(back, timedelta(seconds=30))
        late = [
            row
            for row in runs.values()
            if row.claim_at is not None and row.claim_at > (now if row.worker_id is None else now + leased)
        ]
        for row in late:
            runs[row.key] = replace(row, claim_at=max(now, row.claim_at - back))  # type: ignore[operator]
        schedules = self._memory.tables.schedules
        for each in schedules.values():
            if each.claim_at is not None and each.claim_at > now and each.claim_at != each.due_time:
                schedules[each.key] = replace(each, claim_at=each.due_time if each.waiting_time is None else now)
        return len(late)


class MemoryReads(MemoryChanges):
    @reached()
    def run(self, key: RunKey, user_id: UserId) -> RunView:
        shown = [self._situation(self._run(key, user_id))]
        for each in shown:
            children = [
                self._tables.runs[RunKey(key.store_id, call.child_run_id)]
                for call in each.calls
                if call.state.name == "DELEGATED"
            ]
            shown += [self._situation(run) for run in children if not run.state.is_terminal]
        below = sorted(shown[1:], key=lambda each: (each.run.create_time, each.run.run_id))
        return view_of([shown[0], *below])

    def _situation(self, run: RunRow) -> Situation:
        calls = self._tables.calls_of(run.key)
        conversation = self._tables.conversations.get(ConversationKey(run.store_id, run.conversation_id))
        before: list[RunId] = []
        if conversation is not None and run.run_id in conversation.queue:
            queue = conversation.queue
            before = [*filter(None, [conversation.active_run_id]), *queue[: queue.index(run.run_id)]]
        needs_slot = run.state is RunState.QUEUED and run.queued_message is None and not run.is_active
        needs_slot = needs_slot and not run.in_background
        of_store = [row for row in self._tables.runs.values() if row.store_id == run.store_id and row.is_active]
        active = [row for row in of_store if not row.in_background]
        return Situation(
            run=run,
            time=self._memory.now(),
            calls=[call for call in calls if not call.state.is_terminal],
            call_counts=tuple(sorted(Counter(call.state for call in calls).items())),
            child_run_ids=tuple(sorted({call.child_run_id for call in calls} - {""})),
            before=tuple(before),
            store_slots_used=len(active) if needs_slot else 0,
            user_slots_used=sum(row.user_id == run.user_id for row in active) if needs_slot else 0,
        )

    @reached()
    def load(self, key: RunKey, epoch: int, known: HistoryPrefix | None = None, last_number: int = 0) -> Loaded:
        whole = self._load(key, epoch, last_number)
        if last_number:
            return whole
        self._memory.history.whole_loads[key.run_id, epoch].append(whole)
        if known is None or not continues(self._tables, known, whole):
            return whole
        messages = [row for row in whole.messages if row.number > known.last_number]
        run_ids = {row.run_id for row in messages} | {key.run_id}
        calls = [call for call in whole.calls if call.run_id in run_ids]
        return dataclasses.replace(whole, known=known, messages=messages, calls=calls)

    def _load(self, key: RunKey, epoch: int, last_number: int) -> Loaded:
        run = self._run(key, UserId(""))
        if not last_number and (run.epoch != epoch or run.worker_id is None):
            raise LeaseLost
        conversation = self._tables.conversations[ConversationKey(key.store_id, run.conversation_id)]
        author = conversation.author(run.user_id)
        every = [row for row in self._tables.shown(conversation.key) if not row.summarised_to or row.user_id == author]
        every = [row for row in every if not last_number or row.number <= last_number]
        summarised = max((row.summarised_to for row in every), default=0)
        messages = [row for row in every if row.number > summarised]
        run_ids = {row.run_id for row in messages if row.user_id == author} | {key.run_id}
        calls = [row for row in self._tables.calls.values() if row.store_id == key.store_id and row.run_id in run_ids]
        first = run.loaded_from_round
        calls = [call for call in calls if call.round >= first or not call.state.is_terminal]
        calls.sort(key=lambda call: (call.create_time, call.round, call.index, call.call_id))
        top = self._tables.runs.get(RunKey(key.store_id, run.budget_run_id)) if run.budget_run_id else run
        return Loaded(
            run=run,
            user_id=conversation.user_id,
            known=None,
            messages=messages,
            calls=calls,
            omitted_bytes={call.call_id: 0 for call in calls},
            commands=self._tables.unread(run.key),
            loop_state=self._tables.loop_states.get(run.key, b""),
            time=self._memory.now(),
            failures={
                row.run_id: row.failure
                for row in self._tables.runs.values()
                if row.store_id == key.store_id and row.run_id in run_ids and row.state is RunState.FAILED
            },
            pending_notices=self._pending_notices(run),
            shared_tokens_left=top.shared_tokens_left if top else 0,
        )

    @reached()
    def commands(self, key: RunKey) -> tuple[list[CommandRow], PendingNotices]:
        run = self._run(key, UserId(""))
        return self._tables.unread(run.key), self._pending_notices(run)

    def _pending_notices(self, run: RunRow) -> PendingNotices:
        key = ConversationKey(run.store_id, run.root_conversation_id or run.conversation_id)
        background = self._tables.conversations[key].background
        waiting = background.pending_of(run.user_id, run.receives_as)[:NOTICES_MAX]
        notices = tuple((self._tables.runs[RunKey(run.store_id, each.run_id)], each.occasion) for each in waiting)
        return PendingNotices(
            notices=notices,
            open_jobs=background.open_jobs_of(run.user_id),
            jobs_below=len(background.opened_below(run.receives_as)) if run.receives_as else 0,
        )

    @reached()
    def call(self, key: CallKey, user_id: UserId, *, for_approval: bool = False) -> CallRow:
        row = self._tables.calls.get(key)
        if row is None:
            raise CallNotFound
        is_shown = for_approval and row.digest != "" and row.state is not CallState.ASKED
        is_shown = row.asked_user_id == user_id if row.asked_user_id else is_shown
        if user_id not in {"", row.user_id} and not is_shown:
            raise CallNotFound
        return row

    @reached()
    def call_heads(
        self, store_id: StoreId, call_ids: Sequence[CallId], user_id: UserId, *, result_bytes_max: int
    ) -> list[tuple[CallRow, int]]:
        keys = (CallKey(store_id, call_id) for call_id in sorted(set(call_ids)))
        rows = [row for key in keys if (row := self._tables.calls.get(key)) and user_id in {"", row.user_id}]
        omitted = [size if (size := len(row.result or b"")) > result_bytes_max else 0 for row in rows]
        return [
            (replace(row, arguments=b"", spec=b"", result=None if size else row.result), size)
            for row, size in zip(rows, omitted, strict=True)
        ]

    def _is_running_or_stopped(self, job: RunRow, stopped_by: CommandId, cause: StopCause) -> bool:
        stop = self._tables.commands.get(CommandKey(job.store_id, job.run_id, stopped_by))
        if stop is not None and job.stop_cause is cause:
            return stop.outcome is CommandOutcome.ACCEPTED
        return bool(job.reports_to) and job.stop_cause is None and not job.state.is_terminal

    @reached()
    def runs(
        self,
        store_id: StoreId,
        user_id: UserId,
        wanted: RunFilter,
        *,
        after: tuple[datetime, str] | None,
        rows_max: int,
    ) -> Page[Situation]:

        def is_wanted(row: RunRow, cause: StopCause) -> bool:
            return self._is_running_or_stopped(row, wanted.stopped_by, cause)

        rows = [
            row
            for row in self._tables.runs.values()
            if (row.store_id, row.imported) == (store_id, False)
            and (row.user_id == user_id or (wanted.running_jobs_of_store and not user_id))
            and (not wanted.running_jobs_of_store or is_wanted(row, StopCause.OPERATOR))
            and (not (wanted.reports_to and wanted.stopped_by) or is_wanted(row, StopCause.USER))
            and wanted.conversation_id in {"", row.conversation_id}
            and (not wanted.states or row.state in wanted.states)
            and (wanted.create_time_from is None or row.create_time >= wanted.create_time_from)
            and (wanted.create_time_before is None or row.create_time < wanted.create_time_before)
            and (not wanted.waits or (row.state is RunState.WAITING and not set(wanted.waits).isdisjoint(row.waits)))
            and wanted.parent_run_id in {"", row.parent_run_id}
            and wanted.agent_name in {"", row.agent_name}
            and has_all(row.labels, dict(wanted.labels))
            and wanted.reports_to in {"", row.reports_to}
            and (row.reports_to or not wanted.jobs_only)
        ]
        rows.sort(key=lambda row: (row.create_time, row.run_id), reverse=not wanted.oldest_first)
        positions: list[tuple[datetime, str]] = [(row.create_time, row.run_id) for row in rows]
        shown = page(rows[positions.index(after) + 1 if after is not None else 0 :], rows_max)
        return Page(rows=[_without_content(self._situation(row)) for row in shown.rows], has_more=shown.has_more)

    @reached()
    def calls(
        self, key: RunKey, user_id: UserId, *, after: tuple[int, int, str] | None, rows_max: int
    ) -> Page[CallRow]:
        rows = self._tables.calls_of(self._run(key, user_id).key)
        return page([row for row in rows if after is None or (row.round, row.index, row.call_id) > after], rows_max)

    @reached()
    def short_of_tokens(
        self, store_id: StoreId, wanted: PendingFilter, *, after: tuple[datetime, str] | None, rows_max: int
    ) -> Page[RunRow]:
        rows = [
            row
            for row in self._tables.runs.values()
            if row.store_id == store_id
            and (row.state, row.waits) == (RunState.WAITING, (run_pb2.WAIT_KIND_BUDGET,))
            and not row.is_stopping
            and wanted.user_id in {"", row.user_id}
            and wanted.conversation_id in {"", row.conversation_id}
            and not (wanted.states or wanted.tool_name)
            and (after is None or (row.create_time, row.run_id) > after)
        ]
        return page(sorted(rows, key=lambda row: (row.create_time, row.run_id)), rows_max)

    @reached()
    def pending(
        self, store_id: StoreId, wanted: PendingFilter, *, after: tuple[datetime, str] | None, rows_max: int
    ) -> Page[CallRow]:
        rows = [
            row
            for row in self._tables.calls.values()
            if row.store_id == store_id
            and _asks(row, wanted)
            and (not wanted.states or row.state in wanted.states)
            and wanted.tool_name in {"", row.tool_name}
            and wanted.conversation_id in {"", row.conversation_id}
            and is_pending(self._tables.runs[RunKey(row.store_id, row.run_id)], row)
            and (after is None or (row.create_time, row.call_id) > after)
        ]
        return page(sorted(rows, key=lambda row: (row.create_time, row.call_id)), rows_max)

    @reached()
    def messages(
        self, store_id: StoreId, user_id: UserId, conversation_id: ConversationId, *, after: int, rows_max: int
    ) -> MessagePage:
        key = ConversationKey(store_id, conversation_id)
        conversation = self._tables.conversations.get(key)
        if conversation is None or not (user_id == "" or conversation.is_shown_to(user_id)):
            raise ConversationNotFound
        shown = page([row for row in self._tables.shown(key) if row.number > after], rows_max)
        return MessagePage(rows=shown.rows, has_more=shown.has_more, user_id=conversation.user_id)

    async def events(self, key: RunKey, user_id: UserId, *, after_seq: int, events_max: int) -> LogPart:
        await self._memory.reach()
        run = self._run(key, user_id)
        await self._memory.reach()
        trimmed = self._tables.trimmed.get(run.key, 0)
        start = max(min(after_seq, run.last_seq), trimmed)
        payloads = self._tables.events.get(run.key, [])[start : start + events_max]
        return LogPart(
            payloads=payloads,
            last_seq=max(run.last_seq, start + len(payloads)),
            ended=run.state.is_terminal,
            gap=self.gap(run, after_seq) if after_seq < trimmed else None,
        )

    def gap(self, run: RunRow, after_seq: int) -> LogGap:
        # If the log of an open job was trimmed, the events include its calls.
        calls = [] if run.trimmed_log_seq == self._tables.trimmed[run.key] else self._tables.calls_of(run.key)
        return LogGap(
            from_seq=after_seq + 1,
            to_seq=self._tables.trimmed[run.key],
            run=run,
            messages=[],
            calls=calls,
            omitted_bytes={call.call_id: 0 for call in calls},
            omitted_messages=0,
            omitted_calls=run.trimmed_rounds,
        )

    def _run(self, key: RunKey, user_id: UserId) -> RunRow:
        row = self._tables.runs.get(key)
        if row is None or user_id not in {"", row.user_id}:
            raise RunNotFound
        return row


def _without_content(situation: Situation) -> Situation:
    """Return the situation as lists show it: only the first calls that wait for a person, without content."""
    waits = situation.run.state.name in {"WAITING", "NEEDS_ATTENTION"}
    calls = [
        replace(call, arguments=b"", result=None, spec=b"")
        for call in situation.calls
        if waits and call.state.name in {"AWAITING_APPROVAL", "OFFERED", "ASKED", "RUNNING", "DELEGATED"}
    ][:OPEN_CALLS_MAX]
    return replace(situation, calls=calls, is_cut=len(calls) == OPEN_CALLS_MAX)


def _claimed(row: RunRow) -> Claimed:
    return Claimed(store_id=row.store_id, run_id=row.run_id, epoch=row.epoch, in_background=row.in_background)


def _asks(row: CallRow, wanted: PendingFilter) -> bool:
    if not wanted.user_id:
        return row.state is CallState.AWAITING_APPROVAL and not row.asked_user_id
    return (row.asked_user_id or row.user_id) == wanted.user_id and (wanted.approves or row.asked_user_id != "")


def with_lease(row: RunRow, worker_id: WorkerId, time: datetime, seconds: float) -> RunRow:
    end = time + timedelta(seconds=seconds)
    return replace(
        row,
        worker_id=worker_id,
        epoch=row.epoch + 1,
        claim_at=end,
        start_time=row.start_time or time,
        crashes=row.crashes + (row.worker_id is not None),
    )
