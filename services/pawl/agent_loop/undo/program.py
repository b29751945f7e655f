"""Implements an undo: runs the inverses one after another, then reports. The program's cursor is the plan.

The model is called only if the user sends a message before the undo ends. In this case, the program first adds its
report, and then the model answers.
"""

from __future__ import annotations

from msgspec.structs import replace

from pawl.agent_loop.loop.rules import budget
from pawl.agent_loop.loop.rules.decision import (
    CallModel,
    Decision,
    EnterSteers,
    Fail,
    Finish,
    PlanUndo,
    Propose,
    ReadCalls,
    Wait,
)
from pawl.agent_loop.loop.rules.message import Message, Role
from pawl.agent_loop.loop.rules.program import Program
from pawl.agent_loop.loop.rules.state import State
from pawl.agent_loop.undo import rules as undo
from pawl.agent_loop.undo.rules import PlannedUndo, UndoPlan
from pawl.values import RunState


class UndoProgram(Program):
    def follows(self, state: State, now: float) -> Decision:
        planned = _plan(state)
        if planned is None:
            return PlanUndo()
        if state.loop.model_call is not None or state.open_calls:
            return Wait(until=None)
        if state.loop.steers:
            # The remaining steps do not run, because the user has intervened.
            return EnterSteers()
        if not planned.reported:
            step = undo.following(planned, state.calls)
            if step is not None:
                return _inverse(step, state, now)
            failure = undo.failure(planned, state.run, state.calls)
            return Finish(state=RunState.COMPLETED) if failure is None else Fail(failure=failure)
        last = state.last_message
        if last is not None and last.role is Role.ASSISTANT:
            return Finish(state=RunState.COMPLETED)
        if budget.is_used_up(state):
            return budget.exhausted(state, now)
        return CallModel(round=state.run.round + 1, without_tools=True)

    def concluded(self, state: State, *, continues: bool) -> State:
        """Add the report to the conversation. If the run continues, the report gets its own round."""
        planned = _plan(state)
        if planned is not None and planned.reported:
            return state
        report = undo.report(planned, state.run, state.calls)
        planned = replace(planned or undo.UndoPlan(), reported=True)
        run = replace(state.run, output_text=report, round=state.run.round + continues)
        state = replace(state, run=run, loop=replace(state.loop, cursor=planned))
        return state.with_message(Message(role=Role.ASSISTANT, run_id=run.run_id, text=report))


def _plan(state: State) -> UndoPlan | None:
    cursor = state.loop.cursor
    return cursor if isinstance(cursor, UndoPlan) else None


def _inverse(step: PlannedUndo, state: State, now: float) -> Decision:
    for known in (state.calls, state.named):
        call = known.get(step.call_id)
        inverse = None if call is None else undo.inverse_of(call)
        if inverse is not None:
            return Propose(calls=(undo.draft(state.run, step, inverse, now),))
    if step.call_id in state.named:
        raise RuntimeError("an undo was planned from calls that have no inverse")
    return ReadCalls(call_ids=(step.call_id,))
