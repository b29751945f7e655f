"""Goals: attempts until a criterion is met or a limit is reached, over the real rules of the loop and the ledger."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from pawl.agent_loop.goals import judging
from pawl.agent_loop.goals.rules import Step
from pawl.agent_loop.loop.rules.call import Call, CallResult
from pawl.agent_loop.loop.rules.fact import Cancel, Decide, RaiseGoal, Steer, ToolProgress
from pawl.agent_loop.loop.rules.limits import Limits
from pawl.agent_loop.loop.rules.run import Goal, GoalAgent, GoalCriterion, GoalJudge, Run, RunOptions
from pawl.agent_loop.model.request import ModelRequest
from pawl.chassis.ids import RunId, RunKey
from pawl.model_server.request import ChatRequest, User
from pawl.values import ENDED, CallState, CommandOutcome, DecisionKind, RunState, StopCause, WaitKind
from tests.fakes.loop_world import World
from tests.fakes.model import Script, calls, says
from tests.fakes.registry import tool
from tests.unit.agent_loop.scenario import present

VERDICTS = {
    "check": tool(effect="READ_ONLY"),
    "look": tool(effect="READ_ONLY", parallel=True),
    "mail": tool("APPROVE", digest="ab" * 32),
    "run_agent": tool("DELEGATE", context="AGENT", effect="IDEMPOTENT"),
    "start_goal": tool("DELEGATE", context="AGENT", effect="IDEMPOTENT"),
}
BY_TOOL = GoalCriterion(tool_name="check")
BY_JUDGE = GoalCriterion(judge=GoalJudge(rubric="It is blue."))


def goal(criterion: GoalCriterion = BY_TOOL, **more: Any) -> Goal:
    return Goal(aim="Paint it blue.", criterion=criterion, **more)


class GoalWorld(World):
    """Each check of the tool returns the next of `checks`, and each judgement is the next of `judgements`."""

    def __init__(self, *, checks: list[Any] = [], judgements: list[Any] = [], attempt: list[Script] = []) -> None:  # noqa: B006
        super().__init__(dict(VERDICTS), [])
        self.checks, self.judgements = list(checks), list(judgements)
        self.tasks: list[str] = []
        # The answers to the message "top", which starts no goal run
        self.top: list[Script] = []
        self.attempt = attempt or [calls("look"), says("I painted it.")]
        self.model.reply = self._reply
        perform = self.registry._perform

        async def performed(call_id: str, name: str) -> Any:
            if name == "check":
                found = self.checks.pop(0) if len(self.checks) > 1 else self.checks[0]
                error = isinstance(found, Exception)
                content = json.dumps({"error": str(found)} if error else found).encode()
                reason = "TOOL_ERROR" if error else ""
                self.registry.results["check"] = CallResult(content_json=content, is_error=error, error_reason=reason)
            return await perform(call_id, name)

        self.registry._perform = performed  # type: ignore[method-assign]

    def _reply(self, request: ModelRequest) -> Script:
        said = [message for message in request.messages if message["role"] == "assistant"]
        task = next(message["content"] for message in request.messages if message["role"] == "user")
        if "Judge whether this aim is met" in task:
            assert not request.tools
            found = self.judgements.pop(0) if len(self.judgements) > 1 else self.judgements[0]
            cited = [json.loads(line)["call_id"] for line in task.splitlines() if line.startswith("{")]
            return says(found(cited) if callable(found) else json.dumps(found))
        if task == "top":
            return self.top[len(said)] if len(said) < len(self.top) else says("That is all.")
        if not said:
            self.tasks.append(task)
        return self.attempt[len(said)] if len(said) < len(self.attempt) else says("That is all.")

    async def settle(self, key: RunKey, *, until: Callable[[], bool] = lambda: False, seconds_max: float = 1e6) -> None:
        for _ in range(500):
            if self.ledger.run(key).state in ENDED or until():
                return
            await self.drive()
            for run_key in list(self.ledger.tables.runs):
                await self.respond(run_key)
        raise AssertionError(f"the goal does not end: {self.ledger.run(key)}")

    def calls_of(self, run: Run) -> list[Call]:
        return self.ledger.calls(RunKey(run.store_id, run.run_id))

    def below(self, call: Call) -> Run:
        """Return the run to which a call was delegated."""
        return self.ledger.run(RunKey(call.store_id, RunId(call.child_run_id)))


async def pursued(world: GoalWorld, asked: Goal | None = None) -> Run:
    """Return the run of a goal after its end."""
    key = world.ledger.submit("aim", goal=asked or goal())
    await world.settle(key)
    return world.ledger.run(key)


def judged(*, met: bool, progress: float = 0.5, reason: str = "It is green.") -> Callable[[list[str]], str]:
    return lambda cited: json.dumps({"met": met, "progress": progress, "reason": reason, "citations": cited[:1]})


def made(world: GoalWorld, run: Run) -> list[tuple[int, str, str]]:
    return [(call.round, call.tool_name, call.state.name) for call in world.calls_of(run)]


async def test_a_goal_is_met_once_its_tool_returns_true() -> None:
    world = GoalWorld(checks=[False, {"met": False, "progress": 0.5, "reason": "Half of it is."}, {"met": True}])
    run = await pursued(world)
    assert run.state is RunState.COMPLETED
    assert made(world, run) == [
        (1, "check", "SUCCEEDED"),
        (1, "run_agent", "SUCCEEDED"),
        (1, "check", "SUCCEEDED"),
        (2, "run_agent", "SUCCEEDED"),
        (2, "check", "SUCCEEDED"),
    ]
    assert run.output_text.splitlines() == [
        "The goal was met after 2 attempts: The check passed.",
        "Aim: Paint it blue.",
        "Attempts:",
        "- Attempt 1 (50%): Half of it is.",
        "- Attempt 2 (100%): The check passed.",
        "Evidence:",
        f"- {world.calls_of(run)[-1].call_id} check: The check passed.",
    ]
    key = RunKey(run.store_id, run.run_id)
    assert world.ledger.messages(key)[-1].text == run.output_text
    reports = [event for event in world.ledger.events(key) if isinstance(event, ToolProgress)]
    assert [(each.fraction, each.message) for each in reports] == [
        (None, "The check returned false."),
        (0.5, "Half of it is."),
        (1.0, "The check passed."),
    ]
    assert present(run.job_progress).fraction == 1


async def test_an_aim_that_is_already_met_needs_no_attempt() -> None:
    world = GoalWorld(checks=[True])
    run = await pursued(world)
    assert (run.state, made(world, run)) == (RunState.COMPLETED, [(1, "check", "SUCCEEDED")])
    assert run.output_text.startswith("The goal was met after 0 attempts")


async def test_an_attempt_knows_what_was_tried_and_why_it_failed() -> None:
    world = GoalWorld(checks=[{"met": False, "reason": f"Spot {n} is white.", "progress": n / 10} for n in range(5)])

    await pursued(world, goal(attempts_max=3))
    first, second, third = world.tasks
    assert ("attempt 1 of 3" in first, "Spot 0 is white." in first) == (True, True)
    assert "> - Attempt 1: Spot 1 is white.\n>   It answered: I painted it." in second
    prompt = ChatRequest(model="m", messages=(User(content=second),)).prompt
    assert ("Paint it blue." in prompt, "painted" in prompt, "white" in prompt) == (True, False, False)
    assert all(f"Attempt {number}: Spot {number} is white." in third for number in (1, 2))


async def test_messages_of_the_user_reach_the_next_attempt() -> None:
    world = GoalWorld(checks=[False, {"met": False, "n": 1}, True])
    key = world.ledger.submit("aim", goal=goal())
    await world.settle(key, until=lambda: len(world.tasks) == 1)

    await world.ledger.send(key, Steer(text="Use the big brush."))
    await world.settle(key)

    assert ["Use the big brush." in task for task in world.tasks] == [False, True]


@pytest.mark.parametrize(
    ("failure", "checks", "more", "attempts"),
    [
        ("GOAL_ATTEMPTS", [{"met": False, "n": n} for n in range(9)], {"attempts_max": 2}, 2),
        ("GOAL_NO_PROGRESS", [{"met": False, "n": 1}], {}, 3),
        ("GOAL_NO_PROGRESS", [{"met": False, "progress": 0.5}], {}, 3),
        ("GOAL_NO_PROGRESS", [{"met": False, "progress": progress} for progress in (0, 0.5, 0.4, 0.5, 0.3)], {}, 4),
        ("GOAL_DEADLINE", [{"met": False, "n": n} for n in range(99)], {"wait_seconds": 60.0, "attempts_max": 50}, 3),
    ],
)
async def test_a_goal_that_reaches_a_limit_fails_with_that_limits_reason(
    failure: str, checks: list[Any], more: dict[str, Any], attempts: int
) -> None:
    world = GoalWorld(checks=checks)
    if failure == "GOAL_DEADLINE":
        more = {**more, "deadline_time": world.ledger.time().timestamp() + 150}
    run = await pursued(world, goal(**more))
    assert (run.state, present(run.failure).reason) == (RunState.FAILED, failure)
    assert run.output_text.startswith(f"The goal was not met: {present(run.failure).message}")
    assert len(world.tasks) == attempts


async def until_ended(world: GoalWorld, key: RunKey) -> Run:
    """Return a run after its end. Its requests are not answered."""
    while world.ledger.run(key).state not in ENDED:
        await world.drive()
    return world.ledger.run(key)


@pytest.mark.parametrize("is_late", [True, False], ids=["deadline", "cancellation"])
async def test_a_goal_that_is_stopped_stops_its_open_attempt_and_reports(*, is_late: bool) -> None:
    world = GoalWorld(checks=[False], attempt=[calls("mail"), says("Sent.")])
    deadline = world.ledger.time().timestamp() + 3600 if is_late else None
    key = world.ledger.submit("aim", goal=goal(deadline_time=deadline))
    while WaitKind.APPROVAL not in {wait for row in world.ledger.tables.runs.values() for wait in row.waits}:
        await world.drive()
    if not is_late:
        await world.ledger.send(key, Cancel(cause=StopCause.USER))
    run = await until_ended(world, key)
    attempt = world.ledger.calls(key)[-1]
    assert attempt.state is CallState.CANCELLED
    assert (await until_ended(world, RunKey(key.store_id, attempt.child_run_id))).state is RunState.CANCELLED
    if is_late:
        assert present(run.failure).reason == "GOAL_DEADLINE"
    else:
        assert run.state is RunState.CANCELLED
        assert run.output_text.startswith("The goal was cancelled after 0 attempts.")


async def test_a_goal_ends_when_its_token_budget_is_used_up() -> None:
    world = GoalWorld(checks=[{"met": False, "n": n} for n in range(99)])
    key = world.ledger.submit("aim", RunOptions(limits=Limits(total_tokens_max=70)), goal=goal(attempts_max=50))

    await world.settle(key)

    run = world.ledger.run(key)
    assert (present(run.failure).reason, run.usage.total_tokens <= 75) == ("GOAL_BUDGET", True)


async def test_after_a_wait_the_goal_is_checked_again_before_the_next_attempt() -> None:
    world = GoalWorld(checks=[{"met": False, "n": 0}, {"met": False, "n": 1}, True])
    key = world.ledger.submit("aim", goal=goal(wait_seconds=300.0))

    await world.settle(key, until=lambda: world.ledger.run(key).waits == (WaitKind.TIME,))
    waited_from = world.ledger.time()
    await world.settle(key)

    assert world.ledger.run(key).state is RunState.COMPLETED
    assert (world.ledger.time() - waited_from).total_seconds() >= 290
    last = world.ledger.calls(key)[-1]
    assert (len(world.tasks), last.round, last.state) == (1, 1, CallState.SUCCEEDED)
    assert last.index == Step.CHECK_LATER


async def test_a_judge_decides_from_the_calls_that_it_cites() -> None:
    world = GoalWorld(judgements=[judged(met=False), judged(met=True, reason="look shows that it is blue.")])
    run = await pursued(world, goal(BY_JUDGE))
    assert run.state is RunState.COMPLETED
    assert "- Attempt 1 (50%): It is green." in run.output_text
    *_, attempt, judgement = world.calls_of(run)
    (looked,) = world.calls_of(world.below(attempt))
    assert f'- {looked.call_id} look: "look done"' in run.output_text
    judge = world.below(judgement)
    assert judge.options.without_tools
    assert present(judge.options.response_format).schema_json == judging.SCHEMA_JSON


INVENTED = {"met": True, "progress": 1, "reason": "It is blue.", "citations": ["call_invented"]}
UNFOUNDED = {"met": True, "progress": 1, "reason": "It is blue.", "citations": []}


@pytest.mark.parametrize("bad", [INVENTED, UNFOUNDED])
async def test_a_judgement_without_existing_citations_is_requested_once_more(bad: dict[str, Any]) -> None:
    world = GoalWorld(judgements=[bad, judged(met=True), bad])
    run = await pursued(world, goal(BY_JUDGE))
    assert (run.state, [call.index for call in world.calls_of(run)]) == (RunState.COMPLETED, [1, 2, 3])

    world = GoalWorld(judgements=[bad])
    run = await pursued(world, goal(BY_JUDGE, attempts_max=2))
    assert present(run.failure).reason == "GOAL_ATTEMPTS"
    assert "Attempt 1: The judgement failed: the judge cited" in run.output_text
    assert [call.index for call in world.calls_of(run)] == [1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize(("tool_name", "reason"), [("check", "NOT_ALLOWED"), ("missing", "TOOL_NOT_FOUND")])
async def test_a_check_that_cannot_run_ends_the_goal_and_gives_the_reason(tool_name: str, reason: str) -> None:
    world = GoalWorld(checks=[False])
    world.registry.verdicts["check"] = tool("REFUSE", error_reason="NOT_ALLOWED", error_message="A rule denies it.")
    run = await pursued(world, goal(GoalCriterion(tool_name=tool_name)))
    assert (present(run.failure).reason, world.tasks) == (reason, [])


async def test_a_rejected_check_ends_the_goal() -> None:
    world = GoalWorld(checks=[False])
    world.registry.verdicts["check"] = tool("APPROVE", digest="ab" * 32)
    key = world.ledger.submit("aim", goal=goal())
    await world.drive()
    (waiting,) = world.ledger.calls(key)
    await world.ledger.send(key, Decide(call_id=waiting.call_id, kind=DecisionKind.REJECT))
    await world.settle(key)

    assert present(world.ledger.run(key).failure).reason == "REJECTED"


async def test_attempts_have_the_tools_of_the_agent_but_not_of_the_goal() -> None:
    world = GoalWorld(checks=[False, {"met": False, "n": 1}, True])
    options = RunOptions(tool_names=("look", "mail"))
    key = world.ledger.submit("aim", options, goal=goal(attempts_by=GoalAgent(tool_names=("look",))))
    await world.settle(key)

    child = world.below(next(call for call in world.ledger.calls(key) if call.index == Step.ATTEMPT))
    assert ([each.name for each in child.tools], child.waits_for_jobs) == (["look"], True)
    assert [each.name for each in world.ledger.run(key).tools] == ["run_agent", "check", "look", "mail"]


async def test_an_attempt_ends_when_its_background_jobs_have_ended() -> None:
    attempt = [calls('look {"_executeAsync": true}'), says("I started to look."), says("I have looked.")]
    world = GoalWorld(checks=[False, True], attempt=attempt)
    key = world.ledger.submit("aim", goal=goal())
    await everything_ends(world)

    attempted = next(call for call in world.ledger.calls(key) if call.index == Step.ATTEMPT)
    (started,) = world.ledger.calls(RunKey(key.store_id, attempted.child_run_id))
    job = world.ledger.row(RunKey(key.store_id, started.child_run_id))
    assert json.loads(present(attempted.result).content_json)["answer"] == "I have looked."
    assert present(job.end_time).timestamp() <= present(attempted.end_time)
    assert all(row.goal is None for row in map(world.ledger.run, world.ledger.tables.runs) if row.run_id != key.run_id)


async def test_raised_limits_apply_immediately_and_are_checked() -> None:
    world = GoalWorld(checks=[{"met": False, "n": n} for n in range(20)])
    deadline = world.ledger.time().timestamp() + 1e6
    key = world.ledger.submit("aim", goal=goal(attempts_max=2, deadline_time=deadline))
    await world.settle(key, until=lambda: len(world.tasks) == 2)

    right = RaiseGoal(attempts=3, deadline_time=deadline + 5)
    assert await world.ledger.send(key, right, "cmd_raise") is CommandOutcome.ACCEPTED
    # The first raise also counts while no worker has read it.
    for wrong in (RaiseGoal(attempts=96), RaiseGoal(deadline_time=deadline + 2), RaiseGoal(tokens=5)):
        assert await world.ledger.send(key, wrong) is CommandOutcome.REFUSED
    assert await world.ledger.send(key, right, "cmd_raise") is CommandOutcome.DUPLICATE
    await world.settle(key)

    run = world.ledger.run(key)
    assert (present(run.failure).reason, len(world.tasks)) == ("GOAL_ATTEMPTS", 5)
    assert run.goal == goal(attempts_max=5, deadline_time=deadline + 5)
    assert await world.ledger.send(world.ledger.submit("other"), RaiseGoal(attempts=1)) is CommandOutcome.REFUSED


def asks(**arguments: Any) -> Script:
    return calls(f"start_goal {json.dumps({'aim': 'Paint it blue.', **arguments})}")


async def everything_ends(world: GoalWorld) -> None:
    for _ in range(200):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(30):
                await world.drive()
                continue
        if all(row.state in ENDED for row in world.ledger.tables.runs.values()):
            return
    raise AssertionError("some runs do not end")


async def test_an_agent_starts_a_goal_in_the_background_and_is_notified_of_its_end() -> None:
    world = GoalWorld(checks=[False, {"met": False, "n": 1}, True])
    world.top = [asks(check_tool="check", tool_names=["look"], attempts_max=5), says("Started."), says("It is blue.")]
    key = world.ledger.submit("top")
    await everything_ends(world)

    (call,) = world.ledger.calls(key)
    assert call.state is CallState.DETACHED
    job = world.below(call)
    (started,) = world.calls_of(job)
    run = world.below(started)
    assert (run.state, job.state) == (RunState.COMPLETED, RunState.COMPLETED)
    assert json.loads(job.output_text) == {"answer": run.output_text}
    assert present(run.goal).attempts_max == 5
    assert world.ledger.row(RunKey(key.store_id, run.run_id)).labels == {"pawl.goal": "true"}
    assert ([message.text for message in world.ledger.messages(key)][-1], len(world.tasks)) == ("It is blue.", 2)


@pytest.mark.parametrize(
    ("arguments", "depth_max", "reason", "why"),
    [
        ({}, 2, "INVALID_ARGUMENTS", "either a `check_tool` or a `rubric`"),
        ({"check_tool": "check", "rubric": "blue"}, 2, "INVALID_ARGUMENTS", "either a `check_tool` or a `rubric`"),
        ({"check_tool": "missing"}, 2, "INVALID_ARGUMENTS", "not available to you: missing"),
        ({"check_tool": "check", "tool_names": ["gone"]}, 2, "INVALID_ARGUMENTS", "not available to you: gone"),
        ({"check_tool": "check", "check_expression": "value."}, 2, "INVALID_ARGUMENTS", "column"),
        ({"rubric": "blue", "attempts_max": 1000}, 2, "INVALID_ARGUMENTS", "attempts_max"),
        ({"check_tool": "check"}, 1, "NOT_ALLOWED", ""),
    ],
)
async def test_agents_get_the_reason_why_a_goal_cannot_start(
    arguments: dict[str, Any], depth_max: int, reason: str, why: str
) -> None:
    world = GoalWorld(checks=[True])
    world.top = [asks(**arguments), says("Started."), says("It did not start.")]
    key = world.ledger.submit("top", RunOptions(limits=Limits(agent_depth_max=depth_max)))
    await everything_ends(world)

    failure = present(world.below(world.ledger.calls(key)[0]).failure)
    assert (failure.reason, why in failure.message) == (reason, True)
