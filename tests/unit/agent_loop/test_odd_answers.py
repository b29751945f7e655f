"""Answers that are no answers, are cut off, or carry what only the model server understands."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from pawl.agent_loop.adapters.model import words
from pawl.agent_loop.domain.call import CallState
from pawl.agent_loop.domain.event import RoundRetrying, Warned
from pawl.agent_loop.domain.message import Role
from pawl.agent_loop.domain.model import CallPiece, Finished, Piece, ProviderState, ReasoningPiece, TextPiece
from pawl.agent_loop.domain.run import RunState
from pawl.chassis.ids import RunKey
from tests.fakes import virtual_time
from tests.fakes.loop_world import World
from tests.fakes.model import Script, says
from tests.unit.agent_loop.scenario import VERDICTS

NOTHING: Script = [ReasoningPiece(text="hm"), Finished(reason="stop")]
USED_UP: Script = [ReasoningPiece(text="hm"), Finished(reason="length")]


def played(*scripts: Script) -> tuple[World, RunKey]:
    """A run that has ended and was answered so."""

    async def main() -> tuple[World, RunKey]:
        world = World(VERDICTS, list(scripts))
        key = world.ledger.submit("hello")
        await world.finish(key)
        return world, key

    return virtual_time.run(main())


def end_of(world: World, key: RunKey) -> tuple[RunState, str]:
    run = world.ledger.run(key)
    return run.state, run.failure.message if run.failure else run.output_text


@pytest.mark.parametrize("nothing", [NOTHING, [Finished(reason="stop")], [TextPiece(text=" \n"), *NOTHING]])
def test_an_empty_answer_is_asked_for_once_more(nothing: Script) -> None:
    world, key = played(nothing, says("Here I am."))
    assert end_of(world, key) == (RunState.COMPLETED, "Here I am.")
    assert [event.reason for event in events(world, key, RoundRetrying)] == ["EMPTY_ANSWER"]


@pytest.mark.parametrize(
    ("nothing", "said"),
    [
        (NOTHING, "The model's answer had neither text nor a call."),
        (USED_UP, "The model reached its output limit before it gave any text or call."),
    ],
)
def test_a_second_empty_answer_is_said_in_a_sentence(nothing: Script, said: str) -> None:
    world, key = played(nothing, nothing, says("too late"))
    assert len(world.model.requests) == 2
    assert end_of(world, key) == (RunState.FAILED, said)


def test_an_answer_that_was_cut_off_is_said_to_the_user_and_to_the_model() -> None:
    cut: list[Piece] = [TextPiece(text="Once upon"), Finished(reason="length")]
    world, key = played(cut)
    assert end_of(world, key) == (RunState.COMPLETED, "Once upon")
    assert [event.reason for event in events(world, key, Warned)] == ["ANSWER_CUT_OFF"]
    assert [message.interrupted for message in world.ledger.messages(key) if message.role is Role.ASSISTANT] == [True]


def test_a_call_that_was_cut_off_says_why_its_arguments_are_no_json() -> None:
    cut: list[Piece] = [
        CallPiece(index=0, call_id="a", name="look", arguments='{"n":1}'),
        CallPiece(index=1, call_id="b", name="look", arguments='{"n"'),
        Finished(reason="length"),
    ]
    world, key = played(cut, says("Done."))
    first, second = world.ledger.calls(key)
    assert (first.state, second.state) == (CallState.SUCCEEDED, CallState.FAILED)
    assert second.result is not None
    assert b"output limit cut the arguments off" in second.result.content_json


@pytest.mark.parametrize("name", ["functions.look", "look()", "look<|channel|>commentary", " look{}", "tool:look"])
def test_what_a_model_writes_round_a_name_gets_the_name_for_an_answer(name: str) -> None:
    asked: list[Piece] = [
        CallPiece(index=0, call_id="a", name=name, arguments="{}"),
        Finished(reason="tool_calls"),
    ]
    world, key = played(asked, says("Done."))
    (call,) = world.ledger.calls(key)
    assert call.result is not None
    assert call.result.error_reason == "TOOL_NOT_FOUND"
    assert b"did you mean 'look'?" in call.result.content_json


@pytest.mark.parametrize("dies", [False, True])
def test_fields_that_pawl_does_not_know_go_back_byte_for_byte_also_after_a_takeover(*, dies: bool) -> None:
    seal = rb'{"google": {"thought_signature":"a\u002fb", "n":1e2}}'
    answer: list[Piece] = [
        ProviderState(fields_json=b'{"reasoning_details":[%b]}' % seal),
        CallPiece(index=0, call_id="a", name="look", arguments="{}", fields_json=b'{"extra_content":%b}' % seal),
        CallPiece(index=1, call_id="b", name="look", arguments='{"n":2}'),
        Finished(reason="tool_calls"),
    ]

    async def main() -> bytes:
        world = World(VERDICTS, [answer, [TextPiece(text="half"), 5.0, *says("Done.")], says("Done.")])
        key = world.ledger.submit("hello")
        if dies:
            drive = asyncio.create_task(world.drive("first"))
            await asyncio.sleep(3.0)
            drive.cancel()
            await asyncio.gather(drive, return_exceptions=True)
        await world.finish(key)
        assert len(world.model.requests) == 2 + dies
        return msgspec.json.encode(world.model.requests[-1].messages)

    sent = virtual_time.run(main())
    assert b'"reasoning_details":[%b]' % seal in sent
    assert b'"extra_content":%b' % seal in sent
    assert sent.count(seal) == 2


def events(world: World, key: RunKey, kind: type[RoundRetrying | Warned]) -> list[RoundRetrying | Warned]:
    return [event for event in world.ledger.events(key) if isinstance(event, kind)]


def test_of_what_a_server_says_only_the_beginning_is_looked_at() -> None:
    """It may say megabytes, and all runs of this process would wait."""
    assert words.on_one_line("no room " * 4) == ": no room no room no room no room"
    assert words.on_one_line(" " * words.READ_BYTES_MAX + "late") == ""
