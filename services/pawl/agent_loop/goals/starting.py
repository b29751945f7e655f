from __future__ import annotations

import hashlib
from typing import Final

from msgspec.structs import replace

from pawl.agent.v1 import goal_pb2
from pawl.agent.v1.agent_pb2 import StartRunRequest
from pawl.agent_loop.agents.agents import Agents
from pawl.agent_loop.api import convert
from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.api.messages import Messages, unless_refused
from pawl.agent_loop.goals import asking, rules
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.registry import RegistryClient
from pawl.agent_loop.loop.rules import jobs
from pawl.agent_loop.loop.rules.run import Goal, GoalCriterion, Job, Run, RunOptions
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import ConversationId, IdSource, RequestId, RunId
from pawl.chassis.process.clock import Clock
from pawl.chassis.rpc.translate import Exceptions
from pawl.errors import InvalidArguments, InvalidField, PawlError, ToolNotFound
from pawl.event.v1 import goal_pb2 as event_pb2
from pawl.event.v1 import run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.values import TOKENS_MAX, ExecutionContext

_ASKED: Final = convert.WIRE.struct(
    Goal,
    event_pb2.Goal,
    Exceptions(read={"attempts_max": lambda message: message.attempts_max or asking.ATTEMPTS}),
)


class GoalStarting:
    def __init__(
        self,
        ledger: PublicLedger,
        messages: Messages,
        agents: Agents,
        registry: RegistryClient,
        *,
        clock: Clock,
        ids: IdSource,
    ) -> None:
        self._ledger = ledger
        self._messages = messages
        self._agents = agents
        self._registry = registry
        self._clock = clock
        self._ids = ids

    async def start(self, caller: Principal, request_id: RequestId, request: goal_pb2.StartGoalRequest) -> run_pb2.Run:
        """Create a goal run and return once it is durable. Idempotent by request id.

        Raises:
            InvalidField, InvalidId, InvalidJson, TooLarge: The goal is invalid, or its agent cannot pursue it.
            AgentNotFound, ToolNotFound, PermissionDenied, InvalidArguments: Its agents or the call to its tool are not
                allowed.
            QueueFull, RequestIdReused
        """
        goal = _ASKED.read(request.goal)
        asking.check(goal)
        if request.total_tokens_max > TOKENS_MAX:
            raise InvalidField(f"total_tokens_max must be at most {TOKENS_MAX}", field="total_tokens_max")
        message = StartRunRequest(text=goal.aim, agent=goal.attempts_by.agent, labels=request.labels)
        if request.total_tokens_max:
            message.options.limits.total_tokens_max = request.total_tokens_max
        submission, refusal = await self._messages.checked(caller, request_id, message, must_exist=False)
        if refusal is None:
            try:
                await self._check_current(caller, submission, goal)
            except PawlError as error:
                refusal = error
        requested = goal_pb2.StartGoalRequest()
        requested.CopyFrom(request)
        requested.ClearField("request_id")
        submission.asked_program_sha256 = hashlib.sha256(requested.SerializeToString(deterministic=True)).digest()
        submission.goal.CopyFrom(wire.GOAL.write(goal))
        return (await unless_refused(submission, refusal, lambda: self._ledger.submit_message(submission))).run

    async def _check_current(self, caller: Principal, submission: pb.SubmitMessageRequest, goal: Goal) -> None:
        """Check everything that can change between two equal requests: the time, agents, tools and rules."""
        now, options = self._clock.now(), wire.OPTIONS.read(submission.options)
        if goal.deadline_time is not None and goal.deadline_time <= now:
            raise InvalidField("goal.deadline_time must be in the future", field="goal.deadline_time")
        if options.limits.agent_depth_max < 1:
            message = "goal attempts are child runs, but agent_depth_max is 0 for this deployment or agent"
            raise InvalidField(message, field="goal.attempts_by.agent")
        _check_tools(goal, options)
        criterion = goal.criterion
        if criterion.judge is not None and criterion.judge.agent:
            await self._agents.of_run(caller, criterion.judge.agent)
        run = Run(
            store_id=caller.store_id,
            user_id=caller.user_id,
            conversation_id=ConversationId(self._ids.new("conv")),
            run_id=RunId(self._ids.new("run")),
            options=options,
            user_roles=tuple(sorted(caller.roles)),
            credential_id=caller.credential_id,
            delegate_user_id=caller.delegate_user_id,
            agent=wire.AGENT.read(submission.agent) if submission.HasField("agent") else None,
        )
        offered = {tool.name for tool in await self._registry.offered(caller)}
        for name in (*rules.tools_needed(goal), *goal.attempts_by.tool_names):
            if name not in offered:
                raise ToolNotFound(f"there is no tool {name:.100} that you may call", tool_name=name)
        if criterion.tool_name:
            await self._check_call(caller, run, criterion, now)

    async def _check_call(self, caller: Principal, run: Run, criterion: GoalCriterion, now: float) -> None:
        call = Job(tool_name=criterion.tool_name, arguments_json=criterion.arguments_json or b"{}", begin_time=now)
        verdict = await self._registry.check_job(caller, replace(run, job=call), now)
        jobs.check_allowed(verdict)
        if verdict.context is not ExecutionContext.BACKEND:
            message = (
                f"{criterion.tool_name} needs the user, the user's program or an agent, so it cannot be a criterion"
            )
            raise InvalidArguments(message)


def _check_tools(goal: Goal, options: RunOptions) -> None:
    names = goal.attempts_by.tool_names
    if names and options.without_tools:
        message = "goal.attempts_by.tool_names: the agent has no tools"
        raise InvalidField(message, field="goal.attempts_by.tool_names")
    unknown = [name for name in names if options.tool_names and name not in options.tool_names]
    if unknown:
        message = f"goal.attempts_by.tool_names: the agent does not have the tool {unknown[0]:.100}"
        raise InvalidField(message, field="goal.attempts_by.tool_names")
