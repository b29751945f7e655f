"""What must hold of runs that begin by themselves, and of what users are told by webhooks."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator

from pawl.event.v1 import message_pb2
from pawl.event.v1 import schedule_pb2 as pb
from pawl.notify.v1 import channel_pb2
from tests.chaos.record import Owner, Record
from tests.chaos.starters import INTERVAL_SECONDS, NAME
from tests.simulation.record import run_state

_DELIVERED = channel_pb2.CHANNEL_DELIVERY_STATE_DELIVERED
_WAITING = channel_pb2.CHANNEL_DELIVERY_STATE_WAITING


def no_fire_is_lost_or_doubled(record: Record) -> Iterator[str]:
    """I14: each due time has fired once, whatever was dead then, and each run of the schedule is of one fire."""
    for owner, started in record.started.items():
        times = sorted(started.fires)
        for time in range(min(times, default=0), max(times, default=0), INTERVAL_SECONDS):
            if time not in started.fires:
                yield f"what was due at {time} of the schedule of {owner} has not fired"
        named = [fire.run_id for fire in started.fires.values() if fire.outcome == pb.SCHEDULE_FIRE_OUTCOME_STARTED]
        made = _runs(record, owner, "schedule")
        if sorted(named) != sorted(made):
            only = sorted(set(named) ^ set(made))
            yield f"{len(named)} fires of {owner} have started runs, and there are {len(made)}: {only}"


def each_event_starts_one_run(record: Record) -> Iterator[str]:
    """ASYNC-8: an event that was taken has one run, which no other one has, or was refused, however often it came."""
    for owner, started in record.started.items():
        seen: dict[str, str] = {}
        for event_id, fires in started.events.items():
            run_ids = {fire.run_id for fire in fires} - {""}
            is_refused = all(fire.outcome == pb.SCHEDULE_FIRE_OUTCOME_REFUSED and fire.reason for fire in fires)
            if len(run_ids) != 1 and not (is_refused and not run_ids):
                yield f"{event_id} of {owner} was answered with the runs {sorted(run_ids)}"
            for run_id in run_ids:
                if not _tells(record, run_id, event_id) or run_id in seen:
                    yield f"{event_id} of {owner} has started {run_id}, which is of {seen.get(run_id, 'another thing')}"
                seen[run_id] = event_id
        if others := set(_runs(record, owner, "trigger")) - set(seen):
            yield f"{sorted(others)} of {owner} were started by no event that anybody has sent"


def deliveries_arrive_and_stay_the_same(record: Record) -> Iterator[str]:
    """I15: each notification of who has a channel arrives there, always under one id, with the same bytes, signed."""
    for owner, started in record.started.items():
        bodies: dict[str, set[bytes]] = defaultdict(set)
        ids: dict[str, set[str]] = defaultdict(set)
        for each in started.received:
            bodies[each.webhook_id].add(each.body)
            ids[json.loads(each.body)["data"]["notification_id"]].add(each.webhook_id)
            if not each.is_signed:
                yield f"{each.webhook_id} of {owner} came without a good signature"
        for webhook_id, several in bodies.items():
            if len(several) > 1:
                yield f"{webhook_id} of {owner} came with {len(several)} bodies"
        for notification_id, webhook_ids in ids.items():
            if len(webhook_ids) > 1:
                yield f"{notification_id} of {owner} came as {sorted(webhook_ids)}"
        said = {each.number: each for each in started.deliveries}
        for told in record.notifications[owner]:
            delivery = said.get(told.number)
            waits = delivery is not None and delivery.state == _WAITING
            if told.notification_id not in ids and not waits:
                yield f"{told.notification_id} has not come to the receiver of {owner}, and nothing waits"
        for number, delivery in said.items():
            if delivery.state == _DELIVERED and delivery.delivery_id not in bodies:
                yield f"delivery {number} of {owner} is said to have arrived, and has not"


def _runs(record: Record, owner: Owner, starter: str) -> list[str]:
    return [
        run.run_id
        for run in record.runs.values()
        if (run.store_id, run.user_id) == owner and run.labels.get(NAME) == starter
    ]


def _tells(record: Record, run_id: str, event_id: str) -> bool:
    """Return whether a run is about an event, or was stopped before it was about anything."""
    run = record.runs.get(run_id)
    if run is not None and run_state(run.state) == "CANCELLED" and not run.round:
        return True
    messages = record.messages.get(run.conversation_id, []) if run is not None else []
    return any(message.role == message_pb2.ROLE_USER and event_id in message.text for message in messages)


CHECKERS = (no_fire_is_lost_or_doubled, each_event_starts_one_run, deliveries_arrive_and_stay_the_same)
