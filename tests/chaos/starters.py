"""Users whose runs begin by themselves, by a schedule and by events from outside, and who are told by a webhook."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeVar

import grpc
from standardwebhooks.webhooks import Webhook

from pawl.agent.v1 import schedule_pb2, schedule_pb2_grpc, trigger_pb2, trigger_pb2_grpc
from pawl.event.v1 import schedule_pb2 as event_schedule_pb2
from pawl.event.v1 import trigger_pb2 as event_trigger_pb2
from pawl.notify.v1 import channel_pb2, channel_pb2_grpc
from tests.chaos.caller import ATTEMPT_SECONDS, Caller
from tests.keys import keyed_channel
from tests.web_server import Asked, Reply, WebServer

T = TypeVar("T")

NAME = "by-itself"
"""The name of the schedule and of the trigger, and the label of the runs that they start."""
INTERVAL_SECONDS = 4
_TEXT = "count to 3"
_PAGE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A request to the receiver of a channel."""

    webhook_id: str
    body: bytes
    is_signed: bool


@dataclass(slots=True, kw_only=True)
class Started:
    """All that a user of these was told, and what came to their receiver."""

    fires: dict[int, event_schedule_pb2.ScheduleFire] = field(default_factory=dict)
    """Of the schedule by their due times, as they were seen last."""
    events: dict[str, list[event_schedule_pb2.ScheduleFire]] = field(default_factory=dict)
    """By the ids of events what their sender was answered."""
    received: list[Received] = field(default_factory=list)
    deliveries: list[channel_pb2.ChannelDelivery] = field(default_factory=list)


class Starter:
    """A user with a schedule, a trigger and a channel. `secrets` are those of the trigger and of the channel."""

    def __init__(self, caller: Caller, channels: list[grpc.aio.Channel], notifier: str, receiver: WebServer) -> None:
        self.caller = caller
        self.started = Started()
        self._schedules = [schedule_pb2_grpc.ScheduleServiceStub(channel) for channel in channels]
        self._triggers = [trigger_pb2_grpc.TriggerServiceStub(channel) for channel in channels]
        self._notifier = notifier
        self._receiver = receiver
        self._calm = False
        self._trigger_id = self._trigger_secret = self._channel_id = self._channel_secret = ""
        self._path = f"/{caller.store_id}/{caller.user_id}"

    async def prepare(self) -> None:
        """Make everything, while nothing is wrong yet."""
        async with keyed_channel(self._notifier) as channel:
            hook = channel_pb2.Channel(url=f"http://127.0.0.1:{self._receiver.port}{self._path}")
            request = channel_pb2.CreateChannelRequest(channel=hook)
            stub = channel_pb2_grpc.ChannelServiceStub(channel)
            made = await stub.CreateChannel(request, metadata=self.caller.metadata)
        self._channel_id, self._channel_secret = made.channel.channel_id, made.secret
        trigger = event_trigger_pb2.TriggerDefinition(
            name=NAME,
            text=f"{_TEXT}, for {{{{event}}}}",
            labels={NAME: "trigger"},
            overlap=event_schedule_pb2.SCHEDULE_OVERLAP_ALLOW,
            webhook=event_trigger_pb2.WebhookSource(authentication=event_trigger_pb2.WEBHOOK_AUTHENTICATION_BEARER),
        )
        new = trigger_pb2.CreateTriggerRequest(definition=trigger)
        kept = await self._triggers[0].CreateTrigger(new, metadata=self.caller.metadata)
        self._trigger_id, self._trigger_secret = kept.trigger.trigger_id, kept.secret
        schedule = event_schedule_pb2.ScheduleDefinition(
            name=NAME,
            text=_TEXT,
            labels={NAME: "schedule"},
            interval_seconds=INTERVAL_SECONDS,
            overlap=event_schedule_pb2.SCHEDULE_OVERLAP_ALLOW,
        )
        asked = schedule_pb2.CreateScheduleRequest(definition=schedule)
        await self._schedules[0].CreateSchedule(asked, metadata=self.caller.metadata)

    def calm_down(self) -> None:
        """Send no more events, and pause the schedule."""
        self._calm = True

    async def live(self) -> None:
        """Send events, some twice, and look after the schedule, until told to be calm."""
        draw = self.caller.draw
        while not self._calm:
            await asyncio.sleep(1.0 + draw.random())
            event_id = self.caller.next_id("event")
            await asyncio.gather(*(self._send(event_id) for _ in range(draw.choice([1, 1, 2]))), self._look())
        pause = schedule_pb2.PauseScheduleRequest(name=NAME)
        await self._ask(
            lambda: draw.choice(self._schedules).PauseSchedule(
                pause, metadata=self.caller.metadata, timeout=ATTEMPT_SECONDS
            )
        )
        await self._look()

    async def _send(self, event_id: str) -> None:
        headers = {"webhook-id": event_id, "authorization": f"Bearer {self._trigger_secret}"}
        body = json.dumps({"number": event_id}).encode()
        request = trigger_pb2.DeliverWebhookRequest(trigger_id=self._trigger_id, headers=headers, body=body)
        answer = await self._ask(
            lambda: self.caller.draw.choice(self._triggers).DeliverWebhook(
                request, metadata=self.caller.metadata, timeout=ATTEMPT_SECONDS
            )
        )
        self.started.events.setdefault(event_id, []).append(answer.fire)

    async def _look(self) -> None:
        request = schedule_pb2.GetScheduleRequest(name=NAME)
        answer = await self._ask(
            lambda: self.caller.draw.choice(self._schedules).GetSchedule(
                request, metadata=self.caller.metadata, timeout=ATTEMPT_SECONDS
            )
        )
        self.started.fires |= {fire.due_time.seconds: fire for fire in answer.schedule.fires}

    async def _ask(self, send: Callable[[], Awaitable[T]]) -> T:
        return await self.caller.read(lambda _: send())

    async def read(self) -> Started:
        """Return all that came of it, with what the notifier says of its deliveries by now."""
        asked = [each for each in self._receiver.asked if each.target == self._path]
        self.started.received = [self._received(each) for each in asked]
        self.started.deliveries = []
        token = ""
        async with keyed_channel(self._notifier) as channel:
            stub = channel_pb2_grpc.ChannelServiceStub(channel)
            while True:
                request = channel_pb2.ListDeliveriesRequest(
                    channel_id=self._channel_id, page_size=_PAGE, page_token=token
                )
                answer = await stub.ListDeliveries(request, metadata=self.caller.metadata)
                self.started.deliveries += answer.deliveries
                token = answer.next_page_token
                if not token:
                    return self.started

    def _received(self, asked: Asked) -> Received:
        """Return a request, as of whoever has signed it: its time is that of a clock that the nemesis may shift."""
        webhook_id, signatures = asked.headers["webhook-id"], asked.headers["webhook-signature"].split()
        time = datetime.fromtimestamp(int(asked.headers["webhook-timestamp"]), UTC)
        good = Webhook(self._channel_secret).sign(webhook_id, time, asked.body.decode())
        return Received(webhook_id=webhook_id, body=asked.body, is_signed=good in signatures)


def reply(_: Asked) -> Reply:
    """Take what comes."""
    return Reply()
