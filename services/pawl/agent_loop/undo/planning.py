"""The beginning of an undo: which calls there are to take back, and the tools for that."""

from __future__ import annotations

from pawl.agent_loop.loop.ports import WorkerLedger
from pawl.agent_loop.loop.rules.fact import Fact, RunRefused, ToolsPinned
from pawl.agent_loop.loop.rules.run import FailureClass, PinnedTool, Run, RunFailure
from pawl.agent_loop.loop.tool_calls import ToolCalls
from pawl.agent_loop.undo import rules as undo
from pawl.chassis.ids import RunId
from pawl.chassis.rpc.retry import Retry
from pawl.errors import RunNotFound, ToolNotFound


async def plan(run: Run, *, ledger: WorkerLedger, tool_calls: ToolCalls, retry: Retry) -> Fact:
    """Return what an undo does, with the versions of the tools that it needs, or that it cannot begin."""
    undone_run_id = run.undo.run_id if run.undo else RunId("")
    try:
        sources = await retry.until_answered(lambda: ledger.undo_sources(run.store_id, run.user_id, undone_run_id))
    except RunNotFound as error:
        failure = RunFailure(failure_class=FailureClass.LIMIT, reason=error.reason, message=error.message)
        return RunRefused(failure=failure)
    planned = undo.plan(sources, run)
    to_undo = {step.call_id for step in planned.steps}
    inverses = (undo.inverse_of(source.call) for source in sources if source.call.call_id in to_undo)
    names = sorted({inverse.tool_name for inverse in inverses if inverse is not None})
    tools = [tool for name in names if (tool := await _pinned(name, tool_calls)) is not None]
    return ToolsPinned(tools=tuple(tools), cursor=planned)


async def _pinned(name: str, tool_calls: ToolCalls) -> PinnedTool | None:
    try:
        tools = (await tool_calls.resolve([name])).tools
    except ToolNotFound:
        return None
    return next((PinnedTool(name=tool.name, version=tool.version) for tool in tools if tool.name == name), None)
