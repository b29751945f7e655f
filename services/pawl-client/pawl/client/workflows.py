"""Client methods for workflows and their runs."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any, Final

from pawl.agent.v1 import agent_pb2
from pawl.agent.v1 import workflow_pb2 as pb
from pawl.client.forms import natural
from pawl.client.target import DEADLINE_SECONDS, Target
from pawl.event.v1 import run_pb2
from pawl.event.v1.workflow_pb2 import WorkflowVersion

# Polling interval for progress within a node.
_POLL_SECONDS: Final = 1.0
_WAIT_SECONDS: Final = 50.0


class WorkflowRun:
    """A handle for a workflow run. `AsyncClient.start_workflow` and `workflow_run` return it."""

    def __init__(self, target: Target, run_id: str) -> None:
        self._target = target
        self.run_id = run_id

    async def execution(self, node: str = "") -> pb.GetExecutionResponse:
        """Return the run and the current states of its nodes.

        With `node`, return that node with its input and output.
        """
        request = pb.GetExecutionRequest(run_id=self.run_id, node=node)
        return await self._target.again(self._target.workflows.GetExecution, request)

    async def follow(self) -> AsyncGenerator[pb.GetExecutionResponse, None]:
        """Yield the run and its nodes until it ends: immediately, after each change, and about once a second."""
        while True:
            execution = await self.execution()
            yield execution
            if execution.run.HasField("end_time"):
                return
            await self._wait(_POLL_SECONDS, execution.run.last_seq)

    async def result(self) -> run_pb2.Run:
        """Wait until the run has ended. Return it with `output_json` or, if it failed, with `failure`.

        This keeps waiting while the run is waiting for people, events or times.
        """
        run = run_pb2.Run()
        while not run.HasField("end_time"):
            run = await self._wait(_WAIT_SECONDS, run.last_seq)
        return run

    async def _wait(self, seconds: float, after_seq: int) -> run_pb2.Run:
        request = agent_pb2.GetRunRequest(run_id=self.run_id, wait_seconds=seconds, after_seq=after_seq)
        read = partial(self._target.agents.GetRun, timeout=DEADLINE_SECONDS + seconds)
        return (await self._target.again(read, request)).run

    async def pause(self, *, request_id: str = "") -> run_pb2.Run:
        """Pause the run and return it. Running nodes finish, but no new node starts."""
        request = pb.PauseExecutionRequest(run_id=self.run_id, request_id=request_id)
        return (await self._target.once(self._target.workflows.PauseExecution, request)).run

    async def resume(self, *, request_id: str = "") -> run_pb2.Run:
        """Resume the run and return it."""
        request = pb.ResumeExecutionRequest(run_id=self.run_id, request_id=request_id)
        return (await self._target.once(self._target.workflows.ResumeExecution, request)).run

    async def send_event(self, name: str, payload: Any = None, *, event_id: str = "") -> run_pb2.Run:
        """Send an event with a JSON payload to the run's wait nodes. Events with the same id take effect only once.

        Without an event id, the request is not retried.
        """
        request = pb.SendEventRequest(
            run_id=self.run_id, name=name, payload_json=json.dumps(payload).encode(), event_id=event_id
        )
        send = self._target.workflows.SendEvent
        return (await (self._target.again(send, request) if event_id else send(request))).run

    async def rerun(self, node: str, *, request_id: str = "") -> WorkflowRun:
        """Run the workflow again from a node, once the run has ended. Return the new run.

        The new run reuses the outputs of finished nodes that do not depend on `node`.
        """
        request = pb.RerunFromRequest(run_id=self.run_id, node=node, request_id=request_id)
        answer = await self._target.once(self._target.workflows.RerunFrom, request)
        return WorkflowRun(self._target, answer.run.run_id)

    async def rerun_plan(self, node: str) -> pb.RerunFromResponse:
        """Return which nodes `rerun` would reuse or run again, and which effects could happen again."""
        request = pb.RerunFromRequest(run_id=self.run_id, node=node, validate_only=True)
        return await self._target.again(self._target.workflows.RerunFrom, request)


class WorkflowVerbs(Target):
    async def save_workflow(self, definition: Mapping[str, Any]) -> WorkflowVersion:
        """Save a workflow and return its version. An unchanged definition does not create a version.

        Raises:
            InvalidWorkflow: The definition is invalid. The message lists the problems.
        """
        request = pb.SaveWorkflowRequest(definition_json=json.dumps(definition).encode())
        return (await self.again(self.workflows.SaveWorkflow, request)).workflow

    async def get_workflow(self, name: str, version: int = 0) -> WorkflowVersion:
        """Return a version of a workflow. Version 0 is the newest."""
        request = pb.GetWorkflowRequest(name=name, version=natural(version, "version"))
        return (await self.again(self.workflows.GetWorkflow, request)).workflow

    async def list_workflows(self) -> AsyncGenerator[WorkflowVersion, None]:
        """Yield the store's workflows, sorted by name, without their definitions."""
        async for page in self.pages(self.workflows.ListWorkflows, pb.ListWorkflowsRequest()):
            for workflow in page.workflows:
                yield workflow

    async def delete_workflow(self, name: str) -> None:
        """Delete a workflow. Its runs continue. Not retried, because a second attempt would raise WorkflowNotFound."""
        await self.workflows.DeleteWorkflow(pb.DeleteWorkflowRequest(name=name))

    async def start_workflow(
        self,
        name: str,
        input: Mapping[str, Any] | None = None,  # noqa: A002  # as the definition has it
        *,
        version: int = 0,
        reports_to: str = "",
        labels: Mapping[str, str] | None = None,
        total_tokens_max: int = 0,
        request_id: str = "",
    ) -> WorkflowRun:
        """Start a workflow and return its run once it is durable.

        When the run ends, Pawl reports to the conversation `reports_to` or, if that is empty, to your inbox.
        """
        request = pb.StartWorkflowRequest(
            name=name,
            version=natural(version, "version"),
            input_json=json.dumps(dict(input or {})).encode(),
            reports_to_conversation_id=reports_to,
            labels=labels,
            total_tokens_max=natural(total_tokens_max, "total_tokens_max"),
            request_id=request_id,
        )
        return WorkflowRun(self, (await self.once(self.workflows.StartWorkflow, request)).run.run_id)

    async def complete_wait(self, token: str, payload: Any = None) -> None:
        """Complete the wait of a workflow node, using the wait's token and a JSON payload. Safe to repeat."""
        request = pb.SendEventRequest(token=token, payload_json=json.dumps(payload).encode())
        await self.again(self.workflows.SendEvent, request)

    def workflow_run(self, run_id: str) -> WorkflowRun:
        """Return a handle for a workflow run. This does not send a request."""
        return WorkflowRun(self, run_id)
