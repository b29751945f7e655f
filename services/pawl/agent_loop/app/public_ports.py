"""The ports of the use cases that serve clients."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from pawl.agent_loop.app.public_values import (
    CallView,
    ClientSession,
    EditVerdict,
    ErasureView,
    EventPage,
    LeaseAnswer,
    LoggedEvent,
    NewJob,
    NewMessage,
    Page,
    PageAsked,
    PendingFilter,
    PublicCommand,
    Reply,
    RunFilter,
    RunView,
)
from pawl.agent_loop.domain.agents import AgentDefinition, AgentUsage, AgentVersion, OfferedTool
from pawl.agent_loop.domain.call import Call
from pawl.agent_loop.domain.fact import OutputChecked
from pawl.agent_loop.domain.message import Message
from pawl.agent_loop.domain.parts import FilePart
from pawl.agent_loop.domain.run import Run
from pawl.agent_loop.domain.tool import Tool, Verdict
from pawl.agent_loop.domain.undo import UndoSource
from pawl.chassis.auth import Principal
from pawl.chassis.ids import CallId, CommandId, ConversationId, RequestId, RunId, StoreId, UserId
from pawl.values.call import Series


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

    async def start_job(self, caller: Principal, job: NewJob) -> RunView:
        """Create a job and return it; with the request id of an earlier one return that.

        Raises:
            ConversationNotFound, ConversationErased, TooManyJobs, QueueFull, RequestIdReused,
                ToolExists (see `NewJob`)
        """

    async def conversation_with_key(self, caller: Principal, key: str) -> ConversationId:
        """Read the id of the user's conversation with a key of the client; empty if there is none."""

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

    async def list_runs(self, caller: Principal, wanted: RunFilter, page: PageAsked) -> Page[RunView]:
        """Read the user's runs.

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

    async def erase_conversation(
        self, caller: Principal, conversation_id: ConversationId, page: PageAsked
    ) -> ErasureView:
        """Begin to erase a conversation, and return how far that is, with a page of what has left.

        Raises:
            ConversationNotFound, InvalidPageToken
        """

    async def list_messages(self, caller: Principal, conversation_id: ConversationId, page: PageAsked) -> Page[object]:
        """Read the messages of a conversation, as documents.

        Raises:
            ConversationNotFound, InvalidPageToken
        """

    async def get_conversation(
        self, caller: Principal, conversation_id: ConversationId, *, conversation_key: str = ""
    ) -> object:
        """Read a conversation, by its id or by its key, as a document.

        Raises:
            ConversationNotFound
        """

    async def list_conversations(
        self,
        caller: Principal,
        page: PageAsked,
        *,
        archived: bool | None,
        query: str,
        labels: Mapping[str, str],
        shared: bool,
    ) -> Page[object]:
        """Read the user's conversations, or those that others share, as documents, the last used ones first.

        Raises:
            InvalidPageToken
            InvalidField: the query has no word.
        """

    async def update_conversation(
        self,
        caller: Principal,
        request_id: RequestId,
        conversation_id: ConversationId,
        *,
        title: str | None,
        archived: bool | None,
        labels: Mapping[str, str] | None,
        sharing: int,
        shows_arguments: bool | None,
    ) -> object:
        """Change what is given of a conversation; return it as a document.

        Raises:
            ConversationNotFound, RequestIdReused
        """

    async def fork_conversation(
        self, caller: Principal, request_id: RequestId, conversation_id: ConversationId, *, number: int
    ) -> object:
        """Make a conversation with the past of another one up to a message, or the last place; return it as a document.

        Raises:
            ConversationNotFound, ForkPointOpen, PastTooLong, RequestIdReused
        """

    async def import_conversation(
        self,
        caller: Principal,
        request_id: RequestId,
        messages: Sequence[Message],
        calls: Sequence[Call],
        *,
        title: str,
        conversation_key: str,
    ) -> object:
        """Make a conversation of messages and settled calls that were made elsewhere; return it as a document.

        Raises:
            ConversationExists, RequestIdReused
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
        self, store_id: StoreId, run: RunView, call: CallView, arguments_json: bytes, series: Series | None = None
    ) -> EditVerdict:
        """Return the canonical form of new arguments for a call of `run`, whose user must be allowed to make it.

        With a `series` also the digest by which that can be granted with them.

        Raises:
            InvalidArguments: they may not run; the message lists everything that is wrong.
        """

    async def check_job(self, caller: Principal, run: Run, now: float) -> Verdict:
        """Return the verdict on the first call of a job that `caller` is to start."""

    async def count_tools(self, caller: Principal) -> int:
        """Return how many tools a run of `caller` would be offered now."""


class AgentLedger(Protocol):
    """The ledger's agents. Every method may raise DependencyUnavailable and then be called again."""

    async def put_agent(
        self, caller: Principal, definition: AgentDefinition, tool_names: tuple[str, ...], *, validate_only: bool
    ) -> tuple[AgentVersion, bool]:
        """Keep a new version, unless it is equal to the newest; return the newest, and whether it is new.

        Raises:
            AgentNotFound: it delegates to one that is not there.
            AgentCycle, TooLarge
        """
        ...

    async def get_agent(self, store_id: StoreId, name: str, version: int) -> AgentVersion:
        """Read a version; 0 for the newest of an agent that is not deleted.

        Raises:
            AgentNotFound
        """
        ...

    async def list_agents(self, store_id: StoreId, page: PageAsked) -> Page[AgentVersion]:
        """Read the newest versions of all that are not deleted, by name.

        Raises:
            InvalidPageToken
        """
        ...

    async def list_agent_versions(self, store_id: StoreId, name: str, page: PageAsked) -> Page[AgentVersion]:
        """Read the versions of an agent, the newest first.

        Raises:
            AgentNotFound, InvalidPageToken
        """
        ...

    async def delete_agent(self, caller: Principal, name: str) -> None:
        """Mark an agent as deleted.

        Raises:
            AgentNotFound
        """

    async def agent_usage(self, store_id: StoreId, name: str, days: int) -> tuple[AgentUsage, ...]:
        """Read the use of an agent on the last days, the newest first."""
        ...

    async def put_draft(
        self, caller: Principal, definition: AgentDefinition, tool_names: tuple[str, ...], *, validate_only: bool
    ) -> tuple[AgentVersion, bool]:
        """Keep a draft of the caller, unless it is equal to the one of its name; as `put_agent`."""
        ...

    async def get_draft(self, store_id: StoreId, user_id: UserId, name: str) -> AgentVersion:
        """Read a draft of a user.

        Raises:
            AgentNotFound
        """
        ...

    async def list_drafts(self, store_id: StoreId, user_id: UserId, page: PageAsked) -> Page[AgentVersion]:
        """Read the drafts of a user, by name.

        Raises:
            InvalidPageToken
        """
        ...

    async def delete_draft(self, caller: Principal, name: str) -> None:
        """Remove a draft of the caller.

        Raises:
            AgentNotFound
        """


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
        self, store_id: StoreId, run_id: RunId, take: Callable[[LoggedEvent], Awaitable[None]]
    ) -> LiveSubscription:
        """Give each event of the run to `take`, until unsubscribed."""

    async def subscribe_inboxes(self, changed: Callable[[StoreId, UserId], None]) -> LiveSubscription:
        """Call `changed` for each user for whom something else may wait now, until unsubscribed."""

    async def tell_viewers(self, viewers: Sequence[tuple[StoreId, UserId, RunId]]) -> None:
        """Report which users have seen which runs as they are now, so that they are not notified; it may be lost."""
