"""Runs with tools of their own: kept as they came, and given back to whoever drives the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pawl.chassis.ids import ClientId, check_id
from pawl.errors import InvalidField
from pawl.job.v1 import ledger_pb2
from pawl.job_store.ledger.rules.rows import OwnTools, RunRow
from pawl.tool.v1 import tool_pb2

OWN_TOOLS_MAX: Final = 64
"""Most tools that come with a run."""


def of_request(request: ledger_pb2.SubmitMessageRequest) -> OwnTools | None:
    """Return the tools that come with a message; None if it has none."""
    names = tuple(tool.definition.name for tool in request.tools)
    if not len(set(names)) == len(names) <= OWN_TOOLS_MAX:
        raise InvalidField(f"tools: at most {OWN_TOOLS_MAX}, each with another name", field="tools")
    client_id = ClientId(check_id(request.client_id, "client_id", optional=True))
    definitions = ledger_pb2.LoadRunResponse(own_tools=request.tools).SerializeToString()
    return OwnTools(names=names, client_id=client_id, definitions=definitions) if names else None


def of_run(row: RunRow) -> Sequence[tool_pb2.OwnTool]:
    """Return the tools that came with a run."""
    own = row.own_tools
    return ledger_pb2.LoadRunResponse.FromString(own.definitions).own_tools if own is not None else ()
