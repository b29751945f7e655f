"""Client methods for goals."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import datetime
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from pawl.agent.v1 import goal_pb2 as pb
from pawl.client.forms import natural
from pawl.client.target import Target
from pawl.event.v1 import goal_pb2


class GoalVerbs(Target):
    async def start_goal(
        self,
        aim: str,
        *,
        tool: str = "",
        arguments: Mapping[str, Any] | None = None,
        expression: str = "",
        rubric: str = "",
        judge: str = "",
        agent: str = "",
        instructions: str = "",
        tool_names: Sequence[str] = (),
        attempts_max: int = 0,
        deadline: datetime | None = None,
        wait_seconds: float = 0.0,
        total_tokens_max: int = 0,
        labels: Mapping[str, str] | None = None,
        request_id: str = "",
    ) -> pb.GoalStatus:
        """Start a goal and return it.

        Pawl makes attempts in the background until the goal is met or a limit is reached. The goal is met if `tool`,
        called with `arguments`, returns true or `{"met": true}`, or if the CEL `expression` is true for its result.
        Alternatively, an agent (`judge`) decides by a `rubric`. You can watch or cancel the goal's run and decide on
        its calls, as with any other run.
        """
        criterion = goal_pb2.GoalCriterion(
            tool_name=tool,
            arguments_json=json.dumps(dict(arguments)).encode() if arguments else b"",
            expression=expression,
            judge=goal_pb2.GoalJudge(agent=judge, rubric=rubric) if rubric or judge else None,
        )
        goal = goal_pb2.Goal(
            aim=aim,
            attempts_by=goal_pb2.GoalAgent(agent=agent, instructions=instructions, tool_names=tool_names),
            criterion=criterion,
            attempts_max=natural(attempts_max, "attempts_max"),
            deadline_time=_timestamp(deadline),
            wait_seconds=wait_seconds,
        )
        request = pb.StartGoalRequest(
            goal=goal,
            total_tokens_max=natural(total_tokens_max, "total_tokens_max"),
            labels=labels,
            request_id=request_id,
        )
        return (await self.once(self.goals.StartGoal, request)).goal

    async def get_goal(self, run_id: str) -> pb.GoalStatus:
        """Return a goal with its attempts and the progress after each attempt."""
        return (await self.again(self.goals.GetGoal, pb.GetGoalRequest(run_id=run_id))).goal

    async def list_goals(self, *, open_only: bool = False) -> AsyncGenerator[pb.GoalStatus, None]:
        """Yield your goals, newest first, without their attempts."""
        async for page in self.pages(self.goals.ListGoals, pb.ListGoalsRequest(open_only=open_only)):
            for goal in page.goals:
                yield goal

    async def raise_goal(
        self, run_id: str, *, attempts: int = 0, deadline: datetime | None = None, tokens: int = 0, request_id: str = ""
    ) -> pb.GoalStatus:
        """Raise the limits of an active goal: add attempts or tokens, or set a later deadline."""
        request = pb.RaiseGoalRequest(
            run_id=run_id,
            attempts=natural(attempts, "attempts"),
            deadline_time=_timestamp(deadline),
            tokens=natural(tokens, "tokens"),
            request_id=request_id,
        )
        return (await self.once(self.goals.RaiseGoal, request)).goal


def _timestamp(time: datetime | None) -> Timestamp | None:
    if time is None:
        return None
    found = Timestamp()
    found.FromDatetime(time)
    return found
