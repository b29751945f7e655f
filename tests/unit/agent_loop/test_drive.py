"""A drive over the real rules of the ledger."""

from __future__ import annotations

import asyncio
import json

import pytest

from pawl.agent_loop.loop.drive import Drive, DriveEnd
from pawl.agent_loop.loop.rules.call import CallResult
from pawl.agent_loop.loop.rules.fact import Cancel, OutputDelta, ToolProgress, Warned
from pawl.agent_loop.loop.rules.limits import Limits
from pawl.agent_loop.loop.rules.message import Role
from pawl.agent_loop.loop.rules.run import RunOptions, ToolChoice, ToolChoiceMode
from pawl.agent_loop.model.request import ModelRequest
from pawl.values import CallState, RunState, StopCause
from tests.fakes.loop_world import World
from tests.fakes.model import calls, says
from tests.unit.agent_loop.scenario import VERDICTS, finished, present


async def test_progress_of_a_tool_is_reported() -> None:
    """TOOL-8: the event has the name of the tool, the fraction and the message."""

    world = World(VERDICTS, [calls("look")])
    world.registry.tells_progress = True
    key = world.ledger.submit("hello")

    await world.finish(key)

    (progress,) = [event for event in world.ledger.events(key) if isinstance(event, ToolProgress)]
    assert (progress.tool_name, progress.fraction, progress.message) == ("look", 0.5, "half")


@pytest.mark.parametrize(("commit_seconds", "least", "most"), [(0.0, 15, 21), (0.05, 3, 5), (0.3, 2, 4)])
async def test_slow_commits_make_output_events_fewer(commit_seconds: float, least: int, most: int) -> None:
    """EVT-2: otherwise a busy machine becomes busier."""
    *pieces, usage, end = says("x" * 100, chunks=100)
    world = World(VERDICTS, [[each for piece in pieces for each in (piece, 0.02)] + [usage, end]])

    async def slow(request: str, done: bool) -> None:
        await asyncio.sleep(commit_seconds if request == "CommitRun" and not done else 0.0)

    world.ledger.fault = slow
    key = world.ledger.submit("hello")

    await world.finish(key)

    shown = [event.text for event in world.ledger.events(key) if isinstance(event, OutputDelta)]
    assert "".join(shown) == "x" * 100
    assert least <= len(shown) <= most


async def test_a_long_history_is_summarised_and_the_run_continues() -> None:
    """LOOP-11: a separate model call writes the summary, which replaces the messages it covers."""

    options = RunOptions(limits=Limits(context_bytes_max=10_000, result_bytes_per_round_max=2_000, rounds_max=50))
    rounds = [calls(f'write {{"n":{n}}}') for n in range(12)]
    world = World(VERDICTS, [])
    world.registry.results["write"] = CallResult(content_json=json.dumps("x" * 5_000).encode())
    answers = iter([*rounds, says("All is done.")])
    world.model.reply = lambda request: says("In short.") if _is_summary(request) else next(answers)
    key = world.ledger.submit("hello", options)

    await world.finish(key)

    assert world.ledger.run(key).output_text == "All is done."
    summaries = [message for message in world.ledger.messages(key) if message.role is Role.SUMMARY]
    assert len(summaries) >= 2
    assert all(summary.text == "In short." for summary in summaries)
    sizes = [len(json.dumps(request.messages)) for request in world.model.requests if not _is_summary(request)]
    assert max(sizes) < 15_000
    assert "In short." in json.dumps(world.model.requests[-1].messages)
    # The output of the summary call is not part of the answer.
    assert not any(isinstance(event, OutputDelta) and "In short" in event.text for event in world.ledger.events(key))


def _is_summary(request: ModelRequest) -> bool:
    return "Summarise" in str(request.messages[0]["content"])


async def test_a_cancel_stops_the_model_immediately_and_keeps_its_output() -> None:
    world = World(VERDICTS, [[*says("Once upon a time", chunks=4)[:2], 60.0]])
    key = world.ledger.submit("hello")
    claim = await world.claim()
    drive = Drive(claim, world.dependencies)
    running = asyncio.create_task(drive.run())
    await asyncio.sleep(5.0)
    assert world.model.streaming == 1

    await world.ledger.send(key, Cancel(cause=StopCause.USER))
    drive.wake()
    assert await running is DriveEnd.ENDED

    assert world.clock.now() < 1010
    assert world.model.streaming == 0
    run = world.ledger.run(key)
    assert (run.state, run.stop_cause, run.output_text) == (RunState.CANCELLED, StopCause.USER, "Once upo")
    message = world.ledger.messages(key)[-1]
    assert (message.text, message.interrupted) == ("Once upo", True)
    shown = world.ledger.events(key)[message.first_output_seq - 1 : message.last_output_seq]
    assert "".join(event.text for event in shown if isinstance(event, OutputDelta)) == "Once upo"


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(round_timeout_seconds=5), "ROUND_TIMEOUT"),
        (Limits(run_timeout_seconds=5), "RUN_TIMEOUT"),
    ],
)
async def test_a_run_whose_model_exceeds_a_limit_fails(limits: Limits, reason: str) -> None:
    """LOOP-6: partial output is kept, but is not an answer."""

    world, key = await finished(
        VERDICTS, [[*says("Once upon a time", chunks=4)[:2], 60.0]], options=RunOptions(limits=limits)
    )
    run = world.ledger.run(key)
    assert (run.state, run.failure and run.failure.reason) == (RunState.FAILED, reason)
    message = world.ledger.messages(key)[-1]
    assert (message.text, message.interrupted) == ("Once upo", True)


async def test_a_cancel_stops_running_tools_and_settles_their_calls() -> None:
    """C5, C11: a call that had not started never starts."""

    world = World(VERDICTS, [calls('write {"n":1}', 'look {"n":1}', 'write {"n":2}')], seconds=8.0)
    key = world.ledger.submit("hello")
    drive = Drive(await world.claim(), world.dependencies)
    running = asyncio.create_task(drive.run())
    await asyncio.sleep(3.0)
    assert world.registry.running == 2

    await world.ledger.send(key, Cancel(cause=StopCause.USER))
    drive.wake()
    await running

    assert world.registry.running == 0
    assert not world.registry.effects
    assert [call.state for call in world.ledger.calls(key)] == [CallState.CANCELLED] * 3
    assert len(world.registry.order) == 2


async def test_the_run_timeout_stops_running_tools() -> None:
    """LOOP-6, D4, C11: parked time does not count."""

    options = RunOptions(limits=Limits(run_timeout_seconds=20, tool_timeout_seconds=100))
    world = World(VERDICTS, [calls("ask"), calls("write")], seconds=90.0)
    key = world.ledger.submit("hello", options)
    await world.drive()
    await asyncio.sleep(1000)
    await world.respond(key)
    started_at = world.clock.now()

    await world.drive()

    run = world.ledger.run(key)
    assert (run.state, present(run.failure).reason) == (RunState.FAILED, "RUN_TIMEOUT")
    assert 15 <= world.clock.now() - started_at <= 25
    assert world.registry.running == 0
    assert world.ledger.calls(key)[-1].state is CallState.CANCELLED


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        (ToolChoice(), None),
        (ToolChoice(mode=ToolChoiceMode.NONE), "none"),
        (ToolChoice(mode=ToolChoiceMode.REQUIRED), "required"),
        (
            ToolChoice(mode=ToolChoiceMode.TOOL, tool_name="look"),
            {"type": "function", "function": {"name": "look"}},
        ),
    ],
)
async def test_a_forced_tool_choice_applies_to_the_first_call_only(choice: ToolChoice, sent: object) -> None:
    """LOOP-10: later calls leave the choice to the model."""

    world, _ = await finished(VERDICTS, [calls("look")], options=RunOptions(tool_choice=choice))
    assert [request.tool_choice for request in world.model.requests] == [sent, None]


@pytest.mark.parametrize(
    "options",
    [
        RunOptions(tool_names=("absent",)),
        RunOptions(tool_choice=ToolChoice(mode=ToolChoiceMode.TOOL, tool_name="absent")),
    ],
    ids=["in the list", "as the choice"],
)
async def test_a_run_that_names_a_missing_tool_fails_with_a_reason(options: RunOptions) -> None:
    world, key = await finished(VERDICTS, [], options=options)
    failure = world.ledger.run(key).failure
    assert (present(failure).reason, present(failure).failure_class) == ("TOOL_NOT_FOUND", "LIMIT")
    assert "absent" in present(failure).message


@pytest.mark.parametrize("wanted", ["", "tool_199"])
async def test_tools_over_the_limit_are_omitted_except_for_the_forced_one(wanted: str) -> None:
    verdicts = dict.fromkeys((f"tool_{number:03}" for number in range(200)), VERDICTS["look"])
    world = World(verdicts, [says("hello")])
    choice = ToolChoice(mode=ToolChoiceMode.TOOL, tool_name=wanted) if wanted else ToolChoice()
    key = world.ledger.submit("hello", RunOptions(tool_choice=choice))
    await world.finish(key)
    assert world.ledger.run(key).state is RunState.COMPLETED
    (request,) = world.model.requests
    names = {tool["function"]["name"] for tool in request.tools}
    assert len(names) == 128
    assert not wanted or wanted in names
    (warned,) = [event for event in world.ledger.events(key) if isinstance(event, Warned)]
    assert warned.reason == "TOOLS_LEFT_OUT"
    assert warned.message.startswith("72 tools were left out")
