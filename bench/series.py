"""P15: long series: the delay of their iterations, their cost while parked, and the data that is stored.

* One series with an interval of half a second: the delay of each iteration.
* 10,000 parked series, none of them due, and then one due per second: the CPU time of all processes.
* A job notice in an idle conversation: the time from the end of the job to the model's request.
* As many iterations as possible in some minutes, with a worker's steps but without its waits: rows, size and claims.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.copies import copy_conversation
from bench.database import connect
from bench.figures import Figure, NotMeasured, at_most
from bench.ledger import JobStore
from bench.options import Options
from bench.percentiles import percentile
from bench.processes import cpu_seconds, resident_mib
from bench.subjects import JOBS_END, Pawl
from bench.world import ModelServer, pawl, scratch
from pawl.event.v1 import call_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb

_CODE: Final = "P15"
_INTERVAL_SECONDS: Final = 0.5
_LATE_MAX_MS: Final = 50.0
_PARKED: Final = 10_000
_STORES: Final = 100
_PARKED_INTERVAL_SECONDS: Final = 120
_CORE_MAX_PERCENT: Final = 2.0
_NOTICE_MAX_MS: Final = 250.0
_DAY: Final = 172_800
_TIMES_MAX: Final = 1.5
_PATIENCE_SECONDS: Final = 120.0

_OPEN_JOBS: Final = "SELECT count(*) FROM job_store.runs WHERE reports_to <> '' AND state < 10"
_JOB: Final = "SELECT store_id, run_id, options FROM job_store.runs WHERE reports_to <> ''"
_BEGUN: Final = """
SELECT extract(epoch FROM coalesce(start_time, create_time))::float8 AS begun FROM job_store.calls
WHERE run_id = $1 AND round > $2 ORDER BY round
"""
# Copies report to a conversation that does not exist, because their own would have too many jobs. They are due a second
# apart.
_SPREAD: Final = """
WITH numbered AS (SELECT store_id, run_id, row_number() OVER (ORDER BY run_id) AS n FROM job_store.runs
                  WHERE reports_to <> '' AND store_id LIKE 'copy-%')
UPDATE job_store.runs AS r SET reports_to = 'conv_nobody', claim_at = $1::timestamptz + n * interval '1 second'
FROM numbered WHERE r.store_id = numbered.store_id AND r.run_id = numbered.run_id
"""
_SIZE: Final = """
SELECT sum(pg_total_relation_size(c.oid))::float8 / 1048576 FROM pg_class AS c JOIN pg_namespace AS n
ON n.oid = c.relnamespace WHERE n.nspname = 'job_store' AND c.relkind = 'r'
"""
_ROWS: Final = """
SELECT (SELECT count(*) FROM job_store.calls WHERE run_id = $1)
    + (SELECT count(*) FROM job_store.events WHERE run_id = $1)
"""


async def measure(options: Options) -> list[Figure | NotMeasured]:
    """Measure all figures in sequence, each with a separate suite."""
    return [
        *await _lateness(options.count(120, 40)),
        *await _parked(options),
        *await _notices(options.count(30, 10)),
        *await _long(options.seconds(300, 60)),
    ]


async def _lateness(iterations: int) -> list[Figure | NotMeasured]:
    async with pawl(tool_rounds=1, chunks=3, interval=_INTERVAL_SECONDS, stop_after=iterations) as (subject, _):
        await subject.run(1, 1)
        await _until(subject, _OPEN_JOBS, 0)
        async with connect(subject.suite) as connection:
            (job,) = await connection.fetch(_JOB)
            first = run_pb2.Run.FromString(job["options"]).job.begin_time.ToNanoseconds() / 1e9
            # The first iteration starts together with the job, under the conditions of a new process.
            begun = [record["begun"] - first for record in await connection.fetch(_BEGUN, job["run_id"], 1)]
    late = [seconds % _INTERVAL_SECONDS * 1000 for seconds in begun]
    return [
        at_most(
            _LATE_MAX_MS,
            code=_CODE,
            what=f"delay of iterations of a series of {_INTERVAL_SECONDS} s, p99",
            value=percentile(late, 0.99),
            unit="ms",
            detail={
                "p50, ms": percentile(late, 0.5),
                "worst, ms": max(late),
                "iterations": len(late),
                "left out": round(begun[-1] // _INTERVAL_SECONDS) + 1 - iterations,
            },
        )
    ]


async def _parked(options: Options) -> list[Figure | NotMeasured]:
    seconds = options.seconds(60, 20)
    each = float(_PARKED_INTERVAL_SECONDS)
    async with pawl(tool_rounds=1, chunks=3, interval=each, stop_after=1000, delay_first=1) as (subject, _):
        await subject.run(1, 1)
        created = time.monotonic()
        await asyncio.sleep(10)
        none = await _cpu(subject, seconds)
        memory = resident_mib(subject.processes())["agent-loop"]
        async with connect(subject.suite) as connection:
            (job,) = await connection.fetch(_JOB)
            begin = run_pb2.Run.FromString(job["options"]).job.begin_time.ToDatetime().astimezone()
            due = await connection.fetchval(
                "SELECT $1::timestamptz + $2 * interval '1 second'", begin, _PARKED_INTERVAL_SECONDS
            )
            await copy_conversation(connection, job["store_id"], job["run_id"], count=_PARKED, stores=_STORES)
            await connection.execute(_SPREAD, due, timeout=_PATIENCE_SECONDS)
        await asyncio.sleep(10)
        parked = await _cpu(subject, min(seconds, _PARKED_INTERVAL_SECONDS - (time.monotonic() - created) - 5))
        held = resident_mib(subject.processes())["agent-loop"]
        await asyncio.sleep(max(0.0, created + _PARKED_INTERVAL_SECONDS + 2 - time.monotonic()))
        before = await subject.ask("SELECT count(*) FROM job_store.calls WHERE store_id LIKE 'copy-%'")
        going = await _cpu(subject, seconds)
        made = await subject.ask("SELECT count(*) FROM job_store.calls WHERE store_id LIKE 'copy-%'") - before
    return [
        at_most(
            _CORE_MAX_PERCENT,
            code=_CODE,
            what=f"{_PARKED:,} parked series, one iteration/s in total: CPU of all processes above that without series",
            value=sum(going.values()) - sum(none.values()),
            unit="% of a core",
            detail=_over(none, going)
            | {"iterations/s": made / seconds, "without series, % of a core": sum(none.values())},
        ),
        at_most(
            _CORE_MAX_PERCENT,
            code=_CODE,
            what="the same with none due",
            value=sum(parked.values()) - sum(none.values()),
            unit="% of a core",
            detail={"growth of agent-loop, MiB": held - memory}
            | {f"{name}, % of a core": value - none[name] for name, value in parked.items()},
        ),
    ]


def _over(none: Mapping[str, float], used: Mapping[str, float]) -> dict[str, float]:
    """Return how much more each process used than in `none`."""
    return {f"{name}, % of a core": each - none[name] for name, each in used.items()}


async def _cpu(subject: Pawl, seconds: float) -> dict[str, float]:
    """Return the CPU usage of each process over `seconds`, in percent of a core."""
    before, began = cpu_seconds(subject.processes()), time.monotonic()
    await asyncio.sleep(seconds)
    took = time.monotonic() - began
    return {name: (used - before[name]) / took * 100 for name, used in cpu_seconds(subject.processes()).items()}


async def _notices(count: int) -> list[Figure | NotMeasured]:
    waits: list[float] = []
    async with pawl(tool_rounds=1, chunks=3, interval=1, stop_after=1, delay_first=1) as (subject, server):
        for _ in range(count):
            await subject.run(1, 1)
            await server.requests()
            await _until(subject, _OPEN_JOBS, 0)
            ended = await subject.ask(JOBS_END)
            waits.append((await _next_request(server) + time.time() - time.monotonic() - ended) * 1000)
    return [
        at_most(
            _NOTICE_MAX_MS,
            code=_CODE,
            what="from a job notice to the model's request, in an idle conversation, p99",
            value=percentile(waits, 0.99),
            unit="ms",
            detail={"p50, ms": percentile(waits, 0.5), "notices": count},
        )
    ]


async def _next_request(server: ModelServer) -> float:
    """Return the time at which the next request arrived, on the machine's clock."""
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while True:
            if requests := await server.requests():
                return requests[0].arrived
            await asyncio.sleep(0.02)


async def _until(subject: Pawl, query: str, wanted: int) -> None:
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while True:
            if await subject.ask(query) == wanted:
                return
            await asyncio.sleep(0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """The state of a series after a number of iterations. The claim times are those since the previous sample."""

    iterations: int
    rows: int
    size_mib: float
    claim_p50: float
    claim_p99: float


async def _long(seconds: float) -> list[Figure | NotMeasured]:
    async with scratch() as data, JobStore(data / "store") as store:
        looks = await _iterate(store, seconds)
    first, last = looks[1], looks[-1]
    each = (last.size_mib - first.size_mib) * 1024 / (last.iterations - first.iterations)
    what = f"a series after {last.iterations:,} iterations"
    return [
        at_most(
            _TIMES_MAX,
            code=_CODE,
            what=f"{what}: a claim relative to one at {first.iterations:,}, p50",
            value=last.claim_p50 / first.claim_p50,
            unit="",
            detail={"p50, ms": last.claim_p50, "p99, ms": last.claim_p99, "at first p99, ms": first.claim_p99},
        ),
        at_most(
            _TIMES_MAX,
            code=_CODE,
            what=f"{what}: largest number of call and event rows, relative to {first.iterations:,}",
            value=max(look.rows for look in looks[4:]) / max(look.rows for look in looks[:4]),
            unit="",
            detail={"rows": last.rows},
        ),
        Figure(
            code=_CODE,
            what=f"{what}: growth of the ledger per iteration, as life-cycle events are kept for a day",
            value=each,
            unit="KiB",
            detail={
                "MiB": last.size_mib,
                f"MiB after {_DAY:,}": last.size_mib + each * (_DAY - last.iterations) / 1024,
            },
        ),
    ]


async def _iterate(store: JobStore, seconds: float) -> Sequence[_Sample]:
    """Make iterations for `seconds`, and take samples from time to time."""
    await _start(store)
    looks, claims, number = list[_Sample](), list[float](), 0
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        number += 1
        claims.append(await _one(store, number) * 1000)
        if number % 250 == 0:
            async with connect(store.suite) as connection:
                look = _Sample(
                    iterations=number,
                    rows=await connection.fetchval(_ROWS, "run_series"),
                    size_mib=await connection.fetchval(_SIZE),
                    claim_p50=percentile(claims, 0.5),
                    claim_p99=percentile(claims, 0.99),
                )
            looks.append(look)
            claims.clear()
    return looks


async def _start(store: JobStore) -> None:
    """Let a run start the series, and end that run."""
    await store.submit("bench")
    (run,) = await store.claim()
    call = call_pb2.Call(
        call_id="call_series",
        round=1,
        tool_name="look_up",
        state=call_pb2.CALL_STATE_DETACHED,
        child_run_id="run_series",
        result=call_pb2.CallResult(content_json=b"{}"),
    )
    job = run_pb2.Job(tool_name="look_up", arguments_json=b"{}", interval_seconds=0.5, iterations_max=1_000_000)
    begun = pb.Delegation(call_id=call.call_id, run_id="run_series", text="look_up", job=job)
    said = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, call_ids=[call.call_id])
    running = run_pb2.RUN_STATE_RUNNING
    await _commit(store, run, "a", state=running, round=1, calls=[call], delegations=[begun], messages=[said])
    await _commit(store, run, "b", state=run_pb2.RUN_STATE_COMPLETED)


async def _one(store: JobStore, number: int) -> float:
    """Claim the series, start and end an iteration, and park until the next iteration, which is due immediately.

    Return the duration of the claim in seconds.
    """
    began = time.monotonic()
    request = pb.ClaimRunsRequest(worker_id="bench", runs_max=1, lease_seconds=30, background_runs_max=1)
    (run,) = (await store.stub.ClaimRuns(request)).runs
    took = time.monotonic() - began
    call = call_pb2.Call(
        call_id=f"call_{number:032}",
        round=number,
        tool_name="look_up",
        tool_version=1,
        arguments_json=b'{"key": "item-1"}',
        attempt=1,
        state=call_pb2.CALL_STATE_RUNNING,
    )
    await _commit(store, run, "a", state=run_pb2.RUN_STATE_RUNNING, round=number, calls=[call])
    call.state = call_pb2.CALL_STATE_SUCCEEDED
    call.result.content_json = b'{"key": "item-1", "value": "value of item-1"}'
    parks: dict[str, Any] = {
        "state": run_pb2.RUN_STATE_WAITING,
        "waits": [run_pb2.WAIT_KIND_TIME],
        "lease_action": pb.LEASE_ACTION_PARK,
    }
    parked = _step(run, "b", calls=[call], loop_state=b'{"undo":{"program":"job","failures":0}}', **parks)
    parked.wake_time.FromSeconds(1)
    await store.stub.CommitRun(parked)
    return took


async def _commit(store: JobStore, run: pb.ClaimedRun, commit_id: str, **fields: Any) -> None:
    await store.stub.CommitRun(_step(run, commit_id, **fields))


def _step(run: pb.ClaimedRun, commit_id: str, **fields: Any) -> pb.CommitRunRequest:
    return pb.CommitRunRequest(store_id=run.store_id, run_id=run.run_id, epoch=run.epoch, commit_id=commit_id, **fields)
