"""The execution of runs ("drives") with the real rules of the ledger, and the shared token budget (LOOP-12)."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import AsyncExitStack

import pytest
from msgspec.structs import replace

from pawl.agent_loop.loop.drive import Drive, DriveEnd
from pawl.agent_loop.loop.rules.call import CallResult
from pawl.agent_loop.loop.rules.fact import Cancel, OutputDelta, ToolProgress, TopUp, Warned
from pawl.agent_loop.loop.rules.limits import Limits
from pawl.agent_loop.loop.rules.message import Role
from pawl.agent_loop.loop.rules.run import RunOptions, TokenBudgetPolicy, ToolChoice, ToolChoiceMode
from pawl.agent_loop.model.request import ModelRequest, UsageReport
from pawl.chassis.ids import RunKey
from pawl.event.v1 import run_pb2
from pawl.values import ENDED, CallState, Progress, RunState, StopCause, WaitKind
from tests.fakes.loop_world import World
from tests.fakes.model import Script, calls, says
from tests.unit.agent_loop.scenario import VERDICTS, finished, present
from tests.unit.agent_loop.test_jobs import Story, background


@pytest.mark.parametrize(("commit_seconds", "least", "most"), [(0.0, 15, 21), (0.05, 3, 5), (0.3, 2, 4)])
async def test_slow_commits_reduce_the_number_of_output_events(commit_seconds: float, least: int, most: int) -> None:
    """EVT-2: otherwise output would slow down a busy machine even more."""
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
    """LOOP-11: a separate model call writes the summary, which replaces the messages that it covers."""

    options = RunOptions(limits=Limits(context_bytes_max=10_000, result_bytes_per_round_max=2_000, rounds_max=50))
    rounds = [calls(f'write {{"n":{n}}}') for n in range(12)]
    world = World(VERDICTS, [])
    world.registry.results["write"] = CallResult(content_json=json.dumps("x" * 5_000).encode())
    answers = iter([*rounds, says("All is done.")])
    world.model.reply = lambda request: says("In short.") if _is_summary(request) else next(answers)
    key = world.ledger.submit("hello", options)

    await world.finish(key)

    assert world.ledger.run(key).output_text == "All is done."
    summaries = [message.text for message in world.ledger.messages(key) if message.role is Role.SUMMARY]
    assert (len(summaries) >= 2, set(summaries)) == (True, {"In short."})
    sizes = [len(json.dumps(request.messages)) for request in world.model.requests if not _is_summary(request)]
    assert max(sizes) < 15_000
    assert "In short." in json.dumps(world.model.requests[-1].messages)
    # The output of the summary call is not part of the answer.
    assert not any(isinstance(event, OutputDelta) and "In short" in event.text for event in world.ledger.events(key))


def _is_summary(request: ModelRequest) -> bool:
    return "Summarise" in str(request.messages[0]["content"])


async def cancelled_after(world: World, seconds: float) -> tuple[RunKey, tuple[int, int]]:
    """Return a run that was cancelled after so many seconds, and the model and tool calls that ran until then."""
    key = world.ledger.submit("hello")
    drive = Drive(await world.claim(), world.dependencies)
    running = asyncio.create_task(drive.run())
    await asyncio.sleep(seconds)
    active = world.model.streaming, world.registry.running
    await world.ledger.send(key, Cancel(cause=StopCause.USER))
    drive.wake()
    assert await running is DriveEnd.ENDED
    assert (world.model.streaming, world.registry.running) == (0, 0)
    return key, active


async def test_a_cancel_stops_the_model_immediately_and_keeps_its_output() -> None:
    world = World(VERDICTS, [[*says("Once upon a time", chunks=4)[:2], 60.0]])
    key, active = await cancelled_after(world, 5.0)
    assert (active, world.clock.now() < 1010) == ((1, 0), True)
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
    """LOOP-6: partial output is kept, but is not the answer of the run."""

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
    key, active = await cancelled_after(world, 3.0)
    assert (active, world.registry.effects, len(world.registry.order)) == ((0, 2), {}, 2)
    assert [call.state for call in world.ledger.calls(key)] == [CallState.CANCELLED] * 3


async def test_the_run_timeout_stops_running_tools() -> None:
    """LOOP-6, D4, C11: time during which the run is parked does not count."""

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
    assert (world.registry.running, world.ledger.calls(key)[-1].state) == (0, CallState.CANCELLED)


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
    failure = present(world.ledger.run(key).failure)
    assert (failure.reason, failure.failure_class, "absent" in failure.message) == ("TOOL_NOT_FOUND", "LIMIT", True)


@pytest.mark.parametrize("wanted", ["", "tool_199"])
async def test_tools_over_the_limit_are_omitted_except_for_the_forced_one(wanted: str) -> None:
    world = World(dict.fromkeys((f"tool_{number:03}" for number in range(200)), VERDICTS["look"]), [says("hello")])
    choice = ToolChoice(mode=ToolChoiceMode.TOOL, tool_name=wanted) if wanted else ToolChoice()
    key = world.ledger.submit("hello", RunOptions(tool_choice=choice))
    await world.finish(key)
    (request,) = world.model.requests
    names = {tool["function"]["name"] for tool in request.tools}
    assert (world.ledger.run(key).state, len(names)) == (RunState.COMPLETED, 128)
    assert not wanted or wanted in names
    (warned,) = [event for event in world.ledger.events(key) if isinstance(event, Warned)]
    assert (warned.reason, warned.message.partition(" were")[0]) == ("TOOLS_LEFT_OUT", "72 tools")


@pytest.mark.parametrize("seed", range(8))
async def test_a_run_and_its_jobs_agents_and_turns_stay_within_its_budget(seed: int) -> None:
    """LOOP-12: only model calls that are running when the budget is used up may exceed it."""
    story, draw, at_once = Story(seconds=5.0), random.Random(seed), [0]
    model, budget = story.world.model, draw.randint(1500, 5000)

    def reply(_: ModelRequest) -> Script:
        at_once.append(model.streaming + 1)
        hires = [f'run_agent {{"task":"n{n}"}}' for n in range(2)]
        series = [background("run_agent", task=f"b{n}", _interval=7, _stopAfter=3) for n in range(2)]
        wanted = draw.sample(
            [*hires, *series, background("work"), 'look {"n":1}'], draw.randint(len(model.requests) < 6, 3)
        )
        script = calls(*wanted) if wanted else says("Done.")
        usage = UsageReport(input_tokens=200, output_tokens=100)
        return [draw.random(), *(usage if isinstance(piece, UsageReport) else piece for piece in script)]

    model.reply = reply
    limits = Limits(total_tokens_max=budget, agent_depth_max=2)
    key = story.say("do it", RunOptions(limits=limits, token_budget_policy=TokenBudgetPolicy.FAIL))
    await story.until(lambda: all(run.state in ENDED for run in story.runs), poll_seconds=30.0)
    used = 300 * len(model.requests)
    assert budget - 800 < used < budget + 300 * max(at_once), "less is too little for the first call of an agent"
    assert story.world.ledger.row(key).shared_tokens_used == used


async def test_a_run_with_an_exhausted_budget_expires_unless_topped_up() -> None:
    """LOOP-12: a top-up that is too small does not resume the run."""
    story = Story(seconds=20.0)
    started = calls(background("run_agent", task="b0"), 'work {"n":1}')
    costs = iter([(started, 100), (says("Done."), 2600), (says("Finished."), 100)])

    def reply(_: ModelRequest) -> Script:
        script, tokens = next(costs)
        usage = UsageReport(input_tokens=tokens, output_tokens=100)
        return [usage if isinstance(piece, UsageReport) else piece for piece in script]

    story.world.model.reply = reply
    key = story.say("do it", RunOptions(limits=Limits(total_tokens_max=3000, top_up_timeout_seconds=120.0)))
    ledger = story.world.ledger
    await story.until(lambda: WaitKind.BUDGET in ledger.run(key).waits)
    waiting = ledger.run(key)
    await ledger.send(key, TopUp(tokens=waiting.tokens_needed - 1))
    await story.until(lambda: ledger.run(key).state in ENDED, seconds_max=300.0)
    later = ledger.log(key)[waiting.last_seq :]
    changes = [event.run_changed.run.state for event in later if event.HasField("run_changed")]
    assert changes == [run_pb2.RUN_STATE_EXPIRED], "it does not resume with too few tokens"


async def test_an_exhausted_budget_fails_one_turn_and_keeps_the_notices() -> None:
    story = Story(calls(background("work", _interval=600, _stopAfter=4)), says("Begun."), says("I see."))
    story.say("do it", RunOptions(limits=Limits(total_tokens_max=1000)))
    await story.until(lambda: bool(story.jobs) and all(run.state in ENDED for run in story.runs))
    turns = [turn.state for turn in story.turns]
    assert turns.count(RunState.FAILED) == 1
    key = story.say("and?")
    await story.until(lambda: story.world.ledger.run(key).state in ENDED)
    assert (len(story.turns), story.waiting) == (len(turns), [])


async def test_a_worker_that_stops_releases_background_runs_without_waiting_for_slots() -> None:
    world = World(VERDICTS, [says("Hello.")])
    world.ledger.submit("hello")
    drive = Drive(replace(await world.claim(), in_background=True), world.dependencies)
    async with AsyncExitStack() as held:
        for _ in range(4):
            await held.enter_async_context(world.dependencies.background_steps.held())
        began = world.clock.monotonic()
        drive.hand_over()
        assert await drive.run() is DriveEnd.HANDED_OVER
        assert world.clock.monotonic() - began < 1


async def test_a_checkpoint_does_not_cause_progress_to_be_reported_again() -> None:
    reports = [Progress(message="half"), Progress(message="half", has_checkpoint=True), Progress(has_checkpoint=True)]
    world = World(VERDICTS, [calls("look {}"), says("Done.")])
    world.registry.progress = [(5.0, each) for each in [*reports, Progress(fraction=0.9, has_checkpoint=True)]]
    key = world.ledger.submit("hello")
    await world.finish(key)
    shown = [event for event in world.ledger.events(key) if isinstance(event, ToolProgress)]
    assert [(each.fraction, each.message) for each in shown] == [(None, "half"), (0.9, "")]
