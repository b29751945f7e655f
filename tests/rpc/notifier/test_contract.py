"""The repositories of the notifier on PostgreSQL, compared with a model in memory.

The same seeded walk goes over both: each answer and all that users see of it afterwards.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from random import Random
from typing import Any

import pytest

from pawl.chassis.database import Database
from pawl.chassis.erasures import ErasurePart
from pawl.chassis.ids import ConversationId, RunId, StoreId, UserId
from pawl.errors import PawlError
from pawl.notifier.adapters.channels import PostgresChannels
from pawl.notifier.adapters.deliveries import PostgresDeliveries
from pawl.notifier.adapters.postgres import SCHEMA, PostgresStore
from pawl.notifier.adapters.preferences import PostgresPreferences
from pawl.notifier.app.ports import (
    ChannelRepository,
    DeliveryQueue,
    NewChannel,
    NewCode,
    PreferenceRepository,
    Store,
)
from pawl.notifier.domain.announcement import Over
from pawl.notifier.domain.channel import Channel, ChannelId
from pawl.notifier.domain.delivery import (
    TEST,
    Attempt,
    Candidate,
    ChannelDelivery,
    DeliveryFilter,
    DeliveryId,
    DeliveryState,
    Outcome,
)
from pawl.notifier.domain.notification import (
    Draft,
    EventId,
    Inbox,
    NotificationId,
    NotificationKind,
    NotificationKinds,
)
from pawl.notifier.domain.preferences import Mute, PreferencesChange
from tests import databases
from tests.ledger.stores import BEGIN, stop_clock
from tests.rpc.notifier.model_channels import MemoryChannels, MemoryDeliveries
from tests.rpc.notifier.model_inboxes import MemoryInboxes, MemoryPreferences
from tests.rpc.notifier.model_rows import NotifierRows

_WALKS = int(os.environ.get("PAWL_TEST_EXAMPLES", "2"))
_STEPS = 250
_STORE = StoreId("acme")
_INBOXES = tuple(Inbox(store_id=_STORE, user_id=UserId(user)) for user in ("ann", "bob"))
_CONVERSATIONS = tuple(map(ConversationId, ("conv_1", "conv_2", "conv_3", "conv_4")))
_OUTCOMES = (
    Outcome(status=200, latency_seconds=0.25),
    Outcome(status=200),
    Outcome(status=500),
    Outcome(status=503, retry_after_seconds=600.0),
    Outcome(status=410),
    Outcome(error="nobody answers", latency_seconds=15.0),
    Outcome(error="it is refused", is_final=True),
    Outcome(error="the way there is closed", is_receivers=False),
)
_DEFAULTS = (
    ("notifier.notifications", "insert_time"),
    ("notifier.webhook_deliveries", "insert_time"),
    ("notifier.webhook_deliveries", "due_time"),
    ("notifier.channel_events", "time"),
    ("notifier.viewers", "seen_time"),
)
_WIPE = """
TRUNCATE notifier.inboxes, notifier.notifications, notifier.approvers, notifier.erased_conversations, notifier.webhooks,
    notifier.webhook_deliveries, notifier.preferences, notifier.mutes, notifier.channel_events,
    notifier.viewers
"""


@dataclass(frozen=True, kw_only=True)
class _Side:
    """All ports of a notifier over one database."""

    store: Store
    channels: ChannelRepository
    queue: DeliveryQueue
    preferences: PreferenceRepository
    erase: Callable[[ErasurePart], Awaitable[None]]


class _Walk:
    """Does the same on both sides, by chance, and compares."""

    def __init__(self, seed: int, real: Database) -> None:
        self.now = BEGIN
        self.real = real
        self.draw = Random(seed)
        memory = NotifierRows(lambda: self.now)
        inboxes, store = MemoryInboxes(memory), PostgresStore(real)
        self.sides = (
            _Side(
                store=inboxes,
                channels=MemoryChannels(memory),
                queue=MemoryDeliveries(memory),
                preferences=MemoryPreferences(memory),
                erase=inboxes.erase,
            ),
            _Side(
                store=store,
                channels=PostgresChannels(real),
                queue=PostgresDeliveries(real),
                preferences=PostgresPreferences(real),
                erase=store.erase,
            ),
        )
        self.channel_ids: list[ChannelId] = []
        self.attempts: list[Attempt] = []
        self.count = self.tried = 0

    async def both(self, ask: Callable[[_Side], Awaitable[Any]]) -> Any:
        """Ask both sides the same; return the answer, an error too, once it is one."""
        answers: list[Any] = []
        for side in self.sides:
            try:
                answers.append(await ask(side))
            except PawlError as error:
                answers.append((type(error), error.message))
        assert answers[0] == answers[1]
        return answers[0]

    async def step(self) -> None:
        self.count += 1
        await self.pass_time(0.001)
        often = [*[self.add] * 8, *[self.claim] * 8, *[self.settle] * 10, *[self.create] * 2, *[self.wait] * 3]
        others = [self.change, self.give_back, self.delete, self.mute, self.prefer, self.resend, self.test, self.read]
        await self.draw.choice(
            [*often, *others, self.note_over, self.erase, self.rotate, self.tell, self.view, self.wait_for_people]
        )()
        if self.count % 5 == 0:
            await self.compare()

    async def pass_time(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)
        await self.real.execute("UPDATE still.clock SET time = $1", self.now)

    async def wait(self) -> None:
        await self.pass_time(self.draw.choice([1.0, 6.0, 6.0, 6.0, 40.0, 400.0, 20_000.0, 300_000.0]))

    async def add(self) -> None:
        draft = Draft(
            inbox=self.draw.choice(_INBOXES),
            notification_id=NotificationId(f"ntf_{self.draw.randrange(self.count + 1)}"),
            kind=self.draw.choice([kind for kind in NotificationKind if kind is not NotificationKind.CHANNEL_DISABLED]),
            run_id=RunId(f"run_{self.draw.randrange(3)}"),
            conversation_id=self.draw.choice(_CONVERSATIONS),
            event_id=EventId(f"evt_{self.count}"),
            title=f"About {self.count}",
            create_time=self.now,
        )
        await self.both(lambda side: side.store.add([draft, draft]))

    async def create(self) -> None:
        inbox, number = self.draw.choice(_INBOXES), self.draw.randrange(self.count + 1)
        channel = Channel(
            channel_id=ChannelId(f"hook_{self.count}"),
            name=f"number {number}",
            url=f"https://{self.draw.choice('ab')}.example.com/{number}",
            kinds=self.draw.choice([(), (), (NotificationKind.RUN_COMPLETED,)]),
            after_seconds=self.draw.choice([0, 0, 10]),
            create_time=self.now,
        )
        new = NewChannel(
            inbox=inbox,
            channel=channel,
            host=channel.url[8:9],
            secret=self.draw.randbytes(32),
            request_id=self.draw.choice(["", f"req_{number}"]),
            request_hash=str(number % 2).encode(),
        )
        made = await self.both(lambda side: side.channels.create(new))
        if isinstance(made, Channel) and made.channel_id not in self.channel_ids:
            self.channel_ids.append(made.channel_id)

    def some(self) -> tuple[Inbox, ChannelId]:
        return self.draw.choice(_INBOXES), self.draw.choice([*self.channel_ids, ChannelId("hook_0")])

    async def change(self) -> None:
        inbox, channel_id = self.some()
        url = self.draw.choice(["", "", f"https://c.example.com/{self.count}"])
        is_enabled = self.draw.random() < 0.7

        def changed(before: Channel) -> tuple[Channel, str]:
            asked = replace(before, url=url or before.url, enabled=is_enabled)
            return asked, asked.url[8:9]

        code = NewCode(delivery=self.own(channel_id), secret=b"")
        await self.both(lambda side: side.channels.update(inbox, channel_id, changed, code=code))

    async def delete(self) -> None:
        if self.draw.random() < 0.5:
            inbox, channel_id = self.some()
            await self.both(lambda side: side.channels.delete(inbox, channel_id))

    async def rotate(self) -> None:
        (inbox, channel_id), secret = self.some(), self.draw.randbytes(32)
        await self.both(lambda side: side.channels.rotate(inbox, channel_id, secret))

    def own(self, channel_id: ChannelId) -> ChannelDelivery:
        return ChannelDelivery(
            delivery_id=DeliveryId(f"dlv_test_{self.count}"),
            channel_id=channel_id,
            type=TEST,
            number=0,
            state=DeliveryState.WAITING,
            tries=0,
            create_time=self.now,
        )

    async def test(self) -> None:
        inbox, channel_id = self.some()
        test = self.own(channel_id)
        await self.both(lambda side: side.channels.add_test(inbox, test, '{"type":"channel.test"}'))

    async def resend(self) -> None:
        inbox, channel_id = self.some()
        states = tuple(self.draw.sample(list(DeliveryState), self.draw.randrange(3)))
        wanted = DeliveryFilter(channel_id=self.draw.choice([channel_id, ChannelId("")]), states=states)
        found = await self.both(lambda side: side.channels.deliveries(inbox, wanted, None, limit=100))
        await self.both(lambda side: side.channels.count_deliveries(inbox, wanted.channel_id))
        if isinstance(found, list) and found:
            ids = [each.delivery_id for each in self.draw.sample(found, min(len(found), 2))]
            await self.both(lambda side: side.channels.resend(self.draw_inbox(inbox), ids))

    async def view(self) -> None:
        run_ids = [RunId(f"run_{self.draw.randrange(3)}") for _ in range(2)]
        viewers = {(self.draw.choice(_INBOXES), run_id) for run_id in run_ids}
        await self.both(lambda side: side.queue.note_viewers(viewers))

    async def wait_for_people(self) -> None:
        asked = {(inbox, conversation_id) for inbox in _INBOXES for conversation_id in _CONVERSATIONS}
        await self.both(lambda side: side.store.waiting(asked))

    def draw_inbox(self, inbox: Inbox) -> Inbox:
        return inbox if self.count % 5 else _INBOXES[inbox == _INBOXES[0]]

    async def claim(self) -> None:
        at_work = [attempt.candidate for attempt in self.attempts]
        found: list[Sequence[Candidate]] = [await side.queue.due(at_work, limit=500) for side in self.sides]
        # Of what is due at the same moment, a channel that fails gets any one.
        shown = [sorted((c.channel_id, "" if c.is_failing else c.delivery_id, c.host) for c in each) for each in found]
        assert shown[0] == shown[1]
        attempts = await self.both(lambda side: side.queue.claim(found[1], seconds=30.0))
        self.attempts += attempts

    async def settle(self) -> None:
        if self.attempts:
            attempt = self.attempts.pop(self.draw.randrange(len(self.attempts)))
            outcome, chance = self.draw.choice(_OUTCOMES), self.draw.random()
            self.tried += await self.both(lambda side: side.queue.settle(attempt, outcome, chance=chance)) is not None

    async def give_back(self) -> None:
        given = [attempt for attempt in self.attempts if self.draw.random() < 0.3]
        self.attempts = [attempt for attempt in self.attempts if attempt not in given]
        await self.both(lambda side: side.queue.give_back(given))

    async def mute(self) -> None:
        inbox, conversation_id = self.draw.choice(_INBOXES), self.draw.choice(_CONVERSATIONS)
        if self.draw.random() < 0.5:
            await self.both(lambda side: side.preferences.unmute(inbox, conversation_id))
            return
        until = self.draw.choice([None, self.now + timedelta(seconds=30)])
        mute = Mute(conversation_id=conversation_id, until_time=until)
        await self.both(lambda side: side.preferences.mute(inbox, mute))

    async def prefer(self) -> None:
        inbox = self.draw.choice(_INBOXES)
        kinds = self.draw.choice([(), (NotificationKind.RUN_COMPLETED, NotificationKind.RUN_FAILED)])
        change = PreferencesChange(kinds=NotificationKinds(kinds=kinds))
        await self.both(lambda side: side.preferences.change(inbox, change))

    async def read(self) -> None:
        inbox, approves = self.draw.choice(_INBOXES), self.draw.random() < 0.5
        seen = await self.both(lambda side: side.store.read_after(inbox, 0, approves=True, limit=500))
        if seen:
            ids = [self.draw.choice(seen).draft.notification_id]
            await self.both(lambda side: side.store.acknowledge(inbox, ids, approves=approves))
        await self.both(
            lambda side: side.store.read_before(inbox, len(seen), only_unread=approves, approves=approves, limit=5)
        )

    async def note_over(self) -> None:
        over = Over(
            store_id=_STORE, run_id=RunId(f"run_{self.draw.randrange(3)}"), time=self.now, run_ended=self.count % 2 == 0
        )
        await self.both(lambda side: side.store.note_over([over]))

    async def erase(self) -> None:
        if self.draw.random() < 0.2:
            conversation_id = self.draw.choice(_CONVERSATIONS)
            part = ErasurePart(store_id=_STORE, conversation_id=conversation_id, run_ids=(), call_ids=())
            await self.both(lambda side: side.erase(part))

    async def tell(self) -> None:
        told: list[list[object]] = []
        for side in self.sides:
            async with side.store.untold(limit=500) as events:
                told.append([*sorted((replace(event, event_id="") for event in events), key=repr)])
            async with side.store.unpublished(limit=500) as notifications:
                told[-1] += sorted(notifications, key=repr)
        assert told[0] == told[1]

    async def compare(self) -> None:
        """All that users see is the same."""
        for inbox in _INBOXES:
            await self.both(lambda side, inbox=inbox: side.channels.channels(inbox))  # type: ignore[misc]
            await self.both(lambda side, inbox=inbox: side.preferences.preferences(inbox))  # type: ignore[misc]
            await self.both(lambda side, inbox=inbox: side.store.count_unread(inbox, approves=True))  # type: ignore[misc]
            for channel_id in self.channel_ids:
                wanted = DeliveryFilter(channel_id=channel_id)
                await self.both(lambda side, of=(inbox, wanted): side.channels.deliveries(*of, None, limit=500))  # type: ignore[misc]
        await self.both(lambda side: side.store.last_numbers(_INBOXES))
        await self.both(lambda side: side.queue.count_waiting())


@pytest.fixture
def own_url(postgres_url: str) -> Iterator[str]:
    """The URL of a database of its own."""
    with databases.ServiceDatabase(postgres_url, SCHEMA) as made:
        yield made.url


@pytest.fixture
async def still(own_url: str) -> AsyncIterator[Database]:
    """A notifier's database whose clock stands still."""
    await stop_clock(own_url)
    async with Database(own_url, application_name="test") as database:
        for table, column in _DEFAULTS:
            await database.execute(f"ALTER TABLE {table} ALTER {column} SET DEFAULT still.now()")
        yield database


async def test_the_notifier_of_the_simulation_answers_as_the_real_one(still: Database) -> None:
    """Seeded walks. `PAWL_TEST_EXAMPLES=100` walks longer."""
    tried = 0
    for seed in range(_WALKS):
        await still.execute(_WIPE)
        walk = _Walk(seed, still)
        for _ in range(_STEPS):
            await walk.step()
        tried += walk.tried
    assert tried > 10
