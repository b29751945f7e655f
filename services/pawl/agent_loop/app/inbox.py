"""Commands of users to runs: results, decisions, stops, findings.

Each is checked here for what can be seen without the run, and by the ledger for
the rest; the ledger's word on it is final.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from msgspec.structs import replace

from pawl.agent_loop.app import approvers, operators
from pawl.agent_loop.app.frames import CallDecision, ToolProgress, ToolResult
from pawl.agent_loop.app.public_ports import CallChecker, PublicLedger
from pawl.agent_loop.app.public_values import (
    NOBODY,
    CallView,
    ClientSession,
    DecisionCommand,
    EditVerdict,
    ProgressCommand,
    Reply,
    ResultCommand,
    RunView,
)
from pawl.agent_loop.domain import background, checks
from pawl.agent_loop.domain.command import CallResolution, Cancel, Pause, Resolve, TopUp
from pawl.chassis.auth import Principal, check_decides
from pawl.chassis.ids import CallId, ClientId, CommandId, IdSource, RequestId, RunId
from pawl.errors import (
    AlreadyExists,
    CallNotFound,
    CallNotPending,
    FailedPrecondition,
    GrantNotOffered,
    InvalidArgument,
    InvalidField,
    NotFound,
    OutOfRange,
    PawlError,
    PermissionDenied,
    ResourceExhausted,
    RunEnded,
    RunNotFound,
)
from pawl.values.call import CallState, DecisionKind, Series
from pawl.values.command import CommandOutcome, DecisionRight
from pawl.values.run import TOKENS_MAX, StopCause

REFUSALS: Final = (
    InvalidArgument,
    NotFound,
    AlreadyExists,
    FailedPrecondition,
    OutOfRange,
    PermissionDenied,
    ResourceExhausted,
)
"""Errors that are about what was sent alone: where several things are sent, they become receipts."""

_DIGEST_BYTES_MAX: Final = 128


def derived_id(*parts: str) -> RequestId:
    """Return the id that always stands for these parts together."""
    return RequestId("d_" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:40])


class Inbox:
    """Sends commands to runs."""

    def __init__(
        self,
        *,
        ledger: PublicLedger,
        checker: CallChecker,
        ids: IdSource,
        now: Callable[[], float],
        lease_seconds: float = 30.0,
    ) -> None:
        self._ledger = ledger
        self._now = now
        self._checker = checker
        self._ids = ids
        self.lease_seconds = lease_seconds

    async def lease(
        self, caller: Principal, run_id: RunId, call_id: CallId, client_id: ClientId
    ) -> tuple[bool, CallView]:
        """Lease an offered call to a client without a stream for `lease_seconds`, or renew that; return the call.

        Raises:
            CallNotFound
        """
        answer = await self._ledger.lease_offer(
            caller, run_id, call_id, client=ClientSession(client_id=client_id), lease_seconds=self.lease_seconds
        )
        if answer.call is None:
            raise CallNotFound
        return answer.granted, answer.call

    async def submit_results(
        self,
        caller: Principal,
        request_id: RequestId,
        run_id: RunId,
        results: Sequence[ToolResult],
        client_id: ClientId = NOBODY.client_id,
    ) -> tuple[list[Reply], RunView]:
        """Bring results without a stream; return one reply each, in order, and the run after them.

        Of a client, those of the calls that it has leased.

        A result that is wrong is refused alone. Idempotent by request id and call.

        Raises:
            RunNotFound
        """
        client = ClientSession(client_id=client_id)
        replies = await asyncio.gather(
            *(_alone(self.submit_result(caller, _derived(request_id, result), result, client)) for result in results)
        )
        if any(reply.reason == RunNotFound.reason for reply in replies):
            raise RunNotFound
        runs = [reply.run for reply in replies if reply.run is not None]
        return replies, max(runs, key=lambda run: run.last_seq) if runs else await self._ledger.get_run(caller, run_id)

    async def submit_result(
        self, caller: Principal, request_id: RequestId, result: ToolResult, client: ClientSession = NOBODY
    ) -> Reply:
        """Bring one result; of a client, under the lease that the result names.

        Of a session, only if this session holds the call.

        Raises:
            InvalidJson, TooLarge: the content is wrong.
            RequestIdReused
        """
        command = ResultCommand(
            call_id=result.call_id,
            content_json=checks.result_json(result.content_json),
            is_error=result.is_error,
            client_id=client.client_id,
            offer_epoch=result.offer_epoch if client.client_id else 0,
            session_id=client.session_id,
        )
        return await self._ledger.send_command(caller, result.run_id, self._command_id(request_id), command)

    async def report_progress(
        self, caller: Principal, request_id: RequestId, progress: ToolProgress, client: ClientSession
    ) -> Reply:
        """Bring progress of an offered call.

        Raises:
            InvalidField, TooLarge
        """
        command = ProgressCommand(
            call_id=progress.call_id,
            client_id=client.client_id,
            offer_epoch=progress.offer_epoch,
            session_id=client.session_id,
            fraction=checks.fraction(progress.fraction),
            message=checks.text(progress.message, "message", bytes_max=checks.PROGRESS_BYTES_MAX, may_be_empty=True),
        )
        return await self._ledger.send_command(caller, progress.run_id, CommandId(request_id), command)

    async def decide(self, caller: Principal, request_id: RequestId, decision: CallDecision) -> Reply:
        """Bring a decision. Edited arguments are validated and checked again first, an answer as its question says.

        Raises:
            PermissionDenied: the caller is a delegate that does not decide.
            InvalidField, TooLarge, InvalidJson: the decision itself is wrong.
            CallNotFound: an edit names no call of the run.
            GrantNotOffered: an edit is for a series, and each call of that is decided by itself.
            InvalidArguments: the edited arguments may not run, or the answer does not fit; the message lists why.
        """
        check_decides(caller)
        _check_decision(decision)
        right = approvers.decision_right(caller)
        verdict, series = EditVerdict(arguments_json=b"", digest=""), None
        if decision.kind is DecisionKind.EDIT:
            verdict, series = await self._check_edit(caller, decision, right)
        elif decision.kind is DecisionKind.ANSWER:
            await self._check_answer(caller, decision)
        command = DecisionCommand(
            call_id=decision.call_id,
            kind=decision.kind,
            digest=decision.digest,
            arguments_json=verdict.arguments_json,
            edited_digest=verdict.digest,
            reason=decision.reason,
            answer=decision.answer,
            edited_preview=verdict.preview,
            for_series=decision.for_series,
            edited_series=series,
            right=right,
        )
        # Request ids are known per run, and several people decide about one: each has ids of their own.
        command_id = self._command_id(derived_id(caller.user_id, request_id) if request_id else request_id)
        return await self._ledger.send_command(caller, decision.run_id, command_id, command)

    async def _check_edit(
        self, caller: Principal, decision: CallDecision, right: DecisionRight
    ) -> tuple[EditVerdict, Series | None]:
        """Return what the registry says of an edited call, and the series that is granted with it, if one is."""
        call = await self._ledger.get_call(caller, decision.call_id, for_approval=right is DecisionRight.STORE)
        if call.run_id != decision.run_id:
            raise CallNotFound
        series = None
        if decision.for_series:
            if call.series is None:
                raise GrantNotOffered
            series = call.series
            if decision.edited_series is not None:
                series = background.edited_series(series, decision.edited_series, self._now())
        # The run as a service reads it: who edits may be no more than an approver to it.
        run = await self._ledger.get_run(Principal(store_id=caller.store_id), call.run_id)
        verdict = await self._checker.check_edit(caller.store_id, run, call, decision.arguments_json, series)
        if series is None:
            return verdict, None
        if not verdict.series_digest:
            raise GrantNotOffered
        return verdict, replace(series, digest=verdict.series_digest, grant_call_id=CallId(""))

    async def _check_answer(self, caller: Principal, decision: CallDecision) -> None:
        """Check an answer to an open question of the caller; of all others the ledger has the word."""
        try:
            call = await self._ledger.get_call(caller, decision.call_id)
        except NotFound:
            return
        if call.run_id == decision.run_id and call.state is CallState.ASKED and call.answer_schema_json:
            await self._checker.check_answer(caller.store_id, call.answer_schema_json, decision.answer)

    async def decide_calls(
        self, caller: Principal, request_id: RequestId, decisions: Sequence[CallDecision]
    ) -> list[Reply]:
        """Bring several decisions; return one reply each, in order.

        A decision that is wrong is refused alone. Idempotent by request id and call.

        Raises:
            PermissionDenied: as for `decide`, of all of them.
        """
        check_decides(caller)
        return await asyncio.gather(
            *(_alone(self.decide(caller, _derived(request_id, decision), decision)) for decision in decisions)
        )

    async def cancel(self, caller: Principal, request_id: RequestId, run_id: RunId, reason: str) -> Reply:
        """Stop a run. A run that has ended stays as it is: the outcome is LATE.

        Raises:
            InvalidField, TooLarge
        """
        checks.text(reason, "reason", bytes_max=checks.REASON_BYTES_MAX, may_be_empty=True)
        command = Cancel(cause=StopCause.USER, reason=reason)
        return await self._ledger.send_command(caller, run_id, self._command_id(request_id), command)

    async def resolve(
        self,
        caller: Principal,
        request_id: RequestId,
        *,
        run_id: RunId,
        call_id: CallId,
        resolution: CallResolution,
        content_json: bytes,
    ) -> Reply:
        """Say what became of a call in doubt, of a run of any user of the store.

        Raises:
            PermissionDenied: the caller is a delegate that does not decide.
            InvalidField, InvalidJson, TooLarge
        """
        check_decides(caller)
        if resolution is CallResolution.HAPPENED:
            checks.result_json(content_json)
        elif content_json:
            raise InvalidField("content_json goes with HAPPENED only", field="content_json")
        command = Resolve(call_id=call_id, resolution=resolution, content_json=content_json)
        return await operators.send(self._ledger, caller, run_id, self._command_id(request_id), command, act="resolved")

    async def top_up(self, caller: Principal, request_id: RequestId, run_id: RunId, tokens: int) -> Reply:
        """Add to the token budget of a run.

        Raises:
            InvalidField: no number of tokens that a budget can have.
            RequestIdReused
        """
        if not 1 <= tokens <= TOKENS_MAX:
            raise InvalidField(f"tokens must be from 1 to {TOKENS_MAX}", field="tokens")
        command = TopUp(tokens=tokens)
        return await self._ledger.send_command(caller, run_id, self._command_id(request_id), command)

    async def pause(self, caller: Principal, request_id: RequestId, job_id: RunId, *, resumes: bool) -> Reply:
        """Let no iteration of a job begin any more, or let it go on.

        Raises:
            RequestIdReused, QueueFull
        """
        return await self._ledger.send_command(caller, job_id, self._command_id(request_id), Pause(resumes=resumes))

    def _command_id(self, request_id: RequestId) -> CommandId:
        """Return the id of the command of a request: that of the request, if it has one."""
        return CommandId(request_id or self._ids.new("cmd"))


def refusal(error: PawlError) -> Reply:
    """Return the reply that says what an error says."""
    outcome = CommandOutcome.UNKNOWN if isinstance(error, NotFound) else CommandOutcome.REFUSED
    return Reply(outcome=outcome, reason=error.reason, message=error.message)


async def _alone(reply: Awaitable[Reply]) -> Reply:
    """Return a reply that may be a refusal where others beside it are none."""
    try:
        return await reply
    except REFUSALS as error:
        return refusal(error)


def _derived(request_id: RequestId, part: ToolResult | CallDecision) -> RequestId:
    """Return the id of one part of a request; empty if the request has none."""
    return derived_id(request_id, part.call_id) if request_id else request_id


def decided(reply: Reply) -> RunView:
    """Return the run after a command that was taken.

    Raises:
        RunNotFound, CallNotFound, or the error that the outcome names.
    """
    try:
        return reply.run_after(CallNotPending if reply.outcome is not CommandOutcome.UNKNOWN else RunNotFound)
    except RunEnded as error:
        raise CallNotPending(error.message) from None


def _check_decision(decision: CallDecision) -> None:
    kind = decision.kind
    checks.text(decision.digest, "decision.digest", bytes_max=_DIGEST_BYTES_MAX, may_be_empty=True)
    if kind is DecisionKind.EDIT:
        checks.arguments_json(decision.arguments_json)
    elif decision.arguments_json:
        raise InvalidField("arguments_json goes with EDIT only", field="decision.arguments_json")
    if decision.for_series and kind not in {DecisionKind.APPROVE, DecisionKind.EDIT}:
        raise InvalidField("for_series goes with APPROVE and EDIT only", field="decision.for_series")
    if decision.edited_series is not None and not (decision.for_series and kind is DecisionKind.EDIT):
        raise InvalidField("edited_series goes with EDIT and for_series only", field="decision.edited_series")
    if kind is DecisionKind.ANSWER:
        checks.text(decision.answer, "decision.answer", bytes_max=checks.ANSWER_BYTES_MAX)
    elif decision.answer:
        raise InvalidField("answer goes with ANSWER only", field="decision.answer")
    checks.text(decision.reason, "decision.reason", bytes_max=checks.REASON_BYTES_MAX, may_be_empty=True)
