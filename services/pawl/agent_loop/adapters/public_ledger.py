"""The ledger service, for users."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import grpc
from msgspec.structs import asdict

from pawl.agent_loop.adapters import undo_reads, wire, wire_events
from pawl.agent_loop.adapters.views import call_view, lease_answer, log_gap, logged_event, reply, run_view
from pawl.agent_loop.app.public_values import (
    CallView,
    ClientSession,
    DecisionCommand,
    ErasureView,
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
from pawl.agent_loop.domain.call import Call
from pawl.agent_loop.domain.message import Message
from pawl.agent_loop.domain.undo import UndoSource
from pawl.chassis.auth import Principal
from pawl.chassis.ids import CallId, CommandId, ConversationId, RequestId, RunId
from pawl.chassis.rpc_client import translated
from pawl.chassis.translate import Exceptions
from pawl.errors import ConversationNotFound
from pawl.event.v1 import call_pb2, conversation_pb2
from pawl.job.v1 import erasure_pb2, erasure_pb2_grpc, ledger_pb2_grpc
from pawl.job.v1 import ledger_pb2 as pb
from pawl.values.call import CallState
from pawl.values.command import DecisionRight
from pawl.values.run import ENDED, RunState

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


class PublicLedgerClient:
    """A `PublicLedger` over a channel to job-store. It makes no retries.

    `run_due` is called when something that it brought may have made a run due.
    """

    def __init__(self, channel: grpc.aio.Channel, run_due: Callable[[], None] = lambda: None) -> None:
        self._stub = ledger_pb2_grpc.LedgerServiceStub(channel)
        self._erasures = erasure_pb2_grpc.ErasureServiceStub(channel)
        self._run_due = run_due

    async def submit_message(self, caller: Principal, message: NewMessage) -> tuple[RunView, bool]:
        response = await translated(self._stub.SubmitMessage(submission(caller, message)))
        self._note(run := run_view(response.run))
        return run, response.steered

    async def start_job(self, caller: Principal, job: NewJob) -> RunView:
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
        request = pb.GetConversationRequest(**_of(caller), conversation_key=key)
        try:
            response = await translated(self._stub.GetConversation(request))
        except ConversationNotFound:
            return ConversationId("")
        return ConversationId(response.conversation.conversation_id)

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
        request = pb.RenewOffersRequest(
            **_of(caller), client_id=client.client_id, session_id=client.session_id, lease_seconds=lease_seconds
        )
        response = await translated(self._stub.RenewOffers(request))
        return tuple(call_view(call) for call in response.calls)

    async def release_offers(self, caller: Principal, client: ClientSession, run_id: RunId = RunId("")) -> None:
        request = pb.ReleaseOffersRequest(
            **_of(caller), client_id=client.client_id, session_id=client.session_id, run_id=run_id
        )
        await translated(self._stub.ReleaseOffers(request))

    async def get_run(self, caller: Principal, run_id: RunId) -> RunView:
        request = pb.GetRunRequest(**_of(caller), run_id=run_id)
        response = await translated(self._stub.GetRun(request))
        tools = tuple(map(wire.OWN_TOOL.read, response.own_tools))
        return replace(run_view(response.run), brought_tools=tools) if tools else run_view(response.run)

    async def get_call(self, caller: Principal, call_id: CallId, *, for_approval: bool = False) -> CallView:
        request = pb.GetCallRequest(**_of(caller), call_id=call_id, for_approval=for_approval)
        response = await translated(self._stub.GetCall(request))
        return call_view(response.call)

    async def list_events(self, caller: Principal, run_id: RunId, after_seq: int) -> EventPage:
        request = pb.ListEventsRequest(**_of(caller), run_id=run_id, after_seq=after_seq, events_max=EVENTS_PER_PAGE)
        response = await translated(self._stub.ListEvents(request))
        return EventPage(
            events=tuple(logged_event(event) for event in response.events),
            last_seq=response.last_seq,
            ended=response.ended,
            gap=log_gap(response.gap) if response.HasField("gap") else None,
        )

    async def list_runs(self, caller: Principal, wanted: RunFilter, page: PageAsked) -> Page[RunView]:
        request = pb.ListRunsRequest(**_of(caller), **asdict(page), **_RUN_FILTER.fields(wanted))
        if wanted.running_jobs_of_store:
            request.user_id = ""
        response = await translated(self._stub.ListRuns(request))
        return Page(items=tuple(run_view(run) for run in response.runs), next_page_token=response.next_page_token)

    async def list_calls(self, caller: Principal, run_id: RunId, page: PageAsked) -> Page[CallView]:
        request = pb.ListCallsRequest(**_of(caller), run_id=run_id, **asdict(page))
        response = await translated(self._stub.ListCalls(request))
        return Page(items=tuple(call_view(call) for call in response.calls), next_page_token=response.next_page_token)

    async def undo_sources(self, caller: Principal, run_id: RunId) -> tuple[UndoSource, ...]:
        return await undo_reads.sources(self._stub, caller.store_id, caller.user_id, run_id)

    async def erase_conversation(
        self, caller: Principal, conversation_id: ConversationId, page: PageAsked
    ) -> ErasureView:
        request = erasure_pb2.EraseConversationRequest(**_of(caller), conversation_id=conversation_id, **asdict(page))
        response = await translated(self._erasures.EraseConversation(request))
        left = Page[object](items=tuple(response.left_calls), next_page_token=response.next_page_token)
        return ErasureView(erasure=response.erasure, left=left)

    async def list_messages(self, caller: Principal, conversation_id: ConversationId, page: PageAsked) -> Page[object]:
        request = pb.ListMessagesRequest(**_of(caller), conversation_id=conversation_id, **asdict(page))
        response = await translated(self._stub.ListMessages(request))
        return Page(items=tuple(response.messages), next_page_token=response.next_page_token)

    async def get_conversation(
        self, caller: Principal, conversation_id: ConversationId, *, conversation_key: str = ""
    ) -> object:
        request = pb.GetConversationRequest(
            **_of(caller), conversation_id=conversation_id, conversation_key=conversation_key
        )
        return (await translated(self._stub.GetConversation(request))).conversation

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
        request = pb.ListConversationsRequest(
            **_of(caller), **asdict(page), archived=archived, query=query, labels=labels, shared=shared
        )
        response = await translated(self._stub.ListConversations(request))
        return Page(items=tuple(response.conversations), next_page_token=response.next_page_token)

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
        request = pb.UpdateConversationRequest(
            **_of(caller),
            request_id=request_id,
            conversation_id=conversation_id,
            title=title,
            archived=archived,
            labels=None if labels is None else conversation_pb2.Labels(labels=labels),
            sharing=sharing,  # type: ignore[arg-type]  # the ledger says what it knows
            shows_arguments=shows_arguments,
        )
        return (await translated(self._stub.UpdateConversation(request))).conversation

    async def fork_conversation(
        self, caller: Principal, request_id: RequestId, conversation_id: ConversationId, *, number: int
    ) -> object:
        request = pb.ForkConversationRequest(
            **_of(caller), request_id=request_id, conversation_id=conversation_id, number=number
        )
        return (await translated(self._stub.ForkConversation(request))).conversation

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
        request = pb.ListAttentionRequest(store_id=caller.store_id, run_id=run_id, **asdict(page))
        response = await translated(self._stub.ListAttention(request))
        return Page(items=tuple(run_view(run) for run in response.runs), next_page_token=response.next_page_token)

    async def list_pending(self, caller: Principal, wanted: PendingFilter, page: PageAsked) -> Page[CallView | RunView]:
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
