"""The ledger service, for workers."""

from __future__ import annotations

from typing import Final

import grpc
from msgspec.structs import replace

from pawl.agent_loop.loop import wire, wire_events
from pawl.agent_loop.loop.ports import Claim, Inbox, Loaded, Renewal
from pawl.agent_loop.loop.rules import jobs, loop_state
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.run import Delegation, Notice
from pawl.agent_loop.loop.rules.step import Committed, Step
from pawl.agent_loop.undo import planning as undo_reads
from pawl.agent_loop.undo.rules import UndoSource
from pawl.chassis.ids import CallId, RunId, StoreId, UserId, WorkerId
from pawl.chassis.rpc.client import translated, translating
from pawl.chassis.rpc.translate import Exceptions
from pawl.event.v1 import run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job.v1 import ledger_pb2_grpc

LEDGER_MESSAGE_BYTES_MAX: Final = 32 * 1024 * 1024
"""Of a step with the largest results of a whole batch."""

# For what comes in parts. A large conversation takes a while.
_PARTS_SECONDS_MAX: Final = 60.0

_CLAIM: Final = wire.WIRE.struct(Claim, pb.ClaimedRun, Exceptions(of_message=("loaded",)))
_COMMITTED: Final = wire.WIRE.struct(Committed, pb.CommitRunResponse)
wire.WIRE.struct(
    Notice,
    pb.Notice,
    Exceptions(
        read={
            "run_id": lambda message: message.run.run_id,
            "job": lambda message: wire.JOB.read(message.run.job),
            "state": lambda message: wire.RUN_STATES.read(message.run.state),
            "round": lambda message: message.run.round,
            "output_text": lambda message: message.run.output_text,
            "missed_iterations": lambda message: message.run.missed_iterations,
            "paused": lambda message: run_pb2.WAIT_KIND_PAUSED in message.run.waits,
            "failure": lambda message: (
                wire.FAILURE.read(message.run.failure) if message.run.HasField("failure") else None
            ),
        },
        of_message=("run",),
    ),
)
_INBOX: Final = wire.WIRE.struct(
    Inbox,
    pb.ListCommandsResponse,
    Exceptions(
        read={"commands": lambda message: tuple(map(wire_events.COMMAND.read, message.commands))},
        of_message=("commands",),
    ),
)
_LOADED: Final = wire.WIRE.struct(
    Loaded,
    pb.LoadRunResponse,
    Exceptions(
        read={
            "commands": lambda message: tuple(map(wire_events.COMMAND.read, message.commands)),
            "loop": lambda message: loop_state.read(message.loop_state),
        },
        of_message=("loop_state", "commands"),
    ),
)
wire.WIRE.struct(Delegation, pb.Delegation)
_STEP: Final = wire.WIRE.struct(
    Step,
    pb.CommitRunRequest,
    Exceptions(
        read={
            "events": lambda message: tuple(map(wire_events.EVENT.read, message.events)),
            "entered_notices": lambda _: (),
        },
        write={
            "events": lambda step: map(wire_events.EVENT.fields, step.events),
            "entered_notices": lambda step: [
                pb.EnteredNotice(run_id=each.run_id, occasion=each.occasion) for each in step.entered_notices
            ],
        },
        of_message=("store_id", "run_id", "epoch", "commit_id"),
    ),
)


class WorkerLedgerClient:
    """A `WorkerLedger` over a channel to job-store. It makes no retries."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._stub = ledger_pb2_grpc.LedgerServiceStub(channel)

    async def claim(
        self, worker_id: WorkerId, *, runs_max: int, lease_seconds: float, background_runs_max: int = 64
    ) -> dict[Claim, Loaded | None]:
        request = pb.ClaimRunsRequest(
            worker_id=worker_id,
            runs_max=runs_max,
            lease_seconds=lease_seconds,
            background_runs_max=background_runs_max,
        )
        response = await translated(self._stub.ClaimRuns(request))
        return {_CLAIM.read(run): _came_along(run) for run in response.runs}

    async def load(self, claim: Claim) -> Loaded:
        request = pb.LoadRunRequest(**_CLAIM.fields(claim))
        response = pb.LoadRunResponse()
        with translating():
            async for part in self._stub.LoadRun(request, timeout=_PARTS_SECONDS_MAX):
                response.MergeFrom(part)
        return _loaded(response)

    async def renew(self, worker_id: WorkerId, *, lease_seconds: float) -> Renewal:
        request = pb.RenewLeasesRequest(worker_id=worker_id, lease_seconds=lease_seconds)
        response = await translated(self._stub.RenewLeases(request))
        return Renewal(
            held=tuple(map(_CLAIM.read, response.runs)),
            with_commands=tuple(map(_CLAIM.read, response.runs_with_commands)),
        )

    async def release(self, worker_id: WorkerId) -> None:
        await translated(self._stub.ReleaseWorker(pb.ReleaseWorkerRequest(worker_id=worker_id)))

    async def report_crash(self, claim: Claim) -> bool:
        request = pb.ReportCrashRequest(**_CLAIM.fields(claim))
        response = await translated(self._stub.ReportCrash(request))
        return response.quarantined

    async def commit(self, claim: Claim, commit_id: str, step: Step) -> Committed:
        request = pb.CommitRunRequest(**_CLAIM.fields(claim), commit_id=commit_id, **_STEP.fields(step))
        response = await translated(self._stub.CommitRun(request))
        return _COMMITTED.read(response)

    async def list_commands(self, claim: Claim) -> Inbox:
        request = pb.ListCommandsRequest(store_id=claim.key.store_id, run_id=claim.key.run_id)
        response = pb.ListCommandsResponse()
        with translating():
            async for part in self._stub.ListCommands(request, timeout=_PARTS_SECONDS_MAX):
                response.MergeFrom(part)
        return _INBOX.read(response)

    async def call(self, store_id: StoreId, user_id: UserId, call_id: CallId) -> Call:
        request = pb.GetCallRequest(store_id=store_id, user_id=user_id, call_id=call_id)
        response = await translated(self._stub.GetCall(request))
        return wire.CALL.read(response.call)

    async def undo_sources(self, store_id: StoreId, user_id: UserId, run_id: RunId) -> tuple[UndoSource, ...]:
        return await undo_reads.sources(self._channel, store_id, user_id, run_id)


def _came_along(run: pb.ClaimedRun) -> Loaded | None:
    """Return what is loaded of a run, if it came with its claim; `load` reports why it cannot be read."""
    if not run.HasField("loaded"):
        return None
    try:
        return _loaded(run.loaded)
    except Exception:  # noqa: BLE001  # the other runs are claimed already
        return None


def _loaded(response: pb.LoadRunResponse) -> Loaded:
    loaded = _LOADED.read(response)
    return replace(loaded, run=jobs.as_driven(loaded.run))
