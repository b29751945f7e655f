"""The ports of execution: what holds and runs a tool."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from pawl.chassis.ids import CallKey, RunId, StoreId
from pawl.tool_registry.sdk.context import ToolContext
from pawl.tool_registry.sdk.tool import Tool


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

    def find(self, store_id: StoreId, name: str) -> str | None:
        """Return the store's secret, or the common one, or None: for code of the deployment."""

    def own(self, store_id: StoreId, name: str) -> str | None:
        """Return the store's secret, or None: for what an admin of the store has connected.

        The admin says where it is sent, and what is common belongs to the deployment and to all other stores.
        """
