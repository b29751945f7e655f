"""Implements pawl.tool.v1.DocumentService. The store and user come from the caller's credential."""

from __future__ import annotations

from typing import Final

from pawl.chassis.identity.auth import require_user
from pawl.chassis.identity.roles import Role
from pawl.chassis.ids import UserId
from pawl.chassis.rpc.kinds import Context
from pawl.chassis.rpc.translate import Exceptions
from pawl.errors import DocumentNotFound, InvalidField, PermissionDenied
from pawl.tool.v1 import document_pb2 as pb
from pawl.tool.v1 import document_pb2_grpc
from pawl.tool_registry.documents.rules import PLAIN_LANGUAGE, STORE_OWNER, Document, check_name
from pawl.tool_registry.documents.store import PostgresDocumentRepository
from pawl.tool_registry.pages import cut, page_size, page_token, position_of
from pawl.tools.wire import WIRE

_DOCUMENT: Final = WIRE.struct(
    Document,
    pb.Document,
    Exceptions(
        write={"owner": lambda document: f"DOCUMENT_OWNER_{'STORE' if document.is_shared else 'USER'}"},
        of_struct=("owner_id",),
    ),
)


class DocumentServicer(document_pb2_grpc.DocumentServiceServicer):
    def __init__(self, documents: PostgresDocumentRepository) -> None:
        self._documents = documents

    async def PutDocument(self, request: pb.PutDocumentRequest, context: Context) -> pb.PutDocumentResponse:
        owner_id, language = _changed_owner(request.owner), request.language or PLAIN_LANGUAGE
        document, created = await self._documents.put(
            require_user().store_id, owner_id, request.name, request.text, language
        )
        return pb.PutDocumentResponse(document=_DOCUMENT.fields(document), created=created)

    async def DeleteDocument(self, request: pb.DeleteDocumentRequest, context: Context) -> pb.DeleteDocumentResponse:
        owner_id = _changed_owner(request.owner)
        check_name(request.name)
        if not await self._documents.delete(require_user().store_id, owner_id, request.name):
            raise DocumentNotFound
        return pb.DeleteDocumentResponse()

    async def ListDocuments(self, request: pb.ListDocumentsRequest, context: Context) -> pb.ListDocumentsResponse:
        size = page_size(request.page_size)
        caller = require_user()
        shared, name = position_of("documents", request.page_token, tuple[bool, str]) or (None, "")
        after_owner = None if shared is None else STORE_OWNER if shared else caller.user_id
        found = await self._documents.after(caller.store_id, caller.user_id, name, after_owner, size + 1)
        page, token = cut(found, size, lambda last: page_token("documents", last.is_shared, last.name))
        return pb.ListDocumentsResponse(documents=map(_DOCUMENT.fields, page), next_page_token=token)

    async def GetDocument(self, request: pb.GetDocumentRequest, context: Context) -> pb.GetDocumentResponse:
        caller, shared = require_user(), _is_shared(request.owner)
        document, text = await self._documents.read(caller.store_id, caller.user_id, shared=shared, name=request.name)
        return pb.GetDocumentResponse(document=_DOCUMENT.fields(document), text=text)


def _is_shared(owner: int) -> bool:
    if owner not in pb.DocumentOwner.values():
        raise InvalidField(f"owner: {owner} is not a known value", field="owner")
    return owner == pb.DOCUMENT_OWNER_STORE


def _changed_owner(owner: int) -> UserId:
    """Return the owner of the document that the caller wants to change.

    Raises:
        PermissionDenied: The document belongs to the store and the caller is not an admin, or a service did not name a
            user.
    """
    caller = require_user()
    if not _is_shared(owner):
        if not caller.user_id:  # An empty user would be the store.
            raise PermissionDenied("a user's document requires the user in the metadata `pawl-user`")
        return caller.user_id
    if Role.ADMIN not in caller.roles:
        raise PermissionDenied(f"changing the store's documents requires the {Role.ADMIN} role")
    return STORE_OWNER
