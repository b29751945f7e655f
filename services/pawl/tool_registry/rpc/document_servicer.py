"""pawl.tool.v1.DocumentService: documents; store and user come from the credential."""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final

import grpc

from pawl.chassis.auth import require_user
from pawl.chassis.translate import Exceptions
from pawl.errors import InvalidField, InvalidPageToken
from pawl.tool.v1 import document_pb2, document_pb2_grpc
from pawl.tool_registry.app.documents.documents import DocumentCaller, Documents
from pawl.tool_registry.domain.document import PLAIN_LANGUAGE, Document
from pawl.tool_registry.rpc.convert import WIRE

PAGE_SIZE_DEFAULT: Final = 50
PAGE_SIZE_MAX: Final = 200

_PAGE_OF: Final = "documents:"

Context = grpc.aio.ServicerContext[Any, Any]

_DOCUMENT: Final = WIRE.struct(
    Document,
    document_pb2.Document,
    Exceptions(
        write={"owner": lambda document: f"DOCUMENT_OWNER_{'STORE' if document.is_shared else 'USER'}"},
        of_struct=("owner_id",),
    ),
)


class DocumentServicer(document_pb2_grpc.DocumentServiceServicer):
    """Translates between the wire and the documents."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents

    async def PutDocument(
        self, request: document_pb2.PutDocumentRequest, context: Context
    ) -> document_pb2.PutDocumentResponse:
        document, created = await self._documents.put(
            _caller(),
            shared=_is_shared(request.owner),
            name=request.name,
            text=request.text,
            language=request.language or PLAIN_LANGUAGE,
        )
        return document_pb2.PutDocumentResponse(document=_DOCUMENT.fields(document), created=created)

    async def DeleteDocument(
        self, request: document_pb2.DeleteDocumentRequest, context: Context
    ) -> document_pb2.DeleteDocumentResponse:
        await self._documents.delete(_caller(), shared=_is_shared(request.owner), name=request.name)
        return document_pb2.DeleteDocumentResponse()

    async def ListDocuments(
        self, request: document_pb2.ListDocumentsRequest, context: Context
    ) -> document_pb2.ListDocumentsResponse:
        if request.page_size > PAGE_SIZE_MAX:
            raise InvalidField(f"page_size: at most {PAGE_SIZE_MAX}", field="page_size")
        size = request.page_size or PAGE_SIZE_DEFAULT
        caller = _caller()
        shared, name = _place(request.page_token)
        after_owner = None if shared is None else "" if shared else caller.user_id
        found = await self._documents.page(caller, after_name=name, after_owner=after_owner, most=size + 1)
        page = found[:size]
        token = _token(page[-1]) if len(found) > size else ""
        return document_pb2.ListDocumentsResponse(documents=map(_DOCUMENT.fields, page), next_page_token=token)

    async def GetDocument(
        self, request: document_pb2.GetDocumentRequest, context: Context
    ) -> document_pb2.GetDocumentResponse:
        document, text = await self._documents.get(_caller(), shared=_is_shared(request.owner), name=request.name)
        return document_pb2.GetDocumentResponse(document=_DOCUMENT.fields(document), text=text)


def _caller() -> DocumentCaller:
    user = require_user()
    return DocumentCaller(store_id=user.store_id, user_id=user.user_id, roles=user.roles)


def _is_shared(owner: int) -> bool:
    if owner not in document_pb2.DocumentOwner.values():
        raise InvalidField(f"owner: {owner} is not a value of it", field="owner")
    return owner == document_pb2.DOCUMENT_OWNER_STORE


def _token(document: Document) -> str:
    owner = "store" if document.is_shared else "user"
    return base64.urlsafe_b64encode(f"{_PAGE_OF}{owner}:{document.name}".encode()).decode()


def _place(token: str) -> tuple[bool | None, str]:
    """Return whether the last document of the page before was the store's, and its name; None for the first page."""
    if not token:
        return None, ""
    try:
        text = base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError):
        raise InvalidPageToken from None
    owner, colon, name = text.removeprefix(_PAGE_OF).partition(":")
    if not text.startswith(_PAGE_OF) or not colon or owner not in {"store", "user"} or "\0" in name:
        raise InvalidPageToken
    return owner == "store", name
