"""The tools that a client supplies with a run. The store returns them unchanged to the run's owner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pawl.chassis.ids import ClientId, check_id
from pawl.errors import InvalidField
from pawl.job.v1 import ledger_pb2
from pawl.job_store.ledger.rules.rows import OwnTools, RunRow
from pawl.tool.v1 import tool_pb2

# Maximum number of tools that a client supplies with a run.
OWN_TOOLS_MAX: Final = 64


def of_request(request: ledger_pb2.SubmitMessageRequest) -> OwnTools | None:
    """Return the tools that a client supplied with a message, or None if it did not supply any."""
    names = tuple(tool.definition.name for tool in request.tools)
    if len(names) > OWN_TOOLS_MAX:
        raise InvalidField(f"tools must have at most {OWN_TOOLS_MAX} entries, got {len(names)}", field="tools")
    if len(set(names)) != len(names):
        raise InvalidField("tools must have distinct names", field="tools")
    client_id = ClientId(check_id(request.client_id, "client_id", optional=True))
    definitions = ledger_pb2.LoadRunResponse(own_tools=request.tools).SerializeToString()
    return OwnTools(names=names, client_id=client_id, definitions=definitions) if names else None


def of_run(row: RunRow) -> Sequence[tool_pb2.OwnTool]:
    own = row.own_tools
    return ledger_pb2.LoadRunResponse.FromString(own.definitions).own_tools if own is not None else ()
