"""Background calls: from the model's parameters to the turn that reports the result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace as replace_fields
from typing import Any

import pytest
from msgspec.structs import replace

from pawl.agent_loop.loop.rules import jobs
from pawl.agent_loop.loop.rules.background import read
from pawl.agent_loop.loop.rules.call import Call, CallResult
from pawl.agent_loop.loop.rules.fact import Cancel
from pawl.agent_loop.loop.rules.limits import Limits
from pawl.agent_loop.loop.rules.message import Role
from pawl.agent_loop.loop.rules.run import Job, Notice, Run, RunOptions
from pawl.agent_loop.loop.rules.state import State
from pawl.agent_loop.loop.worker import WorkerLimits
from pawl.agent_loop.model.request import Finished, ModelRequest, TextPiece
from pawl.chassis.ids import ConversationId, RunId, RunKey, StoreId, UserId
from pawl.errors import PawlError
from pawl.job_store.ledger.rules.rows import ConversationKey
from pawl.values import ENDED, CallState, EffectClass, JobReports, ReportPolicy, RunState, StopCause
from tests.fakes.loop_world import World
from tests.fakes.model import Script, calls, fails, says
from tests.fakes.registry import tool
from tests.unit.agent_loop.scenario import present

VERDICTS = {
    "here": tool(without_background=True),
    "slow": tool(timeout_seconds=5.0, async_timeout_seconds=7200.0),
    "look": tool(effect=EffectClass.READ_ONLY),
    "quiet": tool(reports=ReportPolicy(reports=JobReports.NONE)),
    "halves": tool(reports=ReportPolicy(reports=JobReports.PROGRESS, report_percents=(50,))),
    "tenth": tool(reports=ReportPolicy(reports=JobReports.EVERY, report_iterations=10)),
    "work": tool(),
    "gated": replace(tool("APPROVE"), digest="ab" * 32),
    "show": tool("OFFER", context="FRONTEND"),
    "run_agent": tool("DELEGATE", context="AGENT", effect="IDEMPOTENT"),
}


def background(name: str, **more: object) -> str:
    return f"{name} {json.dumps({'_executeAsync': True, **more})}"


NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"_executeAsync": "true"}, "_executeAsync must be true"),
    ({"_interval": 5, "_stopAfter": 2}, "requires _executeAsync: true"),
    ({"_executeAsync": True, "_interval": 5}, "needs an end"),
    ({"_executeAsync": True, "_stopAfter": 5}, "requires _interval"),
    ({"_executeAsync": True, "_interval": 0.1, "_stopAfter": 5}, "between 0.5"),
    ({"_executeAsync": True, "_interval": 1, "_stopAfter": 1_000_001}, "more than 1,000,000 times"),
    ({"_executeAsync": True, "_interval": 1, "_stopAfter": True}, "whole number"),
    ({"_executeAsync": True, "_interval": 1, "_duration": 1, "_reports": "never"}, "_reports must be"),
    ({"_executeAsync": True, "_interval": 1, "_duration": 1, "_until": "cheap"}, "_until: column 1: "),
    ({"_executeAsync": True, "_interval": 1, "_duration": 1, "_until": 7}, "_until must look like"),
    ({"_executeAsync": True, "_interval": 1, "_duration": 1, "_when": "value.price <"}, "_when: column 14: "),
    ({"_executeAsync": True, "_interval": 1, "_duration": 1, "_when": {"changed": False}}, "_when must look like"),
    ({"_executeAsync": True, "_interval": 1, "_duration": 1, "_when": {"changed": True, "times": 0}}, "times in"),
    (
        {"_executeAsync": True, "_interval": 1, "_duration": 1, "_when": {"changed": True, "pause": -1}},
        "pause in _when",
    ),
    ({"_executeAsync": True, "_interval": 1, "_when": "value > 1"}, "requires _duration"),
    ({"_executeAsync": True, "_interval": 1, "_stopAfter": 9, "_until": "value > 1"}, "requires _duration"),
    (
        {"_executeAsync": True, "_interval": 1, "_duration": 1, "_when": {"cel": "value", "for": "x"}},
        "for in _when",
    ),
    (
        {"_executeAsync": True, "_interval": 1, "_duration": 1, "_until": {"below": 1, "on_failure": 0}},
        "on_failure",
    ),
    (
        {
            "_executeAsync": True,
            "_interval": 1,
            "_duration": 1,
            "_until": {"below": 1, "on_failure": 2},
            "_when": {"below": 1, "on_failure": 2},
        },
        "set it in only one",
    ),
    ({"_executeAsync": True, "_interval": 1, "_duration": 1, "_when": "value", "_reports": "none"}, "never report"),
    ({"_executeAsync": True, "_when": "value > 1"}, "requires _interval"),
    ({"_executeAsync": True, "_interval": 90, "_stopAfter": 1, "_duration": 1}, "longer than _duration"),
    ({"_executeAsync": True, "_interval": 90, "_delayFirst": True, "_duration": 1}, "longer than _duration"),
    ({"_executeAsync": True, "_interval": 1, "_duration": 1, "_reports": {"every": 1.5}}, "_reports must be"),
    ({"_executeAsync": True, "_interval": 1, "_duration": 1, "_reports": {"never": 0}}, '_reports must be "every'),
    ({"_executeAsync": True, "_interval": 1, "_duration": 1, "_reports": {"digest": 0}}, "digest in _reports must be"),
    (
        {"_executeAsync": True, "_interval": 1, "_duration": 1, "_until": {"below": 1, "above": 2}},
        "_until must look like",
    ),
    ({"_executeAsync": True, "_until": {"below": 1}}, "requires _interval"),
]


class Story:
    def __init__(self, *scripts: Script, seconds: float = 60.0, as_tool: bool = False) -> None:
        self.world = World(VERDICTS, list(scripts), seconds=seconds)
        self.world.dependencies = replace_fields(self.world.dependencies, background_as_tool=as_tool)
        self.conversation_id = ""
        self.limits = WorkerLimits()

    def say(self, text: str, options: RunOptions | None = None) -> RunKey:
        key = self.world.ledger.submit(text, options, self.conversation_id)
        self.conversation_id = self.world.ledger.run(key).conversation_id
        return key

    async def until(
        self,
        done: Callable[[], bool],
        *,
        seconds_max: float = 3600.0,
        approve: bool = False,
        poll_seconds: float = 0.5,
    ) -> None:
        worker = self.world.worker(limits=self.limits)
        tasks = [asyncio.create_task(work()) for work in (worker.claim_forever, worker.renew_forever)]
        try:
            async with asyncio.timeout(seconds_max):
                while not done():
                    await asyncio.sleep(poll_seconds)
                    for key in list(self.world.ledger.tables.runs) if approve else ():
                        with suppress(PawlError):
                            await self.world.respond(key)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await worker.hand_over()

    async def finish(self, text: str = "do it", options: RunOptions | None = None, **how: Any) -> RunKey:
        """Send a message, wait until everything has ended, and return the run that the message started."""
        key = self.say(text, options)
        await self.until(lambda: self.is_over, **how)
        return key

    @property
    def runs(self) -> list[Run]:
        return [self.world.ledger.run(key) for key in self.world.ledger.tables.runs]

    @property
    def jobs(self) -> list[Run]:
        return [run for run in self.runs if run.job is not None and run.reports_to_conversation_id]

    @property
    def turns(self) -> list[Run]:
        return [run for run in self.runs if run.is_turn]

    @property
    def is_over(self) -> bool:
        return all(run.state in ENDED for run in self.runs) and not self.waiting

    @property
    def waiting(self) -> list[Any]:
        key = ConversationKey(StoreId("store"), self.conversation_id)  # type: ignore[arg-type]
        return [each for each in self.world.ledger.tables.conversations[key].background.notices if not each.entered_by]

    def key(self, run: Run) -> RunKey:
        return RunKey(StoreId(run.store_id), RunId(run.run_id))

    def calls(self, run: Run) -> list[Call]:
        return self.world.ledger.calls(self.key(run))

    def notices(self, number: int) -> list[Any]:
        """Return the notices in the request to the model with this number."""
        return [
            json.loads(line)
            for message in self.world.model.requests[number].messages
            if message["role"] == "user"
            for line in str(message["content"]).splitlines()
            if line.startswith("[{")
        ]

    @property
    def stored_notices(self) -> list[dict[str, Any]]:
        """The notices in the conversation of the first run."""
        messages = self.world.ledger.messages(self.key(self.runs[0]))
        return [each for message in messages if message.notices_json for each in json.loads(message.notices_json)]


async def test_a_background_call_returns_immediately_and_reports_its_end() -> None:
    """ASYNC-1, ASYNC-5: the run ends while the tool works, and the end of the job starts a turn that reports it."""

    story = Story(calls(background("work", n=1, _estimatedMinutes=10)), says("Begun."), says("It is done: 7."))
    story.world.registry.results["work"] = CallResult(content_json=b'{"n":7}')
    key = story.say("do it")
    await story.until(lambda: story.world.ledger.run(key).state in ENDED)

    run = story.world.ledger.run(key)
    (call,) = story.calls(run)
    assert (run.state, run.output_text, call.state) == (RunState.COMPLETED, "Begun.", CallState.DETACHED)
    assert json.loads(present(call.result).content_json) == {
        "estimated_minutes": 10,
        "job_id": call.child_run_id,
        "state": "RUNNING",
    }
    assert call.arguments_json == b'{"n":1}', "background parameters are neither shown nor executed"
    (job,) = story.jobs
    assert (job.run_id, job.parent_call_id, job.state in ENDED) == (call.child_run_id, call.call_id, False)

    await story.until(lambda: story.is_over)
    (job,), (turn,) = story.jobs, story.turns
    assert (job.state, story.calls(job)[0].arguments_json) == (RunState.COMPLETED, b'{"n":1}')
    assert (turn.state, turn.output_text, turn.conversation_id) == (
        RunState.COMPLETED,
        "It is done: 7.",
        run.conversation_id,
    )
    assert story.notices(2) == [[{"job_id": job.run_id, "tool": "work", "state": "COMPLETED", "result": {"n": 7}}]]
    assert sum(story.world.registry.effects.values()) == 1
    roles = [message.role for message in story.world.ledger.messages(key)]
    assert roles == [Role.USER, Role.ASSISTANT, Role.ASSISTANT, Role.NOTICE, Role.ASSISTANT]


async def test_a_job_that_ends_during_a_turn_is_reported_with_the_next_batch() -> None:
    """ASYNC-5: the notice enters the running turn once, and no separate turn starts."""

    story = Story(
        calls(background("work")), says("Begun."), calls('look {"n":1}'), calls('look {"n":2}'), says("Both."),
        seconds=8.0,
    )  # fmt: skip
    first = story.say("do it")
    await story.until(lambda: story.world.ledger.run(first).state in ENDED)
    second = story.say("and meanwhile?")
    await story.until(lambda: story.is_over)
    assert (story.world.ledger.run(second).output_text, story.turns) == ("Both.", [])
    notices = [story.notices(number) for number in range(len(story.world.model.requests))]
    assert (notices[:3], any(notices)) == ([[], [], []], True)
    assert [message.role for message in story.world.ledger.messages(second)].count(Role.NOTICE) == 1


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (CallResult(content_json=b'{"error":"no page"}', is_error=True, error_reason="TOOL_ERROR"), "no page"),
        (CallResult(content_json=b'{"success":false,"error":"no page"}'), "no page"),
        (CallResult(content_json=b'{"success":false}'), "The tool did not report success."),
    ],
)
async def test_failed_and_stopped_jobs_are_never_reported_as_successful(result: CallResult, error: str) -> None:
    """ASYNC-5, ASYNC-6: a stopped job is reported as cancelled, and a failed job with its error."""

    story = Story(calls(background("work", n=1), background("work", n=2)), says("Begun."), says("Sorry."))
    story.world.registry.results["work"] = result
    story.say("do it")
    await story.until(lambda: len(story.jobs) == 2 and all(story.calls(job) for job in story.jobs))
    stopped = story.jobs[0]
    await story.world.ledger.send(story.key(stopped), Cancel(cause=StopCause.USER))
    await story.until(lambda: story.is_over)
    notices = {notice["job_id"]: (notice["state"], notice.get("error")) for notice in story.stored_notices}
    assert notices[stopped.run_id][0] == "CANCELLED"
    assert notices[story.jobs[1].run_id] == ("FAILED", error)


async def test_a_series_keeps_its_interval_reports_each_result_and_ends() -> None:
    """ASYNC-3: iterations are due at whole intervals after the start, and a slow iteration skips some of them."""

    story = Story(calls(background("look", _interval=60, _stopAfter=4)), seconds=70.0)
    await story.finish()
    (job,) = story.jobs
    assert (job.state, job.round, job.missed_iterations) == (RunState.COMPLETED, 4, 3)
    assert [notice.get("missed") for notice in story.stored_notices] == [1, 2, 3, 3]
    starts = [(call.create_time or 0) - present(job.job).begin_time for call in story.calls(job)]
    assert [round(start / 60) for start in starts] == [0, 2, 4, 6]
    assert all(start - 60 * round(start / 60) < 2 for start in starts), starts


async def test_a_gated_background_call_is_gated_in_its_job() -> None:
    story = Story(calls(background("gated")), says("It awaits your approval."), says("Done."))
    key = story.say("do it")
    await story.until(lambda: story.world.ledger.run(key).state in ENDED)
    (call,) = story.calls(story.world.ledger.run(key))
    assert json.loads(present(call.result).content_json)["state"] == "AWAITING_APPROVAL"
    await story.until(lambda: any(each.state is CallState.AWAITING_APPROVAL for each in story.calls(story.jobs[0])))
    assert story.world.registry.effects == {}
    await story.until(lambda: story.is_over, approve=True)
    assert (story.jobs[0].state, story.world.registry.effects) == (
        RunState.COMPLETED,
        {story.calls(story.jobs[0])[0].call_id: 1},
    )


async def test_nonsensical_parameters_are_refused_with_a_hint() -> None:
    story = Story(calls(f"work {json.dumps(NONSENSE[0][0])}"), says("I see."))
    (call,) = story.world.ledger.calls(await story.finish())
    result = present(call.result)
    assert (call.state, result.error_reason) == (CallState.FAILED, "INVALID_ARGUMENTS")
    assert (NONSENSE[0][1] in result.content_json.decode(), story.world.registry.effects) == (True, {})
    for asked, hint in NONSENSE:
        reading = read(json.dumps(asked), b"{}")
        assert (reading.terms, hint in reading.fault) == (None, True), f"{asked}: {reading.fault}"


async def test_calls_that_cannot_run_in_the_background_report_why() -> None:
    """ASYNC-1, ASYNC-7: a front-end tool, a duplicate call in one answer, and an eleventh job."""

    many = [background("work", n=number) for number in range(11)]
    story = Story(calls(background("show"), background("look"), background("look")), calls(*many), says("Begun."))
    key = story.say("do it")
    await story.until(lambda: story.world.ledger.run(key).state in ENDED)
    ends = [(call.state.name, call.result.error_reason if call.result else "") for call in story.calls(story.runs[0])]
    assert ends[:3] == [("FAILED", "INVALID_ARGUMENTS"), ("DETACHED", ""), ("FAILED", "DUPLICATE_CALL")]
    assert ends[3:] == [("DETACHED", "")] * 9 + [("FAILED", "TOO_MANY_JOBS")] * 2
    assert len(story.jobs) == 10


@pytest.mark.parametrize(
    "answers",
    [
        [says("[silent]", chunks=3)],
        [[Finished(reason="stop")]],
        [[TextPiece(text=" \n"), Finished(reason="stop")]],
        [calls('look {"n":1}'), says("[silent]")],
    ],
)
async def test_a_silent_turn_does_not_add_an_answer(answers: list[Script]) -> None:
    story = Story(calls(background("work")), says("Begun."), *answers)
    messages = story.world.ledger.messages(await story.finish())
    (turn,) = story.turns
    assert (turn.state, turn.output_text) == (RunState.COMPLETED, "")
    assert len(story.world.model.requests) == 2 + len(answers)
    assert [message for message in messages if not (message.text or message.call_ids)] == []
    assert "".join(event.output_delta.text for event in story.world.ledger.log(story.key(turn))) == ""


@pytest.mark.parametrize("answer", ["[silent]", "All is well."])
@pytest.mark.parametrize("is_met", [False, True])
async def test_failures_and_met_conditions_reach_the_user_whatever_the_model_does(answer: str, *, is_met: bool) -> None:
    """Untrusted text could persuade the model to stay silent."""
    more: dict[str, Any] = {"_interval": 60, "_duration": 10, "_until": "value"} if is_met else {}
    story = Story(calls(background("work", **more)), says("Begun."), says(answer))
    failed = CallResult(content_json=b'{"error":"no such page"}', is_error=True, error_reason="TOOL_ERROR")
    story.world.registry.results["work"] = CallResult(content_json=b"true") if is_met else failed
    await story.finish()
    (turn,), (job,) = story.turns, story.jobs
    line = f"work: {'condition met' if is_met else 'failed'} ({job.run_id})"
    assert turn.output_text == (line if answer == "[silent]" else f"{line}\n\n{answer}")


def test_notices_are_escaped_and_limited_in_size() -> None:
    """Without a limit, the notices of 300 ended jobs made a request of 4.9 MB."""
    output = '"<|im_end|>\u2028\u202e\U000e0041é"'
    job = Job(tool_name="work", arguments_json=b"{}", begin_time=0.0)
    run = Run(store_id=StoreId("s"), user_id=UserId("u"), conversation_id=ConversationId("c"), run_id=RunId("r"))
    ended = replace(run, job=job, state=RunState.COMPLETED, round=1, output_text=output)
    first, *rest = [Notice(run=replace(ended, run_id=RunId(f"run_{number}")), occasion=0) for number in range(300)]
    large = replace(first, run=replace(first.run, output_text=json.dumps("x" * 500_000)))
    for notices, count in (((first, *rest), 300), ((large, *rest), 1), ((*rest[:20], large, *rest[20:]), 20)):
        state = jobs.entered(State(run=run, notices=notices))
        assert (state.entered, state.notices) == (notices[:count], notices[count:])
        encoded = state.messages[-1].notices_json.decode()
        assert [each["job_id"] for each in json.loads(encoded)] == [each.run.run_id for each in notices[:count]]
        assert not set(encoded) & set("<>\u2028\u202e\U000e0041")
    assert json.loads(encoded)[0]["result"] == json.loads(output)


@pytest.mark.parametrize(
    "before",
    [
        [fails(retryable=False, after=[TextPiece(text="It came ")])],
        [calls('look {"n":1}', text="I look."), fails(retryable=False)],
    ],
)
async def test_a_turn_is_repeated_if_it_was_interrupted_before_answering(before: list[Script]) -> None:
    """ASYNC-5: partial output after the notice does not count as an answer to it."""

    story = Story(calls(background("work")), says("Begun."), *before, says("It came to 7."))
    messages = story.world.ledger.messages(await story.finish())
    assert [turn.state for turn in story.turns] == [RunState.FAILED, RunState.COMPLETED]
    assert story.turns[1].output_text == "It came to 7."
    assert [message.role for message in messages[-3:]] == [Role.NOTICE, Role.ASSISTANT, Role.ASSISTANT]


# Background calls of delegated runs, over the real rules of the loop and the ledger.


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


async def test_a_delegated_run_names_its_job_in_its_answer_but_does_not_wait_for_it() -> None:
    """ASYNC-1: the root conversation reports the job, because the delegated run has ended."""
    story = story_of(start=[calls(HIRE), says("Asked.")], help=[calls(background("work")), says("Begun.")])
    key = await story.finish("start")
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
    key = await story.finish("start")
    agent, (job,) = agent_of(story), story.jobs
    assert told(story) == [(agent.run_id, job.run_id, "COMPLETED")]
    assert (agent.state, story.turns) == (RunState.COMPLETED, [])
    (call,) = story.world.ledger.calls(key)
    assert json.loads(present(call.result).content_json) == {"answer": "It is done."}


async def test_an_agent_at_the_depth_limit_cannot_start_another_in_the_background() -> None:
    story = story_of(
        start=[calls(HIRE), says("Asked.")], help=[calls(background("run_agent", task="more")), says("No.")]
    )
    await story.finish("start", RunOptions(limits=Limits(agent_depth_max=1)))
    (call,) = story.calls(agent_of(story))
    assert (call.state, story.jobs) == (CallState.FAILED, [])
    assert "cannot start other agents" in present(call.result).content_json.decode()
