"""The ports of the registry's use cases."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pawl.tool_registry.domain.definition import EffectClass, ToolDefinition, ToolVersion
from pawl.tool_registry.domain.execution import ExecutionResult
from pawl.tool_registry.domain.outbound import OutboundRequest, OutboundResponse
from pawl.tool_registry.domain.question import Answer, Question
from pawl.tool_registry.domain.registering import SOURCE, Registrant
from pawl.tool_registry.domain.rules import Rule
from pawl.tool_registry.domain.source import DiscoveredTool, Source, SourceRecord, SourceState
from pawl.tool_registry.sdk.context import ToolContext
from pawl.tool_registry.sdk.tool import Tool

T = TypeVar("T")
CallKey = tuple[str, str]
"""Store and call."""


class TooCostly(Exception):
    """Something that strangers wrote takes more time or memory to work out than there is for it."""


class Helper(Protocol):
    """Works out what strangers wrote where it holds up nobody else."""

    async def run(self, store_id: str, function: Callable[..., T], *arguments: Any, cpu_seconds: float) -> T:
        """Return what a function of a module returns, or raise what it raises; all of it can be pickled.

        Raises:
            TooCostly: it takes more processor time, or more memory than a helper has.
            Overloaded: too much of the store waits already.
            DependencyUnavailable: no helper can be started now.
        """


class ToolSource(Protocol):
    """Runs the tools of one kind of source, which stores have registered."""

    def tool(self, entry: ToolVersion) -> Tool[..., Any] | None:
        """Return what runs a version; None if its source is not there any more. Quick, and never fails."""


class Connector(ToolSource, Protocol):
    """One kind of source that stores can add: connects, and runs its tools."""

    async def prepared(self, source: Source) -> Source:
        """Return a source as it is kept: without what it has no use for.

        Raises:
            InvalidField: the configuration cannot be used.
        """

    async def discover(self, source: Source) -> Sequence[DiscoveredTool]:
        """Return the tools that a source has now, by name, those that cannot be called among them.

        Raises:
            InvalidField, InvalidSchema: the configuration cannot be used.
            SourceUnreachable: it does not answer, or not as it should.
        """

    async def forget(self, store_id: str, name: str) -> None:
        """Close what is open for a source that was removed or changed. Idempotent."""


class SourceRepository(Protocol):
    """The sources of stores, durable. Their tools are in the ToolRepository."""

    async def put(self, record: SourceRecord) -> None:
        """Write a source, in place of one of its name.

        Raises:
            InvalidField: the store has SOURCES_MAX sources.
        """

    async def set_state(self, store_id: str, name: str, state: SourceState, problem: str) -> None:
        """Write where a source stands; one that is gone stays gone."""

    async def get(self, store_id: str, name: str) -> SourceRecord | None:
        """Return a source of a store."""

    async def list(self, store_id: str) -> Sequence[SourceRecord]:
        """Return the sources of a store, by name."""

    async def remove(self, store_id: str, name: str) -> bool:
        """Delete a source; returns whether it was there."""


class ToolRepository(Protocol):
    """Definitions and their versions, durable. A version, once given, never changes."""

    async def adopt(self, source: str, definitions: Sequence[ToolDefinition]) -> Sequence[ToolVersion]:
        """Return the version of each loaded definition, in order.

        A definition seen before has the version it had then, in every process;
        another one gets the next version. Atomic, and safe to call from several
        processes at once.
        """

    async def register(
        self,
        store_id: str,
        definition: ToolDefinition,
        *,
        replace: bool,
        source: str,
        binding: bytes = b"",
        registrant: Registrant = SOURCE,
    ) -> ToolVersion:
        """Register a store's tool, durably; the same definition again (source and binding too) changes nothing.

        Atomic with the checks of `domain.registering`.

        Raises:
            ToolExists: the name has another definition and `replace` is not set, or is that of another source.
            PermissionDenied: the registrant may not replace the tool, or not by this definition.
            InvalidField: the share of the registrant or of the store is full.
        """

    async def unregister(self, store_id: str, name: str) -> None:
        """Take a store's tool out of the register; its versions stay readable.

        Raises:
            ToolNotFound: there is none.
        """

    async def current(self, store_id: str, names: Collection[str] | None = None) -> Sequence[ToolVersion]:
        """Return the current versions of a store's tools, all or those named, by name."""

    async def version(self, store_id: str, name: str, version: int) -> ToolVersion | None:
        """Return a version, current or not; `store_id` is empty for loaded tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalCall:
    """A call that is about to have its effect."""

    key: CallKey
    run_id: str
    tool_name: str
    tool_version: int
    effect: EffectClass
    fingerprint: str
    unknowns_resolved: int
    token: str
    """Unique for this attempt."""


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


class RunReads(Protocol):
    """The ledger's knowledge of the runs and calls of users. All methods raise DependencyUnavailable."""

    async def has_run(self, *, store_id: str, user_id: str, run_id: str) -> bool:
        """Return whether the user has that run, ended or not."""

    async def gated_tool(self, *, store_id: str, user_id: str, call_id: str) -> str | None:
        """Return the tool of a call of the user that needed an approval; None if there is no such call."""


class RuleRepository(Protocol):
    """Rules and the calls that they have allowed, durable, shared by all replicas."""

    async def add(self, rule: Rule, request_id: str) -> Rule:
        """Keep a rule, and return it as kept; the same request again gives the rule that it made.

        Atomic with `domain.rules.check_room`.

        Raises:
            RequestIdReused: the request id of that user came before with another rule.
            InvalidField: there is no room for it.
        """

    async def get(self, store_id: str, rule_id: str) -> Rule | None:
        """Return a rule, in force or not."""

    async def is_made(self, store_id: str, user_id: str, request_id: str) -> bool:
        """Return whether a request of the user has made a rule."""

    async def in_force(self, store_id: str) -> Sequence[Rule]:
        """Return the rules of a store that are in force."""

    async def revoke(self, store_id: str, rule_id: str, user_id: str) -> Rule:
        """Revoke a rule; one that was revoked before stays as it is.

        Raises:
            RuleNotFound: there is none.
        """

    async def list(self, store_id: str, user_id: str, *, include_ended: bool, before: str, most: int) -> Sequence[Rule]:
        """Return rules by descending id: those of a user and of the store, or all if `user_id` is empty."""

    async def use(self, store_id: str, rule_id: str, call_id: str) -> bool:
        """Count a call, once, if the rule is in force; returns whether it has allowed the call. Atomic."""

    async def has_allowed(self, store_id: str, rule_id: str, call_id: str) -> bool:
        """Return whether the rule has allowed the call and is neither revoked nor expired."""

    async def forget(self, older_than_seconds: float) -> None:
        """Delete what is known of calls that were allowed longer ago; their number stays with the rule."""


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
        """Renew the lease of all calls of this process; returns those to be cancelled.

        `others` are calls without an entry of their own that the process runs.
        """

    async def release(self) -> None:
        """Give the lease up: open entries are those of a dead process at once."""

    async def forget(self, older_than_seconds: float) -> int:
        """Delete ended entries, and leases of dead processes; returns how many entries."""


class ResourceLocks(Protocol):
    """At most one execution at a time for each resource key of a store, over all replicas."""

    def hold(self, store_id: str, keys: Sequence[str], holder: str) -> AbstractAsyncContextManager[None]:
        """Wait for all keys (sorted, each once) and hold them inside the context.

        Safe to cancel. Not fair between processes. Held while the process lives.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The value that a tool returned, or the error that it raised."""

    value: Any = None
    error: BaseException | None = None


class Work(Protocol):
    """A tool that runs."""

    async def result(self) -> Any:
        """Return what the tool returned, or raise what it raised.

        Cancelling this cancels an async tool; a sync one goes on in its thread.
        """

    @property
    def left(self) -> Future[Ended | None]:
        """Done when no code of the tool runs any more: how it ended, None if it was stopped before its end."""


class Runner(Protocol):
    """Runs the functions of tools."""

    def start(self, tool: Tool[..., Any], arguments: Mapping[str, Any], context: ToolContext) -> Work:
        """Start a tool; a sync one waits for a free thread first."""


class Secrets(Protocol):
    """Secrets that tools may ask for by name."""

    def find(self, store_id: str, name: str) -> str | None:
        """Return the store's secret, or the common one, or None: for code of the deployment."""

    def own(self, store_id: str, name: str) -> str | None:
        """Return the store's secret, or None: for what an admin of the store has connected.

        The admin says where it is sent, and what is common belongs to the deployment and to all other stores.
        """


class Egress(Protocol):
    """The way out into the world: what fetches anything on behalf of a store does it here."""

    def check(self, store_id: str, url: str, *, with_secrets: bool = False) -> None:
        """Return if the rules allow a URL, as far as can be said without asking for its addresses.

        Secrets may go there over https, or where the deployment has opened the host.

        Raises:
            EgressRefused: they do not.
        """

    async def send(self, store_id: str, request: OutboundRequest) -> OutboundResponse:
        """Send a request, follow its redirects, and return the response, whatever its status.

        Each hop is judged by its host and by all addresses that this has, and the
        connection goes to one of those. Safe to cancel.

        Raises:
            EgressRefused: the request, or one that a redirect asked for, must not be sent.
            RequestFailed: no response came, or none that can be read.
        """


class Observer(Protocol):
    """Counts what happens."""

    def checked(self, disposition: str) -> None:
        """A call was checked."""

    def ended(self, tool_name: str, outcome: str, seconds: float) -> None:
        """An execution has ended."""
