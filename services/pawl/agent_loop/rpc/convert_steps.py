"""Steps as messages of pawl.agent.v1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pawl.agent.v1 import steps_pb2
from pawl.agent_loop.domain.steps import Step, StepChange
from pawl.errors import InvalidPageToken

_STEPS_PER_PAGE: Final = 50
_PAGE_BYTES_MAX: Final = 2 * 1024 * 1024


def step(found: Step) -> steps_pb2.Step:
    """Return a step."""
    message = steps_pb2.Step(
        step_id=found.step_id,
        type=steps_pb2.StepType.Value(f"STEP_TYPE_{found.type}"),
        status=steps_pb2.StepStatus.Value(f"STEP_STATUS_{found.status}"),
        round=found.round,
        content=found.content,
        content_omitted_bytes=found.content_omitted_bytes,
        tool_name=found.tool_name,
        call_id=found.call_id,
    )
    message.time.FromMicroseconds(round(found.time * 1e6))
    return message


def watch_response(changes: Sequence[StepChange], seq: int) -> steps_pb2.WatchStepsResponse:
    """Return what has changed up to a seq."""
    told = [steps_pb2.StepChange(step=step(change.step), appends=change.appends) for change in changes]
    return steps_pb2.WatchStepsResponse(changes=told, seq=seq)


def page(found: Sequence[Step], *, page_size: int, page_token: str) -> steps_pb2.ListStepsResponse:
    """Return the page after the step that the token names, at least one step if there is any.

    Raises:
        InvalidPageToken: there is no such step in this run.
    """
    start = next((number for number, each in enumerate(found, 1) if each.step_id == page_token), 0)
    if page_token and not start:
        raise InvalidPageToken
    response, size = steps_pb2.ListStepsResponse(), 0
    for each in found[start : start + (page_size or _STEPS_PER_PAGE)]:
        message = step(each)
        size += message.ByteSize()
        if response.steps and size > _PAGE_BYTES_MAX:
            break
        response.steps.append(message)
    if start + len(response.steps) < len(found):
        response.next_page_token = response.steps[-1].step_id
    return response
