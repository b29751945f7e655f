"""A worker that a test plays by hand on a real job store."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.rules.run import RunOptions
from pawl.chassis.rpc.client import translating
from pawl.event.v1 import call_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2

if TYPE_CHECKING:
    from pawl.job.v1.ledger_pb2_grpc import LedgerServiceAsyncStub


class Worker:
    """Claims runs of the test's store and commits steps of them."""

    def __init__(self, stub: LedgerServiceAsyncStub, store_id: str) -> None:
        self.stub = stub
        self.store_id = store_id
        self._epochs: dict[str, int] = {}
        self._commits = itertools.count(1)

    async def add_run(self, user_id: str = "me") -> str:
        """Create a run and begin it; return its id."""
        request = ledger_pb2.SubmitMessageRequest(
            store_id=self.store_id,
            user_id=user_id,
            text="Hello",
            options=wire.OPTIONS.write(RunOptions(model="m")),
            policy=ledger_pb2.MESSAGE_POLICY_QUEUE,
        )
        with translating():
            run = (await self.stub.SubmitMessage(request)).run
        await self.begin(run.run_id)
        return str(run.run_id)

    async def begin(self, run_id: str) -> None:
        """Claim a run and let it run. Runs of other tests may be claimed on the way: theirs are over."""
        while run_id not in self._epochs:
            request = ledger_pb2.ClaimRunsRequest(worker_id="worker", runs_max=64, lease_seconds=300)
            with translating():
                claimed = (await self.stub.ClaimRuns(request)).runs
            self._epochs |= {run.run_id: run.epoch for run in claimed}
        await self.commit(run_id, state=run_pb2.RUN_STATE_RUNNING)

    async def commit(self, run_id: str, **fields: Any) -> None:
        """Commit a step, with all commands that wait taken into account."""
        with translating():
            asked = ledger_pb2.ListCommandsRequest(store_id=self.store_id, run_id=run_id)
            inbox = [command async for part in self.stub.ListCommands(asked) for command in part.commands]
            await self.stub.CommitRun(
                ledger_pb2.CommitRunRequest(
                    store_id=self.store_id,
                    run_id=run_id,
                    epoch=self._epochs[run_id],
                    commit_id=f"commit_{next(self._commits):06}",
                    consumed_command_ids=[command.command_id for command in inbox],
                    **fields,
                )
            )

    async def offer(self, run_id: str, call_id: str) -> None:
        """Let the model ask for a front-end call."""
        message = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, call_ids=[call_id])
        await self.commit(run_id, messages=[message], calls=[self._call(call_id, call_pb2.CALL_STATE_OFFERED)])

    async def settle(self, run_id: str, call_id: str, state: call_pb2.CallState.ValueType) -> None:
        """Let a call come to its end."""
        call = self._call(call_id, state)
        call.result.content_json = b"1"
        await self.commit(run_id, calls=[call])

    async def finish(self, run_id: str) -> None:
        """Let the run complete."""
        await self.commit(run_id, state=run_pb2.RUN_STATE_COMPLETED)

    @staticmethod
    def _call(call_id: str, state: call_pb2.CallState.ValueType) -> call_pb2.Call:
        return call_pb2.Call(
            call_id=call_id,
            state=state,
            round=1,
            tool_name="show",
            tool_version=1,
            arguments_json=b"{}",
            context=call_pb2.EXECUTION_CONTEXT_FRONTEND,
        )
