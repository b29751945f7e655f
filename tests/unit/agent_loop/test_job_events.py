"""Jobs that watch for something: polled without the model, which is woken once it is so (ASYNC-4)."""

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


def told(story: Story) -> list[Any]:
    messages = story.world.ledger.messages(story.key(story.runs[0]))
    return [notice for message in messages if message.notices_json for notice in json.loads(message.notices_json)]


async def test_a_job_tells_each_time_that_something_becomes_so_and_goes_on() -> None:
    """ASYNC-4: on the edge, and not while it stays so; the job ends with the last of its times."""

    when = {"cel": "value.price < 20", "times": 2}
    story = Story(calls(background("look", _interval=60, _duration=600, _when=when)), seconds=0.1)
    for price in (30, 19, 18, 25):
        story.world.registry.results["look"] = CallResult(content_json=b'{"price":%d}' % price)
        seen = story.jobs[0].round if story.jobs else 0
        if not story.jobs:
            story.say("tell me whenever it is under 20")
        await story.until(lambda: len(story.jobs) == 1 and story.jobs[0].round >= seen + 2)  # noqa: B023
    (first,) = told(story)
    assert (first["iteration"] in {2, 3}, first["result"]["fired"]) == (True, 1)
    assert json.loads(story.jobs[0].output_text)["fired_with"] == {"price": 19}
    story.world.registry.results["look"] = CallResult(content_json=b'{"price":17}')
    await story.until(lambda: story.is_over)
    (job,) = story.jobs
    assert job.state is RunState.COMPLETED
    assert told(story)[-1]["result"] == {"fired": 2, "result": {"price": 17}}


# Jobs that are paused and resumed, and what goes on meanwhile.


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
    begins = [round(((call.create_time or 0) - present(job.job).begin_time) / 60, 1) for call in story.calls(job)]
    assert (begins, ledger.run(key).state) == ([0, 4, 5], RunState.COMPLETED)


@pytest.mark.parametrize("key_is_gone", [False, True])
async def test_a_rule_that_denies_an_iteration_and_a_key_that_is_gone_pause_the_series_with_a_notice(
    *, key_is_gone: bool
) -> None:
    """ASYNC-2: it fails no more; resumed once the reason is gone it goes on."""

    story = Story(calls(background("look", _interval=60, _stopAfter=4, _reports="end")), seconds=1.0)
    story.say("watch it")
    await story.until(lambda: any(story.calls(job) for job in story.jobs))
    (job,) = story.jobs
    key, ledger, registry = story.key(job), story.world.ledger, story.world.registry
    allowed, gone = registry.verdicts["look"], set[str]()
    if key_is_gone:
        why = "The API key that started the job was revoked or has lost a role. Start the job with another key."
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
    assert ledger.run(key).round == denied, "it tries no more"
    (notice,) = told(story)
    assert (notice["iteration"], notice["state"], notice["result"]["paused"]) == (denied, "PAUSED", why)
    registry.verdicts["look"] = allowed
    gone.clear()
    await ledger.send(key, Pause(resumes=True))
    await story.until(lambda: story.is_over)
    assert (ledger.run(key).state, ledger.run(key).round) == (RunState.COMPLETED, 4)
    assert "paused" not in ledger.run(key).output_text


async def test_polls_that_fail_become_rarer() -> None:
    """ASYNC-4: they keep the beat. Those of minutes 0 and 1 are trimmed."""
    story = Story(calls(background("look", _interval=60, _duration=60, _until="value == 1")), seconds=0.1)
    failed = CallResult(content_json=b'{"error":"away"}', is_error=True, error_reason="TOOL_ERROR")
    story.world.registry.results["look"] = failed
    story.say("watch it")
    await story.until(lambda: [job.round for job in story.jobs] == [5])
    begin = present(story.jobs[0].job).begin_time
    assert [round(((call.create_time or 0) - begin) / 60) for call in story.calls(story.jobs[0])] == [3, 7, 15]


# Calls that somebody outside completes: the run waits without a worker, and goes on when it is told.
DONE = CallResult(content_json=b'{"pages":3}')


async def waiting_job(story: Story, seconds: float = 7200.0) -> tuple[Run, Call]:
    """Begin a job whose call waits for somebody outside."""
    story.world.registry.awaited["slow"] = seconds
    story.say("print it")
    await story.until(lambda: any(WaitKind.COMPLETION in job.waits for job in story.jobs))
    (job,) = story.jobs
    (call,) = story.calls(job)
    return job, call


async def test_a_call_that_waits_holds_no_worker_and_goes_on_when_it_is_completed() -> None:
    story = Story(calls(background("slow")), says("Begun."), says("Printed."))
    job, call = await waiting_job(story)
    registry, key = story.world.registry, story.key(job)
    row = story.world.ledger.tables.runs[key]
    assert (job.state, call.state, row.worker_id) == (RunState.WAITING, CallState.RUNNING, None)
    with suppress(TimeoutError):
        await story.until(lambda: False, seconds_max=100.0)
    assert len([each for each in registry.asked if each.call_id == call.call_id]) == 1, "nobody asks meanwhile"

    registry.completed[call.call_id] = DONE
    await story.world.ledger.note_completion(key, call.call_id)
    await story.until(lambda: story.is_over)
    (ended,) = story.calls(story.world.ledger.run(key))
    assert (ended.state, ended.result) == (CallState.SUCCEEDED, DONE)
    assert registry.effects[call.call_id] == 1
    assert json.loads(story.world.ledger.run(key).output_text or "null") == {"pages": 3}


async def test_a_call_that_nobody_completes_fails_at_its_time() -> None:
    story = Story(calls(background("slow")), says("Begun."), says("Nobody printed it."))
    job, _ = await waiting_job(story, seconds=60.0)
    await story.until(lambda: story.is_over, seconds_max=200.0)
    (ended,) = story.calls(story.world.ledger.run(story.key(job)))
    assert (ended.state, ended.result) == (CallState.FAILED, NOT_COMPLETED)
