"""A client for the ledger service, acting on behalf of users."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, Final

import grpc
from msgspec.structs import asdict

from pawl.agent.v1 import conversation_pb2 as public
from pawl.agent.v1 import conversation_pb2_grpc
from pawl.agent_loop.api.values import ClientSession
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.background_steps import BackgroundSteps
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.message import Message
from pawl.agent_loop.loop.rules.options import AskedOptions
from pawl.agent_loop.loop.rules.run import RunOptions
from pawl.chassis.identity.auth import Principal, for_user
from pawl.chassis.identity.roles import APPROVERS
from pawl.chassis.ids import CallId, ConversationId, RequestId, RunId, StoreId
from pawl.chassis.rpc.client import translated
from pawl.chassis.rpc.trace_context import current_traceparent
from pawl.errors import ConversationNotFound
from pawl.event.v1 import call_pb2, conversation_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job.v1 import ledger_pb2_grpc
from pawl.values import ENDED, CommandOutcome, RunState

EVENTS_PER_PAGE = 256
_CALLS_PER_READ: Final = 400
_NOT_DUE: Final = ENDED | {RunState.RUNNING}


def _user_fields(caller: Principal) -> dict[str, Any]:
    return {"store_id": caller.store_id, "user_id": caller.user_id}


def _credential_fields(caller: Principal) -> dict[str, Any]:
    return {
        "credential_id": caller.credential_id,
        "delegate_user_id": caller.delegate_user_id,
        "people": sorted(caller.people),
    }


def submission(
    caller: Principal, *, asked_options: AskedOptions, options: RunOptions, **fields: Any
) -> pb.SubmitMessageRequest:
    """Build the request that submits a user's message. `asked_options` holds the options that the user set."""
    return pb.SubmitMessageRequest(
        **_user_fields(caller),
        **_credential_fields(caller),
        user_roles=sorted(caller.roles),
        asked_options=wire.ASKED.fields(asked_options),
        options=wire.OPTIONS.fields(options),
        traceparent=current_traceparent(),
        **fields,
    )


class PublicLedger:
    """A client for job-store, acting on behalf of a user. Other users' private resources are reported as not found.

    The client does not retry, and every method may raise DependencyUnavailable. Mutations can be retried with the same
    id and payload. The client calls `run_due` whenever a request may have made a run claimable.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        run_due: Callable[[], None] = lambda: None,
        background_steps: BackgroundSteps | None = None,
    ) -> None:
        self._stub = ledger_pb2_grpc.LedgerServiceStub(channel)
        self._conversations = conversation_pb2_grpc.ConversationServiceStub(channel)
        self.channel = channel
        self._run_due = run_due
        self.background_steps = background_steps or BackgroundSteps()

    async def submit_message(self, message: pb.SubmitMessageRequest) -> pb.SubmitMessageResponse:
        """Submit a message.

        Raises:
            ConversationNotFound, ConversationBusy, QueueFull, RequestIdReused
        """
        response = await translated(self._stub.SubmitMessage(message))
        self._note(response.run)
        return response

    async def start_job(self, job: pb.StartJobRequest) -> run_pb2.Run:
        """Create a job and return it. If the request id is repeated, return the existing job.

        Raises:
            ConversationNotFound, ConversationErased, TooManyJobs, QueueFull, RequestIdReused
            ToolExists: The request sets `only_repeat`, but does not repeat an earlier request.
        """
        response = await translated(self._stub.StartJob(job))
        self._note(response.run)
        return response.run

    async def conversation_with_key(self, caller: Principal, key: str) -> ConversationId:
        """Return the id of the user's conversation that has this client key, or an empty string if there is none."""
        with suppress(ConversationNotFound):
            return ConversationId((await self.get_conversation(caller, conversation_key=key)).conversation_id)
        return ConversationId("")

    async def get_conversation(
        self, caller: Principal, conversation_id: ConversationId = ConversationId(""), *, conversation_key: str = ""
    ) -> conversation_pb2.Conversation:
        """Return one of the user's conversations or, by id, one that another user shares.

        Raises:
            ConversationNotFound, ConversationErased
        """
        request = public.GetConversationRequest(conversation_id=conversation_id, conversation_key=conversation_key)
        return (await translated(self._conversations.GetConversation(request, metadata=for_user(caller)))).conversation

    async def forward(self, caller: Principal, method: str, request: bytes) -> bytes:
        call: Any = self.channel.unary_unary(method)
        response: bytes = await translated(call(request, metadata=for_user(caller)))
        return response

    def _note(self, run: run_pb2.Run) -> None:
        """Call `run_due` if the run may be claimable now.

        If a worker is already driving the run, the ledger notifies that worker.
        """
        if run.state not in _NOT_DUE:
            self._run_due()

    async def send_command(
        self, caller: Principal, run_id: RunId, command: pb.Command, **fields: Any
    ) -> pb.SendCommandResponse:
        """Send a command and return its final outcome. `fields` are additional request fields.

        Raises:
            RequestIdReused: The id was already used with a different payload.
        """
        command.user_id = caller.user_id
        request = pb.SendCommandRequest(
            **_user_fields(caller), **_credential_fields(caller), run_id=run_id, command=command, **fields
        )
        response = await translated(self._stub.SendCommand(request))
        if CommandOutcome(response.outcome).is_taken and response.HasField("run"):
            self._note(response.run)
        return response

    async def lease_offer(
        self, caller: Principal, run_id: RunId, call_id: CallId, *, client: ClientSession, lease_seconds: float
    ) -> pb.LeaseOfferResponse:
        request = pb.LeaseOfferRequest(
            **_user_fields(caller), **asdict(client), run_id=run_id, call_id=call_id, lease_seconds=lease_seconds
        )
        return await translated(self._stub.LeaseOffer(request))

    async def renew_offers(
        self, caller: Principal, client: ClientSession, lease_seconds: float
    ) -> Sequence[call_pb2.Call]:
        request = pb.RenewOffersRequest(**_user_fields(caller), **asdict(client), lease_seconds=lease_seconds)
        return (await translated(self._stub.RenewOffers(request))).calls

    async def release_offers(self, caller: Principal, client: ClientSession, run_id: RunId = RunId("")) -> None:
        """Release the session's leases in one run or in all runs, except leases that a newer session has taken over."""
        request = pb.ReleaseOffersRequest(**_user_fields(caller), **asdict(client), run_id=run_id)
        await translated(self._stub.ReleaseOffers(request))

    async def get_run(self, caller: Principal, run_id: RunId) -> run_pb2.Run:
        """Return a run with its pending calls.

        Raises:
            RunNotFound
        """
        return (await translated(self._stub.GetRun(pb.GetRunRequest(**_user_fields(caller), run_id=run_id)))).run

    async def get_run_as_service(
        self, caller: Principal, run_id: RunId, *, with_loop_state: bool = False
    ) -> pb.GetRunResponse:
        """Return any user's run in the caller's store, including the tools that its client supplied.

        Raises:
            RunNotFound
        """
        request = pb.GetRunRequest(store_id=caller.store_id, run_id=run_id, with_loop_state=with_loop_state)
        return await translated(self._stub.GetRun(request))

    async def get_call(self, caller: Principal, call_id: CallId, *, for_approval: bool = False) -> call_pb2.Call:
        """Return a call. With `for_approval`, also return another user's call in the store if it ever needed approval.

        Raises:
            CallNotFound
        """
        request = pb.GetCallRequest(**_user_fields(caller), call_id=call_id, for_approval=for_approval)
        return (await translated(self._stub.GetCall(request))).call

    async def get_calls(
        self, caller: Principal, call_ids: Collection[CallId], *, result_bytes_max: int
    ) -> list[call_pb2.Call]:
        """Return the user's calls with these ids, without arguments, questions or results over `result_bytes_max`.

        Unknown ids are skipped.
        """
        found, ids = list[call_pb2.Call](), sorted(call_ids)
        for first in range(0, len(ids), _CALLS_PER_READ):
            part = ids[first : first + _CALLS_PER_READ]
            request = pb.GetCallsRequest(**_user_fields(caller), call_ids=part, result_bytes_max=result_bytes_max)
            found += (await translated(self._stub.GetCalls(request))).calls
        return found

    async def list_events(self, caller: Principal, run_id: RunId, after_seq: int) -> pb.ListEventsResponse:
        """Return one page of the log after `after_seq`.

        Raises:
            RunNotFound, SeqBeyondEnd
        """
        request = pb.ListEventsRequest(
            **_user_fields(caller), run_id=run_id, after_seq=after_seq, events_max=EVENTS_PER_PAGE
        )
        return await translated(self._stub.ListEvents(request))

    async def list_changes(self, caller: Principal, request: pb.ListChangesRequest) -> pb.ListChangesResponse:
        """Return a conversation, a page of its new messages, and the ids of the user's changed runs.

        Raises:
            ConversationNotFound, ConversationErased
        """
        request.store_id, request.user_id = caller.store_id, caller.user_id
        return await translated(self._stub.ListChanges(request))

    async def list_versions(self, keys: Sequence[tuple[StoreId, ConversationId]]) -> Sequence[str]:
        """Return the version of each conversation. See `ListVersions` in the proto."""
        request = pb.ListVersionsRequest(store_ids=[key[0] for key in keys], conversation_ids=[key[1] for key in keys])
        return (await translated(self._stub.ListVersions(request))).versions

    async def list_jobs(self, caller: Principal, request: pb.ListJobsRequest) -> pb.ListJobsResponse:
        """Return the user's jobs, or the store's running jobs.

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
        """Import a conversation with its messages and settled calls.

        Raises:
            ConversationExists, RequestIdReused
        """
        request = pb.ImportConversationRequest(
            **_user_fields(caller),
            request_id=request_id,
            messages=map(wire.MESSAGE.write, messages),
            calls=map(wire.CALL.write, calls),
            title=title,
            conversation_key=conversation_key,
        )
        return (await translated(self._stub.ImportConversation(request))).conversation

    async def list_pending(self, caller: Principal, request: pb.ListPendingCallsRequest) -> pb.ListPendingCallsResponse:
        """Return the calls that are waiting for a user, then the runs that need tokens, each oldest first.

        Calls of other users are returned without the contents of their conversations.

        Raises:
            InvalidPageToken
        """
        request.store_id, request.user_id = caller.store_id, caller.user_id
        request.approves = not APPROVERS.isdisjoint(caller.roles)
        return await translated(self._stub.ListPendingCalls(request))
