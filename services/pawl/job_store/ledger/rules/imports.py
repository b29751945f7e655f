"""Imports histories from elsewhere as conversations.

All messages and calls of an imported conversation belong to one ended placeholder run, which is marked as imported.
Lists omit this run, and it has no events, worker or budget.
"""

from __future__ import annotations

from pawl.chassis.ids import CallKey, ConversationId, RunId
from pawl.errors import ConversationExists, InvalidField, StorageFull
from pawl.job_store.ledger.rules import calls
from pawl.job_store.ledger.rules.calls import CallChange
from pawl.job_store.ledger.rules.commit import NewMessage
from pawl.job_store.ledger.rules.conversations import ConversationRequest
from pawl.job_store.ledger.rules.rows import ClientKey, ConversationRow, MessageRow, RunRow
from pawl.job_store.ledger.rules.unit_of_work import RowKeys, UnitOfWork
from pawl.values import RunState


class ImportConversation(ConversationRequest, frozen=True, kw_only=True):
    """Create a conversation from messages and settled calls, in order. For the key and the titles, see `Submit`."""

    messages: tuple[NewMessage, ...]
    calls: tuple[CallChange, ...]
    key_hash: bytes = b""
    title: str = ""
    made_title: str = ""
    is_full: bool = False

    @property
    def row_keys(self) -> RowKeys:
        return RowKeys(
            requests=self.request_keys,
            keyed=(self._client_key,) if self.key_hash else (),
            calls=tuple(CallKey(self.store_id, change.call_id) for change in self.calls),
        )

    @property
    def _client_key(self) -> ClientKey:
        return ClientKey(self.store_id, self.user_id, self.key_hash)

    def apply(self, unit: UnitOfWork) -> ConversationRow:
        """Create the conversation and return it.

        A repeated request returns the same conversation.

        Raises:
            RequestIdReused: The request id was used with a different payload.
            ConversationExists: A conversation with this key already exists.
            StorageFull: The store has reached its limit of stored bytes.
            InvalidField: A call already exists, is not settled, or has no result.
        """
        earlier = self.earlier(unit)
        if earlier is not None:
            return self.found(unit, earlier.conversation_id)
        keyed = unit.conversation_with(self._client_key) if self.key_hash else None
        if keyed is not None:
            raise ConversationExists(conversation_id=keyed.conversation_id)
        if self.is_full:
            raise StorageFull
        conversation = unit.put_conversation(
            ConversationRow(
                store_id=self.store_id,
                conversation_id=ConversationId(unit.ids.new("conv")),
                user_id=self.user_id,
                last_number=len(self.messages),
                create_time=unit.now,
                update_time=unit.now,
                key_hash=self.key_hash or None,
                made_title=self.made_title,
                title=self.title,
            )
        )
        self._fill(unit, conversation)
        self.remember(unit, conversation.conversation_id)
        return conversation

    def _fill(self, unit: UnitOfWork, conversation: ConversationRow) -> None:
        run = unit.put_run(
            RunRow(
                store_id=self.store_id,
                run_id=RunId(unit.ids.new("run")),
                conversation_id=conversation.conversation_id,
                user_id=self.user_id,
                state=RunState.COMPLETED,
                round=max((change.round for change in self.calls), default=0),
                token_budget=0,
                token_ceiling=0,
                queued_message=None,
                options=b"",
                create_time=unit.now,
                end_time=unit.now,
                update_time=unit.now,
                state_time=unit.now,
                imported=True,
            )
        )
        unit.messages.add(
            MessageRow(
                store_id=self.store_id,
                conversation_id=conversation.conversation_id,
                number=number,
                message_id=unit.ids.new("msg"),
                run_id=run.run_id,
                summarised_to=0,
                body=message.body,
                create_time=unit.now,
            )
            for number, message in enumerate(self.messages, 1)
        )
        for change in self.calls:
            call = calls.imported(run, change, now=unit.now)
            if unit.calls.get(call.key) is not None:
                raise InvalidField(f"call {change.call_id} already exists", field="calls.call_id")
            unit.put_call(call)
