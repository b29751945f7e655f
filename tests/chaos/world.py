"""The suite under test with two replicas of everything, its load, and the outside world."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from pawl.agent.v1 import agent_pb2_grpc
from pawl.event.v1 import call_pb2
from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite
from pawl.tool.v1 import tool_pb2, tool_pb2_grpc
from tests.chaos.caller import Caller, Stub
from tests.chaos.effects import EffectFile
from tests.chaos.history import History
from tests.chaos.people import Person, Watcher
from tests.chaos.prompts import PANEL
from tests.chaos.tools import FILE_VARIABLE
from tests.keys import LOCAL_KEY, keyed_channel
from tests.service import stages

SERVICES = ("job-store", "tool-registry", "notifier", "agent-loop")
REPLICAS = 2
STORES = ("north", "south")
USERS = ("ann", "bob", "cy")
LEASE_SECONDS = 3.0

# Leases and timeouts are short, so that phases are.
_STAGES = stages(
    agent_loop={"lease_seconds": LEASE_SECONDS, "lease_renew_seconds": 1.0},
    tool_registry={"execution_lease_seconds": LEASE_SECONDS},
)
_LIMITS = {"defaults": {"model_headers_timeout_seconds": 2, "model_idle_timeout_seconds": 2}}

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
        return [agent_pb2_grpc.AgentServiceStub(channel) for channel in self.channels]

    def signal(self, name: str, replica: int, number: signal.Signals) -> None:
        self.history.signals[number.name] += 1
        self.suite.kill(name, replica, number)

    def caller(self, store_id: str, user_id: str) -> Caller:
        draw = random.Random(f"{self.draw.random()} {store_id} {user_id}")
        return Caller(self.stubs(), self.history, draw, store_id=store_id, user_id=user_id)


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
    """Start everything with its data, logs and history in `folder`; stop it at the end.

    `folder` must not be in pytest's tmp_path, because as root, PostgreSQL runs under an account that cannot read it.
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
            await _register_panel(suite.endpoints.services["tool-registry"][0].grpc, store_id)
        try:
            yield world
        finally:
            for channel in world.channels:
                await channel.close()
            history.close()


@asynccontextmanager
async def load(world: World, *, pace_seconds: float, settle_seconds: float) -> AsyncIterator[list[Person]]:
    """Run users and watchers; at the end wait until every run has ended.

    Raises:
        TimeoutError: some run did not end within `settle_seconds` of quiet.
    """
    people: list[Person] = []
    for store_id in STORES:
        for user_id in USERS:
            caller = world.caller(store_id, user_id)
            people.append(Person(caller, world.effects, people, pace_seconds=pace_seconds))
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


async def _register_panel(address: str, store_id: str) -> None:
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
