"""Prompts of users, which the scripted model obeys literally, and the workflows and goals that users start besides."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

from pawl.agent.v1 import goal_pb2, workflow_pb2
from pawl.event.v1 import goal_pb2 as event_pb2
from tests.simulation.model import WATCHED

# The front-end tool.
PANEL = "show_panel"

BACK_END = ("read_meter", "set_valve", "send_parcel", "press_button")
GATED = "launch_rocket"
READS = "read_meter"


def prompt(draw: random.Random, tag: str) -> str:
    """Return a prompt of one to three stages. Every call has `tag` in its arguments, so prompts are unique."""
    stages = [_stage(draw, f"{tag}-{number}") for number in range(draw.choice((1, 1, 2, 2, 3)))]
    return " then ".join(stages)


def _stage(draw: random.Random, tag: str) -> str:
    kind = draw.choices(("batch", "text", "gated", "panel", "question", "mixed", "job"), (40, 15, 15, 15, 8, 7, 15))[0]
    match kind:
        case "text":
            return f"{_back_end(draw, tag)} then count to {draw.randrange(20, 60)} slowly"
        case "gated":
            return call(GATED, tag=tag, seconds=_seconds(draw))
        case "panel":
            return call(PANEL, title=tag)
        case "job":
            how = draw.choice(("", "", ", every 2 seconds 2 times"))
            is_gated = draw.random() < 0.3
            wanted = call(GATED, tag=tag, seconds=_seconds(draw)) if is_gated else _back_end(draw, tag)
            how = ", every 1 seconds 3 times" if is_gated and draw.random() < 0.7 else how
            return f"in the background{how}: {wanted}"
        case "question":
            return f"ask me whether {tag} is right"
        case "mixed":
            return " and ".join(
                (call(PANEL, title=tag), _back_end(draw, f"{tag}x"), call(GATED, tag=tag, seconds=_seconds(draw)))
            )
        case _:
            return " and ".join(_back_end(draw, f"{tag}x{number}") for number in range(draw.choice((1, 2, 3))))


def call(tool_name: str, **arguments: str | float) -> str:
    return f"call {tool_name} with {json.dumps(arguments)}"


def _back_end(draw: random.Random, tag: str) -> str:
    return call(draw.choice(BACK_END), tag=tag, seconds=_seconds(draw))


def _seconds(draw: random.Random) -> float:
    return round(draw.choice((0.02, 0.2, 1.5)) * (0.5 + draw.random()), 3)


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
