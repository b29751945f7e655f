"""Interfaces between the worker and the services it uses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

import msgspec

from pawl.agent_loop.agents.rules import AgentVersion, ModelTerms
from pawl.agent_loop.loop.rules.fact import OutputChecked
from pawl.agent_loop.loop.rules.run import PinnedTool, Run, RunAbove
from pawl.agent_loop.loop.rules.state import State
from pawl.agent_loop.loop.rules.tool import (
    ExecutionPiece,
    ProposedCall,
    RecordedDecision,
    RecordedResult,
    Resolved,
    Stopped,
    Tool,
    Verdict,
)
from pawl.chassis.ids import CallId, RunKey, StoreId, UserId
from pawl.values import Execution, ReadTimeouts, RunContext, Usage, WaitKind

# Returns numbers between 0 and 1.
Randomness = Callable[[], float]


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A run that this worker holds. The epoch fences its commits."""

    key: RunKey
    epoch: int
    in_background: bool = False


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run in the ledger at `now` (database time), and the tools that the run's client supplied."""

    state: State
    now: float
    own_tools: tuple[Tool, ...]


class Renewal(msgspec.Struct, frozen=True, kw_only=True):
    """Claims that the worker still holds, and claims with unread commands. Both are in the ledger's order."""

    held: tuple[Claim, ...]
    with_commands: tuple[Claim, ...]


class AgentReader(Protocol):
    """Reads agents from the ledger. Methods may raise DependencyUnavailable and can be retried."""

    async def get_agent(self, store_id: StoreId, name: str, version: int) -> AgentVersion:
        """Return one version of an agent. Version 0 means the newest version.

        Raises:
            AgentNotFound: There is no such version. A deleted agent has no newest version.
        """
        ...

    async def get_draft(self, store_id: StoreId, user_id: UserId, name: str) -> AgentVersion:
        """Return a user's draft.

        Raises:
            AgentNotFound
        """
        ...

    async def model_terms(self, store_id: StoreId, user_id: UserId, name: str) -> ModelTerms: ...


class CallContext(RunContext, frozen=True, kw_only=True):
    above: tuple[RunAbove, ...] = ()

    @classmethod
    def of(cls, run: Run) -> CallContext:
        return cls(
            store_id=run.store_id,
            user_id=run.user_id,
            conversation_id=run.acts_for_conversation_id,
            run_id=run.run_id,
            user_roles=frozenset(run.user_roles),
            approvals_required=run.options.approvals_required,
            above=run.above,
            credential_id=run.credential_id,
            delegate_user_id=run.delegate_user_id,
            agent_name=run.agent_name,
            in_background=run.is_job,
        )


class Registry(Protocol):
    """The tool registry. Every method may raise DependencyUnavailable and can be retried."""

    async def resolve(
        self,
        context: CallContext,
        names: Sequence[str],
        pinned: Sequence[PinnedTool] = (),
        *,
        most: int = 0,
        skip_missing: bool = False,
    ) -> Resolved:
        """Return the named tools or, if `names` is empty, all tools that the user may call.

        Pinned tools keep their version. At most `most` tools are returned (0 means no limit). With `skip_missing`,
        tools that do not exist for this user are omitted.

        Raises:
            ToolNotFound: A tool does not exist for this user. Metadata `tool_name` names it.
        """

    async def check(
        self,
        context: CallContext,
        calls: Sequence[ProposedCall],
        known_tool_names: Sequence[str],
        reads: ReadTimeouts | None = None,
    ) -> tuple[Verdict, ...]:
        """Return a verdict on each call, in order.

        With `reads`, read-only calls are also executed. Results that arrive quickly are returned with the verdicts.
        """

    async def check_output(self, store_id: StoreId, schema_json: bytes, output: str | None) -> OutputChecked: ...

    async def record_decisions(self, context: CallContext, decisions: Sequence[RecordedDecision]) -> None:
        """Record users' decisions in the audit chain before they take effect. Idempotent."""

    async def record_results(self, context: CallContext, results: Sequence[RecordedResult]) -> None:
        """Record front-end results in the audit chain before they are used. Idempotent."""

    def execute(self, context: CallContext, execution: Execution) -> AsyncGenerator[ExecutionPiece, None]:
        """Run a call. Yield its progress, then its result. Use it inside `contextlib.aclosing`.

        Raises:
            ToolNotFound, ApprovalRequired, InvalidArguments: The call is not allowed to run.
        """

    async def cancel(self, context: CallContext, call_id: CallId, *, wait_seconds: float) -> Stopped:
        """Stop a call wherever it is running, and wait up to `wait_seconds` for it to end. Idempotent."""


class ModelTiming(msgspec.Struct, frozen=True, kw_only=True):
    """The server and times of a model call.

    The times are monotonic. A time is None if its event did not happen. `server` is empty for the deployment's model
    server.
    """

    sent_at: float
    server: str = ""
    due_at: float | None = None
    first_output_at: float | None = None


class Meter(Protocol):
    def model_called(self, store_id: StoreId, outcome: str, usage: Usage, timing: ModelTiming) -> None:
        """Count a model call that has just ended.

        The outcome is `answered`, `cut`, `forgotten`, `timeout` or the class of the failure in lower case.
        """

    def model_call_waits(self, limit: WaitKind) -> None:
        """Count a model call that was not made because of a limit per minute or a token budget."""

    def call_executed(self, outcome: str) -> None: ...

    def runs_held(self, count: int) -> None: ...

    def run_left(self, how: str) -> None:
        """Count a run that this worker released.

        `how` is `parked`, `ended`, `handed_over`, `lost`, `failed`, `given_up` or `crashed`.
        """
