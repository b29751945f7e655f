"""Schedules, as `pawl schedules` changes and shows them."""

from __future__ import annotations

from pawl.cli.schedules import change, details
from pawl.event.v1 import schedule_pb2


def test_an_empty_label_takes_all_labels_away() -> None:
    definition = schedule_pb2.ScheduleDefinition(labels={"of": "it"})
    change(definition, labels=["by=me"])
    assert dict(definition.labels) == {"by": "me"}
    change(definition, labels=[""])
    assert dict(definition.labels) == {}


def test_what_was_chosen_is_shown_and_nothing_else() -> None:
    definition = schedule_pb2.ScheduleDefinition(name="x", text="x", interval_seconds=60)
    assert details(definition) == []
    change(definition, agent="clerk", jitter_seconds="5m", labels=["of=it"], end_time="2030-01-31T09:00")
    *chosen, end = details(definition)
    assert chosen == ["agent: clerk", "labels: of=it", "jitter: 300 s"]
    assert end.startswith("until: 2030-01-31 09:00:00")
