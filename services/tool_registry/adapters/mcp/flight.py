"""A call of an MCP server that is under way, and what the server asks its user meanwhile."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

import mcp
import mcp.types

from services.tool_registry.adapters.mcp.elicitation import Asked

_ASKING_MAX: Final = 20


class OnQuestion(Protocol):
    """Answers a question; `is_certain` unless it may be that of another call."""

    async def __call__(self, question: Asked, *, is_certain: bool) -> mcp.types.ElicitResult:
        """Return the answer."""
        ...


class Flight:
    """A call under way, and what its server asks meanwhile."""

    def __init__(self, call_id: str, on_question: OnQuestion) -> None:
        self.call_id = call_id
        self.on_question = on_question
        self._asking: set[asyncio.Task[mcp.types.ElicitResult]] = set()

    async def ask(self, question: Asked) -> mcp.types.ElicitResult:
        """Return the answer, a cancel if the call ends before it comes, a decline if too many questions are open.

        A person who was asked stays asked, also when the server takes its question
        back, until the call ends.
        """
        if len(self._asking) >= _ASKING_MAX:
            return mcp.types.ElicitResult(action="decline")
        asking = asyncio.create_task(_answer(self.on_question, question), name="mcp.ask")
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        await asyncio.wait({asking})
        return mcp.types.ElicitResult(action="cancel") if asking.cancelled() else asking.result()

    def end(self) -> None:
        """Stop asking."""
        for asking in list(self._asking):
            asking.cancel()


async def _answer(on_question: OnQuestion, question: Asked) -> mcp.types.ElicitResult:
    return await on_question(question, is_certain=True)


async def open_pages(error: mcp.MCPError, on_question: OnQuestion) -> None:
    """Return if an error asks for pages to be opened, and the user has done that; else raise it again."""
    if error.code != mcp.types.URL_ELICITATION_REQUIRED:
        raise error
    try:
        pages = mcp.UrlElicitationRequiredError.from_error(error.error).elicitations
    except (ValueError, TypeError, AttributeError):
        raise error from None
    for page in pages:
        if (await on_question(page, is_certain=True)).action != "accept":
            raise error
    if not pages:
        raise error
