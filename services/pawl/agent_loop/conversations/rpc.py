"""Implements imports and streams of pawl.agent.v1.ConversationService. Its other methods are forwarded to job-store."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from itertools import islice

from pawl.agent.v1 import conversation_pb2 as pb
from pawl.agent_loop.api import convert
from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.api.rpc import write
from pawl.agent_loop.conversations import rules as imports
from pawl.agent_loop.conversations.watch import ConversationWatches
from pawl.chassis.identity.auth import require_user
from pawl.chassis.ids import CallId, IdSource
from pawl.chassis.rpc.kinds import Context


class ConversationServicer:
    """Implements ImportConversation and WatchConversation. The credential determines store and user."""

    def __init__(self, ledger: PublicLedger, ids: IdSource, watches: ConversationWatches) -> None:
        self._ledger = ledger
        self._ids = ids
        self._watches = watches

    async def WatchConversation(self, request: pb.WatchConversationRequest, context: Context) -> None:
        async with aclosing(self._watches.watch(require_user(), request)) as responses:
            async for response in responses:
                await write(context, response)
                del response

    async def ImportConversation(
        self, request: pb.ImportConversationRequest, context: Context
    ) -> pb.ImportConversationResponse:
        caller, request_id = require_user(), convert.request_id(request)
        history = tuple(map(convert.history_message, islice(request.messages, imports.MESSAGES_MAX + 1)))
        # Use a thread, because there may be a lot of JSON to parse.
        await asyncio.to_thread(imports.check, history)
        ids = iter([CallId(self._ids.new("call")) for message in history for _ in message.calls])
        messages, calls = await asyncio.to_thread(imports.convert_history, history, lambda: next(ids))
        made = await self._ledger.import_conversation(
            caller, request_id, messages, calls, title=request.title, conversation_key=request.conversation_key
        )
        return pb.ImportConversationResponse(conversation=made)
