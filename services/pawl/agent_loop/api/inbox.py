"""Sends users' commands to runs: results, decisions, cancellations and resolutions.

The inbox checks the contents of a command. The ledger checks the command against the run's state, and accepts or
refuses it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from msgspec.structs import replace

from pawl.agent.v1 import session_pb2, types_pb2
from pawl.agent_loop.api import approvers, convert, operator_rpc, replies
from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.api.replies import Reply
from pawl.agent_loop.api.values import NO_CLIENT, ClientSession
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.registry import RegistryClient
from pawl.agent_loop.loop.rules import background, checks
from pawl.agent_loop.loop.rules.tool import Verdict
from pawl.chassis import strict_json
from pawl.chassis.identity.auth import Principal, check_decides
from pawl.chassis.ids import CallId, ClientId, IdSource, RequestId, RunId
from pawl.errors import (
    AlreadyExists,
    CallNotFound,
    FailedPrecondition,
    GrantNotOffered,
    InvalidArgument,
    InvalidField,
    NotFound,
    OutOfRange,
    PermissionDenied,
    QueueFull,
    ResourceExhausted,
    RunNotFound,
)
from pawl.event.v1 import call_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.values import TOKENS_MAX, DecisionRight, Series

# Errors about a single item. In a batch, each becomes its item's receipt.
REFUSALS: Final = (
    InvalidArgument,
    NotFound,
    AlreadyExists,
    FailedPrecondition,
    OutOfRange,
    PermissionDenied,
    ResourceExhausted,
)

_DIGEST_BYTES_MAX: Final = 128
_EVENT_BYTES_MAX: Final = 64 * 1024


def derived_id(*parts: str) -> RequestId:
    """Return an id derived from `parts`. The same parts always result in the same id."""
    return RequestId("d_" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:40])


class Inbox:
    def __init__(
        self,
        *,
        ledger: PublicLedger,
        registry: RegistryClient,
        ids: IdSource,
        now: Callable[[], float],
        lease_seconds: float = 30.0,
    ) -> None:
        self._ledger = ledger
        self._now = now
        self._registry = registry
        self._ids = ids
        self.lease_seconds = lease_seconds

    async def lease(
        self, caller: Principal, run_id: RunId, call_id: CallId, client_id: ClientId
    ) -> pb.LeaseOfferResponse:
        """Lease an offered call to a client that has no stream, or renew the lease.

        Return the call and whether the lease was granted.

        Raises:
            CallNotFound
        """
        answer = await self._ledger.lease_offer(
            caller, run_id, call_id, client=ClientSession(client_id=client_id), lease_seconds=self.lease_seconds
        )
        if not answer.HasField("call"):
            raise CallNotFound
        return answer

    async def submit_results(
        self,
        caller: Principal,
        request_id: RequestId,
        run_id: RunId,
        results: Sequence[types_pb2.ToolResult],
        client_id: ClientId = NO_CLIENT.client_id,
    ) -> tuple[list[Reply], run_pb2.Run]:
        """Submit results without a stream. Return one reply per result, in order, and the run after these results.

        With a client id, only results of calls that this client has leased are accepted. An invalid result does
        not affect the others. Idempotent by request id and call.

        Raises:
            RunNotFound
        """
        client = ClientSession(client_id=client_id)
        found = await asyncio.gather(
            *(_alone(self.submit_result(caller, _derived(request_id, result), result, client)) for result in results)
        )
        if any(reply.reason == RunNotFound.reason for reply in found):
            raise RunNotFound
        runs = [reply.run for reply in found if reply.HasField("run")]
        return found, max(runs, key=lambda run: run.last_seq) if runs else await self._ledger.get_run(caller, run_id)

    async def submit_result(
        self, caller: Principal, request_id: RequestId, result: types_pb2.ToolResult, client: ClientSession = NO_CLIENT
    ) -> Reply:
        """Submit one result.

        If `client` has a client id, the result must refer to that client's current lease. If `client` also has a
        session id, that session must hold the call.

        Raises:
            InvalidJson, TooLarge: The content is invalid.
            RequestIdReused
        """
        returned = call_pb2.CallResult(
            content_json=checks.result_json(result.content_json),
            is_error=result.is_error,
            error_reason="TOOL_ERROR" if result.is_error else "",
        )
        command = pb.ToolResultCommand(
            call_id=result.call_id,
            result=returned,
            client_id=client.client_id,
            offer_epoch=result.offer_epoch if client.client_id else 0,
        )
        return await self._send(caller, result.run_id, request_id, client.session_id, tool_result=command)

    async def report_progress(
        self,
        caller: Principal,
        request_id: RequestId,
        progress: session_pb2.ToolProgressReport,
        client: ClientSession,
    ) -> Reply:
        """Report progress on an offered call.

        Raises:
            InvalidField, TooLarge, RequestIdReused
        """
        command = pb.ProgressCommand(
            call_id=progress.call_id,
            client_id=client.client_id,
            offer_epoch=progress.offer_epoch,
            fraction=checks.fraction(progress.fraction if progress.HasField("fraction") else None),
            message=checks.text(progress.message, "message", bytes_max=checks.PROGRESS_BYTES_MAX, may_be_empty=True),
        )
        return await self._send(caller, progress.run_id, request_id, client.session_id, progress=command)

    async def decide(self, caller: Principal, request_id: RequestId, decision: types_pb2.CallDecision) -> Reply:
        """Submit a decision. tool-registry first validates edited arguments and answers that have a schema.

        Raises:
            PermissionDenied: The caller is a delegate that may not decide.
            InvalidField, TooLarge, InvalidJson: The decision is invalid.
            CallNotFound: An edit does not refer to one of the run's calls.
            GrantNotOffered: An edit covers a series whose calls must be decided on one by one.
            InvalidArguments: The edited arguments or the answer are invalid. The message lists the problems.
        """
        check_decides(caller)
        _check_decision(decision)
        right = approvers.decision_right(caller)
        command = pb.DecisionCommand(
            call_id=decision.call_id,
            kind=decision.kind,
            digest=decision.digest,
            reason=decision.reason,
            answer=decision.answer,
            for_series=decision.for_series,
        )
        if decision.kind == call_pb2.DECISION_KIND_EDIT:
            verdict, series = await self._check_edit(caller, decision, right)
            command.arguments_json, command.edited_digest = verdict.arguments_json, verdict.digest
            command.edited_preview = verdict.preview
            if series is not None:
                command.edited_series.CopyFrom(wire.SERIES.write(series))
        elif decision.kind == call_pb2.DECISION_KIND_ANSWER:
            await self._check_answer(caller, decision)
        # Request ids are unique per run, but several people may decide on the same call, so prefix the ids with the
        # user.
        request_id = derived_id(caller.user_id, request_id) if request_id else request_id
        return await self._send(
            caller, RunId(decision.run_id), request_id, decision=command, decision_right=right.value
        )

    async def _check_edit(
        self, caller: Principal, decision: types_pb2.CallDecision, right: DecisionRight
    ) -> tuple[Verdict, Series | None]:
        call = await self._ledger.get_call(caller, CallId(decision.call_id), for_approval=right is DecisionRight.STORE)
        if call.run_id != decision.run_id:
            raise CallNotFound
        if call.context == call_pb2.EXECUTION_CONTEXT_HUMAN:
            raise InvalidField("the call only asks people, so it has no arguments to edit", field="decision.kind")
        series = None
        if decision.for_series:
            if not call.approval.HasField("series"):
                raise GrantNotOffered
            series = wire.SERIES.read(call.approval.series)
            if decision.HasField("edited_series"):
                series = background.edited_series(series, wire.SERIES.read(decision.edited_series), self._now())
        # Read the run as a service, because the editor may only be an approver who cannot see it.
        run = await self._ledger.get_run_as_service(caller, RunId(call.run_id))
        verdict = await self._registry.check_edit(run, call, decision.arguments_json, series)
        if series is None:
            return verdict, None
        if not verdict.series_digest:
            raise GrantNotOffered
        return verdict, replace(series, digest=verdict.series_digest, grant_call_id=CallId(""))

    async def _check_answer(self, caller: Principal, decision: types_pb2.CallDecision) -> None:
        """Check an answer against the open question's schema. The ledger checks everything else."""
        try:
            call = await self._ledger.get_call(caller, CallId(decision.call_id))
        except NotFound:
            return
        schema_json = call.question.answer_schema_json
        if call.run_id == decision.run_id and call.state == call_pb2.CALL_STATE_ASKED and schema_json:
            await self._registry.check_answer(caller.store_id, schema_json, decision.answer)

    async def decide_calls(
        self, caller: Principal, request_id: RequestId, decisions: Sequence[types_pb2.CallDecision]
    ) -> list[Reply]:
        """Submit several decisions. Return one reply per decision, in order.

        An invalid decision does not affect the others. Idempotent by request id and call.

        Raises:
            PermissionDenied: The caller is a delegate that may not decide.
        """
        check_decides(caller)
        return await asyncio.gather(
            *(_alone(self.decide(caller, _derived(request_id, decision), decision)) for decision in decisions)
        )

    async def cancel(self, caller: Principal, request_id: RequestId, run_id: RunId, reason: str) -> Reply:
        """Cancel a run. A run that has already ended does not change, and the outcome is LATE.

        Raises:
            InvalidField, TooLarge, RequestIdReused
        """
        checks.text(reason, "reason", bytes_max=checks.REASON_BYTES_MAX, may_be_empty=True)
        command = pb.CancelCommand(cause=run_pb2.STOP_CAUSE_USER, reason=reason)
        return await self._send(caller, run_id, request_id, cancel=command)

    async def resolve(
        self,
        caller: Principal,
        request_id: RequestId,
        *,
        run_id: RunId,
        call_id: CallId,
        resolution: pb.CallResolution.ValueType,
        content_json: bytes,
    ) -> Reply:
        """Resolve a call whose outcome is unknown. The call can belong to any user's run in the store.

        Raises:
            PermissionDenied: The caller is a delegate that may not decide.
            InvalidField, InvalidJson, TooLarge
        """
        check_decides(caller)
        if resolution == pb.CALL_RESOLUTION_HAPPENED:
            checks.result_json(content_json)
        elif content_json:
            raise InvalidField("content_json requires resolution HAPPENED", field="content_json")
        resolve = pb.ResolveCommand(call_id=call_id, resolution=resolution, content_json=content_json)
        command = pb.Command(command_id=request_id or self._ids.new("cmd"), resolve=resolve)
        return await operator_rpc.send(self._ledger, caller, run_id, command, act="resolved")

    async def top_up(self, caller: Principal, request_id: RequestId, run_id: RunId, tokens: int) -> Reply:
        """Add tokens to a run's budget.

        Raises:
            InvalidField: `tokens` is out of range.
            RequestIdReused
        """
        if not 1 <= tokens <= TOKENS_MAX:
            raise InvalidField(f"tokens must be between 1 and {TOKENS_MAX}", field="tokens")
        return await self._send(caller, run_id, request_id, top_up=pb.TopUpCommand(tokens=tokens))

    async def pause(self, caller: Principal, request_id: RequestId, run_id: RunId, *, resumes: bool) -> Reply:
        """Pause or resume a job or workflow run. While paused, it starts no iterations or nodes.

        Raises:
            RequestIdReused, QueueFull
        """
        return await self._send(caller, run_id, request_id, pause=pb.PauseCommand(resumes=resumes))

    async def send_event(
        self,
        caller: Principal,
        event_id: RequestId,
        run_id: RunId,
        event: pb.EventCommand,
        is_awaited: Callable[[], Awaitable[bool]],
    ) -> Reply:
        """Send an event to a workflow run. Idempotent by event id.

        A run that stores too many events accepts another only if a node is waiting for it (`is_awaited`).

        Raises:
            TooLarge, InvalidJson, RequestIdReused, QueueFull
        """
        payload = strict_json.loads(event.payload_json or b"null", bytes_max=_EVENT_BYTES_MAX)
        event = pb.EventCommand(name=event.name, payload_json=strict_json.dumps_canonical(payload))
        try:
            return await self._send(caller, run_id, event_id, event=event)
        except QueueFull:
            if not await is_awaited():
                raise
        command = pb.Command(command_id=event_id or self._ids.new("cmd"), event=event)
        return await self._ledger.send_command(caller, run_id, command, event_is_awaited=True)

    async def _send(
        self,
        caller: Principal,
        run_id: str,
        request_id: RequestId,
        session_id: str = "",
        *,
        decision_right: int = 0,
        **kind: Any,
    ) -> Reply:
        command = pb.Command(command_id=request_id or self._ids.new("cmd"), **kind)
        return await self._ledger.send_command(
            caller, RunId(run_id), command, session_id=session_id, decision_right=decision_right
        )


async def _alone(reply: Awaitable[Reply]) -> Reply:
    """Await the reply. Return an error about this item as a refusal, so that the other items are still processed."""
    try:
        return await reply
    except REFUSALS as error:
        return replies.refusal(error)


def _derived(request_id: RequestId, part: types_pb2.ToolResult | types_pb2.CallDecision) -> RequestId:
    """Return the id of one part of a request, or an empty string if the request has no id."""
    return derived_id(request_id, part.call_id) if request_id else request_id


def _check_decision(decision: types_pb2.CallDecision) -> None:
    convert.check_kind(decision)
    kind, edit = decision.kind, call_pb2.DECISION_KIND_EDIT
    checks.text(decision.digest, "decision.digest", bytes_max=_DIGEST_BYTES_MAX, may_be_empty=True)
    if kind == edit:
        checks.arguments_json(decision.arguments_json)
    elif decision.arguments_json:
        raise InvalidField("arguments_json requires kind EDIT", field="decision.arguments_json")
    if decision.for_series and kind not in {call_pb2.DECISION_KIND_APPROVE, edit}:
        raise InvalidField("for_series requires kind APPROVE or EDIT", field="decision.for_series")
    if decision.HasField("edited_series") and not (decision.for_series and kind == edit):
        raise InvalidField("edited_series requires kind EDIT and for_series", field="decision.edited_series")
    if kind == call_pb2.DECISION_KIND_ANSWER:
        checks.text(decision.answer, "decision.answer", bytes_max=checks.ANSWER_BYTES_MAX)
    elif decision.answer:
        raise InvalidField("answer requires kind ANSWER", field="decision.answer")
    checks.text(decision.reason, "decision.reason", bytes_max=checks.REASON_BYTES_MAX, may_be_empty=True)
