"""The tool that reads the rest of a result that was cut."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from pawl.chassis.ids import CallId, CallKey, ConversationId, RunId, StoreId, UserId
from pawl.tool_registry.ledger import LedgerReads
from pawl.tool_registry.rules.slices import BYTES_DEFAULT, BYTES_MAX, slice_of
from pawl.tools.sdk.context import ToolContext, ToolError
from pawl.tools.sdk.tool import Tool, tool
from pawl.values import Category, EffectClass


def result_tools(results: LedgerReads) -> list[Tool[..., Any]]:
    @tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
    async def read_result(
        context: ToolContext,
        call_id: Annotated[
            str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,64}$"), "the call id from the note in the cut result"
        ],
        offset: Annotated[int, msgspec.Meta(ge=0), "bytes to skip; see the note in the cut result"] = 0,
        length: Annotated[int, msgspec.Meta(ge=1, le=BYTES_MAX), "bytes to read"] = BYTES_DEFAULT,
    ) -> dict[str, Any]:
        """Read the rest of a tool result that was cut."""
        content = await results.read(
            CallKey(StoreId(context.store_id), CallId(call_id)),
            UserId(context.user_id),
            ConversationId(context.conversation_id),
            RunId(context.run_id),
        )
        if content is None:
            raise ToolError(f"this conversation has no stored result for call {call_id!r}")
        return {"call_id": call_id} | slice_of(content, offset, length)

    return [read_result]
