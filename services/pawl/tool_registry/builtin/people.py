"""The tool that lists the people in the store's address book.

The address book is one of the store's documents, which only admins can change.
"""

from __future__ import annotations

import asyncio
import csv
from typing import Annotated, Any, Final

import msgspec

from pawl.chassis.ids import StoreId, UserId
from pawl.errors import DocumentNotFound
from pawl.tool_registry.builtin.files.processing import separator_of
from pawl.tool_registry.documents.store import PostgresDocumentRepository
from pawl.tools.sdk.context import ToolContext, ToolError
from pawl.tools.sdk.tool import Tool, tool
from pawl.values import Category, EffectClass

ADDRESS_BOOK: Final = "people.csv"
LISTED_MAX: Final = 200

_COLUMNS_MAX: Final = 20
_LINE_LENGTH_MAX: Final = 10_000
_REQUIRED: Final = ("name", "email")


def people_tools(documents: PostgresDocumentRepository) -> list[Tool[..., Any]]:
    @tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
    async def list_people(
        context: ToolContext,
        query: Annotated[
            str,
            msgspec.Meta(max_length=200),
            "words that must all occur, like a name, role or team; empty for everyone",
        ] = "",
    ) -> dict[str, Any]:
        """List people with their e-mail addresses from the store's address book."""
        store_id, user_id = StoreId(context.store_id), UserId(context.user_id)
        try:
            _, text = await documents.read(store_id, user_id, shared=True, name=ADDRESS_BOOK)
        except DocumentNotFound:
            raise ToolError(
                f"the store has no address book: an admin can add it with `pawl documents add {ADDRESS_BOOK} --shared`"
            ) from None
        return await asyncio.to_thread(_matching, text, query.casefold().split())

    return [list_people]


def _matching(text: str, words: list[str]) -> dict[str, Any]:
    """Return the people in an address book who match all words. Empty columns are omitted.

    Raises:
        ToolError: The document has no header with the required columns, or a line is too long.
    """
    lines = text.removeprefix("\ufeff").splitlines() or [""]
    separator = separator_of(lines[0])
    if max(map(len, lines)) > _LINE_LENGTH_MAX:
        raise ToolError(f"the document {ADDRESS_BOOK} has a line with more than {_LINE_LENGTH_MAX} characters")
    # Parse each line separately, so that a missing quote affects only one person.
    columns, *rows = (next(csv.reader([line], delimiter=separator), []) for line in lines)
    columns = [column.strip().casefold() for column in columns]
    if not set(_REQUIRED) <= set(columns) or len(columns) > _COLUMNS_MAX:
        named = ", ".join(columns[:_COLUMNS_MAX])[:200] or "none"
        raise ToolError(
            f"the first line of the document {ADDRESS_BOOK} must name at most {_COLUMNS_MAX} columns, among them"
            f" {' and '.join(_REQUIRED)}, but has {named}"
        )
    written = [dict(zip(columns, map(str.strip, row), strict=False)) for row in rows if any(row)]
    people = [person for person in written if all(map(person.get, _REQUIRED))]
    found = [person for person in people if _has_all(person, words)]
    shown = [{column: value for column, value in person.items() if value} for person in found[:LISTED_MAX]]
    notes = [f"{len(found) - LISTED_MAX} more match: use more words in query"] if len(found) > LISTED_MAX else []
    if len(written) > len(people):
        notes.append(f"{len(written) - len(people)} lines have no name or email")
    return {"people": shown} | ({"note": "; ".join(notes)} if notes else {})


def _has_all(person: dict[str, str], words: list[str]) -> bool:
    text = " ".join(person.values()).casefold()
    return all(word in text for word in words)
