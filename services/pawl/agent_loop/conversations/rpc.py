"""pawl.agent.v1.ConversationService: imports. Its other methods are forwarded to job-store."""

from __future__ import annotations

from itertools import islice

from pawl.agent.v1 import conversation_pb2 as pb
from pawl.agent_loop.api import convert
from pawl.agent_loop.conversations.conversations import Conversations
from pawl.agent_loop.conversations.rules import MESSAGES_MAX
from pawl.chassis.identity.auth import require_user
from pawl.chassis.rpc.kinds import Context


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
