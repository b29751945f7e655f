"""Jobs that are paused and resumed, and what goes on meanwhile."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest

from pawl.agent_loop.domain import loop_state
from pawl.agent_loop.domain.call import CallState
from pawl.agent_loop.domain.command import Cancel, Pause
from pawl.agent_loop.domain.run import RunState, StopCause, WaitKind
from tests.fakes.model import calls
from tests.fakes.registry import tool
from tests.unit.agent_loop.test_job_conditions import told
from tests.unit.agent_loop.test_jobs import Story, background


async def test_a_paused_series_begins_nothing_and_goes_on_on_its_beat() -> None:
    """What is at work ends; what was due meanwhile is skipped, also where nobody reads the pause before it is due."""

    story = Story(calls(background("look", _interval=60, _stopAfter=3)), seconds=5.0)
    story.say("watch it")
    await story.until(lambda: any(story.calls(job) for job in story.jobs))
    (job,) = story.jobs
    key, ledger = story.key(job), story.world.ledger
    await ledger.send(key, Pause())
    await ledger.send(key, Pause())
    await story.until(lambda: WaitKind.PAUSED in ledger.run(key).waits)
    assert [call.state for call in story.calls(job)] == [CallState.SUCCEEDED], "what is at work ends"
    assert story.world.ledger.tables.runs[key].claim_at is None, "nothing is due"
    with suppress(TimeoutError):
        await story.until(lambda: len(story.calls(job)) > 1, seconds_max=200.0)
    assert len(story.calls(job)) == 1
    await ledger.send(key, Pause(resumes=True))
    await story.until(lambda: story.is_over)
    assert job.job is not None
    begins = [round(((call.create_time or 0) - job.job.begin_time) / 60, 1) for call in story.calls(job)]
    assert (begins, ledger.run(key).state) == ([0, 4, 5], RunState.COMPLETED)


async def test_the_end_time_of_a_paused_series_holds_and_it_can_be_stopped() -> None:
    both = (background("look", _interval=60, _duration=5), background("work", _interval=60, _stopAfter=5))
    story = Story(calls(*both), seconds=1.0)
    story.say("watch them")
    await story.until(lambda: len(story.jobs) == 2)
    ledger = story.world.ledger
    for job in story.jobs:
        await ledger.send(story.key(job), Pause())
    await story.until(lambda: all(WaitKind.PAUSED in ledger.run(story.key(job)).waits for job in story.jobs))
    with_end, other = (story.key(job) for job in story.jobs)
    with suppress(TimeoutError):
        await story.until(lambda: False, seconds_max=400.0)
    assert (ledger.run(with_end).state, ledger.run(other).state) == (RunState.COMPLETED, RunState.WAITING)
    await ledger.send(other, Cancel(cause=StopCause.USER))
    await story.until(lambda: story.is_over)
    assert ledger.run(other).state is RunState.CANCELLED
    assert all(job.round <= 1 for job in story.jobs)


async def test_a_rule_that_denies_an_iteration_pauses_the_series_and_its_conversation_is_told_why() -> None:
    """ASYNC-2: it fails no more; resumed once the rule is gone it goes on."""

    story = Story(calls(background("look", _interval=60, _stopAfter=4, _reports="end")), seconds=1.0)
    story.say("watch it")
    await story.until(lambda: any(story.calls(job) for job in story.jobs))
    (job,) = story.jobs
    key, ledger, registry = story.key(job), story.world.ledger, story.world.registry
    allowed = registry.verdicts["look"]
    why = "rule rule_1 denies it: not at night"
    registry.verdicts["look"] = tool("REFUSE", error_reason="NOT_ALLOWED", error_message=why)
    await story.until(lambda: WaitKind.PAUSED in ledger.run(key).waits)
    denied = ledger.run(key).round
    assert json.loads(ledger.run(key).output_text)["paused"] == why
    with suppress(TimeoutError):
        await story.until(lambda: ledger.run(key).round > denied, seconds_max=300.0)
    assert [call.state for call in story.calls(job)][-1] is CallState.FAILED
    assert ledger.run(key).round == denied, "it tries no more"
    (notice,) = told(story)
    assert (notice["iteration"], notice["state"], notice["result"]["paused"]) == (denied, "PAUSED", why)
    registry.verdicts["look"] = allowed
    await ledger.send(key, Pause(resumes=True))
    await story.until(lambda: story.is_over)
    assert (ledger.run(key).state, ledger.run(key).round) == (RunState.COMPLETED, 4)
    assert "paused" not in ledger.run(key).output_text


def test_a_worker_that_knows_no_pause_lets_a_paused_job_go() -> None:
    """It reads the place of a job of another kind than it knows, and a newer version is all that it can tell of it."""
    paused = loop_state.write(loop_state.LoopState(cursor=loop_state.PausedJob()))
    assert isinstance(loop_state.read(paused).cursor, loop_state.PausedJob)
    with pytest.raises(loop_state.NewerVersion):
        loop_state.read(paused.replace(b"paused job", b"another job"))
