"""Delegates calls to child runs (TOOL-7). Sets a child run's options, and settles the call when the child ends.

The child's run id is derived from the call id. It is therefore known before the run exists, and no call runs twice.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec
from msgspec.structs import replace

from pawl.agent_loop.agents import rules as agents
from pawl.agent_loop.agents.rules import RUN_AGENT, START_GOAL, AgentVersion
from pawl.agent_loop.goals import asking
from pawl.agent_loop.loop.rules import budget, settle, text
from pawl.agent_loop.loop.rules.call import Call, CallResult
from pawl.agent_loop.loop.rules.checks import MESSAGE_BYTES_MAX
from pawl.agent_loop.loop.rules.decision import ReadAgent
from pawl.agent_loop.loop.rules.fact import AgentEnded
from pawl.agent_loop.loop.rules.options import INSTRUCTIONS_BYTES_MAX
from pawl.agent_loop.loop.rules.retry import BUDGET_EXHAUSTED, KEY_GONE
from pawl.agent_loop.loop.rules.run import Delegation, Goal, PinnedAgent, Run, RunOptions, TokenBudgetPolicy, ToolChoice
from pawl.agent_loop.loop.rules.state import State
from pawl.agent_loop.workflows import children
from pawl.chassis import strict_json
from pawl.chassis.ids import RunId
from pawl.values import CallState, RunState

# Text of this size always fits into a call's result.
OUTPUT_BYTES_MAX: Final = 128 * 1024
CANNOT_DELEGATE: Final = "This agent cannot start other agents. Use the other tools."


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of a call that a child run carries out. A `rounds_max` of 0 means the parent's limit."""

    task: str
    instructions: str = ""
    tool_names: tuple[str, ...] = ()
    rounds_max: int = 0
    agent: str = ""


class _Refused(Exception):
    def __init__(self, reason: str, message: str) -> None:
        self.result = settle.error(reason, message)
        super().__init__(message)


def may_delegate(run: Run) -> bool:
    return run.depth < run.options.limits.agent_depth_max


def is_for_workflow(call: Call) -> bool:
    """Return whether a workflow carries out the delegated call, rather than an agent."""
    return call.tool_name not in {RUN_AGENT, START_GOAL}


def to_read(call: Call) -> ReadAgent | None:
    """Return the decision to read the agent or workflow to which the call delegates.

    Return None if the call names neither.
    """
    if is_for_workflow(call):
        named = children.named(call)
        if named is None:
            return None
        return ReadAgent(call_id=call.call_id, name=named.workflow, is_workflow=True, version=named.version)
    try:
        name = msgspec.json.decode(call.arguments_json, type=Task).agent
    except msgspec.DecodeError:
        return None
    return ReadAgent(call_id=call.call_id, name=name) if name else None


def child_run_id(call: Call) -> RunId:
    return RunId(f"run_{hashlib.sha256(call.call_id.encode()).hexdigest()[:32]}")


def start(state: State, call: Call, now: float) -> State:
    """Delegate the call. It becomes DELEGATED and gets a child run, or becomes FAILED if it cannot be delegated."""
    try:
        run = _for_workflow(state, call) if is_for_workflow(call) else _delegation(state, call, now)
    except _Refused as refusal:
        note = state.loop.notes.get(call.call_id, "")
        return state.with_calls([settle.settled(call, CallState.FAILED, refusal.result, now, note)])
    started = replace(call, state=CallState.DELEGATED, child_run_id=run.run_id, start_time=now)
    return replace(state.with_calls([started]), delegations=(*state.delegations, run))


def ended(state: State, command: AgentEnded, now: float) -> State:
    """Settle a call after its child run has ended. The child's tokens also count towards this run."""
    call = state.calls.get(command.call_id)
    if call is None or call.state is not CallState.DELEGATED:
        return state
    note, run = state.loop.notes.get(call.call_id, ""), command.run
    if run.state is RunState.COMPLETED and is_for_workflow(call):
        result = CallResult(content_json=run.output_json or b"null", note=_left(command.job_ids))
        call = settle.settled(call, CallState.SUCCEEDED, result, now, note)
    elif run.state is RunState.COMPLETED:
        call = settle.settled(call, CallState.SUCCEEDED, _answer(run, command.job_ids), now, note)
    elif is_for_workflow(call) and run.failure is not None:
        result = settle.error(run.failure.reason, run.failure.message)
        call = settle.settled(call, CallState.FAILED, result, now, note)
    else:
        reason = f"AGENT_{run.state.name}"
        if run.failure is not None and run.failure.reason in {BUDGET_EXHAUSTED, KEY_GONE.reason}:
            reason = run.failure.reason
        result = settle.error(reason, " ".join(filter(None, (_why(run), _left(command.job_ids)))))
        call = settle.settled(call, CallState.FAILED, result, now, note)
    total, delegated = state.run.usage + run.usage, state.run.delegated_usage + run.usage
    return replace(state.with_calls([call]), run=replace(state.run, usage=total, delegated_usage=delegated))


def _for_workflow(state: State, call: Call) -> Delegation:
    try:
        return children.delegation(state, call, child_run_id(call))
    except children.NotStarted as error:
        raise _Refused(error.reason, error.message) from None


def _delegation(state: State, call: Call, now: float) -> Delegation:
    run = state.run
    if not may_delegate(run):
        raise _Refused("NOT_ALLOWED", CANNOT_DELEGATE)
    goal = _goal(state, call, now) if call.tool_name == START_GOAL else None
    try:
        task = Task(task=goal.aim) if goal else msgspec.json.decode(call.arguments_json, type=Task)
    except msgspec.DecodeError:
        raise _Refused(
            "INVALID_ARGUMENTS", "Provide a `task` and, if needed, `instructions` and `tool_names`."
        ) from None
    if not task.task.strip() or len(task.task.encode()) > MESSAGE_BYTES_MAX:
        raise _Refused("INVALID_ARGUMENTS", f"The task must be 1 to {MESSAGE_BYTES_MAX} bytes long.")
    if len(task.instructions.encode()) > INSTRUCTIONS_BYTES_MAX:
        raise _Refused("INVALID_ARGUMENTS", f"The instructions must have at most {INSTRUCTIONS_BYTES_MAX} bytes.")
    agent = _agent(state, call, task.agent) if task.agent else None
    pinned = run.agent
    if agent is not None:
        gives_tools = bool(agent.tool_names) and not task.tool_names
        pinned = PinnedAgent(name=agent.definition.name, version=agent.version, gives_tools=gives_tools)
    return Delegation(
        call_id=call.call_id,
        run_id=child_run_id(call),
        text=strict_json.storable(task.task),
        options=_options(state, task, agent),
        agent=pinned,
        above=run.chain,
        depth=run.depth + 1,
        user_roles=run.user_roles,
        goal=goal,
    )


def _goal(state: State, call: Call, now: float) -> Goal:
    """Return the goal in a call to START_GOAL. Its attempts are child runs of the goal run."""
    run = state.run
    if run.depth + 1 >= run.options.limits.agent_depth_max:
        raise _Refused(
            "NOT_ALLOWED", "This agent cannot start goals, because their attempts would be nested too deeply."
        )
    try:
        goal = asking.goal_of(call.arguments_json, now)
    except ValueError as error:
        raise _Refused("INVALID_ARGUMENTS", str(error)) from None
    wanted = tuple(filter(None, (goal.criterion.tool_name, *goal.attempts_by.tool_names)))
    unknown = [name for name in wanted if not run.tool_version(name) or run.definition_sha256(name)]
    if unknown:
        raise _Refused("INVALID_ARGUMENTS", f"These tools are not available to you: {', '.join(unknown)[:500]}.")
    return goal


def _agent(state: State, call: Call, name: str) -> AgentVersion:
    read = state.agents.get(call.call_id)
    if read is None or read.agent is None or not read.agent.may_be_used_with(state.run.user_roles):
        others = (
            f" You may delegate to: {', '.join(read.delegates)[:500]}." if read is not None and read.delegates else ""
        )
        raise _Refused("NOT_ALLOWED", f"There is no agent {name[:100]} that you may delegate to.{others}")
    return read.agent


def _options(state: State, task: Task, agent: AgentVersion | None) -> RunOptions:
    """Return the child's options. The child may only do what both its parent and the agent may do."""
    own = state.run.options
    tokens = budget.left(state)
    if tokens == 0:
        raise _Refused(BUDGET_EXHAUSTED, "The run's token budget is used up.")
    # Tools that the parent's client supplied cannot run in the child. A workflow's own tools do not limit its agents.
    names = tuple(tool.name for tool in state.run.tools if not tool.definition_sha256)
    names = task.tool_names if state.run.workflow is not None else names
    if agent is not None:
        own = agents.delegated(agent, own)
        names = own.tool_names if own.tool_names or own.without_tools else names
    unknown = [name for name in task.tool_names if name not in names]
    if unknown:
        raise _Refused("INVALID_ARGUMENTS", f"These tools are not available to the agent: {', '.join(unknown)[:500]}.")
    chosen = tuple(name for name in names if not task.tool_names or name in task.tool_names)
    budgets = [each for each in (tokens, agent is not None and own.limits.total_tokens_max) if each]
    most = min(budgets, default=0)
    limits = replace(
        own.limits,
        rounds_max=min(own.limits.rounds_max, task.rounds_max or own.limits.rounds_max),
        # Top-ups go to the top-level run; child runs get a fixed budget.
        total_tokens_max=most,
        topped_up_tokens_max=most,
    )
    return replace(
        own,
        # A model must not drop the deployment's or the user's instructions.
        instructions="\n\n".join(filter(None, (own.instructions, strict_json.storable(task.instructions)))),
        tool_names=chosen,
        without_tools=own.without_tools if state.run.workflow is not None else not chosen,
        # A response format applies only to the run for which it was set.
        response_format=own.response_format if agent is not None else None,
        tool_choice=own.tool_choice if agent is not None and not task.tool_names else ToolChoice(),
        limits=limits,
        token_budget_policy=TokenBudgetPolicy.FAIL if most else own.token_budget_policy,
    )


def _answer(run: Run, job_ids: tuple[RunId, ...]) -> CallResult:
    output, note = run.output_text, ""
    size_bytes = len(output.encode())
    if size_bytes > OUTPUT_BYTES_MAX:
        note = f"The answer is {size_bytes} bytes long. This is the first part."
        output = text.cut_bytes(output.encode(), OUTPUT_BYTES_MAX)
    content: dict[str, strict_json.JsonValue] = {"answer": output}
    if job_ids:
        content["open_jobs"] = list(job_ids)
    note = " ".join(filter(None, (note, _left(job_ids))))
    return CallResult(content_json=strict_json.dumps_canonical(content), note=note)


def _left(job_ids: tuple[RunId, ...]) -> str:
    if not job_ids:
        return ""
    return (
        f"It left background jobs running: {', '.join(job_ids)}. Do not wait for them: their reports are sent to you."
    )


def _why(run: Run) -> str:
    how = {
        RunState.CANCELLED: "The agent was cancelled before it finished.",
        RunState.EXPIRED: "The agent expired while waiting for a user.",
    }.get(run.state, "The agent failed.")
    why = f" {run.failure.message}" if run.failure is not None else ""
    so_far = text.cut_bytes(run.output_text.encode(), OUTPUT_BYTES_MAX // 8)
    return f"{how}{why}" + (f" Its output before that: {so_far}" if so_far else "")
