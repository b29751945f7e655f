"""Calls that are completed externally, stored in the journal in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import Final

import asyncpg
import msgspec

from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CallId, CallKey, CredentialId, StoreId, UserId
from pawl.errors import CallNotPending, CompletionNotFound, DeadlinePassed
from pawl.server.db.database import Connection, Database, read_each
from pawl.tool_registry import outcome
from pawl.tool_registry.audit.rules import AuditDraft, sha256_hex
from pawl.tool_registry.execution.rules import CallEnd, CompletionTerms
from pawl.tool_registry.execution.store.journal import RESULT, SECONDS_LEFT, result_of
from pawl.tool_registry.rules.execution import ExecutionResult, awaiting_completion, ended_badly
from pawl.values import Outcome

_CLAIM_SECONDS: Final = 30
_PAUSE_SECONDS: Final = 1
_COMPLETED: Final = "COMPLETED"
_LAPSED: Final = "the deadline for completing this call has passed"
GONE: Final = "the call has already ended, or was cancelled; the completion was ignored"

# `outcome IS NULL` instead of `ended_at IS NULL`: see `_END` in the journal.
_OPEN: Final = """
UPDATE tool_registry.executions SET completion_digest = $4, completion_terms = $5
WHERE store_id = $1 AND call_id = $2 AND instance_id = $3 AND outcome IS NULL RETURNING true
"""
_ROW: Final = f"SELECT e.*, {SECONDS_LEFT} FROM tool_registry.executions e"  # noqa: S608  # constants only
_LOCK: Final = f"{_ROW} WHERE store_id = $1 AND call_id = $2 FOR UPDATE"
_FIND: Final = f"{_ROW} WHERE store_id = $1 AND completion_digest = $2"
_LOCK_FOUND: Final = f"{_FIND} FOR UPDATE"
_HOLD: Final = """
UPDATE tool_registry.executions SET
    awaits_until = clock_timestamp() + make_interval(secs => $3), completion_terms = $4, instance_id = ''
WHERE store_id = $1 AND call_id = $2
"""
_END: Final = f"""
UPDATE tool_registry.executions SET
    ended_at = clock_timestamp(), untold_at = clock_timestamp(), completion = $8, completed_by = $9,
    ({RESULT}) = ($3, $4, $5, $6, $7, extract(epoch FROM clock_timestamp() - begun_at))
WHERE store_id = $1 AND call_id = $2
"""  # noqa: S608  # constants only
_CLAIM: Final = """
UPDATE tool_registry.executions SET untold_at = clock_timestamp() + make_interval(secs => $2)
WHERE (store_id, call_id) IN (
    SELECT store_id, call_id FROM tool_registry.executions
    WHERE untold_at <= clock_timestamp() ORDER BY untold_at LIMIT $1 FOR UPDATE SKIP LOCKED)
RETURNING *, NULL::float8 AS completion_seconds_left
"""
_REPORTED: Final = """
UPDATE tool_registry.executions SET
    untold_at = CASE WHEN $3 THEN NULL ELSE clock_timestamp() + make_interval(secs => $4) END
WHERE store_id = $1 AND call_id = $2 AND untold_at IS NOT NULL
"""

_of_result: Final = attrgetter(*RESULT.split(", ")[:-1])
_terms: Final = msgspec.msgpack.Decoder(CompletionTerms).decode


class PostgresCompletions:
    """Calls that are completed externally, stored in the journal that all replicas share.

    `instance_id` must be the journal's.
    """

    def __init__(self, database: Database, *, instance_id: str) -> None:
        self._database = database
        self._instance_id = instance_id

    async def open(self, key: CallKey, digest: bytes, terms: CompletionTerms) -> bool:
        """Store the token of a call, replacing any earlier token.

        Return False if the call is no longer running here.
        """
        data = msgspec.msgpack.encode(terms)
        opened = await self._database.fetchval(
            _OPEN, key.store_id, key.call_id, self._instance_id, digest, data, urgent=True
        )
        return opened is not None

    async def hold(self, key: CallKey, terms: CompletionTerms, seconds: float) -> ExecutionResult | None:
        """Let a call wait up to `seconds` without its tool. Return the call's state, which may be final. Atomic.

        Return None if the call is no longer running here, or if it has no token with which to complete it.
        """
        async with self._database.transaction(urgent=True) as connection:
            row = await connection.fetchrow(_LOCK, key.store_id, key.call_id)
            if row is None:
                return None  # It was erased.
            known = result_of(row)
            if known is not None:
                return known
            if row["instance_id"] != self._instance_id or row["completion_digest"] is None:
                return None
            earlier = _terms(row["completion_terms"]).secret_names
            terms = replace(terms, secret_names=tuple(sorted({*earlier, *terms.secret_names})))
            if row["cancel_requested"]:
                return await _cancel(connection, key, row)
            await connection.execute(_HOLD, key.store_id, key.call_id, seconds, msgspec.msgpack.encode(terms))
        return awaiting_completion(seconds)

    async def lapse(self, key: CallKey, result: ExecutionResult) -> ExecutionResult:
        """If the deadline of a call has passed, end it with `result`. Return the call's state."""
        async with self._database.transaction(urgent=True) as connection:
            row = await connection.fetchrow(_LOCK, key.store_id, key.call_id)
            known = None if row is None else result_of(row)
            if known is None or known.outcome is not Outcome.AWAITING_COMPLETION or known.completion_seconds_left:
                return known or result
            await _end(connection, key, result)
        return result

    async def withdraw(self, key: CallKey) -> ExecutionResult | None:
        """Cancel a call that is waiting for its completion. Return its state.

        Return None if the call is unknown or still running.
        """
        async with self._database.transaction(urgent=True) as connection:
            row = await connection.fetchrow(_LOCK, key.store_id, key.call_id)
            known = None if row is None else result_of(row)
            if row is None or known is None or known.outcome is not Outcome.AWAITING_COMPLETION:
                return known
            return await _cancel(connection, key, row)

    async def find(self, store_id: StoreId, digest: bytes) -> tuple[CompletionTerms, bool] | None:
        """Return the terms for completing the call with this token, and whether the call is still open.

        Return None if no call has this token.
        """
        row = await self._database.fetchrow(_FIND, store_id, digest, urgent=True)
        return None if row is None else (_terms(row["completion_terms"]), row["ended_at"] is None)

    async def complete(
        self, store_id: StoreId, digest: bytes, end: CallEnd, result: ExecutionResult, by: Principal
    ) -> bool:
        """Complete a call once. Return whether it had already ended in exactly this way. Atomic, and durable on return.

        Raises:
            CompletionNotFound: No call has the token.
            CallNotPending: The call has already ended differently, or was cancelled.
            DeadlinePassed: The call's deadline has passed.
        """
        async with self._database.transaction(urgent=True) as connection:
            row = await connection.fetchrow(_LOCK_FOUND, store_id, digest)
            if row is None:
                raise CompletionNotFound
            known = result_of(row)
            if known is not None and known.outcome is not Outcome.AWAITING_COMPLETION:
                if row["completion"] == end.digest:
                    return True
                is_lapsed = row["completion"] is None and known.error_reason == outcome.NOT_COMPLETED
                raise DeadlinePassed(_LAPSED) if is_lapsed else CallNotPending(GONE)
            if row["cancel_requested"]:
                raise CallNotPending(GONE)
            if known is not None and not known.completion_seconds_left:
                raise DeadlinePassed(_LAPSED)
            key = CallKey(store_id, CallId(row["call_id"]))
            await _end(connection, key, result, end=end, by=by)
        return False

    async def claim_unreported(self, most: int) -> Sequence[tuple[AuditDraft, bool]]:
        """Return the audit entries for calls whose ends have not been reported yet.

        Each entry comes with a flag that is True for a completion. Other replicas cannot claim these ends for
        `_CLAIM_SECONDS`.
        """
        rows = await self._database.fetch(_CLAIM, most, _CLAIM_SECONDS)
        return read_each("completion", rows, _unreported, itemgetter("call_id"))

    async def mark_reported(self, key: CallKey, *, is_reported: bool) -> None:
        """Mark an end as reported, or schedule another attempt to report it."""
        await self._database.execute(_REPORTED, key.store_id, key.call_id, is_reported, _PAUSE_SECONDS)


async def _end(
    connection: Connection,
    key: CallKey,
    result: ExecutionResult,
    *,
    end: CallEnd | None = None,
    by: Principal | None = None,
) -> None:
    people = None if by is None else [by.user_id, by.credential_id, by.delegate_user_id]
    completion = None if end is None else end.digest
    await connection.execute(_END, key.store_id, key.call_id, *_of_result(result), completion, people)


async def _cancel(connection: Connection, key: CallKey, row: asyncpg.Record) -> ExecutionResult:
    message = f"{row['tool_name']} was cancelled before it was completed; it may have taken effect"
    result = ended_badly(Outcome.CANCELLED, "CANCELLED", message)
    await _end(connection, key, result)
    return result


def _unreported(row: asyncpg.Record) -> tuple[AuditDraft, bool]:
    result = result_of(row)
    if result is None:
        raise ValueError("an unreported call has not ended")
    by = row["completed_by"] or ("", "", "")
    draft = replace(
        _terms(row["completion_terms"]).draft,
        time_us=round(row["ended_at"].timestamp() * 1_000_000),
        verdict=result.outcome.value,
        reason=result.error_reason or _COMPLETED,
        by_user_id=UserId(by[0]),
        by_credential_id=CredentialId(by[1]),
        by_delegate_user_id=UserId(by[2]),
        result_sha256=sha256_hex(result.content),
        result_bytes=len(result.content),
        duration_us=int(result.duration_seconds * 1_000_000),
    )
    return draft, row["completion"] is not None
