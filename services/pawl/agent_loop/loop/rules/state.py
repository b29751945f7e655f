"""The state of a run at one moment, as far as the loop knows it. It is the input to all rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Self

import msgspec
from msgspec import field
from msgspec.structs import replace

from pawl.agent_loop.agents.rules import RateReached, TokenBudget
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.fact import AgentRead, Command
from pawl.agent_loop.loop.rules.loop_state import LoopState
from pawl.agent_loop.loop.rules.message import Message, Role
from pawl.agent_loop.loop.rules.run import Delegation, Notice, Run
from pawl.agent_loop.workflows.graph import Graph
from pawl.chassis.ids import CallId, CommandId, RunId
from pawl.values import SETTLED

START: Final = "start"
READ: Final = "read"
_CHECK: Final = "check:"
MODEL: Final = "model"


def stop_of(call_id: CallId) -> str:
    return f"stop:{call_id}"


def check_of(call_id: CallId) -> str:
    return f"{_CHECK}{call_id}"


def checked_calls(under_way: Iterable[str]) -> Iterator[CallId]:
    """Yield the calls that the registry is checking."""
    return (CallId(name.removeprefix(_CHECK)) for name in under_way if name.startswith(_CHECK))


class State(msgspec.Struct, frozen=True, kw_only=True):
    """A run, its conversation, its calls, and the work in progress.

    `messages` contains the messages that the model sees, in order. `calls` contains the calls that these messages
    request. `under_way` lists this process's tasks for the run (START, READ, MODEL, call ids, `stop_of`, `check_of`).
    After a takeover it is empty, so all work starts again.
    """

    run: Run
    messages: tuple[Message, ...] = ()
    calls: Mapping[CallId, Call] = field(default_factory=dict)
    loop: LoopState = field(default_factory=LoopState)
    commands: tuple[Command, ...] = ()
    # Commands that have been applied but not committed yet.
    consumed: tuple[CommandId, ...] = ()
    # Runs to create with the next commit.
    delegations: tuple[Delegation, ...] = ()
    # Job notices that no model has seen yet, as far as this process knows.
    notices: tuple[Notice, ...] = ()
    # The conversation's open jobs.
    open_jobs: int = 0
    # The number of open jobs whose notices this run receives; 0 unless it is a child run.
    jobs_below: int = 0
    # Notices in a message that has not been committed yet.
    entered: tuple[Notice, ...] = ()
    # The job iteration that the next commit reports; 0 if there is none.
    tells_iteration: int = 0
    # Active time so far by this process's clock. `run` has the ledger's value.
    active_seconds: float = 0.0
    under_way: frozenset[str] = frozenset()
    # Calls that ReadCalls has read for the program. Not persisted.
    named: Mapping[CallId, Call] = field(default_factory=dict)
    # Child runs whose last calls are in `named`. Not persisted.
    named_runs: frozenset[RunId] = frozenset()
    # Agents that ReadAgent has read, by call. Not persisted.
    agents: Mapping[CallId, AgentRead] = field(default_factory=dict)
    # Number of events that the program has taken but the ledger still counts.
    events_taken: int = 0
    # The definition that ReadProgram has read. Not persisted.
    graph: Graph | None = None
    # True if the registry has returned the tools. The first commit stores them.
    tools_pinned: bool = False
    # Seconds until this process starts the open model call; None if the call has been started, here or elsewhere.
    model_starts_in: float | None = None

    # The limit that the model call waits for. Not persisted.
    used_up: TokenBudget | RateReached | None = None

    # According to the last commit, the shared budget is used up when the run's `own_tokens` reach this value; or None.
    shared_tokens_max: int | None = None

    @property
    def model(self) -> str:
        """The current model: the run's own model, or the fallback that replaced it."""
        options = self.run.options
        models = (options.model, *options.model_fallbacks)
        return models[min(self.loop.fallbacks_used, len(models) - 1)]

    @property
    def fallbacks_left(self) -> int:
        return max(0, len(self.run.options.model_fallbacks) - self.loop.fallbacks_used)

    @property
    def batch(self) -> tuple[Call, ...]:
        """Calls of the last round, in the model's order."""
        run_id, number = self.run.run_id, self.run.round
        found = [call for call in self.calls.values() if call.run_id == run_id and call.round == number]
        return tuple(sorted(found, key=lambda call: call.index))

    @property
    def open_calls(self) -> tuple[Call, ...]:
        """Calls without a result, ordered by round and index."""
        run_id = self.run.run_id
        found = [call for call in self.calls.values() if call.state not in SETTLED and call.run_id == run_id]
        return tuple(sorted(found, key=lambda call: (call.round, call.index)))

    @property
    def last_message(self) -> Message | None:
        """This run's newest message, ignoring summaries."""
        own = (message for message in reversed(self.messages) if message.run_id == self.run.run_id)
        return next((message for message in own if message.role is not Role.SUMMARY), None)

    def is_own(self, message: Message) -> bool:
        return message.user_id in {"", self.run.user_id}

    @property
    def round_active_seconds(self) -> float:
        return self.active_seconds - self.loop.round_began_active_seconds

    def with_calls(self, calls: Iterable[Call]) -> Self:
        return replace(self, calls={**self.calls, **{call.call_id: call for call in calls}})

    def with_message(self, message: Message) -> Self:
        return replace(self, messages=(*self.messages, message))
