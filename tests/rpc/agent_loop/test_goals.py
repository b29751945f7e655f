"""GoalService: users start, read, list and raise goals."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from pawl.agent.v1 import goal_pb2 as pb
from pawl.agent_loop.goals import rules
from pawl.agent_loop.goals.cursor import Attempt, GoalCursor
from pawl.agent_loop.goals.rules import Step
from pawl.agent_loop.loop.rules.loop_state import LoopState
from pawl.agent_loop.loop.rules.run import FailureClass, RunFailure
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import RunId
from pawl.event.v1 import call_pb2, goal_pb2
from pawl.values import RunState
from tests.fakes.manual_clock import ManualClock
from tests.fakes.registry import FakeChecker
from tests.rpc.agent_loop.asking import check_refusals, reason
from tests.rpc.agent_loop.conftest import ME, OTHER_USERS
from tests.rpc.agent_loop.ledger import PlayedLedger
from tests.rpc.stubs import GoalServiceAsyncStub

BY_TOOL = goal_pb2.GoalCriterion(tool_name="look", arguments_json=b'{"n": 1}', expression="size(value.broken) == 0")


def start(request_id: str = "", *, criterion: goal_pb2.GoalCriterion = BY_TOOL, **more: Any) -> pb.StartGoalRequest:
    fields: dict[str, Any] = {"aim": "Paint it blue.", "criterion": criterion} | more
    return pb.StartGoalRequest(request_id=request_id, goal=goal_pb2.Goal(**fields))


def judged_by(**fields: Any) -> goal_pb2.GoalCriterion:
    return goal_pb2.GoalCriterion(judge=goal_pb2.GoalJudge(**{"rubric": "It is blue."} | fields))


async def test_a_goal_is_a_run_in_its_own_conversation(
    goals: GoalServiceAsyncStub, ledger: PlayedLedger, checker: FakeChecker
) -> None:
    request = start("s1", wait_seconds=60, attempts_by=goal_pb2.GoalAgent(tool_names=["mail"]))
    request.total_tokens_max = 5000
    request.labels["team"] = "ops"
    run = (await goals.StartGoal(request, metadata=ME)).goal.run

    assert run.goal.aim == "Paint it blue."
    assert (run.goal.attempts_max, run.goal.criterion.expression) == (10, "size(value.broken) == 0")
    assert (run.token_budget, run.options.limits.total_tokens_max) == (5000, 5000)
    assert dict(run.labels) == {"team": "ops", "pawl.goal": "true"}
    assert (await goals.StartGoal(request, metadata=ME)).goal.run.run_id == run.run_id
    checker.gone.add("look")
    assert (await goals.StartGoal(request, metadata=ME)).goal.run.run_id == run.run_id
    request.goal.aim = "Paint it green."
    assert await reason(goals.StartGoal(request, metadata=ME)) == "REQUEST_ID_REUSED"
    request.request_id = "s2"
    assert await reason(goals.StartGoal(request, metadata=ME)) == "TOOL_NOT_FOUND"


async def test_invalid_goals_are_refused(api: Any, clock: ManualClock) -> None:
    past = {"seconds": int(clock.now()) - 5}
    tool: Any = goal_pb2.GoalCriterion
    await check_refusals(
        api,
        [
            (start(aim=""), "INVALID_FIELD", "goal.aim"),
            (start(aim="bell\a"), "INVALID_FIELD", "goal.aim"),
            (start(aim="x" * 16_385), "TOO_LARGE", "goal.aim"),
            (start(attempts_max=101), "INVALID_FIELD", "goal.attempts_max"),
            (start(wait_seconds=-1), "INVALID_FIELD", "goal.wait_seconds"),
            (start(wait_seconds=float("nan")), "INVALID_FIELD", "goal.wait_seconds"),
            (start(wait_seconds=31 * 86_400), "INVALID_FIELD", "goal.wait_seconds"),
            (start(deadline_time=past), "INVALID_FIELD", "goal.deadline_time"),
            (start(criterion=tool()), "INVALID_FIELD", "goal.criterion"),
            (start(criterion=tool(tool_name="look", judge={"rubric": "r"})), "INVALID_FIELD", "goal.criterion"),
            (start(criterion=tool(tool_name="a\n")), "INVALID_FIELD", "goal.criterion.tool_name"),
            (start(criterion=tool(tool_name="look", arguments_json=b"[]")), "INVALID_JSON"),
            (start(criterion=tool(tool_name="look", arguments_json=b'{"to":"bad"}')), "INVALID_ARGUMENTS"),
            (
                start(criterion=tool(tool_name="look", expression="value.")),
                "INVALID_FIELD",
                "goal.criterion.expression",
            ),
            (start(criterion=tool(tool_name="look", expression="'a'")), "INVALID_FIELD", "goal.criterion.expression"),
            (start(criterion=tool(tool_name="gone")), "TOOL_NOT_FOUND"),
            (start(criterion=judged_by(rubric="")), "INVALID_FIELD", "goal.criterion.judge.rubric"),
            (start(criterion=judged_by(agent="no spaces")), "INVALID_ID", "goal.criterion.judge.agent"),
            (start(criterion=judged_by(agent="unknown")), "AGENT_NOT_FOUND"),
            (
                start(criterion=tool(judge={"rubric": "r"}, expression="value")),
                "INVALID_FIELD",
                "goal.criterion.expression",
            ),
            (start(attempts_by={"agent": "unknown"}), "AGENT_NOT_FOUND"),
            (start(attempts_by={"agent": "no spaces"}), "INVALID_ID", "goal.attempts_by.agent"),
            (start(attempts_by={"tool_names": ["gone"]}), "TOOL_NOT_FOUND"),
            (start(attempts_by={"tool_names": [""]}), "INVALID_FIELD", "goal.attempts_by.tool_names"),
            (start(attempts_by={"instructions": "x" * 16_001}), "TOO_LARGE", "goal.attempts_by.instructions"),
            (pb.StartGoalRequest(goal=start().goal, total_tokens_max=2**63), "INVALID_FIELD", "total_tokens_max"),
            (pb.StartGoalRequest(goal=start().goal, labels={"pawl.goal": "x"}), "INVALID_FIELD", "labels"),
            (pb.GetGoalRequest(run_id="no-such"), "RUN_NOT_FOUND"),
            (pb.RaiseGoalRequest(run_id="no-such", attempts=1), "RUN_NOT_FOUND"),
            (pb.RaiseGoalRequest(run_id="no-such"), "INVALID_FIELD", "attempts"),
            (pb.RaiseGoalRequest(run_id="no-such", tokens=2**63), "INVALID_FIELD", "tokens"),
            (pb.ListGoalsRequest(page_size=201), "INVALID_FIELD", "page_size"),
            (pb.ListGoalsRequest(page_token="x"), "INVALID_PAGE_TOKEN"),
        ],
    )


async def test_a_tool_that_needs_the_user_cannot_be_a_criterion(
    goals: GoalServiceAsyncStub, checker: FakeChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = checker.offered

    async def more(caller: Principal) -> Any:
        tools = await offered(caller)
        return (*tools, msgspec.structs.replace(tools[0], name="show"))

    monkeypatch.setattr(checker, "offered", more)
    request = start(criterion=goal_pb2.GoalCriterion(tool_name="show"))
    assert await reason(goals.StartGoal(request, metadata=ME)) == "INVALID_ARGUMENTS"


async def test_goals_are_listed_apart_from_other_runs(goals: GoalServiceAsyncStub, ledger: PlayedLedger) -> None:
    await ledger.add_run()
    started = [(await goals.StartGoal(start(), metadata=ME)).goal.run.run_id for _ in range(3)]
    await ledger.change(started[0], RunState.COMPLETED)

    async def listed(metadata: Any = ME, **wanted: Any) -> list[str]:
        page = await goals.ListGoals(pb.ListGoalsRequest(**wanted), metadata=metadata)
        return [goal.run.run_id for goal in page.goals]

    assert (await listed(), await listed(open_only=True)) == (started[::-1], started[:0:-1])
    assert [await listed(user) for user in OTHER_USERS] == [[], []]
    assert await reason(goals.GetGoal(pb.GetGoalRequest(run_id="run_1"), metadata=ME)) == "RUN_NOT_FOUND"
    found = [goals.GetGoal(pb.GetGoalRequest(run_id=started[1]), metadata=user) for user in OTHER_USERS]
    assert [await reason(each) for each in found] == ["RUN_NOT_FOUND"] * 2


async def test_a_goal_shows_its_attempts_with_their_progress(goals: GoalServiceAsyncStub, ledger: PlayedLedger) -> None:
    run_id = (await goals.StartGoal(start(criterion=judged_by()), metadata=ME)).goal.run.run_id
    first, judged, second = (
        rules.call_id(RunId(run_id), *at) for at in ((1, Step.ATTEMPT), (1, Step.JUDGEMENT), (2, Step.ATTEMPT))
    )
    answer = (
        b'{"answer":"{\\"met\\":false,\\"progress\\":0.5,\\"reason\\":\\"Half.\\",\\"citations\\":[\\"call_x\\"]}"}'
    )
    result = call_pb2.CallResult(content_json=answer).SerializeToString()
    done: dict[str, Any] = {"end_time": datetime.fromtimestamp(99, UTC), "run_id": run_id, "tool_name": "run_agent"}
    said = call_pb2.CallResult(content_json=b'{"answer":"I tidied\\nup."}').SerializeToString()
    attempted = {**done, "result": said, "child_run_id": "run_a"}
    await ledger.add_call(first, call_pb2.CALL_STATE_SUCCEEDED, round=1, index=1, **attempted)
    await ledger.add_call(judged, call_pb2.CALL_STATE_SUCCEEDED, round=1, index=2, result=result, **done)
    await ledger.add_call(second, call_pb2.CALL_STATE_RUNNING, run_id=run_id, tool_name="run_agent", round=2, index=1)
    cursor = GoalCursor(attempts=(Attempt(0.5, "Half."),), reason="Half.")
    ledger.put_loop_state(run_id, msgspec.json.encode(LoopState(cursor=cursor)))

    one, two = (await goals.GetGoal(pb.GetGoalRequest(run_id=run_id), metadata=ME)).goal.attempts
    assert (one.number, one.run_id, one.progress, one.reason) == (1, "run_a", 0.5, "Half.")
    assert (one.met, list(one.cited_call_ids), one.judgement_call_id) == (False, ["call_x"], judged)
    assert (one.end_time.ToSeconds(), one.answer, two.answer) == (99, "I tidied up.", "")
    assert (two.number, two.call_id, two.HasField("end_time"), two.HasField("progress")) == (2, second, False, False)


async def start_attempt(
    goals: GoalServiceAsyncStub, ledger: PlayedLedger, state: call_pb2.CallState.ValueType, cursor: GoalCursor
) -> str:
    """Return the id of a new goal whose first attempt has ended, with this state of the loop."""
    run_id = (await goals.StartGoal(start(), metadata=ME)).goal.run.run_id
    ended: dict[str, Any] = {"run_id": run_id, "tool_name": "run_agent", "round": 1, "index": 1}
    call_id = rules.call_id(RunId(run_id), 1, Step.ATTEMPT)
    await ledger.add_call(call_id, state, end_time=datetime.fromtimestamp(99, UTC), **ended)
    ledger.put_loop_state(run_id, msgspec.json.encode(LoopState(cursor=cursor)))
    return run_id


@pytest.mark.parametrize(
    ("cursor", "reason"),
    [
        (GoalCursor(), "The goal ended before this attempt was judged."),
        (GoalCursor(failure=RunFailure(failure_class=FailureClass.TOOL, reason="NOT_ALLOWED", message="No.")), "No."),
    ],
)
async def test_an_unjudged_attempt_ends_when_its_goal_ends(
    goals: GoalServiceAsyncStub, ledger: PlayedLedger, cursor: GoalCursor, reason: str
) -> None:
    run_id = await start_attempt(goals, ledger, call_pb2.CALL_STATE_FAILED, cursor)
    (attempt,) = (await goals.GetGoal(pb.GetGoalRequest(run_id=run_id), metadata=ME)).goal.attempts
    assert (attempt.HasField("end_time"), attempt.reason) == (False, "")
    ledger.put_run(run_id, state=RunState.FAILED, end_time=datetime.fromtimestamp(100, UTC))
    (attempt,) = (await goals.GetGoal(pb.GetGoalRequest(run_id=run_id), metadata=ME)).goal.attempts
    assert (attempt.end_time.ToSeconds(), attempt.met, attempt.reason) == (100, False, reason)


@pytest.mark.parametrize(("checked", "met"), [(1, True), (2, False)])
async def test_only_an_attempt_that_met_the_goal_is_shown_as_met(
    goals: GoalServiceAsyncStub, ledger: PlayedLedger, checked: int, *, met: bool
) -> None:
    cursor = GoalCursor(attempts=(Attempt(0.5, "Half."),), met=True, checked=checked)
    run_id = await start_attempt(goals, ledger, call_pb2.CALL_STATE_SUCCEEDED, cursor)
    (attempt,) = (await goals.GetGoal(pb.GetGoalRequest(run_id=run_id), metadata=ME)).goal.attempts
    assert attempt.met is met


async def test_limits_are_raised_once_per_request(
    goals: GoalServiceAsyncStub, ledger: PlayedLedger, clock: ManualClock
) -> None:
    deadline = datetime.fromtimestamp(int(clock.now()), UTC) + timedelta(hours=1)
    request = start(attempts_max=90, deadline_time={"seconds": int(deadline.timestamp())})
    request.total_tokens_max = 100
    run_id = (await goals.StartGoal(request, metadata=ME)).goal.run.run_id
    later: Any = {"seconds": int(deadline.timestamp()) + 60}

    raised = pb.RaiseGoalRequest(request_id="r1", run_id=run_id, attempts=5, tokens=50, deadline_time=later)
    run = (await goals.RaiseGoal(raised, metadata=ME)).goal.run
    assert (run.goal.attempts_max, run.goal.deadline_time.seconds, run.token_budget) == (95, later["seconds"], 150)
    assert (await goals.RaiseGoal(raised, metadata=ME)).goal.run.token_budget == 150
    raised.attempts = 6
    assert await reason(goals.RaiseGoal(raised, metadata=ME)) == "REQUEST_ID_REUSED"
    for wrong in (
        pb.RaiseGoalRequest(run_id=run_id, attempts=11),
        pb.RaiseGoalRequest(run_id=run_id, deadline_time=request.goal.deadline_time),
    ):
        assert await reason(goals.RaiseGoal(wrong, metadata=ME)) == "INVALID_FIELD"
    more = pb.RaiseGoalRequest(run_id=run_id, attempts=1)
    assert [await reason(goals.RaiseGoal(more, metadata=user)) for user in OTHER_USERS] == ["RUN_NOT_FOUND"] * 2
    await ledger.change(run_id, RunState.COMPLETED)
    assert await reason(goals.RaiseGoal(more, metadata=ME)) == "RUN_ENDED"
