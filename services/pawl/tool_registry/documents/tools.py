"""Tools that list, read and search a store's documents and its users' documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

from pawl.chassis.ids import StoreId, UserId
from pawl.tool_registry.documents.rules import NAME_CHARACTERS_MAX, Document, Hit
from pawl.tool_registry.documents.store import PostgresDocumentRepository
from pawl.tool_registry.rules.slices import BYTES_DEFAULT, BYTES_MAX, slice_of
from pawl.tools.rules.schema import did_you_mean
from pawl.tools.sdk.context import ToolContext, ToolError
from pawl.tools.sdk.tool import Tool, tool
from pawl.values import Category, EffectClass

LISTED_MAX: Final = 200
HITS_MAX: Final = 20
_HITS_DEFAULT: Final = 5
_NEAR_AMONG: Final = 500
_OPERATORS: Final = frozenset('"-')

Name = Annotated[
    str, msgspec.Meta(min_length=1, max_length=NAME_CHARACTERS_MAX), "the document's name, from list_documents"
]


def document_tools(repository: PostgresDocumentRepository) -> list[Tool[..., Any]]:

    @tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
    async def list_documents(
        context: ToolContext,
        start: Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX), "list from this name on"] = "",
    ) -> dict[str, Any]:
        """List the documents that the user can see, by name."""
        found = await repository.after(StoreId(context.store_id), UserId(context.user_id), start, None, LISTED_MAX + 2)
        # The user and the store may have documents with the same name; return both on one page.
        end = LISTED_MAX + (len(found) > LISTED_MAX and found[LISTED_MAX].name == found[LISTED_MAX - 1].name)
        listed = {"documents": [_shown(document) for document in found[:end]]}
        return listed | ({"next_start": found[end].name} if len(found) > end else {})

    @tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
    async def read_document(
        context: ToolContext,
        name: Name,
        offset: Annotated[int, msgspec.Meta(ge=0), "bytes to skip"] = 0,
        length: Annotated[int, msgspec.Meta(ge=1, le=BYTES_MAX), "bytes to read"] = BYTES_DEFAULT,
        *,
        shared: Annotated[
            bool | None, "true for the store's document, false for the user's own; needed if both exist"
        ] = None,
    ) -> dict[str, Any]:
        """Read a document, or a piece of it."""
        document, text = await read_one(repository, context, name, shared=shared)
        return {"name": name, "shared": document.is_shared} | slice_of(text.encode(), offset, length)

    @tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
    async def search_documents(
        context: ToolContext,
        query: Annotated[
            str,
            msgspec.Meta(min_length=1, max_length=500),
            'words, "a phrase", alternatives with or, and exclusions with -',
        ],
        most: Annotated[int, msgspec.Meta(ge=1, le=HITS_MAX), "documents to return"] = _HITS_DEFAULT,
    ) -> dict[str, Any]:
        """Search the texts of the documents, the best matches first.

        Each match has an offset for read_document.
        """
        hits = await repository.search(StoreId(context.store_id), UserId(context.user_id), query, most)
        words = query.split()
        if hits or len(words) == 1 or _OPERATORS & set(query):
            return {"matches": [_match(hit) for hit in hits]}
        some: Sequence[Hit] = await repository.search(
            StoreId(context.store_id), UserId(context.user_id), " or ".join(words), most
        )
        note = {"note": "no document contains all of the words; these contain some of them"} if some else {}
        return {"matches": [_match(hit) for hit in some]} | note

    return [list_documents, read_document, search_documents]


async def read_one(
    repository: PostgresDocumentRepository, context: ToolContext, name: str, *, shared: bool | None
) -> tuple[Document, str]:
    """Return a document that the call's user can see, with its text. For `shared`, see `read_document`.

    Raises:
        ToolError: There is no such document, or both the store and the user have one.
    """
    store_id, user_id = StoreId(context.store_id), UserId(context.user_id)
    found = await repository.find(store_id, user_id, name)
    found = [document for document in found if shared is None or document.is_shared is shared]
    if len(found) > 1:
        raise ToolError(f"the store and the user both have a document {name!r}: set shared to true or false")
    text = await repository.text(store_id, found[0].owner_id, name) if found else None
    if text is None:
        known = await repository.after(store_id, user_id, "", None, _NEAR_AMONG)
        near = did_you_mean(name, [document.name for document in known])
        raise ToolError(f"there is no document {name!r}{near}")
    return found[0], text


def _shown(document: Document) -> dict[str, Any]:
    return {"name": document.name, "shared": document.is_shared, "bytes": document.text_bytes}


def _match(hit: Hit) -> dict[str, Any]:
    return _shown(hit.document) | {"offset": hit.offset, "snippets": list(hit.snippets)}
