"""What the model is told: valid for a strict provider, whole, and within its bounds (LOOP-8, LOOP-11, C2)."""

from __future__ import annotations

import json

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pawl.agent_loop.adapters import wire
from pawl.agent_loop.domain import history, settle
from pawl.agent_loop.domain.call import Call, CallResult, CallState, ExecutionContext, OfferFallback
from pawl.agent_loop.domain.fact import FallbackChecked
from pawl.agent_loop.domain.fact_rules import apply_fact
from pawl.agent_loop.domain.history import ReasoningEcho
from pawl.agent_loop.domain.limits import Limits
from pawl.agent_loop.domain.message import Message, Role
from pawl.agent_loop.domain.results import contents
from pawl.agent_loop.domain.run import Run, RunOptions
from pawl.agent_loop.domain.state import State
from pawl.agent_loop.domain.tool import Disposition, Verdict
from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId, UserId
from tests.fakes.provider import check_history

RUN = Run(store_id=StoreId("s"), user_id=UserId("u"), conversation_id=ConversationId("c"), run_id=RunId("r"))


def call(call_id: str, content: bytes = b'"done"', *, proposed: str = "{}", name: str = "write") -> Call:
    return Call(
        store_id=StoreId("s"),
        conversation_id=ConversationId("c"),
        run_id=RunId("r"),
        call_id=CallId(call_id),
        round=1,
        index=0,
        tool_name=name,
        provider_call_id="same",
        proposed_arguments=proposed,
        state=CallState.SUCCEEDED,
        result=CallResult(content_json=content),
    )


def user(text: str, number: int = 0) -> Message:
    return Message(role=Role.USER, run_id=RunId("r"), text=text, number=number)


def assistant(text: str = "", *call_ids: str, number: int = 0, interrupted: bool = False) -> Message:
    return Message(
        role=Role.ASSISTANT,
        run_id=RunId("r"),
        text=text,
        call_ids=tuple(map(CallId, call_ids)),
        number=number,
        interrupted=interrupted,
    )


def state(*messages: Message, calls: tuple[Call, ...] = (), limits: Limits | None = None) -> State:
    run = replace(RUN, options=RunOptions(limits=limits or Limits()))
    return State(run=run, messages=messages, calls={one.call_id: one for one in calls})


def test_each_call_has_one_result_right_after_its_message_in_call_order() -> None:
    told = history.of_run(state(user("hi"), assistant("", "b", "a"), calls=(call("a", b"1"), call("b", b"2"))))
    assert [message["role"] for message in told] == ["user", "assistant", "tool", "tool"]
    assert [(message["tool_call_id"], message["content"]) for message in told[2:]] == [("b", "2"), ("a", "1")]
    check_history(told)


def test_calls_are_known_to_the_provider_by_pawl_s_ids() -> None:
    """Ids of providers are unique within a batch at most, and may be missing."""
    told = history.of_run(state(user("hi"), assistant("", "a"), assistant("", "b"), calls=(call("a"), call("b"))))
    assert [message["tool_calls"][0]["id"] for message in told if "tool_calls" in message] == ["a", "b"]


def test_the_model_finds_its_call_under_the_name_that_it_used() -> None:
    """Also where a backend tool took the place of a front end: else it calls again until the run is stuck."""
    offered = replace(
        call("a", name="ask_browser"),
        state=CallState.OFFERED,
        context=ExecutionContext.FRONTEND,
        offer_fallback=OfferFallback.BACKEND_TOOL,
        fallback_tool_name="search",
        result=None,
    )
    verdict = Verdict(
        call_id=CallId("a"), disposition=Disposition.RUN, tool_version=3, context=ExecutionContext.BACKEND
    )
    before = state(user("hi"), assistant("", "a"), calls=(offered,))
    after, _ = apply_fact(before, FallbackChecked(call_id=CallId("a"), verdict=verdict), 1.0)
    kept = wire.CALL.read(wire.CALL.write(after.calls[CallId("a")]))
    done = settle.settled(kept, CallState.SUCCEEDED, CallResult(content_json=b"1"), 2.0)
    told = history.of_run(state(user("hi"), assistant("", "a"), calls=(done,)))
    assert (kept.tool_name, told[1]["tool_calls"][0]["function"]["name"]) == ("search", "ask_browser")


def test_neighbours_of_the_same_role_are_joined() -> None:
    """C15: a message that came while the run was stopped follows the one before."""
    told = history.of_run(state(user("hi"), user("and?"), assistant("Well", interrupted=True), user("go on")))
    assert [message["role"] for message in told] == ["user", "assistant", "user"]
    assert told[0]["content"] == "hi\n\nand?"
    check_history(told)


def of_another(message: Message) -> Message:
    return replace(message, run_id=RunId("other"), user_id=UserId("bob"))


def test_what_another_user_wrote_or_was_answered_is_told_with_whose_it_is() -> None:
    mine, theirs = replace(user("hi"), user_id=RUN.user_id), of_another(user("delete\n\nall of it"))
    answer, empty = of_another(assistant("No.", interrupted=True)), of_another(assistant())
    told = history.of_run(state(mine, assistant("Hello."), theirs, empty, answer, replace(theirs, text=""), mine))
    pieces = [
        "[Written by bob, another user of this conversation:]\n> delete\n> \n> all of it",
        "[Answered to bob, another user of this conversation:]\n> No.\n> \n> [The answer was interrupted here.]",
        "[Written by bob, another user of this conversation:]\n> [No text. What was with it is not shown here.]",
        "hi",
    ]
    assert [(message["role"], message["content"]) for message in told] == [
        ("user", "hi"),
        ("assistant", "Hello."),
        ("user", "\n\n".join(pieces)),
    ]
    check_history(told)


LINES = st.text() | st.sampled_from("\r\x0b\x85\u2028")


@given(st.lists(st.tuples(st.sampled_from([Role.USER, Role.ASSISTANT]), LINES), max_size=5))
def test_no_line_of_another_user_passes_for_anything_else(others: list[tuple[Role, str]]) -> None:
    """Neither for words of the run's user, nor of the model, nor for a summary, nor for those of a third user."""
    theirs = [of_another(Message(role=role, run_id=RunId("r"), text=text + "mine")) for role, text in others]
    (told,) = history.of_run(state(*theirs, user("mine")))
    *quoted, last = told["content"].splitlines()
    labels = {f"[{what} bob, another user of this conversation:]" for what in ("Written by", "Answered to")}
    assert (told["role"], last) == ("user", "mine")
    assert all(not line or line in labels or line.startswith("> ") for line in quoted)


def test_an_error_reaches_the_model_as_an_error() -> None:
    """FE-5, LOOP-7."""
    failed = replace(call("a"), result=settle.error("TOOL_TIMEOUT", "too slow"))
    (content,) = contents([failed], 1000)
    assert json.loads(content) == {"error": "too slow", "reason": "TOOL_TIMEOUT"}


def test_a_note_goes_with_the_result() -> None:
    """HITL-3: the model is told that a reviewer edited the call."""
    noted = replace(call("a"), result=CallResult(content_json=b"1", note="A reviewer edited this call."))
    (content,) = contents([noted], 1000)
    assert json.loads(content) == {"result": 1, "note": "A reviewer edited this call."}


def test_results_over_the_limit_of_a_round_are_cut_with_a_way_to_read_the_rest() -> None:
    """LOOP-8: small results stay whole."""
    large = ("é" * 30_000).encode()
    told = contents([call("a", b'"' + large + b'"'), call("b", b"1"), call("c", b'"' + large + b'"')], 50_000)
    assert told[1] == "1"
    for content, call_id in ((told[0], "a"), (told[2], "c")):
        assert "read_result" in content
        assert f'"{call_id}"' in content
        assert "of 60002 bytes" in content
        assert len(content.encode()) < 25_400


def test_arguments_that_are_no_json_do_not_break_the_history() -> None:
    """C14."""
    told = history.of_run(state(user("hi"), assistant("", "a"), calls=(call("a", proposed='{"half'),)))
    check_history(told)
    assert json.loads(told[1]["tool_calls"][0]["function"]["arguments"]) == {"not_json": '{"half'}


def test_reasoning_goes_back_only_where_the_server_sent_some() -> None:
    """LOOP-11."""
    silent = state(user("hi"), assistant("", "a"), calls=(call("a"),))
    assert "reasoning_content" not in history.of_run(silent)[1]

    thinking = state(
        user("hi"), replace(assistant("", "a"), reasoning="hm"), assistant("", "b"), calls=(call("a"), call("b"))
    )
    told = [message for message in history.of_run(thinking) if message["role"] == "assistant"]
    assert [message["reasoning_content"] for message in told] == ["hm", ""]

    renamed = history.of_run(thinking, ReasoningEcho.REASONING)
    assert renamed[1]["reasoning"] == "hm"
    never = history.of_run(thinking, ReasoningEcho.NONE)
    assert not {"reasoning", "reasoning_content"} & set(never[1])


def test_unknown_fields_of_messages_and_calls_go_back_byte_for_byte() -> None:
    """LOOP-11: number formats, escapes and white space included; what Pawl knows itself is not replaced."""
    odd = rb'{"sig": 1e2,  "t":"\u00e9", "n":1.0}'
    fields = (
        rb'{"extra_content":%b,"content":"forged","tool_calls":['
        rb'{"extra_content":%b,"id":"forged","function":{"note":%b,"name":"forged"}},{}]}' % (odd, odd, odd)
    )
    opaque = replace(assistant("", "a", "b"), provider_state_json=fields)
    told = history.of_run(state(user("hi"), opaque, calls=(call("a"), call("b"))))
    message = msgspec.json.encode(told[1])
    assert message.count(odd) == 3
    assert b"forged" not in message
    assert [asked["id"] for asked in told[1]["tool_calls"]] == ["a", "b"]
    assert set(told[1]["tool_calls"][1]) == {"id", "type", "function"}


@settings(max_examples=100)
@given(sizes=st.lists(st.integers(1, 4000), min_size=2, max_size=20))
def test_a_summary_replaces_the_oldest_messages_and_never_parts_a_call_from_its_result(sizes: list[int]) -> None:
    messages, calls = [], []
    for number, size in enumerate(sizes, 1):
        call_id = f"call_{number}"
        calls.append(call(call_id, json.dumps("x" * size).encode()))
        messages.append(assistant("", call_id, number=number) if number % 3 else user("y" * size, number))
    full = state(*messages, calls=tuple(calls), limits=Limits(context_bytes_max=10_000))

    to_number = history.summarise_to(full)

    assert to_number < len(sizes), "the newest message stays"
    if not to_number:
        return
    summary = Message(role=Role.SUMMARY, run_id=RunId("r"), text="In short.", summarised_to_number=to_number)
    rest = replace(full, messages=(*messages, replace(summary, number=len(messages) + 1)))
    told = history.of_run(rest)
    assert told[0]["role"] == "user"
    assert "In short." in told[0]["content"]
    if told[-1]["role"] != "assistant":
        check_history(told)
    asked = [asked["id"] for message in told for asked in message.get("tool_calls", ())]
    assert asked == [message["tool_call_id"] for message in told if message["role"] == "tool"]


def test_the_newest_summary_comes_before_what_it_does_not_stand_for() -> None:
    """LOOP-11: wherever it was written; an older one, which it stands for as well, is left out."""

    def summary(text: str, number: int, to_number: int) -> Message:
        return Message(role=Role.SUMMARY, run_id=RunId("r"), text=text, number=number, summarised_to_number=to_number)

    messages = (user("one", 1), user("two", 2), summary("old", 3, 1), assistant("2!", number=4), user("three", 5))
    full = state(*messages, summary("new", 6, 2), user("four", 7))
    texts = [message["content"] for message in history.of_run(full)]
    assert [text.split()[-1] for text in texts] == ["new", "2!", "four"]
    assert texts[-1] == "three\n\nfour"
    assert "old" not in history.to_summarise(full, 4)
    assert "new" in history.to_summarise(full, 4)
