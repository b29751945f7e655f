"""Requests about conversations as operations and filters of ours."""

from __future__ import annotations

from typing import Final

from pawl.chassis.ids import check_id
from pawl.chassis.labels import check_labels
from pawl.errors import InvalidField
from pawl.event.v1 import run_pb2
from pawl.job.v1 import ledger_pb2
from pawl.job_store.app.forks import AskedFork
from pawl.job_store.app.reading import ConversationFilter
from pawl.job_store.domain.conversations import UpdateConversation, made_title
from pawl.job_store.domain.imports import ImportConversation
from pawl.job_store.domain.rows import ClientKey
from pawl.job_store.domain.search import query_words
from pawl.job_store.domain.states import Sharing
from pawl.job_store.rpc.operations import CANCEL, call_change, enum_member, fingerprint, key_hash_of, new_message

NUMBER_MAX: Final = 2**63 - 1
"""The largest number that a message can have."""


def update(request: ledger_pb2.UpdateConversationRequest) -> UpdateConversation:
    """Return the operation of an UpdateConversation."""
    has = request.HasField
    _check_title(request.title)
    return UpdateConversation(
        store_id=check_id(request.store_id, "store_id"),
        user_id=check_id(request.user_id, "user_id"),
        request_id=check_id(request.request_id, "request_id", optional=True),
        fingerprint=fingerprint(request, without=("request_id",)),
        conversation_id=check_id(request.conversation_id, "conversation_id"),
        title=request.title if has("title") else None,
        archived=request.archived if has("archived") else None,
        labels=check_labels(request.labels.labels) if has("labels") else None,
        sharing=enum_member(Sharing, request.sharing, "sharing") if request.sharing else None,
        shows_arguments=request.shows_arguments if has("shows_arguments") else None,
        cancel=CANCEL,
        is_undo=lambda options: run_pb2.Run.FromString(options).HasField("undo"),
    )


def fork(request: ledger_pb2.ForkConversationRequest) -> AskedFork:
    """Return the fork that a ForkConversation asks for."""
    if request.number > NUMBER_MAX:
        raise InvalidField("number is too large", field="number")
    return AskedFork(
        store_id=check_id(request.store_id, "store_id"),
        user_id=check_id(request.user_id, "user_id"),
        request_id=check_id(request.request_id, "request_id", optional=True),
        fingerprint=fingerprint(request, without=("request_id",)),
        conversation_id=check_id(request.conversation_id, "conversation_id"),
        number=request.number,
    )


def import_(request: ledger_pb2.ImportConversationRequest) -> ImportConversation:
    """Return the operation of an ImportConversation. Takes the request apart: it is of no use afterwards."""
    if not request.messages:
        raise InvalidField("a history has messages", field="messages")
    told = ledger_pb2.ImportConversationRequest()
    told.CopyFrom(request)
    told.ClearField("request_id")
    for message in told.messages:
        message.ClearField("call_ids")
    for call in told.calls:
        call.ClearField("call_id")
    return ImportConversation(
        store_id=check_id(request.store_id, "store_id"),
        user_id=check_id(request.user_id, "user_id"),
        request_id=check_id(request.request_id, "request_id", optional=True),
        fingerprint=fingerprint(told),
        key_hash=key_hash_of(request),
        title=_check_title(request.title),
        made_title=made_title(request.messages[0].text),
        messages=tuple(map(new_message, request.messages)),
        calls=tuple(map(call_change, request.calls)),
    )


def client_key(request: ledger_pb2.GetConversationRequest) -> ClientKey | None:
    """Return the key by which a conversation is asked for; None if that is its id."""
    hashed = key_hash_of(request)
    store_id, user_id = check_id(request.store_id, "store_id"), check_id(request.user_id, "user_id")
    return ClientKey(store_id, user_id, hashed) if hashed else None


def wanted(request: ledger_pb2.ListConversationsRequest) -> ConversationFilter:
    """Return which conversations a ListConversations asks for."""
    archived = request.archived if request.HasField("archived") else None
    labels = tuple(sorted(check_labels(request.labels).items()))
    return ConversationFilter(archived=archived, words=query_words(request.query), labels=labels, shared=request.shared)


def _check_title(title: str) -> str:
    if "\0" in title:
        raise InvalidField("a title has no NUL", field="title")
    return title
