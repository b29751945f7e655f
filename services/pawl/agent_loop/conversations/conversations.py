"""Conversations that are made of histories of elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.conversations import rules as imports
from pawl.agent_loop.conversations.rules import HistoryMessage
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CallId, IdSource, RequestId
from pawl.event.v1 import conversation_pb2


class Conversations:
    """Imports conversations. Whatever else is done with them job-store does."""

    def __init__(self, ledger: PublicLedger, ids: IdSource) -> None:
        self._ledger = ledger
        self._ids = ids

    async def import_history(
        self,
        caller: Principal,
        request_id: RequestId,
        history: Sequence[HistoryMessage],
        *,
        title: str,
        conversation_key: str,
    ) -> conversation_pb2.Conversation:
        """Make a conversation of a history that was made elsewhere; return it.

        Raises:
            InvalidHistory: a strict model server would refuse it.
            ConversationExists, RequestIdReused, InvalidField, TooLarge
        """
        # Not on the event loop: there may be much JSON in it.
        await asyncio.to_thread(imports.check, history)
        ids = iter([CallId(self._ids.new("call")) for message in history for _ in message.calls])
        messages, calls = await asyncio.to_thread(imports.taken_over, history, lambda: next(ids))
        return await self._ledger.import_conversation(
            caller, request_id, messages, calls, title=title, conversation_key=conversation_key
        )
