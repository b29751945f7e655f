"""Serves pawl.agent.v1.GoalService. A goal is a run that makes attempts with child runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp
from msgspec.structs import replace

from pawl.agent.v1 import agent_pb2, goal_pb2, goal_pb2_grpc
from pawl.agent_loop.api import convert
from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.api.replies import run_after
from pawl.agent_loop.goals import judging
from pawl.agent_loop.goals.cursor import GoalCursor
from pawl.agent_loop.goals.rules import Step
from pawl.agent_loop.goals.starting import GoalStarting
from pawl.agent_loop.loop.ledger import calls_of_run
from pawl.agent_loop.loop.rules import checks, loop_state
from pawl.agent_loop.loop.rules.call import Call
from pawl.chassis.identity.auth import require_user
from pawl.chassis.ids import IdSource
from pawl.chassis.rpc.kinds import Context
from pawl.chassis.rpc.translate import timestamp
from pawl.errors import RunNotFound
from pawl.event.v1 import goal_pb2 as event_pb2
from pawl.event.v1 import run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.values import ENDED, CommandOutcome

_LIST_RUNS: Final = "/pawl.agent.v1.AgentService/ListRuns"
_NOT_JUDGED: Final = "The goal ended before this attempt was judged."
_OPEN: Final = tuple(state for state in run_pb2.RunState.values() if state and state not in ENDED)


class GoalServicer(goal_pb2_grpc.GoalServiceServicer):
    """Starts, reads and lists goals, and raises their limits. The credential determines store and user."""

    def __init__(self, ledger: PublicLedger, starting: GoalStarting, ids: IdSource) -> None:
        self._ledger = ledger
        self._starting = starting
        self._ids = ids

    async def StartGoal(self, request: goal_pb2.StartGoalRequest, context: Context) -> goal_pb2.StartGoalResponse:
        run = await self._starting.start(require_user(), convert.request_id(request), request)
        return goal_pb2.StartGoalResponse(goal=goal_pb2.GoalStatus(run=run))

    async def GetGoal(self, request: goal_pb2.GetGoalRequest, context: Context) -> goal_pb2.GetGoalResponse:
        caller, run_id = require_user(), convert.run_id(request)
        run = await self._ledger.get_run(caller, run_id)
        if not run.HasField("goal"):
            raise RunNotFound("the run is not a goal run")
        read = await self._ledger.get_run_as_service(caller, run_id, with_loop_state=True)
        cursor = loop_state.read(read.loop_state).cursor
        calls = await calls_of_run(self._ledger.channel, caller.store_id, caller.user_id, run_id, _with_short_answer)
        attempts = _attempts(cursor if isinstance(cursor, GoalCursor) else GoalCursor(), calls, _end_of(run))
        return goal_pb2.GetGoalResponse(goal=goal_pb2.GoalStatus(run=convert.run_message(run), attempts=attempts))

    async def ListGoals(self, request: goal_pb2.ListGoalsRequest, context: Context) -> goal_pb2.ListGoalsResponse:
        wanted = agent_pb2.ListRunsRequest(
            goals_only=True,
            states=_OPEN if request.open_only else (),
            page_size=checks.page_size(request.page_size),
            page_token=request.page_token,
        )
        answer = await self._ledger.forward(require_user(), _LIST_RUNS, wanted.SerializeToString())
        page = agent_pb2.ListRunsResponse.FromString(answer)
        goals = (goal_pb2.GoalStatus(run=run) for run in page.runs)
        return goal_pb2.ListGoalsResponse(goals=goals, next_page_token=page.next_page_token)

    async def RaiseGoal(self, request: goal_pb2.RaiseGoalRequest, context: Context) -> goal_pb2.RaiseGoalResponse:
        caller, run_id = require_user(), convert.run_id(request)
        raised = pb.RaiseGoalCommand(
            attempts=request.attempts,
            deadline_time=request.deadline_time if request.HasField("deadline_time") else None,
            tokens=request.tokens,
        )
        command = pb.Command(command_id=convert.request_id(request) or self._ids.new("cmd"), raise_goal=raised)
        reply = await self._ledger.send_command(caller, run_id, command)
        run = run_after(reply, RunNotFound)
        if CommandOutcome(reply.outcome) is CommandOutcome.ACCEPTED:
            # The run's worker has not applied these limits yet.
            run.goal.attempts_max += raised.attempts
            if raised.HasField("deadline_time"):
                run.goal.deadline_time.CopyFrom(raised.deadline_time)
        return goal_pb2.RaiseGoalResponse(goal=goal_pb2.GoalStatus(run=convert.run_message(run)))


def _end_of(run: run_pb2.Run) -> Timestamp | None:
    return run.end_time if run.state in ENDED else None


def _attempts(cursor: GoalCursor, calls: Iterable[Call], goal_end: Timestamp | None) -> Iterator[event_pb2.GoalAttempt]:
    """Yield the attempts of a goal. `goal_end` is None if the goal has not ended."""
    steps = {(call.round, call.index): call for call in calls}
    for (number, step), call in steps.items():
        if step != Step.ATTEMPT:
            continue
        judged = steps.get((number, Step.JUDGED_AGAIN)) or steps.get((number, Step.JUDGEMENT))
        attempt = event_pb2.GoalAttempt(
            number=number,
            call_id=call.call_id,
            run_id=call.child_run_id,
            judgement_call_id=judged.call_id if judged is not None else "",
            start_time=_time(call.create_time),
            answer=call.result.content_json.decode() if call.settled and call.result else "",
        )
        if number <= len(cursor.attempts):
            found, last = cursor.attempts[number - 1], judged or call
            # A check before the next attempt may also have met the goal.
            attempt.met = cursor.met and number == len(cursor.attempts) and cursor.checked <= number
            attempt.reason = found.reason
            attempt.cited_call_ids.extend(judging.citations(last) if last is judged else ())
            if found.progress is not None:
                attempt.progress = found.progress
            attempt.end_time.CopyFrom(_time(last.end_time))
        elif goal_end is not None:
            attempt.reason = cursor.failure.message if cursor.failure is not None else _NOT_JUDGED
            attempt.end_time.CopyFrom(goal_end)
        yield attempt


def _with_short_answer(call: Call) -> Call:
    if call.index != Step.ATTEMPT or call.result is None:
        return call
    answer = judging.line(judging.answer_of(call), judging.SHORT_ANSWER_BYTES_MAX)
    return replace(call, result=replace(call.result, content_json=answer.encode()))


def _time(seconds: float | None) -> Timestamp:
    return Timestamp(**timestamp(seconds or 0.0))
