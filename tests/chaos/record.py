"""The record to judge: the history, the effects, and the ledger as its owners read it through the public API."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pawl.agent.v1 import agent_pb2
from pawl.event.v1 import call_pb2, event_pb2, message_pb2, run_pb2
from pawl.notify.v1 import notify_pb2, notify_pb2_grpc
from tests.chaos.caller import Caller, pages
from tests.chaos.effects import Effect
from tests.chaos.history import History
from tests.chaos.logs import Scan
from tests.chaos.world import STORES, USERS, World
from tests.keys import keyed_channel

_PAGE = 200
_AT_ONCE = 8
_READ_SECONDS = 60.0

# Store and user.
Owner = tuple[str, str]


@dataclass(slots=True, kw_only=True)
class Record:
    history: History
    effects: list[Effect] = field(default_factory=list)
    runs: dict[str, run_pb2.Run] = field(default_factory=dict)
    owners: dict[str, list[Owner]] = field(default_factory=dict)
    calls: dict[str, call_pb2.Call] = field(default_factory=dict)
    logs: dict[str, list[event_pb2.RunEvent]] = field(default_factory=dict)
    messages: dict[str, list[message_pb2.Message]] = field(default_factory=dict)
    notifications: dict[Owner, list[notify_pb2.Notification]] = field(default_factory=dict)
    process_logs: Scan = field(default_factory=Scan)


async def read(world: World) -> Record:
    record = Record(history=world.history, effects=world.effects.happened())
    gate = asyncio.Semaphore(_AT_ONCE)

    async def bounded(work: Awaitable[None]) -> None:
        async with gate:
            await work

    for store_id in STORES:
        for user_id in USERS:
            caller = world.caller(store_id, user_id)
            run_ids = await _read_runs(record, caller)
            conversations = {record.runs[run_id].conversation_id for run_id in run_ids}
            works = [_read_run(record, caller, run_id) for run_id in run_ids]
            works += [_read_messages(record, caller, conversation) for conversation in conversations]
            await asyncio.gather(*(bounded(work) for work in works))
    await read_notifications(world, record)
    return record


async def read_notifications(world: World, record: Record) -> None:
    for store_id in STORES:
        for user_id in USERS:
            record.notifications[store_id, user_id] = await _notifications(world, store_id, user_id)


async def _pages(caller: Caller, method: str, request: Any, field: str) -> list[Any]:
    request.page_size = _PAGE
    return await pages(
        lambda page: caller.read(lambda: caller.send(method, page, seconds=_READ_SECONDS)), request, field
    )


async def _read_runs(record: Record, caller: Caller) -> list[str]:
    runs: list[run_pb2.Run] = await _pages(caller, "ListRuns", agent_pb2.ListRunsRequest(), "runs")
    for run in runs:
        record.runs[run.run_id] = run
        record.owners.setdefault(run.run_id, []).append((caller.store_id, caller.user_id))
    return [run.run_id for run in runs]


async def _read_run(record: Record, caller: Caller, run_id: str) -> None:
    async def watch() -> list[event_pb2.RunEvent]:
        request = agent_pb2.WatchRunRequest(run_id=run_id)
        stream = caller.draw.choice(caller.stubs).WatchRun(request, metadata=caller.metadata, timeout=_READ_SECONDS)
        return [event async for answer in stream for event in answer.events]

    calls = await _pages(caller, "ListCalls", agent_pb2.ListCallsRequest(run_id=run_id), "calls")
    record.calls |= {call.call_id: call for call in calls}
    record.logs[run_id] = await caller.read(watch)


async def _read_messages(record: Record, caller: Caller, conversation_id: str) -> None:
    request = agent_pb2.ListMessagesRequest(conversation_id=conversation_id)
    record.messages[conversation_id] = await _pages(caller, "ListMessages", request, "messages")


async def _notifications(world: World, store_id: str, user_id: str) -> list[notify_pb2.Notification]:
    metadata = (("pawl-store", store_id), ("pawl-user", user_id))
    async with keyed_channel(world.suite.endpoints.services["notifier"][0].grpc) as channel:
        stub = notify_pb2_grpc.NotifyServiceStub(channel)
        request = notify_pb2.ListNotificationsRequest(page_size=_PAGE)
        return await pages(partial(stub.ListNotifications, metadata=metadata), request, "notifications")
