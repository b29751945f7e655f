"""Work in the background as its user has it. Stories with deaths in the middle are in tests/system/background."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pawl.client import AsyncClient, approve, edit
from pawl.event.v1 import call_pb2, run_pb2
from tests.files import put
from tests.system.talk import COMPLETED, Talk, count_of, in_background, until, waiting

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_the_user_goes_on_talking_and_is_told_when_the_work_is_done(pawl: AsyncClient, effects: Path) -> None:
    """ASYNC-1, ASYNC-2, ASYNC-5."""
    talk = Talk(pawl)
    (job_id,) = await talk.jobs(await talk.say(in_background("wait_for_file", path=str(effects))))
    assert "391" in (await talk.say("what is 17 * 23?")).output_text
    assert (await pawl.get(job_id)).state < COMPLETED, "the user was answered while it worked"
    effects.touch()
    (notice,) = await talk.told(1)
    assert (notice["job_id"], notice["state"], notice["result"]) == (job_id, "COMPLETED", "it is there")


async def test_a_price_that_is_watched_is_told_once_it_is_low(pawl: AsyncClient, effects: Path) -> None:
    """ASYNC-4: "check the price until it is under 20": the model is told of nothing else."""
    effects.write_text("35")
    talk = Talk(pawl)
    asked = in_background("look_up_price", path=str(effects), _interval=0.5, _duration=5, _until="value.price < 20")
    (job_id,) = await talk.jobs(await talk.say(asked))
    put(effects, "20")
    seen = await pawl.get(job_id)
    await talk.job(job_id, lambda job: job.round >= seen.round + 2)
    assert await talk.turns() == []
    put(effects, "19.5")
    assert (await talk.ended(job_id)).state == COMPLETED
    (notice,) = await talk.end_told(job_id)
    assert (notice["state"], notice["result"]) == ("COMPLETED", {"met": True, "result": {"price": 19.5}})


async def test_one_approval_is_for_a_series_as_it_was_edited(pawl: AsyncClient, effects: Path) -> None:
    """HITL-3, ASYNC-3: an approval of one iteration is for that one; then each iteration is a use of the grant."""
    talk = Talk(pawl)
    said = f"call pay_once with {json.dumps({'path': str(effects), 'seconds': 0})}"
    (job_id,) = await talk.jobs(await talk.say(f"in the background every 1 seconds 500 times: {said}"))
    first = await waiting(talk, job_id)
    await pawl.decide(approve(first))
    await until(lambda: count_of(effects), lambda count: count == 1)
    second = await waiting(talk, job_id)
    assert second.call_id != first.call_id
    other = effects.with_suffix(".other")
    series = call_pb2.Series(interval_seconds=1.0, iterations_max=4)
    await pawl.decide(edit(second, {"path": str(other), "seconds": 0}, series=series))
    job = await talk.ended(job_id)
    assert (job.state, job.grant.call_id) == (COMPLETED, second.call_id)
    assert (job.round, job.grant.uses, count_of(effects), count_of(other)) == (4, 3, 1, 3)


async def test_stopping_all_jobs_of_a_conversation_ends_each_and_no_other(pawl: AsyncClient, effects: Path) -> None:
    """ASYNC-6: what is at work, what waits for its next time, what is paused and what waits for an approval."""
    talk, other = Talk(pawl), Talk(pawl)
    (goes_on,) = await other.jobs(await other.say("in the background every 1 seconds 500 times: what is 5 * 5"))
    (at_work,) = await talk.jobs(await talk.say(in_background("hold_again", path=str(effects))))
    (repeats,) = await talk.jobs(await talk.say("in the background every 1 seconds 500 times: what is 5 * 6"))
    (paused,) = await talk.jobs(await talk.say("in the background every 1 seconds 500 times: what is 5 * 7"))
    (gated,) = await talk.jobs(await talk.say(in_background("pay_once", path=str(effects), seconds=0)))
    await pawl.pause_job(paused)
    await waiting(talk, gated)
    await until(lambda: count_of(effects), lambda count: count == 1)
    jobs = [at_work, repeats, paused, gated]
    stopped = await pawl.stop_jobs(talk.conversation_id, "enough")
    assert {job.job_id for job in stopped} == set(jobs)
    for job_id in jobs:
        job = await talk.ended(job_id)
        assert (job.state, list(job.pending_calls)) == (run_pb2.RUN_STATE_CANCELLED, [])
    states = {notice["job_id"]: notice["state"] for notice in await talk.end_told(*jobs)}
    assert states == dict.fromkeys(jobs, "CANCELLED")
    assert count_of(effects) == 1
    seen = (await pawl.get(goes_on)).round
    await other.job(goes_on, lambda job: job.round > seen)
    await pawl.stop_job(goes_on)
    await other.ended(goes_on)
