"""Reads ledger rows by key or by page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from asyncpg import Record

from pawl.chassis.ids import CallId, CallKey, ConversationId, RunId, RunKey, StoreId, UserId
from pawl.errors import CallNotFound, LeaseLost, RunNotFound
from pawl.job_store.ledger.cache import RunCache
from pawl.job_store.ledger.reading import (
    NOTICES_MAX,
    ChangedRuns,
    Loaded,
    LogPart,
    MessagePage,
    Page,
    PendingFilter,
    PendingNotices,
    RunFilter,
    RunView,
    view_of,
)
from pawl.job_store.ledger.rules.background import NO_BACKGROUND, Background
from pawl.job_store.ledger.rules.conversations import absent
from pawl.job_store.ledger.rules.prefix import HistoryPrefix
from pawl.job_store.ledger.rules.rows import CallRow, CommandRow, ConversationKey, ConversationRow, RunRow
from pawl.job_store.ledger.rules.waiting import Situation
from pawl.job_store.ledger.store import (
    conversation_changes,
    histories,
    log_reads,
    run_lists,
    segments,
    situations,
    tables,
)
from pawl.server.db.database import Connection, Database, DatabaseAdapter
from pawl.values import CallState

# The statements are built only from constants in this package.
# ruff: noqa: S608

_CALL_BYTES: Final = "length(spec) + length(arguments) + coalesce(length(result), 0)"

# Other users' rows are not read: the response time would reveal that they exist.
_OF_USER: Final = "($3 = '' OR user_id = $3)"
_RUN: Final = f"SELECT {tables.RUNS.names} FROM job_store.runs WHERE store_id = $1 AND run_id = $2 AND {_OF_USER}"
_OPEN_CALLS: Final = f"""
SELECT {tables.CALLS.names} FROM job_store.calls WHERE store_id = $1 AND run_id = $2 AND state < 10
ORDER BY round, batch_index
"""
# The child runs of a run, their child runs, and so on.
_BELOW: Final = f"""
WITH RECURSIVE below (run_id) AS (
    SELECT child_run_id FROM job_store.calls WHERE store_id = $1 AND run_id = $2 AND state = 7
    UNION
    SELECT c.child_run_id FROM below AS b CROSS JOIN LATERAL (
        SELECT child_run_id FROM job_store.calls WHERE store_id = $1 AND run_id = b.run_id AND state = 7 OFFSET 0
    ) AS c
)
SELECT r.* FROM below AS b CROSS JOIN LATERAL (
    SELECT {tables.RUNS.names} FROM job_store.runs WHERE store_id = $1 AND run_id = b.run_id OFFSET 0
) AS r
WHERE state < 10 ORDER BY create_time, run_id
"""
_OWNER: Final = f"""
SELECT {tables.CONVERSATIONS.names} FROM job_store.conversations WHERE store_id = $1 AND conversation_id = $2
"""


def _owned_runs(store_id: str, run_id: str, only: str = "") -> str:
    """Return the SQL for one run, its conversation (if it exists), and the other values that `_owned` reads."""
    return f"""(
    SELECT {tables.RUNS.names}, loop_state, now() AS time, xmin AS version, pg_postmaster_start_time() AS server_start,
        EXISTS (
            SELECT FROM job_store.commands WHERE store_id = {store_id} AND run_id = {run_id} AND NOT consumed OFFSET 0
        ) AS has_commands
    FROM job_store.runs WHERE store_id = {store_id} AND run_id = {run_id} {only} OFFSET 0
) AS r LEFT JOIN LATERAL (
    SELECT {tables.CONVERSATIONS.names} FROM job_store.conversations AS c
    WHERE c.store_id = r.store_id AND c.conversation_id = r.conversation_id OFFSET 0
) AS c ON true
"""


_OWNED_RUN: Final = f"SELECT r.*, c.* FROM {_owned_runs('$1', '$2')}"
# New runs whose message is the only one of their conversation.
_FIRST_RUNS: Final = f"""
SELECT r.*, c.*, m.* FROM unnest($1::text[], $2::text[]) AS k (store_id, run_id)
CROSS JOIN LATERAL {_owned_runs("k.store_id", "k.run_id", "AND last_commit IS NULL")}
CROSS JOIN LATERAL (
    SELECT {tables.MESSAGES.names} FROM job_store.messages AS m
    WHERE m.store_id = r.store_id AND m.conversation_id = r.conversation_id AND number = 1 OFFSET 0
) AS m
WHERE c.last_number = 1 AND c.past_number = 0 AND c.user_id = r.user_id AND m.user_id = '' AND NOT r.has_commands
    AND r.root_conversation_id = '' AND r.budget_run_id = '' AND r.reports_to = ''
"""
_CONVERSATION_FROM: Final = tables.RUNS.length + 5
_MESSAGE_FROM: Final = _CONVERSATION_FROM + tables.CONVERSATIONS.length
# A delegated run receives notices from the root conversation.
_BACKGROUND: Final = """
SELECT r.user_id, CASE WHEN r.root_conversation_id <> '' THEN r.run_id ELSE '' END AS receiver, (
    SELECT c.background FROM job_store.conversations AS c WHERE c.store_id = r.store_id
        AND c.conversation_id = coalesce(nullif(r.root_conversation_id, ''), r.conversation_id)
) AS background FROM job_store.runs AS r WHERE r.store_id = $1 AND r.run_id = $2
"""
_RUNS: Final = f"SELECT {tables.RUNS.names} FROM job_store.runs WHERE store_id = $1 AND run_id = ANY ($2::text[])"
_LOOP_STATE: Final = "SELECT loop_state FROM job_store.runs WHERE store_id = $1 AND run_id = $2"
_HEAD_NAMES: Final = tables.CALLS.names.replace(
    " arguments, result, spec,",
    " ''::bytea AS arguments, CASE WHEN length(result) <= $4 THEN result END AS result, ''::bytea AS spec,",
)
_CALL: Final = f"""
SELECT {tables.CALLS.names} FROM job_store.calls
WHERE store_id = $1 AND call_id = $2 AND ({_OF_USER} OR asked_user_id = $3 OR ($4 AND digest <> ''
    AND state <> {CallState.ASKED.value} AND coalesce(asked_user_id, '') = ''))
"""
# Large fields are left out.
_CALL_HEADS: Final = f"""
SELECT {_HEAD_NAMES}, CASE WHEN length(result) > $4 THEN length(result) ELSE 0 END AS omitted_bytes
FROM job_store.calls WHERE store_id = $1 AND call_id = ANY ($2::text[]) AND {_OF_USER} ORDER BY call_id
"""
# The calls of another user's run, if that user shares its conversation with calls.
_SHOWS_CALLS: Final = """
SELECT EXISTS (
    SELECT FROM job_store.runs AS r CROSS JOIN LATERAL (
        SELECT user_id, sharing, shows_arguments FROM job_store.conversations
        WHERE store_id = r.store_id AND conversation_id = r.conversation_id OFFSET 0
    ) AS c
    WHERE r.store_id = $1 AND r.run_id = $2 AND r.user_id <> $3
    AND c.user_id = r.user_id AND c.user_id <> '' AND c.sharing > 1 AND c.shows_arguments
)
"""
_COMMANDS: Final = f"""
SELECT {tables.COMMANDS.names} FROM job_store.commands
WHERE store_id = $1 AND run_id = $2 AND NOT consumed ORDER BY number
"""
_CALLS: Final = run_lists.statement(
    tables.CALLS,
    where="store_id = $3 AND run_id = $4 AND (round, batch_index, call_id) > ($5, $6, $7)",
    order="round, batch_index, call_id",
    size=_CALL_BYTES,
)
# One statement per index. `$4` is empty in the second.
_PENDING, _TO_APPROVE = (
    run_lists.statement(
        tables.CALLS,
        where=f"""store_id = $3 AND {of_whom} AND reserved_by = ''
            AND (cardinality($5::smallint[]) = 0 OR state = ANY ($5))
            AND ($6::bytea = '' OR tool_name = $6) AND ($7::text = '' OR conversation_id = $7)
            AND (create_time, call_id) > (coalesce($8::timestamptz, '-infinity'), $9)
            AND (
                SELECT r.state < 10 AND r.stop_cause IS NULL AND (t.state <> 6 OR (r.state = 5 AND r.attention = 1))
                FROM job_store.runs AS r WHERE r.store_id = t.store_id AND r.run_id = t.run_id
            )""",
        order="create_time, call_id",
        size=_CALL_BYTES,
    )
    for of_whom in (
        """coalesce(nullif(asked_user_id, ''), user_id) = $4 AND state IN (2, 3, 4, 6)
            AND ($10::boolean OR asked_user_id IS DISTINCT FROM '')""",
        "$4 = '' AND state = 2 AND coalesce(asked_user_id, '') = '' AND $10::boolean IS NOT NULL",
    )
)
# One statement per index. `$4` is empty in the second. 3 is WAITING and 4 WAIT_KIND_BUDGET.
_MINE_SHORT_OF_TOKENS, _SHORT_OF_TOKENS = (
    run_lists.statement(
        tables.RUNS,
        where=f"""store_id = $3 AND {of_whom} AND state = 3 AND waits = '\\x04' AND stop_cause IS NULL
            AND ($5::text = '' OR conversation_id = $5)
            AND (create_time, run_id) > (coalesce($6::timestamptz, '-infinity'), $7)""",
        order="create_time, run_id",
        size=tables.RUN_BYTES,
    )
    for of_whom in ("user_id = $4", "$4 = ''")
)
_MESSAGES: Final = run_lists.statement(
    tables.MESSAGES,
    where="store_id = $3 AND conversation_id = $4 AND number > $5",
    order="number",
    size="length(body)",
)


class PostgresReads(DatabaseAdapter):
    """See `reading.Reads`. A run that is loaded for its owner is cached for the owner's steps."""

    def __init__(self, database: Database, cache: RunCache) -> None:
        super().__init__(database)
        self._cache = cache

    async def run(self, key: RunKey, user_id: UserId) -> RunView:
        async with self._database.snapshot() as connection:
            run = await _fetch_run(connection, key, user_id)
            calls = await _open_calls(connection, run)
            found = [(run, calls)]
            if any(call.state is CallState.DELEGATED for call in calls):
                below = map(tables.RUNS.read, await connection.fetch(_BELOW, key.store_id, key.run_id))
                found += [(row, await _open_calls(connection, row)) for row in below]
            return view_of(await situations.of_runs(connection, key.store_id, found))

    async def loop_state(self, key: RunKey) -> bytes:
        record = await self._database.fetchrow(_LOOP_STATE, key.store_id, key.run_id)
        if record is None:
            raise RunNotFound
        return bytes(record["loop_state"])

    async def load(self, key: RunKey, epoch: int, known: HistoryPrefix | None = None, last_number: int = 0) -> Loaded:
        async with self._database.snapshot() as connection:
            record = await connection.fetchrow(_OWNED_RUN, key.store_id, key.run_id)
            if record is None:
                raise RunNotFound
            run, conversation, loop_state, time, version = _owned(record)
            if not last_number and (run.epoch != epoch or run.worker_id is None):
                raise LeaseLost
            user_id = conversation.user_id or conversation.erase_user_id if conversation else run.user_id
            author = UserId("") if user_id == run.user_id else run.user_id
            past_number = conversation.past_number if conversation else 0
            view = segments.AuthorView(key.store_id, run.conversation_id, past_number, author)
            history = await histories.load(connection, run, view, known, last_number)
            has_commands = record["has_commands"]
            records = await connection.fetch(_COMMANDS, key.store_id, key.run_id) if has_commands else []
            commands = [tables.COMMANDS.read(record) for record in records]
            if run.root_conversation_id:
                pending_notices = await _fetch_notices(connection, key)
            else:
                background = conversation.background if conversation else NO_BACKGROUND
                pending_notices = await _pending_notices(connection, run.store_id, run.user_id, background)
            top: RunRow | None = run
            if run.budget_run_id:
                record = await connection.fetchrow(_RUNS, key.store_id, [run.budget_run_id])
                top = tables.RUNS.read(record) if record else None
        if not (commands or last_number):
            self._cache.put_loaded(run, conversation, history["calls"], version)
        return Loaded(
            run=run,
            user_id=user_id,
            **history,
            commands=commands,
            loop_state=loop_state,
            time=time,
            pending_notices=pending_notices,
            shared_tokens_left=top.shared_tokens_left if top else 0,
        )

    async def load_first(self, claims: Mapping[RunKey, int]) -> dict[RunKey, Loaded]:
        columns = ([key.store_id for key in claims], [key.run_id for key in claims])
        found: dict[RunKey, Loaded] = {}
        for record in await self._database.fetch(_FIRST_RUNS, *columns):
            with suppress(Exception):  # one unreadable run must not block the others
                loaded, conversation, version = _first_run(record)
                run = loaded.run
                if conversation.background == NO_BACKGROUND and run.worker_id and run.epoch == claims[run.key]:
                    self._cache.put_loaded(run, conversation, (), version)
                    found[run.key] = loaded
        return found

    async def commands(self, key: RunKey) -> tuple[list[CommandRow], PendingNotices]:
        async with self._database.snapshot() as connection:
            records = await connection.fetch(_COMMANDS, key.store_id, key.run_id)
            pending_notices = await _fetch_notices(connection, key)
        return [tables.COMMANDS.read(record) for record in records], pending_notices

    async def call(self, key: CallKey, user_id: UserId, *, for_approval: bool = False) -> CallRow:
        record = await self._database.fetchrow(_CALL, key.store_id, key.call_id, user_id, for_approval)
        if record is None:
            raise CallNotFound
        return tables.CALLS.read(record)

    async def call_heads(
        self, store_id: StoreId, call_ids: Sequence[CallId], user_id: UserId, *, result_bytes_max: int
    ) -> list[tuple[CallRow, int]]:
        records = await self._database.fetch(_CALL_HEADS, store_id, call_ids, user_id, result_bytes_max)
        return [(tables.CALLS.read(record), record["omitted_bytes"]) for record in records]

    async def runs(
        self,
        store_id: StoreId,
        user_id: UserId,
        wanted: RunFilter,
        *,
        after: tuple[datetime, str] | None,
        rows_max: int,
    ) -> Page[Situation]:
        statement, arguments = run_lists.selected(store_id, user_id, wanted, after)
        async with self._database.snapshot() as connection:
            page = await run_lists.fetch(connection, statement, arguments, tables.RUNS.read, rows_max=rows_max)
            return Page(rows=await situations.of_page(connection, store_id, page.rows), has_more=page.has_more)

    async def calls(
        self, key: RunKey, user_id: UserId, *, after: tuple[int, int, str] | None, rows_max: int
    ) -> Page[CallRow]:
        arguments = (key.store_id, key.run_id, *(after or (-1, -1, "")))
        async with self._database.acquire() as connection:
            if not (user_id and await connection.fetchval(_SHOWS_CALLS, key.store_id, key.run_id, user_id)):
                await _fetch_run(connection, key, user_id)
            return await run_lists.fetch(connection, _CALLS, arguments, tables.CALLS.read, rows_max=rows_max)

    async def pending(
        self, store_id: StoreId, wanted: PendingFilter, *, after: tuple[datetime, str] | None, rows_max: int
    ) -> Page[CallRow]:
        arguments = (
            store_id,
            wanted.user_id,
            list(wanted.states),
            wanted.tool_name.encode(),
            wanted.conversation_id,
            *(after or (None, "")),
            wanted.approves,
        )
        statement = _PENDING if wanted.user_id else _TO_APPROVE
        return await run_lists.fetch(self._database, statement, arguments, tables.CALLS.read, rows_max=rows_max)

    async def short_of_tokens(
        self, store_id: StoreId, wanted: PendingFilter, *, after: tuple[datetime, str] | None, rows_max: int
    ) -> Page[RunRow]:
        if wanted.states or wanted.tool_name:
            return Page(rows=(), has_more=False)
        arguments = (store_id, wanted.user_id, wanted.conversation_id, *(after or (None, "")))
        statement = _MINE_SHORT_OF_TOKENS if wanted.user_id else _SHORT_OF_TOKENS
        return await run_lists.fetch(self._database, statement, arguments, tables.RUNS.read, rows_max=rows_max)

    async def messages(
        self, store_id: StoreId, user_id: UserId, conversation_id: ConversationId, *, after: int, rows_max: int
    ) -> MessagePage:
        async with self._database.acquire() as connection:
            record = await connection.fetchrow(_OWNER, store_id, conversation_id)
            conversation = None if record is None else tables.CONVERSATIONS.read(record)
            if conversation is None or not (user_id == "" or conversation.is_shown_to(user_id)):
                raise absent(conversation, user_id)
            if past_number := conversation.past_number:
                page = await segments.messages(
                    connection, store_id, conversation_id, past_number, after=after, rows_max=rows_max
                )
            else:
                arguments = (store_id, conversation_id, after)
                page = await run_lists.fetch(connection, _MESSAGES, arguments, tables.MESSAGES.read, rows_max=rows_max)
        return MessagePage(rows=page.rows, has_more=page.has_more, user_id=conversation.user_id)

    async def changed_runs(
        self, conversation: ConversationRow, user_id: UserId, *, since: datetime | None, all_open: bool
    ) -> ChangedRuns:
        return await conversation_changes.runs(self._database, conversation, user_id, since=since, all_open=all_open)

    async def versions(self, keys: Sequence[ConversationKey]) -> Sequence[str]:
        return await conversation_changes.versions(self._database, keys)

    async def events(self, key: RunKey, user_id: UserId, *, after_seq: int, events_max: int) -> LogPart:
        async with self._database.acquire() as connection:
            return await log_reads.read(connection, key, user_id, after_seq=after_seq, events_max=events_max)


def _owned(record: Record) -> tuple[RunRow, ConversationRow | None, bytes, datetime, Any]:
    """Return the run in a record, its conversation and loop state, the time, and the version of the run's row."""
    length = tables.RUNS.length
    run = tables.RUNS.read(tables.RUNS.fields(record[:length]))
    loop_state, time, version, server_start, _ = record[length:_CONVERSATION_FROM]
    conversation = None
    if record[_CONVERSATION_FROM] is not None:
        fields = tables.CONVERSATIONS.fields(record[_CONVERSATION_FROM:_MESSAGE_FROM])
        conversation = tables.CONVERSATIONS.read(fields)
    return run, conversation, loop_state, time, (version, server_start)


def _first_run(record: Record) -> tuple[Loaded, ConversationRow, Any]:
    run, conversation, loop_state, time, version = _owned(record)
    if conversation is None:
        raise RunNotFound
    loaded = Loaded(
        run=run,
        user_id=run.user_id,
        known=None,
        messages=(tables.MESSAGES.read(tables.MESSAGES.fields(record[_MESSAGE_FROM:])),),
        calls=(),
        omitted_bytes={},
        commands=(),
        loop_state=loop_state,
        time=time,
        failures={},
        pending_notices=PendingNotices(),
        shared_tokens_left=run.shared_tokens_left,
    )
    return loaded, conversation, version


async def _fetch_notices(connection: Connection, key: RunKey) -> PendingNotices:
    record = await connection.fetchrow(_BACKGROUND, key.store_id, key.run_id)
    if record is None:
        raise RunNotFound
    background = tables.BACKGROUND.read(record["background"])
    return await _pending_notices(connection, key.store_id, record["user_id"], background, record["receiver"])


async def _pending_notices(
    connection: Connection,
    store_id: StoreId,
    user_id: UserId,
    background: Background,
    receiver: RunId = RunId(""),
) -> PendingNotices:
    waiting = background.pending_of(user_id, receiver)[:NOTICES_MAX]
    jobs_below = len(background.opened_below(receiver)) if receiver else 0
    found = PendingNotices(open_jobs=background.open_jobs_of(user_id), jobs_below=jobs_below)
    if not waiting:
        return found
    records = await connection.fetch(_RUNS, store_id, list({each.run_id for each in waiting}))
    rows = {record["run_id"]: tables.RUNS.read(record) for record in records}
    notices = tuple((rows[each.run_id], each.occasion) for each in waiting if each.run_id in rows)
    return replace(found, notices=notices)


async def _open_calls(connection: Connection, run: RunRow) -> list[CallRow]:
    return [tables.CALLS.read(record) for record in await connection.fetch(_OPEN_CALLS, run.store_id, run.run_id)]


async def _fetch_run(connection: Connection, key: RunKey, user_id: UserId) -> RunRow:
    record = await connection.fetchrow(_RUN, key.store_id, key.run_id, user_id)
    if record is None:
        raise RunNotFound
    return tables.RUNS.read(record)
