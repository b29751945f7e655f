"""All that the loop knows about a run at one moment: the input of every rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Self

import msgspec
from msgspec import field
from msgspec.structs import replace

from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.fact import AgentRead, Command
from pawl.agent_loop.loop.rules.loop_state import LoopState
from pawl.agent_loop.loop.rules.message import Message, Role
from pawl.agent_loop.loop.rules.run import Delegation, Notice, Run
from pawl.chassis.ids import CallId, CommandId

BEGIN: Final = "begin"
READ: Final = "read"
MODEL: Final = "model"


def stop_of(call_id: CallId) -> str:
    """Return the name of the work that stops a call."""
    return f"stop:{call_id}"


def check_of(call_id: CallId) -> str:
    """Return the name of the work that has a call checked, or what it falls back to."""
    return f"check:{call_id}"


class State(msgspec.Struct, frozen=True, kw_only=True):
    """A run, its conversation and its calls, and what is going on about it here.

    `messages` are those the model is shown, in order; `calls` those that they
    ask for. `under_way` names the work that this process does for the run right
    now (BEGIN, READ, MODEL, call ids, `stop_of`, `check_of`); it starts empty, so
    after a takeover everything is found not to be under way.
    """

    run: Run
    messages: tuple[Message, ...] = ()
    calls: Mapping[CallId, Call] = field(default_factory=dict)
    loop: LoopState = field(default_factory=LoopState)
    commands: tuple[Command, ...] = ()
    consumed: tuple[CommandId, ...] = ()
    """Commands taken into account here and not yet in a commit."""
    delegations: tuple[Delegation, ...] = ()
    """Runs that do calls, to be created with the next commit."""
    notices: tuple[Notice, ...] = ()
    """The words of jobs to the conversation, of which no model was told yet, as far as this process knows."""
    open_jobs: int = 0
    """The jobs of the conversation that have not ended."""
    entered: tuple[Notice, ...] = ()
    """Notices of which a message tells that is not in a commit yet."""
    tells_iteration: int = 0
    """The iteration of a job of which the next commit tells its conversation; 0 for none."""
    active_seconds: float = 0.0
    """The time for which the run was active until now, by the clock of this process; that of the ledger is in `run`."""
    under_way: frozenset[str] = frozenset()
    named: Mapping[CallId, Call] = field(default_factory=dict)
    """Calls that the program has had read last (ReadCalls), as they were then; of this process, and never written."""
    agents: Mapping[CallId, AgentRead] = field(default_factory=dict)
    """The agents to which calls give tasks, as they were when they were read here (ReadAgent); never written."""
    tools_pinned: bool = False
    """True if the registry has said which tools the run may use; the first commit keeps them."""
    model_starts_in: float | None = None
    """Seconds until the open model call is to be made here; None if it was made, here or elsewhere."""

    quota_end_time: float | None = None
    """The end of the day of which the agent has used up the tokens, as it was found here; never written."""

    shared_tokens_max: int | None = None
    """The value of `own_tokens` at which the shared budget is exhausted, by the last commit; None if unknown."""

    @property
    def own_tokens(self) -> int:
        """Tokens of the run's own model calls, without agents that it called."""
        return self.run.usage.total_tokens - self.loop.agents_tokens

    @property
    def model(self) -> str:
        """The model that the run is driven by now: its own, or the fallback that took its place."""
        options = self.run.options
        models = (options.model, *options.model_fallbacks)
        return models[min(self.loop.fallbacks_used, len(models) - 1)]

    @property
    def fallbacks_left(self) -> int:
        """The number of models that the run can still go on with."""
        return max(0, len(self.run.options.model_fallbacks) - self.loop.fallbacks_used)

    @property
    def batch(self) -> tuple[Call, ...]:
        """The calls of the last round, in the model's order."""
        run_id, number = self.run.run_id, self.run.round
        found = [call for call in self.calls.values() if call.run_id == run_id and call.round == number]
        return tuple(sorted(found, key=lambda call: call.index))

    @property
    def open_calls(self) -> tuple[Call, ...]:
        """The calls of the run that have no result yet, in the order of their rounds and the model's."""
        run_id = self.run.run_id
        found = [call for call in self.calls.values() if call.run_id == run_id and not call.settled]
        return tuple(sorted(found, key=lambda call: (call.round, call.index)))

    @property
    def last_message(self) -> Message | None:
        """The newest message of this run, summaries aside."""
        own = (message for message in reversed(self.messages) if message.run_id == self.run.run_id)
        return next((message for message in own if message.role is not Role.SUMMARY), None)

    def is_own(self, message: Message) -> bool:
        """Return whether a message is of the user of the run."""
        return message.user_id in {"", self.run.user_id}

    @property
    def round_active_seconds(self) -> float:
        """The time for which the current round was active until now."""
        return self.active_seconds - self.loop.round_began_active_seconds

    def with_calls(self, calls: Iterable[Call]) -> Self:
        """Return the state with these calls in place of those with their ids."""
        return replace(self, calls={**self.calls, **{call.call_id: call for call in calls}})

    def with_message(self, message: Message) -> Self:
        """Return the state with a message at the end."""
        return replace(self, messages=(*self.messages, message))
