"""Users who send many messages to a run that does not read them, so that its inbox reaches its limits."""

from __future__ import annotations

import asyncio

from pawl.chassis.ids import ConversationId
from pawl.job_store.ledger.rules.rows import ConversationKey
from pawl.values import MessagePolicy
from tests.simulation.people import STORE, User

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


def of(users: list[User]) -> list[Talker]:
    return [Talker(user) for user in users if user.world.chance.stream("talks", user.name).random() < _TALKATIVE]
