"""Stores remote workers and their calls in PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from typing import Final

import asyncpg
import msgspec

from pawl.chassis.ids import CallId, CallKey, StoreId, UserId
from pawl.server.db.database import Database, read_each
from pawl.tool.v1 import worker_pb2 as pb
from pawl.tool_registry.audit.rules import AuditDraft
from pawl.tool_registry.sources.worker.rules import (
    Attached,
    CallState,
    Listener,
    NewsKind,
    Purpose,
    WorkerKey,
    source_of,
)
from pawl.tool_registry.sources.worker.store import statements as sql
from pawl.values import Progress

PURPOSES: Final = {
    Purpose.RUN: pb.INVOCATION_PURPOSE_RUN,
    Purpose.RECONCILE: pb.INVOCATION_PURPOSE_RECONCILE,
}
_PING_SECONDS: Final = 15.0
_NEWS_PARTS: Final = 3
_NEWS_KINDS: Final = {kind.value: kind for kind in NewsKind}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCall:
    """A call for any worker in a group."""

    # The message to the worker, without the epoch.
    details: pb.Invocation
    group_name: str
    definition_hash: str
    purpose: Purpose
    # Time until the deadline.
    seconds: float
    # Unique for each execution.
    token: str
    # The audit entry for a late result, still without the outcome. None for a reconciliation.
    late: AuditDraft | None

    @property
    def key(self) -> CallKey:
        return CallKey(StoreId(self.details.store_id), CallId(self.details.call_id))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallView:
    """The state of a call, for the execution that sent it."""

    state: CallState
    purpose: Purpose
    # True if its worker's lease has expired by the database clock, or the worker reattached without the call.
    is_lost: bool
    # True if the worker reattached without the call.
    is_dropped: bool
    progress: Progress | None
    # When a worker last stored a checkpoint in this execution.
    checkpoint_time: datetime | None
    answer: pb.WorkerResult | None


class PostgresWorkerRepository:
    """Stores workers and their calls durably. Times come from the database's clock.

    All methods can raise DependencyUnavailable. Methods that take a `token` ignore calls that another execution has
    taken over.

    `instance_id` must be the same as the journal's, because both share its lease.
    """

    def __init__(self, database: Database, *, instance_id: str) -> None:
        self._database = database
        self._instance_id = instance_id

    async def owner(self, store_id: StoreId, group_name: str, user_id: UserId) -> UserId:
        """Return a group's owner. If the group is new or has no tools, `user_id` becomes the owner. Atomic."""
        owner_id: UserId = await self._database.fetchval(
            sql.OWN_GROUP, store_id, group_name, user_id, source_of(group_name)
        )
        return owner_id

    async def unserved(self, attachments: Collection[str]) -> Collection[str]:
        """Return attachments with outdated definitions of tools for which no live worker has the current definition."""
        return {row["attachment"] for row in await self._database.fetch(sql.UNSERVED, list(attachments))}

    async def has_successor(self, worker: WorkerKey, tool_name: str, definition_hash: str, current_hash: str) -> bool:
        """Return whether the group once registered this definition, and another live worker has the current one."""
        hashes = (definition_hash, current_hash)
        return bool(
            await self._database.fetchval(sql.HAS_SUCCESSOR, *worker, tool_name, *hashes, source_of(worker.group_name))
        )

    async def attach(self, worker: Attached, *, held: Mapping[CallId, int], lease_seconds: float) -> Mapping[str, int]:
        """Store a worker's stream, replacing any earlier one.

        Return the calls that the worker holds, with their epochs. Calls that the worker should hold become lost if they
        are not in `held`. Atomic.
        """
        tools = worker.tools
        async with self._database.transaction() as connection:
            await connection.execute(
                sql.ATTACH,
                *worker.key,
                self._instance_id,
                worker.attachment,
                lease_seconds,
                list(tools.keys()),
                list(tools.values()),
            )
            await connection.execute(sql.LOSE, *worker.key, list(held.keys()), list(held.values()))
            rows = await connection.fetch(sql.HELD, *worker.key)
        return {row["call_id"]: row["lease_epoch"] for row in rows}

    async def renew(self, seconds: Mapping[str, float]) -> Collection[str]:
        """Renew the leases of attachments for `seconds`. Return the attachments that still exist."""
        rows = await self._database.fetch(sql.RENEW, list(seconds.keys()), list(seconds.values()))
        return {row["attachment"] for row in rows}

    async def detach(self, worker: Attached) -> None:
        """End a worker's lease now. Idempotent."""
        await self._database.fetch(sql.DETACH, *worker.key, worker.attachment)

    async def is_attached(self, store_id: StoreId, group_name: str, tool_name: str, definition_hash: str) -> bool:
        """Return whether a live worker in the group has this definition, in any process."""
        return bool(await self._database.fetchval(sql.IS_ATTACHED, store_id, group_name, tool_name, definition_hash))

    async def add(self, call: WorkerCall, worker: Attached | None) -> int | None:
        """Write a call. If `worker` is given and still attached, assign the call to it and return the lease epoch.

        Otherwise, the call waits for a worker, and the result is None. The call is taken over from any earlier
        execution. Idempotent by token. Calls of erased runs are not written.
        """
        worker_id = "" if worker is None else worker.key.worker_id
        rows = await self._database.fetch(
            sql.ADD,
            call.key.store_id,
            call.key.call_id,
            call.group_name,
            call.details.tool_name,
            call.definition_hash,
            call.purpose.value,
            call.details.SerializeToString(),
            call.details.attempt,
            call.seconds,
            call.token,
            self._instance_id,
            worker_id,
            "" if worker is None else worker.attachment,
            None if call.late is None else msgspec.msgpack.encode(call.late),
            call.details.run_id,
        ) or await self._database.fetch(sql.ADDED_BEFORE, call.key.store_id, call.key.call_id, call.token, worker_id)
        if not rows or rows[0]["state"] != CallState.HELD:
            return None
        epoch: int = rows[0]["lease_epoch"]
        return epoch

    async def adopt(self, call: WorkerCall) -> bool:
        """Take over a call, in its current state, from a dead process or from this one.

        Return whether this was possible.
        """
        rows = await self._database.fetch(
            sql.ADOPT,
            call.key.store_id,
            call.key.call_id,
            call.token,
            call.group_name,
            call.details.tool_name,
            call.seconds,
            self._instance_id,
        )
        return bool(rows)

    async def claim(self, worker: Attached, *, most: int) -> Sequence[pb.Invocation]:
        """Claim waiting calls for a worker, earliest deadline first. Only one process can claim each call."""
        tools = worker.tools
        rows = await self._database.fetch(
            sql.CLAIM, *worker.key, list(tools.keys()), list(tools.values()), most, worker.attachment
        )
        return read_each("call", rows, _invocation, itemgetter("call_id"))

    async def held(self, attachments: Collection[str]) -> Collection[tuple[str, CallKey, int]]:
        """Return the calls that attached workers hold, as (attachment, call, lease epoch)."""
        rows = await self._database.fetch(sql.HELD_BY, list(attachments))
        return [(row["attachment"], CallKey(row["store_id"], row["call_id"]), row["lease_epoch"]) for row in rows]

    async def put_back(self, call: CallKey, lease_epoch: int) -> None:
        """Make a call wait for a worker again. The call was claimed, but was not sent."""
        await self._database.fetch(sql.PUT_BACK, call.store_id, call.call_id, lease_epoch)

    async def report(self, worker: WorkerKey, call_id: CallId, lease_epoch: int, progress: Progress) -> None:
        await self._database.fetch(sql.REPORT, *worker, call_id, lease_epoch, msgspec.msgpack.encode(progress))

    async def keep_checkpoint(self, worker: WorkerKey, call_id: CallId, lease_epoch: int, content: bytes) -> bool:
        """Store a checkpoint. Return False if the worker does not hold the call, or if the call is cancelled.

        Atomic.
        """
        return bool(await self._database.fetch(sql.KEEP_CHECKPOINT, *worker, call_id, lease_epoch, content))

    async def finish(
        self, worker: WorkerKey, result: pb.WorkerResult
    ) -> tuple[pb.ResultStatus.ValueType, AuditDraft | None]:
        """Store a worker's answer and return its status. A repeated answer gets the same status.

        If the answer is late, also return its audit entry (still without the outcome), unless it was already written.
        """
        key = (*worker, result.call_id, result.lease_epoch)
        rows = await self._database.fetch(sql.FINISH, *key, result.SerializeToString(), self._instance_id)
        rows = rows or await self._database.fetch(sql.KNOWN, *key)
        if not rows:
            return pb.RESULT_STATUS_UNKNOWN, None
        status = pb.RESULT_STATUS_ACCEPTED if rows[0]["is_accepted"] else pb.RESULT_STATUS_LATE
        late = rows[0]["late_origin"]
        return status, None if late is None else msgspec.msgpack.decode(late, type=AuditDraft)

    async def mark_reported(self, call: CallKey, lease_epoch: int) -> None:
        """Record that this lease epoch's late result is in the audit chain. Idempotent."""
        await self._database.fetch(sql.MARK_REPORTED, call.store_id, call.call_id, lease_epoch)

    async def find(self, call: CallKey, token: str) -> CallView | None:
        """Return a call's state, or None if another execution has taken over the call or it was deleted."""
        rows = await self._database.fetch(sql.FIND, call.store_id, call.call_id, token)
        return _view(rows[0]) if rows else None

    async def reassign(self, call: CallKey, token: str, purpose: Purpose) -> bool:
        """Make a lost or answered call wait again.

        Return False if the call is neither lost nor answered, or was cancelled.
        """
        return bool(await self._database.fetch(sql.REASSIGN, call.store_id, call.call_id, token, purpose.value))

    async def conclude_lost(self, call: CallKey, token: str) -> bool:
        """Close a lost call, so that a later answer counts as late. Return False if the call is not lost."""
        return bool(await self._database.fetch(sql.CONCLUDE_LOST, call.store_id, call.call_id, token))

    async def withdraw(self, call: CallKey, token: str) -> bool:
        """Close a call that is still waiting, so that no worker gets it. Return False if it is not waiting."""
        return bool(await self._database.fetch(sql.WITHDRAW, call.store_id, call.call_id, token))

    async def abandon(self, call: CallKey, token: str, worker: WorkerKey) -> None:
        """Close a call that may have been assigned to a worker, but was not sent."""
        await self._database.fetch(sql.ABANDON, call.store_id, call.call_id, token, worker.worker_id)

    async def cancel(self, call: CallKey, token: str) -> bool:
        """Request the end of a call.

        Return whether a worker holds the call. If so, the caller must await the worker's answer.
        """
        rows = await self._database.fetch(sql.CANCEL, call.store_id, call.call_id, token)
        return any(row["state"] == CallState.HELD for row in rows)

    async def settle(self, call: CallKey, token: str) -> None:
        """Delete a closed call's arguments and answer. Idempotent."""
        await self._database.fetch(sql.SETTLE, call.store_id, call.call_id, token)

    async def news(self) -> Collection[CallKey]:
        """Return the calls of this process's executions that are answered or lost."""
        rows = await self._database.fetch(sql.NEWS, self._instance_id)
        return [CallKey(row["store_id"], row["call_id"]) for row in rows]

    async def waiting_groups(self) -> Collection[tuple[StoreId, str]]:
        return [(row["store_id"], row["group_name"]) for row in await self._database.fetch(sql.WAITING_GROUPS)]

    async def unwanted(self, calls: Collection[tuple[WorkerKey, CallId, int]]) -> Collection[tuple[WorkerKey, CallId]]:
        """Return the elements of `calls` that were cancelled or that their worker no longer holds."""
        columns = zip(*((*worker, call_id, epoch) for worker, call_id, epoch in calls), strict=True)
        rows = await self._database.fetch(sql.UNWANTED, *map(list, columns))
        return [(WorkerKey(row["store_id"], row["group_name"], row["worker_id"]), row["call_id"]) for row in rows]

    async def forget(self) -> None:
        """Delete workers and calls that expired more than a day ago."""
        await self._database.fetch(sql.FORGET_CALLS)
        await self._database.fetch(sql.FORGET_WORKERS)

    async def listen(self, listener: Listener) -> None:
        """Pass notifications from other processes to the listener until the connection breaks or this is cancelled."""

        def on_notification(_connection: object, _pid: int, _channel: str, payload: object) -> None:
            parts = str(payload).split(" ")
            if len(parts) == _NEWS_PARTS and parts[0] in _NEWS_KINDS:
                listener(_NEWS_KINDS[parts[0]], StoreId(parts[1]), parts[2])

        async with self._database.acquire() as connection:
            await connection.add_listener(sql.CHANNEL, on_notification)
            try:
                while True:
                    # A broken connection is only noticed when it is used.
                    await asyncio.sleep(_PING_SECONDS)
                    await connection.execute("SELECT 1")
            finally:
                if not connection.is_closed():
                    await connection.remove_listener(sql.CHANNEL, on_notification)


def _invocation(row: asyncpg.Record) -> pb.Invocation:
    """Return the message for a call to the worker that currently holds it, which may not be the first one."""
    call = pb.Invocation.FromString(row["details"])
    call.purpose = PURPOSES[Purpose(row["purpose"])]
    call.lease_epoch = row["lease_epoch"]
    call.attempt = row["attempt"]
    call.deadline_time.FromDatetime(row["deadline"])
    call.last_checkpoint_json = row["last_checkpoint"] or b""
    return call


def _view(row: asyncpg.Record) -> CallView:
    progress, answer = row["progress"], row["answer"]
    return CallView(
        state=CallState(row["state"]),
        purpose=Purpose(row["purpose"]),
        is_lost=row["is_lost"],
        is_dropped=row["is_dropped"],
        progress=None if progress is None else msgspec.msgpack.decode(progress, type=Progress),
        checkpoint_time=row["checkpoint_time"],
        answer=None if answer is None else pb.WorkerResult.FromString(answer),
    )
