"""Workflows and goals that users start besides messages. Their tools are those of `prompts`."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

from pawl.agent.v1 import goal_pb2, workflow_pb2
from pawl.event.v1 import goal_pb2 as event_pb2
from tests.chaos.prompts import GATED, call
from tests.simulation.model import WATCHED

# The event that a run of the first workflow waits for.
SIGNED = "signed"
# Results of the goal's tool end in `AGAIN` once it is met.
AGAIN = " again"
PARCELS = 2


def _tool(name: str, tag: str, **more: Any) -> dict[str, Any]:
    # A lost call with an effect fails its node, but not the run.
    arguments = {"tag": f"${{input.tag}}-{tag}", "seconds": 0.2}
    return {"kind": "tool", "tool": name, "arguments": arguments, "on_error": "continue", **more}


_ERRAND: Mapping[str, Any] = {
    "read": _tool("read_meter", "read", retry={"attempts": 3, "delay_seconds": 1}),
    "press": _tool("press_button", "press", after=["read"]),
    "launch": _tool(GATED, "launch", after=["read"]),
    "ask": {"kind": "human", "question": "Is ${input.tag} right?", "after": ["read"], "on_error": "continue"},
    "agent": {
        "kind": "agent",
        "task": call("send_parcel", tag="${input.tag}-agent", seconds=0.2),
        "tools": ["send_parcel"],
        "after": ["read"],
        "on_error": "continue",
    },
    "pause": {"kind": "wait", "seconds": 2},
    "signed": {"kind": "wait", "event": SIGNED, "timeout_seconds": 20, "on_error": "continue"},
    "last": _tool("set_valve", "last", after=["press", "launch", "ask", "agent", "pause", "signed"]),
    "answer": {"kind": "output", "after": ["last"], "value": "${nodes.last.state}"},
}
_BATCH: Mapping[str, Any] = {
    "each": {
        "kind": "map",
        "items": "${input.items}",
        "concurrency": 4,
        "tolerate": "100%",
        "do": {
            "kind": "tool",
            "tool": "press_button",
            "arguments": {"tag": "${input.tag}-${item}", "seconds": 0.1},
        },
    },
    "answer": {"kind": "output", "value": "${size(nodes.each.output)}"},
}
_FLOWS = {"errand": _ERRAND, "batch": _BATCH}
WORKFLOWS = tuple({"name": name, "input": {"type": "object"}, "nodes": nodes} for name, nodes in _FLOWS.items())


def workflow(draw: random.Random, request_id: str, tag: str) -> workflow_pb2.StartWorkflowRequest:
    """Return a request whose runs have `tag` in all their arguments. A batch may have more than one chunk."""
    items = [str(number) for number in range(draw.choice((3, 3, 60)))]
    return workflow_pb2.StartWorkflowRequest(
        request_id=request_id,
        name=draw.choice(list(_FLOWS)),
        input_json=json.dumps({"tag": tag, "items": items}).encode(),
    )


def goal(draw: random.Random, request_id: str, tag: str) -> goal_pb2.StartGoalRequest:
    """Return a request for a goal that is met once `PARCELS` parcels with `tag` were sent, one by each attempt."""
    check = event_pb2.GoalCriterion(
        tool_name="read_meter",
        arguments_json=json.dumps({"tag": tag, "seconds": 0.05}).encode(),
        expression=WATCHED,
    )
    wanted = event_pb2.Goal(
        aim=f"The parcels are sent; {call('send_parcel', tag=tag, seconds=0.2)};",
        attempts_by=event_pb2.GoalAgent(tool_names=["send_parcel"]),
        criterion=check,
        attempts_max=draw.choice((1, 4, 4)),
        wait_seconds=draw.choice((0, 0, 1.5)),
    )
    return goal_pb2.StartGoalRequest(request_id=request_id, goal=wanted)
