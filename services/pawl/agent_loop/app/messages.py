"""Messages of users: they start runs, wait for them, or enter them."""

from __future__ import annotations

from pawl.agent_loop.app.public_ports import PublicLedger
from pawl.agent_loop.app.public_values import Caller, MessagePolicy, NewMessage, RunView
from pawl.agent_loop.domain import checks
from pawl.agent_loop.domain.options import AskedOptions, RunDefaults, complete
from pawl.errors import InvalidField


class Messages:
    """Checks messages, completes their options and brings them to the ledger."""

    def __init__(self, *, ledger: PublicLedger, defaults: RunDefaults) -> None:
        self._ledger = ledger
        self._defaults = defaults

    async def start(
        self,
        caller: Caller,
        *,
        request_id: str,
        conversation_id: str,
        text: str,
        asked: AskedOptions,
        policy: MessagePolicy,
    ) -> RunView:
        """Create a run; durable when this returns. Idempotent by request id.

        Raises:
            InvalidField, TooLarge: the message or an option is wrong.
            ConversationNotFound, ConversationBusy, QueueFull, RequestIdReused.
        """
        if policy is MessagePolicy.STEER:
            raise InvalidField("a run cannot be started by steering: send a message instead", field="policy")
        run, _ = await self._submit(
            caller,
            request_id=request_id,
            conversation_id=conversation_id,
            conversation_must_exist=bool(conversation_id),
            text=text,
            asked=asked,
            policy=policy,
        )
        return run

    async def send(
        self,
        caller: Caller,
        *,
        request_id: str,
        conversation_id: str,
        text: str,
        asked: AskedOptions,
        policy: MessagePolicy,
    ) -> tuple[RunView, bool]:
        """Send a message to a conversation; return its run, and whether it entered an active one.

        Raises: as `start`.
        """
        return await self._submit(
            caller,
            request_id=request_id,
            conversation_id=conversation_id,
            conversation_must_exist=True,
            text=text,
            asked=asked,
            policy=policy,
        )

    async def _submit(
        self,
        caller: Caller,
        *,
        request_id: str,
        conversation_id: str,
        conversation_must_exist: bool,
        text: str,
        asked: AskedOptions,
        policy: MessagePolicy,
    ) -> tuple[RunView, bool]:
        message = NewMessage(
            request_id=request_id,
            conversation_id=conversation_id,
            conversation_must_exist=conversation_must_exist,
            text=checks.text(text, "text", bytes_max=checks.MESSAGE_BYTES_MAX),
            asked=asked,
            options=complete(asked, self._defaults),
            policy=policy,
        )
        return await self._ledger.submit_message(caller, message)
