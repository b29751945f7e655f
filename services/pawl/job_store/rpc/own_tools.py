"""Runs with tools of their own: kept as they came, and given back to whoever drives the run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from pawl.chassis.ids import ClientId, check_id
from pawl.errors import InvalidField
from pawl.event.v1 import run_pb2
from pawl.job.v1 import ledger_pb2
from pawl.job_store.app.ports import Limits
from pawl.job_store.domain.rows import OwnTools, RunRow
from pawl.job_store.domain.submit import Submit
from pawl.job_store.rpc import operations
from pawl.tool.v1 import tool_pb2

OWN_TOOLS_MAX: Final = 64
"""Most tools that come with a run."""


def start(request: ledger_pb2.StartRunRequest, limits: Limits) -> Submit:
    """Return the operation of a StartRun: a run with tools of its own, or one that the same request has begun."""
    names = tuple(tool.definition.name for tool in request.tools)
    if not (not request.only_repeat) <= len(set(names)) == len(names) <= OWN_TOOLS_MAX:
        raise InvalidField(f"tools: 1 to {OWN_TOOLS_MAX}, each with another name", field="tools")
    client_id = ClientId(check_id(request.client_id, "client_id", optional=True))
    tools = ledger_pb2.LoadRunResponse(own_tools=request.tools)
    submitted = operations.submit(request.message, limits)
    submitted = replace(submitted, only_repeat=submitted.only_repeat or request.only_repeat)
    if not (request.tools or request.asked_tools_sha256):
        return submitted
    own = run_pb2.Run(own_tools=run_pb2.OwnTools(names=names, client_id=client_id))
    return replace(
        submitted,
        fingerprint=hashlib.sha256(submitted.fingerprint + request.asked_tools_sha256).digest(),
        # Parts of one message, one after the other, are that message.
        options=submitted.options + own.SerializeToString(),
        own_tools=OwnTools(names=names, client_id=client_id, definitions=tools.SerializeToString()),
    )


def of_run(row: RunRow) -> Sequence[tool_pb2.OwnTool]:
    """Return the tools that came with a run."""
    own = row.own_tools
    return ledger_pb2.LoadRunResponse.FromString(own.definitions).own_tools if own is not None else ()
