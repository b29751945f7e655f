"""Users who are told by webhooks: they make channels, and mute, disable, test, resend, delete and erase."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pawl.chassis.erasures import ErasurePart
from pawl.chassis.ids import ConversationId
from pawl.errors import PawlError
from pawl.notifier.domain.channel import Channel, ChannelChange, ChannelId
from pawl.notifier.domain.delivery import DeliveryFilter
from pawl.notifier.domain.notification import Inbox, NotificationKind
from pawl.notifier.domain.preferences import Mute
from tests.simulation.history import ChannelAct
from tests.simulation.network import Network
from tests.simulation.notifier import NotifierProcess, Notifiers
from tests.simulation.people import User
from tests.simulation.receivers import KINDS
from tests.simulation.world import AGAIN

T = TypeVar("T")

_KINDS = ((), (), (NotificationKind.RUN_COMPLETED, NotificationKind.RUN_CANCELLED))
_PAUSE_SECONDS = 0.3


class Subscriber:
    """The channels of one user."""

    def __init__(self, user: User, notifiers: Notifiers, *, approves: bool) -> None:
        self._user = user
        self._notifiers = notifiers
        self._inbox = Inbox(store_id=user.caller.store_id, user_id=user.caller.user_id)
        self._approves = approves
        self._history = user.world.history
        self._draw = user.world.chance.stream("subscriber", user.name)
        self._network = Network(user.world.chance, self._history, f"subscriber {user.name}")
        self._channel_ids: list[ChannelId] = []
        self._muted: set[str] = set()

    async def live(self) -> None:
        """Make channels, and do something about them until all is calm; half of the users silence none of them."""
        if self._approves:
            await self._ask("note_approver", lambda notifier: notifier.inboxes.note_approver(self._inbox))
        for number in range(self._draw.choice([1, 1, 2])):
            await self._create(number)
        acts = [self._test, self._resend, self._rotate]
        if self._draw.random() < 0.5:
            acts += [self._mute, self._mute, self._unmute, self._disable, self._enable, self._enable]
            acts += [self._delete, self._erase]
        while not self._notifiers.world.chance.calm:
            await asyncio.sleep(6.0 * self._draw.random())
            if self._draw.random() < 0.6:
                await self._draw.choice(acts)()

    async def _create(self, number: int) -> None:
        url = f"https://{self._user.name}.example.com/{number}"
        self._notifiers.receivers.kinds[url] = self._draw.choice(KINDS)
        asked = Channel(
            channel_id=ChannelId(""),
            name=f"number {number}",
            url=url,
            kinds=self._draw.choice(_KINDS),
            after_seconds=self._draw.choice([0, 0, 3]),
        )
        request_id = f"req_{self._user.name}_channel_{number}"
        made = await self._do("create", lambda notifier: notifier.channels.create(self._inbox, asked, request_id))
        if made is not None:
            self._channel_ids.append(made[0].channel_id)

    async def _test(self) -> None:
        channel_id = self._draw.choice(self._channel_ids)
        await self._do("test", lambda notifier: notifier.channels.test(self._inbox, channel_id))

    async def _rotate(self) -> None:
        channel_id = self._draw.choice(self._channel_ids)
        await self._do("rotate", lambda notifier: notifier.channels.rotate(self._inbox, channel_id))

    async def _resend(self) -> None:
        wanted = DeliveryFilter(channel_id=self._draw.choice(self._channel_ids))
        found = await self._do(
            "list", lambda notifier: notifier.repository.deliveries(self._inbox, wanted, None, limit=20)
        )
        if found:
            delivery_id = self._draw.choice(found).delivery_id
            await self._do("resend", lambda notifier: notifier.channels.resend(self._inbox, [delivery_id]))

    async def _disable(self) -> None:
        await self._enable(enabled=False)

    async def _enable(self, *, enabled: bool = True) -> None:
        channel_id = self._draw.choice(self._channel_ids)
        change = ChannelChange(channel_id=channel_id, enabled=enabled)
        kind = "enable" if enabled else "disable"
        await self._do(kind, lambda notifier: notifier.channels.update(self._inbox, change), channel_id=channel_id)

    async def _delete(self) -> None:
        channel_id = self._draw.choice(self._channel_ids)
        await self._do(
            "delete", lambda notifier: notifier.repository.delete(self._inbox, channel_id), channel_id=channel_id
        )

    async def _mute(self) -> None:
        """Mute a conversation, each once: a copy of a later unmute that comes late would end a second one."""
        conversation_id = self._user.conversation_id
        if conversation_id not in self._muted:
            self._muted.add(conversation_id)
            mute = Mute(conversation_id=ConversationId(conversation_id))
            work: Callable[[NotifierProcess], Awaitable[Any]]
            work = lambda notifier: notifier.preferences.mute(self._inbox, mute)  # noqa: E731
            await self._do("mute", work, conversation_id=conversation_id)

    async def _unmute(self) -> None:
        conversation_id = self._user.conversation_id
        if conversation_id in self._muted:
            of = (self._inbox, ConversationId(conversation_id))
            await self._do("unmute", lambda notifier: notifier.preferences.unmute(*of), conversation_id=conversation_id)

    async def _erase(self) -> None:
        conversation_id = ConversationId(self._user.conversation_id)
        part = ErasurePart(store_id=self._inbox.store_id, conversation_id=conversation_id, run_ids=(), call_ids=())
        await self._do("erase", lambda notifier: notifier.inboxes.erase(part), conversation_id=conversation_id)

    async def _do(
        self,
        kind: str,
        work: Callable[[NotifierProcess], Awaitable[T]],
        *,
        channel_id: str = "",
        conversation_id: str = "",
    ) -> T | None:
        """Do something until it is acknowledged; None if it was refused."""
        loop = asyncio.get_running_loop()
        act = ChannelAct(
            kind=kind,
            user_id=self._inbox.user_id,
            begin=loop.time(),
            channel_id=channel_id,
            conversation_id=conversation_id,
        )
        self._history.channel_acts.append(act)
        try:
            done = await self._ask(kind, work)
        except PawlError as error:
            self._history.tell(f"{kind} of a channel refused: {error.reason}")
            return None
        act.end = loop.time()
        if kind == "create":
            act.channel_id = done[0].channel_id  # type: ignore[index]  # a channel and its secret
        return done

    async def _ask(self, what: str, work: Callable[[NotifierProcess], Awaitable[T]]) -> T:
        while True:
            alive = [each for each in self._notifiers.replicas if each.process.alive]
            replica = self._draw.choice(alive)
            try:
                return await self._network.call(replica.process, what, lambda replica=replica: work(replica))  # type: ignore[misc]
            except AGAIN:
                await asyncio.sleep(_PAUSE_SECONDS * (0.5 + self._draw.random()))
