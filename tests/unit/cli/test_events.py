"""Lines of `pawl events`."""

from __future__ import annotations

from types import SimpleNamespace

from pawl.cli.events import line
from pawl.event.v1 import event_pb2, schedule_pb2


def shown(kind: str, event: event_pb2.RunEvent) -> str:
    message = SimpleNamespace(subject=f"pawl.v1.acme.lifecycle.{kind}", data=event.SerializeToString(), headers=None)
    return line(message, as_json=False)


def test_a_line_says_what_became_of_a_fire() -> None:
    fire = schedule_pb2.ScheduleFire(outcome=schedule_pb2.SCHEDULE_FIRE_OUTCOME_STARTED, run_id="run_1")
    event = event_pb2.RunEvent(type="schedule.fired")
    event.starter_fired.CopyFrom(event_pb2.StarterFired(name="report", user_id="ann", fire=fire))
    assert shown("schedule_fired", event) == "pawl.v1.acme.lifecycle.schedule_fired schedule.fired report started run_1"
    event.starter_fired.fire.outcome = schedule_pb2.SCHEDULE_FIRE_OUTCOME_SKIPPED
    event.starter_fired.fire.run_id = ""
    assert shown("schedule_fired", event).endswith("schedule.fired report skipped")


def test_a_line_of_another_event_has_its_type() -> None:
    event = event_pb2.RunEvent(type="run.queued")
    assert shown("queued", event) == "pawl.v1.acme.lifecycle.queued run.queued"
