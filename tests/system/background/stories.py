"""Background work ("stories") that a test can interrupt with faults, and checks of the ledger afterwards."""

from __future__ import annotations

import asyncio
import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from standardwebhooks.webhooks import Webhook

from pawl.client import AsyncClient, approve
from pawl.event.v1 import call_pb2, event_pb2, run_pb2, schedule_pb2, trigger_pb2
from pawl.notify.v1 import channel_pb2, notify_pb2
from tests.chaos import checkers
from tests.chaos.history import History
from tests.chaos.world import Record
from tests.poll import put, until
from tests.simulation.checkers import ENDED, LEDGER_CHECKERS
from tests.simulation.record import run_state
from tests.system.background.world import World
from tests.system.talk import COMPLETED, PATIENCE_SECONDS, Talk, count_of, in_background, is_end, waiting
from tests.web_server import Reply

STARTED: Final = schedule_pb2.SCHEDULE_FIRE_OUTCOME_STARTED


class Story(ABC):
    """Work that a user starts and that must end correctly whatever fails before its end.

    `tools_die` is true if tool-registry will be interrupted, which loses its running calls.
    """

    def __init__(self, world: World, pawl: AsyncClient, folder: Path, *, tools_die: bool = False) -> None:
        self.world = world
        self.pawl = pawl
        self.tools_die = tools_die
        self.talk = Talk(pawl)
        self.effects = folder / f"effects-{uuid.uuid4().hex}"

    @abstractmethod
    async def begin(self) -> None:
        """Start the work, and return when the user has done their part."""

    @abstractmethod
    async def is_in_the_middle(self) -> bool:
        """Return whether some of the work is done and some is not."""

    @abstractmethod
    async def check(self) -> None:
        """Wait for the end of the work and check it."""

    async def start_job(self, tool: str, arguments: Mapping[str, object]) -> str:
        (job_id,) = await self.talk.jobs(await self.talk.say(in_background(tool, **arguments)))
        return job_id


class OneShotJob(Story):
    async def begin(self) -> None:
        self.job_id = await self.start_job(
            "act_once", {"path": str(self.effects), "seconds": 600.0 if self.tools_die else 3.0}
        )

    async def is_in_the_middle(self) -> bool:
        return count_of(self.effects) == 1

    async def check(self) -> None:
        job = await self.talk.ended(self.job_id)
        if self.tools_die:
            assert (job.state, job.failure.reason) == (run_pb2.RUN_STATE_FAILED, "OUTCOME_UNKNOWN")
        else:
            assert job.state == COMPLETED
        (notice,) = await self.talk.end_reported(self.job_id)
        assert notice["state"] == ("FAILED" if self.tools_die else "COMPLETED")
        assert count_of(self.effects) == 1


class PlainSeries(Story):
    async def begin(self) -> None:
        self.job_id = await self.start_job("calculate", {"expression": "5 * 5", "_interval": 0.5, "_stopAfter": 8})

    async def is_in_the_middle(self) -> bool:
        return (await self.pawl.get(self.job_id)).round >= 2

    async def check(self) -> None:
        job = await self.talk.ended(self.job_id)
        assert (job.state, job.round) == (COMPLETED, 8)
        begin = job.job.begin_time.ToNanoseconds()
        beats = [int((call.create_time.ToNanoseconds() - begin) / 5e8) async for call in self.pawl.calls(self.job_id)]
        assert beats == sorted(set(beats)), "at most one per due time"
        # The last iteration may be recorded an interval late or more, if nothing could be written.
        assert beats[-2] + 2 <= len(beats) + job.missed_iterations <= beats[-1] + 1
        reported = await self.talk.end_reported(self.job_id)
        iterations = [int(str(notice["iteration"])) for notice in reported if not is_end(notice)]
        assert iterations == sorted(set(iterations)), "each is reported at most once, in order"
        assert [is_end(notice) for notice in reported].count(True) == 1


class Monitor(Story):
    """A monitor that runs until a price is below 20 and notifies the model once when it is below 30."""

    async def begin(self) -> None:
        self.effects.write_text("25")
        watch = {"_interval": 0.5, "_duration": 5, "_until": "value.price < 20", "_when": "value.price < 30"}
        self.job_id = await self.start_job("look_up_price", {"path": str(self.effects), **watch})

    async def is_in_the_middle(self) -> bool:
        return (await self.pawl.get(self.job_id)).round >= 2

    async def check(self) -> None:
        seen = (await self.pawl.get(self.job_id)).round
        await self.talk.job(self.job_id, lambda job: job.round >= seen + 2)
        put(self.effects, "19.5")
        job = await self.talk.ended(self.job_id)
        found = {"met": True, "fired": 1, "fired_with": {"price": 25.0}, "result": {"price": 19.5}}
        assert (job.state, json.loads(job.output_text)) == (COMPLETED, found)
        reported = await self.talk.end_reported(self.job_id)
        assert [is_end(notice) for notice in reported] == [False, True], "that it fired, and the end"
        assert reported[-1]["result"] == found


class GrantedSeries(Story):
    async def begin(self) -> None:
        payment = {"path": str(self.effects), "seconds": 0.1}
        self.job_id = await self.start_job("pay_once", payment | {"_interval": 1, "_stopAfter": 5})
        await self.pawl.decide(approve(await waiting(self.talk, self.job_id), for_series=True))

    async def is_in_the_middle(self) -> bool:
        return count_of(self.effects) >= 2

    async def check(self) -> None:
        job = await self.talk.ended(self.job_id)
        assert (job.state, job.round, job.grant.uses) == (COMPLETED, 5, 5)
        calls = [call async for call in self.pawl.calls(self.job_id)]
        assert sum(call.approval.HasField("decision") for call in calls) == 1, "no further approval was requested"
        unknown = sum(call.state == call_pb2.CALL_STATE_OUTCOME_UNKNOWN for call in calls)
        assert 5 - unknown <= count_of(self.effects) <= 5
        assert unknown <= self.tools_die


class ScheduleFires(Story):
    async def begin(self) -> None:
        definition = schedule_pb2.ScheduleDefinition(
            name="tick",
            text="what is 6 * 7?",
            interval_seconds=1,
            overlap=schedule_pb2.SCHEDULE_OVERLAP_ALLOW,
            labels={"of": "tick"},
        )
        await self.pawl.create_schedule(definition)
        self._fires: dict[int, schedule_pb2.ScheduleFire] = {}
        self._poll_task = asyncio.create_task(self._look_on())

    async def _look_on(self) -> None:
        # Pawl keeps twenty firings, and a busy machine may need more time than that.
        while True:
            await self._look()
            await asyncio.sleep(0.5)

    async def _look(self) -> None:
        fires = (await self.pawl.get_schedule("tick")).fires
        self._fires |= {fire.due_time.seconds: fire for fire in fires}

    async def is_in_the_middle(self) -> bool:
        await self._look()
        return len(self._fires) >= 2

    async def check(self) -> None:
        await self._look()
        seen = max(self._fires)

        async def continues() -> bool:
            await self._look()
            return max(self._fires) >= seen + 2

        await until(continues)
        await self.pawl.pause_schedule("tick")
        await self._look()
        assert not self._poll_task.done()
        self._poll_task.cancel()
        times = sorted(self._fires)
        assert times == list(range(times[0], times[0] + len(times)))
        assert {fire.outcome for fire in self._fires.values()} == {STARTED}
        await _each_has_its_run(self, "tick", [fire.run_id for fire in self._fires.values()])


class TriggerEvents(Story):
    _COUNT: Final = 20

    async def begin(self) -> None:
        definition = trigger_pb2.TriggerDefinition(
            name="orders", text="what is 6 * 7?", webhook=trigger_pb2.WebhookSource(), labels={"of": "orders"}
        )
        trigger, self._secret = await self.pawl.create_trigger(definition)
        self._trigger_id = trigger.trigger_id
        self._runs: dict[int, str] = {}
        self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        for number in range(self._COUNT):
            self._runs[number] = await self._deliver(number)
            await asyncio.sleep(0.05)

    async def _deliver(self, number: int) -> str:
        body, now = json.dumps({"order": number}), datetime.now(UTC)
        headers = {
            "Webhook-Id": f"msg_{number}",
            "Webhook-Timestamp": str(int(now.timestamp())),
            "Webhook-Signature": Webhook(self._secret).sign(f"msg_{number}", now, body),
            "Content-Type": "application/json",
        }
        response = await self.pawl.deliver_webhook(self._trigger_id, headers, body.encode())
        assert response.fire.outcome == STARTED
        return response.fire.run_id

    async def is_in_the_middle(self) -> bool:
        return len(self._runs) >= 3

    async def check(self) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self._sending
        again = await asyncio.gather(*map(self._deliver, range(self._COUNT)))
        assert again == [self._runs[number] for number in range(self._COUNT)]
        await _each_has_its_run(self, "orders", again)


async def _each_has_its_run(story: Story, label: str, runs: list[str]) -> None:
    (store,) = (value for name, value in story.pawl.metadata if name == "pawl-store")
    query = "SELECT run_id FROM job_store.runs WHERE store_id = $1 AND labels LIKE '%of=' || $2"
    made = [record["run_id"] for record in await story.world.database(query, store, label)]
    assert sorted(made) == sorted(runs)
    assert len(set(runs)) == len(runs)
    async with asyncio.timeout(PATIENCE_SECONDS):
        ended = await asyncio.gather(*map(story.pawl.result, runs))
    assert {(run.state, run.output_text) for run in ended} == {(COMPLETED, "6 * 7 = 42.")}


class _EndNotifications(Story):
    """Notifications about the ends of some runs. The receiver answers the first notification late."""

    def __init__(self, world: World, pawl: AsyncClient, folder: Path, *, tools_die: bool = False) -> None:
        super().__init__(world, pawl, folder, tools_die=tools_die)
        self.held = asyncio.Event()

    async def begin(self) -> None:
        self._channel_id = await self.make_channel()
        self._runs = [await self.pawl.start(text) for text in ("what is 6 * 7?", "count to 12 slowly")]

    async def is_in_the_middle(self) -> bool:
        return len(self.came()) >= 1  # both: neither is answered if the first run could not start its tool

    async def check(self) -> None:
        self.held.set()
        # The claim of a dead process ends after half a minute, and the next attempt is due even later.
        await self.world.database("UPDATE notifier.webhook_deliveries SET due_time = now() WHERE claimed")
        await until(self._are_delivered, patience_seconds=PATIENCE_SECONDS)
        assert len({each for each, _ in self.came()}) == len(self._runs), "each has its own id"
        assert len(set(self.came())) == len(self._runs), "with the same content each time"

    async def _are_delivered(self) -> bool:
        await self.world.database(
            "UPDATE notifier.webhook_deliveries SET due_time = now()"
            " WHERE state = 'waiting' AND NOT claimed AND due_time > now() AND webhook_id = $1",
            self._channel_id,
        )
        request = channel_pb2.ListDeliveriesRequest(channel_id=self._channel_id)
        found = (await self.pawl.again(self.pawl.notify_channels.ListDeliveries, request)).deliveries
        reported = [each for each in found if each.type == "run.completed"]
        states = [each.state for each in reported]
        return states == [channel_pb2.CHANNEL_DELIVERY_STATE_DELIVERED] * len(self._runs)

    async def create(self, url: str) -> str:
        kinds = [notify_pb2.NOTIFICATION_KIND_RUN_COMPLETED]
        channel = channel_pb2.Channel(url=url, kinds=kinds, after_seconds=0)
        request = channel_pb2.CreateChannelRequest(channel=channel)
        return (await self.pawl.notify_channels.CreateChannel(request)).channel.channel_id

    @abstractmethod
    async def make_channel(self) -> str:
        """Create the channel, hold what arrives on it, and return its id."""

    @abstractmethod
    def came(self) -> list[tuple[str, bytes]]:
        """Return the id and text of each received notification, including repeats."""


class WebhookDelivery(_EndNotifications):
    async def make_channel(self) -> str:
        self._path = f"/{uuid.uuid4().hex}"
        self.world.receiver.answer = lambda _: Reply(held=self.held)
        return await self.create(f"http://127.0.0.1:{self.world.receiver.port}{self._path}")

    def came(self) -> list[tuple[str, bytes]]:
        asked = [each for each in self.world.receiver.asked if each.target == self._path]
        return [(each.headers["webhook-id"], each.body) for each in asked]


class Mail(_EndNotifications):
    async def make_channel(self) -> str:
        self._address = f"{uuid.uuid4().hex}@example.org"
        postbox = self.world.postbox
        postbox.held = None
        channel_id = await self.create(f"mailto:{self._address}")
        await until(self._mails)
        confirm = channel_pb2.ConfirmChannelRequest(channel_id=channel_id, code=postbox.codes()[-1])
        await self.pawl.notify_channels.ConfirmChannel(confirm)
        postbox.held = self.held
        return channel_id

    def _mails(self) -> list[Any]:
        return [each for each in self.world.postbox.messages() if each["To"] == self._address]

    def came(self) -> list[tuple[str, bytes]]:
        reported = [each for each in self._mails() if "confirm" not in str(each["Subject"]).lower()]
        return [(str(each["Message-ID"]), each.as_bytes()) for each in reported]


_CHECKERS: Final = (
    checkers.runs_do_not_fail,
    checkers.terminal_states_are_final,
    checkers.logs_have_no_gaps,
    checkers.earlier_owners_stop_writing,
    *LEDGER_CHECKERS,
)
# Checkers of things that happen a little later.
_IN_TIME: Final = (checkers.runs_end, checkers.every_run_end_is_notified, checkers.job_ends_are_reported)


async def check_ledger(pawl: AsyncClient) -> None:
    """Check the client's store after its runs have ended and their ends were reported."""
    record = await _read(pawl)

    async def is_quiet() -> bool:
        nonlocal record
        record = await _read(pawl)
        return not list(_wrong(record, _IN_TIME))

    with suppress(TimeoutError):
        await until(is_quiet)
    assert list(_wrong(record, _IN_TIME)) == []
    assert list(_wrong(record, _CHECKERS)) == []


def _wrong(record: Record, wanted: tuple[checkers.Checker, ...]) -> Iterator[str]:
    return (f"{checker.__name__}: {found}" for checker in wanted for found in checker(record))


async def _read(pawl: AsyncClient) -> Record:
    record = Record(history=History())
    record.runs = {run.run_id: run async for run in pawl.runs()}
    for run in record.runs.values():
        record.calls |= {call.call_id: call async for call in pawl.calls(run.run_id)}
        record.messages[run.conversation_id] = [message async for message in pawl.messages(run.conversation_id)]
        if run_state(run.state) in ENDED:
            record.logs[run.run_id] = [
                each async for each in pawl.watch(run.run_id) if isinstance(each, event_pb2.RunEvent)
            ]
    request = notify_pb2.ListNotificationsRequest()
    pages = [page async for page in pawl.pages(pawl.notifier.ListNotifications, request)]
    record.notifications["", ""] = [reported for page in pages for reported in page.notifications]
    return record
