"""A user with goals in some seeds, and the checkers of their attempts and ends."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator

import msgspec

from pawl.agent.v1 import goal_pb2 as pb
from pawl.agent_loop.goals.rules import STALLED_MAX, Step
from pawl.chassis.ids import RequestId, RunId, StoreId
from pawl.event.v1 import call_pb2, goal_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2
from tests.simulation.chance import Chance
from tests.simulation.checkers import ENDED, SETTLED
from tests.simulation.model import WATCHED
from tests.simulation.record import Ledger, Record, broken, call_state, run_state
from tests.simulation.world import Member, World

_PLAYED = 0.3
_LIMITS = {"GOAL_ATTEMPTS", "GOAL_NO_PROGRESS", "GOAL_DEADLINE", "GOAL_BUDGET"}
_ATTEMPTS_ADDED = 2


def are_played(chance: Chance) -> bool:
    return chance.stream("goals").random() < _PLAYED


class Pursuer(Member):
    """A user who starts goals, raises some and cancels some."""

    def __init__(self, world: World, store_id: StoreId) -> None:
        super().__init__(world, store_id, "pursuer")

    async def live(self) -> None:
        started = [await self._start(number) for number in range(self._draw.choice([1, 1, 2, 3]))]
        while not self._world.chance.calm:
            await asyncio.sleep(6.0 * self._draw.random())
            run_id, chance = self._draw.choice(started), self._draw.random()
            if run_id and chance < 0.3:
                await self._raise(run_id)
            elif run_id and chance < 0.4:
                await self._cancel(run_id)

    async def _start(self, number: int) -> RunId:
        draw = self._draw
        goal = goal_pb2.Goal(
            aim=f"Make it so ({number}).",
            attempts_by=goal_pb2.GoalAgent(tool_names=["look", "mail"]),
            criterion=goal_pb2.GoalCriterion(tool_name="look", arguments_json=b"{}", expression=WATCHED),
            attempts_max=draw.choice([1, 2, 4]),
            wait_seconds=draw.choice([0, 0, 3.0]),
        )
        if draw.random() < 0.3:
            goal.deadline_time.FromNanoseconds(int((asyncio.get_running_loop().time() + draw.choice([2, 9, 40])) * 1e9))
        request = pb.StartGoalRequest(goal=goal, total_tokens_max=draw.choice([0, 0, 400]))
        request_id = RequestId(f"goal-{number}")
        run = await self._ask(
            "start", lambda agent: agent.clients.goal_starting.start(self._caller, request_id, request)
        )
        return RunId(run.run_id if run is not None else "")

    async def _raise(self, run_id: RunId) -> None:
        raised = ledger_pb2.RaiseGoalCommand(attempts=_ATTEMPTS_ADDED)
        command = ledger_pb2.Command(command_id=f"raise-{run_id}-{self._draw.randrange(2)}", raise_goal=raised)
        await self._ask("raise", lambda agent: agent.ledger.send_command(self._caller, run_id, command))


def each_step_of_a_goal_is_made_once(record: Ledger) -> Iterator[str]:
    """A goal makes each check, attempt and judgement once and in order, and no attempt once it is met."""
    for run_id, calls in _goals(record):
        steps = Counter((call.round, call.index) for call in calls)
        repeated = [step for step, count in steps.items() if count > 1]
        met = min(((call.round, call.index) for call in calls if _is_met(call)), default=(math.inf, 0))
        later = [step for step in steps if step > met]
        attempts = [call.round for call in calls if call.index == Step.ATTEMPT]
        is_in_order = attempts == list(range(1, len(attempts) + 1))
        yield from broken(
            (repeated, f"goal {run_id} made the steps {repeated} more than once"),
            (later, f"goal {run_id} was met in {met}, but continued with {later}"),
            (not is_in_order, f"goal {run_id} made the attempts {attempts}"),
        )


def goals_end_for_their_reason(record: Ledger) -> Iterator[str]:
    """A goal is COMPLETED if a check met it. Otherwise, it fails because of the limit that it has reached."""
    for run_id, calls in _goals(record):
        run = record.runs[run_id]
        reason, is_met = run.failure.reason, any(map(_is_met, calls))
        judged = sum(call.index == Step.JUDGEMENT and call_state(call.state) in SETTLED for call in calls)
        most, known = run.goal.attempts_max, _LIMITS | {call.result.error_reason for call in calls}
        limit = reason if run_state(run.state) == "FAILED" else ""
        yield from broken(
            (run_state(run.state) == "COMPLETED" and not is_met, f"goal {run_id} is COMPLETED, but was not met"),
            (run_state(run.state) == "FAILED" and reason not in known, f"goal {run_id} failed with {reason}"),
            (limit == "GOAL_ATTEMPTS" and judged != most, f"goal {run_id} ended after {judged} of {most} attempts"),
            (
                limit == "GOAL_NO_PROGRESS" and judged < STALLED_MAX,
                f"goal {run_id} ended without progress after {judged} attempts",
            ),
            (run_state(run.state) == "FAILED" and is_met, f"goal {run_id} failed with {reason}, but was met"),
        )


def goals_report_once(record: Ledger) -> Iterator[str]:
    """An ended goal that started has one message: its report. Each check's progress is in the log once."""
    for run_id, calls in _goals(record):
        run = record.runs[run_id]
        own = [each for each in record.messages[run.conversation_id] if each.run_id == run_id]
        reports = [each.text for each in own if each.role == message_pb2.ROLE_ASSISTANT]
        has_ended = run_state(run.state) in ENDED and run.round
        # Its tool reports other progress, which only says half or the arguments.
        by_tool = {
            call.call_id: ("half", *msgspec.json.decode(call.arguments_json or b"{}").values())
            for call in calls
            if call.index != Step.ATTEMPT
        }
        reported = [event.tool_progress for event in record.logs[run_id]]
        told = [each.call_id for each in reported if each.message not in by_tool.get(each.call_id, [each.message])]
        yield from broken(
            (
                has_ended and reports != [run.output_text],
                f"goal {run_id} reported {reports}, and its output is {run.output_text!r}",
            ),
            (len(told) != len(set(told)), f"goal {run_id} reported the progress of {told}"),
        )


def raised_limits_count_once(record: Record) -> Iterator[str]:
    """The attempts of a goal are its initial ones plus those that accepted commands have added."""
    commands = [row for row in record.tables.commands.values() if row.name == "raise_goal" and row.outcome.is_taken]
    for run_id, _ in _goals(record):
        (row,) = [row for row in record.tables.runs.values() if row.run_id == run_id]
        first = run_pb2.Run.FromString(row.options).goal.attempts_max
        most = first + _ATTEMPTS_ADDED * sum(each.run_id == run_id for each in commands)
        shown = record.runs[run_id].goal.attempts_max
        if shown > most or (run_state(record.runs[run_id].state) in {"COMPLETED", "FAILED"} and shown != most):
            yield f"goal {run_id} may make {shown} attempts, but was given {most}"


def _goals(record: Ledger) -> Iterator[tuple[str, list[call_pb2.Call]]]:
    for run_id in (run_id for run_id, run in record.runs.items() if run.HasField("goal")):
        calls = [call for call in record.calls.values() if call.run_id == run_id]
        yield run_id, sorted(calls, key=lambda call: (call.round, call.index))


def _is_met(call: call_pb2.Call) -> bool:
    is_settled = call.index != Step.ATTEMPT and call_state(call.state) == "SUCCEEDED"
    value = msgspec.json.decode(call.result.content_json) if is_settled else None
    return isinstance(value, str) and value.endswith("again")


LEDGER_CHECKERS = (
    each_step_of_a_goal_is_made_once,
    goals_end_for_their_reason,
    goals_report_once,
)

CHECKERS = (
    raised_limits_count_once,
    *LEDGER_CHECKERS,
)
