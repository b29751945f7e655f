"""Reading the rest of a result that was cut for the model."""

from __future__ import annotations

from typing import Annotated, Any, Final, Protocol

import msgspec

from services.tool_registry.sdk import Category, Effect, Tool, ToolContext, ToolError, tool

BYTES_MAX: Final = 40_000
_BYTES_DEFAULT: Final = 20_000
_CHARACTER_BYTES_MAX: Final = 4
_CONTINUES: Final = 0x80


class StoredResults(Protocol):
    """Where results of earlier calls are."""

    async def read(self, *, store_id: str, user_id: str, conversation_id: str, call_id: str) -> bytes | None:
        """Return the result of a call of that conversation, as JSON; None if there is none."""
        ...


def result_tools(results: StoredResults) -> list[Tool[..., Any]]:
    """Return read_result."""

    @tool(category=Category.SAFE, effect=Effect.READ_ONLY)
    async def read_result(
        context: ToolContext,
        call_id: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,64}$"), "the call, as the note on the cut says"],
        offset: Annotated[int, msgspec.Meta(ge=0), "bytes to skip, as the note on the cut says"] = 0,
        length: Annotated[int, msgspec.Meta(ge=1, le=BYTES_MAX), "bytes to read"] = _BYTES_DEFAULT,
    ) -> dict[str, Any]:
        """Read the rest of a tool result that was cut."""
        content = await results.read(
            store_id=context.store_id,
            user_id=context.user_id,
            conversation_id=context.conversation_id,
            call_id=call_id,
        )
        if content is None:
            raise ToolError(f"this conversation has no call {call_id!r} with a result")
        start, end = _boundary(content, offset), _boundary(content, offset + length)
        if end <= start:
            end = _boundary(content, start + _CHARACTER_BYTES_MAX)
        return {
            "call_id": call_id,
            "offset": start,
            "total_bytes": len(content),
            "text": content[start:end].decode(),
            "next_offset": end if end < len(content) else None,
        }

    return [read_result]


def _boundary(content: bytes, position: int) -> int:
    """Return the start of the character that a position is in, so that none is torn."""
    position = min(position, len(content))
    while position < len(content) and content[position] & 0xC0 == _CONTINUES:
        position -= 1
    return position
