"""In-memory reads of conversations, their changes, offers to clients, and the runs that need an operator."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TypeVar

from pawl.chassis.ids import CallKey, ClientId, ConversationId, RunId, RunKey, StoreId, UserId
from pawl.chassis.labels import has_all
from pawl.errors import ConversationNotFound, RunNotFound
from pawl.job_store.ledger.reading import ChangedRuns, ConversationFilter, Page, RunView
from pawl.job_store.ledger.rpc.messages import text_of
from pawl.job_store.ledger.rules.offers import is_pending
from pawl.job_store.ledger.rules.rows import (
    CallRow,
    ClientKey,
    ConversationKey,
    ConversationRow,
    RequestKey,
    RequestRow,
    RunRow,
    Segment,
)
from pawl.job_store.ledger.rules.search import words
from pawl.values import CallState, RunState
from tests.simulation.store import Database, reached

R = TypeVar("R")


def page(rows: Sequence[R], rows_max: int) -> Page[R]:
    return Page(rows=rows[:rows_max], has_more=len(rows) > rows_max)


def crashes(row: RunRow) -> int:
    """Return how many workers died with this due run, including its current worker if it has one."""
    return row.crashes + (row.worker_id is not None)


class MemoryAttentionRepository:
    """In-memory `ports.AttentionRepository`. Pages are limited by row count only."""

    def __init__(self, database: Database) -> None:
        self._memory = database

    @reached()
    def doomed(self, *, crashes_max: int, runs_max: int) -> tuple[RunKey, ...]:
        now = self._memory.now()
        doomed = [
            (row.claim_at, row.key)
            for row in self._memory.tables.runs.values()
            if row.worker_id is not None
            and row.claim_at is not None
            and row.claim_at <= now
            and crashes(row) >= crashes_max
        ]
        return tuple(key for _, key in sorted(doomed)[:runs_max])

    @reached()
    def listed(
        self, store_id: StoreId, *, run_id: RunId, after: tuple[datetime, str] | None, rows_max: int
    ) -> Page[RunView]:
        tables = self._memory.tables
        rows = [
            ((row.attention.since_time, row.run_id), row)
            for row in tables.runs.values()
            if row.attention is not None and row.store_id == store_id and run_id in {"", row.run_id}
        ]
        if run_id and RunKey(store_id, run_id) not in tables.runs:
            raise RunNotFound

        def running(row: RunRow) -> list[CallRow]:
            return [call for call in tables.calls_of(row.key) if call.state is CallState.RUNNING]

        views = [
            RunView(run=row, pending=tuple(call for call in running(row) if is_pending(row, call)))
            for position, row in sorted(rows, key=lambda pair: pair[0])
            if after is None or position > after
        ]
        return page(views, rows_max)


class MemoryChanges:
    def __init__(self, database: Database) -> None:
        self._memory = database
        self._tables = database.tables

    async def loop_state(self, key: RunKey) -> bytes:
        return self._tables.loop_states.get(key, b"")

    @reached()
    def changed_runs(
        self, conversation: ConversationRow, user_id: UserId, *, since: datetime | None, all_open: bool
    ) -> ChangedRuns:
        named = {conversation.conversation_id}
        found: dict[RunId, RunRow] = {}
        while True:
            more = {
                run.run_id: run
                for run in self._tables.runs.values()
                if run.store_id == conversation.store_id and run.user_id == user_id and not run.imported
                if named & {run.conversation_id, run.reports_to} or run.parent_run_id in found
                if not run.state.is_terminal or (since is not None and run.update_time >= since)
            }
            if more.keys() <= found.keys():
                break
            found |= more
        is_open = [run for run in found.values() if not run.state.is_terminal]
        rows = sorted(found.values(), key=lambda run: (run.create_time, run.run_id))
        return ChangedRuns(
            time=self._memory.now(),
            versions={
                run.run_id: self._version(run, rows)
                for run in rows
                if all_open or since is None or run.update_time >= since or self._delegates(run)
            },
            open_run_ids=[run.run_id for run in is_open],
            conversation_ids=sorted(named | {run.conversation_id for run in is_open}),
        )

    def _version(self, run: RunRow, rows: Sequence[RunRow]) -> str:
        children = [
            each
            for each in rows
            if each.parent_run_id == run.run_id and not each.reports_to and not run.state.is_terminal
        ]
        own = "" if run.state is RunState.QUEUED and run.worker_id is None else str(hash(repr(run)))
        parts = [own, *(self._version(child, rows) for child in children)]
        return ",".join(parts) if all(parts) else ""

    def _delegates(self, run: RunRow) -> bool:
        return any(call.state is CallState.DELEGATED for call in self._tables.calls_of(run.key))

    @reached()
    def versions(self, keys: Sequence[ConversationKey]) -> Sequence[str]:
        return [str(hash(repr(row))) if (row := self._tables.conversations.get(key)) else "" for key in keys]


class MemoryConversations:
    def __init__(self, database: Database) -> None:
        self._memory = database
        self._tables = database.tables

    @reached()
    def by_id(self, store_id: StoreId, user_id: UserId, conversation_id: ConversationId) -> ConversationRow:
        row = self._tables.conversations.get(ConversationKey(store_id, conversation_id))
        if row is None or not row.is_shown_to(user_id):
            raise ConversationNotFound
        return row

    @reached()
    def by_key(self, key: ClientKey) -> ConversationRow:
        for row in self._tables.conversations.values():
            if row.client_key == key:
                return row
        raise ConversationNotFound

    @reached()
    def listed(
        self,
        store_id: StoreId,
        user_id: UserId,
        wanted: ConversationFilter,
        *,
        before: tuple[datetime, str] | None,
        rows_max: int,
    ) -> Page[ConversationRow]:
        rows = [
            row
            for row in self._tables.conversations.values()
            if (row.store_id, row.parent_run_id) == (store_id, "")
            and (row.user_id != user_id and row.is_shown_to(user_id) if wanted.shared else row.user_id == user_id)
            and row.archived in wanted.kinds
            and has_all(row.labels, dict(wanted.labels))
            and (before is None or _position(row) < before)
            and self._has(row, wanted.words)
        ]
        rows.sort(key=_position, reverse=True)
        return Page(rows=rows[:rows_max], has_more=len(rows) > rows_max)

    @reached()
    def segments(self, conversation: ConversationRow) -> tuple[Segment, ...]:
        return tuple(
            Segment(
                first_number=each.first_number,
                last_number=each.last_number,
                source_conversation_id=each.source_conversation_id,
            )
            for each in self._tables.segments.get(conversation.key, ())
        )

    @reached()
    def request(self, key: RequestKey) -> RequestRow | None:
        return self._tables.requests.get(key)

    def _has(self, row: ConversationRow, wanted: tuple[str, ...]) -> bool:
        texts = [row.title, *(text_of(message.body) for message in self._tables.shown(row.key))]
        return not wanted or any(_fits(wanted, text) for text in texts)


def _fits(wanted: tuple[str, ...], text: str) -> bool:
    return all(any(word.startswith(beginning) for word in words(text)) for beginning in wanted)


def _position(row: ConversationRow) -> tuple[datetime, str]:
    return row.update_time, row.conversation_id


class MemoryOfferRepository:
    def __init__(self, database: Database) -> None:
        self._memory = database

    @reached()
    def held_by(
        self, store_id: StoreId, user_id: UserId, client_id: ClientId, run_id: RunId
    ) -> tuple[tuple[RunKey, CallKey], ...]:
        return tuple(
            _both(call)
            for call in self._held()
            if (call.store_id, call.user_id) == (store_id, user_id)
            and call.offer is not None
            and call.offer.client_id == client_id
            and run_id in {"", call.run_id}
        )

    @reached()
    def run_out(self, *, calls_max: int) -> tuple[tuple[RunKey, CallKey], ...]:
        out = [
            call
            for call in self._held()
            if call.offer is not None
            and call.offer.expire_time is not None
            and call.offer.expire_time <= self._memory.now()
            and not call.reserved_by
        ]
        return tuple(map(_both, out[:calls_max]))

    def _held(self) -> list[CallRow]:
        return [
            call
            for call in self._memory.tables.calls.values()
            if call.state is CallState.OFFERED and call.offer is not None and call.offer.client_id
        ]


def _both(call: CallRow) -> tuple[RunKey, CallKey]:
    return RunKey(call.store_id, call.run_id), call.key
