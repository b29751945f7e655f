"""P16: the gateway's cost when idle and with 2,000 tabs, and the delay of events on an open page."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

import asyncpg

from bench import crowds
from bench.copies import copied_id, copied_store, copy_conversation
from bench.figures import Figure, NotMeasured, at_most
from bench.options import Options
from bench.percentiles import percentile
from bench.processes import cpu_seconds, resident_mib, whole_mib
from bench.subjects import JOBS_END, START, Pawl
from bench.watching import follow
from bench.world import pawl, scratch
from pawl.agent.v1 import agent_pb2
from pawl.event.v1 import run_pb2
from pawl.launcher.suite import Suite

_CODE: Final = "P16"
_STORE: Final = "tabs"
_TABS: Final = 2000
_OPENING_MAX: Final = 50
_TABS_MAX_MIB: Final = 200.0
_WATCHERS_MAX_MIB: Final = 100.0
_IDLE_MAX_MIB: Final = 120.0
_LATER_MAX_MS: Final = 5.0
_TURN_MAX_MS: Final = 500.0
_CHUNKS: Final = 100
_CHUNK_MS: Final = 20.0
_SETTLE_SECONDS: Final = 5.0
_PATIENCE_SECONDS: Final = 120.0
_LINE_BYTES_MAX: Final = 2**20


async def measure(options: Options) -> list[Figure | NotMeasured]:
    """Measure the gateway when idle and then with tabs, and how soon events and turns are on a page."""
    async with scratch() as data, crowds.roomy_suite(data / "suite") as suite:
        await crowds.warm(suite)
        idle = await _rest(suite, options.seconds(30, 10))
        tabs = await _tabs(suite, idle, options.seconds(30, 10))
    # In new processes, because these have memory left from the tabs.
    async with scratch() as data, crowds.roomy_suite(data / "suite") as suite:
        await crowds.warm(suite)
        watchers = await _watchers(suite, options.seconds(60, 30))
    async with pawl(tool_rounds=0, chunks=_CHUNKS, chunk_milliseconds=_CHUNK_MS) as (subject, _):
        await _later(subject)
        later = [ms for _ in range(options.count(20, 6)) for ms in await _later(subject)]
    figures = [idle, tabs, watchers, await _turns(options.count(30, 10))]
    if not later:
        return [*figures, NotMeasured(code=_CODE, why="no output arrived while both were watching")]
    return [*figures, *(_latency(later, part, name) for part, name in ((0.5, "p50"), (0.99, "p99")))]


def _latency(later: Sequence[float], part: float, name: str) -> Figure:
    return at_most(
        _LATER_MAX_MS,
        code=_CODE,
        what=f"delay of an output event in POST /stream after gRPC: {name}",
        value=percentile(later, part),
        unit="ms",
        spread=(min(later), max(later)),
        detail={"events": float(len(later))},
    )


# Idle, and with tabs.


def _processes(suite: Suite) -> dict[str, int]:
    names = ("gateway", "agent-loop", "job-store")
    return {name: pid for name in names if (pid := suite.pid(name)) is not None}


def _serving(suite: Suite) -> dict[str, int]:
    return {name: pid for name, pid in _processes(suite).items() if name != "job-store"}


def _gateway(suite: Suite) -> dict[str, int]:
    return {"gateway": _processes(suite)["gateway"]}


async def _busy(suite: Suite, seconds: float) -> dict[str, float]:
    """Wait, and return the CPU time of each process in milliseconds per second."""
    before = cpu_seconds(_processes(suite))
    await asyncio.sleep(seconds)
    after = cpu_seconds(_processes(suite))
    return {name: (after[name] - before[name]) / seconds * 1000 for name in after}


async def _rest(suite: Suite, seconds: float) -> Figure:
    async with crowds.acting(suite, _STORE) as user:
        run = await user.start("what is 17 * 23")
    _ = [message async for message in _messages((await _post(suite, _watch_run(run.run_id)))[0])]
    await asyncio.sleep(_SETTLE_SECONDS)
    cpu = await _busy(suite, seconds)
    return at_most(
        _IDLE_MAX_MIB,
        code=_CODE,
        what="resident memory of the gateway, idle",
        value=whole_mib(_gateway(suite))["gateway"],
        unit="MiB",
        detail={"USS, MiB": resident_mib(_gateway(suite))["gateway"], "CPU, ms a second": cpu["gateway"]},
    )


async def _tabs(suite: Suite, idle: Figure, seconds: float) -> Figure:
    """Open tabs that show a waiting run, and measure the gateway once all of them have received the log."""
    opening, tabs = asyncio.Semaphore(_OPENING_MAX), list[asyncio.StreamWriter]()
    async with crowds.acting(suite, _STORE) as user:
        run = await user.until((await user.start("ask me whether to continue")).run_id, run_pb2.RUN_STATE_WAITING)

    async def open_one() -> asyncio.Task[None]:
        async with opening:
            reader, writer = await _post(suite, _watch_run(run.run_id))
            tabs.append(writer)
            await anext(_messages(reader))
        return asyncio.create_task(_drain(reader))

    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            reading = await asyncio.gather(*(open_one() for _ in range(_TABS)))
        await asyncio.sleep(_SETTLE_SECONDS)
        cpu = await _busy(suite, seconds)
        whole = whole_mib(_gateway(suite))["gateway"]
        if cut := sum(task.done() for task in reading):
            raise RuntimeError(f"{cut} of {_TABS} tabs were cut")
    finally:
        for writer in tabs:
            writer.close()
    await asyncio.gather(*reading, return_exceptions=True)
    return at_most(
        _TABS_MAX_MIB,
        code=_CODE,
        what=f"resident memory of the gateway with {_TABS:,} tabs, each one POST /stream on its own connection",
        value=whole,
        unit="MiB",
        detail={
            "a tab, KiB": (whole - idle.value) * 1024 / _TABS,
            **{f"{name}, CPU ms a second": milliseconds for name, milliseconds in cpu.items()},
        },
    )


async def _watchers(suite: Suite, seconds: float) -> Figure:
    """Watch idle conversations, and measure what gateway and agent-loop together need for each of them."""
    async with crowds.acting(suite, _STORE) as user:
        run = await user.until((await user.start("what is 17 * 23")).run_id, run_pb2.RUN_STATE_COMPLETED)
    connection = await asyncpg.connect(suite.database_url)
    try:
        await copy_conversation(connection, _STORE, run.run_id, count=_TABS, stores=1)
    finally:
        await connection.close()
    opening, tabs = asyncio.Semaphore(_OPENING_MAX), list[asyncio.StreamWriter]()
    before, idle = resident_mib(_serving(suite)), await _busy(suite, seconds / 2)

    async def open_one(number: int) -> asyncio.Task[None]:
        conversation_id = copied_id(run.conversation_id, number)
        async with opening:
            reader, writer = await _post(suite, _watch_conversation(conversation_id), store=copied_store(number, 1))
            tabs.append(writer)
            async for message in _messages(reader):
                if message.get("caughtUp"):
                    break
        return asyncio.create_task(_drain(reader))

    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            reading = await asyncio.gather(*(open_one(number) for number in range(1, _TABS + 1)))
        await asyncio.sleep(_SETTLE_SECONDS)
        cpu = await _busy(suite, seconds)
        after = resident_mib(_serving(suite))
        if cut := sum(task.done() for task in reading):
            raise RuntimeError(f"{cut} of {_TABS} watchers were cut")
    finally:
        for writer in tabs:
            writer.close()
    await asyncio.gather(*reading, return_exceptions=True)
    growth = {name: after[name] - before[name] for name in after}
    return at_most(
        _WATCHERS_MAX_MIB,
        code=_CODE,
        what=f"memory of gateway and agent-loop for {_TABS:,} watchers of idle conversations",
        value=sum(growth.values()),
        unit="MiB",
        detail={
            **{f"{name}, MiB": mib for name, mib in growth.items()},
            **{f"{name}, more CPU, ms a second": cpu[name] - idle[name] for name in cpu},
        },
    )


# The same events over both protocols.


async def _later(subject: Pawl) -> list[float]:
    """Do one run. Return how many milliseconds later than over gRPC each output event arrives over HTTP."""
    run_id = (await subject.agents.StartRun(START)).run.run_id
    async with asyncio.timeout(_PATIENCE_SECONDS):
        by_grpc, by_http = await asyncio.gather(_by_grpc(subject, run_id), _by_http(subject.suite, run_id))
    return [(by_http[seq] - by_grpc[seq]) * 1000 for seq in by_grpc.keys() & by_http.keys()]


async def _by_grpc(subject: Pawl, run_id: str) -> dict[int, float]:
    seen: dict[int, float] = {}
    async for answer in subject.agents.WatchRun(agent_pb2.WatchRunRequest(run_id=run_id)):
        now = time.monotonic()
        seen |= {event.seq: now for event in answer.events if event.HasField("output_delta")}
    return seen


async def _by_http(suite: Suite, run_id: str) -> dict[int, float]:
    seen: dict[int, float] = {}
    reader, writer = await _post(suite, _watch_run(run_id), store="", user="")
    try:
        async for message in _messages(reader):
            now = time.monotonic()
            seen |= {int(event["seq"]): now for event in message.get("events", ()) if "outputDelta" in event}
    finally:
        writer.close()
    return seen


# Turns that background jobs start.


async def _turns(count: int) -> Figure:
    async with pawl(tool_rounds=1, chunks=3, interval=1, stop_after=1, delay_first=1) as (subject, _):
        await _turn(subject)
        waits = [await _turn(subject) for _ in range(count)]
    return at_most(
        _TURN_MAX_MS,
        code=_CODE,
        what="from the end of a background job to the first output of its turn on an open page, p99",
        value=percentile(waits, 0.99),
        unit="ms",
        detail={"p50, ms": percentile(waits, 0.5), "turns": count},
    )


async def _turn(subject: Pawl) -> float:
    """Start a job and open its conversation. Return the delay of its turn's first output in milliseconds."""
    run = (await subject.agents.StartRun(START)).run
    await follow(subject, run.run_id)
    reader, writer = await _post(subject.suite, _watch_conversation(run.conversation_id), store="", user="")
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            async for message in _messages(reader):
                if _has_output(message, run.run_id):
                    break
        shown = time.time()
    finally:
        writer.close()
    ended: float = await subject.ask(JOBS_END)
    return (shown - ended) * 1000


def _has_output(message: Any, before: str) -> bool:
    """Return whether a message of WatchConversation contains output of a run other than `before`."""
    return any("outputDelta" in event and event["runId"] != before for event in message.get("events", ()))


# A minimal browser, without the overhead of an HTTP library.


def _watch_conversation(conversation_id: str) -> Mapping[str, Any]:
    method = "pawl.agent.v1.ConversationService/WatchConversation"
    return {"conversation": {"method": method, "request": {"conversationId": conversation_id}}}


def _watch_run(run_id: str) -> Mapping[str, Any]:
    return {"run": {"method": "pawl.agent.v1.AgentService/WatchRun", "request": {"runId": run_id}}}


async def _post(
    suite: Suite, wishes: Mapping[str, Any], *, store: str = _STORE, user: str = crowds.USER
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = suite.endpoints.services["gateway"][0].http
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=_LINE_BYTES_MAX)
    body = json.dumps({"subscriptions": wishes})
    head = [
        "POST /stream HTTP/1.1",
        f"host: {address}",
        f"authorization: Bearer {suite.local_key}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        *([f"pawl-store: {store}", f"pawl-user: {user}"] if user else []),
    ]
    writer.write("\r\n".join([*head, "", body]).encode())
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"the gateway answered {status.decode().strip()}: {(await reader.read(1000)).decode()}")
    return reader, writer


async def _messages(reader: asyncio.StreamReader) -> AsyncIterator[Any]:
    """Yield the messages of a stream until it ends. Raise RuntimeError if a subscription fails."""
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        data = json.loads(line[6:])
        if "message" not in data:
            if "error" in data:
                raise RuntimeError(f"a stream ended: {data['error']}")
            return
        yield data["message"]


async def _drain(reader: asyncio.StreamReader) -> None:
    while await reader.readline():
        pass
