"""The answers about undo as messages of pawl.agent.v1."""

from __future__ import annotations

from collections.abc import Iterable

from pawl.agent.v1 import undo_pb2
from pawl.agent_loop.domain.undo import CallUndo


def calls(found: Iterable[CallUndo]) -> list[undo_pb2.CallUndo]:
    """Return the calls of a preview or a report."""
    return [
        undo_pb2.CallUndo(
            call_id=each.call_id,
            tool_name=each.tool_name,
            state=undo_pb2.UndoState.Value(f"UNDO_STATE_{each.state}"),
            summary=each.summary,
            reason=each.reason,
            undo_call_id=each.undo_call_id,
            undo_run_id=each.undo_run_id,
        )
        for each in found
    ]
