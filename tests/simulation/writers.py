"""Users who write a lot: into another user's conversation, or to a run that does not read its messages.

The owner of the other conversation repeatedly shares it and makes it private. Unread messages fill an inbox up to its
limits.
"""

from __future__ import annotations

import asyncio

from pawl.agent.v1 import conversation_pb2 as pb
from pawl.chassis.ids import ConversationId
from pawl.event.v1 import conversation_pb2
from pawl.job_store.ledger.rules.rows import ConversationKey
from pawl.values import MessagePolicy
from tests.simulation.people import STORE, User

_RATE = 0.25
_UPDATE = "/pawl.agent.v1.ConversationService/UpdateConversation"


class Writer(User):
    def __init__(self, host: User) -> None:
        super().__init__(host.world, f"{host.name}writer", front_end=False)
        self._host = host
        self._sharing = host.world.chance.stream("sharing", host.name)
        self._count = 1  # The conversation exists, so no message of the writer creates it.

    async def live(self) -> None:
        while not (self._host.run_ids or self._host.done):
            await asyncio.sleep(1.0)
        self.conversation_id = self._host.conversation_id
        await self._share(conversation_pb2.SHARING_WRITE)
        sharing = asyncio.create_task(self._change_sharing())
        await super().live()
        await sharing

    async def _change_sharing(self) -> None:
        await asyncio.sleep(14.0 * self._sharing.random())
        if self._sharing.random() < 0.4:
            self.world.history.made_private.add(self.conversation_id)
            await self._share(conversation_pb2.SHARING_PRIVATE)
            await asyncio.sleep(3.0 * self._sharing.random())
            await self._share(conversation_pb2.SHARING_WRITE)
            await self.send_message(MessagePolicy.QUEUE)

    async def _share(self, sharing: conversation_pb2.Sharing.ValueType) -> None:
        caller, request_id = self._host.caller, f"share_{self.name}_{self._next()}"
        request = pb.UpdateConversationRequest(
            request_id=request_id, conversation_id=self.conversation_id, sharing=sharing
        )
        await self.world.insist(
            self.network,
            self._sharing,
            "share",
            lambda agent: agent.ledger.forward(caller, _UPDATE, request.SerializeToString()),
        )


def writers_of(users: list[User]) -> list[User]:
    hosts = (user for user in users if user.world.chance.stream("writers", user.name).random() < _RATE)
    return [Writer(host) for host in hosts]


_TALKATIVE = 0.3
_LENGTHS = (0, 2500, 5000)


class Talker:
    def __init__(self, user: User) -> None:
        self._user = user
        self._draw = user.world.chance.stream("talker", user.name)
        user.result_padding = self._draw.choice([0, 15_000])

    async def live(self) -> None:
        user = self._user
        while not user.world.chance.calm and not user.done:
            await asyncio.sleep(6.0 * self._draw.random())
            length = self._draw.choice(_LENGTHS)
            for _ in range(self._draw.randrange(4, 20)):
                conversation = user.world.tables.conversations.get(
                    ConversationKey(STORE, ConversationId(user.conversation_id))
                )
                if conversation is None or conversation.active_run_id is None:
                    break
                await user.send_message(MessagePolicy.STEER, padding=length)


def talkers_of(users: list[User]) -> list[Talker]:
    return [Talker(user) for user in users if user.world.chance.stream("talks", user.name).random() < _TALKATIVE]
