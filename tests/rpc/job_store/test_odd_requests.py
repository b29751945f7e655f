"""Odd requests for jobs and schedules, through agent-loop to a real ledger: kept whole, or refused with a hint."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pawl.agent.v1 import jobs_pb2, schedule_pb2
from pawl.agent.v1.jobs_pb2_grpc import JobServiceStub
from pawl.agent.v1.schedule_pb2_grpc import ScheduleServiceStub, add_ScheduleServiceServicer_to_server
from pawl.agent_loop.adapters.live import BusEvents
from pawl.agent_loop.adapters.public_ledger import PublicLedgerClient
from pawl.agent_loop.adapters.schedule_ledger import ScheduleLedgerClient
from pawl.agent_loop.app.schedules import Schedules
from pawl.agent_loop.app.starting import Starting
from pawl.agent_loop.domain.options import RunDefaults
from pawl.agent_loop.rpc.schedule_servicer import ScheduleServicer
from pawl.agent_loop.wiring import ClientSide
from pawl.chassis.clock import SystemClock
from pawl.chassis.ids import IdSource
from pawl.chassis.metrics import Metrics
from pawl.chassis.rpc_server import RpcServer
from pawl.chassis.status import from_rpc_error
from pawl.event.v1 import run_pb2
from pawl.event.v1.schedule_pb2 import ScheduleDefinition
from tests.fakes.agents import MemoryAgents
from tests.fakes.checker import FakeChecker
from tests.keys import LOCAL_KEY, METADATA, authenticator
from tests.rpc.job_store.conftest import Replica

if TYPE_CHECKING:
    from pawl.agent.v1.jobs_pb2_grpc import JobServiceAsyncStub
    from pawl.agent.v1.schedule_pb2_grpc import ScheduleServiceAsyncStub

M = TypeVar("M")

_PATIENT = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
_TYPED = {"INVALID_FIELD", "TOO_LARGE"}


def odd(message: Callable[..., M], fields: Mapping[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[M]:
    """Messages with any of the fields."""
    return st.fixed_dictionaries({}, optional=dict(fields)).map(lambda chosen: message(**chosen))


_NUMBERS = st.one_of(st.floats(), st.sampled_from([0.0, 0.5, 1.0, 5.0, 60.0, 86_400.0, 1e308, -1.0, 5e-324]))
_COUNTS = st.one_of(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 2, 100, 101, 1000, 1_000_000, 1_000_001]))
_TEXTS = st.one_of(st.text(max_size=8), st.sampled_from(["value > 1", "/a/0", "1/0 > 1", "x" * 300, "previous"]))
_VALUES = st.one_of(st.binary(max_size=4), st.sampled_from([b"1" * 400, b"1e999", b"NaN", b"[" * 3000, b"true"]))
_CONDITIONS = odd(
    run_pb2.JobCondition,
    {
        "pointer": _TEXTS,
        "below": _NUMBERS,
        "above": _NUMBERS,
        "equals_json": _VALUES,
        "changed": st.booleans(),
        "expression": _TEXTS,
    },
)
_MONITORS = odd(
    run_pb2.JobMonitor,
    {
        "condition": _CONDITIONS,
        "pause_seconds": _NUMBERS,
        "hold_seconds": _NUMBERS,
        "firings_max": _COUNTS,
    },
)
_JOBS = st.builds(
    lambda base, more: jobs_pb2.StartJobRequest(tool_name="probe", **base | more),
    st.sampled_from([{}, {"interval_seconds": 5.0, "duration_minutes": 60.0}]),
    st.fixed_dictionaries(
        {},
        optional={
            "interval_seconds": _NUMBERS,
            "iterations_max": _COUNTS,
            "duration_minutes": _NUMBERS,
            "delay_first": st.booleans(),
            "estimated_minutes": _NUMBERS,
            "reports": st.integers(0, 9),
            "report_iterations": _COUNTS,
            "report_seconds": _NUMBERS,
            "until": _CONDITIONS,
            "when": _MONITORS,
            "failures_told": _COUNTS,
        },
    ),
)
_MOMENTS = st.one_of(
    st.sampled_from([-62_135_596_800, 0, 1_774_745_999, 1_792_888_199, 1_835_395_200, 4_000_000_000, 253_402_300_799]),
    st.integers(-(2**63), 2**63 - 1),
).map(lambda seconds: Timestamp(seconds=seconds))
_CRON_PARTS = st.sampled_from(
    ["*", "*/7", "0", "29", "30", "31", "2", "1-5", "5-1", "L", "1#6", "٣", "NaN", "-1", "1,,2"]
)
_CRONS = st.one_of(
    st.lists(_CRON_PARTS, min_size=4, max_size=6).map(" ".join),
    st.sampled_from(["0 0 29 2 *", "0 0 30 2 *", "30 2 * * *", "0," * 127 + " * * * *", "* * * * *" * 60]),
    st.text(max_size=12),
)
_ZONES = st.one_of(
    st.sampled_from(
        ["", "UTC", "Europe/Berlin", "Australia/Lord_Howe", "Antarctica/Troll", "Mars/Base", "../etc", "Europe"]
    ),
    st.text(max_size=6),
)
_SCHEDULES = st.builds(
    lambda base, more: ScheduleDefinition(name="odd", text="do it", **base | more),
    st.sampled_from([{"cron": "30 2 * * *", "time_zone": "Europe/Berlin"}, {"interval_seconds": 60}]),
    st.fixed_dictionaries(
        {},
        optional={
            "cron": _CRONS,
            "time_zone": _ZONES,
            "interval_seconds": _COUNTS,
            "offset_seconds": _COUNTS,
            "jitter_seconds": _COUNTS,
            "catch_up_seconds": _COUNTS,
            "start_time": _MOMENTS,
            "end_time": _MOMENTS,
            "overlap": st.integers(0, 9),
        },
    ),
)


@pytest.fixture
async def channel(replica: Replica, tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    """Agent-loop's side for clients, over the ledger."""
    clock = SystemClock()
    ids, checker = IdSource(clock), FakeChecker()
    clients = ClientSide(
        ledger=PublicLedgerClient(replica.channel),
        agents=MemoryAgents(),
        live=BusEvents(replica.bus),
        checker=checker,
        tools=checker,
        documents=checker,
        clock=clock,
        ids=ids,
        defaults=RunDefaults(model="m", instructions="i"),
    )
    starting = Starting(clients.messages, lambda _: False)
    schedules = Schedules(ledger=ScheduleLedgerClient(replica.channel), starting=starting, clock=clock)
    server = RpcServer(
        f"unix:{tmp_path}/agent",
        authenticator=authenticator(local_key=LOCAL_KEY),
        ids=ids,
        metrics=Metrics("agent_loop"),
        drain_seconds=0.2,
    )
    clients.add_to(server)
    server.add(add_ScheduleServiceServicer_to_server, ScheduleServicer(schedules))
    async with clients.watches, server, grpc.aio.insecure_channel(server.address) as channel:
        yield channel


async def answered(call: Any) -> Any:
    """What a call returns; None if it is refused, in words, and for a field or for being too much."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        refused = error
    told = from_rpc_error(refused)
    assert told.reason in _TYPED, told
    assert told.message
    assert told.metadata.get("field") or told.reason == "TOO_LARGE", told
    return None


@_PATIENT
@given(request=_JOBS)
async def test_an_odd_job_has_an_end_or_is_refused_with_a_hint(channel: grpc.aio.Channel, request: Any) -> None:
    """ASYNC-2 to ASYNC-4: and what was answered is what was kept."""
    jobs: JobServiceAsyncStub = JobServiceStub(channel)
    started = await answered(jobs.StartJob(request, metadata=METADATA))
    if started is None:
        return
    job = (await jobs.GetJob(jobs_pb2.GetJobRequest(job_id=started.job.job_id), metadata=METADATA)).job
    definition = job.definition
    assert definition == started.job.definition
    assert 1 <= definition.iterations_max <= 1_000_000
    assert not definition.interval_seconds or 0.5 <= definition.interval_seconds <= 86_400
    assert definition.HasField("end_time") or not (definition.HasField("until") or definition.HasField("when"))
    await jobs.StopJob(jobs_pb2.StopJobRequest(job_id=job.job_id), metadata=METADATA)


@_PATIENT
@given(definition=_SCHEDULES)
async def test_an_odd_schedule_is_due_in_order_or_is_refused_with_a_hint(
    channel: grpc.aio.Channel, definition: Any
) -> None:
    """ASYNC-8: leap days, hours that clocks leave out, ends before the begin, zones that are none."""
    schedules: ScheduleServiceAsyncStub = ScheduleServiceStub(channel)
    created = await answered(
        schedules.CreateSchedule(schedule_pb2.CreateScheduleRequest(definition=definition), metadata=METADATA)
    )
    if created is None:
        return
    try:
        found = (await schedules.GetSchedule(schedule_pb2.GetScheduleRequest(name="odd"), metadata=METADATA)).schedule
        assert found.definition == created.schedule.definition
        times = [time.ToNanoseconds() for time in found.next_times]
        assert times == sorted(set(times))
        if times and found.definition.HasField("start_time"):
            assert times[0] >= found.definition.start_time.ToNanoseconds()
        if times and found.definition.HasField("end_time"):
            assert times[-1] < found.definition.end_time.ToNanoseconds()
        range_of = schedule_pb2.BackfillScheduleRequest(
            name="odd", begin_time=definition.start_time, end_time=definition.end_time
        )
        await answered(schedules.BackfillSchedule(range_of, metadata=METADATA))
    finally:
        await schedules.DeleteSchedule(schedule_pb2.DeleteScheduleRequest(name="odd"), metadata=METADATA)
