"""Events that fire triggers in some seeds, sent once, twice or again, and their checkers."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message

from pawl.agent.v1 import trigger_pb2 as pb
from pawl.chassis.ids import RequestId, StoreId
from pawl.event.v1 import schedule_pb2, trigger_pb2
from pawl.job_store.schedules.rules import FireOutcome
from pawl.values import Overlap
from tests.simulation.history import Delivered
from tests.simulation.record import Record, broken
from tests.simulation.world import Member, World

_SETTLING_SECONDS = 300.0


class Sender(Member):
    """A user with triggers who sends each event until it is accepted."""

    def __init__(self, world: World, store_id: StoreId) -> None:
        super().__init__(world, store_id, "sender")
        self._triggers: dict[str, tuple[str, str]] = {}
        self._sent: list[tuple[str, str]] = []

    async def live(self) -> None:
        for number in range(self._draw.choice([1, 2])):
            await self._make(f"t{number}")
        while not self._world.chance.calm:
            await asyncio.sleep(2.5 * self._draw.random())
            await self._act()
        for name in self._triggers:
            await self._forward("resume", pb.ResumeTriggerRequest(name=name))
        for name, event_id in self._sent:
            await self._send(name, event_id)
        loop = asyncio.get_running_loop()
        seconds, lanes = _SETTLING_SECONDS + self._world.history.set_back_seconds, self._world.tables.starters.lanes
        end = loop.time() + seconds
        while any(lane.event_id for lane in lanes.values()) and loop.time() < end:
            await asyncio.sleep(1.0)

    async def _make(self, name: str) -> None:
        draw = self._draw
        definition = trigger_pb2.TriggerDefinition(
            name=name,
            text=f"plan-{name} please {{{{event}}}}",
            labels={"trigger": name},
            conversation_key=draw.choice(["", name]),
            debounce_seconds=draw.choice([0, 0, 2]),
            overlap=schedule_pb2.ScheduleOverlap.ValueType(draw.randrange(1, 5)),
            webhook=trigger_pb2.WebhookSource(authentication=trigger_pb2.WEBHOOK_AUTHENTICATION_BEARER),
        )
        saved = await self._forward("save", pb.CreateTriggerRequest(definition=definition))
        # The response with the secret may be lost.
        rotated = await self._forward("rotate", pb.RotateTriggerSecretRequest(name=name))
        secret = pb.RotateTriggerSecretResponse.FromString(rotated).secret
        self._triggers[name] = pb.CreateTriggerResponse.FromString(saved).trigger.trigger_id, secret

    async def _act(self) -> None:
        draw, name = self._draw, self._draw.choice(list(self._triggers))
        chance = draw.random()
        if chance < 0.1:
            paused = draw.random() < 0.5
            pause = pb.PauseTriggerRequest(name=name, note="why")
            await self._forward("pause", pause if paused else pb.ResumeTriggerRequest(name=name))
        elif chance < 0.3 and self._sent:
            await self._send(*draw.choice(self._sent))
        else:
            self._sent.append((name, f"event-{len(self._sent)}"))
            times = 2 if draw.random() < 0.3 else 1
            await asyncio.gather(*(self._send(*self._sent[-1]) for _ in range(times)))

    async def _send(self, name: str, event_id: str) -> None:
        trigger_id, secret = self._triggers[name]
        headers = {"Webhook-Id": event_id, "Authorization": f"Bearer {secret}"}
        body = f'{{"number":"{event_id}"}}'.encode()
        delivered = await self._ask(
            "deliver",
            lambda agent: agent.triggers.deliver_webhook(self._caller, trigger_id, headers, body, RequestId("")),
        )
        if delivered is not None:
            said = Delivered(trigger_id=trigger_id, event_id=event_id, run_id=str(delivered.fire.run_id))
            self._world.history.delivered.append(said)

    async def _forward(self, what: str, request: Message) -> Any:
        method = f"/pawl.agent.v1.TriggerService/{type(request).__name__.removesuffix('Request')}"
        raw = request.SerializeToString()
        return await self._ask(what, lambda agent: agent.forward_of_triggers(self._caller, method, raw))


def each_event_starts_one_run(record: Record) -> Iterator[str]:
    """Each event has exactly one run of its own, or a recorded outcome, however often it was sent."""
    rows = record.tables.starters.events
    known = {(key.trigger_id, key.event_id): row for key, row in rows.items()}
    started = {position: row.run_id for position, row in known.items() if row.outcome is FireOutcome.STARTED}
    made = {row.run_id for row in record.tables.runs.values() if "trigger" in row.labels}
    if made != set(started.values()) or len(made) != len(started):
        yield f"{len(started)} events have started {sorted(started.values())}, and there are {sorted(made)}"
    told: dict[tuple[str, str], set[str]] = defaultdict(set)
    for each in record.history.delivered:
        told[each.trigger_id, each.event_id] |= {each.run_id} - {""}
    for position, run_ids in told.items():
        first = started.get(position, "")
        yield from broken(
            (position not in known, f"{position} was accepted, but has no record"),
            (not run_ids <= {first}, f"{position} has started {first}, but its sender got {sorted(run_ids)}"),
        )


def no_event_waits_forever(record: Record) -> Iterator[str]:
    """Each event has fired or has a recorded reason for not firing."""
    for key, row in record.tables.starters.events.items():
        has_no_reason = row.outcome not in {FireOutcome.WAITING, FireOutcome.STARTED} and not row.reason
        yield from broken(
            (row.outcome is FireOutcome.WAITING, f"{key} waits: {row.reason}"),
            (has_no_reason, f"{key} is {row.outcome.name}, without a reason"),
        )


def events_do_not_overlap(record: Record) -> Iterator[str]:
    """With SKIP and QUEUE, no event starts a run while the previous run of its lane is open."""
    return (
        f"{fired.event_id} started {fired.run_id} alongside {fired.beside}"
        for fired in record.tables.starters.fired
        if fired.is_busy and fired.overlap in {Overlap.SKIP, Overlap.QUEUE}
    )


CHECKERS = (each_event_starts_one_run, no_event_waits_forever, events_do_not_overlap)
