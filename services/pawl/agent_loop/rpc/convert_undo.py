"""The answers about undo as messages of pawl.agent.v1."""

from __future__ import annotations

from typing import Final

from pawl.agent.v1 import undo_pb2
from pawl.agent_loop.domain.undo import CallUndo
from pawl.agent_loop.rpc.convert import WIRE

CALL: Final = WIRE.struct(CallUndo, undo_pb2.CallUndo)
"""Between a call of a preview or a report, and its message."""
