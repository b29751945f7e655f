"""Implements pawl.agent.v1.AgentService by translating requests and responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Final

from google.protobuf.message import Message

from pawl.agent.v1 import agent_pb2 as pb
from pawl.agent.v1 import session_pb2, steps_pb2, undo_pb2, whoami_pb2
from pawl.agent_loop.api import convert
from pawl.agent_loop.api.inbox import Inbox
from pawl.agent_loop.api.messages import Messages
from pawl.agent_loop.api.pending import Pending
from pawl.agent_loop.api.replies import decided, receipt, run_after
from pawl.agent_loop.api.rounds import Rounds
from pawl.agent_loop.api.session import Sessions
from pawl.agent_loop.api.watch import RunSteps, Watches
from pawl.agent_loop.api.whoami import Introductions
from pawl.agent_loop.jobs import convert as convert_jobs
from pawl.agent_loop.jobs.rpc import JobServicer
from pawl.agent_loop.loop.rules import checks
from pawl.agent_loop.undo.undoing import Undoing
from pawl.chassis.identity.auth import current_principal, require_user
from pawl.chassis.ids import CallId, check_id
from pawl.chassis.rpc.kinds import Context
from pawl.errors import InvalidField, RunNotFound, SlowConsumer
from pawl.event.v1 import gap_pb2
from pawl.job.v1.ledger_pb2 import EncodedEvents
from pawl.server.rpc.interceptor import count_as_stream

HEARTBEAT_SECONDS: Final = 15.0
# A client that does not read for this long is disconnected.
WRITE_SECONDS_MAX: Final = 60.0


class AgentServicer:
    """Implements AgentService. The credential determines store and user.

    The remaining methods are forwarded to job-store.
    """

    def __init__(
        self,
        *,
        messages: Messages,
        inbox: Inbox,
        jobs: JobServicer,
        pending: Pending,
        watches: Watches,
        sessions: Sessions,
        undoing: Undoing,
        steps: RunSteps,
        rounds: Rounds,
        introductions: Introductions,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        self._messages = messages
        self._inbox = inbox
        self._jobs = jobs
        self._pending = pending
        self._watches = watches
        self._sessions = sessions
        self._undoing = undoing
        self._steps = steps
        self._rounds = rounds
        self._introductions = introductions
        self._heartbeat_seconds = heartbeat_seconds

    async def StartRun(self, request: pb.StartRunRequest, context: Context) -> pb.StartRunResponse:
        request_id = convert.request_id(request)
        check_id(request.conversation_id, "conversation_id", optional=True)
        run = await self._messages.start(require_user(), request_id, request)
        return pb.StartRunResponse(run=convert.run_message(run))

    async def SendMessage(self, request: pb.SendMessageRequest, context: Context) -> pb.SendMessageResponse:
        request_id = convert.request_id(request)
        check_id(request.conversation_id, "conversation_id")
        sent = await self._messages.send(require_user(), request_id, request)
        return pb.SendMessageResponse(run=convert.run_message(sent.run), steered=sent.steered)

    # Streaming methods write directly, so that a blocked write to a client that does not read can be cancelled.
    async def Session(self, request_iterator: AsyncIterator[session_pb2.SessionRequest], context: Context) -> None:
        await self._sessions.serve(require_user(), request_iterator, partial(write, context))

    async def WatchRun(self, request: pb.WatchRunRequest, context: Context) -> None:
        run_id = convert.run_id(request)
        after_seq = checks.seq(request.after_seq, "after_seq")
        async with (
            self._watches.open(require_user(), run_id, after_seq) as watcher,
            aclosing(watcher.pages(silence_seconds=self._heartbeat_seconds)) as pages,
        ):
            async for page in pages:
                if isinstance(page, gap_pb2.Gap):
                    await write(context, pb.WatchRunResponse(gap=page))
                else:
                    # Encodes to the same bytes as a WatchRunResponse.
                    await write(context, EncodedEvents(events=page).SerializeToString())

    async def LeaseCall(self, request: pb.LeaseCallRequest, context: Context) -> pb.LeaseCallResponse:
        run_id, call_id = convert.run_id(request), check_id(request.call_id, "call_id")
        client_id = check_id(request.client_id, "client_id")
        leased = await self._inbox.lease(require_user(), run_id, call_id, client_id)
        return pb.LeaseCallResponse(granted=leased.granted, call=leased.call, lease_seconds=self._inbox.lease_seconds)

    async def SubmitToolResults(
        self, request: pb.SubmitToolResultsRequest, context: Context
    ) -> pb.SubmitToolResultsResponse:
        run_id = convert.run_id(request)
        request_id = convert.request_id(request)
        results = convert.tool_results(request.results, run_id=run_id)
        client_id = check_id(request.client_id, "client_id", optional=True)
        replies, run = await self._inbox.submit_results(require_user(), request_id, run_id, results, client_id)
        receipts = [
            receipt(reply, run_id=run_id, call_id=result.call_id)
            for reply, result in zip(replies, results, strict=True)
        ]
        return pb.SubmitToolResultsResponse(receipts=receipts, run=convert.run_message(run))

    async def Decide(self, request: pb.DecideRequest, context: Context) -> pb.DecideResponse:
        decision = convert.decision(request.decision, run_id=convert.run_id(request))
        reply = await self._inbox.decide(require_user(), convert.request_id(request), decision)
        run = decided(reply)
        answer = receipt(reply, run_id=decision.run_id, call_id=decision.call_id)
        return pb.DecideResponse(receipt=answer, run=convert.run_message(run))

    async def DecideCalls(self, request: pb.DecideCallsRequest, context: Context) -> pb.DecideCallsResponse:
        decisions = convert.decisions(request.decisions)
        replies = await self._inbox.decide_calls(require_user(), convert.request_id(request), decisions)
        receipts = [
            receipt(reply, run_id=decision.run_id, call_id=decision.call_id)
            for reply, decision in zip(replies, decisions, strict=True)
        ]
        return pb.DecideCallsResponse(receipts=receipts)

    async def CancelRun(self, request: pb.CancelRunRequest, context: Context) -> pb.CancelRunResponse:
        caller, run_id, request_id = require_user(), convert.run_id(request), convert.request_id(request)
        reply = await self._inbox.cancel(caller, request_id, run_id, request.reason)
        run = run_after(reply, RunNotFound, also_late=True)
        if request.cancel_jobs:
            found = await self._jobs.stop_of_run(caller, request_id, run, request.reason)
        else:
            found = await self._jobs.of_run(caller, run)
        return pb.CancelRunResponse(run=convert.run_message(run), jobs=map(convert_jobs.job, found))

    async def ResolveCall(self, request: pb.ResolveCallRequest, context: Context) -> pb.ResolveCallResponse:
        run_id = convert.run_id(request)
        call_id = check_id(request.call_id, "call_id")
        if request.resolution not in pb.Resolution.values()[1:]:
            raise InvalidField("resolution has an unknown value", field="resolution")
        reply = await self._inbox.resolve(
            require_user(),
            convert.request_id(request),
            run_id=run_id,
            call_id=call_id,
            resolution=request.resolution,  # type: ignore[arg-type]  # the same numbers
            content_json=request.content_json,
        )
        run = decided(reply)
        return pb.ResolveCallResponse(
            receipt=receipt(reply, run_id=run_id, call_id=call_id), run=convert.run_message(run)
        )

    async def TopUpRun(self, request: pb.TopUpRunRequest, context: Context) -> pb.TopUpRunResponse:
        run_id = convert.run_id(request)
        reply = await self._inbox.top_up(require_user(), convert.request_id(request), run_id, request.tokens)
        run = run_after(reply, RunNotFound)
        return pb.TopUpRunResponse(receipt=receipt(reply, run_id=run_id), run=convert.run_message(run))

    async def PreviewUndo(self, request: undo_pb2.PreviewUndoRequest, context: Context) -> undo_pb2.PreviewUndoResponse:
        run_id, call_id = convert.run_id(request), check_id(request.call_id, "call_id", optional=True)
        found = await self._undoing.preview(require_user(), run_id, call_id)
        return undo_pb2.PreviewUndoResponse(calls=map(convert.UNDO.fields, found))

    async def UndoRun(self, request: undo_pb2.UndoRunRequest, context: Context) -> undo_pb2.UndoRunResponse:
        run = await self._undoing.start(
            require_user(), convert.request_id(request), convert.run_id(request), CallId("")
        )
        return undo_pb2.UndoRunResponse(run=convert.run_message(run))

    async def UndoCall(self, request: undo_pb2.UndoCallRequest, context: Context) -> undo_pb2.UndoCallResponse:
        run = await self._undoing.start(
            require_user(), convert.request_id(request), convert.run_id(request), check_id(request.call_id, "call_id")
        )
        return undo_pb2.UndoCallResponse(run=convert.run_message(run))

    async def GetUndoReport(
        self, request: undo_pb2.GetUndoReportRequest, context: Context
    ) -> undo_pb2.GetUndoReportResponse:
        found = await self._undoing.report(require_user(), convert.run_id(request))
        return undo_pb2.GetUndoReportResponse(calls=map(convert.UNDO.fields, found))

    async def GetRun(self, request: pb.GetRunRequest, context: Context) -> pb.GetRunResponse:
        run_id, seconds = convert.run_id(request), checks.wait_seconds(request.wait_seconds)
        after_seq = checks.seq(request.after_seq, "after_seq")
        if seconds:
            count_as_stream()
        run = await self._watches.wait_for_rest(require_user(), run_id, seconds=seconds, after_seq=after_seq)
        return pb.GetRunResponse(run=convert.run_message(run))

    async def ListSteps(self, request: steps_pb2.ListStepsRequest, context: Context) -> steps_pb2.ListStepsResponse:
        return await self._steps.list(require_user(), request)

    async def GetRound(self, request: steps_pb2.GetRoundRequest, context: Context) -> steps_pb2.GetRoundResponse:
        return await self._rounds.get(require_user(), request)

    async def WatchSteps(self, request: steps_pb2.WatchStepsRequest, context: Context) -> None:
        run_id = convert.run_id(request)
        after_seq = checks.seq(request.after_seq, "after_seq")
        parts = self._steps.watch(require_user(), run_id, after_seq, silence_seconds=self._heartbeat_seconds)
        async with aclosing(parts):
            async for part in parts:
                await write(context, part)

    async def ListPending(self, request: pb.ListPendingRequest, context: Context) -> pb.ListPendingResponse:
        wanted = convert.pending_filter(request.filter, page_size=request.page_size, page_token=request.page_token)
        page = await self._pending.page(require_user(), wanted)
        return pb.ListPendingResponse(calls=page.calls, runs=page.runs, next_page_token=page.next_page_token)

    async def WatchPending(self, request: pb.WatchPendingRequest, context: Context) -> None:
        wanted = convert.pending_filter(request.filter)
        parts = self._pending.watch(require_user(), wanted, silence_seconds=self._heartbeat_seconds)
        async with aclosing(parts):
            async for part in parts:
                await write(context, part)

    async def WhoAmI(self, request: whoami_pb2.WhoAmIRequest, context: Context) -> whoami_pb2.WhoAmIResponse:
        return await self._introductions.introduce(current_principal())


async def write(context: Context, response: Message | bytes) -> None:
    """Write the response, which may already be encoded. Disconnect a client that is too slow to read it.

    Raises:
        SlowConsumer
    """
    try:
        async with asyncio.timeout(WRITE_SECONDS_MAX):
            await context.write(response)
    except TimeoutError:
        raise SlowConsumer(
            f"the client has not read from its stream for {WRITE_SECONDS_MAX:g} s: open it again"
        ) from None
