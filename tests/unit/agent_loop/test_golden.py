"""The golden log in steps; tests/unit/gateway and web/client read the same log, and tell the same."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf import json_format

from pawl.agent_loop.adapters import step_log
from pawl.agent_loop.adapters.views import log_gap, logged_event
from pawl.agent_loop.domain.step_history import Steps, StepType
from pawl.event.v1 import event_pb2, gap_pb2
from tests.golden import GAP, LOG, TOLD


def logged() -> list[Any]:
    """The log, as whoever makes steps reads it."""
    events = json.loads(LOG.read_text())
    return [logged_event(json_format.ParseDict(each, event_pb2.RunEvent())) for each in events]


def shown(steps: Steps) -> list[dict[str, str]]:
    """Return what steps tell, in their order."""
    told: list[dict[str, str]] = []
    for step in steps.all():
        match step.type:
            case StepType.REASONING:
                told.append({"reasoning": step.content})
            case StepType.PLANNING | StepType.ANSWER:
                told.append({"text": step.content})
            case StepType.RESULT:
                (call,) = [each for each in told if each.get("call") == step.call_id]
                call["result"] = step.content
            case _:
                told.append({"call": step.call_id, "tool": step.tool_name, "arguments": step.content})
    return told


def expected() -> list[dict[str, str]]:
    """Return what everybody tells; of a question, steps tell the text that the user is asked."""
    told: list[dict[str, str]] = json.loads(TOLD.read_text())
    for each in told:
        if each.get("tool") == "ask_user":
            each["arguments"] = json.loads(each["arguments"])["question"]
    return told


def test_steps_tell_the_golden_log_as_everybody_does() -> None:
    steps = Steps()
    for each in logged():
        step_log.take_in(steps, [each])
    assert shown(steps) == expected()


def test_steps_tell_it_so_behind_a_gap_too() -> None:
    steps = Steps()
    step_log.take_in(steps, log_gap(json_format.ParseDict(json.loads(GAP.read_text()), gap_pb2.Gap())))
    step_log.take_in(steps, logged()[-1:])
    assert shown(steps) == expected()
