"""Remote workers and their calls in PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from typing import Final

import asyncpg
import msgspec

from pawl.chassis.database import Database
from pawl.chassis.ids import CallId, CallKey, StoreId, UserId
from pawl.chassis.rows import read_each
from pawl.tool.v1 import worker_pb2 as pb
from pawl.tool_registry.adapters.postgres import worker_statements as sql
from pawl.tool_registry.app.workers.call import invocation
from pawl.tool_registry.app.workers.ports import Attached, CallView, Finished, LateCall, Listener, NewsKind
from pawl.tool_registry.domain.workers import (
    Answer,
    CallDetails,
    CallState,
    Origin,
    Purpose,
    WorkerCall,
    WorkerKey,
    source_of,
)
from pawl.values import Progress

_PING_SECONDS: Final = 15.0
_NEWS_PARTS: Final = 3
_NEWS_KINDS: Final = {kind.value: kind for kind in NewsKind}


class PostgresWorkerRepository:
    """The WorkerRepository port. `instance_id` is that of the journal: the lease of one is that of the other."""

    def __init__(self, database: Database, *, instance_id: str) -> None:
        self._database = database
        self._instance_id = instance_id

    async def owner(self, store_id: StoreId, group_name: str, user_id: UserId) -> UserId:
        owner_id: UserId = await self._database.fetchval(
            sql.OWN_GROUP, store_id, group_name, user_id, source_of(group_name)
        )
        return owner_id

    async def unserved(self, attachments: Collection[str]) -> Collection[str]:
        return {row["attachment"] for row in await self._database.fetch(sql.UNSERVED, list(attachments))}

    async def has_successor(self, worker: WorkerKey, tool_name: str, definition_hash: str, current_hash: str) -> bool:
        hashes = (definition_hash, current_hash)
        return bool(
            await self._database.fetchval(sql.HAS_SUCCESSOR, *worker, tool_name, *hashes, source_of(worker.group_name))
        )

    async def attach(self, worker: Attached, *, held: Mapping[CallId, int], lease_seconds: float) -> Mapping[str, int]:
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
        rows = await self._database.fetch(sql.RENEW, list(seconds.keys()), list(seconds.values()))
        return {row["attachment"] for row in rows}

    async def detach(self, worker: Attached) -> None:
        await self._database.fetch(sql.DETACH, *worker.key, worker.attachment)

    async def is_attached(self, store_id: StoreId, group_name: str, tool_name: str, definition_hash: str) -> bool:
        return bool(await self._database.fetchval(sql.IS_ATTACHED, store_id, group_name, tool_name, definition_hash))

    async def add(self, call: WorkerCall, worker: Attached | None) -> int | None:
        worker_id = "" if worker is None else worker.key.worker_id
        rows = await self._database.fetch(
            sql.ADD,
            call.store_id,
            call.call_id,
            call.group_name,
            call.tool_name,
            call.definition_hash,
            call.purpose.value,
            msgspec.msgpack.encode(call.details),
            call.attempt,
            call.seconds,
            call.token,
            self._instance_id,
            worker_id,
            "" if worker is None else worker.attachment,
            None if call.origin is None else msgspec.msgpack.encode(call.origin),
            call.details.run_id,
        ) or await self._database.fetch(sql.ADDED_BEFORE, call.store_id, call.call_id, call.token, worker_id)
        if not rows or rows[0]["state"] != CallState.HELD:
            return None
        epoch: int = rows[0]["lease_epoch"]
        return epoch

    async def adopt(self, call: WorkerCall) -> bool:
        rows = await self._database.fetch(
            sql.ADOPT,
            call.store_id,
            call.call_id,
            call.token,
            call.group_name,
            call.tool_name,
            call.seconds,
            self._instance_id,
        )
        return bool(rows)

    async def claim(self, worker: Attached, *, most: int) -> Sequence[pb.Invocation]:
        tools = worker.tools
        rows = await self._database.fetch(
            sql.CLAIM, *worker.key, list(tools.keys()), list(tools.values()), most, worker.attachment
        )
        return read_each("call", rows, _invocation, itemgetter("call_id"))

    async def held(self, attachments: Collection[str]) -> Collection[tuple[str, CallKey, int]]:
        rows = await self._database.fetch(sql.HELD_BY, list(attachments))
        return [(row["attachment"], CallKey(row["store_id"], row["call_id"]), row["lease_epoch"]) for row in rows]

    async def put_back(self, call: CallKey, lease_epoch: int) -> None:
        await self._database.fetch(sql.PUT_BACK, call.store_id, call.call_id, lease_epoch)

    async def report(self, worker: WorkerKey, call_id: CallId, lease_epoch: int, progress: Progress) -> None:
        await self._database.fetch(sql.REPORT, *worker, call_id, lease_epoch, msgspec.msgpack.encode(progress))

    async def keep_checkpoint(self, worker: WorkerKey, call_id: CallId, lease_epoch: int, content: bytes) -> bool:
        return bool(await self._database.fetch(sql.KEEP_CHECKPOINT, *worker, call_id, lease_epoch, content))

    async def finish(self, worker: WorkerKey, call_id: CallId, lease_epoch: int, answer: Answer) -> Finished:
        stored = msgspec.msgpack.encode(answer)
        rows = await self._database.fetch(sql.FINISH, *worker, call_id, lease_epoch, stored, self._instance_id)
        rows = rows or await self._database.fetch(sql.KNOWN, *worker, call_id, lease_epoch)
        return _finished(rows[0]) if rows else Finished(status=pb.RESULT_STATUS_UNKNOWN)

    async def mark_told(self, call: CallKey, lease_epoch: int) -> None:
        await self._database.fetch(sql.MARK_TOLD, call.store_id, call.call_id, lease_epoch)

    async def look(self, call: CallKey, token: str) -> CallView | None:
        rows = await self._database.fetch(sql.LOOK, call.store_id, call.call_id, token)
        return _view(rows[0]) if rows else None

    async def hand_out_again(self, call: CallKey, token: str, purpose: Purpose) -> bool:
        return bool(await self._database.fetch(sql.HAND_OUT_AGAIN, call.store_id, call.call_id, token, purpose.value))

    async def conclude_lost(self, call: CallKey, token: str) -> bool:
        return bool(await self._database.fetch(sql.CONCLUDE_LOST, call.store_id, call.call_id, token))

    async def withdraw(self, call: CallKey, token: str) -> bool:
        return bool(await self._database.fetch(sql.WITHDRAW, call.store_id, call.call_id, token))

    async def abandon(self, call: CallKey, token: str, worker: WorkerKey) -> None:
        await self._database.fetch(sql.ABANDON, call.store_id, call.call_id, token, worker.worker_id)

    async def cancel(self, call: CallKey, token: str) -> bool:
        rows = await self._database.fetch(sql.CANCEL, call.store_id, call.call_id, token)
        return any(row["state"] == CallState.HELD for row in rows)

    async def settle(self, call: CallKey, token: str) -> None:
        await self._database.fetch(sql.SETTLE, call.store_id, call.call_id, token)

    async def news(self) -> Collection[CallKey]:
        rows = await self._database.fetch(sql.NEWS, self._instance_id)
        return [CallKey(row["store_id"], row["call_id"]) for row in rows]

    async def waiting_groups(self) -> Collection[tuple[StoreId, str]]:
        return [(row["store_id"], row["group_name"]) for row in await self._database.fetch(sql.WAITING_GROUPS)]

    async def unwanted(self, calls: Collection[tuple[WorkerKey, CallId, int]]) -> Collection[tuple[WorkerKey, CallId]]:
        columns = zip(*((*worker, call_id, epoch) for worker, call_id, epoch in calls), strict=True)
        rows = await self._database.fetch(sql.UNWANTED, *map(list, columns))
        return [(WorkerKey(row["store_id"], row["group_name"], row["worker_id"]), row["call_id"]) for row in rows]

    async def forget(self) -> None:
        await self._database.fetch(sql.FORGET_CALLS)
        await self._database.fetch(sql.FORGET_WORKERS)

    async def listen(self, listener: Listener) -> None:
        def on_notification(_connection: object, _pid: int, _channel: str, payload: object) -> None:
            parts = str(payload).split(" ")
            if len(parts) == _NEWS_PARTS and parts[0] in _NEWS_KINDS:
                listener(_NEWS_KINDS[parts[0]], StoreId(parts[1]), parts[2])

        async with self._database.acquire() as connection:
            await connection.add_listener(sql.CHANNEL, on_notification)
            try:
                while True:
                    # Notifications come by themselves; a connection that broke says so only when it is used.
                    await asyncio.sleep(_PING_SECONDS)
                    await connection.execute("SELECT 1")
            finally:
                if not connection.is_closed():
                    await connection.remove_listener(sql.CHANNEL, on_notification)


def _invocation(row: asyncpg.Record) -> pb.Invocation:
    details = msgspec.msgpack.decode(row["details"], type=CallDetails)
    return invocation(
        details,
        purpose=Purpose(row["purpose"]),
        store_id=row["store_id"],
        call_id=row["call_id"],
        lease_epoch=row["lease_epoch"],
        tool_name=row["tool_name"],
        deadline_time=row["deadline"],
        attempt=row["attempt"],
        last_checkpoint_json=row["last_checkpoint"] or b"",
    )


def _finished(row: asyncpg.Record) -> Finished:
    status = pb.RESULT_STATUS_ACCEPTED if row["is_accepted"] else pb.RESULT_STATUS_LATE
    origin = row["late_origin"]
    if origin is None:
        return Finished(status=status)
    late = LateCall(tool_name=row["tool_name"], origin=msgspec.msgpack.decode(origin, type=Origin))
    return Finished(status=status, late=late)


def _view(row: asyncpg.Record) -> CallView:
    progress, answer = row["progress"], row["answer"]
    return CallView(
        state=CallState(row["state"]),
        purpose=Purpose(row["purpose"]),
        is_lost=row["is_lost"],
        is_given_up=row["is_given_up"],
        progress=None if progress is None else msgspec.msgpack.decode(progress, type=Progress),
        answer=None if answer is None else msgspec.msgpack.decode(answer, type=Answer),
    )
