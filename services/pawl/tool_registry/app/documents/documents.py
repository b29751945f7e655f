"""Keeping documents: who may, and what is found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pawl.chassis.auth import Principal
from pawl.chassis.ids import StoreId, UserId
from pawl.chassis.roles import Role
from pawl.errors import DocumentNotFound, PermissionDenied
from pawl.tool_registry.domain.document import STORE_OWNER, Document, Hit, check_document, check_name


class DocumentRepository(Protocol):
    """Documents of stores and their users, durable. An owner is a user, or STORE_OWNER."""

    async def put(
        self, store_id: StoreId, owner_id: UserId, name: str, text: str, language: str
    ) -> tuple[Document, bool]:
        """Write a document, new or in place of another; returns it, and whether it is new. Atomic, idempotent.

        Raises:
            TooLarge: the store has too many documents, or too large ones.
        """

    async def delete(self, store_id: StoreId, owner_id: UserId, name: str) -> bool:
        """Remove a document; returns whether there was one."""

    async def find(self, store_id: StoreId, user_id: UserId, name: str) -> Sequence[Document]:
        """Return the documents of that name that a user sees, the store's first."""

    async def text(self, store_id: StoreId, owner_id: UserId, name: str) -> str | None:
        """Return the text of a document; None if there is none."""

    async def after(
        self, store_id: StoreId, user_id: UserId, name: str, owner_id: UserId | None, most: int
    ) -> Sequence[Document]:
        """Return documents that a user sees, by name and owner, after those; from all on with a name but no owner."""

    async def search(self, store_id: StoreId, user_id: UserId, query: str, most: int) -> Sequence[Hit]:
        """Return the documents that a user sees and that match, the best first.

        The query is in the form of search engines: words, "phrases", or, -without.
        """


class Documents:
    """The use cases of users with documents; the tools only read them, through the repository."""

    def __init__(self, repository: DocumentRepository) -> None:
        self._repository = repository

    async def put(
        self, caller: Principal, *, shared: bool, name: str, text: str, language: str
    ) -> tuple[Document, bool]:
        """Write a document, idempotently; returns it, and whether it is new.

        Raises:
            InvalidField, TooLarge: it cannot be kept.
            PermissionDenied: it would be the store's, and the caller is no admin.
        """
        owner_id = _changed_owner(caller, shared=shared)
        check_document(name, text, language)
        return await self._repository.put(caller.store_id, owner_id, name, text, language)

    async def delete(self, caller: Principal, *, shared: bool, name: str) -> None:
        """Remove a document.

        Raises:
            DocumentNotFound: there is none of that name and owner.
            InvalidField: no document can have that name.
            PermissionDenied: it is the store's, and the caller is no admin.
        """
        owner_id = _changed_owner(caller, shared=shared)
        check_name(name)
        if not await self._repository.delete(caller.store_id, owner_id, name):
            raise DocumentNotFound

    async def get(self, caller: Principal, *, shared: bool, name: str) -> tuple[Document, str]:
        """Return a document with its text.

        Raises:
            DocumentNotFound: there is none of that name and owner.
            InvalidField: no document can have that name.
        """
        return await self.read(caller.store_id, caller.user_id, shared=shared, name=name)

    async def read(self, store_id: StoreId, user_id: UserId, *, shared: bool, name: str) -> tuple[Document, str]:
        """Return a document that a user sees with its text; raises as `get`."""
        check_name(name)
        for document in await self._repository.find(store_id, user_id, name):
            if document.is_shared is shared:
                text = await self._repository.text(store_id, document.owner_id, name)
                if text is not None:
                    return document, text
        raise DocumentNotFound

    async def page(
        self, caller: Principal, *, after_name: str, after_owner: UserId | None, most: int
    ) -> Sequence[Document]:
        """Return documents that the caller sees, by name, the store's first."""
        return await self._repository.after(caller.store_id, caller.user_id, after_name, after_owner, most)


def _changed_owner(caller: Principal, *, shared: bool) -> UserId:
    if not shared:
        return caller.user_id
    if Role.ADMIN not in caller.roles:
        raise PermissionDenied(f"changing documents of the store needs the role {Role.ADMIN}")
    return STORE_OWNER
