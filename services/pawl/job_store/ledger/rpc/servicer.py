"""Servicers for pawl.job.v1.LedgerService, and for the pawl.agent.v1 lists that agent-loop forwards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import astuple
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from pawl.agent.v1 import agent_pb2, operator_pb2
from pawl.chassis.identity.auth import require_user
from pawl.chassis.ids import CallId, ConversationId, RunId, RunKey, StoreId, UserId, check_id
from pawl.chassis.process import logs
from pawl.chassis.rpc.kinds import Context
from pawl.errors import InvalidField, InvalidPageToken, RunNotFound, SeqBeyondEnd
from pawl.event.v1 import run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job.v1 import ledger_pb2_grpc
from pawl.job_store.ledger.group_commit import Lane
from pawl.job_store.ledger.ledger import Ledger
from pawl.job_store.ledger.pages import Id, Large, Small, make_token, next_token, page_size, read_token
from pawl.job_store.ledger.reading import Loaded, PendingFilter, RunFilter, RunView
from pawl.job_store.ledger.rpc import filters, job_messages, messages, operations, own_tools, parts
from pawl.job_store.ledger.rpc.fields import fingerprint
from pawl.job_store.ledger.rpc.output_pauses import CountEvents, events_with_output, pause_seconds
from pawl.job_store.ledger.rules.conversations import check_title, made_title
from pawl.job_store.ledger.rules.imports import ImportConversation
from pawl.job_store.ledger.rules.rows import ConversationKey
from pawl.job_store.ledger.rules.unit_of_work import Operation
from pawl.job_store.ledger.rules.waiting import explain, explain_all
from pawl.values import CommandOutcome

T = TypeVar("T")

RUNS_PER_CLAIM_MAX: Final = 64
EVENTS_DEFAULT: Final = 256
EVENTS_MAX: Final = 1000
CHANGED_MESSAGES_MAX: Final = 200
VERSIONS_MAX: Final = 1000
CALLS_READ_MAX: Final = 400
_RESULT_BYTES_MAX: Final = 2 * 1024 * 1024
_PENDING_RUNS: Final = "ListPendingCalls, runs"
_BEFORE_ALL_RUNS: Final = (datetime(1970, 1, 1, tzinfo=UTC), "0")
# If the calls of a page are larger than this, no runs are added to it.
_PAGE_BYTES_WITH_RUNS_MAX: Final = 1024 * 1024

_log = logs.get_logger(__name__)


class LedgerServicer(ledger_pb2_grpc.LedgerServiceServicer):
    def __init__(self, ledger: Ledger, count_events: CountEvents | None = None) -> None:
        self._ledger = ledger
        self._count_events = count_events

    async def SubmitMessage(self, request: pb.SubmitMessageRequest, context: Context) -> pb.SubmitMessageResponse:
        operation = operations.submit(request, self._ledger.limits_of)
        in_background = bool(operation.program)
        submitted = await self._write(operation, request.ByteSize(), request.store_id, in_background=in_background)
        run = messages.run(submitted.run)
        run.queue_position = submitted.queue_position
        return pb.SubmitMessageResponse(run=run, steered=submitted.steered)

    async def StartJob(self, request: pb.StartJobRequest, context: Context) -> pb.StartJobResponse:
        operation = job_messages.start(request, self._ledger.limits_of)
        submitted = await self._write(operation, request.ByteSize(), request.message.store_id)
        return pb.StartJobResponse(run=messages.run(submitted.run))

    async def _write(
        self, operation: Operation[T], size_bytes: int, store_id: str, *, in_background: bool = False
    ) -> T:
        store, lane = StoreId(store_id), Lane.PEOPLE
        return await self._ledger.group_commit.run(
            operation, size_bytes=size_bytes, store_id=store, lane=lane, in_background=in_background
        )

    async def ClaimRuns(self, request: pb.ClaimRunsRequest, context: Context) -> pb.ClaimRunsResponse:
        worker_id = check_id(request.worker_id, "worker_id")
        if not 1 <= request.runs_max <= RUNS_PER_CLAIM_MAX:
            raise InvalidField(
                f"runs_max must be between 1 and {RUNS_PER_CLAIM_MAX}, got {request.runs_max}", field="runs_max"
            )
        with self._ledger.meter.claim_seconds.time():
            claimed = await self._ledger.leases.claim(
                worker_id,
                runs_max=request.runs_max,
                lease_seconds=operations.lease_seconds(request.lease_seconds),
                background_runs_max=request.background_runs_max,
            )
        self._ledger.meter.claimed(claimed)
        wait_seconds = await self._ledger.leases.wait_seconds() if request.idle and not claimed else None
        response = pb.ClaimRunsResponse(runs=map(messages.CLAIMED.fields, claimed), wait_seconds=wait_seconds)
        loaded, size = await self._ledger.load_claimed(claimed), 0
        for run in response.runs:
            key = operations.run_key(run)
            if key in loaded and size <= parts.PART_BYTES_MAX:
                size += _add_if_small(run, loaded[key])
        return response

    async def LoadRun(self, request: pb.LoadRunRequest, context: Context) -> AsyncIterator[pb.LoadRunResponse]:
        has_known = request.HasField("known") and not request.last_number
        known = messages.PREFIX.read(request.known) if has_known else None
        key, last_number = operations.run_key(request), request.last_number
        loaded = await self._ledger.reads.load(key, request.epoch, known, last_number)
        for part in parts.of_run(loaded):
            yield part

    async def RenewLeases(self, request: pb.RenewLeasesRequest, context: Context) -> pb.RenewLeasesResponse:
        renewed = await self._ledger.leases.renew(
            check_id(request.worker_id, "worker_id"),
            lease_seconds=operations.lease_seconds(request.lease_seconds),
        )
        return pb.RenewLeasesResponse(
            runs=map(messages.CLAIMED.fields, renewed.runs),
            runs_with_commands=map(messages.CLAIMED.fields, renewed.with_commands),
            now=messages.timestamp(renewed.time),
        )

    async def ReleaseWorker(self, request: pb.ReleaseWorkerRequest, context: Context) -> pb.ReleaseWorkerResponse:
        released = await self._ledger.release_worker(check_id(request.worker_id, "worker_id"))
        return pb.ReleaseWorkerResponse(released_count=released)

    async def ReportCrash(self, request: pb.ReportCrashRequest, context: Context) -> pb.ReportCrashResponse:
        quarantined = await self._ledger.report_crash(operations.run_key(request), request.epoch)
        return pb.ReportCrashResponse(quarantined=quarantined)

    async def CommitRun(self, request: pb.CommitRunRequest, context: Context) -> pb.CommitRunResponse:
        store_id, events = StoreId(request.store_id), events_with_output(request)
        committed = await self._ledger.group_commit.run(
            operations.commit(request, self._ledger.limits_of),
            size_bytes=request.ByteSize(),
            store_id=store_id,
            in_background=request.in_background,
        )
        response = messages.COMMITTED.write(committed)
        per_second = self._ledger.limits_of(store_id).events_per_second
        if events and per_second and self._count_events is not None:
            response.output_pause_seconds = await pause_seconds(self._count_events, store_id, per_second, events)
        return response

    async def SendCommand(self, request: pb.SendCommandRequest, context: Context) -> pb.SendCommandResponse:
        size_bytes = request.ByteSize()
        receipt = await self._write(operations.send(request, self._ledger.limits_of), size_bytes, request.store_id)
        response = pb.SendCommandResponse(
            outcome=receipt.outcome.value,  # type: ignore[arg-type]  # the same numbers
            reason=receipt.reason,
            message=receipt.message,
        )
        if receipt.run is not None and (request.as_operator or receipt.run.user_id == request.user_id):
            view = RunView(run=receipt.run, pending=receipt.pending)
            response.run.CopyFrom(_with_calls(messages.run(receipt.run), view))
        elif receipt.run is not None:
            response.run.CopyFrom(messages.run_for_approver(receipt.run))
        return response

    async def StopJob(self, request: pb.StopJobRequest, context: Context) -> pb.StopJobResponse:
        cancel = pb.CancelCommand(cause=run_pb2.STOP_CAUSE_MODEL)
        sent = pb.SendCommandRequest(
            store_id=request.store_id,
            user_id=request.user_id,
            run_id=request.run_id,
            command=pb.Command(command_id=request.command_id, cancel=cancel),
        )
        conversation_id = check_id(request.conversation_id, "conversation_id")
        started_by = RunId(check_id(request.caller_run_id, "caller_run_id", optional=True))
        operation = operations.send(sent, self._ledger.limits_of)
        operation = replace(operation, reports_to=conversation_id, started_by=started_by)
        receipt = await self._write(operation, sent.ByteSize(), sent.store_id)
        if receipt.run is None:
            raise RunNotFound
        stopped = receipt.outcome in {CommandOutcome.ACCEPTED, CommandOutcome.DUPLICATE}
        return pb.StopJobResponse(run=messages.run(receipt.run), stopped=stopped)

    async def NoteCompletion(self, request: pb.NoteCompletionRequest, context: Context) -> pb.NoteCompletionResponse:
        await self._write(operations.note_completion(request), request.ByteSize(), request.store_id)
        return pb.NoteCompletionResponse()

    async def ListCommands(
        self, request: pb.ListCommandsRequest, context: Context
    ) -> AsyncIterator[pb.ListCommandsResponse]:
        rows, notices = await self._ledger.reads.commands(operations.run_key(request))
        for part in parts.of_inbox(rows, notices):
            yield part

    async def LeaseOffer(self, request: pb.LeaseOfferRequest, context: Context) -> pb.LeaseOfferResponse:
        leased = await self._write(operations.lease_offer(request), request.ByteSize(), request.store_id)
        response = pb.LeaseOfferResponse(granted=leased.granted, replaced=leased.replaced)
        if leased.call is not None:
            response.call.CopyFrom(messages.call(leased.call))
        return response

    async def RenewOffers(self, request: pb.RenewOffersRequest, context: Context) -> pb.RenewOffersResponse:
        held = await self._ledger.renew_offers(
            check_id(request.store_id, "store_id"),
            check_id(request.user_id, "user_id"),
            check_id(request.client_id, "client_id"),
            check_id(request.session_id, "session_id"),
            lease_seconds=operations.lease_seconds(request.lease_seconds),
        )
        return pb.RenewOffersResponse(calls=map(messages.call, held))

    async def ReleaseOffers(self, request: pb.ReleaseOffersRequest, context: Context) -> pb.ReleaseOffersResponse:
        released = await self._ledger.release_offers(
            check_id(request.store_id, "store_id"),
            check_id(request.user_id, "user_id"),
            check_id(request.client_id, "client_id"),
            check_id(request.session_id, "session_id"),
            check_id(request.run_id, "run_id", optional=True),
        )
        return pb.ReleaseOffersResponse(released_count=released)

    async def GetRun(self, request: pb.GetRunRequest, context: Context) -> pb.GetRunResponse:
        reader = _reader(request)
        view = await self._ledger.reads.run(operations.run_key(request), reader)
        waiting = explain_all(view.situations, self._ledger.limits_of(view.run.store_id).slots)
        write = partial(messages.run, whole=True) if reader else messages.run_for_service
        run = messages.run_in(view.situations[0], waiting, write)
        response = pb.GetRunResponse(run=_with_calls(run, view))
        if not reader:
            response.own_tools.extend(own_tools.of_run(view.run))
            if request.with_loop_state:
                response.loop_state = await self._ledger.reads.loop_state(view.run.key)
        return response

    async def ListJobs(self, request: pb.ListJobsRequest, context: Context) -> pb.ListJobsResponse:
        store_id = check_id(request.store_id, "store_id")
        user_id = check_id(request.user_id, "user_id", optional=request.running_jobs_of_store)
        runs, token = await _list_runs(self._ledger, store_id, user_id, filters.job_filter(request), request)
        return pb.ListJobsResponse(runs=runs, next_page_token=token)

    async def GetCall(self, request: pb.GetCallRequest, context: Context) -> pb.GetCallResponse:
        key = operations.call_key(request)
        row = await self._ledger.reads.call(key, _reader(request), for_approval=request.for_approval)
        return pb.GetCallResponse(call=messages.call(row))

    async def GetCalls(self, request: pb.GetCallsRequest, context: Context) -> pb.GetCallsResponse:
        if len(request.call_ids) > CALLS_READ_MAX:
            problem = f"call_ids must have at most {CALLS_READ_MAX} ids, got {len(request.call_ids)}"
            raise InvalidField(problem, field="call_ids")
        store_id, user_id = check_id(request.store_id, "store_id"), check_id(request.user_id, "user_id")
        call_ids = [CallId(check_id(call_id, "call_ids")) for call_id in request.call_ids]
        bytes_max = min(request.result_bytes_max, _RESULT_BYTES_MAX)
        rows = await self._ledger.reads.call_heads(store_id, call_ids, user_id, result_bytes_max=bytes_max)
        return pb.GetCallsResponse(calls=[messages.call(row, omitted_bytes=omitted) for row, omitted in rows])

    async def ListPendingCalls(
        self, request: pb.ListPendingCallsRequest, context: Context
    ) -> pb.ListPendingCallsResponse:
        store_id = check_id(request.store_id, "store_id")
        check_id(request.user_id, "user_id")
        wanted, rows_max = filters.pending_filter(request), page_size(request.page_size)
        selection = (
            request.store_id,
            wanted.user_id,
            tuple(map(int, wanted.states)),
            wanted.tool_name,
            wanted.conversation_id,
        )
        try:
            after = read_token(request.page_token, "ListPendingCalls", selection, tuple[datetime, Id])
        except InvalidPageToken:
            after_run = read_token(request.page_token, _PENDING_RUNS, selection, tuple[datetime, Id])
            return await self._pending_runs(request, wanted, selection, after=after_run, rows_max=rows_max)
        page = await self._ledger.reads.pending(store_id, wanted, after=after, rows_max=rows_max)
        shown = [messages.call_for(row, request.user_id) for row in page.rows]
        token = next_token("ListPendingCalls", selection, page, lambda call: (call.create_time, call.call_id))
        response = pb.ListPendingCallsResponse(calls=shown, next_page_token=token)
        if token:
            return response
        room = rows_max - len(shown) if response.ByteSize() < _PAGE_BYTES_WITH_RUNS_MAX else 0
        runs = await self._pending_runs(request, wanted, selection, after=None, rows_max=max(1, room))
        if room:
            response.MergeFrom(runs)
        elif runs.runs:
            response.next_page_token = make_token(_PENDING_RUNS, selection, _BEFORE_ALL_RUNS)
        return response

    async def _pending_runs(
        self,
        request: pb.ListPendingCallsRequest,
        wanted: PendingFilter,
        selection: tuple[object, ...],
        *,
        after: tuple[datetime, str] | None,
        rows_max: int,
    ) -> pb.ListPendingCallsResponse:
        store_id = StoreId(request.store_id)
        page = await self._ledger.reads.short_of_tokens(store_id, wanted, after=after, rows_max=rows_max)
        shown = [messages.run_short_of_tokens(row, request.user_id) for row in page.rows]
        token = next_token(_PENDING_RUNS, selection, page, lambda run: (run.create_time, run.run_id))
        return pb.ListPendingCallsResponse(runs=shown, next_page_token=token)

    async def GetConversation(self, request: pb.GetConversationRequest, context: Context) -> pb.GetConversationResponse:
        store_id, user_id = check_id(request.store_id, "store_id"), check_id(request.user_id, "user_id")
        conversation_id = check_id(request.conversation_id, "conversation_id")
        row = await self._ledger.conversations.by_id(store_id, user_id, conversation_id)
        return pb.GetConversationResponse(conversation=messages.conversation_for(row, user_id))

    async def ListChanges(self, request: pb.ListChangesRequest, context: Context) -> pb.ListChangesResponse:
        store_id, user_id = check_id(request.store_id, "store_id"), check_id(request.user_id, "user_id")
        conversation_id = check_id(request.conversation_id, "conversation_id")
        row = await self._ledger.conversations.by_id(store_id, user_id, conversation_id)
        since = messages.optional_moment(request, "since_time")
        # Must come first, so that no later change is missed.
        runs = await self._ledger.reads.changed_runs(row, user_id, since=since, all_open=request.all_open)
        after = max(request.after_number, row.last_number - request.messages_max)
        page = await self._ledger.reads.messages(
            store_id, user_id, conversation_id, after=after, rows_max=CHANGED_MESSAGES_MAX
        )
        return pb.ListChangesResponse(
            conversation=messages.conversation_for(row, user_id),
            messages=(messages.message_for(each, page.user_id, user_id) for each in page.rows),
            has_more=page.has_more,
            run_ids=runs.versions.keys(),
            versions=runs.versions.values(),
            conversation_ids=runs.conversation_ids,
            time=messages.timestamp(runs.time),
            active_run_id=next((run_id for run_id in runs.open_run_ids if run_id == row.active_run_id), ""),
        )

    async def ListVersions(self, request: pb.ListVersionsRequest, context: Context) -> pb.ListVersionsResponse:
        if len(request.store_ids) != len(request.conversation_ids):
            raise InvalidField("store_ids must have one entry for each of conversation_ids", field="store_ids")
        if len(request.store_ids) > VERSIONS_MAX:
            raise InvalidField(
                f"store_ids must have at most {VERSIONS_MAX} entries, got {len(request.store_ids)}", field="store_ids"
            )
        keys = [
            ConversationKey(StoreId(store_id), ConversationId(conversation_id))
            for store_id, conversation_id in zip(request.store_ids, request.conversation_ids, strict=True)
        ]
        return pb.ListVersionsResponse(versions=await self._ledger.reads.versions(keys))

    async def ImportConversation(
        self, request: pb.ImportConversationRequest, context: Context
    ) -> pb.ImportConversationResponse:
        size_bytes = request.ByteSize()
        operation = replace(_import(request), is_full=self._ledger.limits_of(StoreId(request.store_id)).is_full)
        made = await self._write(operation, size_bytes, request.store_id)
        return pb.ImportConversationResponse(conversation=messages.CONVERSATION.write(made))

    async def ListEvents(self, request: pb.ListEventsRequest, context: Context) -> pb.ListEventsResponse:
        if request.events_max > EVENTS_MAX:
            raise InvalidField(f"events_max must be at most {EVENTS_MAX}, got {request.events_max}", field="events_max")
        part = await self._ledger.reads.events(
            operations.run_key(request),
            _reader(request),
            after_seq=request.after_seq,
            events_max=request.events_max or EVENTS_DEFAULT,
        )
        if request.after_seq > part.last_seq:
            raise SeqBeyondEnd(f"the log ends at seq {part.last_seq}", last_seq=part.last_seq)
        return pb.ListEventsResponse(
            events=part.payloads,
            last_seq=part.last_seq,
            ended=part.ended,
            gap=None if part.gap is None else messages.gap(part.gap),
        )


class ListServicer:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def ListRuns(self, request: agent_pb2.ListRunsRequest, context: Context) -> agent_pb2.ListRunsResponse:
        user, wanted = require_user(), filters.run_filter(request)
        runs, token = await _list_runs(self._ledger, user.store_id, user.user_id, wanted, request)
        return agent_pb2.ListRunsResponse(runs=runs, next_page_token=token)

    async def ListCalls(self, request: agent_pb2.ListCallsRequest, context: Context) -> agent_pb2.ListCallsResponse:
        user, run_id = require_user(), check_id(request.run_id, "run_id")
        selection = (user.store_id, user.user_id, run_id)
        page = await self._ledger.reads.calls(
            RunKey(user.store_id, run_id),
            user.user_id,
            after=read_token(request.page_token, "ListCalls", selection, tuple[Small, Small, Id]),
            rows_max=page_size(request.page_size),
        )
        token = next_token("ListCalls", selection, page, lambda call: (call.round, call.index, call.call_id))
        shown = (messages.call_shown_to(row, user.user_id) for row in page.rows)
        return agent_pb2.ListCallsResponse(calls=shown, next_page_token=token)

    async def ListMessages(
        self, request: agent_pb2.ListMessagesRequest, context: Context
    ) -> agent_pb2.ListMessagesResponse:
        user, conversation_id = require_user(), check_id(request.conversation_id, "conversation_id")
        selection = (user.store_id, user.user_id, conversation_id)
        page = await self._ledger.reads.messages(
            user.store_id,
            user.user_id,
            conversation_id,
            after=(read_token(request.page_token, "ListMessages", selection, tuple[Large]) or (0,))[0],
            rows_max=page_size(request.page_size),
        )
        token = next_token("ListMessages", selection, page, lambda message: (message.number,))
        shown = (messages.message_for(row, page.user_id, user.user_id) for row in page.rows)
        return agent_pb2.ListMessagesResponse(messages=shown, next_page_token=token)

    async def ListAttention(
        self, request: operator_pb2.ListAttentionRequest, context: Context
    ) -> operator_pb2.ListAttentionResponse:
        user, run_id = require_user(), check_id(request.run_id, "run_id", optional=True)
        selection = (user.store_id, run_id)
        page = await self._ledger.attention_repository.listed(
            user.store_id,
            run_id=run_id,
            after=read_token(request.page_token, "ListAttention", selection, tuple[datetime, Id]),
            rows_max=page_size(request.page_size),
        )
        response = operator_pb2.ListAttentionResponse(runs=map(_run_in_need, page.rows))
        if page.has_more and (last := page.rows[-1].run).attention is not None:
            position = (last.attention.since_time, last.run_id)
            response.next_page_token = make_token("ListAttention", selection, position)
        return response


async def _list_runs(
    ledger: Ledger, store_id: StoreId, user_id: UserId, wanted: RunFilter, request: Any
) -> tuple[Iterable[run_pb2.Run], str]:
    selection = (store_id, user_id, *astuple(wanted))
    page = await ledger.reads.runs(
        store_id,
        user_id,
        wanted,
        after=read_token(request.page_token, "ListRuns", selection, tuple[datetime, Id]),
        rows_max=page_size(request.page_size),
    )
    token = next_token("ListRuns", selection, page, lambda each: (each.run.create_time, each.run.run_id))
    slots = ledger.limits_of(store_id).slots
    return (messages.run_in(each, explain(each, slots)) for each in page.rows), token


def _add_if_small(run: pb.ClaimedRun, loaded: Loaded) -> int:
    """Add a loaded run to its claim if it can be read and fits in one part. Return the part's size, or 0."""
    try:
        part, *more = parts.of_run(loaded)
    except Exception as error:  # noqa: BLE001  # the runs are claimed already, and LoadRun will report why
        _log.info("run.not_loaded", run=run.run_id, error=type(error).__name__)
        return 0
    if more:
        return 0
    run.loaded.CopyFrom(part)
    return part.ByteSize()


def _import(request: pb.ImportConversationRequest) -> ImportConversation:
    """Return the operation for an ImportConversation request. Modifies the request, which must not be used again."""
    if not request.messages:
        raise InvalidField("messages must not be empty", field="messages")
    unnamed = pb.ImportConversationRequest()
    unnamed.CopyFrom(request)
    unnamed.ClearField("request_id")
    for message in unnamed.messages:
        message.ClearField("call_ids")
    for call in unnamed.calls:
        call.ClearField("call_id")
    return ImportConversation(
        store_id=check_id(request.store_id, "store_id"),
        user_id=check_id(request.user_id, "user_id"),
        request_id=check_id(request.request_id, "request_id", optional=True),
        fingerprint=fingerprint(unnamed),
        key_hash=operations.key_hash_of(request),
        title=check_title(request.title),
        made_title=made_title(request.messages[0].text),
        messages=tuple(map(operations.new_message, request.messages)),
        calls=tuple(map(operations.call_change, request.calls)),
    )


def _reader(request: Any) -> UserId:
    """Return the user who is reading, or an empty id if a service is reading."""
    return check_id(request.user_id, "user_id", optional=True)


def _with_calls(run: run_pb2.Run, view: RunView) -> run_pb2.Run:
    if view.waits is not None:
        run.waits[:] = view.waits  # type: ignore[assignment]  # the same numbers
    run.pending_calls.extend(map(messages.call, view.pending))
    run.active_calls.extend(map(messages.call, view.active))
    return run


def _run_in_need(view: RunView) -> operator_pb2.RunInNeed:
    run = messages.run(view.run)
    return operator_pb2.RunInNeed(
        run_id=run.run_id,
        user_id=run.user_id,
        conversation_id=run.conversation_id,
        attention=run.attention,
        crash_count=run.crash_count,
        round=run.round,
        stop_cause=run.stop_cause,
        calls=map(messages.call, view.pending),
    )
