"""Converts user messages when they are added to a conversation."""

from __future__ import annotations

from collections.abc import Sequence

from pawl.event.v1 import message_pb2
from pawl.job.v1 import ledger_pb2


def body(request: ledger_pb2.SubmitMessageRequest | ledger_pb2.Delegation) -> bytes:
    said = message_pb2.Message(role=message_pb2.ROLE_USER, text=text_of(request), parts=_parts_of(request))
    return said.SerializeToString()


def _parts_of(request: ledger_pb2.SubmitMessageRequest | ledger_pb2.Delegation) -> Sequence[message_pb2.Part]:
    return request.parts if isinstance(request, ledger_pb2.SubmitMessageRequest) else ()


def text_of(request: ledger_pb2.SubmitMessageRequest | ledger_pb2.Delegation) -> str:
    return request.text or "\n\n".join(part.text for part in _parts_of(request) if part.HasField("text"))


def without_documents(request: ledger_pb2.SubmitMessageRequest) -> ledger_pb2.SubmitMessageRequest:
    """Return a message without the texts of its documents, which may differ when the request is repeated."""
    if not any(part.HasField("file") for part in request.parts):
        return request
    copy = ledger_pb2.SubmitMessageRequest()
    copy.CopyFrom(request)
    for part in copy.parts:
        for field in ("text", "size_bytes", "sha256") if part.HasField("file") else ():
            part.file.ClearField(field)
    return copy
