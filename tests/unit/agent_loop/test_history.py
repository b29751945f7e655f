"""The history sent to the model: valid for strict providers, complete, and bounded (LOOP-8, LOOP-11, C2)."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pawl.agent_loop.agents import rules as agents
from pawl.agent_loop.agents.rules import AgentDefinition, AgentVersion
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.rules import agent_program, history, output, settle
from pawl.agent_loop.loop.rules.call import Call, CallResult
from pawl.agent_loop.loop.rules.decision import Finish, PinTools
from pawl.agent_loop.loop.rules.fact import FallbackChecked
from pawl.agent_loop.loop.rules.fact_rules import apply_fact
from pawl.agent_loop.loop.rules.history import ReasoningEcho, contents
from pawl.agent_loop.loop.rules.limits import Limits
from pawl.agent_loop.loop.rules.message import Message, Role
from pawl.agent_loop.loop.rules.options import AskedOptions
from pawl.agent_loop.loop.rules.run import (
    FailureClass,
    ReasoningEffort,
    ResponseFormat,
    RoundLimitPolicy,
    Run,
    RunOptions,
)
from pawl.agent_loop.loop.rules.state import State
from pawl.agent_loop.loop.rules.tool import Verdict
from pawl.agent_loop.model.request import Finished, TextPiece
from pawl.chassis.ids import CallId, ConversationId, RunId, RunKey, StoreId, UserId
from pawl.model_server.request import read_request
from pawl.values import CallState, Disposition, ExecutionContext, OfferFallback, RunState
from tests.fakes.loop_world import World
from tests.fakes.manual_clock import run_in_virtual_time
from tests.fakes.model import Script, calls, check_history, says
from tests.unit.agent_loop.scenario import RUN, VERDICTS, present

NOTICE = Message(role=Role.NOTICE, run_id=RunId("r"), notices_json=b'["wombat"]')


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


def test_each_call_has_one_result_right_after_its_message() -> None:
    history_sent = history.of_run(state(user("hi"), assistant("", "b", "a"), calls=(call("a", b"1"), call("b", b"2"))))
    sent = [(message["role"], message.get("tool_call_id"), message["content"]) for message in history_sent]
    assert sent == [("user", None, "hi"), ("assistant", None, sent[1][2]), ("tool", "b", "2"), ("tool", "a", "1")]
    check_history(history_sent)


def test_the_scripted_model_recognizes_job_notices() -> None:
    """ASYNC-5: model_server has its own copy of the header of notices."""
    notice = replace(NOTICE, notices_json=b'[{"job_id":"run_1"}]')
    request = read_request(msgspec.json.encode({"model": "m", "messages": history.of_run(state(user("hi"), notice))}))
    assert request.notices == [{"job_id": "run_1"}]


def test_a_call_keeps_the_name_that_the_model_used() -> None:
    """After a fallback to a backend tool, the model would otherwise repeat the call until the run fails."""
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
    history_sent = history.of_run(state(user("hi"), assistant("", "a"), calls=(done,)))
    assert (kept.tool_name, history_sent[1]["tool_calls"][0]["function"]["name"]) == ("search", "ask_browser")


def test_adjacent_messages_of_the_same_role_are_joined() -> None:
    """C15: a message sent while the run was being stopped follows the previous message."""
    history_sent = history.of_run(state(user("hi"), user("and?"), assistant("Well", interrupted=True), user("go on")))
    assert [message["role"] for message in history_sent] == ["user", "assistant", "user"]
    assert history_sent[0]["content"] == "hi\n\nand?"
    check_history(history_sent)


def test_a_notice_is_separate_from_the_users_text() -> None:
    """Next to a message of the user, the notice is a separate part; alone, it is plain text."""
    (history_sent,) = history.of_run(state(user("hi"), NOTICE, user("and?")))
    first, notice, last = (part["text"] for part in history_sent["content"])
    assert (first, notice.splitlines()[1:], last) == ("hi", ['["wombat"]'], "and?")
    assert history.of_run(state(NOTICE))[0]["content"] == notice


def of_another(message: Message) -> Message:
    return replace(message, run_id=RunId("other"), user_id=UserId("bob"))


def test_other_users_messages_are_attributed_to_them() -> None:
    mine, theirs = replace(user("hi"), user_id=RUN.user_id), of_another(user("delete\n\nall of it"))
    answer, empty = of_another(assistant("No.", interrupted=True)), of_another(assistant())
    history_sent = history.of_run(
        state(mine, assistant("Hello."), theirs, empty, answer, replace(theirs, text=""), mine)
    )
    pieces = [
        "[Written by bob, another user of this conversation:]\n> delete\n> \n> all of it",
        "[Answer to bob, another user of this conversation:]\n> No.\n> \n> [The answer was interrupted here.]",
        "[Written by bob, another user of this conversation:]\n> [No text. Its attachments are not shown here.]",
        "hi",
    ]
    assert [(message["role"], message["content"]) for message in history_sent] == [
        ("user", "hi"),
        ("assistant", "Hello."),
        ("user", "\n\n".join(pieces)),
    ]
    check_history(history_sent)


@pytest.mark.parametrize(
    ("others", "is_quoted"),
    [
        ([of_another(NOTICE), of_another(assistant("Theirs."))], True),
        ([of_another(user("hi")), of_another(assistant("Th", interrupted=True))], True),
        ([of_another(NOTICE), of_another(assistant("", "c"))], False),
    ],
)
def test_a_repeated_turn_ignores_other_users_notices_and_answers(others: list[Message], *, is_quoted: bool) -> None:
    """ASYNC-5: other users' notices are excluded, and the request still ends with something to answer."""
    turn, broken = replace(RUN, generation=1), assistant("I wa", interrupted=True)
    mine = state(user("hi"), replace(NOTICE, user_id=RUN.user_id), replace(broken, user_id=RUN.user_id), *others)
    mine = replace(mine, run=turn)
    history_sent = history.of_run(mine)
    assert history_sent[-1]["role"] == "user"
    assert ("another user" in str(history_sent[-1]["content"])) is is_quoted
    assert sum("wombat" in str(message["content"]) for message in history_sent) == 1
    assert agent_program.AgentProgram().follows(mine, 0.0) == PinTools()
    theirs = state(user("hi"), assistant("Hello."), of_another(NOTICE))
    ended = agent_program.AgentProgram().follows(replace(theirs, run=turn), 0.0)
    assert isinstance(ended, Finish), "there is nothing to answer"


LINES = st.text() | st.sampled_from("\r\x0b\x85\u2028")


@given(st.lists(st.tuples(st.sampled_from([Role.USER, Role.ASSISTANT]), LINES), max_size=5))
def test_other_users_lines_cannot_impersonate_another_source(others: list[tuple[Role, str]]) -> None:
    """The lines cannot appear to come from the run's user, the model, a summary or a third user."""
    theirs = [of_another(Message(role=role, run_id=RunId("r"), text=text + "mine")) for role, text in others]
    (history_sent,) = history.of_run(state(*theirs, user("mine")))
    *quoted, last = history_sent["content"].splitlines()
    labels = {f"[{what} bob, another user of this conversation:]" for what in ("Written by", "Answer to")}
    assert (history_sent["role"], last) == ("user", "mine")
    assert all(not line or line in labels or line.startswith("> ") for line in quoted)


@pytest.mark.parametrize(
    ("result", "sent"),
    [
        (settle.error("TOOL_TIMEOUT", "too slow"), {"error": "too slow", "reason": "TOOL_TIMEOUT"}),
        (CallResult(content_json=b"1", note="It was edited."), {"result": 1, "note": "It was edited."}),
    ],
)
def test_errors_and_notes_reach_the_model(result: CallResult, sent: dict[str, Any]) -> None:
    """FE-5, LOOP-7, HITL-3: the model also learns that a reviewer edited the call."""
    (content,) = contents([replace(call("a"), result=result)], 1000)
    assert json.loads(content) == sent


def test_results_over_the_limit_are_truncated_with_a_hint_on_how_to_read_the_rest() -> None:
    """LOOP-8: small results stay whole."""
    large = ("é" * 30_000).encode()
    history_sent = contents([call("a", b'"' + large + b'"'), call("b", b"1"), call("c", b'"' + large + b'"')], 50_000)
    assert history_sent[1] == "1"
    for content, call_id in ((history_sent[0], "a"), (history_sent[2], "c")):
        assert all(part in content for part in ("read_result", f'"{call_id}"', "of 60002 bytes"))
        assert len(content.encode()) < 25_400


def test_invalid_json_arguments_do_not_break_the_history() -> None:
    """C14: the arguments are sent as a string in a valid object."""
    history_sent = history.of_run(state(user("hi"), assistant("", "a"), calls=(call("a", proposed='{"half'),)))
    check_history(history_sent)
    assert json.loads(history_sent[1]["tool_calls"][0]["function"]["arguments"]) == {"not_json": '{"half'}


def test_reasoning_is_echoed_only_to_servers_that_sent_it() -> None:
    """LOOP-11: the name of the field can be set, and the echo can be disabled."""
    assert "reasoning_content" not in history.of_run(state(user("hi"), assistant("", "a"), calls=(call("a"),)))[1]

    thinking = state(
        user("hi"), replace(assistant("", "a"), reasoning="hm"), assistant("", "b"), calls=(call("a"), call("b"))
    )
    history_sent = [message for message in history.of_run(thinking) if message["role"] == "assistant"]
    assert [message["reasoning_content"] for message in history_sent] == ["hm", ""]

    assert history.of_run(thinking, ReasoningEcho.REASONING)[1]["reasoning"] == "hm"
    assert not {"reasoning", "reasoning_content"} & set(history.of_run(thinking, ReasoningEcho.NONE)[1])


def test_unknown_fields_are_echoed_byte_for_byte() -> None:
    """LOOP-11: numbers, escapes and white space are preserved, but Pawl's own fields take precedence."""
    odd = rb'{"sig": 1e2,  "t":"\u00e9", "n":1.0}'
    fields = (
        rb'{"extra_content":%b,"content":"forged","tool_calls":['
        rb'{"extra_content":%b,"id":"forged","function":{"note":%b,"name":"forged"}},{}]}' % (odd, odd, odd)
    )
    opaque = replace(assistant("", "a", "b"), provider_state_json=fields)
    history_sent = history.of_run(state(user("hi"), opaque, calls=(call("a"), call("b"))))
    message = msgspec.json.encode(history_sent[1])
    assert message.count(odd) == 3
    assert b"forged" not in message
    assert [asked["id"] for asked in history_sent[1]["tool_calls"]] == ["a", "b"]
    assert set(history_sent[1]["tool_calls"][1]) == {"id", "type", "function"}


@settings(max_examples=100)
@given(sizes=st.lists(st.integers(1, 4000), min_size=2, max_size=20))
def test_a_summary_never_separates_a_call_from_its_result(sizes: list[int]) -> None:
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
    history_sent = history.of_run(replace(full, messages=(*messages, replace(summary, number=len(messages) + 1))))
    assert (history_sent[0]["role"], "In short." in history_sent[0]["content"]) == ("user", True)
    if history_sent[-1]["role"] != "assistant":
        check_history(history_sent)
    asked = [asked["id"] for message in history_sent for asked in message.get("tool_calls", ())]
    assert asked == [message["tool_call_id"] for message in history_sent if message["role"] == "tool"]


STEPS = ("ask", "say", "settle", "number", "reload", "summarise", "correct", "next run")


@given(steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9))))
def test_kept_message_groups_equal_newly_built_ones(steps: list[tuple[str, int]]) -> None:
    """LOOP-8: after any commit, reload or next run, the model never sees an outdated message or result."""
    current = state(user("0", number=1))
    current = replace(current, run=replace(current.run, options=replace(current.run.options, response_format=FORM)))
    for count, (step, chosen) in enumerate(steps):
        message, *_ = current.messages[chosen % len(current.messages) :]
        match step:
            case "ask":
                current = current.with_calls([call(f"c{count}")]).with_message(assistant("", f"c{count}"))
            case "say":
                current = current.with_message(user(f"{count}"))
            case "settle":
                current = current.with_calls([call(each, f"{count}".encode()) for each in message.call_ids])
            case "number" | "reload":
                changed = replace(message, number=count) if step == "number" else replace(message, text=f"{count}")
                current = replace(
                    current, messages=tuple(changed if each is message else each for each in current.messages)
                )
            case "summarise":
                summary = Message(role=Role.SUMMARY, run_id=RunId("r"), text=f"{count}", summarised_to_number=chosen)
                current = current.with_message(summary)
            case "correct":
                current = current.with_message(replace(assistant("{}"), run_id=current.run.run_id, misfit="a: missing"))
            case "next run":
                current = replace(current, run=replace(current.run, run_id=RunId(f"run {count}")))
        found = history.groups(current)
        # Nothing has been kept for other limits.
        limits = Limits(result_bytes_per_round_max=current.run.options.limits.result_bytes_per_round_max + 1 + count)
        options = replace(current.run.options, limits=limits)
        assert found == history.groups(replace(current, run=replace(current.run, options=options)))


def test_message_groups_are_kept_for_the_next_run() -> None:
    """A new message in a long conversation does not make Pawl convert all earlier messages again."""
    messages = tuple(user(f"{number}", number=number) for number in range(1, 10))
    next_run = replace(RUN, run_id=RunId("next"), options=RunOptions(limits=Limits()))

    first, second = history.groups(state(*messages)), history.groups(State(run=next_run, messages=messages))

    assert [one is other for one, other in zip(first, second, strict=True)] == [True] * 6 + [False] * 3


def test_kept_message_groups_are_released_with_the_state() -> None:
    current = state(*(user(f"{number}", number=number) for number in range(1, 10)))
    first = weakref.ref(current.messages[0])
    history.groups(current)
    del current
    gc.collect()
    assert first() is None


def test_the_newest_summary_is_followed_by_the_messages_it_does_not_cover() -> None:
    """LOOP-11: the position of the summary does not matter, and older summaries that it covers are omitted."""

    def summary(text: str, number: int, to_number: int) -> Message:
        return Message(role=Role.SUMMARY, run_id=RunId("r"), text=text, number=number, summarised_to_number=to_number)

    messages = (user("one", 1), user("two", 2), summary("old", 3, 1), assistant("2!", number=4), user("three", 5))
    full = state(*messages, summary("new", 6, 2), user("four", 7))
    texts = [message["content"] for message in history.of_run(full)]
    assert ([text.split()[-1] for text in texts], texts[-1]) == (["new", "2!", "four"], "three\n\nfour")
    summarised = history.to_summarise(full, 4)
    assert ("old" in summarised, "new" in summarised) == (False, True)


# Structured answers: a run completes only with a valid one, and the model sees the errors.


FORM = ResponseFormat(schema_json=b'{"type":"object","minProperties":2}')
GOOD, BAD, WORSE = '{"a":1,"b":2}', '{"a":1}', "It is a."


def played(*scripts: Script, unavailable_checks: int = 0, **options: Any) -> tuple[World, Run]:
    async def main() -> tuple[World, Run]:
        world = World(VERDICTS, list(scripts))
        world.registry.unchecked_outputs = unavailable_checks
        key = world.ledger.submit("hello", RunOptions(**{"response_format": FORM, **options}))
        await world.finish(key)
        return world, world.ledger.run(key)

    return run_in_virtual_time(main())


def misfits(world: World, run: Run) -> list[bool]:
    return [bool(message.misfit) for message in world.ledger.messages(RunKey(run.store_id, run.run_id))]


def test_a_valid_structured_answer_ends_the_run_with_json() -> None:
    world, run = played(calls('look {"n":1}'), says(f"```json\n{GOOD}\n```"))
    assert (run.state, json.loads(run.output_json)) == (RunState.COMPLETED, {"a": 1, "b": 2})
    assert world.registry.outputs == [GOOD], "a message with calls is not an answer"
    assert [request.response_format for request in world.model.requests] == [output.asked(FORM)] * 2


def test_an_invalid_answer_is_retried_with_the_error_and_schema() -> None:
    world, run = played(says(WORSE), says(BAD), says(GOOD))
    assert (run.state, run.output_text, run.round) == (RunState.COMPLETED, GOOD, 3)
    last = world.model.requests[-1].messages
    assert [message["role"] for message in last] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert "the answer is not JSON" in last[3]["content"]
    assert all(part in last[5]["content"] for part in ("fewer than 2 members", FORM.schema_json.decode()))
    assert misfits(world, run) == [False, True, True, False]


def test_the_run_fails_after_the_third_invalid_answer() -> None:
    world, run = played(says(WORSE), says(BAD), says(BAD), says(GOOD))
    failure = present(run.failure)
    assert (failure.reason, failure.failure_class) == (output.OUTPUT_INVALID, FailureClass.LIMIT)
    assert (run.state, "fewer than 2 members" in failure.message) == (RunState.FAILED, True)
    assert (run.output_text, run.output_json, len(world.model.requests)) == (BAD, b"", 3)


@pytest.mark.parametrize("policy", RoundLimitPolicy)
@pytest.mark.parametrize("last", [says(BAD), calls('look {"n":2}', text=BAD)], ids=["words", "words and a call"])
def test_the_final_answer_at_the_round_limit_is_validated_too(policy: RoundLimitPolicy, last: Script) -> None:
    options: dict[str, Any] = {"limits": Limits(rounds_max=1), "round_limit_policy": policy}
    first = calls('look {"n":1}') if policy is RoundLimitPolicy.FINAL_ANSWER else says(BAD)
    _, run = played(first, last, says(GOOD), **options)
    assert (run.state, present(run.failure).reason) == (RunState.FAILED, output.OUTPUT_INVALID)


def test_a_truncated_structured_answer_is_invalid() -> None:
    _, run = played([TextPiece(text='{"a":1,"b"'), Finished(reason="length")], says(GOOD))
    assert run.output_text == GOOD


def test_answers_are_not_accepted_while_the_registry_is_unavailable() -> None:
    world, run = played(says(GOOD), unavailable_checks=3)
    assert (run.state, world.registry.outputs) == (RunState.COMPLETED, [GOOD] * 4)


@given(answers=st.lists(st.sampled_from([GOOD, BAD, WORSE, f"```\n{GOOD}\n```", "call"]), max_size=8), data=st.data())
def test_a_run_completes_only_with_a_valid_answer(answers: list[str], data: st.DataObject) -> None:
    """The rule holds for all answers, round limits and policies."""
    scripts = [calls('look {"n":1}') if answer == "call" else says(answer) for answer in answers]
    limits = Limits(rounds_max=data.draw(st.integers(1, 6)), identical_calls_max=100)
    world, run = played(*scripts, limits=limits, round_limit_policy=data.draw(st.sampled_from(RoundLimitPolicy)))
    assert (run.state is RunState.COMPLETED) == bool(run.output_json)
    if run.state is RunState.COMPLETED:
        assert json.loads(run.output_json) == json.loads(GOOD)
    else:
        assert present(run.failure).reason in {output.OUTPUT_INVALID, "ROUND_LIMIT", "STUCK_LOOP"}
    assert sum(misfits(world, run)) <= output.TRIES_MAX


@given(st.text(), st.sampled_from(["", "json", "JSON"]), st.sampled_from(["", " ", "\n\n"]))
def test_only_a_single_markdown_fence_is_stripped(inside: str, language: str, around: str) -> None:
    inside = inside.strip()
    if "`" not in inside and inside:
        assert output.document(f"{around}```{language}\n{inside}\n```{around}") == inside
        assert output.document(f"{inside}{around}") == inside
    assert output.document(f"x```\n{inside}\n```") == f"x```\n{inside}\n```"


def state_of(*messages: Message) -> State:
    return State(run=replace(RUN, options=RunOptions(response_format=FORM)), messages=messages)


def test_errors_of_an_earlier_run_are_shown_without_its_schema() -> None:
    earlier = Message(role=Role.ASSISTANT, run_id=RunId("before"), text=BAD, misfit="a: is missing")
    history_sent = history.of_run(state_of(Message(role=Role.USER, run_id=RunId("before"), text="hi"), earlier))
    content = history_sent[-1]["content"]
    assert ("a: is missing" in content, "minProperties" in content) == (True, False)


def test_a_response_format_applies_only_to_its_own_run() -> None:
    """An agent that executes a delegated task uses its own response format, or none."""
    own = RunOptions(response_format=FORM, reasoning_effort=ReasoningEffort.LOW)
    plain = AgentVersion(definition=AgentDefinition(name="clerk"), version=1)
    formal_options = AskedOptions(response_format=replace(FORM, name="sum"), reasoning_effort=ReasoningEffort.HIGH)
    formal = AgentVersion(definition=AgentDefinition(name="clerk", options=formal_options), version=1)
    given_plain, given_formal = agents.delegated(plain, own), agents.delegated(formal, own)
    assert (given_plain.response_format, given_plain.reasoning_effort) == (None, ReasoningEffort.LOW)
    formal_format = replace(FORM, name="sum")
    assert (given_formal.response_format, given_formal.reasoning_effort) == (formal_format, ReasoningEffort.HIGH)
