"""Histories from elsewhere: what is refused, and what becomes of the others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pawl.agent.v1 import conversation_pb2 as pb
from pawl.agent_loop.adapters.public_ledger import PublicLedger
from pawl.agent_loop.domain import imports
from pawl.agent_loop.domain.imports import HistoryCall, HistoryMessage, HistoryRole
from pawl.agent_loop.domain.message import Role
from pawl.chassis.auth import Principal
from pawl.chassis.ids import CallId, RequestId, RunKey, StoreId, UserId
from pawl.client.history import history as from_json
from pawl.errors import ForkPointOpen, InvalidHistory
from pawl.values import CallState
from tests.fakes import virtual_time
from tests.fakes.ledger import STORE, USER
from tests.fakes.loop_world import World
from tests.fakes.model import calls, fails, says
from tests.simulation.job_store import Channel
from tests.unit.agent_loop.scenario import VERDICTS, present


def user(text: str = "hello", **fields: Any) -> HistoryMessage:
    return HistoryMessage(role=HistoryRole.USER, text=text, **fields)


def answer(text: str = "", *calls: HistoryCall, **fields: Any) -> HistoryMessage:
    return HistoryMessage(role=HistoryRole.ASSISTANT, text=text, calls=calls, **fields)


def call(call_id: str, name: str = "look", arguments: str = "{}") -> HistoryCall:
    return HistoryCall(call_id=call_id, tool_name=name, arguments_json=arguments)


def result(call_id: str, text: str = "12", **fields: Any) -> HistoryMessage:
    return HistoryMessage(role=HistoryRole.TOOL, text=text, call_id=call_id, **fields)


GOOD = [user(), answer("", call("a"), call("b")), result("b"), result("a"), answer("done")]


def test_a_history_that_a_strict_server_takes_is_taken() -> None:
    imports.check(GOOD)
    imports.check([user(), user("again"), answer("one"), answer("two", call("a")), result("a", "")])


def test_each_fault_is_named_with_its_place() -> None:
    rows: list[Any] = [
        ([], 0, "no message"),
        ([answer("hi")], 1, "begins with a message of the user"),
        ([user()], 1, "leave it out here"),
        ([user(" \n"), answer("x")], 1, "says nothing"),
        ([user(), answer()], 2, "says nothing and calls nothing"),
        ([user("a\x00b"), answer("x")], 1, "U+0000"),
        ([user("x" * 262_145), answer("x")], 1, "262144 bytes"),
        ([user(), HistoryMessage(role=HistoryRole.SYSTEM, text="x"), answer("x")], 2, "instructions"),
        ([user(), HistoryMessage(role=HistoryRole.UNSPECIFIED, text="x"), answer("x")], 2, "none of user"),
        ([user(), answer("", call("a"))], 2, "no result right behind"),
        ([user(), answer("", call("a")), user(), result("a"), answer("x")], 2, "no result right behind"),
        ([user(), answer("", call("a")), result("a"), result("a")], 4, "a second result"),
        ([user(), answer("x"), result("a")], 3, "not made right before"),
        ([user(), answer("", call("a")), result("")], 3, "names the call"),
        ([user(), answer("", call("a"), call("a")), result("a")], 2, "came before"),
        ([user(), answer("", call("a")), result("a"), answer("", call("a")), result("a")], 4, "came before"),
        ([user(), answer("", call("")), result("")], 2, "1 to 256"),
        ([user(), answer("", call("a\x07")), result("a\x07")], 2, "control character"),
        ([user(), answer("", call("a", "a b")), result("a")], 2, "name of a tool"),
        ([user(), answer("", call("a", arguments="[]")), result("a")], 2, "strict JSON object"),
        ([user(), answer("", call("a", arguments='{"a": 1, "a": 2}')), result("a")], 2, "strict JSON object"),
        ([user(), answer("", call("a", arguments="")), result("a")], 2, "{} if there are none"),
        ([user(calls=(call("a"),)), result("a"), answer("x")], 1, "only the assistant"),
        ([user(), answer("x", call_id="a")], 2, "only the result"),
        ([user(), answer("", *(call(f"c{n}") for n in range(129)))], 2, "at most 128"),
        ([user()] * 1001, 0, "at most 1000 messages"),
    ]
    for history, position, said in rows:
        with pytest.raises(InvalidHistory) as refused:
            imports.check(history)
        place = f"message {position}: " if position else ""
        assert any(part.startswith(place) and said in part for part in refused.value.message.split("; ")), refused.value
        assert not position or str(position) in refused.value.metadata["positions"].split(","), history


def test_all_faults_come_at_once_in_order() -> None:
    bad = [answer("", call("a", "!")), HistoryMessage(role=HistoryRole.SYSTEM, text="x"), user("\x00")]
    with pytest.raises(InvalidHistory) as refused:
        imports.check(bad)
    assert refused.value.metadata["positions"] == "1,2,3"
    assert int(refused.value.metadata["fault_count"]) == 6


def test_a_history_is_taken_over_with_ids_of_ours_and_settled_calls() -> None:
    numbers = itertools.count(1)
    messages, calls = imports.taken_over(
        [
            user("q"),
            answer("let me see", call("a", arguments='{"b":1, "a":2}'), call("b")),
            result("b", "no such thing", is_error=True),
            result("a", '{"x": 1}'),
            answer("", call("c")),
            result("c", "plain text"),
            answer("done"),
        ],
        lambda: CallId(f"ours_{next(numbers)}"),
    )
    assert [(message.role, message.text, message.call_ids) for message in messages] == [
        (Role.USER, "q", ()),
        (Role.ASSISTANT, "let me see", ("ours_1", "ours_2")),
        (Role.ASSISTANT, "", ("ours_3",)),
        (Role.ASSISTANT, "done", ()),
    ]
    assert all(message.imported for message in messages)
    assert all(each.imported for each in calls)
    assert [(each.call_id, each.provider_call_id, each.round, each.index, each.state) for each in calls] == [
        ("ours_1", "a", 1, 0, CallState.SUCCEEDED),
        ("ours_2", "b", 1, 1, CallState.FAILED),
        ("ours_3", "c", 2, 0, CallState.SUCCEEDED),
    ]
    assert [each.result and each.result.content_json for each in calls] == [
        b'{"x": 1}',
        b'"no such thing"',
        b'"plain text"',
    ]
    assert (calls[0].arguments_json, calls[0].proposed_arguments) == (b'{"a":2,"b":1}', '{"b":1, "a":2}')


parts = st.one_of(
    st.builds(user, st.text(max_size=3)),
    st.builds(answer, st.text(max_size=3)),
    st.builds(answer, st.just(""), st.builds(call, st.sampled_from("ab"), st.sampled_from(["look", "!"]))),
    st.builds(result, st.sampled_from(["a", "b", ""]), st.text(max_size=3)),
    st.just(HistoryMessage(role=HistoryRole.SYSTEM, text="x")),
)


@given(st.lists(parts, max_size=8))
def test_what_is_not_refused_can_be_taken_over(history: list[HistoryMessage]) -> None:
    try:
        imports.check(history)
    except InvalidHistory:
        return
    numbers = itertools.count(1)
    messages, calls = imports.taken_over(history, lambda: CallId(f"c{next(numbers)}"))
    assert len(messages) + len(calls) == len(history)
    assert [call_id for message in messages for call_id in message.call_ids] == [each.call_id for each in calls]
    for each in calls:
        assert each.settled
        msgspec.json.decode(present(each.result).content_json)


def test_chat_completions_are_read_with_their_places() -> None:
    text = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    (read,) = from_json([text])
    assert read.text == "a\n\nb"
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    bad: list[Any] = [text, image, 7, {"role": "assistant", "tool_calls": [{"id": "a"}]}, {"content": 3}]
    with pytest.raises(InvalidHistory) as refused:
        from_json(bad)
    for place in ("message 2: only parts", "message 3: it is no object", "message 4: a call has", "message 5: content"):
        assert place in refused.value.message


# What the model is given of conversations that were imported, forked and gone on with, in any order.


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
        self.ledger = PublicLedger(channel)
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
        request = pb.ForkConversationRequest(conversation_id=source.conversation_id, number=at).SerializeToString()
        asked = self.ledger.forward(ME, "/pawl.agent.v1.ConversationService/ForkConversation", request)
        if place not in source.places:
            with pytest.raises(ForkPointOpen) as refused:
                await asked
            assert {int(value) for value in refused.value.metadata.values()} <= source.places
            return
        made = pb.ForkConversationResponse.FromString(await asked).conversation
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
