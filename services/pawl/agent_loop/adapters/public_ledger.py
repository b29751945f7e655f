"""The ledger service, for users."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import grpc
from msgspec.structs import asdict

from pawl.agent.v1 import conversation_pb2 as public
from pawl.agent.v1 import conversation_pb2_grpc
from pawl.agent_loop.adapters import undo_reads, wire, wire_events
from pawl.agent_loop.adapters.views import call_view, lease_answer, log_gap, logged_event, reply, run_view
from pawl.agent_loop.app.public_values import (
    CallView,
    ClientSession,
    DecisionCommand,
    DecisionRight,
    EventPage,
    LeaseAnswer,
    NewJob,
    NewMessage,
    Page,
    PageAsked,
    PendingFilter,
    ProgressCommand,
    PublicCommand,
    Reply,
    ResultCommand,
    RunFilter,
    RunView,
)
from pawl.agent_loop.domain.call import Call, CallState
from pawl.agent_loop.domain.message import Message
from pawl.agent_loop.domain.run import ENDED, RunState
from pawl.agent_loop.domain.undo import UndoSource
from pawl.chassis.auth import Principal, for_user
from pawl.chassis.ids import CallId, CommandId, ConversationId, RequestId, RunId
from pawl.chassis.rpc_client import translated
from pawl.chassis.translate import Exceptions
from pawl.errors import ConversationNotFound
from pawl.event.v1 import call_pb2, conversation_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job.v1 import ledger_pb2_grpc

EVENTS_PER_PAGE = 256

_MESSAGE: Final = wire.WIRE.struct(
    NewMessage,
    pb.SubmitMessageRequest,
    Exceptions(
        of_message=("store_id", "user_id", "user_roles", "credential_id", "delegate_user_id", "people"),
        write={
            "tools": lambda message: map(wire.OWN_TOOL.fields, message.brought.tools if message.brought else ()),
            "client_id": lambda message: message.brought.client_id if message.brought else "",
            "asked_tools_sha256": lambda message: message.brought.asked_sha256 if message.brought else b"",
        },
        of_struct=("brought",),
    ),
)
_RIGHTS: Final = wire.WIRE.enum(DecisionRight, pb.DecisionRight)
_RUN_FILTER: Final = wire.WIRE.struct(
    RunFilter,
    pb.ListRunsRequest,
    Exceptions(of_message=("store_id", "user_id", "page_size", "page_token")),
)
_CALL_STATES: Final = wire.WIRE.enum(CallState, call_pb2.CallState)


def _of(caller: Principal) -> dict[str, Any]:
    """Return the fields of every request that a user makes."""
    return {"store_id": caller.store_id, "user_id": caller.user_id}


def _with(caller: Principal) -> dict[str, Any]:
    """Return the fields of what a user does that say with which credential."""
    return {
        "credential_id": caller.credential_id,
        "delegate_user_id": caller.delegate_user_id,
        "people": sorted(caller.people),
    }


def submission(caller: Principal, message: NewMessage) -> pb.SubmitMessageRequest:
    """Return the request that brings a message to the ledger."""
    return pb.SubmitMessageRequest(
        **_of(caller), **_with(caller), user_roles=sorted(caller.roles), **_MESSAGE.fields(message)
    )


_NOT_DUE: Final = ENDED | {RunState.RUNNING}


class PublicLedger:
    """The ledger, for a user, over a channel to job-store. A thing of another user is not found.

    Every method may raise DependencyUnavailable and makes no retries; mutations with the same id and payload can be
    sent again.

    `run_due` is called when something that it brought may have made a run due.
    """

    def __init__(self, channel: grpc.aio.Channel, run_due: Callable[[], None] = lambda: None) -> None:
        self._stub = ledger_pb2_grpc.LedgerServiceStub(channel)
        self._conversations = conversation_pb2_grpc.ConversationServiceStub(channel)
        self._channel = channel
        self._run_due = run_due

    async def submit_message(self, caller: Principal, message: NewMessage) -> tuple[RunView, bool]:
        """Bring a message; return the run that it started or entered, and whether it entered one.

        Raises:
            ConversationNotFound, ConversationBusy, QueueFull, RequestIdReused.
        """
        response = await translated(self._stub.SubmitMessage(submission(caller, message)))
        self._note(run := run_view(response.run))
        return run, response.steered

    async def start_job(self, caller: Principal, job: NewJob) -> RunView:
        """Create a job and return it; with the request id of an earlier one return that.

        Raises:
            ConversationNotFound, ConversationErased, TooManyJobs, QueueFull, RequestIdReused,
                ToolExists (see `NewJob`)
        """
        request = pb.StartJobRequest(
            message=submission(caller, job.message),
            run_id=job.run_id,
            new_conversation_id=job.new_conversation_id,
            job=wire.JOB.write(job.job),
            asked_sha256=job.asked_sha256,
        )
        response = await translated(self._stub.StartJob(request))
        self._note(run := run_view(response.run))
        return run

    async def conversation_with_key(self, caller: Principal, key: str) -> ConversationId:
        """Read the id of the user's conversation with a key of the client; empty if there is none."""
        with suppress(ConversationNotFound):
            return ConversationId((await self.get_conversation(caller, conversation_key=key)).conversation_id)
        return ConversationId("")

    async def get_conversation(
        self, caller: Principal, conversation_id: ConversationId = ConversationId(""), *, conversation_key: str = ""
    ) -> conversation_pb2.Conversation:
        """Read a conversation of the user, or by its id one that another user shares.

        Raises:
            ConversationNotFound, ConversationErased
        """
        request = public.GetConversationRequest(conversation_id=conversation_id, conversation_key=conversation_key)
        return (await translated(self._conversations.GetConversation(request, metadata=for_user(caller)))).conversation

    async def forward(self, caller: Principal, method: str, request: bytes) -> bytes:
        """Have job-store answer a request of a user, as it came, to the method of this full name."""
        call: Any = self._channel.unary_unary(method)
        response: bytes = await translated(call(request, metadata=for_user(caller)))
        return response

    def _note(self, run: RunView) -> None:
        """See that a run is claimed, if it may be due: one that is being driven is not, its worker is told."""
        if run.state not in _NOT_DUE:
            self._run_due()

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
        request = pb.SendCommandRequest(
            **_of(caller),
            run_id=run_id,
            command=pb.Command(
                command_id=command_id, user_id=caller.user_id, **wire_events.PUBLIC_COMMAND.fields(command)
            ),
            as_operator=as_operator,
            **_with(caller),
        )
        if isinstance(command, ResultCommand | ProgressCommand):
            request.session_id = command.session_id
        if isinstance(command, DecisionCommand):
            request.decision_right = _RIGHTS.write(command.right)
        answer = reply(await translated(self._stub.SendCommand(request)))
        if answer.taken and answer.run is not None:
            self._note(answer.run)
        return answer

    async def lease_offer(
        self, caller: Principal, run_id: RunId, call_id: CallId, *, client: ClientSession, lease_seconds: float
    ) -> LeaseAnswer:
        """Ask for an offered call."""
        request = pb.LeaseOfferRequest(
            **_of(caller),
            run_id=run_id,
            call_id=call_id,
            client_id=client.client_id,
            session_id=client.session_id,
            lease_seconds=lease_seconds,
        )
        return lease_answer(await translated(self._stub.LeaseOffer(request)))

    async def renew_offers(
        self, caller: Principal, client: ClientSession, lease_seconds: float
    ) -> tuple[CallView, ...]:
        """Renew all offers that the session holds and return them."""
        request = pb.RenewOffersRequest(
            **_of(caller), client_id=client.client_id, session_id=client.session_id, lease_seconds=lease_seconds
        )
        response = await translated(self._stub.RenewOffers(request))
        return tuple(call_view(call) for call in response.calls)

    async def release_offers(self, caller: Principal, client: ClientSession, run_id: RunId = RunId("")) -> None:
        """Give back the session's offers, of one run or of all; not what another of the client has taken over."""
        request = pb.ReleaseOffersRequest(
            **_of(caller), client_id=client.client_id, session_id=client.session_id, run_id=run_id
        )
        await translated(self._stub.ReleaseOffers(request))

    async def get_run(self, caller: Principal, run_id: RunId) -> RunView:
        """Read a run with its pending calls.

        Raises:
            RunNotFound
        """
        request = pb.GetRunRequest(**_of(caller), run_id=run_id)
        response = await translated(self._stub.GetRun(request))
        tools = tuple(map(wire.OWN_TOOL.read, response.own_tools))
        return replace(run_view(response.run), brought_tools=tools) if tools else run_view(response.run)

    async def get_call(self, caller: Principal, call_id: CallId, *, for_approval: bool = False) -> CallView:
        """Read a call; with `for_approval` also one of another user of the store that awaits its approval, or did.

        Raises:
            CallNotFound
        """
        request = pb.GetCallRequest(**_of(caller), call_id=call_id, for_approval=for_approval)
        response = await translated(self._stub.GetCall(request))
        return call_view(response.call)

    async def list_events(self, caller: Principal, run_id: RunId, after_seq: int) -> EventPage:
        """Read the log after `after_seq`, as far as one page goes.

        Raises:
            RunNotFound, SeqBeyondEnd
        """
        request = pb.ListEventsRequest(**_of(caller), run_id=run_id, after_seq=after_seq, events_max=EVENTS_PER_PAGE)
        response = await translated(self._stub.ListEvents(request))
        return EventPage(
            events=tuple(logged_event(event) for event in response.events),
            last_seq=response.last_seq,
            ended=response.ended,
            gap=log_gap(response.gap) if response.HasField("gap") else None,
        )

    async def list_runs(self, caller: Principal, wanted: RunFilter, page: PageAsked) -> Page[RunView]:
        """Read the user's runs.

        Raises:
            InvalidPageToken
        """
        request = pb.ListRunsRequest(**_of(caller), **asdict(page), **_RUN_FILTER.fields(wanted))
        if wanted.running_jobs_of_store:
            request.user_id = ""
        response = await translated(self._stub.ListRuns(request))
        return Page(items=tuple(run_view(run) for run in response.runs), next_page_token=response.next_page_token)

    async def list_calls(self, caller: Principal, run_id: RunId, page: PageAsked) -> Page[CallView]:
        """Read the calls of a run with whole results.

        Raises:
            RunNotFound, InvalidPageToken
        """
        request = pb.ListCallsRequest(**_of(caller), run_id=run_id, **asdict(page))
        response = await translated(self._stub.ListCalls(request))
        return Page(items=tuple(call_view(call) for call in response.calls), next_page_token=response.next_page_token)

    async def undo_sources(self, caller: Principal, run_id: RunId) -> tuple[UndoSource, ...]:
        """Read the calls of a run, each with the calls that have tried to undo it.

        Raises:
            RunNotFound
        """
        return await undo_reads.sources(self._stub, caller.store_id, caller.user_id, run_id)

    async def list_messages(self, caller: Principal, conversation_id: ConversationId, page: PageAsked) -> Page[object]:
        """Read the messages of a conversation, as documents.

        Raises:
            ConversationNotFound, InvalidPageToken
        """
        request = pb.ListMessagesRequest(**_of(caller), conversation_id=conversation_id, **asdict(page))
        response = await translated(self._stub.ListMessages(request))
        return Page(items=tuple(response.messages), next_page_token=response.next_page_token)

    async def import_conversation(
        self,
        caller: Principal,
        request_id: RequestId,
        messages: Sequence[Message],
        calls: Sequence[Call],
        *,
        title: str,
        conversation_key: str,
    ) -> conversation_pb2.Conversation:
        """Make a conversation of messages and settled calls that were made elsewhere; return it.

        Raises:
            ConversationExists, RequestIdReused
        """
        request = pb.ImportConversationRequest(
            **_of(caller),
            request_id=request_id,
            messages=map(wire.MESSAGE.write, messages),
            calls=map(wire.CALL.write, calls),
            title=title,
            conversation_key=conversation_key,
        )
        return (await translated(self._stub.ImportConversation(request))).conversation

    async def list_attention(self, caller: Principal, run_id: RunId, page: PageAsked) -> Page[RunView]:
        """Read the runs of the store that need attention, of all users, or the one with `run_id`.

        With their calls in doubt, the longest waiting first.

        Raises:
            InvalidPageToken
        """
        request = pb.ListAttentionRequest(store_id=caller.store_id, run_id=run_id, **asdict(page))
        response = await translated(self._stub.ListAttention(request))
        return Page(items=tuple(run_view(run) for run in response.runs), next_page_token=response.next_page_token)

    async def list_pending(self, caller: Principal, wanted: PendingFilter, page: PageAsked) -> Page[CallView | RunView]:
        """Read the calls that wait, oldest first, then the runs that wait for tokens.

        Those of other users come without what belongs to their conversations.

        Raises:
            InvalidPageToken
        """
        request = pb.ListPendingCallsRequest(
            **_of(caller),
            **asdict(page),
            of_all_users=wanted.of_store,
            states=map(_CALL_STATES.write, wanted.states),
            tool_name=wanted.tool_name,
            conversation_id=wanted.conversation_id,
        )
        response = await translated(self._stub.ListPendingCalls(request))
        calls, runs = tuple(map(call_view, response.calls)), tuple(map(run_view, response.runs))
        return Page(items=(*calls, *runs), next_page_token=response.next_page_token)
