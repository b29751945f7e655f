"""The ports of execution: what holds and runs a tool."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pawl.chassis.auth import Principal
from pawl.chassis.ids import CallKey, RunId, RunKey, StoreId
from pawl.tool_registry.domain.completion import AwaitedCall, CompletionTerms, Receipt, Said, UntoldEnd
from pawl.tool_registry.domain.execution import ExecutionResult
from pawl.tool_registry.sdk.context import ToolContext
from pawl.tool_registry.sdk.tool import Tool

T = TypeVar("T")


class ResourceLocks(Protocol):
    """At most one execution at a time for each resource key of a store, over all replicas."""

    def hold(self, store_id: StoreId, keys: Sequence[str], holder: str) -> AbstractAsyncContextManager[None]:
        """Wait for all keys (sorted, each once) and hold them inside the context.

        Safe to cancel. Not fair between processes. Held while the process lives.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """An attempt to run a call, which may keep checkpoints as long as it is the newest one."""

    key: CallKey
    run_id: RunId
    attempt: int
    token: str
    """Unique for this attempt."""


class Checkpoints(Protocol):
    """The newest checkpoints of calls, durable, shared by all replicas."""

    async def take(self, writer: Writer) -> bytes | None:
        """Return the checkpoint of a call that is begun again, and let no earlier attempt write any more. Atomic."""

    async def keep(self, writer: Writer, content: bytes, *, is_first: bool) -> bool:
        """Write a checkpoint in place of the last one; False if the attempt is not the newest, or the run is erased.

        `is_first` if this attempt has written none. Then one that took nothing, because it
        is the first of its call, comes in place of another one that was called so, too.
        """

    async def forget(self, older_than_seconds: float) -> None:
        """Delete old ones."""


class Completions(Protocol):
    """Calls that somebody outside completes, in the journal, shared by all replicas."""

    async def open(self, key: CallKey, digest: bytes, terms: CompletionTerms) -> bool:
        """Give a call that runs here a token in place of the last one; False if it does not run here any more."""

    async def hold(self, key: CallKey, terms: CompletionTerms, seconds: float) -> ExecutionResult | None:
        """Let a call go on without its tool for so long; return what it has then: that it waits, or its end. Atomic.

        None if it does not run here any more, or has no token: nobody could complete it.
        """

    async def lapse(self, key: CallKey, result: ExecutionResult) -> ExecutionResult:
        """Give a call `result` whose time is over; return what it has then."""

    async def withdraw(self, key: CallKey) -> ExecutionResult | None:
        """Cancel a call that waits; return what it has then."""

    async def find(self, store_id: StoreId, digest: bytes) -> AwaitedCall | None:
        """Return the call that has a token."""

    async def complete(
        self, store_id: StoreId, digest: bytes, said: Said, result: ExecutionResult, by: Principal
    ) -> Receipt:
        """Give a call its end, once; what was `said` is known again. Atomic, and durable when it returns."""

    async def claim_untold(self, most: int) -> Sequence[UntoldEnd]:
        """Return ends that are to be told; nobody else gets them for a while."""

    async def mark_told(self, key: CallKey, *, is_told: bool) -> None:
        """Note that an end was told, or that it could not be told now."""


class AwaitedRuns(Protocol):
    """The runs of calls that somebody outside completes."""

    async def takes_results(self, run: RunKey) -> bool:
        """Return whether the run is open and is not being stopped."""

    async def note_completion(self, run: RunKey, key: CallKey) -> None:
        """Tell a run that its call was completed; one that is gone or has ended is told nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The value that a tool returned, or the error that it raised."""

    value: Any = None
    error: BaseException | None = None


class Work(Protocol):
    """A tool that runs."""

    @property
    def hindrance(self) -> str:
        """The tool that held this one up by blocking the event loop of async tools, as a sentence; empty for none."""

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

    async def answer(self, tool_name: str, function: Callable[[], T]) -> T:
        """Return what a preview or count of a tool returns, run apart from the registry's event loop.

        Raises:
            TakesTooLong: it does not end in time, or waits for others that do not.
        """


class Secrets(Protocol):
    """Secrets that tools may ask for by name."""

    def find(self, store_id: StoreId, name: str) -> str | None:
        """Return the store's secret, or the common one, or None: for code of the deployment."""

    def own(self, store_id: StoreId, name: str) -> str | None:
        """Return the store's secret, or None: for what an admin of the store has connected.

        The admin says where it is sent, and what is common belongs to the deployment and to all other stores.
        """
