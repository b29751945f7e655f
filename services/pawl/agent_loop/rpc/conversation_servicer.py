"""pawl.agent.v1.ConversationService: requests to use cases, what they return to responses."""

from __future__ import annotations

from itertools import islice
from typing import cast

from pawl.agent.v1 import conversation_pb2 as pb
from pawl.agent.v1 import conversation_pb2_grpc
from pawl.agent_loop.app.conversations import Conversations
from pawl.agent_loop.domain.imports import MESSAGES_MAX
from pawl.agent_loop.rpc import convert
from pawl.chassis.auth import require_user
from pawl.chassis.ids import check_id
from pawl.chassis.rpc_kinds import Context
from pawl.event.v1 import conversation_pb2


class ConversationServicer(conversation_pb2_grpc.ConversationServiceServicer):
    """Serves users. Store and user come from their credential alone."""

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations

    async def GetConversation(self, request: pb.GetConversationRequest, context: Context) -> pb.GetConversationResponse:
        conversation_id = check_id(request.conversation_id, "conversation_id", optional=True)
        found = await self._conversations.get(require_user(), conversation_id, request.conversation_key)
        return pb.GetConversationResponse(conversation=_document(found))

    async def ListConversations(
        self, request: pb.ListConversationsRequest, context: Context
    ) -> pb.ListConversationsResponse:
        archived = request.archived if request.HasField("archived") else None
        page = await self._conversations.list(
            require_user(),
            convert.page(request),
            archived=archived,
            query=request.query,
            labels=request.labels,
            shared=request.shared,
        )
        return pb.ListConversationsResponse(
            conversations=map(_document, page.items), next_page_token=page.next_page_token
        )

    async def UpdateConversation(
        self, request: pb.UpdateConversationRequest, context: Context
    ) -> pb.UpdateConversationResponse:
        changed = await self._conversations.update(
            require_user(),
            convert.request_id(request),
            check_id(request.conversation_id, "conversation_id"),
            title=request.title if request.HasField("title") else None,
            archived=request.archived if request.HasField("archived") else None,
            labels=request.labels.labels if request.HasField("labels") else None,
            sharing=request.sharing,
            shows_arguments=request.shows_arguments if request.HasField("shows_arguments") else None,
        )
        return pb.UpdateConversationResponse(conversation=_document(changed))

    async def ForkConversation(
        self, request: pb.ForkConversationRequest, context: Context
    ) -> pb.ForkConversationResponse:
        made = await self._conversations.fork(
            require_user(),
            convert.request_id(request),
            check_id(request.conversation_id, "conversation_id"),
            number=request.number,
        )
        return pb.ForkConversationResponse(conversation=_document(made))

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
        return pb.ImportConversationResponse(conversation=_document(made))

    async def EraseConversation(
        self, request: pb.EraseConversationRequest, context: Context
    ) -> pb.EraseConversationResponse:
        conversation_id = check_id(request.conversation_id, "conversation_id")
        view = await self._conversations.erase(require_user(), conversation_id, convert.page(request))
        return pb.EraseConversationResponse(
            erasure=cast("conversation_pb2.Erasure", view.erasure),
            left_calls=(cast("conversation_pb2.LeftCall", call) for call in view.left.items),
            next_page_token=view.left.next_page_token,
        )


def _document(conversation: object) -> conversation_pb2.Conversation:
    return cast("conversation_pb2.Conversation", conversation)
