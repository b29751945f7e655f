"""The ports of the use cases that serve clients."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from pawl.agent_loop.app.public_values import (
    CallView,
    ClientSession,
    EditVerdict,
    EventPage,
    LeaseAnswer,
    LoggedEvent,
    NewMessage,
    Page,
    PageAsked,
    PendingFilter,
    PublicCommand,
    Reply,
    RunView,
)
from pawl.agent_loop.domain.run import RunState
from pawl.agent_loop.domain.undo import UndoSource
from pawl.chassis.auth import Principal
from pawl.chassis.ids import CallId, CommandId, ConversationId, RunId, StoreId


class PublicLedger(Protocol):
    """The ledger, for a user. A thing of another user is not found.

    Every method may raise DependencyUnavailable; mutations with the same id and
    payload can then be sent again.
    """

    async def submit_message(self, caller: Principal, message: NewMessage) -> tuple[RunView, bool]:
        """Bring a message; return the run that it started or entered, and whether it entered one.

        Raises:
            ConversationNotFound, ConversationBusy, QueueFull, RequestIdReused.
        """

    async def send_command(
        self,
        caller: Principal,
        run_id: RunId,
        command_id: CommandId,
        command: PublicCommand,
        *,
        as_operator: bool = False,
    ) -> Reply:
        """Send a command and return the final word on it.

        With `as_operator` the run may be of any user of the caller's store; so it may for a decision about a gated
        call with the right STORE, and the reply then says of the run only where it stands.

        Raises:
            RequestIdReused: the id came before with another payload.
        """

    async def lease_offer(
        self, caller: Principal, run_id: RunId, call_id: CallId, *, client: ClientSession, lease_seconds: float
    ) -> LeaseAnswer:
        """Ask for an offered call."""

    async def renew_offers(
        self, caller: Principal, client: ClientSession, lease_seconds: float
    ) -> tuple[CallView, ...]:
        """Renew all offers that the session holds and return them."""

    async def release_offers(self, caller: Principal, client: ClientSession, run_id: RunId = RunId("")) -> None:
        """Give back the session's offers, of one run or of all; not what another of the client has taken over."""

    async def get_run(self, caller: Principal, run_id: RunId) -> RunView:
        """Read a run with its pending calls.

        Raises:
            RunNotFound
        """

    async def get_call(self, caller: Principal, call_id: CallId, *, for_approval: bool = False) -> CallView:
        """Read a call; with `for_approval` also one of another user of the store that awaits its approval, or did.

        Raises:
            CallNotFound
        """

    async def list_events(self, caller: Principal, run_id: RunId, after_seq: int) -> EventPage:
        """Read the log after `after_seq`, as far as one page goes.

        Raises:
            RunNotFound, SeqBeyondEnd
        """

    async def list_runs(
        self, caller: Principal, page: PageAsked, *, conversation_id: ConversationId, states: tuple[RunState, ...]
    ) -> Page[RunView]:
        """Read the user's runs, newest first.

        Raises:
            InvalidPageToken
        """

    async def list_calls(self, caller: Principal, run_id: RunId, page: PageAsked) -> Page[CallView]:
        """Read the calls of a run with whole results.

        Raises:
            RunNotFound, InvalidPageToken
        """

    async def undo_sources(self, caller: Principal, run_id: RunId) -> tuple[UndoSource, ...]:
        """Read the calls of a run, each with the calls that have tried to undo it.

        Raises:
            RunNotFound
        """

    async def list_messages(self, caller: Principal, conversation_id: ConversationId, page: PageAsked) -> Page[object]:
        """Read the messages of a conversation, as documents.

        Raises:
            ConversationNotFound, InvalidPageToken
        """

    async def list_attention(self, caller: Principal, run_id: RunId, page: PageAsked) -> Page[RunView]:
        """Read the runs of the store that need attention, of all users, or the one with `run_id`.

        With their calls in doubt, the longest waiting first.

        Raises:
            InvalidPageToken
        """

    async def list_pending(self, caller: Principal, wanted: PendingFilter, page: PageAsked) -> Page[CallView | RunView]:
        """Read the calls that wait, oldest first, then the runs that wait for tokens.

        Those of other users come without what belongs to their conversations.

        Raises:
            InvalidPageToken
        """


class CallChecker(Protocol):
    """The registry, for edited arguments and answers."""

    async def check_answer(self, store_id: StoreId, answer_schema_json: bytes, answer: str) -> None:
        """Check an answer to a question of a running tool.

        Raises:
            InvalidArguments: it does not fit; the message says what is wrong and what would fit.
        """

    async def check_edit(self, store_id: StoreId, run: RunView, call: CallView, arguments_json: bytes) -> EditVerdict:
        """Return the canonical form of new arguments for a call of `run`, whose user must be allowed to make it.

        Raises:
            InvalidArguments: they may not run; the message lists everything that is wrong.
        """


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
        self, store_id: StoreId, run_id: RunId, take: Callable[[LoggedEvent], Awaitable[None]]
    ) -> LiveSubscription:
        """Give each event of the run to `take`, until unsubscribed."""
