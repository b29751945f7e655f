"""A user with goals in some seeds, and the checkers of their attempts and ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec

from pawl.agent.v1 import goal_pb2 as pb
from pawl.agent_loop.goals.rules import STALLED_MAX, Step
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import RequestId, RunId, StoreId, UserId
from pawl.errors import PawlError
from pawl.event.v1 import call_pb2, goal_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2
from tests.simulation.chance import Chance
from tests.simulation.checkers import ENDED, SETTLED
from tests.simulation.cluster import AgentLoop
from tests.simulation.model import WATCHED
from tests.simulation.network import Network
from tests.simulation.record import Ledger, Record, call_state, run_state
from tests.simulation.world import World

_PLAYED = 0.3
_LIMITS = {"GOAL_ATTEMPTS", "GOAL_NO_PROGRESS", "GOAL_DEADLINE", "GOAL_BUDGET"}
_ATTEMPTS_ADDED = 2


def are_played(chance: Chance) -> bool:
    return chance.stream("goals").random() < _PLAYED


class Pursuer:
    """A user who starts goals, raises some and cancels some."""

    def __init__(self, world: World, store_id: StoreId) -> None:
        self._world = world
        self._caller = Principal(store_id=store_id, user_id=UserId("pursuer"), roles=frozenset({"member"}))
        self._draw = world.chance.stream("pursuer")
        self._network = Network(world.chance, world.history, "pursuer")

    async def live(self) -> None:
        started = [await self._start(number) for number in range(self._draw.choice([1, 1, 2, 3]))]
        while not self._world.chance.calm:
            await asyncio.sleep(6.0 * self._draw.random())
            run_id, chance = self._draw.choice(started), self._draw.random()
            if run_id and chance < 0.3:
                await self._raise(run_id)
            elif run_id and chance < 0.4:
                await self._cancel(run_id)

    async def _cancel(self, run_id: RunId) -> None:
        request_id = RequestId(f"cancel-{run_id}")
        await self._ask("cancel", lambda agent: agent.clients.inbox.cancel(self._caller, request_id, run_id, ""))

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

    async def _ask(self, what: str, work: Callable[[AgentLoop], Awaitable[Any]]) -> Any:
        try:
            return await self._world.insist(self._network, self._draw, f"{what} goal", work)
        except PawlError as error:
            self._world.history.tell(f"{what} of a goal refused: {error.reason}")
            return None


def each_step_of_a_goal_is_made_once(record: Ledger) -> Iterator[str]:
    """A goal makes each check, attempt and judgement once and in order, and no attempt once it is met."""
    for run_id, calls in _goals(record):
        steps = Counter((call.round, call.index) for call in calls)
        if repeated := [step for step, count in steps.items() if count > 1]:
            yield f"goal {run_id} made the steps {repeated} more than once"
        met = [(call.round, call.index) for call in calls if _is_met(call)]
        later = [step for step in steps if met and step > min(met)]
        if later:
            yield f"goal {run_id} was met in {min(met)}, but continued with {later}"
        attempts = [call.round for call in calls if call.index == Step.ATTEMPT]
        if attempts != list(range(1, len(attempts) + 1)):
            yield f"goal {run_id} made the attempts {attempts}"


def goals_end_for_their_reason(record: Ledger) -> Iterator[str]:
    """A goal is COMPLETED if a check met it, and otherwise fails for the limit that it has reached."""
    for run_id, calls in _goals(record):
        run = record.runs[run_id]
        how, is_met = run_state(run.state), any(map(_is_met, calls))
        judged = [call for call in calls if call.index == Step.JUDGEMENT and call_state(call.state) in SETTLED]
        if how == "COMPLETED" and not is_met:
            yield f"goal {run_id} is COMPLETED, but was not met"
        if how != "FAILED":
            continue
        reason = run.failure.reason
        if reason not in _LIMITS and reason not in {call.result.error_reason for call in calls}:
            yield f"goal {run_id} failed with {reason}"
        if reason == "GOAL_ATTEMPTS" and len(judged) != run.goal.attempts_max:
            yield f"goal {run_id} ended after {len(judged)} of {run.goal.attempts_max} attempts"
        if reason == "GOAL_NO_PROGRESS" and len(judged) < STALLED_MAX:
            yield f"goal {run_id} ended without progress after {len(judged)} attempts"
        if is_met:
            yield f"goal {run_id} failed with {reason}, but was met"


def goals_report_once(record: Ledger) -> Iterator[str]:
    """An ended goal that started has one message of its own: its report. Each check's progress is in the log once."""
    for run_id, calls in _goals(record):
        run = record.runs[run_id]
        own = [each for each in record.messages[run.conversation_id] if each.run_id == run_id]
        reports = [each.text for each in own if each.role == message_pb2.ROLE_ASSISTANT]
        if run_state(run.state) in ENDED and run.round and reports != [run.output_text]:
            yield f"goal {run_id} reported {reports}, and its output is {run.output_text!r}"
        # Its tool reports other progress, which only says half or the arguments.
        by_tool = {
            call.call_id: ("half", *msgspec.json.decode(call.arguments_json or b"{}").values())
            for call in calls
            if call.index != Step.ATTEMPT
        }
        reported = [event.tool_progress for event in record.logs[run_id]]
        told = [each.call_id for each in reported if each.message not in by_tool.get(each.call_id, [each.message])]
        if len(told) != len(set(told)):
            yield f"goal {run_id} reported the progress of {told}"


def raised_limits_count_once(record: Record) -> Iterator[str]:
    """The attempts of a goal are those it started with, plus those that accepted commands have added."""
    for run_id, _ in _goals(record):
        (row,) = [row for row in record.tables.runs.values() if row.run_id == run_id]
        first = run_pb2.Run.FromString(row.options).goal.attempts_max
        raises = [
            each
            for each in record.tables.commands.values()
            if each.run_id == run_id and each.name == "raise_goal" and each.outcome.is_taken
        ]
        most = first + _ATTEMPTS_ADDED * len(raises)
        shown = record.runs[run_id].goal.attempts_max
        if shown > most or (run_state(record.runs[run_id].state) in {"COMPLETED", "FAILED"} and shown != most):
            yield f"goal {run_id} may make {shown} attempts, but was given {most}"


def _goals(record: Ledger) -> Iterator[tuple[str, list[call_pb2.Call]]]:
    for run_id, run in record.runs.items():
        if run.HasField("goal"):
            calls = [call for call in record.calls.values() if call.run_id == run_id]
            yield run_id, sorted(calls, key=lambda call: (call.round, call.index))


def _is_met(call: call_pb2.Call) -> bool:
    if call.index == Step.ATTEMPT or call_state(call.state) != "SUCCEEDED":
        return False
    value = msgspec.json.decode(call.result.content_json)
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
