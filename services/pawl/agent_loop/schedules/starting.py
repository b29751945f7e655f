"""The messages with which runs begin that nobody starts by hand, worked out as for one whom a user starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from pawl.agent.v1.agent_pb2 import StartRunRequest
from pawl.agent_loop.api.messages import Messages
from pawl.agent_loop.loop.rules import checks
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import RequestId
from pawl.errors import (
    DeadlineExceeded,
    Internal,
    Overloaded,
    PawlError,
    PermissionDenied,
    Unavailable,
    Unimplemented,
)
from pawl.event.v1.schedule_pb2 import ScheduleDefinition
from pawl.event.v1.trigger_pb2 import TriggerDefinition
from pawl.job.v1.ledger_pb2 import SubmitMessageRequest

TEXT_BYTES_MAX: Final = 16 * 1024
PASSING: Final = (Unavailable, DeadlineExceeded, Overloaded, Internal, Unimplemented)
"""The errors that say nothing about what is to be started."""
NO_REQUEST: Final = RequestId("")

Definition: TypeAlias = ScheduleDefinition | TriggerDefinition


class Starting:
    """Works out messages. `credential_is_gone` says whether the API key of a principal is not in force any more."""

    def __init__(self, messages: Messages, credential_is_gone: Callable[[Principal], bool]) -> None:
        self._messages = messages
        self._credential_is_gone = credential_is_gone

    async def check(self, caller: Principal, definition: Definition) -> None:
        """Return if a run could be started so now.

        Raises:
            AgentNotFound, InvalidField, InvalidId, TooLarge: it could not.
        """
        checks.text(definition.text, "definition.text", bytes_max=TEXT_BYTES_MAX)
        await self._message(caller, definition, NO_REQUEST)

    async def message(
        self, caller: Principal, definition: Definition, request_id: RequestId = NO_REQUEST
    ) -> tuple[SubmitMessageRequest | None, str]:
        """Return the message of a run, or why there can be none.

        Raises:
            PASSING
        """
        try:
            if self._credential_is_gone(caller):
                raise PermissionDenied("the API key with which it was saved or resumed last is gone or has lost a role")
            return await self._message(caller, definition, request_id), ""
        except PASSING:
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
