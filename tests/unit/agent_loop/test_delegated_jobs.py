"""Background calls of delegated runs, over the real rules of the loop and the ledger."""

from __future__ import annotations

import json

from pawl.agent_loop.loop.rules.limits import Limits
from pawl.agent_loop.loop.rules.run import Run, RunOptions
from pawl.agent_loop.model.request import ModelRequest
from pawl.values import CallState, RunState
from tests.fakes.model import Script, calls, says
from tests.unit.agent_loop.scenario import present
from tests.unit.agent_loop.test_jobs import Story, background

HIRE = f"run_agent {json.dumps({'task': 'help'})}"


def story_of(**scripts: list[Script]) -> Story:
    """Return a story in which each run that a message started gets its scripts, one per answer."""
    story = Story(seconds=5.0)

    def reply(request: ModelRequest) -> Script:
        asked = [str(message["content"]) for message in request.messages if message["role"] == "user"]
        answered = sum(message["role"] == "assistant" for message in request.messages)
        script = scripts[asked[0]]
        return script[answered] if answered < len(script) else says("I see.")

    story.world.model.reply = reply
    return story


def agent_of(story: Story) -> Run:
    return next(run for run in story.runs if run.depth == 1 and not run.reports_to_conversation_id)


def told(story: Story) -> list[tuple[str, str, str]]:
    """Return the run, job and state of each notice that a model received."""
    ledger = story.world.ledger
    messages = {(each.run_id, each.number): each for run in story.runs for each in ledger.messages(story.key(run))}
    return [
        (each.run_id, notice["job_id"], notice["state"])
        for each in messages.values()
        if each.notices_json
        for notice in json.loads(each.notices_json)
    ]


async def test_a_delegated_run_answers_without_waiting_for_its_job_and_names_it() -> None:
    """ASYNC-1: the root conversation reports the job, because the delegated run has ended."""
    story = story_of(start=[calls(HIRE), says("Asked.")], help=[calls(background("work")), says("Begun.")])
    key = story.say("start")
    await story.until(lambda: story.is_over)
    (job,), (call,) = story.jobs, story.world.ledger.calls(key)
    result, agent = present(call.result), agent_of(story)
    assert json.loads(result.content_json) == {"answer": "Begun.", "open_jobs": [job.run_id]}
    assert result.note.startswith(f"It left background jobs running: {job.run_id}.")
    (started,) = story.calls(agent)
    assert started.state is CallState.DETACHED
    assert present(started.result).note.endswith("After your answer, the agent that you work for is notified instead.")
    assert job.reports_to_conversation_id == story.conversation_id
    (turn,) = story.turns
    assert told(story) == [(turn.run_id, job.run_id, "COMPLETED")]
    assert (turn.conversation_id, turn.output_text) == (story.conversation_id, "I see.")


async def test_a_delegated_run_that_is_still_working_is_notified_of_its_job() -> None:
    """ASYNC-5: nobody else is notified."""
    story = story_of(
        start=[calls(HIRE), says("Asked.")],
        help=[calls(background("work")), *(calls(f'work {{"n":{n}}}') for n in range(3)), says("It is done.")],
    )
    key = story.say("start")
    await story.until(lambda: story.is_over)
    agent, (job,) = agent_of(story), story.jobs
    assert told(story) == [(agent.run_id, job.run_id, "COMPLETED")]
    assert (agent.state, story.turns) == (RunState.COMPLETED, [])
    (call,) = story.world.ledger.calls(key)
    assert json.loads(present(call.result).content_json) == {"answer": "It is done."}


async def test_an_agent_at_the_depth_limit_starts_no_agent_in_the_background() -> None:
    story = story_of(
        start=[calls(HIRE), says("Asked.")], help=[calls(background("run_agent", task="more")), says("No.")]
    )
    story.say("start", RunOptions(limits=Limits(agent_depth_max=1)))
    await story.until(lambda: story.is_over)
    (call,) = story.calls(agent_of(story))
    assert (call.state, story.jobs) == (CallState.FAILED, [])
    assert "cannot start other agents" in present(call.result).content_json.decode()
