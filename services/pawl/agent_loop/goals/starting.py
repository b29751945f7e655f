"""Validates goals and starts them."""

from __future__ import annotations

import hashlib
import math
from typing import Final

from msgspec.structs import replace

from pawl.agent.v1 import goal_pb2
from pawl.agent.v1.agent_pb2 import StartRunRequest
from pawl.agent_loop.agents.agents import Agents
from pawl.agent_loop.api import convert
from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.api.messages import Messages, unless_refused
from pawl.agent_loop.goals import judging, rules
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.registry import RegistryClient
from pawl.agent_loop.loop.rules import checks, jobs
from pawl.agent_loop.loop.rules.expression import ExpressionError
from pawl.agent_loop.loop.rules.options import NAME_CHARACTERS_MAX, TOOL_NAMES_MAX
from pawl.agent_loop.loop.rules.run import Goal, GoalCriterion, GoalJudge, Job, Run, RunOptions
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import ConversationId, IdSource, RequestId, RunId, check_agent_name
from pawl.chassis.process.clock import Clock
from pawl.chassis.rpc.translate import Exceptions
from pawl.errors import InvalidArguments, InvalidField, PawlError, ToolNotFound
from pawl.event.v1 import goal_pb2 as event_pb2
from pawl.event.v1 import run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.values import TOKENS_MAX, ExecutionContext

AIM_BYTES_MAX: Final = 16 * 1024
RUBRIC_BYTES_MAX: Final = 16 * 1024
INSTRUCTIONS_BYTES_MAX: Final = 16_000
WAIT_SECONDS_MAX: Final = 30 * 86_400.0
_ATTEMPTS: Final = 10
_ASKED: Final = convert.WIRE.struct(
    Goal,
    event_pb2.Goal,
    Exceptions(read={"attempts_max": lambda message: message.attempts_max or _ATTEMPTS}),
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
        """Create a goal run. It is durable when this returns. Idempotent by request id.

        Raises:
            InvalidField, InvalidId, InvalidJson, TooLarge: the goal is invalid, or its agent cannot pursue it.
            AgentNotFound, ToolNotFound, PermissionDenied, InvalidArguments: its agents or the call of its tool are not
                allowed.
            QueueFull, RequestIdReused
        """
        goal = checked(request.goal)
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
        asked = goal_pb2.StartGoalRequest()
        asked.CopyFrom(request)
        asked.ClearField("request_id")
        submission.asked_program_sha256 = hashlib.sha256(asked.SerializeToString(deterministic=True)).digest()
        submission.goal.CopyFrom(wire.GOAL.write(goal))
        return (await unless_refused(submission, refusal, lambda: self._ledger.submit_message(submission))).run

    async def _check_current(self, caller: Principal, submission: pb.SubmitMessageRequest, goal: Goal) -> None:
        """Check what can change between two equal requests: the time, agents, tools and rules."""
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


def checked(message: event_pb2.Goal) -> Goal:
    """Return a goal that a client requests.

    Raises:
        InvalidField, InvalidId, InvalidJson, TooLarge: the goal is invalid.
    """
    goal = _ASKED.read(message)
    checks.text(goal.aim, "goal.aim", bytes_max=AIM_BYTES_MAX)
    by = goal.attempts_by
    check_agent_name(by.agent, "goal.attempts_by.agent", optional=True)
    checks.text(by.instructions, "goal.attempts_by.instructions", bytes_max=INSTRUCTIONS_BYTES_MAX, may_be_empty=True)
    if len(by.tool_names) > TOOL_NAMES_MAX or not all(map(_is_name, by.tool_names)):
        message_text = f"tool_names must be at most {TOOL_NAMES_MAX} names of 1 to {NAME_CHARACTERS_MAX} characters"
        raise InvalidField(f"goal.attempts_by.{message_text}", field="goal.attempts_by.tool_names")
    if not 1 <= goal.attempts_max <= rules.ATTEMPTS_MAX:
        wanted = f"between 1 and {rules.ATTEMPTS_MAX}, got {goal.attempts_max}"
        raise InvalidField(f"goal.attempts_max must be {wanted}", field="goal.attempts_max")
    if not math.isfinite(goal.wait_seconds) or not 0 <= goal.wait_seconds <= WAIT_SECONDS_MAX:
        wanted = f"between 0 and {WAIT_SECONDS_MAX:.0f}, got {goal.wait_seconds:g}"
        raise InvalidField(f"goal.wait_seconds must be {wanted}", field="goal.wait_seconds")
    _check_criterion(goal.criterion)
    return goal


def _check_criterion(criterion: GoalCriterion) -> None:
    path = "goal.criterion"
    if bool(criterion.tool_name) is (criterion.judge is not None):
        raise InvalidField(f"{path} must have either tool_name or judge", field=path)
    if criterion.judge is not None:
        _check_judge(criterion, criterion.judge)
        return
    if not _is_name(criterion.tool_name):
        message = f"{path}.tool_name must have 1 to {NAME_CHARACTERS_MAX} printable characters"
        raise InvalidField(message, field=f"{path}.tool_name")
    checks.arguments_json(criterion.arguments_json or b"{}")
    try:
        if criterion.expression:
            judging.check_expression(criterion.expression)
    except ExpressionError as error:
        raise InvalidField(f"{path}.expression: {error}", field=f"{path}.expression") from None


def _check_judge(criterion: GoalCriterion, judge: GoalJudge) -> None:
    for name in ("arguments_json", "expression"):
        if getattr(criterion, name):
            raise InvalidField(f"goal.criterion.{name} requires tool_name", field=f"goal.criterion.{name}")
    check_agent_name(judge.agent, "goal.criterion.judge.agent", optional=True)
    checks.text(judge.rubric, "goal.criterion.judge.rubric", bytes_max=RUBRIC_BYTES_MAX)


def _check_tools(goal: Goal, options: RunOptions) -> None:
    names = goal.attempts_by.tool_names
    if names and options.without_tools:
        message = "goal.attempts_by.tool_names: the agent has no tools"
        raise InvalidField(message, field="goal.attempts_by.tool_names")
    unknown = [name for name in names if options.tool_names and name not in options.tool_names]
    if unknown:
        message = f"goal.attempts_by.tool_names: the agent does not have the tool {unknown[0]:.100}"
        raise InvalidField(message, field="goal.attempts_by.tool_names")


def _is_name(name: str) -> bool:
    return 0 < len(name) <= NAME_CHARACTERS_MAX and name.isprintable()
