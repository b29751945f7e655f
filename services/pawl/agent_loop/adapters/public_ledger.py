"""The ledger service, for users."""

from __future__ import annotations

import grpc

from pawl.agent_loop.adapters import undo_reads, wire
from pawl.agent_loop.adapters.views import call_view, log_gap, logged_event, run_view
from pawl.agent_loop.app.public_values import (
    Caller,
    CallView,
    CancelCommand,
    ClientSession,
    DecisionCommand,
    EventPage,
    LeaseAnswer,
    NewMessage,
    Outcome,
    Page,
    PendingFilter,
    ProgressCommand,
    PublicCommand,
    RedriveCommand,
    Reply,
    ResolveCommand,
    ResultCommand,
    RunView,
    TopUpCommand,
)
from pawl.agent_loop.domain.limits import Limits
from pawl.agent_loop.domain.options import AskedOptions
from pawl.agent_loop.domain.run import ApprovalExpiryPolicy, RunOptions, RunState
from pawl.agent_loop.domain.undo import UndoSource
from pawl.chassis.rpc_client import translating
from pawl.event.v1 import call_pb2, run_pb2
from pawl.job.v1 import ledger_pb2, ledger_pb2_grpc

EVENTS_PER_PAGE = 256


class LedgerClient:
    """A `PublicLedger` over a channel to job-store. It makes no retries."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = ledger_pb2_grpc.LedgerServiceStub(channel)

    async def submit_message(self, caller: Caller, message: NewMessage) -> tuple[RunView, bool]:
        request = ledger_pb2.SubmitMessageRequest(
            store_id=caller.store_id,
            user_id=caller.user_id,
            request_id=message.request_id,
            conversation_id=message.conversation_id,
            conversation_must_exist=message.conversation_must_exist,
            text=message.text,
            options=options_message(message.options),
            asked_options=asked_message(message.asked),
            policy=ledger_pb2.ActiveRunPolicy.Value(f"ACTIVE_RUN_POLICY_{message.policy}"),
            user_roles=sorted(caller.roles),
            undo=wire.undo_message(message.undo) if message.undo else None,
        )
        with translating():
            response = await self._stub.SubmitMessage(request)
        return run_view(response.run), response.steered

    async def send_command(
        self, caller: Caller, run_id: str, command_id: str, command: PublicCommand, *, as_operator: bool = False
    ) -> Reply:
        request = ledger_pb2.SendCommandRequest(
            store_id=caller.store_id,
            user_id=caller.user_id,
            run_id=run_id,
            command=_command(command_id, caller, command),
            as_operator=as_operator,
        )
        if isinstance(command, ResultCommand | ProgressCommand):
            request.session_id = command.session_id
        if isinstance(command, DecisionCommand):
            request.decision_right = ledger_pb2.DecisionRight.Value(f"DECISION_RIGHT_{command.right}")
        with translating():
            response = await self._stub.SendCommand(request)
        return Reply(
            outcome=_OUTCOMES.get(response.outcome, Outcome.REFUSED),
            reason=response.reason,
            message=response.message,
            run=run_view(response.run) if response.HasField("run") else None,
        )

    async def lease_offer(
        self, caller: Caller, run_id: str, call_id: str, *, client: ClientSession, lease_seconds: float
    ) -> LeaseAnswer:
        request = ledger_pb2.LeaseOfferRequest(
            store_id=caller.store_id,
            user_id=caller.user_id,
            run_id=run_id,
            call_id=call_id,
            client_id=client.client_id,
            session_id=client.session_id,
            lease_seconds=lease_seconds,
        )
        with translating():
            response = await self._stub.LeaseOffer(request)
        call = call_view(response.call) if response.HasField("call") else None
        return LeaseAnswer(granted=response.granted, call=call, replaced=response.replaced)

    async def renew_offers(self, caller: Caller, client: ClientSession, lease_seconds: float) -> tuple[CallView, ...]:
        request = ledger_pb2.RenewOffersRequest(
            store_id=caller.store_id,
            user_id=caller.user_id,
            client_id=client.client_id,
            session_id=client.session_id,
            lease_seconds=lease_seconds,
        )
        with translating():
            response = await self._stub.RenewOffers(request)
        return tuple(call_view(call) for call in response.calls)

    async def release_offers(self, caller: Caller, client: ClientSession, run_id: str = "") -> None:
        request = ledger_pb2.ReleaseOffersRequest(
            store_id=caller.store_id,
            user_id=caller.user_id,
            client_id=client.client_id,
            session_id=client.session_id,
            run_id=run_id,
        )
        with translating():
            await self._stub.ReleaseOffers(request)

    async def get_run(self, caller: Caller, run_id: str) -> RunView:
        request = ledger_pb2.GetRunRequest(store_id=caller.store_id, user_id=caller.user_id, run_id=run_id)
        with translating():
            response = await self._stub.GetRun(request)
        return run_view(response.run)

    async def get_call(self, caller: Caller, call_id: str, *, for_approval: bool = False) -> CallView:
        request = ledger_pb2.GetCallRequest(
            store_id=caller.store_id, user_id=caller.user_id, call_id=call_id, for_approval=for_approval
        )
        with translating():
            response = await self._stub.GetCall(request)
        return call_view(response.call)

    async def list_events(self, caller: Caller, run_id: str, after_seq: int) -> EventPage:
        request = ledger_pb2.ListEventsRequest(
            store_id=caller.store_id,
            user_id=caller.user_id,
            run_id=run_id,
            after_seq=after_seq,
            events_max=EVENTS_PER_PAGE,
        )
        with translating():
            response = await self._stub.ListEvents(request)
        return EventPage(
            events=tuple(logged_event(event) for event in response.events),
            last_seq=response.last_seq,
            ended=response.ended,
            gap=log_gap(response.gap) if response.HasField("gap") else None,
        )

    async def list_runs(
        self, caller: Caller, *, page_size: int, page_token: str, conversation_id: str, states: tuple[RunState, ...]
    ) -> Page[RunView]:
        request = ledger_pb2.ListRunsRequest(
            store_id=caller.store_id,
            user_id=caller.user_id,
            page_size=page_size,
            page_token=page_token,
            conversation_id=conversation_id,
            states=[run_pb2.RunState.Value(f"RUN_STATE_{state}") for state in states],
        )
        with translating():
            response = await self._stub.ListRuns(request)
        return Page(items=tuple(run_view(run) for run in response.runs), next_page_token=response.next_page_token)

    async def list_calls(self, caller: Caller, run_id: str, *, page_size: int, page_token: str) -> Page[CallView]:
        request = ledger_pb2.ListCallsRequest(
            store_id=caller.store_id,
            user_id=caller.user_id,
            run_id=run_id,
            page_size=page_size,
            page_token=page_token,
        )
        with translating():
            response = await self._stub.ListCalls(request)
        return Page(items=tuple(call_view(call) for call in response.calls), next_page_token=response.next_page_token)

    async def undo_sources(self, caller: Caller, run_id: str) -> tuple[UndoSource, ...]:
        return await undo_reads.sources(self._stub, caller.store_id, caller.user_id, run_id)

    async def list_messages(
        self, caller: Caller, conversation_id: str, *, page_size: int, page_token: str
    ) -> Page[object]:
        request = ledger_pb2.ListMessagesRequest(
            store_id=caller.store_id,
            user_id=caller.user_id,
            conversation_id=conversation_id,
            page_size=page_size,
            page_token=page_token,
        )
        with translating():
            response = await self._stub.ListMessages(request)
        return Page(items=tuple(response.messages), next_page_token=response.next_page_token)

    async def list_attention(self, caller: Caller, *, run_id: str, page_size: int, page_token: str) -> Page[RunView]:
        request = ledger_pb2.ListAttentionRequest(
            store_id=caller.store_id, run_id=run_id, page_size=page_size, page_token=page_token
        )
        with translating():
            response = await self._stub.ListAttention(request)
        return Page(items=tuple(run_view(run) for run in response.runs), next_page_token=response.next_page_token)

    async def list_pending(
        self, caller: Caller, wanted: PendingFilter, *, page_size: int, page_token: str
    ) -> Page[CallView | RunView]:
        request = ledger_pb2.ListPendingCallsRequest(
            store_id=caller.store_id,
            user_id=caller.user_id,
            page_size=page_size,
            page_token=page_token,
            of_all_users=wanted.of_store,
            states=[call_pb2.CallState.Value(f"CALL_STATE_{state}") for state in wanted.states],
            tool_name=wanted.tool_name,
            conversation_id=wanted.conversation_id,
        )
        with translating():
            response = await self._stub.ListPendingCalls(request)
        calls, runs = tuple(map(call_view, response.calls)), tuple(map(run_view, response.runs))
        return Page(items=(*calls, *runs), next_page_token=response.next_page_token)


def options_message(options: RunOptions) -> run_pb2.RunOptions:
    """Return complete options as the contract words them."""
    message = run_pb2.RunOptions(
        model=options.model,
        instructions=options.instructions,
        tool_names=options.tool_names,
        without_tools=options.without_tools,
        tool_choice=run_pb2.ToolChoice(
            mode=run_pb2.ToolChoice.Mode.Value(f"MODE_{options.tool_choice.mode}"),
            tool_name=options.tool_choice.tool_name,
        ),
        limits=_limits(options.limits),
        round_limit_policy=run_pb2.RoundLimitPolicy.Value(f"ROUND_LIMIT_POLICY_{options.round_limit_policy}"),
        batch_order=run_pb2.BatchOrder.Value(f"BATCH_ORDER_{options.batch_order}"),
        unknown_outcome_policy=run_pb2.UnknownOutcomePolicy.Value(
            f"UNKNOWN_OUTCOME_POLICY_{options.unknown_outcome_policy}"
        ),
        token_budget_policy=run_pb2.TokenBudgetPolicy.Value(f"TOKEN_BUDGET_POLICY_{options.token_budget_policy}"),
        approvals_required=options.approvals_required,
    )
    if options.approval_expiry_policy is not ApprovalExpiryPolicy.DENY:
        # Absent is DENY, so that a request stays the same request for versions that know nothing of it.
        policy = f"APPROVAL_EXPIRY_POLICY_{options.approval_expiry_policy}"
        message.approval_expiry_policy = run_pb2.ApprovalExpiryPolicy.Value(policy)
    if options.temperature is not None:
        message.temperature = options.temperature
    if options.output_tokens_max is not None:
        message.output_tokens_max = options.output_tokens_max
    return message


def asked_message(asked: AskedOptions) -> run_pb2.RunOptions:
    """Return options as a user asked for them: what was left open is open."""
    given = {name: getattr(asked, name) for name in asked.__struct_fields__ if name != "limits"}
    message = options_message(RunOptions(**given))
    message.ClearField("limits")
    for name, value in asked.limits.items():
        setattr(message.limits, name, value)
    return message


def _limits(limits: Limits) -> run_pb2.RunLimits:
    return run_pb2.RunLimits(
        rounds_max=limits.rounds_max,
        calls_per_round_max=limits.calls_per_round_max,
        identical_calls_max=limits.identical_calls_max,
        tool_timeout_seconds=limits.tool_timeout_seconds,
        round_timeout_seconds=limits.round_timeout_seconds,
        run_timeout_seconds=limits.run_timeout_seconds,
        model_headers_timeout_seconds=limits.model_headers_timeout_seconds,
        model_idle_timeout_seconds=limits.model_idle_timeout_seconds,
        model_attempts_max=limits.model_attempts_max,
        result_bytes_per_round_max=limits.result_bytes_per_round_max,
        approval_expiry_seconds=limits.approval_expiry_seconds,
        offer_deadline_seconds=limits.offer_deadline_seconds,
        answer_timeout_seconds=limits.answer_timeout_seconds,
        context_bytes_max=limits.context_bytes_max,
        total_tokens_max=limits.total_tokens_max,
        topped_up_tokens_max=limits.topped_up_tokens_max,
        top_up_timeout_seconds=limits.top_up_timeout_seconds,
        agent_depth_max=limits.agent_depth_max,
        tool_timeout_seconds_max=limits.tool_timeout_seconds_max,
        answer_timeout_seconds_max=limits.answer_timeout_seconds_max,
    )


_OUTCOMES = {
    number: Outcome[name.removeprefix("COMMAND_OUTCOME_")]
    for name, number in ledger_pb2.CommandOutcome.items()
    if number != ledger_pb2.COMMAND_OUTCOME_UNSPECIFIED
}


def _command(command_id: str, caller: Caller, command: PublicCommand) -> ledger_pb2.Command:
    message = ledger_pb2.Command(command_id=command_id, user_id=caller.user_id)
    match command:
        case ResultCommand():
            message.tool_result.call_id = command.call_id
            message.tool_result.client_id = command.client_id
            message.tool_result.offer_epoch = command.offer_epoch
            message.tool_result.result.content_json = command.content_json
            message.tool_result.result.is_error = command.is_error
            if command.is_error:
                message.tool_result.result.error_reason = "TOOL_ERROR"
        case ProgressCommand():
            message.progress.call_id = command.call_id
            message.progress.client_id = command.client_id
            message.progress.offer_epoch = command.offer_epoch
            message.progress.message = command.message
            if command.fraction is not None:
                message.progress.fraction = command.fraction
        case DecisionCommand():
            message.decision.call_id = command.call_id
            message.decision.kind = call_pb2.DecisionKind.Value(f"DECISION_KIND_{command.kind}")
            message.decision.digest = command.digest
            message.decision.arguments_json = command.arguments_json
            message.decision.edited_digest = command.edited_digest
            message.decision.reason = command.reason
            message.decision.answer = command.answer
            message.decision.edited_preview = command.edited_preview
        case CancelCommand():
            message.cancel.cause = run_pb2.StopCause.Value(f"STOP_CAUSE_{command.cause}")
            message.cancel.reason = command.reason
        case ResolveCommand():
            message.resolve.call_id = command.call_id
            message.resolve.resolution = ledger_pb2.CallResolution.Value(f"CALL_RESOLUTION_{command.resolution}")
            message.resolve.content_json = command.content_json
        case RedriveCommand():
            message.redrive.reason = command.reason
            message.redrive.SetInParent()
        case TopUpCommand():
            message.top_up.tokens = command.tokens
    return message
