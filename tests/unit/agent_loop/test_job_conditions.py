"""Jobs that watch for something: polled without the model, which is woken once it is so (ASYNC-4)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pawl.agent_loop.domain import jobs
from pawl.agent_loop.domain.call import CallResult
from pawl.agent_loop.domain.run import JobReports, Notice, RunState
from pawl.agent_loop.domain.state import State
from pawl.chassis.ids import RunId
from tests.fakes.model import calls
from tests.unit.agent_loop.test_jobs import Story, background
from tests.unit.agent_loop.test_monitors import job


async def test_a_job_that_waits_for_something_asks_the_model_once_it_is_so() -> None:
    """ASYNC-4: polled without the model, which is told of the end alone."""

    until = {"path": "/items/0/price", "below": 20}
    story = Story(calls(background("look", _interval=60, _duration=60, _until=until)), seconds=0.1)
    story.world.registry.results["look"] = CallResult(content_json=b'{"items":[{"price":30}]}')
    story.say("tell me when it is under 20")
    await story.until(lambda: len(story.jobs) == 1 and story.jobs[0].round >= 4)
    requests = len(story.world.model.requests)
    story.world.registry.results["look"] = CallResult(content_json=b'{"items":[{"price":19.5}]}')
    await story.until(lambda: story.is_over)
    (job,) = story.jobs
    assert job.state is RunState.COMPLETED
    assert job.round in {4, 5}
    assert len(story.world.model.requests) == requests + 1
    ((notice,),) = [told for n in range(requests, requests + 1) for told in [story.told(n)[0]]]
    assert notice["result"] == {"met": True, "result": {"items": [{"price": 19.5}]}}


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


async def test_a_monitor_that_sees_nothing_says_so_once() -> None:
    asked = background("look", _interval=60, _stopAfter=6, _duration=60, _when="value.price < 20")
    story = Story(calls(asked), seconds=0.1)
    story.world.registry.results["look"] = CallResult(content_json=b'{"cost":19}')
    story.say("tell me whenever it is under 20")
    await story.until(lambda: story.is_over)
    blind, end = told(story)
    assert blind["iteration"] == 3
    assert "Key not found" in blind["result"]["condition_error"]
    assert (end["state"], end["iterations"], end["result"]["fired"]) == ("COMPLETED", 6, 0)


async def test_a_digest_is_told_in_place_of_each_iteration() -> None:
    asked = background("look", _interval=60, _stopAfter=7, _reports={"digest": 170})
    story = Story(calls(asked), seconds=0.1)
    story.world.registry.results["look"] = CallResult(content_json=b'"up"')
    story.say("keep me posted")
    await story.until(lambda: story.is_over)
    sums = {each.get("iteration"): each["result"]["iterations"] for each in told(story)}
    assert sums.pop(4) == [{"from": 1, "to": 4, "result": '"up"'}]
    assert sums.pop(None) == [{"from": 5, "to": 7, "result": '"up"'}]
    assert sums.keys() <= {7}, "told beside the end, if it was told before"


@pytest.mark.parametrize(("begun", "more"), [(10, {}), (12, {"iterations": 12})])
async def test_a_notice_that_waited_says_that_the_job_has_begun_other_iterations(
    begun: int, more: dict[str, int]
) -> None:
    story = Story()
    run = story.world.ledger.run(story.say("watch it"))
    notice = Notice(
        run_id=RunId("run_job"),
        occasion=10,
        job=job(reports=JobReports.EVERY, report_iterations=10),
        state=RunState.WAITING,
        round=begun,
        output_text='"up"',
        failure=None,
    )
    message = jobs.entered(State(run=run, notices=(notice,))).messages[-1]
    (seen,) = json.loads(message.notices_json)
    assert seen == {"job_id": "run_job", "tool": "look", "state": "RUNNING", "iteration": 10, "result": "up"} | more


async def test_a_job_that_is_to_report_nothing_is_silent_to_its_end() -> None:
    """ASYNC-5: nobody is told; it is seen in the list of jobs."""

    asked = background("look", _interval=60, _stopAfter=4, _duration=60, _reports="none", _until={"above": 1})
    story = Story(calls(asked), seconds=0.1)
    story.say("just do it")
    await story.until(lambda: story.is_over and bool(story.jobs))
    assert (story.jobs[0].state, story.jobs[0].round) == (RunState.COMPLETED, 4)
    assert (told(story), story.turns) == ([], [])
