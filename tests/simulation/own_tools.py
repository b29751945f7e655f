"""Tools that come with runs, and their checkers."""

from __future__ import annotations

import random
from collections.abc import Iterator

from pawl.agent_loop.api.messages import NO_SESSION, SessionTools
from pawl.chassis.ids import ClientId
from pawl.event.v1 import event_pb2
from pawl.tool.v1 import tool_pb2
from tests.simulation.record import Record
from tests.simulation.registry import OWN

SKETCH = tool_pb2.ToolDefinition(name=OWN, description="Sketch it.").SerializeToString()
# A client that never opens a session.
ABSENT_CLIENT = "cli_elsewhere"
_BRINGS = 0.25


def drawn(draw: random.Random, own_client_id: str) -> SessionTools:
    """Return the tools of a run: usually none, otherwise one for any client, the user's client or an absent client."""
    if draw.random() >= _BRINGS:
        return NO_SESSION
    client_id = draw.choice(["", own_client_id, own_client_id, ABSENT_CLIENT])
    return SessionTools(client_id=ClientId(client_id), definitions=(SKETCH,))


def own_tools_stay_with_their_run(record: Record) -> Iterator[str]:
    """FE-2: a run keeps the tools that came with it, even after crashes, and no other run has them."""
    for message in record.history.messages:
        run = record.runs.get(message.run_ids[0]) if message.run_ids and not message.steered else None
        if run is not None and list(run.own_tools.names) != [OWN] * message.tool_count:
            yield f"{message.request_id} has {message.tool_count} tools, its run {run.run_id} {run.own_tools.names}"
    for run_id, run in record.runs.items():
        pinned = [tool.name for tool in run.tools if tool.definition_sha256]
        if run.tools and pinned != list(run.own_tools.names):
            yield f"run {run_id} came with {list(run.own_tools.names)} and pinned {pinned}"
    for call in record.calls.values():
        is_unknown = call.tool_name == OWN and call.result.error_reason == "TOOL_NOT_FOUND"
        if is_unknown and record.runs[call.run_id].own_tools.names:
            yield f"call {call.call_id} of a tool that came with its run was not found"


def own_calls_stay_with_their_client(record: Record) -> Iterator[str]:
    """FE-2: calls of a tool that belongs to a client are offered only to that client."""
    for run_id, log in record.logs.items():
        client_id = record.runs[run_id].own_tools.client_id
        for event in log if client_id else ():
            if _is_own(event) and event.call_changed.call.offer.client_id not in {"", client_id}:
                yield f"call {event.call_changed.call.call_id} went to {event.call_changed.call.offer.client_id}"


def _is_own(event: event_pb2.RunEvent) -> bool:
    return event.HasField("call_changed") and event.call_changed.call.tool_name == OWN


CHECKERS = (own_tools_stay_with_their_run, own_calls_stay_with_their_client)
