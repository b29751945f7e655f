"""Work in the background through a whole suite of its own, with two replicas of each service that die meanwhile."""

from __future__ import annotations

import asyncio
import json
import tempfile
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from pawl.client import AsyncClient, approve, edit, reject
from pawl.event.v1 import call_pb2, run_pb2
from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite
from pawl.notify.v1.notify_pb2 import NOTIFICATION_KIND_JOB_ENDED, ListNotificationsRequest, Notification
from tests import poll
from tests.files import put
from tests.keys import LOCAL_KEY
from tests.system.talk import (
    COMPLETED,
    PATIENCE_SECONDS,
    Talk,
    acts,
    count_of,
    in_background,
    is_end,
    until,
    waiting,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.long]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def doubled() -> AsyncIterator[Suite]:
    with tempfile.TemporaryDirectory(prefix="pawl-jobs-") as folder:
        options = SuiteOptions(
            data=Path(folder),
            local_key=LOCAL_KEY,
            replicas={"agent-loop": 2, "job-store": 2},
            service_environment={"tool-registry": {"PAWL_TOOLS": "tests.system.suite.slow_tools"}},
        )
        async with Suite(options) as suite:
            yield suite


@pytest_asyncio.fixture(loop_scope="module")
async def pawl(doubled: Suite) -> AsyncIterator[AsyncClient]:
    addresses = [replica.grpc for replica in doubled.endpoints.services["agent-loop"]]
    elsewhere = {"PAWL_NOTIFIER_ADDRESS": doubled.endpoints.services["notifier"][0].grpc}
    async with AsyncClient(addresses, api_key=LOCAL_KEY, retry_seconds=240.0, environment=elsewhere) as pawl:
        yield pawl


@pytest.fixture
def effects(tmp_path: Path) -> Path:
    return tmp_path / f"effects-{uuid.uuid4().hex}"


async def test_the_user_goes_on_talking_and_is_told_when_the_work_is_done(pawl: AsyncClient, effects: Path) -> None:
    """ASYNC-1, ASYNC-2, ASYNC-5."""
    talk = Talk(pawl)
    (job_id,) = await talk.jobs(await talk.say(in_background("wait_for_file", path=str(effects))))
    assert "391" in (await talk.say("what is 17 * 23?")).output_text
    assert "42" in (await talk.say("what is 6 * 7?")).output_text
    assert (await pawl.get(job_id)).state < COMPLETED, "both were answered while it worked"
    effects.touch()
    (notice,) = await talk.told(1)
    assert (notice["job_id"], notice["state"], notice["result"]) == (job_id, "COMPLETED", "it is there")


async def test_people_are_told_at_once_of_a_job_that_ends_while_its_conversation_waits_for_them(
    pawl: AsyncClient, effects: Path
) -> None:
    """ASYNC-5: the model waits for an approval, and speaks of it only then."""
    talk = Talk(pawl)
    (job_id,) = await talk.jobs(await talk.say(in_background("wait_for_file", path=str(effects))))
    parked = await pawl.start("email ann@example.com about jobs", conversation_id=talk.conversation_id)
    await talk.job(parked.run_id, lambda run: run.state == run_pb2.RUN_STATE_WAITING)
    effects.touch()
    assert (await talk.ended(job_id)).state == COMPLETED
    told: list[Notification] = []

    async def is_told() -> bool:
        inbox = (await pawl.notifier.ListNotifications(ListNotificationsRequest())).notifications
        told.extend(each for each in inbox if each.run_id == job_id)
        return bool(told)

    await poll.until(is_told)
    assert [(each.kind, each.conversation_id) for each in told] == [(NOTIFICATION_KIND_JOB_ENDED, talk.conversation_id)]
    assert told[0].title == "wait_for_file in the background completed"
    assert (await pawl.get(parked.run_id)).state == run_pb2.RUN_STATE_WAITING
    await pawl.cancel(parked.run_id)


async def test_three_results_that_arrive_together_are_told_in_one_turn(pawl: AsyncClient, effects: Path) -> None:
    """ASYNC-5: while the user is answered, each of them once, and one answer says all of them."""
    talk = Talk(pawl)
    jobs = []
    for _ in range(3):
        jobs += await talk.jobs(await talk.say(in_background("wait_for_file", path=str(effects))))
    asked = await pawl.start("count to 600 slowly", conversation_id=talk.conversation_id)
    # The model has been asked: what ends from here on is no part of that.
    await anext(pawl.text(asked.run_id))
    effects.touch()
    for job_id in jobs:
        assert (await talk.ended(job_id)).state == COMPLETED
    assert (await pawl.get(asked.run_id)).state < COMPLETED, "all have ended while the user is answered"
    await pawl.result(asked.run_id)
    await talk.told(3)
    (turn,) = await talk.turns()
    assert sorted(str(notice["job_id"]) for notice in turn) == sorted(jobs)
    *_, said = [message async for message in pawl.messages(talk.conversation_id)]
    assert said.run_id != asked.run_id
    assert [job_id for job_id in jobs if job_id not in said.text] == []


async def test_a_price_that_is_looked_up_every_so_often_is_told_each_time(pawl: AsyncClient, effects: Path) -> None:
    """ASYNC-3: "check the price every minute", as a plain series: each price, then the end."""
    talk = Talk(pawl)
    asked = in_background("take_price", path=str(effects), _interval=0.5, _stopAfter=3)
    (job_id,) = await talk.jobs(await talk.say(asked))
    for number, price in enumerate(("35", "25", "19.5")):
        # The next one waits for its price until this one is told.
        assert len(await talk.told(number)) == number
        put(effects, price)
    told = await talk.end_told(job_id)
    results = [notice["result"] for notice in told if not is_end(notice)]
    assert results[:2] == [{"price": 35.0}, {"price": 25.0}]
    assert [(notice["state"], notice["result"]) for notice in told if is_end(notice)] == [
        ("COMPLETED", {"price": 19.5})
    ]
    assert (await pawl.get(job_id)).round == 3


async def test_a_price_that_is_watched_is_told_once_it_is_low(pawl: AsyncClient, effects: Path) -> None:
    """ASYNC-4: "check the price every minute until it is under 20", as a monitor: the model hears of nothing else."""
    effects.write_text("35")
    talk = Talk(pawl)
    asked = in_background("look_up_price", path=str(effects), _interval=0.5, _duration=5, _until="value.price < 20")
    (job_id,) = await talk.jobs(await talk.say(asked))
    for price in ("25", "20"):
        seen = await talk.job(job_id, lambda job: job.round >= 1)
        put(effects, price)
        again = seen.round + 2
        await talk.job(job_id, lambda job, again=again: job.round >= again)  # type: ignore[misc]
    assert await talk.turns() == []
    put(effects, "19.5")
    assert (await talk.ended(job_id)).state == COMPLETED
    (notice,) = await talk.end_told(job_id)
    assert (notice["state"], notice["result"]) == ("COMPLETED", {"met": True, "result": {"price": 19.5}})


@pytest.mark.parametrize("service", ["agent-loop", "job-store", "tool-registry"])
async def test_a_job_survives_each_service_and_repeats_nothing(
    doubled: Suite, pawl: AsyncClient, effects: Path, service: str
) -> None:
    """I5: killed in the middle of the call, of a tool that may be repeated and of one that may not."""
    talk = Talk(pawl)
    lost_its_process = service == "tool-registry"
    once = effects.with_suffix(".once")
    again = effects.with_suffix(".again")
    # Where it dies, and is not repeated, it would take as long as it likes: it is at work when the other one is, too.
    (may_not,) = await talk.jobs(await talk.say(acts("act_once", once, 600.0 if lost_its_process else 4.0)))
    (may,) = await talk.jobs(await talk.say(acts("act_again", again, 4.0)))
    await until(lambda: (count_of(once), count_of(again)), lambda counts: min(counts) == 1)
    for index in range(len(doubled.endpoints.services[service])):
        doubled.kill(service, index)
    repeatable, other = await talk.ended(may), await talk.ended(may_not)
    assert repeatable.state == COMPLETED
    assert count_of(once) == 1
    assert (other.state == COMPLETED) is not lost_its_process
    if lost_its_process:
        assert other.failure.reason == "OUTCOME_UNKNOWN"
    told = {notice["job_id"]: notice["state"] for notice in await talk.told(2)}
    assert told == {may: "COMPLETED", may_not: "FAILED" if lost_its_process else "COMPLETED"}


async def test_a_tool_goes_on_from_its_checkpoint_when_its_registry_is_killed(
    doubled: Suite, pawl: AsyncClient, effects: Path
) -> None:
    talk = Talk(pawl)
    (job_id,) = await talk.jobs(await talk.say(acts("count_up", effects, 1.5)))
    await until(lambda: effects.read_text() if effects.exists() else "", lambda text: text.count("step") >= 2)
    await asyncio.sleep(0.5)  # The checkpoint of the step is kept meanwhile; else the step is done again.
    doubled.kill("tool-registry", 0)
    job = await talk.ended(job_id)
    assert job.state == COMPLETED
    steps = effects.read_text().split("\n")[:-1]
    assert steps == sorted(steps)
    assert set(steps) == {f"step {number}" for number in range(5)}
    assert len(steps) <= 6, "only the step without a checkpoint is done again"


async def test_a_tool_that_gets_stuck_is_begun_again(pawl: AsyncClient, effects: Path) -> None:
    talk = Talk(pawl)
    (job_id,) = await talk.jobs(await talk.say(acts("stall", effects, 0.0)))
    assert (await talk.ended(job_id)).state == COMPLETED
    (notice,) = await talk.told(1)
    assert (notice["result"], count_of(effects)) == ("not stuck any more", 2)


async def test_a_series_goes_on_through_a_crash_and_one_that_is_stopped_never_succeeds(
    doubled: Suite, pawl: AsyncClient
) -> None:
    """ASYNC-3, ASYNC-6."""
    talk = Talk(pawl)
    (ends,) = await talk.jobs(await talk.say("in the background every 1 seconds 6 times: what is 6 * 7"))
    (stopped,) = await talk.jobs(await talk.say("in the background every 1 seconds 500 times: what is 5 * 5"))
    await talk.job(ends, lambda job: job.round >= 2)
    doubled.kill("agent-loop", 0)
    await talk.job(stopped, lambda job: job.round >= 3)
    await pawl.cancel(stopped)
    assert (await talk.ended(stopped)).state == run_pb2.RUN_STATE_CANCELLED
    job = await talk.ended(ends)
    assert (job.state, job.round) == (COMPLETED, 6)
    begin = job.job.begin_time.ToNanoseconds()
    beats = [(call.create_time.ToNanoseconds() - begin) // 10**9 async for call in pawl.calls(ends)]
    assert beats == sorted(set(beats)), "one iteration for each time at most"
    told = await talk.end_told(ends, stopped)
    states = {notice["job_id"]: notice["state"] for notice in told if is_end(notice)}
    assert (states[ends], states[stopped]) == ("COMPLETED", "CANCELLED")


async def test_a_monitor_tells_of_each_edge_once_through_crashes(
    doubled: Suite, pawl: AsyncClient, effects: Path
) -> None:
    """ASYNC-4: "check the price every so often until it is under 20, and tell me whenever it goes under 30"."""
    effects.write_text("35")
    talk = Talk(pawl)
    watch = {"_executeAsync": True, "_interval": 0.5, "_duration": 5, "_until": {"path": "/price", "below": 20}}
    arguments = {"path": str(effects), **watch, "_when": "value.price < 30.0 && previous != null"}
    (job_id,) = await talk.jobs(await talk.say(f"call look_up_price with {json.dumps(arguments)}"))
    await talk.job(job_id, lambda job: job.round >= 2)
    for fired, price in enumerate(("25", "22"), 1):
        put(effects, price)
        for index in range(2):
            doubled.kill("agent-loop", index)
        seen = await talk.job(job_id, lambda job: json.loads(job.output_text)["fired"] == fired)  # noqa: B023
        later = await talk.job(job_id, lambda job: job.round >= seen.round + 3)  # noqa: B023
        assert json.loads(later.output_text)["fired"] == fired, "once, while it stays so"
        put(effects, "35")
        again = later.round + 2
        await talk.job(job_id, lambda job: job.round >= again)  # noqa: B023
    put(effects, "19.5")
    doubled.kill("agent-loop", 0)
    job = await talk.ended(job_id)
    assert (job.state, json.loads(job.output_text)) == (
        COMPLETED,
        {"met": True, "fired": 3, "result": {"price": 19.5}},
    )
    told = await talk.end_told(job_id)
    assert (told[-1]["state"], told[-1]["result"]) == (
        "COMPLETED",
        {"met": True, "fired": 3, "result": {"price": 19.5}},
    )
    counts = [notice["result"]["fired"] for notice in told[:-1] if isinstance(notice["result"], dict)]
    assert counts == sorted(set(counts)), "each edge is told once"
    assert {1, 2} <= set(counts)


async def test_a_paused_series_begins_nothing_through_a_crash_until_it_is_resumed(
    doubled: Suite, pawl: AsyncClient
) -> None:
    """ASYNC-6: all agent-loops die once the pause is answered; another series shows that time passes."""
    talk = Talk(pawl)
    (job_id,) = await talk.jobs(await talk.say("in the background every 1 seconds 500 times: what is 5 * 5"))
    await talk.job(job_id, lambda job: job.round >= 2)
    await pawl.pause_job(job_id)
    begun = [call.call_id async for call in pawl.calls(job_id)]
    for index in range(len(doubled.endpoints.services["agent-loop"])):
        doubled.kill("agent-loop", index)
    paused = await talk.job(job_id, lambda job: run_pb2.WAIT_KIND_PAUSED in job.waits)
    assert "pawl jobs resume" in (await pawl.get_job(job_id)).waiting.remedy
    (other,) = await talk.jobs(await talk.say("in the background every 1 seconds 4 times: what is 6 * 7"))
    await talk.ended(other)
    assert [call.call_id async for call in pawl.calls(job_id)] == begun
    assert paused.round == len(begun)
    await pawl.resume_job(job_id)
    await talk.job(job_id, lambda job: job.round >= len(begun) + 2)
    calls = [call async for call in pawl.calls(job_id)]
    begin = paused.job.begin_time.ToNanoseconds() / 1e9
    beats = [int(call.create_time.ToNanoseconds() / 1e9 - begin) for call in calls]
    assert beats == sorted(set(beats)), "what it missed is skipped"
    assert beats[len(begun)] >= beats[len(begun) - 1] + 4
    await pawl.pause_job(job_id)
    await pawl.stop_job(job_id)
    assert (await talk.ended(job_id)).state == run_pb2.RUN_STATE_CANCELLED


async def test_stopping_as_it_ends_has_one_end(pawl: AsyncClient) -> None:
    talk = Talk(pawl)
    ends = {}
    for _ in range(5):
        (job_id,) = await talk.jobs(await talk.say("in the background: what is 6 * 7"))
        await pawl.stop_job(job_id)
        job = await talk.ended(job_id)
        ends[job_id] = run_pb2.RunState.Name(job.state).removeprefix("RUN_STATE_")
        calls = [call async for call in pawl.calls(job_id)]
        assert job.state in {COMPLETED, run_pb2.RUN_STATE_CANCELLED}
        assert all(call.state >= call_pb2.CALL_STATE_SUCCEEDED for call in calls)
    told = await talk.end_told(*ends)
    assert len(told) == 5
    assert {str(notice["job_id"]): notice["state"] for notice in told} == ends


async def test_to_stop_all_of_a_conversation_is_the_end_of_each_and_of_no_other(
    pawl: AsyncClient, effects: Path
) -> None:
    """ASYNC-6: what is at work, what waits for its next time, what is paused and what waits for an approval."""
    talk, other = Talk(pawl), Talk(pawl)
    (goes_on,) = await other.jobs(await other.say("in the background every 1 seconds 500 times: what is 5 * 5"))
    (at_work,) = await talk.jobs(await talk.say(acts("act_again", effects, 600.0)))
    (repeats,) = await talk.jobs(await talk.say("in the background every 1 seconds 500 times: what is 5 * 6"))
    (paused,) = await talk.jobs(await talk.say("in the background every 1 seconds 500 times: what is 5 * 7"))
    (gated,) = await talk.jobs(await talk.say(acts("pay_once", effects, 0.0)))
    await pawl.pause_job(paused)
    await waiting(talk, gated)
    await until(lambda: count_of(effects), lambda count: count == 1)
    await talk.job(repeats, lambda job: job.round >= 1)
    jobs = [at_work, repeats, paused, gated]
    stopped = await pawl.stop_jobs(talk.conversation_id, "enough")
    assert {job.job_id for job in stopped} == set(jobs)
    for job_id in jobs:
        job = await talk.ended(job_id)
        assert (job.state, list(job.pending_calls)) == (run_pb2.RUN_STATE_CANCELLED, [])
    assert list(await pawl.stop_jobs(talk.conversation_id)) == []
    told = [notice for notice in await talk.end_told(*jobs) if is_end(notice)]
    assert sorted(str(notice["job_id"]) for notice in told) == sorted(jobs)
    assert {notice["state"] for notice in told} == {"CANCELLED"}
    assert [job.job_id async for job in pawl.list_jobs(talk.conversation_id, open_only=True)] == []
    assert count_of(effects) == 1
    seen = (await pawl.get(goes_on)).round
    await other.job(goes_on, lambda job: job.round > seen)
    await pawl.stop_job(goes_on)
    await other.ended(goes_on)


async def test_a_call_in_the_background_waits_for_its_approval_and_runs_as_it_was_edited(
    pawl: AsyncClient, effects: Path
) -> None:
    talk = Talk(pawl)
    (job_id,) = await talk.jobs(await talk.say(acts("pay_once", effects, 0.0)))
    call = await waiting(talk, job_id)
    assert not call.approval.HasField("series"), "once is no series"
    other = effects.with_suffix(".other")
    await pawl.decide(edit(call, {"path": str(other), "seconds": 0}))
    assert (await talk.ended(job_id)).state == COMPLETED
    assert (count_of(effects), count_of(other)) == (0, 1)


async def test_one_approval_is_for_a_series_as_it_was_edited_through_every_crash(
    doubled: Suite, pawl: AsyncClient, effects: Path
) -> None:
    """Each iteration is a use, none comes twice, and none that was not granted: the first asked, no other one."""
    talk = Talk(pawl)
    said = f"call pay_once with {json.dumps({'path': str(effects), 'seconds': 0})}"
    (job_id,) = await talk.jobs(await talk.say(f"in the background every 3600 seconds 500 times: {said}"))
    call = await waiting(talk, job_id)
    shown = call.approval.series
    assert (shown.interval_seconds, shown.iterations_max) == (3600.0, 500)
    other = effects.with_suffix(".other")
    edited = call_pb2.Series(interval_seconds=1.0, iterations_max=8)
    await pawl.decide(edit(call, {"path": str(other), "seconds": 0}, series=edited))
    for service in ("tool-registry", "agent-loop", "job-store", "agent-loop"):
        before = count_of(other)
        await until(lambda: count_of(other), lambda count, before=before: count > before)  # type: ignore[misc]
        for index in range(len(doubled.endpoints.services[service])):
            await doubled.wait_ready(service, index)
            doubled.kill(service, index)
    job = await talk.ended(job_id)
    assert (job.state, job.round, job.grant.uses, job.grant.call_id) == (COMPLETED, 8, 8, call.call_id)
    calls = [call async for call in pawl.calls(job_id)]
    asked = [call for call in calls if call.approval.HasField("decision")]
    assert [call.approval.decision.kind for call in asked] == [call_pb2.DECISION_KIND_EDIT]
    unknown = sum(call.state == call_pb2.CALL_STATE_OUTCOME_UNKNOWN for call in calls)
    assert 8 - unknown <= count_of(other) <= 8
    assert count_of(effects) == 0


async def test_an_approval_of_one_iteration_is_for_that_one(pawl: AsyncClient, effects: Path) -> None:
    talk = Talk(pawl)
    said = f"call pay_once with {json.dumps({'path': str(effects), 'seconds': 0})}"
    (job_id,) = await talk.jobs(await talk.say(f"in the background every 1 seconds 3 times: {said}"))
    first = await waiting(talk, job_id)
    await pawl.decide(approve(first))
    await until(lambda: count_of(effects), lambda count: count == 1)
    second = await waiting(talk, job_id)
    assert second.call_id != first.call_id
    await pawl.decide(approve(second, for_series=True))
    job = await talk.ended(job_id)
    assert (job.state, job.grant.uses, count_of(effects)) == (COMPLETED, 2, 3)


async def test_an_iteration_that_is_approved_as_it_was_edited_changes_no_other(
    pawl: AsyncClient, effects: Path
) -> None:
    talk = Talk(pawl)
    said = f"call pay_once with {json.dumps({'path': str(effects), 'seconds': 0})}"
    (job_id,) = await talk.jobs(await talk.say(f"in the background every 1 seconds 3 times: {said}"))
    other = effects.with_suffix(".other")
    await pawl.decide(edit(await waiting(talk, job_id), {"path": str(other), "seconds": 0}))
    await until(lambda: count_of(other), lambda count: count == 1)
    second = await waiting(talk, job_id)
    assert json.loads(second.arguments_json) == {"path": str(effects), "seconds": 0}
    await pawl.decide(approve(second))
    await until(lambda: count_of(effects), lambda count: count == 1)
    await pawl.decide(reject(await waiting(talk, job_id), "that is enough"))
    job = await talk.ended(job_id)
    assert (job.state, count_of(other), count_of(effects)) == (run_pb2.RUN_STATE_FAILED, 1, 1)
    told = await talk.end_told(job_id)
    assert "that is enough" in json.dumps(told[-1])


async def test_a_call_in_the_background_that_is_rejected_has_no_effect_and_is_told(
    pawl: AsyncClient, effects: Path
) -> None:
    talk = Talk(pawl)
    (job_id,) = await talk.jobs(await talk.say(acts("pay_once", effects, 0.0)))
    await pawl.decide(reject(await waiting(talk, job_id), "not now"))
    assert (await talk.ended(job_id)).state == run_pb2.RUN_STATE_FAILED
    (notice,) = await talk.end_told(job_id)
    assert notice["state"] == "FAILED"
    assert "not now" in json.dumps(notice)
    assert count_of(effects) == 0


async def test_a_call_that_somebody_outside_completes_waits_through_kills_of_everything(
    pawl: AsyncClient, doubled: Suite, effects: Path
) -> None:
    """Nothing runs meanwhile; the first end that comes over HTTP counts, and the conversation is told."""
    talk = Talk(pawl)
    said = f"in the background: call print_poster with {json.dumps({'path': str(effects)})}"
    (job_id,) = await talk.jobs(await talk.say(said))
    await talk.job(job_id, lambda job: run_pb2.WAIT_KIND_COMPLETION in job.waits)
    for name, replica in (("tool-registry", 0), ("job-store", 0), ("job-store", 1)):
        doubled.kill(name, replica)
    for name, replica in (("tool-registry", 0), ("job-store", 0), ("job-store", 1)):
        await doubled.wait_ready(name, replica)
    job = await talk.job(job_id, lambda job: run_pb2.WAIT_KIND_COMPLETION in job.waits)
    assert "print_poster" in job.waiting.sentence

    (url,) = effects.read_text().splitlines()
    async with httpx2.AsyncClient(timeout=60.0) as shop:

        async def post(end: object, to: str = url) -> tuple[int, dict[str, Any]]:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while (answer := await shop.post(to, json=end)).status_code >= 500:
                    await asyncio.sleep(0.1)
            return answer.status_code, answer.json()

        for wrong in (url[:-1], url.replace("/local/", "/other/"), url.replace("/local/", "/a b/")):
            status, refusal = await post({"result": 1}, wrong)
            assert (status, refusal["details"][0]["debug"]["reason"]) == (404, "COMPLETION_NOT_FOUND"), wrong
        huge = {"result": "x" * 300_000}
        garbled: list[Any] = [{}, [], {"result": 1, "error": "x"}, {"error": 7}, {"error": ""}, "x", huge]
        for garbage in garbled:
            assert (await post(garbage))[0] >= 400, str(garbage)[:50]
        assert await post({"result": {"pages": 3}}) == (200, {})
        doubled.kill("tool-registry")
        await doubled.wait_ready("tool-registry")
        assert await post({"result": {"pages": 3}}) == (200, {"duplicate": True})
        status, refusal = await post({"error": "It burnt."})
        assert (status, refusal["details"][0]["debug"]["reason"]) == (400, "CALL_NOT_PENDING")
    job = await talk.ended(job_id)
    assert (job.state, json.loads(job.output_text)) == (COMPLETED, {"pages": 3})
    (told,) = await talk.told(1)
    assert told["job_id"] == job_id
    assert effects.read_text().count(url) == 1
