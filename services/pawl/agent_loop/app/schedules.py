"""Schedules of users, and their fires.

The ledger says when a schedule is due and makes the run; what the run is to be like is worked out here, as for a run
that its user starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from pawl.agent_loop.app.frames import UserMessage
from pawl.agent_loop.app.messages import Messages
from pawl.agent_loop.app.public_ports import ScheduleLedger
from pawl.agent_loop.app.public_values import DueSchedule, MessagePolicy, NewMessage, ScheduledMessage
from pawl.agent_loop.domain import checks
from pawl.agent_loop.domain.options import AskedOptions
from pawl.chassis import logs
from pawl.chassis.auth import Principal
from pawl.chassis.clock import Clock
from pawl.chassis.ids import ConversationId, CredentialId, RequestId
from pawl.errors import (
    AgentNotFound,
    DeadlineExceeded,
    DependencyUnavailable,
    Internal,
    Overloaded,
    PawlError,
    PermissionDenied,
    ScheduleNotFound,
    Unavailable,
    Unimplemented,
)

TEXT_BYTES_MAX: Final = 16 * 1024
NOTE_BYTES_MAX: Final = 1000
_CLAIMED_MAX: Final = 512
_TRIGGERS_MAX: Final = 8
_WAIT_SECONDS_MIN: Final = 0.01
_AWAY_SECONDS: Final = 1.0
_NO_REQUEST: Final = RequestId("")
# They say nothing about the schedule: it is claimed again.
_PASSING: Final = (Unavailable, DeadlineExceeded, Overloaded, Internal, Unimplemented)

_log = logs.get_logger(__name__)


class Schedules:
    """Keeps schedules, and fires those that are due. Documents are as the contract has them."""

    def __init__(
        self,
        *,
        ledger: ScheduleLedger,
        messages: Messages,
        clock: Clock,
        credential_is_gone: Callable[[CredentialId], bool],
    ) -> None:
        self._credential_is_gone = credential_is_gone
        self._ledger = ledger
        self._messages = messages
        self._clock = clock

    async def save(
        self, caller: Principal, definition: object, scheduled: ScheduledMessage, *, must_exist: bool
    ) -> object:
        """Make a schedule of the caller, or change one, if a run could be started so now. Idempotent.

        Raises:
            AgentNotFound, InvalidField, InvalidId, TooLarge: no run could be.
            ScheduleExists, ScheduleNotFound
        """
        checks.text(scheduled.text, "definition.text", bytes_max=TEXT_BYTES_MAX)
        message = await self._message(caller, scheduled, _NO_REQUEST)
        if message.asked_agent and message.agent is None:
            raise AgentNotFound
        return await self._ledger.put_schedule(caller, definition, must_exist=must_exist)

    async def get(self, caller: Principal, name: str) -> object:
        """Return a schedule of the caller.

        Raises:
            ScheduleNotFound
        """
        return (await self._ledger.get_schedule(caller, name))[0]

    async def list(self, caller: Principal) -> Sequence[object]:
        """Return the schedules of the caller, by name."""
        return await self._ledger.list_schedules(caller)

    async def pause(self, caller: Principal, name: str, note: str = "", *, paused: bool) -> object:
        """Pause a schedule of the caller, or have it go on.

        Raises:
            ScheduleNotFound, InvalidField, TooLarge
        """
        checks.text(note, "note", bytes_max=NOTE_BYTES_MAX, may_be_empty=True)
        return await self._ledger.pause_schedule(caller, name, note, paused=paused)

    async def delete(self, caller: Principal, name: str) -> None:
        """Remove a schedule of the caller.

        Raises:
            ScheduleNotFound
        """
        await self._ledger.delete_schedule(caller, name)

    async def trigger(self, caller: Principal, name: str, request_id: RequestId) -> object:
        """Fire a schedule of the caller now; return the fire. Idempotent by request id.

        Raises:
            ScheduleNotFound, RequestIdReused
            DependencyUnavailable: the schedule changed all the time, or the ledger is away.
        """
        for _ in range(_TRIGGERS_MAX):
            _, due = await self._ledger.get_schedule(caller, name)
            if (fire := await self._fire(due, request_id)) is not None:
                return fire
        raise DependencyUnavailable("the schedule changes at this moment: try again")

    async def fire_forever(self) -> None:
        """Fire what is due, as long as this process serves."""
        while True:
            wait_seconds = await self._fire_due()
            if wait_seconds:
                await self._clock.sleep(max(wait_seconds, _WAIT_SECONDS_MIN))

    async def _fire_due(self) -> float:
        """Fire schedules that are due; return the seconds until there may be more."""
        try:
            due, wait_seconds = await self._ledger.claim_schedules(_CLAIMED_MAX)
        except _PASSING:
            return _AWAY_SECONDS
        await asyncio.gather(*map(self._fire_surely, due))
        return wait_seconds

    async def _fire_surely(self, due: DueSchedule) -> None:
        """Fire a schedule; if that fails now, it will be claimed again."""
        try:
            await self._fire(due, _NO_REQUEST)
        except (*_PASSING, ScheduleNotFound) as error:
            _log.info("schedule.not_fired", store=due.caller.store_id, reason=error.reason)
        except Exception:  # noqa: BLE001  # one schedule keeps no other one from firing
            _log.exception("schedule.not_fired", store=due.caller.store_id)

    async def _fire(self, due: DueSchedule, request_id: RequestId) -> object | None:
        try:
            if self._credential_is_gone(due.caller.credential_id):
                raise PermissionDenied("the API key is gone with which the schedule was saved or resumed last")
            message = await self._message(due.caller, due.message, request_id)
        except _PASSING:
            raise
        except PawlError as error:
            refusal = f"{error.reason}: {error.message}"
            return await self._ledger.fire_schedule(due, None, refusal=refusal, request_id=request_id)
        return await self._ledger.fire_schedule(due, message, request_id=request_id)

    async def _message(self, caller: Principal, scheduled: ScheduledMessage, request_id: RequestId) -> NewMessage:
        message = UserMessage(
            conversation_id=ConversationId(""),
            text=scheduled.text,
            options=AskedOptions(),
            policy=MessagePolicy.QUEUE,
            conversation_key=scheduled.conversation_key,
            agent=scheduled.agent,
            labels=scheduled.labels,
        )
        checked, refusal = await self._messages.checked(caller, request_id, message, must_exist=False)
        if refusal is not None:
            raise refusal
        return checked
