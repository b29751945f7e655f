from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from pawl.agent.v1.workflow_pb2 import StartWorkflowRequest
from pawl.agent_loop.api import convert
from pawl.agent_loop.api.ledger import PublicLedger, submission
from pawl.agent_loop.api.messages import unless_refused
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.registry import RegistryClient
from pawl.agent_loop.loop.rules.options import AskedOptions, RunDefaults, complete
from pawl.agent_loop.loop.rules.run import PinnedWorkflow
from pawl.agent_loop.workflows.definition import INPUT_BYTES_MAX
from pawl.agent_loop.workflows.versions import Workflows
from pawl.chassis import strict_json
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import ConversationId, check_id
from pawl.chassis.labels import check_labels
from pawl.errors import InvalidArguments, PawlError, WorkflowNotFound
from pawl.event.v1 import run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.values import MessagePolicy


class WorkflowStarting:
    """Starts runs of workflows for users."""

    def __init__(
        self, ledger: PublicLedger, workflows: Workflows, registry: RegistryClient, defaults: RunDefaults
    ) -> None:
        self._ledger = ledger
        self._workflows = workflows
        self._registry = registry
        self._defaults = defaults

    async def start(
        self, caller: Principal, request: StartWorkflowRequest, reused: Mapping[str, Any] = {}
    ) -> run_pb2.Run:
        """Create a run and return once it is durable. Idempotent by request id. Gives way to foreground runs.

        `reused` contains the fields of `PinnedWorkflow` that a rerun sets.

        Raises:
            WorkflowNotFound: The workflow does not exist or was deleted.
            InvalidArguments: The input does not match the workflow's schema.
            InvalidId, InvalidField, InvalidJson, TooLarge: The request is invalid.
            ConversationNotFound, ConversationErased, QueueFull, RequestIdReused
        """
        await self._ledger.background_steps.give_way()
        message, refusal = await self.submission(caller, request, reused)
        return (await unless_refused(message, refusal, lambda: self._ledger.submit_message(message))).run

    async def submission(
        self, caller: Principal, request: StartWorkflowRequest, reused: Mapping[str, Any] = {}
    ) -> tuple[pb.SubmitMessageRequest, PawlError | None]:
        """Return the ledger's request to start a run, and the error with which to refuse a new run, if any.

        Raises:
            PawlError: Any error that `start` raises about the request itself.
        """
        name = check_id(request.name, "name")
        content = strict_json.loads(request.input_json or b"{}", bytes_max=INPUT_BYTES_MAX)
        requested = PinnedWorkflow(
            name=name,
            version=request.version,
            input_json=strict_json.dumps_canonical(content),
            reports_to_conversation_id=ConversationId(
                check_id(request.reports_to_conversation_id, "reports_to_conversation_id", optional=True)
            ),
            **reused,
        )
        labels = check_labels(request.labels)
        limits = {"total_tokens_max": request.total_tokens_max} if request.total_tokens_max else {}
        options = AskedOptions(limits=limits)
        pinned: dict[str, Any] | None = None
        refusal: PawlError | None = None
        try:
            found = await self._workflows.of_run(caller, name, request.version)
            await self._check_input(caller, found.input_schema_json, requested.input_json)
            pinned = wire.WORKFLOW.fields(msgspec.structs.replace(requested, version=found.version))
        except (WorkflowNotFound, InvalidArguments) as error:
            refusal = error
        message = submission(
            caller,
            asked_options=options,
            options=complete(options, self._defaults),
            request_id=convert.request_id(request),
            # Repeated requests must have the same text, so it must not depend on the newest version.
            text=f"[Workflow {name}]",
            policy=MessagePolicy.QUEUE,
            labels=labels,
            workflow=pinned,
            asked_program_sha256=_digest(requested),
        )
        return message, refusal

    async def _check_input(self, caller: Principal, schema_json: bytes, input_json: bytes) -> None:
        checked = await self._registry.check_output(caller.store_id, schema_json, input_json.decode())
        if checked.faults:
            # Violations at the top level are worded as if in an answer.
            faults = (fault.removeprefix("answer: ") for fault in checked.faults)
            raise InvalidArguments(f"the input does not match the workflow's schema: {'; '.join(faults)}")


def _digest(requested: PinnedWorkflow) -> bytes:
    """Return a digest of the fields that must be equal in a repeated request."""
    return hashlib.sha256(msgspec.msgpack.encode(msgspec.structs.replace(requested, start_state=b""))).digest()
