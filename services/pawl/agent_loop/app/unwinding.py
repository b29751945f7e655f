"""The questions of an undo: which calls there are to take back, and what the registry says of each inverse."""

from __future__ import annotations

from pawl.agent_loop.app.ports import WorkerLedger
from pawl.agent_loop.app.tool_calls import ToolCalls
from pawl.agent_loop.domain import undo
from pawl.agent_loop.domain.call import Inverse
from pawl.agent_loop.domain.fact import Fact, InverseChecked, RunRefused, UndoPlanned
from pawl.agent_loop.domain.failure import FailureClass
from pawl.agent_loop.domain.run import PinnedTool, Run, RunFailure
from pawl.agent_loop.domain.tool import Disposition, ProposedCall, Verdict
from pawl.agent_loop.domain.undo import PlannedUndo, UndoSource
from pawl.chassis.retry import Retry
from pawl.errors import RunNotFound, ToolNotFound


class Unwinding:
    """Reads for one run that is an undo. What it undoes has ended, so it is read once."""

    def __init__(self, run: Run, *, ledger: WorkerLedger, tool_calls: ToolCalls, retry: Retry) -> None:
        self._run = run
        self._ledger = ledger
        self._tool_calls = tool_calls
        self._retry = retry
        self._sources: tuple[UndoSource, ...] | None = None

    async def plan(self) -> Fact:
        """Return what the undo does, with the versions of the tools that it needs, or that it cannot begin."""
        try:
            sources = await self._read()
        except RunNotFound as error:
            failure = RunFailure(failure_class=FailureClass.LIMIT, reason=error.reason, message=error.message)
            return RunRefused(failure=failure)
        plan = undo.plan(sources, self._run)
        names = {inverse.tool_name for step in plan.steps if (inverse := self._inverse(step, sources)) is not None}
        tools = [tool for name in sorted(names) if (tool := await self._pinned(name)) is not None]
        return UndoPlanned(plan=plan, tools=tuple(tools))

    async def check(self, step: PlannedUndo, run: Run, now: float) -> Fact:
        """Return the call of a step and the verdict on it; a refusal if there is no such tool for the user."""
        inverse = self._inverse(step, await self._read())
        if inverse is None:
            raise RuntimeError("an undo was planned from calls that are not there")
        call = undo.draft(run, step, inverse, now)
        version = run.tool_version(inverse.tool_name)
        if not version:
            return InverseChecked(call=call, verdict=_no_tool(call.call_id, inverse.tool_name))
        proposed = ProposedCall(
            call_id=call.call_id,
            tool_name=inverse.tool_name,
            tool_version=version,
            arguments_json=inverse.arguments_json,
        )
        verdicts = await self._tool_calls.check([proposed], [inverse.tool_name])
        return InverseChecked(call=call, verdict=verdicts[call.call_id])

    async def _read(self) -> tuple[UndoSource, ...]:
        if self._sources is None:
            run = self._run
            undone_run_id = run.undo.run_id if run.undo else ""
            self._sources = await self._retry.until_answered(
                lambda: self._ledger.undo_sources(run.store_id, run.user_id, undone_run_id)
            )
        return self._sources

    async def _pinned(self, name: str) -> PinnedTool | None:
        try:
            tools = (await self._tool_calls.resolve([name])).tools
        except ToolNotFound:
            return None
        return next((PinnedTool(name=tool.name, version=tool.version) for tool in tools if tool.name == name), None)

    @staticmethod
    def _inverse(step: PlannedUndo, sources: tuple[UndoSource, ...]) -> Inverse | None:
        call = next((source.call for source in sources if source.call.call_id == step.call_id), None)
        return undo.inverse_of(call) if call is not None else None


def _no_tool(call_id: str, name: str) -> Verdict:
    return Verdict(
        call_id=call_id,
        disposition=Disposition.REFUSE,
        error_reason=ToolNotFound.reason,
        error_message=f"There is no tool {name} that the user may call.",
    )
