"""P18: workflows: the cost of map items, throughput beside a chat, kills during the load, and runs that wait.

* A map over 10, 100 and 1,000 items: the CPU time of an item, compared with an iteration of a series.
* Workflows of ten nodes, two of them agents: nodes per second, and a chat beside them.
* The same while each service is killed in turn: whether every run ends, and every effect happens once.
* Runs that wait for an event, a time or a person: what agent-loop uses for them.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final

from bench import load
from bench.database import connect
from bench.figures import Figure, NotMeasured, at_least, at_most
from bench.load import Owner
from bench.options import Options
from bench.percentiles import percentile
from bench.processes import cpu_seconds, proportional_mib
from bench.slices import shown
from bench.subjects import TRANSACTIONS, Pawl
from bench.tools import EFFECTS_VARIABLE
from bench.world import pawl
from pawl.agent.v1 import workflow_pb2 as pb
from pawl.agent.v1.workflow_pb2_grpc import WorkflowServiceStub
from pawl.chassis.process.clock import SystemClock
from pawl.chassis.process.tasks import within
from pawl.chassis.rpc.client import translated
from pawl.chassis.rpc.retry import Retry
from pawl.event.v1 import call_pb2, run_pb2

_CODE: Final = "P18"
_ITEM_TIMES_MAX: Final = 1.5
_ITEMS: Final = (10, 100, 1000)
_SERIES: Final = 16
_ITERATIONS_SECONDS: Final = 0.5
_NODES_MIN: Final = 50.0
_CHAT_TIMES_MAX: Final = 2.0
_NODES: Final = 10
_WORKFLOWS: Final = 1000
_STARTS_AT_ONCE: Final = 4
_CHAT_SECONDS: Final = 0.25
_WAITING: Final = 1000
_WAITING_CPU_MAX_MS: Final = 1.0
_WAITING_MIB_MAX: Final = 1.0
_SETTLE_SECONDS: Final = 15.0
_KILLED: Final = ("agent-loop", "tool-registry", "job-store", "notifier", "gateway")
_KILL_SECONDS: Final = 4.0
_PATIENCE_SECONDS: Final = 900.0
_RECOVERY_MAX_SECONDS: Final = 25.0

_ITERATIONS: Final = """
SELECT coalesce(sum(round), 0)::int FROM job_store.runs WHERE reports_to <> '' AND state < 10
"""
_OPEN: Final = "SELECT count(*) FROM job_store.runs WHERE state < 10"
_HELD: Final = "SELECT run_id, epoch FROM job_store.runs WHERE worker_id IS NOT NULL"
_NOT_TAKEN: Final = """
SELECT count(*) FROM job_store.runs AS r JOIN unnest($1::text[], $2::bigint[]) AS k (run_id, epoch) USING (run_id)
WHERE r.epoch = k.epoch AND r.state < 10
"""
_UNKNOWN: Final = "SELECT count(*) FROM job_store.calls WHERE run_id = ANY ($1) AND state = $2"
_STATES: Final = "SELECT state, count(*) AS runs FROM job_store.runs WHERE run_id = ANY ($1) GROUP BY state"
_LAST_END: Final = "SELECT extract(epoch FROM max(end_time))::float8 FROM job_store.runs WHERE run_id = ANY ($1)"
# A node's call is named after the run, the node, the iteration, the attempt and the chunk.
_SUCCEEDED: Final = """
SELECT count(*) AS calls, count(DISTINCT (run_id, split_part(call_id, '_', 3))) AS nodes FROM job_store.calls
WHERE run_id = ANY ($1) AND state = $2
"""

_MAP: Final = {
    "name": "batch",
    "nodes": {
        "each": {
            "kind": "map",
            "items": "${input.items}",
            "do": {"kind": "tool", "tool": "look_up", "arguments": {"key": "${item}"}},
        }
    },
}
_WAITS: Final = {
    "event": {"kind": "wait", "event": "paid", "timeout_seconds": 86400},
    "time": {"kind": "wait", "seconds": 86400},
    "person": {"kind": "human", "question": "Go on?"},
}


def _tool(name: str, *after: str, tool: str = "reserve", **fields: Any) -> dict[str, Any]:
    return {
        name: {"kind": "tool", "tool": tool, "arguments": {"key": f"{name} ${{run.id}}"}, "after": [*after], **fields}
    }


def _agent(name: str, *after: str) -> dict[str, Any]:
    return {name: {"kind": "agent", "task": "Describe the item.", "tools": [], "after": [*after]}}


_TEN: Final = {
    "name": "ten",
    "nodes": {
        **_tool("first", tool="look_up"),
        **_tool("left", "first"),
        **_tool("right", "first"),
        **_agent("describe", "left", "right"),
        **_tool("third", "describe"),
        **_tool("fourth", "describe"),
        **_agent("judge", "third", "fourth"),
        **_tool("sixth", "judge", tool="look_up"),
        # After a crash in the middle of it, whether it has happened is unknown.
        **_tool("send", "sixth", tool="send", on_error="continue"),
        **_tool("last", "send"),
    },
}


async def measure(options: Options) -> list[Figure | NotMeasured]:
    """Measure all figures, with a separate suite for each part."""
    number = options.count(_WORKFLOWS, 150)
    return [
        *await _maps(options.count(8, 3)),
        *await _throughput(number, options.seconds(60, 20)),
        *await _kills(number),
        *await _recovery(options.count(100, 30)),
        *await _waiting(options.count(_WAITING, 150), options.seconds(60, 20)),
    ]


class _Flows:
    """Runs workflows and reads their outcomes."""

    def __init__(self, subject: Pawl) -> None:
        self.subject = subject
        self._stub = WorkflowServiceStub(subject.channel)
        self._retry = Retry(SystemClock())
        self._requests = count(1)

    async def save(self, definition: Mapping[str, Any]) -> None:
        await self._stub.SaveWorkflow(pb.SaveWorkflowRequest(definition_json=json.dumps(definition).encode()))

    async def start(self, name: str, **content: Any) -> str:
        """Start a run and return its id, even if services are unavailable for a while."""
        request = pb.StartWorkflowRequest(
            name=name, request_id=f"start-{next(self._requests)}", input_json=json.dumps(content).encode()
        )
        started = await self._retry.until_answered(lambda: translated(self._stub.StartWorkflow(request)))
        return started.run.run_id

    async def start_many(self, name: str, number: int, **content: Any) -> list[str]:
        """Start `number` runs, some of them concurrently."""
        return await load.at_once(_STARTS_AT_ONCE, lambda _due: self.start(name, **content), count=number)

    async def until(self, query: str, *values: object, wanted: int = 0) -> None:
        """Wait until a query returns at most `wanted`."""
        async with asyncio.timeout(_PATIENCE_SECONDS), connect(self.subject.suite) as connection:
            while True:
                if await connection.fetchval(query, *values) <= wanted:
                    return
                await asyncio.sleep(0.2)


# Maps.


async def _maps(turns: int) -> list[Figure | NotMeasured]:
    """Measure series and maps of each size in turns."""
    items: dict[int, list[float]] = {number: [] for number in _ITEMS}
    iterations: list[float] = []
    seconds = 10
    stop_after = int(seconds / _ITERATIONS_SECONDS) + 10
    async with pawl(tool_rounds=1, chunks=1, interval=_ITERATIONS_SECONDS, stop_after=stop_after) as (subject, _):
        flows = _Flows(subject)
        await flows.save(_MAP)
        await subject.run(1, 1)
        await flows.start("batch", items=["warm"] * 50)
        await flows.until(_OPEN)
        await asyncio.sleep(_SETTLE_SECONDS)
        idle = await _idle_rate(subject, 15)
        for _ in range(turns):
            iterations.append(await _iteration_cost(flows, idle, seconds - 4))
            for number in _ITEMS:
                items[number].append(await _item_cost(flows, idle, number))
    return [
        at_most(
            _ITEM_TIMES_MAX,
            code=_CODE,
            what=f"map over {number:,} items: CPU of an item, relative to an iteration of a series",
            unit="",
            **shown([item / iteration for item, iteration in zip(items[number], iterations, strict=True)]),
            detail={
                "item, ms": statistics.median(items[number]),
                "iteration, ms": statistics.median(iterations),
            },
        )
        for number in _ITEMS
    ]


def _cpu(subject: Pawl) -> float:
    return sum(cpu_seconds(subject.processes()).values())


async def _idle_rate(subject: Pawl, seconds: float) -> float:
    """Return the CPU time per second of all processes."""
    before, began = _cpu(subject), time.monotonic()
    await asyncio.sleep(seconds)
    return (_cpu(subject) - before) / (time.monotonic() - began)


async def _iteration_cost(flows: _Flows, idle: float, seconds: float) -> float:
    """Return the CPU time of an iteration in milliseconds, while some series run."""
    subject = flows.subject
    await subject.run(_SERIES, _SERIES)
    await asyncio.sleep(2)
    first, before, began = await subject.ask(_ITERATIONS), _cpu(subject), time.monotonic()
    await asyncio.sleep(seconds)
    used, took = _cpu(subject) - before, time.monotonic() - began
    done = float(await subject.ask(_ITERATIONS) - first)
    await flows.until(_OPEN)
    await asyncio.sleep(2)
    return (used - idle * took) / done * 1000


async def _item_cost(flows: _Flows, idle: float, items: int) -> float:
    """Return the CPU time of an item in milliseconds, while runs process at least 200 items, `items` each."""
    runs = max(1, 200 // items)
    before, began = _cpu(flows.subject), time.monotonic()
    await flows.start_many("batch", runs, items=[f"item-{number}" for number in range(items)])
    await flows.until(_OPEN)
    used, took = _cpu(flows.subject) - before, time.monotonic() - began
    return (used - idle * took) / (runs * items) * 1000


# Throughput, and a chat beside it.


async def _throughput(number: int, seconds: float) -> list[Figure | NotMeasured]:
    with tempfile.TemporaryDirectory() as folder:
        async with pawl(tool_rounds=0, chunks=10, environment={EFFECTS_VARIABLE: str(Path(folder, "effects"))}) as (
            subject,
            _,
        ):
            flows = _Flows(subject)
            await flows.save(_TEN)
            await load.warm_up(subject.agents, lambda _: Owner())
            await flows.start_many("ten", 8)
            await flows.until(_OPEN)
            alone = await load.at_rate(1 / _CHAT_SECONDS, seconds, lambda _, due: _chat(flows, due))
            before, began = cpu_seconds(subject.processes()), time.time()
            stopping = asyncio.Event()
            chatting = asyncio.create_task(_chats(flows, stopping))
            runs = await flows.start_many("ten", number)
            accepted = time.time() - began
            await flows.until(f"{_OPEN} AND run_id = ANY ($1)", runs)
            stopping.set()
            beside = await chatting
            ended = await subject.ask(_LAST_END, runs)
            used = {name: each - before[name] for name, each in cpu_seconds(subject.processes()).items()}
            lost = await _lost(flows, runs)
    nodes = number * _NODES
    quiet, busy = percentile(alone, 0.99), percentile(beside, 0.99)
    return [
        at_least(
            _NODES_MIN,
            code=_CODE,
            what=f"{number:,} workflows of {_NODES} nodes in the background: nodes",
            value=nodes / (ended - began),
            unit="/s",
            detail={"all runs accepted after, s": accepted, "lost": float(sum(lost.values()))}
            | {f"{name}, CPU ms per node": each / nodes * 1000 for name, each in used.items()},
        ),
        at_most(
            _CHAT_TIMES_MAX,
            code=_CODE,
            what="p99 of a chat beside them, relative to a chat alone",
            value=busy / quiet,
            unit="",
            detail={
                "alone p50, ms": percentile(alone, 0.5) * 1000,
                "alone p99, ms": quiet * 1000,
                "beside p50, ms": percentile(beside, 0.5) * 1000,
                "beside p99, ms": busy * 1000,
                "chats beside": float(len(beside)),
            },
        ),
    ]


async def _chat(flows: _Flows, due: float) -> float:
    """Return the seconds of a run with one answer."""
    outcome = await load.play(flows.subject.agents, Owner(user="chatter"), due)
    if outcome.ended is None:
        raise RuntimeError(f"a chat did not complete: {outcome.refusal}")
    return outcome.ended - due


async def _chats(flows: _Flows, stopping: asyncio.Event) -> list[float]:
    """Chat at the usual rate until `stopping` is set."""
    took: list[float] = []
    async with asyncio.TaskGroup() as group:
        while not stopping.is_set():
            group.create_task(_chat(flows, time.monotonic())).add_done_callback(
                lambda task: None if task.cancelled() or task.exception() else took.append(task.result())
            )
            await asyncio.sleep(_CHAT_SECONDS)
    return took


async def _lost(flows: _Flows, runs: Sequence[str]) -> dict[str, int]:
    """Return how many runs did not complete, and how many nodes did not succeed exactly once."""
    async with connect(flows.subject.suite) as connection:
        states = {row["state"]: row["runs"] for row in await connection.fetch(_STATES, runs)}
        (found,) = await connection.fetch(_SUCCEEDED, runs, call_pb2.CALL_STATE_SUCCEEDED)
    completed = states.get(run_pb2.RUN_STATE_COMPLETED, 0)
    return {
        "runs not completed": len(runs) - completed,
        "nodes not succeeded": len(runs) * _NODES - found["nodes"],
        "nodes succeeded twice": found["calls"] - found["nodes"],
    }


# Kills during the load.


async def _kills(number: int) -> list[Figure | NotMeasured]:
    """Kill one service after the other until all runs have ended."""
    with tempfile.TemporaryDirectory() as folder:
        effects = Path(folder, "effects")
        effects.touch()
        async with pawl(tool_rounds=0, chunks=10, environment={EFFECTS_VARIABLE: str(effects)}) as (subject, _):
            flows = _Flows(subject)
            await flows.save(_TEN)
            began = time.monotonic()
            done = asyncio.Event()
            killing = asyncio.create_task(_kill_each(subject, done))
            try:
                runs = await flows.start_many("ten", number)
                await flows.until(f"{_OPEN} AND run_id = ANY ($1)", runs)
            finally:
                done.set()
            took, kills = time.monotonic() - began, await killing
            lost = await _lost(flows, runs)
            unknown = await subject.ask(_UNKNOWN, runs, call_pb2.CALL_STATE_OUTCOME_UNKNOWN)
        sent = Counter(effects.read_text(encoding="utf-8").split("\n")[:-1])
    wrong = {
        "runs not completed": lost["runs not completed"],
        # Only the outcome of an at-most-once call may be unknown.
        "nodes lost": max(0, lost["nodes not succeeded"] - unknown),
        "nodes succeeded twice": lost["nodes succeeded twice"],
        "at-most-once effects that happened twice": sum(times > 1 for times in sent.values()),
    }
    return [
        at_most(
            0,
            code=_CODE,
            what=f"{number:,} workflows while services are killed: runs and nodes lost, nodes and effects doubled",
            value=float(sum(wrong.values())),
            unit="",
            detail={**wrong, "outcomes unknown": unknown, "kills": kills, "seconds": took},
        )
    ]


async def _kill_each(subject: Pawl, done: asyncio.Event) -> int:
    """Kill the services in turn, each after the previous one is ready again, until `done`. Return the number."""
    kills = 0
    while not done.is_set():
        name = _KILLED[kills % len(_KILLED)]
        subject.suite.kill(name)
        kills += 1
        await subject.suite.wait_ready(name)
        await within(_KILL_SECONDS, done.wait())
    return kills


async def _recovery(number: int) -> list[Figure | NotMeasured]:
    """Kill agent-loop and job-store together. Wait until every working run's new owner has committed a step."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {EFFECTS_VARIABLE: str(Path(folder, "effects"))}
        async with pawl(tool_rounds=0, chunks=10, environment=environment) as (subject, _):
            flows = _Flows(subject)
            await flows.save(_TEN)
            await flows.start_many("ten", number)
            async with connect(subject.suite) as connection:
                held = await connection.fetch(_HELD)
            for name in ("agent-loop", "job-store"):
                subject.suite.kill(name)
            began = time.monotonic()
            for name in ("job-store", "agent-loop"):
                await subject.suite.wait_ready(name)
            ready = time.monotonic() - began
            await flows.until(_NOT_TAKEN, [row["run_id"] for row in held], [row["epoch"] for row in held])
            claimed = time.monotonic() - began
            await flows.until(_OPEN)
    return [
        at_most(
            _RECOVERY_MAX_SECONDS,
            code=_CODE,
            what="agent-loop and job-store killed together: until every run is claimed again",
            value=claimed,
            unit="s",
            detail={"both services ready after, s": ready, "runs held at the kill": float(len(held))},
        )
    ]


# Runs that wait.


async def _waiting(number: int, seconds: float) -> list[Figure | NotMeasured]:
    async with pawl(tool_rounds=0, chunks=1) as (subject, _):
        flows = _Flows(subject)
        for name, node in _WAITS.items():
            await flows.save({"name": name, "nodes": {"wait": node}})
        await load.warm_up(subject.agents, lambda _: Owner())
        for name in _WAITS:
            await flows.start(name)
        await asyncio.sleep(_SETTLE_SECONDS)
        idle = await _idle_rate(subject, seconds)
        memory, polls = _memory(subject), await subject.ask(TRANSACTIONS)
        await asyncio.sleep(seconds)
        polls = await subject.ask(TRANSACTIONS) - polls
        for name in _WAITS:
            await flows.start_many(name, number // len(_WAITS))
        await flows.until(_OPEN + " AND state <> $1", run_pb2.RUN_STATE_WAITING)
        await asyncio.sleep(_SETTLE_SECONDS)
        waiting, held = await _idle_rate(subject, seconds), _memory(subject)
        more = await subject.ask(TRANSACTIONS)
        await asyncio.sleep(seconds)
        more = await subject.ask(TRANSACTIONS) - more
    return [
        at_most(
            _WAITING_CPU_MAX_MS,
            code=_CODE,
            what=f"{number:,} waiting workflows: CPU of all processes above that without them",
            value=(waiting - idle) * 1000,
            unit="ms/s",
            detail={
                "without them, ms/s": idle * 1000,
                "transactions/s without them": polls / seconds,
                "transactions/s": more / seconds,
            },
        ),
        at_most(
            _WAITING_MIB_MAX,
            code=_CODE,
            what="the same: growth of agent-loop, including what starting them left behind",
            value=held - memory,
            unit="MiB",
        ),
    ]


def _memory(subject: Pawl) -> float:
    return proportional_mib({"agent-loop": subject.processes()["agent-loop"]})["agent-loop"]
