"""Work in the background through a whole suite of its own, with two replicas of each service that die meanwhile."""

from __future__ import annotations

import asyncio
import json
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import pytest
import pytest_asyncio

from pawl.client import AsyncClient, approve, edit
from pawl.event.v1 import call_pb2, message_pb2, run_pb2
from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite
from tests.keys import LOCAL_KEY

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.long]

PATIENCE_SECONDS = 90.0
COMPLETED = run_pb2.RUN_STATE_COMPLETED

T = TypeVar("T")


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
    async with AsyncClient(addresses, api_key=LOCAL_KEY, retry_seconds=30.0, environment={}) as pawl:
        yield pawl


async def until(read: Callable[[], T], check: Callable[[T], bool]) -> T:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not check(found := read()):
            await asyncio.sleep(0.1)
    return found


class Talk:
    """A conversation, in which the user says things and the model may speak up."""

    def __init__(self, pawl: AsyncClient) -> None:
        self._pawl = pawl
        self.conversation_id = ""

    async def say(self, text: str) -> run_pb2.Run:
        """Say something and hear the answer."""
        run = await self._pawl.start(text, conversation_id=self.conversation_id)
        self.conversation_id = run.conversation_id
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self._pawl.result(run.run_id)

    async def jobs(self, run: run_pb2.Run) -> list[str]:
        return [call.child_run_id async for call in self._pawl.calls(run.run_id) if call.child_run_id]

    async def job(self, job_id: str, check: Callable[[run_pb2.Run], bool]) -> run_pb2.Run:
        """A job, once something is so."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not check(job := await self._pawl.get(job_id)):
                await asyncio.sleep(0.1)
        return job

    async def ended(self, job_id: str) -> run_pb2.Run:
        return await self.job(job_id, lambda job: job.state >= COMPLETED)

    async def told(self, count: int) -> list[dict[str, object]]:
        """What the model was told of jobs, in order, once that are so many things and each is answered."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                messages = [message async for message in self._pawl.messages(self.conversation_id)]
                notices = [json.loads(message.notices_json) for message in messages if message.notices_json]
                found = [notice for several in notices for notice in several]
                if len(found) >= count and messages[-1].role == message_pb2.ROLE_ASSISTANT:
                    return found
                await asyncio.sleep(0.1)


def acts(tool: str, effects: Path, seconds: float) -> str:
    return f"in the background: call {tool} with {json.dumps({'path': str(effects), 'seconds': seconds})}"


@pytest.fixture
def effects(tmp_path: Path) -> Path:
    return tmp_path / f"effects-{uuid.uuid4().hex}"


def count_of(effects: Path) -> int:
    return effects.read_text().count("done") if effects.exists() else 0


async def test_the_user_goes_on_talking_and_is_told_when_the_work_is_done(pawl: AsyncClient, effects: Path) -> None:
    """ASYNC-1, ASYNC-2, ASYNC-5."""
    talk = Talk(pawl)
    begun = await talk.say(acts("act_once", effects, 6.0))
    (job_id,) = await talk.jobs(begun)
    assert "391" in (await talk.say("what is 17 * 23?")).output_text
    assert "42" in (await talk.say("what is 6 * 7?")).output_text
    assert (await pawl.get(job_id)).state < COMPLETED, "both were answered while it worked"
    (notice,) = await talk.told(1)
    assert (notice["job_id"], notice["state"], notice["result"]) == (job_id, "COMPLETED", "finished")
    assert count_of(effects) == 1


async def test_what_ends_together_is_told_once_each(pawl: AsyncClient) -> None:
    talk = Talk(pawl)
    jobs = []
    for number in (2, 3, 4):
        jobs += await talk.jobs(await talk.say(f"in the background: what is {number} * 7"))
    told = await talk.told(3)
    assert sorted(str(notice["job_id"]) for notice in told) == sorted(jobs)


@pytest.mark.parametrize("service", ["agent-loop", "job-store", "tool-registry"])
async def test_a_job_survives_each_service_and_repeats_nothing(
    doubled: Suite, pawl: AsyncClient, effects: Path, service: str
) -> None:
    """I5: killed in the middle of the call, of a tool that may be repeated and of one that may not."""
    talk = Talk(pawl)
    once = effects.with_suffix(".once")
    again = effects.with_suffix(".again")
    (may_not,) = await talk.jobs(await talk.say(acts("act_once", once, 4.0)))
    (may,) = await talk.jobs(await talk.say(acts("act_again", again, 4.0)))
    await until(lambda: (count_of(once), count_of(again)), lambda counts: min(counts) == 1)
    for index in range(len(doubled.endpoints.services[service])):
        doubled.kill(service, index)
    repeatable, other = await talk.ended(may), await talk.ended(may_not)
    assert repeatable.state == COMPLETED
    assert count_of(once) == 1
    lost_its_process = service == "tool-registry"
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
    await until(lambda: effects.read_text() if effects.exists() else "", lambda text: text.count("step") == 2)
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
    begins = [call.create_time.ToNanoseconds() / 1e9 async for call in pawl.calls(ends)]
    beats = [round(begin - job.job.begin_time.ToNanoseconds() / 1e9 - 0.2) for begin in begins]
    assert beats == sorted(set(beats)), "one iteration for each time at most"
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            found = await talk.told(1)
            states = {notice["job_id"]: notice["state"] for notice in found if "iteration" not in notice}
            if {ends, stopped} <= states.keys():
                break
            await asyncio.sleep(0.2)
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
        effects.write_text(price)
        for index in range(2):
            doubled.kill("agent-loop", index)
        seen = await talk.job(job_id, lambda job: json.loads(job.output_text)["fired"] == fired)  # noqa: B023
        later = await talk.job(job_id, lambda job: job.round >= seen.round + 3)  # noqa: B023
        assert json.loads(later.output_text)["fired"] == fired, "once, while it stays so"
        effects.write_text("35")
        again = later.round + 2
        await talk.job(job_id, lambda job: job.round >= again)  # noqa: B023
    effects.write_text("19.5")
    doubled.kill("agent-loop", 0)
    job = await talk.ended(job_id)
    assert (job.state, json.loads(job.output_text)) == (
        COMPLETED,
        {"met": True, "fired": 3, "result": {"price": 19.5}},
    )
    async with asyncio.timeout(PATIENCE_SECONDS):
        while "iteration" in (told := await talk.told(1))[-1]:
            await asyncio.sleep(0.2)
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
    for _ in range(5):
        (job_id,) = await talk.jobs(await talk.say("in the background: what is 6 * 7"))
        await pawl.cancel(job_id)
        job = await talk.ended(job_id)
        calls = [call async for call in pawl.calls(job_id)]
        assert job.state in {COMPLETED, run_pb2.RUN_STATE_CANCELLED}
        assert all(call.state >= call_pb2.CALL_STATE_SUCCEEDED for call in calls)
    told = await talk.told(5)
    assert len({notice["job_id"] for notice in told}) == 5


async def waiting(talk: Talk, job_id: str) -> call_pb2.Call:
    """The call of a job that awaits an approval."""
    job = await talk.job(job_id, lambda job: len(job.pending_calls) > 0)
    (call,) = job.pending_calls
    return call


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
