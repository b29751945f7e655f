"""pawl.tool.v1.DocumentService: documents; store and user come from the credential."""

from __future__ import annotations

from typing import Final

from pawl.chassis.auth import require_user
from pawl.chassis.rpc_kinds import Context
from pawl.chassis.translate import Exceptions
from pawl.errors import InvalidField, InvalidPageToken
from pawl.tool.v1 import document_pb2 as pb
from pawl.tool.v1 import document_pb2_grpc
from pawl.tool_registry.app.documents.documents import Documents
from pawl.tool_registry.domain.document import PLAIN_LANGUAGE, STORE_OWNER, Document
from pawl.tool_registry.rpc.convert import WIRE
from pawl.tool_registry.rpc.pages import cut, page_size, page_token, place_of

_DOCUMENT: Final = WIRE.struct(
    Document,
    pb.Document,
    Exceptions(
        write={"owner": lambda document: f"DOCUMENT_OWNER_{'STORE' if document.is_shared else 'USER'}"},
        of_struct=("owner_id",),
    ),
)


class DocumentServicer(document_pb2_grpc.DocumentServiceServicer):
    """Translates between the wire and the documents."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents

    async def PutDocument(self, request: pb.PutDocumentRequest, context: Context) -> pb.PutDocumentResponse:
        document, created = await self._documents.put(
            require_user(),
            shared=_is_shared(request.owner),
            name=request.name,
            text=request.text,
            language=request.language or PLAIN_LANGUAGE,
        )
        return pb.PutDocumentResponse(document=_DOCUMENT.fields(document), created=created)

    async def DeleteDocument(self, request: pb.DeleteDocumentRequest, context: Context) -> pb.DeleteDocumentResponse:
        await self._documents.delete(require_user(), shared=_is_shared(request.owner), name=request.name)
        return pb.DeleteDocumentResponse()

    async def ListDocuments(self, request: pb.ListDocumentsRequest, context: Context) -> pb.ListDocumentsResponse:
        size = page_size(request.page_size)
        caller = require_user()
        shared, name = _place(request.page_token)
        after_owner = None if shared is None else STORE_OWNER if shared else caller.user_id
        found = await self._documents.page(caller, after_name=name, after_owner=after_owner, most=size + 1)
        page, token = cut(found, size, _token)
        return pb.ListDocumentsResponse(documents=map(_DOCUMENT.fields, page), next_page_token=token)

    async def GetDocument(self, request: pb.GetDocumentRequest, context: Context) -> pb.GetDocumentResponse:
        document, text = await self._documents.get(require_user(), shared=_is_shared(request.owner), name=request.name)
        return pb.GetDocumentResponse(document=_DOCUMENT.fields(document), text=text)


def _is_shared(owner: int) -> bool:
    if owner not in pb.DocumentOwner.values():
        raise InvalidField(f"owner: {owner} is not a value of it", field="owner")
    return owner == pb.DOCUMENT_OWNER_STORE


def _token(document: Document) -> str:
    return page_token("documents", f"{'store' if document.is_shared else 'user'}:{document.name}")


def _place(token: str) -> tuple[bool | None, str]:
    """Return whether the last document of the page before was the store's, and its name; None for the first page."""
    if not token:
        return None, ""
    owner, colon, name = place_of("documents", token).partition(":")
    if not colon or owner not in {"store", "user"} or "\0" in name:
        raise InvalidPageToken
    return owner == "store", name
