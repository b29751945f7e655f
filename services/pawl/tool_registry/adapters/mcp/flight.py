"""A call of an MCP server that is under way, and what the server asks its user meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

import mcp
import mcp.types

from pawl.tool_registry.adapters.mcp.elicitation import Asked

_ASKING_MAX: Final = 20

OnQuestion: TypeAlias = Callable[[Asked], Awaitable[mcp.types.ElicitResult]]
"""Returns the answer to a question of the server."""


class Flight:
    """A call's place on a connection, and what its server asks meanwhile."""

    def __init__(self, user_id: str, call_id: str) -> None:
        self.user_id = user_id
        self.call_id = call_id
        self.is_in_doubt = False
        """True if a question was declined that may have been this call's, or another's."""
        self._on_question: OnQuestion | None = None
        self._asking: set[asyncio.Task[mcp.types.ElicitResult]] = set()

    @property
    def is_sent(self) -> bool:
        """True if the server may have heard of the call."""
        return self._on_question is not None

    def send(self, on_question: OnQuestion) -> None:
        """Say that the server hears of the call now."""
        self._on_question = on_question

    async def ask(self, question: Asked) -> mcp.types.ElicitResult:
        """Return the answer, a cancel if the call ends before it comes, a decline if too many questions are open.

        A person who was asked stays asked, also when the server takes its question
        back, until the call ends.
        """
        if self._on_question is None or len(self._asking) >= _ASKING_MAX:
            return mcp.types.ElicitResult(action="decline")
        asking = asyncio.ensure_future(self._on_question(question))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        await asyncio.wait({asking})
        return mcp.types.ElicitResult(action="cancel") if asking.cancelled() else asking.result()

    def end(self) -> None:
        """Stop asking."""
        for asking in list(self._asking):
            asking.cancel()


async def open_pages(error: mcp.MCPError, ask: OnQuestion) -> None:
    """Return if an error asks for pages to be opened, and the user has done that; else raise it again."""
    if error.code != mcp.types.URL_ELICITATION_REQUIRED:
        raise error
    try:
        pages = mcp.UrlElicitationRequiredError.from_error(error.error).elicitations
    except (ValueError, TypeError, AttributeError):
        raise error from None
    for page in pages:
        if (await ask(page)).action != "accept":
            raise error
    if not pages:
        raise error
