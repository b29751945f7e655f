"""The token budget that a run shares with its jobs, agents and turns (LOOP-12)."""

from __future__ import annotations

import random

import pytest

from pawl.agent_loop.loop.rules.fact import TopUp
from pawl.agent_loop.loop.rules.limits import Limits
from pawl.agent_loop.loop.rules.run import RunOptions, TokenBudgetPolicy
from pawl.agent_loop.model.request import ModelRequest, UsageReport
from pawl.event.v1 import run_pb2
from pawl.values import ENDED, RunState, WaitKind
from tests.fakes.model import Script, calls, says
from tests.unit.agent_loop.test_jobs import Story, background


@pytest.mark.parametrize("seed", range(8))
async def test_a_run_and_its_jobs_agents_and_turns_stay_within_its_budget(seed: int) -> None:
    """LOOP-12: the budget is exceeded by at most the concurrent last calls."""
    story, draw, at_once = Story(seconds=5.0), random.Random(seed), [0]
    model, budget = story.world.model, draw.randint(1500, 5000)

    def reply(_: ModelRequest) -> Script:
        at_once.append(model.streaming + 1)
        hires = [f'hire {{"task":"n{n}"}}' for n in range(2)]
        series = [background("hire", task=f"b{n}", _interval=7, _stopAfter=3) for n in range(2)]
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
    assert used < budget + 300 * max(at_once)
    assert used > budget - 300, "the budget is used up to its end"
    assert story.world.ledger.row(key).shared_tokens_used == used


async def test_a_run_with_an_exhausted_budget_expires_unless_topped_up() -> None:
    """LOOP-12: a top-up that is too small does not resume it."""
    story = Story(seconds=20.0)
    started = calls(background("hire", task="b0"), 'work {"n":1}')
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
