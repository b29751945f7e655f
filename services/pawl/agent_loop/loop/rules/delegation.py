"""Calls that runs of their own do (TOOL-7): what such a run may do, and what its end is for the call.

The id of the run follows from that of the call, so that it is known before the
run is there and no call is done twice.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec
from msgspec.structs import replace

from pawl.agent_loop.agents import rules as agents
from pawl.agent_loop.agents.rules import AgentVersion
from pawl.agent_loop.loop.rules import budget, settle, text
from pawl.agent_loop.loop.rules.call import Call, CallResult
from pawl.agent_loop.loop.rules.checks import MESSAGE_BYTES_MAX
from pawl.agent_loop.loop.rules.fact import AgentEnded
from pawl.agent_loop.loop.rules.options import INSTRUCTIONS_BYTES_MAX
from pawl.agent_loop.loop.rules.retry import BUDGET_EXHAUSTED
from pawl.agent_loop.loop.rules.run import Delegation, PinnedAgent, Run, RunOptions, TokenBudgetPolicy, ToolChoice
from pawl.agent_loop.loop.rules.state import State
from pawl.chassis import strict_json
from pawl.chassis.ids import RunId
from pawl.values import CallState, RunState

OUTPUT_BYTES_MAX: Final = 128 * 1024
"""Most bytes of an answer that the result of the call has: any text of that size fits into a result."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of a call that a run does; `rounds_max` of 0 means as many as the caller has."""

    task: str
    instructions: str = ""
    tool_names: tuple[str, ...] = ()
    rounds_max: int = 0
    agent: str = ""


class _Refused(Exception):
    """No run can do the call."""

    def __init__(self, reason: str, message: str) -> None:
        self.result = settle.error(reason, message)
        super().__init__(message)


def may_delegate(run: Run) -> bool:
    """Return whether runs may stand below this one."""
    return run.depth < run.options.limits.agent_depth_max


def named(call: Call) -> str:
    """Return the name of the agent that a call gives a task to; an empty one if it names none."""
    try:
        return msgspec.json.decode(call.arguments_json, type=Task).agent
    except msgspec.DecodeError:
        return ""


def child_run_id(call: Call) -> RunId:
    """Return the id of the run that does a call."""
    return RunId(f"run_{hashlib.sha256(call.call_id.encode()).hexdigest()[:32]}")


def begin(state: State, call: Call, now: float) -> State:
    """Return the state with the call DELEGATED, and the run that does it; or FAILED, if no run can do it."""
    try:
        run = _delegation(state, call)
    except _Refused as refusal:
        note = state.loop.notes.get(call.call_id, "")
        return state.with_calls([settle.settled(call, CallState.FAILED, refusal.result, now, note)])
    begun = replace(call, state=CallState.DELEGATED, child_run_id=run.run_id, start_time=now)
    return replace(state.with_calls([begun]), delegations=(*state.delegations, run))


def ended(state: State, command: AgentEnded, now: float) -> State:
    """Return the state after the run has ended that did a call: its answer is the result, its tokens count here too."""
    call = state.calls.get(command.call_id)
    if call is None or call.state is not CallState.DELEGATED:
        return state
    note, run = state.loop.notes.get(call.call_id, ""), command.run
    if run.state is RunState.COMPLETED:
        call = settle.settled(call, CallState.SUCCEEDED, _answer(run), now, note)
    else:
        result = settle.error(f"AGENT_{run.state.name}", _why(run))
        call = settle.settled(call, CallState.FAILED, result, now, note)
    loop = replace(state.loop, agents_tokens=state.loop.agents_tokens + run.usage.total_tokens)
    run = replace(state.run, usage=state.run.usage + run.usage)
    return replace(state.with_calls([call]), run=run, loop=loop)


def _delegation(state: State, call: Call) -> Delegation:
    run = state.run
    if not may_delegate(run):
        raise _Refused("NOT_ALLOWED", "No further agent may be started from here: do it with the other tools.")
    try:
        task = msgspec.json.decode(call.arguments_json, type=Task)
    except msgspec.DecodeError:
        raise _Refused("INVALID_ARGUMENTS", "An agent is given a task, and perhaps instructions and tools.") from None
    if not task.task.strip() or len(task.task.encode()) > MESSAGE_BYTES_MAX:
        raise _Refused("INVALID_ARGUMENTS", f"A task has 1 to {MESSAGE_BYTES_MAX} bytes.")
    if len(task.instructions.encode()) > INSTRUCTIONS_BYTES_MAX:
        raise _Refused("INVALID_ARGUMENTS", f"Instructions have at most {INSTRUCTIONS_BYTES_MAX} bytes.")
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
    )


def _agent(state: State, call: Call, name: str) -> AgentVersion:
    """Return the agent to which a call gives its task."""
    read = state.agents.get(call.call_id)
    if read is None or read.agent is None or not read.agent.may_be_used_with(state.run.user_roles):
        others = f" You may name: {', '.join(read.delegates)[:500]}." if read is not None and read.delegates else ""
        raise _Refused("NOT_ALLOWED", f"There is no agent {name[:100]} that you may give a task to.{others}")
    return read.agent


def _options(state: State, task: Task, agent: AgentVersion | None) -> RunOptions:
    """Return options under which the run may do nothing that its caller, or the agent that it names, may not."""
    own = state.run.options
    tokens = budget.left(state)
    if tokens == 0:
        raise _Refused(BUDGET_EXHAUSTED, "The token budget of the run is used up.")
    # What came with the run is of its client, which knows nothing of the other run.
    names = tuple(tool.name for tool in state.run.tools if not tool.definition_sha256)
    if agent is not None:
        own = agents.delegated(agent, own)
        names = own.tool_names if own.tool_names or own.without_tools else names
    unknown = [name for name in task.tool_names if name not in names]
    if unknown:
        raise _Refused("INVALID_ARGUMENTS", f"These tools cannot be given to it: {', '.join(unknown)[:500]}.")
    chosen = tuple(name for name in names if not task.tool_names or name in task.tool_names)
    budgets = [each for each in (tokens, agent is not None and own.limits.total_tokens_max) if each]
    most = min(budgets, default=0)
    limits = replace(
        own.limits,
        rounds_max=min(own.limits.rounds_max, task.rounds_max or own.limits.rounds_max),
        # A top-up goes to the run at the top: what the runs below it may use is given to them.
        total_tokens_max=most,
        topped_up_tokens_max=most,
    )
    return replace(
        own,
        # What the deployment or the user tells every agent is not for a model to leave out.
        instructions="\n\n".join(filter(None, (own.instructions, strict_json.storable(task.instructions)))),
        tool_names=chosen,
        without_tools=not chosen,
        # The form of an answer is for who asked for it.
        response_format=own.response_format if agent is not None else None,
        tool_choice=own.tool_choice if agent is not None and not task.tool_names else ToolChoice(),
        limits=limits,
        token_budget_policy=TokenBudgetPolicy.FAIL if most else own.token_budget_policy,
    )


def _answer(run: Run) -> CallResult:
    said = run.output_text
    size_bytes = len(said.encode())
    if size_bytes <= OUTPUT_BYTES_MAX:
        return CallResult(content_json=strict_json.dumps_canonical({"answer": said}))
    note = f"The answer has {size_bytes} bytes; this is its beginning."
    cut = text.cut_bytes(said.encode(), OUTPUT_BYTES_MAX)
    return CallResult(content_json=strict_json.dumps_canonical({"answer": cut}), note=note)


def _why(run: Run) -> str:
    how = {
        RunState.CANCELLED: "The agent was cancelled before it had done it.",
        RunState.EXPIRED: "The agent waited too long for somebody, and was given up.",
    }.get(run.state, "The agent failed.")
    why = f" {run.failure.message}" if run.failure is not None else ""
    so_far = text.cut_bytes(run.output_text.encode(), OUTPUT_BYTES_MAX // 8)
    return f"{how}{why}" + (f" It had written so far: {so_far}" if so_far else "")
