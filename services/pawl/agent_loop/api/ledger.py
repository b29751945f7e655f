"""The ledger service, for users."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import grpc
from msgspec.structs import asdict

from pawl.agent.v1 import conversation_pb2 as public
from pawl.agent.v1 import conversation_pb2_grpc
from pawl.agent_loop.api.values import ClientSession
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.message import Message
from pawl.agent_loop.loop.rules.options import AskedOptions
from pawl.agent_loop.loop.rules.run import RunOptions
from pawl.chassis.identity.auth import Principal, for_user
from pawl.chassis.ids import CallId, ConversationId, RequestId, RunId
from pawl.chassis.rpc.client import translated
from pawl.errors import ConversationNotFound
from pawl.event.v1 import call_pb2, conversation_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job.v1 import ledger_pb2_grpc
from pawl.values import ENDED, CommandOutcome, RunState

EVENTS_PER_PAGE = 256
_NOT_DUE: Final = ENDED | {RunState.RUNNING}


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


def submission(
    caller: Principal, *, asked_options: AskedOptions, options: RunOptions, **fields: Any
) -> pb.SubmitMessageRequest:
    """Return the request that brings a message of a user; `asked_options` are what the user said of the options."""
    return pb.SubmitMessageRequest(
        **_of(caller),
        **_with(caller),
        user_roles=sorted(caller.roles),
        asked_options=wire.ASKED.fields(asked_options),
        options=wire.OPTIONS.fields(options),
        **fields,
    )


class PublicLedger:
    """The ledger, for a user, over a channel to job-store. A thing of another user is not found.

    Every method may raise DependencyUnavailable and makes no retries; mutations with the same id and payload can be
    sent again. `run_due` is called when something that it brought may have made a run due.
    """

    def __init__(self, channel: grpc.aio.Channel, run_due: Callable[[], None] = lambda: None) -> None:
        self._stub = ledger_pb2_grpc.LedgerServiceStub(channel)
        self._conversations = conversation_pb2_grpc.ConversationServiceStub(channel)
        self.channel = channel
        self._run_due = run_due

    async def submit_message(self, message: pb.SubmitMessageRequest) -> pb.SubmitMessageResponse:
        """Bring a message.

        Raises:
            ConversationNotFound, ConversationBusy, QueueFull, RequestIdReused.
        """
        response = await translated(self._stub.SubmitMessage(message))
        self._note(response.run)
        return response

    async def start_job(self, job: pb.StartJobRequest) -> run_pb2.Run:
        """Create a job and return it; with the request id of an earlier one return that.

        Raises:
            ConversationNotFound, ConversationErased, TooManyJobs, QueueFull, RequestIdReused,
                ToolExists (see `only_repeat`)
        """
        response = await translated(self._stub.StartJob(job))
        self._note(response.run)
        return response.run

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
        call: Any = self.channel.unary_unary(method)
        response: bytes = await translated(call(request, metadata=for_user(caller)))
        return response

    def _note(self, run: run_pb2.Run) -> None:
        """See that a run is claimed, if it may be due: the worker of one that is being driven is notified."""
        if run.state not in _NOT_DUE:
            self._run_due()

    async def send_command(
        self, caller: Principal, run_id: RunId, command: pb.Command, **fields: Any
    ) -> pb.SendCommandResponse:
        """Send a command and return the final word on it; `fields` are those of the request.

        Raises:
            RequestIdReused: the id came before with another payload.
        """
        command.user_id = caller.user_id
        request = pb.SendCommandRequest(**_of(caller), **_with(caller), run_id=run_id, command=command, **fields)
        response = await translated(self._stub.SendCommand(request))
        if CommandOutcome(response.outcome).is_taken and response.HasField("run"):
            self._note(response.run)
        return response

    async def lease_offer(
        self, caller: Principal, run_id: RunId, call_id: CallId, *, client: ClientSession, lease_seconds: float
    ) -> pb.LeaseOfferResponse:
        """Ask for an offered call."""
        request = pb.LeaseOfferRequest(
            **_of(caller), **asdict(client), run_id=run_id, call_id=call_id, lease_seconds=lease_seconds
        )
        return await translated(self._stub.LeaseOffer(request))

    async def renew_offers(
        self, caller: Principal, client: ClientSession, lease_seconds: float
    ) -> Sequence[call_pb2.Call]:
        """Renew all offers that the session holds and return them."""
        request = pb.RenewOffersRequest(**_of(caller), **asdict(client), lease_seconds=lease_seconds)
        return (await translated(self._stub.RenewOffers(request))).calls

    async def release_offers(self, caller: Principal, client: ClientSession, run_id: RunId = RunId("")) -> None:
        """Give back the session's offers, of one run or of all; not what another of the client has taken over."""
        request = pb.ReleaseOffersRequest(**_of(caller), **asdict(client), run_id=run_id)
        await translated(self._stub.ReleaseOffers(request))

    async def get_run(self, caller: Principal, run_id: RunId) -> run_pb2.Run:
        """Read a run with its pending calls.

        Raises:
            RunNotFound
        """
        return (await translated(self._stub.GetRun(pb.GetRunRequest(**_of(caller), run_id=run_id)))).run

    async def get_run_as_service(self, caller: Principal, run_id: RunId) -> pb.GetRunResponse:
        """Read a run of any user of the caller's store, with the tools that came with it.

        Raises:
            RunNotFound
        """
        return await translated(self._stub.GetRun(pb.GetRunRequest(store_id=caller.store_id, run_id=run_id)))

    async def get_call(self, caller: Principal, call_id: CallId, *, for_approval: bool = False) -> call_pb2.Call:
        """Read a call; with `for_approval` also one of another user of the store that awaits its approval, or did.

        Raises:
            CallNotFound
        """
        request = pb.GetCallRequest(**_of(caller), call_id=call_id, for_approval=for_approval)
        return (await translated(self._stub.GetCall(request))).call

    async def list_events(self, caller: Principal, run_id: RunId, after_seq: int) -> pb.ListEventsResponse:
        """Read the log after `after_seq`, as far as one page goes.

        Raises:
            RunNotFound, SeqBeyondEnd
        """
        request = pb.ListEventsRequest(**_of(caller), run_id=run_id, after_seq=after_seq, events_max=EVENTS_PER_PAGE)
        return await translated(self._stub.ListEvents(request))

    async def list_jobs(self, caller: Principal, request: pb.ListJobsRequest) -> pb.ListJobsResponse:
        """Read the user's jobs, or the running ones of the store.

        Raises:
            InvalidPageToken
        """
        request.store_id = caller.store_id
        request.user_id = "" if request.running_jobs_of_store else caller.user_id
        return await translated(self._stub.ListJobs(request))

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

    async def list_pending(self, caller: Principal, request: pb.ListPendingCallsRequest) -> pb.ListPendingCallsResponse:
        """Read the calls that wait, oldest first, then the runs that wait for tokens.

        Those of other users come without what belongs to their conversations.

        Raises:
            InvalidPageToken
        """
        request.store_id, request.user_id = caller.store_id, caller.user_id
        return await translated(self._stub.ListPendingCalls(request))
