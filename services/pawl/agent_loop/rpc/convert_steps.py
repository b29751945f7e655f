"""Steps as messages of pawl.agent.v1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pawl.agent.v1 import steps_pb2
from pawl.agent_loop.app.public_values import PageAsked
from pawl.agent_loop.domain.step_history import Step, StepChange
from pawl.agent_loop.rpc.convert import WIRE
from pawl.chassis.parts import in_parts
from pawl.chassis.translate import Exceptions
from pawl.errors import InvalidPageToken

_STEPS_PER_PAGE: Final = 50
_PAGE_BYTES_MAX: Final = 2 * 1024 * 1024

_STEP: Final = WIRE.struct(Step, steps_pb2.Step, Exceptions(of_struct=("index",)))
_CHANGE: Final = WIRE.struct(StepChange, steps_pb2.StepChange)


def watch_response(changes: Sequence[StepChange], seq: int) -> steps_pb2.WatchStepsResponse:
    """Return what has changed up to a seq."""
    return steps_pb2.WatchStepsResponse(changes=map(_CHANGE.fields, changes), seq=seq)


def page(found: Sequence[Step], asked: PageAsked) -> steps_pb2.ListStepsResponse:
    """Return the page after the step that the token names, at least one step if there is any.

    Raises:
        InvalidPageToken: there is no such step in this run.
    """
    start = next((number for number, each in enumerate(found, 1) if each.step_id == asked.page_token), 0)
    if asked.page_token and not start:
        raise InvalidPageToken
    messages = map(_STEP.write, found[start : start + (asked.page_size or _STEPS_PER_PAGE)])
    part = next(in_parts(messages, steps_pb2.Step.ByteSize, size_max=_PAGE_BYTES_MAX), [])
    response = steps_pb2.ListStepsResponse(steps=part)
    if start + len(response.steps) < len(found):
        response.next_page_token = response.steps[-1].step_id
    return response
