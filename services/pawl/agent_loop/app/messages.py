"""Messages of users: they start runs, wait for them, or enter them."""

from __future__ import annotations

from pawl.agent_loop.app.frames import UserMessage
from pawl.agent_loop.app.public_ports import PublicLedger
from pawl.agent_loop.app.public_values import MessagePolicy, NewMessage, RunView
from pawl.agent_loop.domain import checks
from pawl.agent_loop.domain.options import RunDefaults, complete
from pawl.chassis.auth import Principal
from pawl.chassis.ids import RequestId
from pawl.errors import InvalidField


class Messages:
    """Checks messages, completes their options and brings them to the ledger."""

    def __init__(self, *, ledger: PublicLedger, defaults: RunDefaults) -> None:
        self._ledger = ledger
        self._defaults = defaults

    async def start(self, caller: Principal, request_id: RequestId, message: UserMessage) -> RunView:
        """Create a run; durable when this returns. Idempotent by request id.

        Raises:
            InvalidField, TooLarge: the message or an option is wrong.
            ConversationNotFound, ConversationBusy, QueueFull, RequestIdReused.
        """
        if message.policy is MessagePolicy.STEER:
            raise InvalidField("a run cannot be started by steering: send a message instead", field="policy")
        run, _ = await self._submit(caller, request_id, message, must_exist=bool(message.conversation_id))
        return run

    async def send(self, caller: Principal, request_id: RequestId, message: UserMessage) -> tuple[RunView, bool]:
        """Send a message to a conversation; return its run, and whether it entered an active one.

        Raises: as `start`.
        """
        return await self._submit(caller, request_id, message, must_exist=True)

    async def _submit(
        self, caller: Principal, request_id: RequestId, message: UserMessage, *, must_exist: bool
    ) -> tuple[RunView, bool]:
        checked = NewMessage(
            request_id=request_id,
            conversation_id=message.conversation_id,
            conversation_must_exist=must_exist,
            text=checks.text(message.text, "text", bytes_max=checks.MESSAGE_BYTES_MAX),
            asked_options=message.options,
            options=complete(message.options, self._defaults),
            policy=message.policy,
        )
        return await self._ledger.submit_message(caller, checked)
