"""Loads and locks the rows that a group of operations needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from pawl.chassis.ids import CallKey, RunKey
from pawl.job_store.ledger.rules.rows import (
    ClientKey,
    CommandKey,
    ConversationKey,
    ConversationRow,
    RequestKey,
    RequestRow,
)
from pawl.job_store.ledger.rules.slots import Queue, QueueKey
from pawl.job_store.ledger.rules.unit_of_work import Ids, RowKeys, UnitOfWork
from pawl.job_store.ledger.store import segments, starters, tables
from pawl.job_store.schedules.rules import ScheduleKey
from pawl.server.db.database import Connection

K = TypeVar("K", bound=msgspec.Struct)
T = TypeVar("T")

# The statements are built only from constants in this package.
# ruff: noqa: S608

_REQUESTS: Final = f"""
SELECT {tables.REQUESTS.names} FROM job_store.requests
JOIN (SELECT unnest($1::text[]) AS store_id, unnest($2::text[]) AS user_id, unnest($3::text[]) AS request_id) AS k
USING (store_id, user_id, request_id)
"""

# Looked up by id, never by scanning the user's runs.
_OWNED: Final = """
SELECT k.number FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::int[])
    AS k (store_id, run_id, call_id, user_id, number)
LEFT JOIN LATERAL (
    SELECT r.user_id FROM job_store.runs AS r WHERE r.store_id = k.store_id AND r.run_id = k.run_id OFFSET 0
) AS found ON true
LEFT JOIN LATERAL (
    SELECT c.run_id, c.asked_user_id FROM job_store.calls AS c
    WHERE c.store_id = k.store_id AND c.call_id = k.call_id OFFSET 0
) AS asked ON true
WHERE found.user_id = k.user_id OR (asked.run_id = k.run_id AND asked.asked_user_id = k.user_id)
"""

# Not locked here: the lock is taken by id. A conversation created concurrently causes a conflict.
_KEYED: Final = """
SELECT k.number, c.store_id, c.conversation_id
FROM unnest($1::text[], $2::text[], $3::bytea[], $4::int[]) AS k (store_id, user_id, key_hash, number)
JOIN job_store.conversations AS c USING (store_id, user_id, key_hash)
"""

# Found by id, or through one of their runs, whose conversation never changes. A job also leads to the conversation that
# it reports to, and a delegated run to the one that its jobs report to.
_CONVERSATIONS: Final = f"""
SELECT {tables.CONVERSATIONS.names} FROM job_store.conversations AS c
JOIN (
    SELECT unnest($1::text[]) AS store_id, unnest($2::text[]) AS conversation_id
    UNION
    SELECT r.store_id, unnest(ARRAY[r.conversation_id, r.reports_to, r.root_conversation_id])
    FROM job_store.runs AS r
    JOIN (SELECT unnest($3::text[]) AS store_id, unnest($4::text[]) AS run_id) AS k USING (store_id, run_id)
) AS k USING (store_id, conversation_id)
ORDER BY store_id, conversation_id
FOR UPDATE OF c
"""

_RUNS: Final = f"""
SELECT {tables.RUNS.names} FROM job_store.runs AS r
JOIN (SELECT unnest($1::text[]) AS store_id, unnest($2::text[]) AS run_id) AS k USING (store_id, run_id)
ORDER BY store_id, run_id
FOR UPDATE OF r
"""

# Includes all runs above some of the runs.
_RUNS_AND_CALLERS: Final = f"""
SELECT {tables.RUNS.names} FROM job_store.runs AS r
JOIN (
    SELECT unnest($1::text[]) AS store_id, unnest($2::text[]) AS run_id
    UNION
    SELECT c.* FROM unnest($3::text[], $4::text[]) AS k (store_id, run_id) CROSS JOIN LATERAL (
        SELECT store_id, unnest(parent_run_id || string_to_array(agents_above, ',')) AS run_id FROM job_store.runs
        WHERE store_id = k.store_id AND run_id = k.run_id OFFSET 0
    ) AS c
    WHERE c.run_id <> ''
) AS k USING (store_id, run_id)
ORDER BY store_id, run_id
FOR UPDATE OF r
"""

# Conversations and runs in one statement, if the runs are known in advance. The count makes sure that all conversations
# are locked before the first run, as everywhere. Locking a row returns its newest version, even if it has changed since
# the statement started.
_CONVERSATIONS_AND_RUNS: Final = f"""
WITH c AS MATERIALIZED ({_CONVERSATIONS}), r AS MATERIALIZED (
    SELECT {tables.RUNS.names} FROM job_store.runs AS r
    JOIN (SELECT unnest($5::text[]) AS store_id, unnest($6::text[]) AS run_id) AS k USING (store_id, run_id)
    WHERE (SELECT count(*) FROM c) >= 0
    ORDER BY store_id, run_id
    FOR UPDATE OF r
)
SELECT {tables.CONVERSATIONS.names}, {tables.RUNS.nulls} FROM c
UNION ALL SELECT {tables.CONVERSATIONS.nulls}, {tables.RUNS.names} FROM r
"""

# A separate statement after the locks: it sees everything that earlier holders of the locks wrote, and its time is
# later. It returns the time in a row of its own, all open calls and unread commands of some runs, and other calls and
# commands by id.
_CALLS_AND_COMMANDS: Final = f"""
SELECT clock_timestamp() AS now, {tables.CALLS.nulls}, {tables.COMMANDS.nulls}
UNION ALL SELECT NULL, {tables.CALLS.names}, {tables.COMMANDS.nulls} FROM job_store.calls
JOIN (
    SELECT c.store_id, c.call_id FROM unnest($1::text[], $2::text[]) AS k (store_id, run_id) CROSS JOIN LATERAL (
        SELECT store_id, call_id FROM job_store.calls
        WHERE store_id = k.store_id AND run_id = k.run_id AND state < 10 OFFSET 0
    ) AS c
    UNION
    SELECT unnest($3::text[]) AS store_id, unnest($4::text[]) AS call_id
) AS k USING (store_id, call_id)
UNION ALL SELECT NULL, {tables.CALLS.nulls}, {tables.COMMANDS.names} FROM job_store.commands
JOIN (
    SELECT c.* FROM unnest($5::text[], $6::text[]) AS k (store_id, run_id) CROSS JOIN LATERAL (
        SELECT store_id, run_id, command_id FROM job_store.commands
        WHERE store_id = k.store_id AND run_id = k.run_id AND NOT consumed OFFSET 0
    ) AS c
    UNION
    SELECT unnest($7::text[]) AS store_id, unnest($8::text[]) AS run_id, unnest($9::text[]) AS command_id
) AS k USING (store_id, run_id, command_id)
"""

_TIME: Final = "SELECT clock_timestamp()"

# Counts the runs waiting to start, up to a limit, and the runs that have a slot. A job waiting for its first iteration
# counts once it is due (`RunRow.needs_slot`).
_QUEUED: Final = """
SELECT k.store_id, k.in_background, k.slots, (
    SELECT count(*) FROM (
        SELECT FROM job_store.runs AS r
        WHERE r.state = 1 AND r.store_id = k.store_id AND NOT r.active AND r.in_background = k.in_background
            AND (r.generation = 0 OR r.reports_to <> '') LIMIT $4
    ) AS queued
) + (
    SELECT count(*) FROM (
        SELECT FROM job_store.runs AS r
        WHERE k.in_background AND r.store_id = k.store_id AND r.in_background AND NOT r.active AND r.claim_at <= now()
            AND r.state = 3 AND r.round = 0 AND (r.generation = 0 OR r.reports_to <> '') LIMIT $4
    ) AS late
) AS queued, (
    SELECT count(*) FROM job_store.runs AS r
    WHERE r.store_id = k.store_id AND r.active AND r.in_background = k.in_background
) AS active
FROM unnest($1::text[], $2::boolean[], $3::bigint[]) AS k (store_id, in_background, slots)
"""

# A removed key counts as ended.
_SCHEDULES: Final = f"""
SELECT {tables.SCHEDULES.names}, starts_with(credential_id, 'key_') AND NOT EXISTS (
    SELECT FROM job_store.api_keys AS a
    WHERE a.key_id = s.credential_id AND a.revoke_time IS NULL AND (a.expire_time IS NULL OR a.expire_time > now())
) AS credential_ended
FROM job_store.schedules AS s
JOIN (SELECT unnest($1::text[]) AS store_id, unnest($2::text[]) AS schedule_id) AS k USING (store_id, schedule_id)
ORDER BY store_id, schedule_id
FOR UPDATE OF s
"""

# Locked in one order and before any row, to avoid deadlocks.
_LOCK_QUEUES: Final = """
SELECT pg_advisory_xact_lock(hashtext('job_store.queues'), key)
FROM (SELECT DISTINCT hashtext(store_id) AS key FROM unnest($1::text[]) AS k (store_id) ORDER BY key) AS keys
"""

# For each queue: the number of runs that may wait for a slot, and the number of slots.
_QueueLimits: TypeAlias = Mapping[QueueKey, tuple[int, int]]

# More runs than concurrent groups can add: 32 groups of 128 operations.
_QUEUED_AT_ONCE_MAX: Final = 4096


async def load(connection: Connection, ids: Ids, named: Sequence[RowKeys]) -> UnitOfWork:
    """Return a unit of work with all requested rows, locked until the end of the transaction."""
    unit = UnitOfWork(ids)
    if schedules := _distinct(named, lambda keys: keys.schedules):
        records = await connection.fetch(_SCHEDULES, *_columns(ScheduleKey, schedules))
        tables.load_into(unit.schedules, tables.SCHEDULES, records)
    if triggers := _distinct(named, lambda keys: keys.triggers):
        lanes, events = _distinct(named, lambda keys: keys.lanes), _distinct(named, lambda keys: keys.trigger_events)
        named = [*named, await starters.load(connection, unit, triggers, lanes, events)]
    named = await _owned(connection, named)
    limits = {queue: (most, slots) for queue, most, slots in _distinct(named, lambda keys: keys.queues)}
    queues = await _lock_queues(connection, limits) if limits else {}
    named = await _with_keyed(connection, named)
    requests = await _load_requests(connection, unit, named)
    if requests or any(keys.conversations or keys.ends for keys in named):
        conversations = await _load_conversations(connection, unit, named, requests)
        entered = await _load_runs(connection, unit, named, requests, conversations)
    else:
        entered = []
        await _load_named_runs(connection, unit, named)
    await _load_queues(connection, unit, limits, queues)
    await _load_calls_and_commands(connection, unit, named, entered)
    for store_id, path in _distinct(named, lambda keys: keys.paths):
        unit.kept[store_id, path] = await segments.kept(connection, store_id, path)
    return unit


async def _owned(connection: Connection, named: Sequence[RowKeys]) -> Sequence[RowKeys]:
    """Drop keys whose `owner` does not own all their runs, unless the first call names the owner as the user to ask.

    Otherwise, callers could lock other users' runs, or could learn from response times that these runs exist.
    """
    asked = [
        (run, keys.calls[0].call_id if keys.calls else "", keys.owner, number)
        for number, keys in enumerate(named)
        if keys.owner
        for run in keys.runs
    ]
    if not asked:
        return named
    runs, call_ids, owners, numbers = zip(*asked, strict=True)
    found = await connection.fetch(_OWNED, *_columns(RunKey, runs), call_ids, owners, numbers)
    owned = Counter(record["number"] for record in found)
    return [keys for number, keys in enumerate(named) if not keys.owner or owned[number] == len(keys.runs)]


async def _with_keyed(connection: Connection, named: Sequence[RowKeys]) -> Sequence[RowKeys]:
    asked = [(key, number) for number, keys in enumerate(named) for key in keys.keyed]
    if not asked:
        return named
    client_keys, numbers = zip(*asked, strict=True)
    found = list(named)
    for record in await connection.fetch(_KEYED, *_columns(ClientKey, client_keys), numbers):
        number, key = record["number"], ConversationKey(record["store_id"], record["conversation_id"])
        found[number] = replace(found[number], conversations=(*found[number].conversations, key))
    return found


async def _load_requests(connection: Connection, unit: UnitOfWork, named: Sequence[RowKeys]) -> list[RequestRow]:
    keys = _distinct(named, lambda keys: keys.requests)
    records = await connection.fetch(_REQUESTS, *_columns(RequestKey, keys)) if keys else []
    return tables.load_into(unit.requests, tables.REQUESTS, records)


async def _load_named_runs(connection: Connection, unit: UnitOfWork, named: Sequence[RowKeys]) -> None:
    keys = _columns(RunKey, _distinct(named, lambda keys: keys.runs))
    talks = _distinct(named, lambda keys: keys.conversations_of)
    length = tables.CONVERSATIONS.length if talks else 0
    if talks:
        records = await connection.fetch(_CONVERSATIONS_AND_RUNS, [], [], *_columns(RunKey, talks), *keys)
    else:
        records = await connection.fetch(_RUNS, *keys) if keys[0] else []
    for record in records:
        if length and record[0] is not None:
            conversation = tables.CONVERSATIONS.read(tables.CONVERSATIONS.fields(record[:length]))
            unit.conversations.load(conversation.key, conversation)
        else:
            run = tables.RUNS.read(tables.RUNS.fields(record[length:]))
            unit.runs.load(run.key, run)


async def _load_conversations(
    connection: Connection, unit: UnitOfWork, named: Sequence[RowKeys], requests: Sequence[RequestRow]
) -> list[ConversationRow]:
    made = [ConversationKey(row.store_id, row.conversation_id) for row in requests if row.conversation_id]
    keys = list(dict.fromkeys([*_distinct(named, lambda keys: keys.conversations), *made]))
    runs = _distinct(named, lambda keys: (*keys.conversations_of, *keys.ends))
    if not (keys or runs):
        return []
    records = await connection.fetch(_CONVERSATIONS, *_columns(ConversationKey, keys), *_columns(RunKey, runs))
    return tables.load_into(unit.conversations, tables.CONVERSATIONS, records)


async def _load_runs(
    connection: Connection,
    unit: UnitOfWork,
    named: Sequence[RowKeys],
    requests: Sequence[RequestRow],
    conversations: Sequence[ConversationRow],
) -> list[RunKey]:
    keys = dict.fromkeys(_distinct(named, lambda keys: keys.runs))
    keys.update(dict.fromkeys(RunKey(row.store_id, row.run_id) for row in requests))
    submitted = set(_distinct(named, lambda keys: keys.conversations))
    stopped = set(_distinct(named, lambda keys: keys.stopped))
    entered: list[RunKey] = []
    endings = _endings(named, conversations)
    for row in conversations:
        if row.key in submitted and row.active_run_id is not None:
            entered.append(RunKey(row.store_id, row.active_run_id))
        # Each operation can activate at most one more run, besides runs that are superseded when they become active.
        passed = len(row.interrupting) if endings[row.key] else 0
        passed = len(row.queue) if (row.key, row.user_id) in stopped else passed
        keys.update(dict.fromkeys(RunKey(row.store_id, run_id) for run_id in row.notified))
        waiting = [RunKey(row.store_id, run_id) for run_id in row.queue[: endings[row.key] + passed]]
        keys.update(dict.fromkeys(waiting))
        entered += waiting[:passed]
    keys.update(dict.fromkeys(entered))
    if keys:
        ending = list(dict.fromkeys([*_distinct(named, lambda keys: keys.ends), *entered]))
        arguments = [*_columns(RunKey, keys), *(_columns(RunKey, ending) if ending else ())]
        records = await connection.fetch(_RUNS_AND_CALLERS if ending else _RUNS, *arguments)
        tables.load_into(unit.runs, tables.RUNS, records)
    return entered


def _endings(named: Sequence[RowKeys], conversations: Sequence[ConversationRow]) -> Counter[ConversationKey]:
    conversation_of = {
        RunKey(row.store_id, run_id): row.key
        for row in conversations
        if row.active_run_id is not None
        for run_id in (row.active_run_id, *row.queue)
    }
    endings: Counter[ConversationKey] = Counter()
    for keys in named:
        endings.update(keys.conversations)
        endings.update(conversation_of[key] for key in keys.ends if key in conversation_of)
    return endings


async def _lock_queues(connection: Connection, limits: _QueueLimits) -> dict[QueueKey, Queue]:
    """Return the counts of the queues.

    Nearly full queues are locked but omitted, because they are counted later.

    The queues are locked before requests and runs are loaded. A transaction that has waited for the lock then sees the
    rows of the previous transaction. Otherwise, a repeated request could find a full queue instead of its run.
    """
    queues = await _count_queued(connection, limits)
    close = [key for key, queue in queues.items() if queue.waiting + _QUEUED_AT_ONCE_MAX > limits[key][0]]
    if close:
        await connection.execute(_LOCK_QUEUES, [key.store_id for key in close])
    return {key: queue for key, queue in queues.items() if key not in close}


async def _load_queues(
    connection: Connection, unit: UnitOfWork, limits: _QueueLimits, queues: Mapping[QueueKey, Queue]
) -> None:
    """Load the queues' counts. Nearly full queues are counted only now, when locked runs can no longer end."""
    close = {key: limit for key, limit in limits.items() if key not in queues}
    counted = await _count_queued(connection, close) if close else {}
    for key, queue in (*queues.items(), *counted.items()):
        unit.queues.load(key, queue)


async def _count_queued(connection: Connection, limits: _QueueLimits) -> dict[QueueKey, Queue]:
    slots = [slots for _, slots in limits.values()]
    columns = _columns(QueueKey, limits)
    records = await connection.fetch(_QUEUED, *columns, slots, max(map(sum, limits.values())))
    return {
        QueueKey(record["store_id"], record["in_background"]): Queue(
            queued=record["queued"], active=record["active"], slots=record["slots"]
        )
        for record in records
    }


async def _load_calls_and_commands(
    connection: Connection, unit: UnitOfWork, named: Sequence[RowKeys], entered: Sequence[RunKey]
) -> None:
    runs = _distinct(named, lambda keys: keys.calls_of)
    done = [CallKey(run.store_id, run.parent_call_id) for _, run in unit.runs.items() if run.parent_call_id]
    calls = list(dict.fromkeys([*_distinct(named, lambda keys: keys.calls), *done]))
    readers = [*_distinct(named, lambda keys: keys.commands_of), *entered]
    commands = _distinct(named, lambda keys: keys.commands)
    if not (runs or calls or readers or commands):
        unit.now = await connection.fetchval(_TIME)
        return
    records = await connection.fetch(
        _CALLS_AND_COMMANDS,
        *_columns(RunKey, runs),
        *_columns(CallKey, calls),
        *_columns(RunKey, readers),
        *_columns(CommandKey, commands),
    )
    commands_from = 1 + tables.CALLS.length
    for record in records:
        if record[0] is not None:
            unit.now = record[0]
        elif record[1] is not None:
            unit.load_call(tables.CALLS.read(tables.CALLS.fields(record[1:commands_from])))
        else:
            unit.load_command(tables.COMMANDS.read(tables.COMMANDS.fields(record[commands_from:])))


def _distinct(named: Sequence[RowKeys], pick: Callable[[RowKeys], Iterable[T]]) -> list[T]:
    return list(dict.fromkeys(key for keys in named for key in pick(keys)))


def _columns(kind: type[K], keys: Collection[K]) -> list[list[Any]]:
    return [list(map(attrgetter(name), keys)) for name in kind.__struct_fields__]
