"""Conversations that are imported, forked, erased and gone on with in any order, on PostgreSQL.

What a worker is given of them is what one expects, and a strict model server takes it. Nothing erased is left.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from random import Random

import pytest

from pawl.agent_loop.adapters import wire
from pawl.agent_loop.domain import history
from pawl.agent_loop.domain.state import State
from pawl.errors import ConversationErased, ConversationNotFound, ForkPointOpen
from pawl.event.v1 import call_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from tests.fakes.provider import check_history
from tests.rpc.job_store.conftest import Replica
from tests.rpc.job_store.test_erasures import Log, erase, erasing, everything, swept
from tests.rpc.job_store.test_forks import fork, texts
from tests.rpc.job_store.user import User, result

_WALKS = 3
_STEPS = 24


@dataclass
class Entry:
    """A message, the conversation that it was written in, and whether it is an answer."""

    number: int
    text: str
    written_in: str
    is_answer: bool


@dataclass
class Talk:
    """A conversation as one expects it."""

    conversation_id: str
    last_number: int = 0
    entries: list[Entry] = field(default_factory=list)

    def add(self, text: str, *, is_answer: bool) -> None:
        self.last_number += 1
        self.entries.append(Entry(self.last_number, text, self.conversation_id, is_answer))

    @property
    def told(self) -> list[tuple[int, str]]:
        return [(entry.number, entry.text) for entry in self.entries]


class Player:
    """Does one thing after the other, and keeps in mind what must be there."""

    def __init__(self, replica: Replica, user: User, seed: int) -> None:
        self.talks: list[Talk] = []
        self.erased: list[str] = []
        self._erased_count = 0
        self._replica = replica
        self._user = user
        self._chance = Random(seed)
        self._sweep = erasing(replica, Log())
        self._texts = (f"words{number}of{seed}x" for number in itertools.count(1))

    async def play(self) -> None:
        await self._chance.choice([self.runs, self.runs, self.forks, self.forks, self.imports, self.erases])()
        if self._chance.random() < 0.3:
            await self._sweep.sweep()

    async def runs(self) -> None:
        """A run looks something up, or does not, and answers, or does not."""
        talk = self._chance.choice([*self.talks, Talk("")])
        text = next(self._texts)
        owner = await self._user.start(text, conversation_id=talk.conversation_id)
        if not talk.conversation_id:
            talk.conversation_id = (await self._user.run(owner.run_id)).conversation_id
            self.talks.append(talk)
        talk.add(text, is_answer=False)
        loaded = await owner.load()
        assert [(message.number, message.text) for message in loaded.messages] == talk.told
        _check(loaded)
        if self._chance.random() < 0.5:
            text, call_id = next(self._texts), f"call_{owner.run_id}"
            call = owner.call(
                call_id, call_pb2.CALL_STATE_FAILED, result=result(f'"{next(self._texts)}"', is_error=True)
            )
            await owner.commit(
                messages=[message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text=text, call_ids=[call_id])],
                calls=[call],
            )
            talk.add(text, is_answer=True)
        if self._chance.random() < 0.8:
            text = next(self._texts)
            await owner.commit(messages=[message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text=text)])
            talk.add(text, is_answer=True)
        await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)

    async def imports(self) -> None:
        """A short history from elsewhere."""
        talk, number = Talk(""), next(self._texts)
        asked = call_pb2.Call(
            call_id=f"call_{number}",
            round=1,
            tool_name="gone",
            state=call_pb2.CALL_STATE_SUCCEEDED,
            proposed_arguments="{}",
            result=result(f'"{next(self._texts)}"'),
            imported=True,
        )
        every = [next(self._texts) for _ in range(3)]
        roles = message_pb2.ROLE_USER, message_pb2.ROLE_ASSISTANT, message_pb2.ROLE_ASSISTANT
        messages = [
            message_pb2.Message(role=role, text=text, imported=True) for role, text in zip(roles, every, strict=True)
        ]
        messages[1].call_ids.append(asked.call_id)
        talk.conversation_id = (
            await self._user.ask("ImportConversation", store_id="acme", user_id="ann", messages=messages, calls=[asked])
        ).conversation.conversation_id
        for text, role in zip(every, roles, strict=True):
            talk.add(text, is_answer=role == message_pb2.ROLE_ASSISTANT)
        self.talks.append(talk)

    async def forks(self) -> None:
        """A fork somewhere, or a refusal that names places where it can be made."""
        if not self.talks:
            return
        source = self._chance.choice(self.talks)
        places = {entry.number for entry in source.entries if entry.is_answer}
        number = self._chance.choice([0, self._chance.randint(1, source.last_number + 1)])
        place = number or max(places, default=0)
        if place not in places:
            with pytest.raises(ForkPointOpen) as refused:
                await fork(self._user, source.conversation_id, number)
            assert {*map(int, refused.value.metadata.values())} <= places
            return
        made = await fork(self._user, source.conversation_id, number)
        kept = [entry for entry in source.entries if entry.number <= place]
        self.talks.append(Talk(made.conversation_id, place, kept))

    async def erases(self) -> None:
        """A conversation goes, and what was written in it goes from all its forks."""
        if not self.talks:
            return
        gone = self.talks.pop(self._chance.randrange(len(self.talks)))
        await erase(self._replica, gone.conversation_id)
        self._erased_count += 1
        self.erased += [entry.text for entry in gone.entries if entry.written_in == gone.conversation_id]
        for talk in self.talks:
            talk.entries = [entry for entry in talk.entries if entry.written_in != gone.conversation_id]
        with pytest.raises((ConversationErased, ConversationNotFound)):
            await fork(self._user, gone.conversation_id)

    async def check(self) -> None:
        """All is read as it should be, and what was erased is nowhere."""
        for talk in self.talks:
            assert await texts(self._user, talk.conversation_id) == talk.told
        for _ in range(self._erased_count):
            await swept(self._sweep)
        left = await everything(self._replica.database)
        assert [line for line in left.splitlines() if any(text in line for text in self.erased)] == []
        for talk in self.talks:
            assert await texts(self._user, talk.conversation_id) == talk.told


def _check(loaded: pb.LoadRunResponse) -> None:
    """What the model would be given passes a strict check."""
    state = State(
        run=wire.RUN.read(loaded.run),
        messages=tuple(map(wire.MESSAGE.read, loaded.messages)),
        calls={call.call_id: call for call in map(wire.CALL.read, loaded.calls)},
    )
    check_history(history.of_run(state))


async def test_the_past_is_what_was_said_and_not_erased(replica: Replica, user: User) -> None:
    for seed in range(_WALKS):
        player = Player(replica, user, seed)
        for _ in range(_STEPS):
            await player.play()
        await player.check()
