"""Calls to the registry on behalf of the loop, with retries. Every call ends with a result for the model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Final

from msgspec.structs import replace

from pawl.agent_loop.loop.ports import CallContext, Registry
from pawl.agent_loop.loop.rules import settle
from pawl.agent_loop.loop.rules.call import Call, CallResult
from pawl.agent_loop.loop.rules.fact import OutputChecked
from pawl.agent_loop.loop.rules.retry import KEY_GONE
from pawl.agent_loop.loop.rules.run import PinnedTool, Run, UnknownOutcomePolicy
from pawl.agent_loop.loop.rules.tool import (
    ExecutionResult,
    ProposedCall,
    RecordedDecision,
    RecordedResult,
    Resolved,
    Stopped,
    Tool,
    Verdict,
)
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CallId
from pawl.chassis.process.clock import Clock
from pawl.chassis.rpc.retry import TRANSIENT, UNAVAILABLE, Retry
from pawl.errors import DependencyUnavailable, Overloaded, PawlError
from pawl.values import REPEATABLE, Answer, Disposition, Execution, Outcome, Progress, ReadTimeouts, Series

_CHECK_SECONDS_MAX: Final = 30.0
_STOP_SECONDS: Final = 2.0
# The registry enforces the timeout. This limit applies if it does not respond at all.
_GRACE_SECONDS: Final = 30.0
_UNREACHABLE: Final = "The tool registry was unavailable or failed."
_NULL: Final = CallResult(content_json=b"null")

OnProgress = Callable[[Progress], None]


class ToolCalls:
    def __init__(
        self,
        run: Run,
        *,
        registry: Registry,
        retry: Retry,
        clock: Clock,
        own_tools: Sequence[Tool] = (),
        credential_is_gone: Callable[[Principal], bool] = lambda _: False,
    ) -> None:
        self._run = run
        self._credential_is_gone = credential_is_gone
        self._own_tools = {tool.name: tool for tool in own_tools}
        self._context = CallContext.of(run)
        limits = run.options.limits
        self._reads = ReadTimeouts(
            timeout_seconds=limits.tool_timeout_seconds, timeout_seconds_max=limits.tool_timeout_seconds_max
        )
        self._registry = registry
        self._retry = retry
        self._clock = clock

    async def resolve(
        self, names: Sequence[str], pinned: Sequence[PinnedTool] = (), *, most: int = 0, skip_missing: bool = False
    ) -> Resolved:
        """Return the named tools or, if `names` is empty, all tools that the user may call.

        Retries until there is a response. At most `most` tools are returned (0 means no limit). `skip_missing` omits
        tools that do not exist for this user.

        Raises:
            ToolNotFound: A tool does not exist for this user.
        """
        return await self._retry.until_answered(
            lambda: self._registry.resolve(self._context, names, pinned, most=most, skip_missing=skip_missing)
        )

    async def check(
        self, calls: Sequence[ProposedCall], known_tool_names: Sequence[str], *, may_read: bool = False
    ) -> dict[CallId, Verdict]:
        """Return verdicts on calls.

        If the registry fails, or if the API key of a background or child run is no longer valid, all verdicts are
        refusals. With `may_read`, verdicts can contain the results of read-only calls.
        """
        if not calls:
            return {}
        if self.key_is_gone:
            return {call.call_id: _refusal(call.call_id, KEY_GONE.reason, KEY_GONE.message) for call in calls}
        reads = self._reads if may_read else None
        whole = [self._with_own_tool(call) for call in calls]
        try:
            verdicts = await self._retry.until_answered(
                lambda: self._registry.check(self._context, whole, known_tool_names, reads),
                seconds_max=_CHECK_SECONDS_MAX,
            )
        except TRANSIENT:
            verdicts = ()
        found = {verdict.call_id: verdict for verdict in verdicts}
        return {
            call.call_id: found.get(call.call_id) or _refusal(call.call_id, "TOOL_ERROR", _UNREACHABLE)
            for call in calls
        }

    @property
    def key_is_gone(self) -> bool:
        """True if this is a background or child run whose API key is no longer valid."""
        run = self._run
        return (run.times_itself or bool(run.above)) and self._credential_is_gone(_principal(run))

    async def check_output(self, schema_json: bytes, output: str) -> OutputChecked:
        """Validate an answer against a response format's schema. Retry until the registry responds."""
        store_id = self._context.store_id
        return await self._retry.until_answered(lambda: self._registry.check_output(store_id, schema_json, output))

    def _with_own_tool(self, call: ProposedCall) -> ProposedCall:
        """Attach the tool if a client supplied it with the run, because the registry does not store such tools."""
        own = self._own_tools.get(call.tool_name) if call.tool_version else None
        return call if own is None else replace(call, own_tool=own)

    async def record(self, decisions: Sequence[RecordedDecision], results: Sequence[RecordedResult]) -> None:
        """Record decisions and results in the audit chain before they take effect. Retry until this succeeds."""
        if decisions:
            await self._retry.until_answered(lambda: self._registry.record_decisions(self._context, decisions))
        if results:
            await self._retry.until_answered(lambda: self._registry.record_results(self._context, results))

    async def report(self, withdrawn_results: Sequence[RecordedResult], *, seconds_max: float) -> bool:
        """Report withdrawn front-end calls to the registry, which counts them. Return whether the report succeeded."""
        if not withdrawn_results:
            return True
        try:
            await self._retry.until_answered(
                lambda: self._registry.record_results(self._context, withdrawn_results), seconds_max=seconds_max
            )
        except PawlError:
            return False
        return True

    async def execute(
        self,
        call: Call,
        unknowns_resolved: int,
        on_progress: OnProgress,
        answers: Sequence[Answer] = (),
        series: Series | None = None,
        *,
        traceparent: str = "",
    ) -> ExecutionResult:
        """Run the call and return how it ended. With `series`, the call runs under the series' grant.

        Errors from the tool or the registry are not raised. They are part of the result. If an unknown outcome would
        need an operator, wait while the registry is unavailable, because its journal may contain the outcome.
        """
        execution = Execution(
            call_id=call.call_id,
            tool_name=call.tool_name,
            tool_version=call.tool_version,
            arguments_json=call.arguments_json,
            earlier_attempts=call.attempt - 1,
            unknowns_resolved=unknowns_resolved,
            timeout_seconds=call.timeout_seconds,
            approved_digest=call.approved_digest,
            rule_id=call.rule_id,
            answers=tuple(answers),
            series=series,
            traceparent=traceparent,
        )
        started, failures, lost = self._clock.monotonic(), 0, 0
        while True:
            left = started + call.timeout_seconds + _GRACE_SECONDS - self._clock.monotonic()
            asked = replace(execution, earlier_attempts=execution.earlier_attempts + lost)
            ended = await self._attempt(call, asked, on_progress, left, failures)
            if isinstance(ended, ExecutionResult):
                return ended
            failures += 1
            if isinstance(ended, UNAVAILABLE) and self._needs_operator(call):
                started = self._clock.monotonic()
            # An overloaded registry did not start the call. After any other error, it may have done so.
            lost += not isinstance(ended, Overloaded)

    async def stop(self, call: Call) -> Stopped:
        """Stop the call.

        Return the result (if known) and whether the call has stopped. If the registry does not respond, the second
        value is False.
        """
        try:
            return await self._retry.until_answered(
                lambda: self._registry.cancel(self._context, call.call_id, wait_seconds=_STOP_SECONDS),
                seconds_max=_STOP_SECONDS,
            )
        except PawlError:
            return Stopped(stopped=False)

    async def _attempt(
        self, call: Call, execution: Execution, on_progress: OnProgress, left: float, failures: int
    ) -> ExecutionResult | PawlError:
        """Request the call once.

        Return how it ended, or an error after which the request can be repeated with the same id.
        """
        try:
            async with asyncio.timeout(left), aclosing(self._registry.execute(self._context, execution)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, ExecutionResult):
                        return piece
                    on_progress(piece)
            raise DependencyUnavailable("the registry's stream ended without a result")
        except TimeoutError:
            return await self._time_out(call)
        except TRANSIENT as error:
            waits = isinstance(error, UNAVAILABLE) and self._needs_operator(call)
            try:
                await self._retry.pause(error, failures + 1, left=math.inf if waits else left)
            except PawlError:
                return _unreachable(call)
            return error
        except PawlError as error:
            return ExecutionResult(outcome=Outcome.FAILED, result=settle.error(error.reason, error.message))

    async def _time_out(self, call: Call) -> ExecutionResult | PawlError:
        answer = await self.stop(call)
        if answer.result is not None:
            return answer.result
        if answer.stopped:
            message = f"The call took more than {call.timeout_seconds:g} seconds."
            return ExecutionResult(outcome=Outcome.FAILED, result=settle.error("TOOL_TIMEOUT", message))
        return DependencyUnavailable(_UNREACHABLE) if self._needs_operator(call) else _unreachable(call)

    def _needs_operator(self, call: Call) -> bool:
        """Return whether the run must wait for an operator if the outcome of the call is unknown."""
        policy = self._run.options.unknown_outcome_policy
        return policy is UnknownOutcomePolicy.NEEDS_ATTENTION and call.effect_class not in REPEATABLE


def _refusal(call_id: CallId, reason: str, message: str) -> Verdict:
    return Verdict(call_id=call_id, disposition=Disposition.REFUSE, error_reason=reason, error_message=message)


def _principal(run: Run) -> Principal:
    return Principal(
        store_id=run.store_id,
        user_id=run.user_id,
        roles=frozenset(run.user_roles),
        credential_id=run.credential_id,
        delegate_user_id=run.delegate_user_id,
    )


def _unreachable(call: Call) -> ExecutionResult:
    if call.effect_class in REPEATABLE:
        return ExecutionResult(outcome=Outcome.FAILED, result=settle.error("TOOL_ERROR", _UNREACHABLE))
    return ExecutionResult(outcome=Outcome.UNKNOWN, result=_NULL)
