"""Jobs that poll a condition without the model, and wake the model once the condition is met (ASYNC-4)."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace as replace_fields
from typing import Any

import pytest

from pawl.agent_loop.loop.rules.call import Call, CallResult
from pawl.agent_loop.loop.rules.fact import Pause
from pawl.agent_loop.loop.rules.run import Run
from pawl.values import CallState, RunState, WaitKind
from tests.fakes.model import calls, says
from tests.fakes.registry import NOT_COMPLETED, tool
from tests.unit.agent_loop.scenario import present
from tests.unit.agent_loop.test_jobs import Story, background


def notices(story: Story) -> list[Any]:
    messages = story.world.ledger.messages(story.key(story.runs[0]))
    return [notice for message in messages if message.notices_json for notice in json.loads(message.notices_json)]


async def test_a_monitor_reports_each_time_its_condition_becomes_true() -> None:
    """ASYNC-4: the job ends after the requested number of firings."""

    when = {"cel": "value.price < 20", "times": 2}
    story = Story(calls(background("look", _interval=60, _duration=600, _when=when)), seconds=0.1)
    for price in (30, 19, 18, 25):
        story.world.registry.results["look"] = CallResult(content_json=b'{"price":%d}' % price)
        seen = story.jobs[0].round if story.jobs else 0
        if not story.jobs:
            story.say("tell me whenever it is under 20")
        await story.until(lambda: len(story.jobs) == 1 and story.jobs[0].round >= seen + 2)  # noqa: B023
    (first,) = notices(story)
    assert (first["iteration"] in {2, 3}, first["result"]["fired"]) == (True, 1)
    assert json.loads(story.jobs[0].output_text)["fired_with"] == {"price": 19}
    story.world.registry.results["look"] = CallResult(content_json=b'{"price":17}')
    await story.until(lambda: story.is_over)
    (job,) = story.jobs
    assert job.state is RunState.COMPLETED
    assert notices(story)[-1]["result"] == {"fired": 2, "result": {"price": 17}}


# Paused and resumed jobs.


async def test_a_paused_series_does_not_start_runs_and_resumes_on_schedule() -> None:
    """A running iteration finishes. Iterations that are due are skipped, even if no worker reads the pause in time."""

    story = Story(calls(background("look", _interval=60, _stopAfter=3)), seconds=5.0)
    story.say("watch it")
    await story.until(lambda: any(story.calls(job) for job in story.jobs))
    (job,) = story.jobs
    key, ledger = story.key(job), story.world.ledger
    await ledger.send(key, Pause())
    await ledger.send(key, Pause())
    await story.until(lambda: WaitKind.PAUSED in ledger.run(key).waits)
    assert [call.state for call in story.calls(job)] == [CallState.SUCCEEDED], "a running iteration ends"
    assert story.world.ledger.tables.runs[key].claim_at is None, "nothing is due"
    with suppress(TimeoutError):
        await story.until(lambda: len(story.calls(job)) > 1, seconds_max=200.0)
    assert len(story.calls(job)) == 1
    await ledger.send(key, Pause(resumes=True))
    await story.until(lambda: story.is_over)
    starts = [round(((call.create_time or 0) - present(job.job).begin_time) / 60, 1) for call in story.calls(job)]
    assert (starts, ledger.run(key).state) == ([0, 4, 5], RunState.COMPLETED)


@pytest.mark.parametrize("key_is_gone", [False, True])
async def test_a_denied_iteration_or_a_missing_key_pauses_the_series(*, key_is_gone: bool) -> None:
    """ASYNC-2: the job pauses instead of failing, and resumes once the reason is gone."""

    story = Story(calls(background("look", _interval=60, _stopAfter=4, _reports="end")), seconds=1.0)
    story.say("watch it")
    await story.until(lambda: any(story.calls(job) for job in story.jobs))
    (job,) = story.jobs
    key, ledger, registry = story.key(job), story.world.ledger, story.world.registry
    allowed, gone = registry.verdicts["look"], set[str]()
    if key_is_gone:
        why = "The API key that started the run was revoked or has lost a role. Start it with another key."
        story.world.dependencies = replace_fields(
            story.world.dependencies, credential_is_gone=lambda principal: principal.user_id in gone
        )
        gone.add(job.user_id)
    else:
        why = "rule rule_1 denies it: not at night"
        registry.verdicts["look"] = tool("REFUSE", error_reason="NOT_ALLOWED", error_message=why)
    await story.until(lambda: WaitKind.PAUSED in ledger.run(key).waits)
    denied = ledger.run(key).round
    assert json.loads(ledger.run(key).output_text)["paused"] == why
    with suppress(TimeoutError):
        await story.until(lambda: ledger.run(key).round > denied, seconds_max=300.0)
    assert [call.state for call in story.calls(job)][-1] is CallState.FAILED
    assert ledger.run(key).round == denied, "it stops polling"
    (notice,) = notices(story)
    assert (notice["iteration"], notice["state"], notice["result"]["paused"]) == (denied, "PAUSED", why)
    registry.verdicts["look"] = allowed
    gone.clear()
    await ledger.send(key, Pause(resumes=True))
    await story.until(lambda: story.is_over)
    assert (ledger.run(key).state, ledger.run(key).round) == (RunState.COMPLETED, 4)
    assert "paused" not in ledger.run(key).output_text


async def test_failing_polls_back_off() -> None:
    """ASYNC-4: after failures, the job skips intervals. The first two polls are trimmed."""
    story = Story(calls(background("look", _interval=60, _duration=60, _until="value == 1")), seconds=0.1)
    failed = CallResult(content_json=b'{"error":"away"}', is_error=True, error_reason="TOOL_ERROR")
    story.world.registry.results["look"] = failed
    story.say("watch it")
    await story.until(lambda: [job.round for job in story.jobs] == [5])
    start = present(story.jobs[0].job).begin_time
    assert [round(((call.create_time or 0) - start) / 60) for call in story.calls(story.jobs[0])] == [3, 7, 15]


# Calls completed from outside: the run waits without a worker and continues on completion.
DONE = CallResult(content_json=b'{"pages":3}')


async def waiting_job(story: Story, seconds: float = 7200.0) -> tuple[Run, Call]:
    story.world.registry.awaited["slow"] = seconds
    story.say("print it")
    await story.until(lambda: any(WaitKind.COMPLETION in job.waits for job in story.jobs))
    (job,) = story.jobs
    (call,) = story.calls(job)
    return job, call


async def test_a_waiting_call_frees_its_worker_and_continues_on_completion() -> None:
    story = Story(calls(background("slow")), says("Begun."), says("Printed."))
    job, call = await waiting_job(story)
    registry, key = story.world.registry, story.key(job)
    row = story.world.ledger.tables.runs[key]
    assert (job.state, call.state, row.worker_id) == (RunState.WAITING, CallState.RUNNING, None)
    with suppress(TimeoutError):
        await story.until(lambda: False, seconds_max=100.0)
    assert len([each for each in registry.asked if each.call_id == call.call_id]) == 1, "the registry is not polled"

    registry.completed[call.call_id] = DONE
    await story.world.ledger.note_completion(key, call.call_id)
    await story.until(lambda: story.is_over)
    (ended,) = story.calls(story.world.ledger.run(key))
    assert (ended.state, ended.result) == (CallState.SUCCEEDED, DONE)
    assert registry.effects[call.call_id] == 1
    assert json.loads(story.world.ledger.run(key).output_text or "null") == {"pages": 3}


async def test_a_call_that_is_never_completed_fails_at_its_deadline() -> None:
    story = Story(calls(background("slow")), says("Begun."), says("Nobody printed it."))
    job, _ = await waiting_job(story, seconds=60.0)
    await story.until(lambda: story.is_over, seconds_max=200.0)
    (ended,) = story.calls(story.world.ledger.run(story.key(job)))
    assert (ended.state, ended.result) == (CallState.FAILED, NOT_COMPLETED)
