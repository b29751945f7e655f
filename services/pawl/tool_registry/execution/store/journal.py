"""Stores the execution journal in PostgreSQL."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import Final

import asyncpg
import msgspec

from pawl.chassis.ids import CallId, CallKey, StoreId
from pawl.errors import DependencyUnavailable, InvalidArguments
from pawl.server.db.database import Connection, Database, affected
from pawl.tool_registry import outcome
from pawl.tool_registry.execution.execution import LeaseWatch
from pawl.tool_registry.execution.store.locks import has_lease
from pawl.tool_registry.rules.execution import ExecutionResult, InverseCall, awaiting_completion, ended_badly
from pawl.tool_registry.rules.journal import Begun, Entry, HeldElsewhere, JournalCall, Step, next_step
from pawl.values import Answer, EffectClass, Outcome, Question

_LEASED: Final = """EXISTS (
    SELECT FROM tool_registry.instances i WHERE i.instance_id = {} AND i.expires_at > clock_timestamp())"""

_INSERT: Final = f"""
INSERT INTO tool_registry.executions
    (store_id, call_id, run_id, tool_name, tool_version, effect, fingerprint, instance_id, token)
SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9 WHERE {_LEASED.format("$8")}
AND NOT EXISTS (SELECT FROM tool_registry.erased_runs r WHERE r.store_id = $1 AND r.run_id = $3)
ON CONFLICT (store_id, call_id) DO NOTHING RETURNING true
"""  # noqa: S608  # constants only
SECONDS_LEFT: Final = "extract(epoch FROM e.awaits_until - clock_timestamp())::float8 AS completion_seconds_left"
_READ: Final = f"""
SELECT e.*, {SECONDS_LEFT}, {has_lease("e.instance_id", "$4", "$5")} AS holder_alive,
    {_LEASED.format("$3")} AS asker_alive
FROM tool_registry.executions e WHERE store_id = $1 AND call_id = $2
"""  # noqa: S608  # constants only
_LOCK: Final = f"{_READ} FOR UPDATE OF e"
_TAKE: Final = """
UPDATE tool_registry.executions SET
    instance_id = $3, effect = $4, token = $5, begun_at = now(), ended_at = NULL, outcome = NULL, content = NULL,
    is_error = NULL, error_reason = NULL, note = NULL, duration_seconds = NULL, inverse = NULL, question = NULL,
    question_position = 0, answers = NULL, awaits_until = NULL, completion = NULL, completed_by = NULL, untold_at = NULL
WHERE store_id = $1 AND call_id = $2
"""
RESULT: Final = "outcome, content, is_error, error_reason, note, duration_seconds"
# Here and in the next two statements, `outcome IS NULL` makes the planner use the key. With `ended_at IS NULL`, it
# would scan all running calls while there are no statistics.
_END: Final = f"""
UPDATE tool_registry.executions SET
    ended_at = now(), ({RESULT}, inverse) = ($4, $5, $6, $7, $8, $9, $10),
    unknowns = unknowns + CASE WHEN $4 = 'UNKNOWN' THEN 1 ELSE 0 END
WHERE store_id = $1 AND call_id = $2 AND instance_id = $3 AND outcome IS NULL
"""  # noqa: S608  # constants only
_ASK: Final = """
UPDATE tool_registry.executions SET question = $4, question_position = $5
WHERE store_id = $1 AND call_id = $2 AND instance_id = $3 AND outcome IS NULL
"""
_ANSWER: Final = """
UPDATE tool_registry.executions SET answers = $3 WHERE store_id = $1 AND call_id = $2 AND outcome IS NULL
"""
_ANSWERS: Final = """
SELECT store_id, call_id, answers FROM tool_registry.executions
JOIN unnest($1::text[], $2::text[]) AS k (store_id, call_id) USING (store_id, call_id)
WHERE answers IS NOT NULL AND instance_id = $3
"""
_CANCEL: Final = """
INSERT INTO tool_registry.executions AS e
    (store_id, call_id, run_id, tool_name, tool_version, effect, fingerprint, instance_id, token, cancel_requested,
     ended_at, outcome, content, is_error, error_reason, note, duration_seconds)
VALUES ($1, $2, '', '', 0, 'AT_MOST_ONCE', '', '', '', true, now(), 'CANCELLED', $3, true, 'CANCELLED', '', 0)
ON CONFLICT (store_id, call_id) DO UPDATE SET cancel_requested = true WHERE e.ended_at IS NULL
"""
_RENEW: Final = """
INSERT INTO tool_registry.instances (instance_id, expires_at)
VALUES ($1, clock_timestamp() + make_interval(secs => $2))
ON CONFLICT (instance_id) DO UPDATE SET expires_at = excluded.expires_at
"""
_TO_CANCEL: Final = """
SELECT store_id, call_id FROM tool_registry.executions
WHERE instance_id = $1 AND ended_at IS NULL AND cancel_requested
"""
# An unjournaled call has an entry only if it was cancelled.
_CANCELLED: Final = """
SELECT store_id, call_id FROM tool_registry.executions
JOIN unnest($1::text[], $2::text[]) AS k (store_id, call_id) USING (store_id, call_id) WHERE cancel_requested
"""
_RELEASE: Final = "DELETE FROM tool_registry.instances WHERE instance_id = $1"
_FORGET: Final = """
DELETE FROM tool_registry.executions WHERE (store_id, call_id) IN (
    SELECT store_id, call_id FROM tool_registry.executions
    WHERE ended_at < now() - make_interval(secs => $1) ORDER BY ended_at LIMIT 10000)
"""
_FORGET_AWAITED: Final = """
DELETE FROM tool_registry.executions WHERE (store_id, call_id) IN (
    SELECT store_id, call_id FROM tool_registry.executions
    WHERE ended_at IS NULL AND awaits_until < now() - make_interval(secs => $1) ORDER BY awaits_until LIMIT 10000)
"""
_INSTANCES: Final = "SELECT instance_id, expires_at FROM tool_registry.instances WHERE instance_id <> $1"
_FORGET_INSTANCES: Final = f"""
DELETE FROM tool_registry.instances l
WHERE expires_at < now() - interval '1 hour' AND NOT {has_lease("l.instance_id", "$1", "$2")}
"""  # noqa: S608  # constants only
_FORGET_LOCKS: Final = f"""
DELETE FROM tool_registry.resource_locks l WHERE NOT {has_lease("l.instance_id", "$1", "$2")}
"""  # noqa: S608  # constants only

_of_result: Final = attrgetter(*RESULT.split(", "))
_CANCELLED_BEFORE: Final = ended_badly(Outcome.CANCELLED, "CANCELLED", "the call was cancelled before it started")


class PostgresExecutionJournal:
    """Records executions whose effects must not happen twice. Durable and shared by all replicas.

    `instance_id` must be new each time a process starts.
    """

    def __init__(self, database: Database, *, instance_id: str, lease_seconds: float) -> None:
        self._database = database
        self._instance_id = instance_id
        self._lease_seconds = lease_seconds
        # Updated each time this process renews its own lease.
        self.watch = LeaseWatch(lease_seconds)

    async def begin(
        self, call: JournalCall, *, unexecuted: Collection[str] = ()
    ) -> Begun | HeldElsewhere | ExecutionResult:
        """Record that the call is about to run, or return its recorded state.

        Call this only from a process that is not running the call. Atomic: Begun is returned to only one of several
        concurrent callers. `unexecuted` contains the tokens of attempts that never ran the tool because the database
        did not answer. If the call's entry has such a token, the call is safe to run.

        Raises:
            InvalidArguments: The call was started with another tool or other arguments.
            DependencyUnavailable: The entry may or may not have been written. The call must not run.
        """
        inserted = await self._database.fetchval(
            _INSERT,
            call.key.store_id,
            call.key.call_id,
            call.run_id,
            call.tool_name,
            call.tool_version,
            call.effect.value,
            call.fingerprint,
            self._instance_id,
            call.token,
            urgent=True,
        )
        if inserted:
            return Begun()
        async with self._database.transaction(urgent=True) as connection:
            return await self._resume(connection, call, unexecuted)

    async def known(self, call: JournalCall) -> ExecutionResult | HeldElsewhere | None:
        """Return a call's stored result, or HeldElsewhere if another process is running the call.

        Otherwise, return None.
        """
        row = await self._database.fetchrow(_READ, *self._reading(call.key), urgent=True)
        if row is None:
            return None
        match self._step(row, call, ()):
            case Step.STORED:
                return result_of(row)
            case Step.ELSEWHERE:
                return _held(row)
            case _:
                return None

    async def find(self, key: CallKey) -> ExecutionResult | HeldElsewhere | None:
        """Return a call's result, HeldElsewhere if another process is running it, or None if there is no entry.

        Call this only from a process that is not running the call. If the entry has no end and no live process is
        running the call, the outcome is UNKNOWN.
        """
        row = await self._database.fetchrow(_READ, *self._reading(key), urgent=True)
        return None if row is None else self._state(row)

    async def end(self, key: CallKey, result: ExecutionResult) -> ExecutionResult:
        """Write the end of a call that this process started, and return the stored result.

        The stored result is different if the call had already ended, for example because another process ended it as
        UNKNOWN.
        """
        async with self._database.acquire(urgent=True) as connection:
            if await self._write_end(connection, key, result):
                return result
            row = await connection.fetchrow(_READ, *self._reading(key))
        stored = None if row is None else result_of(row)
        return stored or result

    async def ask(self, key: CallKey, question: Question, position: int) -> None:
        """Store the open question of a call running in this process.

        `position` is the number of answers that the tool has received.
        """
        asked = msgspec.msgpack.encode(question)
        await self._database.execute(_ASK, key.store_id, key.call_id, self._instance_id, asked, position, urgent=True)

    async def answer(self, key: CallKey, answers: Sequence[Answer]) -> None:
        """Store all of the call's answers so far for the process that is running it. Idempotent."""
        await self._database.execute(_ANSWER, key.store_id, key.call_id, msgspec.msgpack.encode(answers), urgent=True)

    async def answers(self, keys: Collection[CallKey]) -> Mapping[CallKey, Sequence[Answer]]:
        if not keys:
            return {}
        rows = await self._database.fetch(_ANSWERS, *_columns(keys), self._instance_id, urgent=True)
        return {
            CallKey(row["store_id"], row["call_id"]): msgspec.msgpack.decode(row["answers"], type=list[Answer])
            for row in rows
        }

    async def cancel(self, key: CallKey) -> ExecutionResult | HeldElsewhere | None:
        """Durably request cancellation of a call. A call that has not started can no longer start.

        Return the same as `find`, or None for a call that was cancelled before it started.
        """
        async with self._database.acquire(urgent=True) as connection:
            await connection.execute(_CANCEL, key.store_id, key.call_id, _CANCELLED_BEFORE.content)
            row = await connection.fetchrow(_READ, *self._reading(key))
        if row is None or not row["fingerprint"]:
            return None
        return self._state(row)

    async def renew(self, others: Collection[CallKey] = ()) -> Collection[CallKey]:
        """Renew this process's lease and read the other processes' leases.

        Return the calls of this process that must be cancelled.

        `others` are calls that this process runs without a journal entry.
        """
        async with self._database.acquire(urgent=True) as connection:
            await connection.execute(_RENEW, self._instance_id, self._lease_seconds)
            rows = await connection.fetch(_TO_CANCEL, self._instance_id)
            await self._see(connection)
            if others:
                rows += await connection.fetch(_CANCELLED, *_columns(others))
        return [CallKey(row["store_id"], row["call_id"]) for row in rows]

    async def read_leases(self) -> None:
        """Read the leases of other processes. If this is not done regularly, expired leases are noticed late."""
        async with self._database.acquire(urgent=True) as connection:
            await self._see(connection)

    async def release(self) -> None:
        """Release the lease. Other processes then immediately treat this process's open entries as abandoned."""
        await self._database.execute(_RELEASE, self._instance_id, urgent=True)

    async def forget(self, older_than_seconds: float) -> int:
        """Delete old entries, and the locks and leases of dead processes.

        Return the number of ended entries deleted.
        """
        async with self._database.acquire(urgent=True) as connection:
            tag = await connection.execute(_FORGET, older_than_seconds)
            await connection.execute(_FORGET_AWAITED, older_than_seconds)
            await connection.execute(_FORGET_LOCKS, *self.watch.unrenewed())
            await connection.execute(_FORGET_INSTANCES, *self.watch.unrenewed())
        return affected(tag)

    async def _see(self, connection: Connection) -> None:
        asked_at = time.monotonic()
        leases = await connection.fetch(_INSTANCES, self._instance_id)
        ends = {row["instance_id"]: row["expires_at"] for row in leases}
        self.watch.see(ends, asked_at=asked_at, now=time.monotonic())

    async def _resume(
        self, connection: Connection, call: JournalCall, unexecuted: Collection[str]
    ) -> Begun | HeldElsewhere | ExecutionResult:
        row = await connection.fetchrow(_LOCK, *self._reading(call.key))
        if row is None or not row["asker_alive"]:
            # Without a lease, other processes could treat this process as dead.
            raise DependencyUnavailable("this process has lost its lease: try again later")
        match self._step(row, call, unexecuted):
            case Step.MISMATCH:
                raise InvalidArguments("this call was already started with another tool or other arguments")
            case Step.STORED:
                return result_of(row) or outcome.of_doubt(call.tool_name)
            case Step.ELSEWHERE:
                return _held(row)
            case Step.CONCLUDE_UNKNOWN if not call.is_askable:
                await self._take(connection, call)
                doubt = outcome.of_doubt(call.tool_name)
                await self._write_end(connection, call.key, doubt)
                return doubt
            case Step.CONCLUDE_UNKNOWN | Step.RECONCILE | Step.RUN as step:
                await self._take(connection, call)
                return Begun(must_reconcile=step is not Step.RUN, is_cancelled=row["cancel_requested"])

    async def _take(self, connection: Connection, call: JournalCall) -> None:
        key = call.key
        await connection.execute(_TAKE, key.store_id, key.call_id, self._instance_id, call.effect.value, call.token)

    def _reading(self, key: CallKey) -> tuple[object, ...]:
        return (key.store_id, key.call_id, self._instance_id, *self.watch.unrenewed())

    def _step(self, row: asyncpg.Record, call: JournalCall, unexecuted: Collection[str]) -> Step:
        entry = Entry(
            fingerprint=row["fingerprint"],
            effect=EffectClass(row["effect"]),
            unknowns=row["unknowns"],
            is_own=row["instance_id"] == self._instance_id,
            is_unexecuted=row["token"] in unexecuted,
            is_holder_alive=row["holder_alive"],
            result=result_of(row),
        )
        return next_step(entry, fingerprint=call.fingerprint, unknowns_resolved=call.unknowns_resolved)

    def _state(self, row: asyncpg.Record) -> ExecutionResult | HeldElsewhere | None:
        result = result_of(row)
        if result is not None or not row["fingerprint"]:
            return result
        if row["holder_alive"] and row["instance_id"] != self._instance_id:
            return _held(row)
        return outcome.of_doubt(row["tool_name"])

    async def _write_end(self, connection: Connection, key: CallKey, result: ExecutionResult) -> bool:
        tag = await connection.execute(
            _END,
            key.store_id,
            key.call_id,
            self._instance_id,
            *_of_result(result),
            None if result.inverse is None else msgspec.msgpack.encode(result.inverse),
        )
        return tag == "UPDATE 1"


def _columns(keys: Collection[CallKey]) -> tuple[list[StoreId], list[CallId]]:
    return [key.store_id for key in keys], [key.call_id for key in keys]


def _held(row: asyncpg.Record) -> HeldElsewhere:
    question = None if row["question"] is None else msgspec.msgpack.decode(row["question"], type=Question)
    return HeldElsewhere(question=question, position=row["question_position"])


def result_of(row: asyncpg.Record) -> ExecutionResult | None:
    """Return a call's end, or AWAITING_COMPLETION. While the call's tool is running, return None."""
    if row["ended_at"] is None:
        return None if row["awaits_until"] is None else awaiting_completion(row["completion_seconds_left"])
    fields = {name: row[name] for name in RESULT.split(", ")} | {"outcome": Outcome(row["outcome"])}
    inverse = None if row["inverse"] is None else msgspec.msgpack.decode(row["inverse"], type=InverseCall)
    return ExecutionResult(**fields, inverse=inverse)
