"""The ports for driving runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

import msgspec

from pawl.agent_loop.agents.rules import AgentQuota, AgentVersion
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
from pawl.values import Execution, ReadTimeouts, RunContext, Usage

Randomness = Callable[[], float]
"""Gives numbers from 0 to 1."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A run that this worker holds; the epoch fences its commits."""

    key: RunKey
    epoch: int


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """A run as the ledger has it at `now`, by the database's clock, and the tools that came with it."""

    state: State
    now: float
    own_tools: tuple[Tool, ...]


class Renewal(msgspec.Struct, frozen=True, kw_only=True):
    """The claims that the worker still holds, and those of them that have unread commands, in the ledger's order."""

    held: tuple[Claim, ...]
    with_commands: tuple[Claim, ...]


class AgentReader(Protocol):
    """The ledger's agents. It may raise DependencyUnavailable and then be called again."""

    async def get_agent(self, store_id: StoreId, name: str, version: int) -> AgentVersion:
        """Read a version; 0 for the newest of an agent that is not deleted.

        Raises:
            AgentNotFound
        """
        ...

    async def get_draft(self, store_id: StoreId, user_id: UserId, name: str) -> AgentVersion:
        """Read a draft of a user.

        Raises:
            AgentNotFound
        """
        ...

    async def agent_quota(self, store_id: StoreId, name: str) -> AgentQuota:
        """Read the budget of an agent, and what is used of it."""
        ...


class CallContext(RunContext, frozen=True, kw_only=True):
    """The run that a registry call is about, and its user."""

    above: tuple[RunAbove, ...] = ()
    """The runs above it."""

    @classmethod
    def of(cls, run: Run) -> CallContext:
        """Return the context of the calls of a run."""
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
    """The tool registry. Every method may raise DependencyUnavailable and then be called again."""

    async def resolve(
        self,
        context: CallContext,
        names: Sequence[str],
        pinned: Sequence[PinnedTool] = (),
        *,
        most: int = 0,
        skip_missing: bool = False,
    ) -> Resolved:
        """Return tools by name (none: all that the user may call), pinned ones in their version; `most` 0 means any.

        `skip_missing` leaves those out that do not exist for this user.

        Raises:
            ToolNotFound: one does not exist for this user; metadata `tool_name` says which.
        """

    async def check(
        self,
        context: CallContext,
        calls: Sequence[ProposedCall],
        known_tool_names: Sequence[str],
        reads: ReadTimeouts | None = None,
    ) -> tuple[Verdict, ...]:
        """Return a verdict on each call, in order.

        Executes nothing but, with `reads`, calls that only read: what is there in a moment comes with the verdict.
        """

    async def check_output(self, store_id: StoreId, schema_json: bytes, output: str | None) -> OutputChecked:
        """Return what an answer is beside the schema of a response format."""
        ...

    async def record_decisions(self, context: CallContext, decisions: Sequence[RecordedDecision]) -> None:
        """Write to the audit chain what people decided, before it takes effect. Idempotent."""

    async def record_results(self, context: CallContext, results: Sequence[RecordedResult]) -> None:
        """Write to the audit chain what front ends returned, before it is used. Idempotent."""

    def execute(self, context: CallContext, execution: Execution) -> AsyncGenerator[ExecutionPiece, None]:
        """Run a call: progress, then its result, last. Consume it inside `contextlib.aclosing`.

        Raises:
            ToolNotFound, ApprovalRequired, InvalidArguments: it may not run.
        """

    async def cancel(self, context: CallContext, call_id: CallId, *, wait_seconds: float) -> Stopped:
        """Stop a call wherever it runs, and wait for its end. Idempotent."""


class Meter(Protocol):
    """Counts what the loop does."""

    def model_called(self, outcome: str, usage: Usage) -> None:
        """Count a model call that ended: `answered`, `failed` or `cut`."""

    def call_executed(self, outcome: str) -> None:
        """Count an execution that ended, by its outcome."""

    def runs_held(self, count: int) -> None:
        """Set how many runs this worker drives."""

    def run_left(self, how: str) -> None:
        """Count a run that this worker let go of.

        `parked`, `ended`, `handed_over`, `lost`, `failed`, `given_up` or `crashed`.
        """
