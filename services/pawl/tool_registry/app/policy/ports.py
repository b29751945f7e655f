"""The ports of policy: the journal, rules, rates and the audit chain, shared by all replicas."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pawl.chassis.ids import CallId, CallKey, ConversationId, RequestId, RunId, RunKey, StoreId, UserId
from pawl.tool_registry.domain.audit import AuditDraft, AuditEntry, Head, ToolFigures
from pawl.tool_registry.domain.execution import ExecutionResult
from pawl.tool_registry.domain.rate import Exceeded, Rate
from pawl.tool_registry.domain.rules import Rule
from pawl.values import Answer, EffectClass, Question


class TakesTooLong(Exception):
    """The preview or bulk count of a tool did not end in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalCall:
    """A call that is about to have its effect."""

    key: CallKey
    run_id: RunId
    tool_name: str
    tool_version: int
    effect: EffectClass
    fingerprint: str
    unknowns_resolved: int
    token: str
    """Unique for this attempt."""
    is_askable: bool
    """True if the tool can be asked what became of an earlier execution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The call may run now, in this process. `must_reconcile`: the tool is asked first."""

    must_reconcile: bool = False
    is_cancelled: bool = False
    """It was cancelled meanwhile: reconcile, but do not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldElsewhere:
    """Another process runs the call; ask again a little later.

    `question` is what its tool asks at the moment, after `position` others.
    """

    question: Question | None = None
    position: int = 0


class ExecutionJournal(Protocol):
    """Executions with effects that must not happen twice, durable, shared by all replicas."""

    async def begin(
        self, call: JournalCall, *, unacted: Collection[str] = ()
    ) -> Begun | HeldElsewhere | ExecutionResult:
        """Write that the call is about to run, or return what is known of it.

        To be asked only by a process that does not run the call at the moment.
        Atomic: of several that ask, one gets Begun. `unacted` are tokens of calls
        that this process got no answer for: if one of them has written an entry,
        nothing ran.

        Raises:
            InvalidArguments: the call was begun with another tool or other arguments.
            DependencyUnavailable: it is not known whether the entry was written;
                nothing may run.
        """

    async def known(self, call: JournalCall) -> ExecutionResult | HeldElsewhere | None:
        """Return what `begin` would return now, without beginning; None if it would begin.

        Raises:
            InvalidArguments: as `begin`.
        """

    async def look(self, key: CallKey) -> ExecutionResult | HeldElsewhere | None:
        """Return the result of a call that has begun, or that another process runs it.

        To be asked only by a process that does not run the call at the moment: the
        outcome of what began and has no end, and that nobody runs, is UNKNOWN.
        """

    async def end(self, key: CallKey, result: ExecutionResult) -> ExecutionResult:
        """Write the end of a call that this process began, and return the result that stands.

        That is another one if the entry was concluded to be unknown meanwhile.
        """

    async def ask(self, key: CallKey, question: Question, position: int) -> None:
        """Write what the tool of a call that this process runs asks, after `position` others."""

    async def answer(self, key: CallKey, answers: Sequence[Answer]) -> None:
        """Leave all answers so far for the process that runs the call. Idempotent."""

    async def answers(self, keys: Collection[CallKey]) -> Mapping[CallKey, Sequence[Answer]]:
        """Return what was left for calls of this process."""

    async def cancel(self, key: CallKey) -> ExecutionResult | HeldElsewhere | None:
        """Ask for the end of a call, durably; one that was not begun can not begin any more.

        Returns as `look`, but None for a call that was cancelled before it began.
        """

    async def renew(self, others: Collection[CallKey] = ()) -> Collection[CallKey]:
        """Renew the lease of all calls of this process, and look at those of others; returns calls to be cancelled.

        `others` are calls without an entry of their own that the process runs.
        """

    async def look_at_leases(self) -> None:
        """Look at the leases of other processes only. One that is not looked at regularly ends later."""

    async def release(self) -> None:
        """Give the lease up: open entries are those of a dead process at once."""

    async def forget(self, older_than_seconds: float) -> int:
        """Delete ended entries, and leases of dead processes; returns how many entries."""


class RunReads(Protocol):
    """The ledger's knowledge of the runs and calls of users. All methods raise DependencyUnavailable."""

    async def has_run(self, run: RunKey, user_id: UserId) -> bool:
        """Return whether the user has that run, ended or not."""

    async def has_conversation(self, store_id: StoreId, user_id: UserId, conversation_id: ConversationId) -> bool:
        """Return whether that conversation is the user's.

        Raises:
            ConversationErased: the user has erased it.
        """

    async def gated_tool(self, key: CallKey, user_id: UserId) -> str | None:
        """Return the tool of a call of the user that needed an approval; None if there is no such call."""

    async def has_agent(self, store_id: StoreId, name: str) -> bool:
        """Return whether runs of the store can be those of that agent."""


class RuleRepository(Protocol):
    """Rules and the calls that they have allowed, durable, shared by all replicas."""

    async def add(self, rule: Rule, request_id: RequestId) -> Rule:
        """Keep a rule, and return it as kept; the same request again gives the rule that it made.

        Atomic with `domain.rules.check_room`.

        Raises:
            RequestIdReused: the request id of that user came before with another rule.
            InvalidField: there is no room for it.
            ConversationErased: its conversation, or that of its run, was erased.
        """

    async def is_erased(self, rule: Rule) -> bool:
        """Return whether the conversation of a rule, or that of its run, was erased."""

    async def get(self, store_id: StoreId, rule_id: str) -> Rule | None:
        """Return a rule, in force or not."""

    async def is_made(self, store_id: StoreId, user_id: UserId, request_id: RequestId) -> bool:
        """Return whether a request of the user has made a rule."""

    async def in_force(self, store_id: StoreId) -> Sequence[Rule]:
        """Return the rules of a store that are in force."""

    async def revoke(self, store_id: StoreId, rule_id: str, user_id: UserId) -> Rule:
        """Revoke a rule; one that was revoked before stays as it is.

        Raises:
            RuleNotFound: there is none.
        """

    async def list(
        self, store_id: StoreId, user_id: UserId, *, include_ended: bool, before: str, most: int
    ) -> Sequence[Rule]:
        """Return rules by descending id: those of a user and of the store, or all if `user_id` is empty."""

    async def use(self, store_id: StoreId, rule_id: str, call_id: CallId) -> bool:
        """Count a call, once, if the rule is in force; returns whether it has allowed the call. Atomic."""

    async def has_allowed(self, store_id: StoreId, rule_id: str, call_id: CallId) -> bool:
        """Return whether the rule has allowed the call and is neither revoked nor expired."""

    async def forget(self, older_than_seconds: float) -> None:
        """Delete what is known of calls that were allowed longer ago; their number stays with the rule."""


class GrantUses(Protocol):
    """The calls that began under grants of series, durable, shared by all replicas."""

    async def use(self, store_id: StoreId, digest: str, call_id: CallId, *, uses_max: int) -> bool:
        """Count a call under a grant, once, if that has a use left; returns whether it is counted. Atomic."""

    async def forget(self) -> None:
        """Delete the grants that no series can use any more."""


class RateLimits(Protocol):
    """Counts what begins, the same for all replicas."""

    async def take(self, store_id: StoreId, rates: Sequence[Rate]) -> Exceeded | None:
        """Count one call against all rates, or against none and return the one that is used up.

        Raises:
            DependencyUnavailable: it is not known whether it was counted.
        """

    async def forget(self) -> None:
        """Delete the rates that nobody uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    """The entries of a store that are wanted; empty fields and None mean any. Times are microseconds since 1970."""

    store_id: StoreId
    run_id: RunId = RunId("")
    call_id: CallId = CallId("")
    tool_name: str = ""
    user_id: UserId = UserId("")
    agent_name: str = ""
    kind: str = ""
    since_us: int | None = None
    before_us: int | None = None


class AuditLog(Protocol):
    """The audit chains of all stores, durable, shared by all replicas."""

    async def append(self, drafts: Sequence[AuditDraft]) -> frozenset[StoreId]:
        """Write entries at the ends of their chains, in order; returns the stores whose chain takes none.

        Somebody has tampered with those: nothing was written to them, and everything
        to the others. A decision that is there already (same call, kind and person)
        is left out.

        Raises:
            DependencyUnavailable: it is not known whether they were written.
        """

    async def head(self, store_id: StoreId) -> Head:
        """Return the recorded last entry of a chain."""

    async def page(
        self, store_id: StoreId, *, after_seq: int | None, up_to_seq: int, rows_max: int
    ) -> list[AuditEntry]:
        """Return entries in order, those after `after_seq` (None: from whatever is the first)."""

    async def beyond_head(self, store_id: StoreId) -> int:
        """Return the first entry behind the recorded head, 0 if there is none."""

    async def listed(self, wanted: AuditFilter, *, before_seq: int | None, rows_max: int) -> list[AuditEntry]:
        """Return matching entries, the newest first."""

    async def figures(self, wanted: AuditFilter, *, by_agent: bool) -> list[ToolFigures]:
        """Return what each tool did, by name; or for each agent apart, by agent and name."""


class Observer(Protocol):
    """Counts what happens."""

    def checked(self, disposition: str) -> None:
        """A call was checked."""

    def ended(self, tool_name: str, outcome: str, seconds: float) -> None:
        """An execution has ended."""
