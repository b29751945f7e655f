"""Calls that somebody outside completes: the run waits without a worker, and goes on when it is told."""

from __future__ import annotations

import json
from contextlib import suppress

from pawl.agent_loop.domain import completing
from pawl.agent_loop.domain.call import Call, CallResult, CallState
from pawl.agent_loop.domain.command import Completed
from pawl.agent_loop.domain.run import Run, RunState, WaitKind
from pawl.agent_loop.domain.state import State
from pawl.agent_loop.domain.tool import ExecutionResult, Outcome
from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId, UserId
from tests.fakes.model import calls, says
from tests.fakes.registry import NOT_COMPLETED
from tests.unit.agent_loop.simulation import Simulation, answer
from tests.unit.agent_loop.test_jobs import Story, background

WAITS = ExecutionResult(
    outcome=Outcome.AWAITING_COMPLETION, result=CallResult(content_json=b"null"), completion_seconds_left=60.0
)
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


def test_news_that_comes_before_the_registry_has_said_that_the_call_waits_is_not_lost() -> None:
    """The token is out while the tool still runs, and there are quick answers."""
    run = Simulation([answer("serial")])
    run.turn()
    run.model_answers()
    (call,) = run.calls
    run.sends(Completed(call_id=call.call_id))
    run.ends(call.call_id, WAITS)
    assert run.started == [call.call_id] * 2, "the registry is asked again at once"
    run.ends(call.call_id, WAITS)
    assert run.parked, "news count once"
    run.sends(Completed(call_id=call.call_id))
    assert run.started == [call.call_id] * 3
    run.ends(call.call_id)
    assert (run.calls[0].state, run.base.loop.completions) == (CallState.SUCCEEDED, {})


def test_a_call_that_nobody_completes_waits_for_nobody_whatever_the_clock_says() -> None:
    """Clocks may stand before their epoch: then no time at all is not one that is still to come."""
    run = Run(store_id=StoreId("s"), user_id=UserId("u"), conversation_id=ConversationId("c"), run_id=RunId("r"))
    call = Call(
        store_id=run.store_id,
        conversation_id=run.conversation_id,
        run_id=run.run_id,
        call_id=CallId("call_1"),
        round=1,
        index=0,
        tool_name="slow",
        state=CallState.RUNNING,
    )
    state = State(run=run, calls={call.call_id: call})
    assert not completing.awaits(state, call, now=-1.0)
    assert completing.awaits(completing.begun(state, call, 10.0, now=-1.0), call, now=0.0)
