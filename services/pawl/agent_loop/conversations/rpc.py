"""Conversations that are made of histories of elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice

from pawl.agent.v1 import conversation_pb2 as pb
from pawl.agent_loop.api import convert
from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.conversations import rules as imports
from pawl.agent_loop.conversations.rules import MESSAGES_MAX, HistoryMessage
from pawl.chassis.identity.auth import Principal, require_user
from pawl.chassis.ids import CallId, IdSource, RequestId
from pawl.chassis.rpc.kinds import Context
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


class ConversationServicer:
    """Serves users. Store and user come from their credential alone."""

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations

    async def ImportConversation(
        self, request: pb.ImportConversationRequest, context: Context
    ) -> pb.ImportConversationResponse:
        made = await self._conversations.import_history(
            require_user(),
            convert.request_id(request),
            tuple(map(convert.history_message, islice(request.messages, MESSAGES_MAX + 1))),
            title=request.title,
            conversation_key=request.conversation_key,
        )
        return pb.ImportConversationResponse(conversation=made)
