"""A run's program: a model, a job, an undo, a goal or a workflow.

Checks, approvals, questions, executions, takeovers, cancellation, limits, the inbox and the log are the same for all
programs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.decision import Decision, Propose
from pawl.agent_loop.loop.rules.fact import Command, OwnerEvent
from pawl.agent_loop.loop.rules.run import Delegation
from pawl.agent_loop.loop.rules.state import State
from pawl.chassis.ids import CallId


class Program(ABC):
    """The program that drives a run. Its state is in the messages, the calls and `LoopState.cursor`.

    The methods are pure and cheap. They depend only on the state.
    """

    @abstractmethod
    def follows(self, state: State, now: float) -> Decision:
        """Return the program's next decision.

        The loop calls this whenever a call settles, a command or fact arrives, or a scheduled time passes. Calls may be
        open at that time, but the run is not ending. Work in progress does not start again, so the program may repeat a
        decision until its result is in the state. The decision is one of:

        * PinTools, PlanUndo or ReadProgram, the only decisions allowed before the run has started,
        * Advance, to store the program's state and add calls that need no check,
        * CallModel or EnterSteers, only when no call and no model call is open,
        * Propose, with ids derived from the state, so that no call is made twice,
        * ReadCalls, for calls that are not in the state,
        * Settle or StopCalls, to stop open calls that are no longer needed,
        * Finish when nothing is open, or Fail, which stops open work,
        * `budget.exhausted` instead of a model call that the budget does not allow,
        * Wait, if nothing can be done before something changes or the given time comes. Open work continues.
        """

    def proposes(self, state: State, call_id: CallId, now: float) -> bool:
        """Return whether the program still proposes a call. If so, the result of the registry's check is used."""
        following = self.follows(state, now)
        return isinstance(following, Propose) and any(call.call_id == call_id for call in following.calls)

    def commanded(self, state: State, command: Command, now: float) -> State:  # no command by default
        """Apply a command that only the program handles (Pause, Event, RaiseGoal).

        Other commands do not change the state.
        """
        return state

    def reported(self, base: State, after: State) -> tuple[State, tuple[OwnerEvent, ...]]:  # no records
        """Return `after` with the program's records of the calls settled since `base`.

        The second value contains the events that report the records. The loop calls this method after it has applied
        facts, with the ledger's state as `base`, and before `follows`. The loop calls it again after it has planned a
        step, with the state after the facts as `base`.
        """
        return after, ()

    def child(self, state: State, call: Call, delegation: Delegation) -> Delegation:  # no restrictions
        """Return `delegation`, the child run to create for a call, after applying the program's restrictions."""
        return delegation

    def concluded(self, state: State, *, continues: bool) -> State:  # no report by default
        """Add the program's final report to the state before the run ends, whatever the reason.

        With `continues`, the run does not end yet, because the user has sent more messages. Idempotent.
        """
        return state
