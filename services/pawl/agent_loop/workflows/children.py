"""Child runs of workflows: other workflows, items of maps, and agents with a node's options."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from pawl.agent_loop.loop.rules import budget
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.run import (
    Delegation,
    MapChunk,
    PinnedWorkflow,
    ResponseFormat,
    RunOptions,
    TokenBudgetPolicy,
    ToolChoice,
    Undo,
)
from pawl.agent_loop.loop.rules.state import State
from pawl.agent_loop.undo import rules as undo
from pawl.agent_loop.undo.rules import UNDO_RUN
from pawl.agent_loop.workflows import cursor as cursors
from pawl.agent_loop.workflows import drafting, edges
from pawl.agent_loop.workflows.definition import INPUT_BYTES_MAX, AgentNode
from pawl.agent_loop.workflows.drafting import RUN_ITEMS, RUN_WORKFLOW, RunWorkflow
from pawl.agent_loop.workflows.nodes import cursor_of
from pawl.chassis import strict_json
from pawl.chassis.ids import RunId


class NotStarted(Exception):
    """Raised when a workflow cannot be started. `reason` and `message` become the error of the call."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason, self.message = reason, message
        super().__init__(message)


def named(call: Call) -> RunWorkflow | None:
    """Return the workflow that carries out a delegated call, and its input.

    Return None for a map's items or an undo.
    """
    if call.tool_name in {RUN_ITEMS, UNDO_RUN}:
        return None
    if call.tool_name == RUN_WORKFLOW:
        return msgspec.json.decode(call.arguments_json, type=RunWorkflow)
    return RunWorkflow(workflow=call.tool_name, input=msgspec.Raw(call.arguments_json or b"{}"))


def delegation(state: State, call: Call, run_id: RunId) -> Delegation:
    """Return the child run for a call to a workflow.

    Raises:
        NotStarted
    """
    run, pinned, undoes = state.run, None, None
    if call.tool_name == UNDO_RUN:
        if run.workflow is None:
            raise NotStarted("INVALID_ARGUMENTS", "Only a workflow can undo its effects.")
        text, undoes = undo.request_text(run.run_id), Undo(run_id=run.run_id, user_id=run.user_id)
    elif call.tool_name == RUN_ITEMS:
        pinned = _items(state, call)
        text = f"[Workflow {pinned.name}: items of {pinned.chunk.node if pinned.chunk else ''}]"
    else:
        pinned = _workflow(state, call)
        text = f"[Workflow {pinned.name}, version {pinned.version}]"
    # Parts of a workflow run have the depth of the run.
    depth = run.depth + (pinned is not None and pinned.chunk is None)
    if depth > run.options.limits.agent_depth_max:
        raise NotStarted("NOT_ALLOWED", "Workflows and agents are nested too deeply.")
    return Delegation(
        call_id=call.call_id,
        run_id=run_id,
        text=text,
        options=_options(state),
        agent=run.agent if undoes is None else None,
        above=run.chain,
        depth=depth,
        user_roles=run.user_roles,
        workflow=pinned,
        undo=undoes,
    )


def of_agent(state: State, call: Call, child: Delegation) -> Delegation:
    """Return the child run of an agent node, with the options that the node sets."""
    found, graph = cursors.parsed(call.call_id), state.graph
    if graph is None:
        raise RuntimeError("a workflow delegates a call before its definition has been read")
    node = graph.steps[found[0]].node if found is not None else None
    if not isinstance(node, AgentNode):
        return child
    options = child.options
    if node.output_schema is not None:
        schema = strict_json.dumps_canonical(node.output_schema)
        options = replace(options, response_format=ResponseFormat(name="output", schema_json=schema))
    if node.tools == ():
        options = replace(options, tool_names=(), without_tools=True, tool_choice=ToolChoice())
    return replace(child, options=options, waits_for_jobs=node.jobs == "wait")


def _items(state: State, call: Call) -> PinnedWorkflow:
    pinned, found = state.run.workflow, cursors.parsed(call.call_id)
    if pinned is None or found is None or state.graph is None:
        raise NotStarted("INVALID_ARGUMENTS", "Only a workflow can process items of a map.")
    arguments, steps = drafting.items_of(call), state.graph.steps
    names = edges.references(steps[found[0]].node)
    used = {step.number for step in steps if step.path.partition(".")[0] in names}
    chunk = MapChunk(
        node=arguments.node,
        first_index=arguments.first_index,
        items_json=bytes(arguments.items),
        scope_state=msgspec.json.encode(cursor_of(state).reused(used, state.run.run_id)),
        failures_max=arguments.failures_max,
        concurrency=arguments.concurrency,
    )
    return PinnedWorkflow(name=pinned.name, version=pinned.version, input_json=pinned.input_json, chunk=chunk)


def _workflow(state: State, call: Call) -> PinnedWorkflow:
    requested, read = named(call), state.agents.get(call.call_id)
    if requested is None or read is None or not read.workflow_version:
        name = "" if requested is None else requested.workflow
        raise NotStarted("WORKFLOW_NOT_FOUND", f"There is no workflow {name[:64]}, or it does not have that version.")
    if len(bytes(requested.input)) > INPUT_BYTES_MAX:
        message = f"The input is {len(bytes(requested.input))} bytes; at most {INPUT_BYTES_MAX} are allowed."
        raise NotStarted("INVALID_ARGUMENTS", message)
    return PinnedWorkflow(name=requested.workflow, version=read.workflow_version, input_json=bytes(requested.input))


def _options(state: State) -> RunOptions:
    own = state.run.options
    tokens = budget.left(state)
    if tokens == 0:
        raise NotStarted("BUDGET_EXHAUSTED", "The run's token budget is used up.")
    limits = replace(own.limits, total_tokens_max=tokens or 0, topped_up_tokens_max=tokens or 0)
    return replace(
        own,
        tool_names=(),
        without_tools=False,
        tool_choice=ToolChoice(),
        response_format=None,
        limits=limits,
        token_budget_policy=TokenBudgetPolicy.FAIL if tokens else own.token_budget_policy,
    )
