"""What the model is given of conversations that were imported, forked and gone on with, in any order.

The real loop over the real rules of the ledger, and a model that refuses what a strict server refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pawl.agent_loop.adapters.public_ledger import PublicLedgerClient
from pawl.agent_loop.domain import imports
from pawl.agent_loop.domain.imports import HistoryCall, HistoryMessage, HistoryRole
from pawl.chassis.auth import Principal
from pawl.chassis.ids import CallId, ConversationId, RequestId, RunKey, StoreId, UserId
from pawl.errors import ForkPointOpen
from tests.fakes import virtual_time
from tests.fakes.ledger import STORE, USER
from tests.fakes.loop_world import World
from tests.fakes.model import calls, fails, says
from tests.simulation.job_store import Channel
from tests.unit.agent_loop.scenario import VERDICTS

ME = Principal(store_id=StoreId(STORE), user_id=UserId(USER))
Told: TypeAlias = tuple[str, str, tuple[tuple[str, str], ...]]
"""Role, content and calls (name and arguments) of a message as the model is given it."""


@dataclass
class Entry:
    """A message of a conversation, with the results of its calls; `is_open` while one is missing."""

    role: str
    text: str
    calls: tuple[tuple[str, str, str], ...] = ()
    is_open: bool = False

    def told(self) -> Iterator[Told]:
        yield self.role, self.text, tuple((name, arguments) for name, arguments, _ in self.calls)
        for _, _, result in self.calls:
            yield "tool", result, ()


@dataclass
class Talk:
    """A conversation as one expects it; `parked` is its run that waits for somebody."""

    conversation_id: str
    entries: list[Entry] = field(default_factory=list)
    parked: RunKey | None = None

    @property
    def places(self) -> set[int]:
        """Where it can be forked."""
        whole = next((n for n, entry in enumerate(self.entries) if entry.is_open), len(self.entries))
        return {n for n in range(1, whole + 1) if self.entries[n - 1].role == "assistant"}

    def told(self) -> list[Told]:
        """What the model is given: neighbours of one role are one message."""
        joined: list[Told] = []
        for role, text, asked in (each for entry in self.entries for each in entry.told()):
            before = joined[-1] if joined else ("", "", ())
            if role == before[0] != "tool" and not before[2]:
                joined[-1] = (role, "\n\n".join(filter(None, (before[1], text))), asked)
            else:
                joined.append((role, text, asked))
        return joined


def told(messages: Sequence[Mapping[str, Any]]) -> list[Told]:
    """What the model was given."""
    return [
        (
            message["role"],
            message["content"] or "",
            tuple((call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())),
        )
        for message in messages
        if message["role"] != "system"
    ]


def as_history(messages: Sequence[Mapping[str, Any]]) -> list[HistoryMessage]:
    """What the model was given, for the check of imports."""
    return [
        HistoryMessage(
            role=HistoryRole(message["role"].upper()),
            text=message["content"] or "",
            calls=tuple(
                HistoryCall(
                    call_id=call["id"],
                    tool_name=call["function"]["name"],
                    arguments_json=call["function"]["arguments"],
                )
                for call in message.get("tool_calls", ())
            ),
            call_id=message.get("tool_call_id", ""),
        )
        for message in messages
        if message["role"] != "system"
    ]


class Player:
    """Does one thing after the other, and compares what the model is given with what one expects."""

    def __init__(self) -> None:
        self.world = World(VERDICTS, [], seconds=0.01)
        channel: Any = Channel(self.world.ledger._call)
        self.ledger = PublicLedgerClient(channel)
        self.talks: list[Talk] = []
        self._count = 0

    def _talk(self, number: int) -> Talk | None:
        return self.talks[number % len(self.talks)] if self.talks else None

    async def imports(self, history: Sequence[HistoryMessage]) -> None:
        imports.check(history)
        taken = imports.taken_over(history, lambda: CallId(self.world.ledger.ids.new("call")))
        made: Any = await self.ledger.import_conversation(ME, RequestId(""), *taken, title="", conversation_key="")
        talk = Talk(made.conversation_id)
        for message in history:
            if message.role is HistoryRole.TOOL:
                name, arguments, _ = talk.entries[-1].calls[-1]
                talk.entries[-1].calls = (*talk.entries[-1].calls[:-1], (name, arguments, message.text))
                continue
            made_calls = tuple((call.tool_name, call.arguments_json, "") for call in message.calls)
            talk.entries.append(Entry(message.role.lower(), message.text, made_calls))
        self.talks.append(talk)

    async def forks(self, number: int, at: int) -> None:
        source = self._talk(number)
        if source is None:
            return
        place = at or max(source.places, default=0)
        asked = self.ledger.fork_conversation(ME, RequestId(""), ConversationId(source.conversation_id), number=at)
        if place not in source.places:
            with pytest.raises(ForkPointOpen) as refused:
                await asked
            assert {int(value) for value in refused.value.metadata.values()} <= source.places
            return
        made: Any = await asked
        assert made.forked_number == place
        self.talks.append(Talk(made.conversation_id, source.entries[:place]))

    async def runs(self, number: int, kind: str) -> None:
        self._count += 1
        talk, text = self._talk(number), f"question {self._count}"
        if talk is None:
            talk = Talk("")
            self.talks.append(talk)
        if talk.parked:
            return
        answer = f"answer {self._count}"
        self.world.model.scripts = {
            "says": [says(answer)],
            "looks": [calls("look {}", text="let me see"), says(answer)],
            "fails": [fails(retryable=False)],
            "parks": [calls("mail {}")],
        }[kind]
        key = self.world.ledger.submit(text, conversation_id=talk.conversation_id)
        talk.conversation_id = self.world.ledger.row(key).conversation_id
        talk.entries.append(Entry("user", text))
        begun, expected = len(self.world.model.requests), talk.told()
        if kind == "parks":
            await self.world.drive()
            talk.parked = key
            talk.entries.append(Entry("assistant", "", (("mail", "{}", ""),), is_open=True))
        else:
            await self.world.finish(key)
        self._check(begun, expected)
        if kind == "looks":
            talk.entries.append(Entry("assistant", "let me see", (("look", "{}", '"look done"'),)))
            self._check(begun + 1, talk.told())
        if kind in {"says", "looks"}:
            talk.entries.append(Entry("assistant", answer))

    async def releases(self, number: int) -> None:
        talk = self._talk(number)
        if talk is None or talk.parked is None:
            return
        self.world.model.scripts = [says("sent")]
        begun = len(self.world.model.requests)
        await self.world.respond(talk.parked)
        await self.world.finish(talk.parked)
        talk.entries[-1] = Entry("assistant", "", (("mail", "{}", '"mail done"'),))
        self._check(begun, talk.told())
        talk.entries.append(Entry("assistant", "sent"))
        talk.parked = None

    def _check(self, number: int, expected: list[Told]) -> None:
        given_to = self.world.model.requests[number].messages
        assert told(given_to) == expected
        assert not list(imports.faults(as_history(given_to)))

    async def finish(self) -> None:
        """Everything can still be gone on with, and nothing of a past was done twice."""
        for number in range(len(self.talks)):
            await self.releases(number)
            await self.runs(number, "says")
        effects = self.world.registry.effects
        assert not effects or max(effects.values()) == 1


texts = st.sampled_from(["one", "two\nlines", "drei ß 東"])
turns = st.builds(
    lambda question, between, answer: [
        HistoryMessage(role=HistoryRole.USER, text=question),
        *(
            each
            for name, arguments, result in between
            for each in (
                HistoryMessage(
                    role=HistoryRole.ASSISTANT,
                    calls=(HistoryCall(call_id="", tool_name=name, arguments_json=arguments),),
                ),
                HistoryMessage(role=HistoryRole.TOOL, text=result),
            )
        ),
        HistoryMessage(role=HistoryRole.ASSISTANT, text=answer),
    ],
    texts,
    st.lists(
        st.tuples(
            st.sampled_from(["look", "gone_long_ago"]),
            st.sampled_from(["{}", '{"b": 1, "a": "x"}']),
            st.sampled_from(["12", '{"degrees": 12}', '"text"']),
        ),
        max_size=2,
    ),
    texts,
)


def numbered(history: list[HistoryMessage]) -> list[HistoryMessage]:
    """Give calls ids, the same as others have in other histories."""
    found: list[HistoryMessage] = []
    for position, message in enumerate(history):
        asked = tuple(
            HistoryCall(call_id=f"id{position}", tool_name=call.tool_name, arguments_json=call.arguments_json)
            for call in message.calls
        )
        call_id = f"id{position - 1}" if message.role is HistoryRole.TOOL else ""
        found.append(HistoryMessage(role=message.role, text=message.text, calls=asked, call_id=call_id))
    return found


histories = st.lists(turns, min_size=1, max_size=2).map(
    lambda several: numbered([each for one in several for each in one])
)
steps = st.one_of(
    st.tuples(st.just("imports"), histories),
    st.tuples(st.just("forks"), st.integers(0, 5), st.integers(0, 9)),
    st.tuples(st.just("runs"), st.integers(0, 5), st.sampled_from(["says", "looks", "fails", "parks"])),
    st.tuples(st.just("releases"), st.integers(0, 5)),
)


@settings(max_examples=50)
@given(st.lists(steps, min_size=1, max_size=10))
def test_the_model_is_given_what_one_expects_and_what_a_strict_server_takes(played: list[tuple[Any, ...]]) -> None:
    async def main() -> None:
        player = Player()
        for name, *arguments in played:
            await getattr(player, name)(*arguments)
        await player.finish()

    virtual_time.run(main())
