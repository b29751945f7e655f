"""Prepares the messages of runs that schedules and triggers start, as if users had started these runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeAlias

from pawl.agent.v1.agent_pb2 import StartRunRequest
from pawl.agent.v1.workflow_pb2 import StartWorkflowRequest
from pawl.agent_loop.api.messages import Messages
from pawl.agent_loop.loop.rules import checks
from pawl.agent_loop.loop.spans import first_span
from pawl.agent_loop.schedules import inputs
from pawl.agent_loop.workflows.starting import WorkflowStarting
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CredentialId, RequestId, RunId, StoreId, UserId
from pawl.chassis.process import logs
from pawl.chassis.process.clock import Clock
from pawl.chassis.process.tasks import within
from pawl.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArguments,
    InvalidField,
    Overloaded,
    PawlError,
    PermissionDenied,
    ScheduleNotFound,
    TriggerNotFound,
    Unavailable,
    Unimplemented,
)
from pawl.event.v1.schedule_pb2 import ScheduleDefinition
from pawl.event.v1.trigger_pb2 import TriggerDefinition
from pawl.job.v1.ledger_pb2 import SubmitMessageRequest
from pawl.job.v1.schedules_pb2 import ScheduleOwner

TEXT_BYTES_MAX: Final = 16 * 1024
# Transient errors, unrelated to the run to start.
RETRYABLE: Final = (Unavailable, DeadlineExceeded, Overloaded, Internal, Unimplemented)
NO_REQUEST: Final = RequestId("")
_WAIT_SECONDS_MIN: Final = 0.01
_CHANGED_SECONDS: Final = 1.0

_log = logs.get_logger(__name__)

Definition: TypeAlias = ScheduleDefinition | TriggerDefinition


def caller_of(owner: ScheduleOwner) -> Principal:
    return Principal(
        store_id=StoreId(owner.store_id),
        user_id=UserId(owner.user_id),
        roles=frozenset(owner.user_roles),
        credential_id=CredentialId(owner.credential_id),
        delegate_user_id=UserId(owner.delegate_user_id),
        people=frozenset(map(UserId, owner.people)),
    )


async def fire_safely(kind: str, owner: ScheduleOwner, firing: Awaitable[object]) -> None:
    """Fire a schedule or trigger. If this fails, log the error. The schedule or trigger will be claimed again."""
    try:
        await firing
    except (*RETRYABLE, ScheduleNotFound, TriggerNotFound) as error:
        _log.info(f"{kind}.not_fired", store=owner.store_id, reason=error.reason)
    except Exception:  # noqa: BLE001  # a failure must not affect the others
        _log.exception(f"{kind}.not_fired", store=owner.store_id)


class ClaimPause:
    """A pause between claims of due schedules or events."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = asyncio.Event()

    def note_change(self) -> None:
        """Claim again within a second, because something may be due earlier than the last claim reported."""
        self._changed.set()

    def claiming(self) -> None:
        """Discard the changes noted so far, because the claim that is about to start will find them."""
        self._changed.clear()

    async def wait(self, seconds: float) -> None:
        await self._clock.sleep(min(max(seconds, _WAIT_SECONDS_MIN), _CHANGED_SECONDS))
        if seconds > _CHANGED_SECONDS:
            await within(seconds - _CHANGED_SECONDS, self._changed.wait())


class Starting:
    """Prepares the messages of new runs.

    `credential_is_gone` returns whether a principal's API key is no longer valid. With `traces`, runs are traced.
    """

    def __init__(
        self,
        messages: Messages,
        workflows: WorkflowStarting,
        credential_is_gone: Callable[[Principal], bool],
        *,
        traces: bool = False,
    ) -> None:
        self._traces = traces
        self._messages = messages
        self._workflows = workflows
        self._credential_is_gone = credential_is_gone

    async def check(self, caller: Principal, definition: Definition) -> None:
        """Check that a run can currently be started with this definition.

        Raises:
            AgentNotFound, WorkflowNotFound, InvalidField, InvalidId, TooLarge: The run cannot be started.
            InvalidArguments: The workflow does not accept this input.
        """
        if not definition.workflow:
            if definition.input_json:
                raise InvalidField("input requires `workflow`", field="definition.input_json")
            checks.text(definition.text, "definition.text", bytes_max=TEXT_BYTES_MAX)
            await self._message(caller, definition, NO_REQUEST)
            return
        is_fixed = inputs.check(definition)
        try:
            given = inputs.rendered(definition, {}) if is_fixed else definition.input_json
            await self._workflow(caller, definition, NO_REQUEST, given)
        except InvalidArguments:
            if is_fixed:
                raise

    async def message(
        self,
        caller: Principal,
        definition: Definition,
        scope: Mapping[str, Any],
        request_id: RequestId = NO_REQUEST,
        *,
        last_run_id: RunId = RunId(""),
    ) -> tuple[SubmitMessageRequest | None, str]:
        """Return a run's message, or the reason why the run cannot be started.

        `scope` contains the values that the templates in a workflow's input may use. The run's trace links to the
        request that fires it or, if there is none, to `last_run_id`, the run of the previous firing.

        Raises:
            PawlError: A transient error in RETRYABLE.
        """
        try:
            if self._credential_is_gone(caller):
                raise PermissionDenied(
                    "the API key that last saved or resumed the schedule was revoked or has lost a role"
                )
            if definition.workflow:
                message = await self._workflow(caller, definition, request_id, inputs.rendered(definition, scope))
            else:
                message = await self._message(caller, definition, request_id)
            previous = first_span(last_run_id) if self._traces and last_run_id else ""
            message.trace_link, message.traceparent = message.traceparent or previous, ""
            return message, ""
        except RETRYABLE:
            raise
        except PawlError as error:
            return None, f"{error.reason}: {error.message}"

    async def _message(self, caller: Principal, definition: Definition, request_id: RequestId) -> SubmitMessageRequest:
        message = StartRunRequest(
            text=definition.text,
            conversation_key=definition.conversation_key,
            agent=definition.agent,
            labels=definition.labels,
        )
        checked, refusal = await self._messages.checked(caller, request_id, message, must_exist=False)
        if refusal is not None:
            raise refusal
        return checked

    async def _workflow(
        self, caller: Principal, definition: Definition, request_id: RequestId, input_json: bytes
    ) -> SubmitMessageRequest:
        requested = StartWorkflowRequest(
            request_id=request_id, name=definition.workflow, input_json=input_json, labels=definition.labels
        )
        message, refusal = await self._workflows.submission(caller, requested)
        if refusal is not None:
            raise refusal
        return message
