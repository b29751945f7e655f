"""The ledger service, for workers."""

from __future__ import annotations

from typing import Final

import grpc

from pawl.agent_loop.adapters import undo_reads, wire, wire_events
from pawl.agent_loop.adapters.public_ledger import options_message
from pawl.agent_loop.app.ports import Claim, Loaded, Renewal, RunKey
from pawl.agent_loop.domain import loop_state
from pawl.agent_loop.domain.command import Command
from pawl.agent_loop.domain.step import Committed, Step
from pawl.agent_loop.domain.undo import UndoSource
from pawl.chassis.rpc_client import translating
from pawl.event.v1 import run_pb2
from pawl.job.v1 import ledger_pb2, ledger_pb2_grpc

LEDGER_MESSAGE_BYTES_MAX: Final = 32 * 1024 * 1024
"""Of a step with the largest results of a whole batch."""

# For what comes in parts. A large conversation takes a while.
_PARTS_SECONDS_MAX: Final = 60.0


class WorkerLedgerClient:
    """A `WorkerLedger` over a channel to job-store. It makes no retries."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = ledger_pb2_grpc.LedgerServiceStub(channel)

    async def claim(self, worker_id: str, *, runs_max: int, lease_seconds: float) -> tuple[Claim, ...]:
        request = ledger_pb2.ClaimRunsRequest(worker_id=worker_id, runs_max=runs_max, lease_seconds=lease_seconds)
        with translating():
            response = await self._stub.ClaimRuns(request)
        return tuple(map(_claim, response.runs))

    async def load(self, claim: Claim) -> Loaded:
        request = ledger_pb2.LoadRunRequest(store_id=claim.key.store_id, run_id=claim.key.run_id, epoch=claim.epoch)
        response = ledger_pb2.LoadRunResponse()
        with translating():
            async for part in self._stub.LoadRun(request, timeout=_PARTS_SECONDS_MAX):
                response.MergeFrom(part)
        return Loaded(
            run=wire.run(response.run),
            messages=tuple(map(wire.message_of, response.messages)),
            calls=tuple(map(wire.call, response.calls)),
            commands=tuple(map(wire_events.command, response.commands)),
            loop=loop_state.read(response.loop_state),
            now=wire.seconds(response.now),
        )

    async def renew(self, worker_id: str, *, lease_seconds: float) -> Renewal:
        request = ledger_pb2.RenewLeasesRequest(worker_id=worker_id, lease_seconds=lease_seconds)
        with translating():
            response = await self._stub.RenewLeases(request)
        return Renewal(
            held=frozenset(map(_claim, response.runs)),
            with_commands=frozenset(map(_claim, response.runs_with_commands)),
        )

    async def release(self, worker_id: str) -> None:
        with translating():
            await self._stub.ReleaseWorker(ledger_pb2.ReleaseWorkerRequest(worker_id=worker_id))

    async def report_crash(self, claim: Claim) -> bool:
        request = ledger_pb2.ReportCrashRequest(store_id=claim.key.store_id, run_id=claim.key.run_id, epoch=claim.epoch)
        with translating():
            response = await self._stub.ReportCrash(request)
        return response.quarantined

    async def commit(self, claim: Claim, commit_id: str, step: Step) -> Committed:
        request = commit_request(claim, commit_id, step)
        with translating():
            response = await self._stub.CommitRun(request)
        return Committed(
            first_seq=response.first_seq,
            last_seq=response.last_seq,
            commands_pending=response.commands_pending,
            time=wire.seconds(response.time),
        )

    async def list_commands(self, claim: Claim) -> tuple[Command, ...]:
        request = ledger_pb2.ListCommandsRequest(store_id=claim.key.store_id, run_id=claim.key.run_id)
        with translating():
            return tuple(
                [
                    wire_events.command(command)
                    async for part in self._stub.ListCommands(request, timeout=_PARTS_SECONDS_MAX)
                    for command in part.commands
                ]
            )

    async def undo_sources(self, store_id: str, user_id: str, run_id: str) -> tuple[UndoSource, ...]:
        return await undo_reads.sources(self._stub, store_id, user_id, run_id)


def commit_request(claim: Claim, commit_id: str, step: Step) -> ledger_pb2.CommitRunRequest:
    """Return a step as the contract words it."""
    request = ledger_pb2.CommitRunRequest(
        store_id=claim.key.store_id,
        run_id=claim.key.run_id,
        epoch=claim.epoch,
        commit_id=commit_id,
        events=map(wire_events.event_message, step.events),
        messages=map(wire.message_message, step.messages),
        calls=map(wire.call_message, step.calls),
        waits=[run_pb2.WaitKind.Value(f"WAIT_KIND_{wait}") for wait in step.waits],
        round=step.round,
        output_text=step.output_text,
        active_seconds=step.active_seconds,
        tools=[run_pb2.PinnedTool(name=tool.name, version=tool.version) for tool in step.tools],
        loop_state=step.loop_state,
        consumed_command_ids=step.consumed_command_ids,
        unstopped_call_ids=step.unstopped_call_ids,
        lease_action=ledger_pb2.LeaseAction.Value(f"LEASE_ACTION_{step.lease_action}"),
    )
    if step.state is not None:
        request.state = run_pb2.RunState.Value(f"RUN_STATE_{step.state}")
    if step.failure is not None:
        request.failure.CopyFrom(
            run_pb2.RunFailure(
                failure_class=run_pb2.FailureClass.Value(f"FAILURE_CLASS_{step.failure.failure_class}"),
                reason=step.failure.reason,
                message=step.failure.message,
            )
        )
    if step.stop_cause is not None:
        request.stop_cause = run_pb2.StopCause.Value(f"STOP_CAUSE_{step.stop_cause}")
    if step.usage is not None:
        request.usage.CopyFrom(wire.usage_message(step.usage))
    for each in step.delegations:
        request.delegations.add(
            call_id=each.call_id,
            run_id=each.run_id,
            text=each.text,
            options=options_message(each.options),
            user_roles=each.user_roles,
            depth=each.depth,
            above=map(wire.above_message, each.above),
        )
    if step.wake_time is not None:
        wire.set_time(request.wake_time, step.wake_time)
    if step.after_seq is not None:
        request.after_seq = step.after_seq
    return request


def _claim(message: ledger_pb2.ClaimedRun) -> Claim:
    return Claim(key=RunKey(store_id=message.store_id, run_id=message.run_id), epoch=message.epoch)
