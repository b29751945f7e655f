"""The suite under test with two replicas of each service, its load, the outside world, and the record to judge.

The record is the history, the effects, and the ledger as its owners read it through the public API.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from pawl.agent.v1 import agent_pb2, agent_pb2_grpc, goal_pb2_grpc, workflow_pb2, workflow_pb2_grpc
from pawl.event.v1 import call_pb2, event_pb2, message_pb2, run_pb2
from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite
from pawl.notify.v1 import notify_pb2, notify_pb2_grpc
from pawl.tool.v1 import tool_pb2, tool_pb2_grpc
from tests.chaos.caller import Caller, Stub, pages
from tests.chaos.history import Effect, EffectFile, History, Scan
from tests.chaos.people import Person, Watcher
from tests.chaos.prompts import PANEL, WORKFLOWS
from tests.chaos.tools import FILE_VARIABLE
from tests.keys import LOCAL_KEY, keyed_channel
from tests.service import stages

SERVICES = ("job-store", "tool-registry", "notifier", "agent-loop")
REPLICAS = 2
STORES = ("north", "south")
USERS = ("ann", "bob", "cy")
_OWNERS = tuple(itertools.product(STORES, USERS))
LEASE_SECONDS = 3.0

# Leases and timeouts are short, so that phases can be short too.
_STAGES = stages(
    agent_loop={"lease_seconds": LEASE_SECONDS, "lease_renew_seconds": 1.0},
    tool_registry={"execution_lease_seconds": LEASE_SECONDS},
)
# Rounds and runs have long ones, because several faults may hit one round on a slow machine.
_LIMITS = {
    "defaults": {
        "model_headers_timeout_seconds": 2,
        "model_idle_timeout_seconds": 2,
        "round_timeout_seconds": 600,
        "run_timeout_seconds": 900,
    }
}

# A channel finds a restarted replica immediately, not after gRPC's two minutes.
_CHANNEL = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000)]


@dataclass(slots=True, kw_only=True)
class World:
    folder: Path
    suite: Suite
    history: History
    effects: EffectFile
    draw: random.Random
    channels: list[grpc.aio.Channel] = field(default_factory=list)

    def stubs(self) -> list[Stub]:
        return [_stub(channel) for channel in self.channels]

    def signal(self, name: str, replica: int, number: signal.Signals) -> None:
        self.history.signals[number.name] += 1
        self.suite.kill(name, replica, number)

    def caller(self, store_id: str, user_id: str) -> Caller:
        draw = random.Random(f"{self.draw.random()} {store_id} {user_id}")
        return Caller(self.stubs(), self.history, draw, store_id=store_id, user_id=user_id)


def _stub(channel: grpc.aio.Channel) -> Stub:
    """Return a stub with the methods of several services."""
    stub: Stub = agent_pb2_grpc.AgentServiceStub(channel)
    for other in (workflow_pb2_grpc.WorkflowServiceStub, goal_pb2_grpc.GoalServiceStub):
        vars(stub).update(vars(other(channel)))
    return stub


def options(data: Path, effects: Path, extra: Mapping[str, Mapping[str, str]] | None = None) -> SuiteOptions:
    limits = effects.with_name("limits.json")
    limits.write_text(json.dumps(_LIMITS))
    own = {
        "agent-loop": {"PAWL_LIMITS_FILE": str(limits)},
        "tool-registry": {"PAWL_TOOLS": "tests.chaos.tools", FILE_VARIABLE: str(effects)},
    }
    environment = {name: {**own.get(name, {}), **(extra or {}).get(name, {})} for name in SERVICES}
    return SuiteOptions(
        data=data,
        local_key=LOCAL_KEY,
        replicas=dict.fromkeys(SERVICES, REPLICAS),
        # The model refuses with 400 what OpenAI would refuse; `model_refuses_nothing` checks for it.
        service_environment=environment,
        stages=_STAGES,
    )


@asynccontextmanager
async def running(
    folder: Path, seed: int, extra: Mapping[str, Mapping[str, str]] | None = None
) -> AsyncIterator[World]:
    """Start everything with its data, logs and history in `folder`, and stop it at the end.

    `folder` must not be in pytest's tmp_path, which PostgreSQL's account cannot read if the tests run as root.
    """
    effects = EffectFile(folder / "effects.jsonl")
    history = History(path=folder / "history.jsonl")
    async with Suite(options(folder / "data", effects.path, extra)) as suite:
        replicas = suite.endpoints.services["agent-loop"]
        world = World(
            folder=folder,
            suite=suite,
            history=history,
            effects=effects,
            draw=random.Random(seed),
            channels=[keyed_channel(replica.grpc, options=_CHANNEL) for replica in replicas],
        )
        for store_id in STORES:
            await register_panel(suite.endpoints.services["tool-registry"][0].grpc, store_id)
            for definition in WORKFLOWS:
                request = workflow_pb2.SaveWorkflowRequest(definition_json=json.dumps(definition).encode())
                await world.caller(store_id, USERS[0]).send("SaveWorkflow", request, seconds=_READ_SECONDS)
        try:
            yield world
        finally:
            for channel in world.channels:
                await channel.close()
            history.close()


@asynccontextmanager
async def load(world: World, *, pace_seconds: float, settle_seconds: float) -> AsyncIterator[list[Person]]:
    """Run users and watchers. At the end, wait until every run has ended.

    Raises:
        TimeoutError: some run did not end within `settle_seconds` after the faults.
    """
    people: list[Person] = []
    for owner in _OWNERS:
        people.append(Person(world.caller(*owner), world.effects, people, pace_seconds=pace_seconds))
    watchers = [Watcher(f"watcher-{number}", people, random.Random(number)) for number in range(2 * len(STORES))]
    lives = [asyncio.create_task(person.live()) for person in people]
    looks = [asyncio.create_task(watcher.live()) for watcher in watchers]
    try:
        yield people
        for person in people:
            person.calm_down()
        async with asyncio.timeout(settle_seconds):
            await asyncio.gather(*lives)
    finally:
        for task in (*lives, *looks):
            task.cancel()
        ends = await asyncio.gather(*lives, *looks, return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException) and not isinstance(end, asyncio.CancelledError):
            raise end


async def register_panel(address: str, store_id: str) -> None:
    definition = tool_pb2.ToolDefinition(
        name=PANEL,
        description="Shows something to the user.",
        arguments_schema_json=b'{"type":"object","properties":{"title":{"type":"string"}}}',
        context=call_pb2.EXECUTION_CONTEXT_FRONTEND,
        category=call_pb2.TOOL_CATEGORY_SAFE,
        effect_class=call_pb2.EFFECT_CLASS_IDEMPOTENT,
    )
    async with keyed_channel(address) as channel:
        stub = tool_pb2_grpc.ToolServiceStub(channel)
        request = tool_pb2.RegisterToolRequest(definition=definition, replace=True)
        while True:
            try:
                await stub.RegisterTool(request, metadata=(("pawl-store", store_id),))
            except grpc.aio.AioRpcError as error:
                # On a busy machine a registry may fail to compile the schema in time.
                if "takes too long" not in str(error.details()):
                    raise
            else:
                return


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

    for caller in (world.caller(*owner) for owner in _OWNERS):
        run_ids = await _read_runs(record, caller)
        conversations = {record.runs[run_id].conversation_id for run_id in run_ids}
        works = [_read_run(record, caller, run_id) for run_id in run_ids]
        works += [_read_messages(record, caller, conversation) for conversation in conversations]
        await asyncio.gather(*(bounded(work) for work in works))
    await read_notifications(world, record)
    return record


async def read_notifications(world: World, record: Record) -> None:
    record.notifications = {owner: await _notifications(world, *owner) for owner in _OWNERS}


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
