"""Servicer for pawl.agent.v1.ConversationService, which agent-loop forwards."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import Final

from pawl.agent.v1 import conversation_pb2 as pb
from pawl.chassis.identity.auth import require_user
from pawl.chassis.ids import CallId, ConversationId, check_id
from pawl.chassis.labels import check_labels
from pawl.chassis.rpc.kinds import Context
from pawl.errors import InvalidField, Unavailable
from pawl.event.v1 import message_pb2, run_pb2
from pawl.job_store.conversations import exporting
from pawl.job_store.conversations.store.exports import PostgresExports
from pawl.job_store.erasure.erasing import Erasing
from pawl.job_store.erasure.rules import ErasureKey
from pawl.job_store.ledger.ledger import Ledger
from pawl.job_store.ledger.pages import Id, Large, make_token, next_token, page_size, read_token
from pawl.job_store.ledger.reading import ConversationFilter
from pawl.job_store.ledger.rpc import messages
from pawl.job_store.ledger.rpc.fields import enum_member, fingerprint
from pawl.job_store.ledger.rpc.operations import CANCEL
from pawl.job_store.ledger.rules.conversations import UpdateConversation, check_title, key_hash
from pawl.job_store.ledger.rules.forks import ForkConversation
from pawl.job_store.ledger.rules.rows import ClientKey
from pawl.job_store.ledger.rules.search import query_words
from pawl.job_store.ledger.rules.states import Sharing

# The largest possible message number.
NUMBER_MAX: Final = 2**63 - 1


class ConversationServicer:
    """Implements the conversation methods. agent-loop calls them on behalf of a user.

    Without `erasing` or `exports`, conversations cannot be erased or exported.
    """

    def __init__(self, ledger: Ledger, erasing: Erasing | None = None, exports: PostgresExports | None = None) -> None:
        self._ledger = ledger
        self._erasing = erasing
        self._exports = exports

    async def GetConversation(self, request: pb.GetConversationRequest, context: Context) -> pb.GetConversationResponse:
        user = require_user()
        if bool(request.conversation_id) == bool(request.conversation_key):
            raise InvalidField("set either conversation_id or conversation_key", field="conversation_id")
        if request.conversation_key:
            hashed = key_hash(user.store_id, user.user_id, request.conversation_key)
            row = await self._ledger.conversations.by_key(ClientKey(user.store_id, user.user_id, hashed))
        else:
            conversation_id = check_id(request.conversation_id, "conversation_id")
            row = await self._ledger.conversations.by_id(user.store_id, user.user_id, conversation_id)
        return pb.GetConversationResponse(conversation=messages.conversation_for(row, user.user_id))

    async def ListConversations(
        self, request: pb.ListConversationsRequest, context: Context
    ) -> pb.ListConversationsResponse:
        user, wanted = require_user(), _wanted(request)
        selection = (user.store_id, user.user_id, wanted.archived, wanted.words, wanted.labels, wanted.shared)
        page = await self._ledger.conversations.listed(
            user.store_id,
            user.user_id,
            wanted,
            before=read_token(request.page_token, "ListConversations", selection, tuple[datetime, Id]),
            rows_max=page_size(request.page_size),
        )
        token = next_token("ListConversations", selection, page, lambda row: (row.update_time, row.conversation_id))
        shown = (messages.conversation_for(row, user.user_id) for row in page.rows)
        return pb.ListConversationsResponse(conversations=shown, next_page_token=token)

    async def UpdateConversation(
        self, request: pb.UpdateConversationRequest, context: Context
    ) -> pb.UpdateConversationResponse:
        changed = await self._ledger.update_conversation(_update(request), size_bytes=request.ByteSize())
        return pb.UpdateConversationResponse(conversation=messages.CONVERSATION.write(changed))

    async def ForkConversation(
        self, request: pb.ForkConversationRequest, context: Context
    ) -> pb.ForkConversationResponse:
        made = await self._ledger.forks.fork(_fork(request), size_bytes=request.ByteSize())
        return pb.ForkConversationResponse(conversation=messages.CONVERSATION.write(made))

    async def ExportConversation(
        self, request: pb.ExportConversationRequest, context: Context
    ) -> pb.ExportConversationResponse:
        if self._exports is None:
            raise Unavailable
        user, conversation_id = require_user(), check_id(request.conversation_id, "conversation_id")
        selection = (user.store_id, user.user_id, conversation_id)
        after = (read_token(request.page_token, "ExportConversation", selection, tuple[Large]) or (0,))[0]
        read = partial(self._ledger.reads.messages, *selection, rows_max=page_size(request.page_size))
        page, response = await read(after=after), pb.ExportConversationResponse()
        if not after and page.rows and page.rows[0].number > 1:
            row = await self._exports.summary(user.store_id, conversation_id)
            summary = messages.message_for(row, page.user_id, user.user_id) if row else message_pb2.Message()
            response.messages.append(exporting.summary(summary.text))
            page = await read(after=summary.summarised_to_number if summary.text else 0)
        shown = [messages.message_for(row, page.user_id, user.user_id) for row in page.rows]
        requested = [CallId(call_id) for message in shown for call_id in message.call_ids]
        found = await self._exports.calls(user.store_id, user.user_id, requested)
        calls = {str(row.call_id): messages.call_shown_to(row, user.user_id) for row in found.rows}
        last_number = exporting.put(response, shown, calls, cut_at=found.rows[-1].call_id if found.has_more else "")
        if page.has_more or (shown and last_number < shown[-1].number):
            response.next_page_token = make_token("ExportConversation", selection, (last_number,))
        return response

    async def EraseConversation(
        self, request: pb.EraseConversationRequest, context: Context
    ) -> pb.EraseConversationResponse:
        if self._erasing is None:
            raise Unavailable
        user, conversation_id = require_user(), check_id(request.conversation_id, "conversation_id")
        key = ErasureKey(store_id=user.store_id, user_id=user.user_id, conversation_id=ConversationId(conversation_id))
        rows_max = page_size(request.page_size)
        selection = (key.store_id, key.user_id, key.conversation_id)
        after = read_token(request.page_token, "EraseConversation", selection, tuple[Id, Id]) or ("", "")
        receipt = await self._erasing.erase(key)
        page = await self._erasing.erasures.left(key, after=after, rows_max=rows_max)
        token = next_token("EraseConversation", selection, page, lambda call: (call.run_id, call.call_id))
        return pb.EraseConversationResponse(erasure=receipt, left_calls=page.rows, next_page_token=token)


def _wanted(request: pb.ListConversationsRequest) -> ConversationFilter:
    labels = tuple(sorted(check_labels(request.labels).items()))
    if request.shared and labels:
        raise InvalidField("labels apply only to your own conversations: omit them if shared is set", field="labels")
    archived = request.archived if request.HasField("archived") else None
    return ConversationFilter(archived=archived, words=query_words(request.query), labels=labels, shared=request.shared)


def _update(request: pb.UpdateConversationRequest) -> UpdateConversation:
    has, user = request.HasField, require_user()
    update = UpdateConversation(
        store_id=user.store_id,
        user_id=user.user_id,
        request_id=check_id(request.request_id, "request_id", optional=True),
        fingerprint=fingerprint(request, without=("request_id",)),
        conversation_id=check_id(request.conversation_id, "conversation_id"),
        title=check_title(request.title) if has("title") else None,
        archived=request.archived if has("archived") else None,
        labels=check_labels(request.labels.labels) if has("labels") else None,
        sharing=enum_member(Sharing, request.sharing, "sharing") if request.sharing else None,
        shows_arguments=request.shows_arguments if has("shows_arguments") else None,
        cancel=CANCEL,
        is_undo=lambda options: run_pb2.Run.FromString(options).HasField("undo"),
    )
    if not update.changes:
        raise InvalidField("set at least one of title, labels, archived, sharing or shows_arguments", field="title")
    return update


def _fork(request: pb.ForkConversationRequest) -> ForkConversation:
    if request.number > NUMBER_MAX:
        raise InvalidField(f"number must be at most {NUMBER_MAX}, got {request.number}", field="number")
    user = require_user()
    return ForkConversation(
        store_id=user.store_id,
        user_id=user.user_id,
        request_id=check_id(request.request_id, "request_id", optional=True),
        fingerprint=fingerprint(request, without=("request_id",)),
        conversation_id=check_id(request.conversation_id, "conversation_id"),
        number=request.number,
    )
