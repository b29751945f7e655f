"""The program of a run: what drives it, a model or a plan, behind one question.

The loop asks the same of every program and never which one it is: checks, approvals, questions, executions, takeovers,
cancels, limits, the inbox and the log are the same for all. A program is a module with these functions; all are pure,
as cheap as `decide` is often called, and know only the state.
"""

from __future__ import annotations

from typing import Protocol

from pawl.agent_loop.loop.rules import agent_program, job_program
from pawl.agent_loop.loop.rules.decision import Decision
from pawl.agent_loop.loop.rules.run import Run
from pawl.agent_loop.loop.rules.state import State
from pawl.agent_loop.undo import program as undo_program


class Program(Protocol):
    """The driver of a run. It remembers messages and calls, and beyond them `LoopState.cursor`."""

    def follows(self, state: State, now: float) -> Decision:
        """Return what follows now.

        Asked after each settlement, command, fact and due time, also while calls are open; not while the run is
        ending. What is asked for and under way is not begun again, so the same answer may be given until its result
        is in the state. An answer is one of:

        * a beginning (PinTools, PlanUndo), until the run has begun; nothing else comes before it,
        * CallModel or EnterSteers, only when no call and no model call is open,
        * Propose, with ids that follow from the state, so that no call is made twice,
        * ReadCalls, for calls that are not in the state,
        * Finish, when nothing is open, or Fail, which stops what is open,
        * `budget.exhausted`, before a model call that the budget does not allow,
        * Wait: nothing more until something changes, or until its time. What is open goes on.

        What the loop reports of a Propose is taken only if the program still answers it then.
        """
        ...

    def reported(self, base: State, after: State) -> State:
        """Return the state with what the program says of the calls that are settled in it and not in `base`.

        Asked once facts are taken in, before `follows`, with what the ledger has for `base`; and when a step is
        planned, with the state as it was then.
        """
        ...

    def concluded(self, state: State, *, goes_on: bool) -> State:
        """Return the state with what the program says at its end: before the run ends, however it does.

        `goes_on`: it does not end yet, for messages of the user enter now. Called again, it adds nothing.
        """
        ...


def of(run: Run) -> Program:
    """Return the program of a run. Only this function knows which there are."""
    if run.job is not None:
        return job_program
    return agent_program if run.undo is None else undo_program
