"""Schedules and triggers that start workflows instead of runs with messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pawl.errors import InvalidArguments, InvalidField, WorkflowNotFound
from pawl.event.v1.schedule_pb2 import ScheduleDefinition, ScheduleFire
from pawl.job.v1.schedules_pb2 import DueSchedule, FireScheduleRequest, FireScheduleResponse
from tests.fakes.manual_clock import ManualClock
from tests.unit.agent_loop.test_starters import (
    ANN,
    NO_ID,
    TIME,
    Checks,
    EventBook,
    ScheduleBook,
    delivered,
    due_trigger,
    owner,
    played,
    starting_with,
    triggers_of,
)


def nightly(workflow: str = "digest", template: str = "") -> DueSchedule:
    definition = ScheduleDefinition(name="nightly", workflow=workflow, input_json=template.encode())
    return DueSchedule(owner=owner(), definition=definition)


async def test_a_schedule_starts_a_workflow_with_its_scheduled_time(clock: ManualClock) -> None:
    messages: list[tuple[str, str, str]] = []

    class Book(ScheduleBook):
        async def FireSchedule(self, request: FireScheduleRequest) -> FireScheduleResponse:
            messages.append((request.message.text, request.message.conversation_key, request.refusal))
            return FireScheduleResponse(fire=ScheduleFire())

    templates = ('{"day": "${schedule.time}", "of": "the ${schedule.name}"}', "", '{"x": "${schedule.time.year}"}')
    due = [nightly(template=each) for each in templates]
    for each in due:
        each.expected_time.FromDatetime(TIME)
    await played(Book([*due, nightly("gone", '{"x": 1}')]), clock, 0.5)
    assert messages[0] == ('{"day":"2026-07-06T07:00:00+00:00","of":"the nightly"}', "digest", "")
    empty, wrong, gone = (refusal for *_, refusal in messages[1:])
    assert empty == "INVALID_ARGUMENTS: input: it is empty"
    assert wrong == "INVALID_ARGUMENTS: input: schedule.time.year does not exist"
    assert gone.startswith("WORKFLOW_NOT_FOUND: ")


async def test_an_event_is_the_input_of_a_workflow(clock: ManualClock) -> None:
    trigger = due_trigger("", workflow="triage", input_json=b'{"ticket": "${event.data.ticket}"}')
    _, message = await delivered(trigger, clock, b'{"ticket": 7}')
    assert json.loads(message.text) == {"ticket": 7}
    _, message = await delivered(due_trigger("", workflow="triage"), clock, b'{"ticket": 7}')
    event = json.loads(message.text)["event"]
    assert (event["data"], event["source"]) == ({"ticket": 7}, "webhook")
    ledger = EventBook(trigger)
    await triggers_of(ledger, clock).deliver_webhook(ANN, "trg_1", {}, b"no json", NO_ID)
    assert ledger.fired[0][2].startswith("INVALID_ARGUMENTS: input: event.data.ticket does not exist")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": "look"}, "text"),
        ({"agent": "clerk"}, "agent"),
        ({"conversation_key": "mine"}, "conversation_key"),
        ({"input_json": b"[]"}, "input_json"),
        ({"input_json": b"no json"}, "input_json"),
        ({"input_json": b'{"a": "${event.data}"}'}, "input_json"),
        ({"input_json": b'{"a": "${schedule.day}"}'}, "input_json"),
        ({"workflow": "", "text": "look", "input_json": b"{}"}, "input_json"),
    ],
)
async def test_a_schedule_is_checked_when_it_is_saved(fields: dict[str, Any], field: str) -> None:
    definition = ScheduleDefinition(name="nightly", **{"workflow": "digest", **fields})
    with pytest.raises(InvalidField) as error:
        await starting_with(Checks({})).check(ANN, definition)
    assert error.value.metadata["field"] == f"definition.{field}"


async def test_a_schedule_that_could_not_start_its_workflow_is_refused() -> None:
    for workflow, template, error in (
        ("gone", b'{"a": 1}', WorkflowNotFound),
        ("gone", b'{"a": "${schedule.time}"}', WorkflowNotFound),
        ("digest", b"", InvalidArguments),
    ):
        definition = ScheduleDefinition(name="nightly", workflow=workflow, input_json=template)
        with pytest.raises(error):
            await starting_with(Checks({})).check(ANN, definition)
    for template in (b'{"a": "${schedule.time}"}', b'{"a": "${1 + 1}"}'):
        definition = ScheduleDefinition(name="nightly", workflow="digest", input_json=template)
        await starting_with(Checks({})).check(ANN, definition)
