"""The ports of the use cases that serve clients."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from pawl.agent_loop.agents.rules import OfferedTool
from pawl.agent_loop.loop.rules.fact import OutputChecked
from pawl.agent_loop.loop.rules.parts import FilePart
from pawl.agent_loop.loop.rules.run import Run
from pawl.agent_loop.loop.rules.tool import Tool, Verdict
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import RunId, StoreId, UserId
from pawl.event.v1.call_pb2 import Call
from pawl.event.v1.event_pb2 import RunEvent
from pawl.job.v1.ledger_pb2 import GetRunResponse
from pawl.values import Series


class DocumentReader(Protocol):
    """The registry's documents."""

    async def read_document(self, caller: Principal, file: FilePart) -> str:
        """Return the text that a document has now which the caller can read.

        Raises:
            DocumentNotFound
            InvalidField: no document can have that name.
        """
        ...


class OutputChecker(Protocol):
    """The registry, for the form of answers."""

    async def check_output(self, store_id: StoreId, schema_json: bytes, output: str | None) -> OutputChecked:
        """Return what an answer is beside the schema of a response format; with None check the schema alone.

        Raises:
            InvalidSchema: it cannot be used.
            Overloaded, DependencyUnavailable: it cannot be said now.
        """


class CallChecker(OutputChecker, Protocol):
    """The registry, for edited arguments and answers, and for what a user may call."""

    async def check_answer(self, store_id: StoreId, answer_schema_json: bytes, answer: str) -> None:
        """Check an answer to a question of a running tool.

        Raises:
            InvalidArguments: it does not fit; the message says what is wrong and what would fit.
        """

    async def check_edit(
        self, read: GetRunResponse, call: Call, arguments_json: bytes, series: Series | None = None
    ) -> Verdict:
        """Return the verdict on new arguments for a call of a run, whose user must be allowed to make it.

        With a `series` also the digest by which that can be granted with them.

        Raises:
            InvalidArguments: they may not run; the message lists everything that is wrong.
        """

    async def check_job(self, caller: Principal, run: Run, now: float) -> Verdict:
        """Return the verdict on the first call of a job that `caller` is to start."""

    async def count_tools(self, caller: Principal) -> int:
        """Return how many tools a run of `caller` would be offered now."""


class ToolFinder(Protocol):
    """The registry, for what agents select."""

    async def offered(self, caller: Principal) -> tuple[OfferedTool, ...]:
        """Return all tools that a user may call."""
        ...

    async def check_own(self, caller: Principal, definitions: Sequence[bytes]) -> tuple[Tool, ...]:
        """Return tools that are to come with a run of the user, given as the contract has them, as it is to keep them.

        Raises:
            InvalidField, InvalidSchema, ToolExists
        """
        ...


class LiveSubscription(Protocol):
    """Interest in the live events of one run."""

    async def unsubscribe(self) -> None:
        """Get no more of them. Idempotent."""


class LiveEvents(Protocol):
    """Events as they happen: some may be missing, some may come twice."""

    @property
    def connected(self) -> bool:
        """True while events can arrive."""

    async def subscribe(
        self, store_id: StoreId, run_id: RunId, take: Callable[[RunEvent], Awaitable[None]]
    ) -> LiveSubscription:
        """Give each event of the run to `take`, until unsubscribed."""

    async def subscribe_inboxes(self, changed: Callable[[StoreId, UserId], None]) -> LiveSubscription:
        """Call `changed` for each user for whom something else may wait now, until unsubscribed."""

    async def tell_viewers(self, viewers: Sequence[tuple[StoreId, UserId, RunId]]) -> None:
        """Report which users have seen which runs as they are now, so that they are not notified; it may be lost."""
