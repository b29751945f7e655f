"""Answers in a form: never COMPLETED with one that does not fit, and the model is told what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pawl.agent_loop.adapters import wire
from pawl.agent_loop.domain import agents, history, output
from pawl.agent_loop.domain.agents import AgentDefinition, AgentVersion
from pawl.agent_loop.domain.limits import Limits
from pawl.agent_loop.domain.loop_state import NewerVersion
from pawl.agent_loop.domain.message import Message, Role
from pawl.agent_loop.domain.model import Finished, TextPiece
from pawl.agent_loop.domain.options import AskedOptions
from pawl.agent_loop.domain.run import (
    FailureClass,
    ReasoningEffort,
    ResponseFormat,
    RoundLimitPolicy,
    Run,
    RunOptions,
    RunState,
)
from pawl.agent_loop.domain.state import State
from pawl.chassis.ids import ConversationId, RunId, RunKey, StoreId, UserId
from pawl.event.v1 import run_pb2
from tests.fakes import virtual_time
from tests.fakes.loop_world import World
from tests.fakes.model import Script, calls, says
from tests.unit.agent_loop.scenario import VERDICTS, present

FORM = ResponseFormat(schema_json=b'{"type":"object","minProperties":2}')
GOOD, BAD, WORSE = '{"a":1,"b":2}', '{"a":1}', "It is a."


def played(*scripts: Script, away: int = 0, **options: Any) -> tuple[World, RunKey]:
    """A run with a form, driven to its end."""

    async def main() -> tuple[World, RunKey]:
        world = World(VERDICTS, list(scripts))
        world.registry.unchecked_outputs = away
        key = world.ledger.submit("hello", RunOptions(**{"response_format": FORM, **options}))
        await world.finish(key)
        return world, key

    return virtual_time.run(main())


def test_an_answer_that_fits_ends_the_run_and_is_there_as_json() -> None:
    world, key = played(calls('look {"n":1}'), says(f"```json\n{GOOD}\n```"))
    run = world.ledger.run(key)
    assert (run.state, json.loads(run.output_json)) == (RunState.COMPLETED, {"a": 1, "b": 2})
    assert world.registry.outputs == [GOOD], "what asks for calls is no answer yet"
    assert [request.response_format for request in world.model.requests] == [output.asked(FORM)] * 2


def test_the_model_is_told_what_is_wrong_and_what_would_fit() -> None:
    world, key = played(says(WORSE), says(BAD), says(GOOD))
    run = world.ledger.run(key)
    assert (run.state, run.output_text, run.round) == (RunState.COMPLETED, GOOD, 3)
    last = world.model.requests[-1].messages
    assert [message["role"] for message in last] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert "answer: is not JSON" in last[3]["content"]
    assert "fewer than 2 members" in last[5]["content"]
    assert FORM.schema_json.decode() in last[5]["content"]
    assert [bool(message.misfit) for message in world.ledger.messages(key)] == [False, True, True, False]


def test_the_third_answer_that_does_not_fit_fails_the_run() -> None:
    world, key = played(says(WORSE), says(BAD), says(BAD), says(GOOD))
    run = world.ledger.run(key)
    assert (run.state, present(run.failure).reason) == (RunState.FAILED, output.OUTPUT_INVALID)
    assert present(run.failure).failure_class is FailureClass.LIMIT
    assert "fewer than 2 members" in present(run.failure).message
    assert (run.output_text, run.output_json, len(world.model.requests)) == (BAD, b"", 3)


@pytest.mark.parametrize("policy", RoundLimitPolicy)
@pytest.mark.parametrize("last", [says(BAD), calls('look {"n":2}', text=BAD)], ids=["words", "words and a call"])
def test_the_final_answer_of_the_round_limit_is_checked_too(policy: RoundLimitPolicy, last: Script) -> None:
    options: dict[str, Any] = {"limits": Limits(rounds_max=1), "round_limit_policy": policy}
    first = calls('look {"n":1}') if policy is RoundLimitPolicy.FINAL_ANSWER else says(BAD)
    world, key = played(first, last, says(GOOD), **options)
    run = world.ledger.run(key)
    assert (run.state, present(run.failure).reason) == (RunState.FAILED, output.OUTPUT_INVALID)


def test_an_answer_that_was_cut_off_does_not_pass() -> None:
    world, key = played([TextPiece(text='{"a":1,"b"'), Finished(reason="length")], says(GOOD))
    assert world.ledger.run(key).output_text == GOOD


def test_nothing_passes_while_nobody_can_check_it() -> None:
    world, key = played(says(GOOD), away=3)
    assert world.ledger.run(key).state is RunState.COMPLETED
    assert world.registry.outputs == [GOOD] * 4


@given(answers=st.lists(st.sampled_from([GOOD, BAD, WORSE, f"```\n{GOOD}\n```", "call"]), max_size=8), data=st.data())
def test_a_run_completes_only_with_what_fits(answers: list[str], data: st.DataObject) -> None:
    """Whatever the model says, the limits, and the takeovers."""
    scripts = [calls('look {"n":1}') if answer == "call" else says(answer) for answer in answers]
    limits = Limits(rounds_max=data.draw(st.integers(1, 6)), identical_calls_max=100)
    world, key = played(*scripts, limits=limits, round_limit_policy=data.draw(st.sampled_from(RoundLimitPolicy)))
    run = world.ledger.run(key)
    assert (run.state is RunState.COMPLETED) == bool(run.output_json)
    if run.state is RunState.COMPLETED:
        assert json.loads(run.output_json) == json.loads(GOOD)
    else:
        assert present(run.failure).reason in {output.OUTPUT_INVALID, "ROUND_LIMIT", "STUCK_LOOP"}
    assert sum(bool(message.misfit) for message in world.ledger.messages(key)) <= output.TRIES_MAX


@given(st.text(), st.sampled_from(["", "json", "JSON"]), st.sampled_from(["", " ", "\n\n"]))
def test_one_block_of_markdown_is_taken_off_and_nothing_else(inside: str, language: str, around: str) -> None:
    inside = inside.strip()
    if "`" not in inside and inside:
        assert output.document(f"{around}```{language}\n{inside}\n```{around}") == inside
        assert output.document(f"{inside}{around}") == inside
    assert output.document(f"x```\n{inside}\n```") == f"x```\n{inside}\n```"


def state_of(*messages: Message, form: ResponseFormat | None = FORM) -> State:
    run = Run(
        store_id=StoreId("s"),
        user_id=UserId("u"),
        conversation_id=ConversationId("c"),
        run_id=RunId("r"),
        options=RunOptions(response_format=form),
    )
    return State(run=run, messages=messages)


def test_of_an_earlier_run_the_model_reads_what_was_wrong_and_not_its_schema() -> None:
    earlier = Message(role=Role.ASSISTANT, run_id=RunId("before"), text=BAD, misfit="a: is missing")
    told = history.of_run(state_of(Message(role=Role.USER, run_id=RunId("before"), text="hi"), earlier))
    assert "a: is missing" in told[-1]["content"]
    assert "minProperties" not in told[-1]["content"]


def test_an_effort_of_a_newer_version_leaves_the_run_to_it() -> None:
    message = run_pb2.RunOptions(reasoning_effort=77)  # type: ignore[arg-type]  # of a newer version
    with pytest.raises(NewerVersion, match="77"):
        wire.OPTIONS.read(message)


def test_the_form_is_for_the_run_that_was_asked_for_it() -> None:
    """An agent that is given a task has a form of its own, or none."""
    own = RunOptions(response_format=FORM, reasoning_effort=ReasoningEffort.LOW)
    plain = AgentVersion(definition=AgentDefinition(name="clerk"), version=1)
    formal_options = AskedOptions(response_format=replace(FORM, name="sum"), reasoning_effort=ReasoningEffort.HIGH)
    formal = AgentVersion(definition=AgentDefinition(name="clerk", options=formal_options), version=1)
    given_plain, given_formal = agents.delegated(plain, own), agents.delegated(formal, own)
    assert (given_plain.response_format, given_plain.reasoning_effort) == (None, ReasoningEffort.LOW)
    assert given_formal.response_format == replace(FORM, name="sum")
    assert given_formal.reasoning_effort is ReasoningEffort.HIGH
