"""The conversations of a user: found, called something, put out of the way, forked, imported."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from pawl.agent_loop.adapters.public_ledger import PublicLedger
from pawl.agent_loop.app.public_values import ErasureView, Page, PageAsked
from pawl.agent_loop.domain import checks, imports
from pawl.agent_loop.domain.imports import HistoryMessage
from pawl.chassis.auth import Principal
from pawl.chassis.ids import CallId, ConversationId, IdSource, RequestId
from pawl.chassis.labels import check_labels
from pawl.errors import InvalidField


class Conversations:
    """Checks what users ask about their conversations and asks the ledger. Documents are as the contract has them."""

    def __init__(self, ledger: PublicLedger, ids: IdSource) -> None:
        self._ledger = ledger
        self._ids = ids

    async def get(self, caller: Principal, conversation_id: ConversationId, conversation_key: str) -> object:
        """Return a conversation, by exactly one of id and key.

        Raises:
            ConversationNotFound, InvalidField, TooLarge
        """
        if bool(conversation_id) == bool(conversation_key):
            raise InvalidField("give the conversation's id or its key", field="conversation_id")
        key = checks.conversation_key(conversation_key)
        return await self._ledger.get_conversation(caller, conversation_id, conversation_key=key)

    async def list(
        self,
        caller: Principal,
        page: PageAsked,
        *,
        archived: bool | None,
        query: str,
        labels: Mapping[str, str],
        shared: bool = False,
    ) -> Page[object]:
        """Return conversations, with `shared` those that others share; those first in which something happened last.

        Raises:
            InvalidPageToken
            InvalidField, TooLarge: there is nothing in the query that could be looked for, or a label cannot be one.
        """
        words = checks.text(query, "query", bytes_max=checks.QUERY_BYTES_MAX, may_be_empty=True)
        if shared and labels:
            raise InvalidField("labels are of your own conversations: leave them out with shared", field="labels")
        return await self._ledger.list_conversations(
            caller, page, archived=archived, query=words, labels=check_labels(labels), shared=shared
        )

    async def erase(self, caller: Principal, conversation_id: ConversationId, page: PageAsked) -> ErasureView:
        """Erase a conversation, whole and for good; return how far that is. Idempotent.

        Raises:
            ConversationNotFound, InvalidPageToken
        """
        return await self._ledger.erase_conversation(caller, conversation_id, page)

    async def update(
        self,
        caller: Principal,
        request_id: RequestId,
        conversation_id: ConversationId,
        *,
        title: str | None,
        archived: bool | None,
        labels: Mapping[str, str] | None,
        sharing: int = 0,
        shows_arguments: bool | None = None,
    ) -> object:
        """Change what is given of a conversation; return it. `sharing` is a number of the contract, 0 for as it is.

        Raises:
            ConversationNotFound, RequestIdReused
            InvalidField: nothing is given, or the title or a label cannot be one.
        """
        if title is None and archived is None and labels is None and not sharing and shows_arguments is None:
            raise InvalidField("give a title or labels, or say whether it is archived or shared", field="title")
        called = None if title is None else checks.title(title)
        labelled = None if labels is None else check_labels(labels)
        return await self._ledger.update_conversation(
            caller,
            request_id,
            conversation_id,
            title=called,
            archived=archived,
            labels=labelled,
            sharing=sharing,
            shows_arguments=shows_arguments,
        )

    async def fork(
        self, caller: Principal, request_id: RequestId, conversation_id: ConversationId, *, number: int
    ) -> object:
        """Make a conversation whose past is that of another one up to a message; return it.

        Raises:
            ConversationNotFound, ForkPointOpen, PastTooLong, RequestIdReused
        """
        return await self._ledger.fork_conversation(caller, request_id, conversation_id, number=number)

    async def import_history(
        self,
        caller: Principal,
        request_id: RequestId,
        history: Sequence[HistoryMessage],
        *,
        title: str,
        conversation_key: str,
    ) -> object:
        """Make a conversation of a history that was made elsewhere; return it.

        Raises:
            InvalidHistory: a strict model server would refuse it.
            ConversationExists, RequestIdReused, InvalidField, TooLarge
        """
        called, key = checks.title(title), checks.conversation_key(conversation_key)
        # Not on the event loop: there may be much JSON in it.
        await asyncio.to_thread(imports.check, history)
        ids = iter([CallId(self._ids.new("call")) for message in history for _ in message.calls])
        messages, calls = await asyncio.to_thread(imports.taken_over, history, lambda: next(ids))
        return await self._ledger.import_conversation(
            caller, request_id, messages, calls, title=called, conversation_key=key
        )
