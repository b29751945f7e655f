"""A call to a remote worker, as seen by the execution that sent it."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any, Final, TypeVar

from pawl.chassis.ids import CallId, RunId, UserId
from pawl.chassis.process import logs
from pawl.chassis.process.clock import Clock
from pawl.chassis.rpc.retry import Retry
from pawl.chassis.strict_json import dumps_canonical
from pawl.tool.v1 import worker_pb2 as pb
from pawl.tool_registry.audit.rules import AuditDraft, AuditKind, sha256_hex
from pawl.tool_registry.sources.worker.rules import AfterLoss, CallState, Purpose, after_loss, group_of
from pawl.tool_registry.sources.worker.store.workers import (
    PURPOSES,
    CallView,
    PostgresWorkerRepository,
    WorkerCall,
)
from pawl.tools.rules.definition import ToolVersion, definition_hash
from pawl.tools.sdk.context import OutcomeUnknown, ToolContext, ToolError
from pawl.values import EffectClass, Progress

# A call that no worker has taken ends this long before its deadline, so that its error can state the reason.
_MARGIN_SECONDS_MAX: Final = 0.5
_MARGIN_PART: Final = 0.1

_log = logs.get_logger(__name__)
T = TypeVar("T")


class PendingCall:
    """Waits for a call's answer, and handles the loss of workers.

    `news` is set when the call may have changed and, while its worker appears lost, at every poll. After
    `silence_seconds`, such a worker is treated as lost.
    """

    def __init__(
        self,
        call: WorkerCall,
        *,
        effect: EffectClass,
        repository: PostgresWorkerRepository,
        clock: Clock,
        context: ToolContext,
        silence_seconds: float,
        retry: Retry,
    ) -> None:
        self.call = call
        self.key = call.key
        self.news = asyncio.Event()
        self.report = context.progress
        self._context = context
        self._effect = effect
        self._repository = repository
        self._clock = clock
        margin = min(_MARGIN_SECONDS_MAX, call.seconds * _MARGIN_PART)
        self._deadline = clock.monotonic() + call.seconds - margin
        self._silence_seconds = silence_seconds
        self._retry = retry
        self._lost_since = self._polled_at = -math.inf
        self._may_have_started = False
        self._progress: Progress | None = None
        self._checkpoint_time: datetime | None = None

    async def answer(self, record: Callable[[], Awaitable[None]]) -> pb.WorkerResult:
        """Write the call to the database and return the worker's answer.

        If the caller is cancelled, ask the worker to stop and wait until it has stopped or is lost. If another process
        will continue the call, do not stop the worker.

        Raises:
            ToolError: No worker took the call in time.
            OutcomeUnknown: The worker was lost, or the database remained unavailable. The call may have taken effect.
        """
        try:
            await record()
            while True:
                await self._wait_for_news()
                view = await self._with_retry(lambda: self._repository.find(self.key, self.call.token))
                answer = await self._next(view)
                if answer is not None:
                    return answer
        except asyncio.CancelledError:
            if not self._context.will_restart:
                await self._stop()
            raise
        except (OutcomeUnknown, ToolError):
            raise
        except Exception as error:
            if not self._effect.is_journaled:
                raise
            raise OutcomeUnknown from error  # The worker may still be running the call.
        finally:
            if not self._context.will_restart:
                await self._settle()

    async def _wait_for_news(self) -> None:
        left = self._deadline - self._clock.monotonic()
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self.news.wait())]
        if left > 0:
            waits.append(asyncio.ensure_future(self._clock.sleep(left)))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self.news.clear()

    async def _next(self, view: CallView | None) -> pb.WorkerResult | None:
        if view is None:
            raise self._superseded()
        self._report_progress(view)
        is_confirmed = self._is_loss_confirmed(view)
        if view.is_lost:
            if not is_confirmed:
                return None
            self._may_have_started = True
            await self._handle_loss(view.purpose)
        elif view.state is CallState.DONE:
            return await self._read_answer(view)
        elif view.state is CallState.WAITING and self._clock.monotonic() >= self._deadline:
            if await self._with_retry(lambda: self._repository.withdraw(self.key, self.call.token)):
                raise await self._not_taken(view.purpose)
            self.news.set()  # A worker has just taken it.
        return None

    def _is_loss_confirmed(self, view: CallView) -> bool:
        """Return whether a worker that is lost according to the database can be treated as lost.

        If the database clock jumps forward, all workers appear lost until their processes renew the leases, which they
        do at every poll. They cannot renew them while the database is unavailable, so a long gap between two polls
        restarts the wait.
        """
        now, polled_at = self._clock.monotonic(), self._polled_at
        self._polled_at = now
        if not view.is_lost:
            self._lost_since = -math.inf
        elif math.isinf(self._lost_since) or now - polled_at > self._silence_seconds / 2:
            self._lost_since = now
        return view.is_dropped or now - self._lost_since >= self._silence_seconds

    async def _read_answer(self, view: CallView) -> pb.WorkerResult | None:
        answer = view.answer
        if answer is None:
            raise self._superseded()
        if self.call.purpose is view.purpose:
            return answer
        # The first worker was lost, so this one was asked to reconcile.
        match answer.WhichOneof("outcome"):
            case "content_json":
                return answer
            case "did_not_happen":
                self._may_have_started = False
                await self._reassign(Purpose.RUN)
                return None
            case _:
                raise OutcomeUnknown

    async def _handle_loss(self, purpose: Purpose) -> None:
        then = after_loss(self._effect, purpose)
        _log.warning("worker.lost", tool=self.call.details.tool_name, call=self.key.call_id, then=then)
        match then:
            case AfterLoss.RUN_ELSEWHERE:
                await self._reassign(Purpose.RUN)
            case AfterLoss.RECONCILE_ELSEWHERE:
                await self._reassign(Purpose.RECONCILE)
            case AfterLoss.UNKNOWN:
                if await self._with_retry(lambda: self._repository.conclude_lost(self.key, self.call.token)):
                    raise OutcomeUnknown
                self.news.set()  # The worker is back, or has answered.

    async def _reassign(self, purpose: Purpose) -> None:
        if not await self._with_retry(lambda: self._repository.reassign(self.key, self.call.token, purpose)):
            self.news.set()

    async def _not_taken(self, purpose: Purpose) -> Exception:
        if purpose is Purpose.RECONCILE:
            return OutcomeUnknown()
        call = self.call
        attached = await self._with_retry(
            lambda: self._repository.is_attached(
                self.key.store_id, call.group_name, call.details.tool_name, call.definition_hash
            )
        )
        which = f"in the group {call.group_name!r} with this tool"
        reason = f"every worker {which} was busy" if attached else f"no worker {which} is attached"
        doubt = "; an earlier attempt may have taken effect" if self._is_in_doubt else ""
        return ToolError(f"{call.details.tool_name} did not run: {reason}{doubt}")

    @property
    def _is_in_doubt(self) -> bool:
        return self._may_have_started and self._effect is not EffectClass.READ_ONLY

    def _superseded(self) -> Exception:
        if self._effect.is_journaled or self.call.purpose is Purpose.RECONCILE:
            return OutcomeUnknown()
        return ToolError(f"{self.call.details.tool_name} was superseded by another execution of the same call")

    def _report_progress(self, view: CallView) -> None:
        if view.progress is not None and view.progress != self._progress:
            self._progress = view.progress
            self.report(view.progress.fraction, view.progress.message)
        if view.checkpoint_time != self._checkpoint_time:
            self._checkpoint_time = view.checkpoint_time
            self._context.note_checkpoint()

    async def _stop(self) -> None:
        """Ask the worker to stop, and wait until it has stopped or is lost."""
        is_held = await self._with_retry(lambda: self._repository.cancel(self.key, self.call.token))
        while is_held:
            view = await self._with_retry(lambda: self._repository.find(self.key, self.call.token))
            if view is None or view.is_lost or view.state is CallState.DONE:
                return
            await self.news.wait()
            self.news.clear()

    async def _settle(self) -> None:
        try:
            await self._repository.settle(self.key, self.call.token)
        except Exception as error:  # noqa: BLE001  # it is deleted a day after its deadline
            _log.warning("worker.call_not_settled", call=self.key.call_id, error=type(error).__name__)

    async def _with_retry(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Send a query, with retries until the execution cancels it at the call's deadline.

        Raises the same errors as `Retry.until_answered`.
        """
        return await self._retry.until_answered(ask, call=self.key.call_id)


def call_of(entry: ToolVersion, purpose: Purpose, arguments: bytes, context: ToolContext, *, now: float) -> WorkerCall:
    """Return the call as it is stored in the database. `now` is in seconds since 1970."""
    details = pb.Invocation(
        purpose=PURPOSES[purpose],
        call_id=context.call_id,
        store_id=entry.store_id,
        user_id=context.user_id,
        conversation_id=context.conversation_id,
        run_id=context.run_id,
        tool_name=entry.definition.name,
        arguments_json=arguments,
        attempt=context.attempt,
        last_checkpoint_json=b"" if context.last_checkpoint is None else dumps_canonical(context.last_checkpoint),
        traceparent=context.traceparent,
    )
    details.deadline_time.FromDatetime(context.deadline)
    late = AuditDraft(
        store_id=entry.store_id,
        kind=AuditKind.RETURNED,
        time_us=0,
        user_id=UserId(context.user_id),
        run_id=RunId(context.run_id),
        call_id=CallId(context.call_id),
        tool_name=entry.definition.name,
        tool_version=entry.version,
        verdict="",
        reason="LATE",
        arguments_sha256=sha256_hex(arguments),
        key_id=context.conversation_id,
    )
    return WorkerCall(
        details=details,
        group_name=group_of(entry.source),
        definition_hash=definition_hash(entry.definition),
        purpose=purpose,
        seconds=max(0.0, context.deadline.timestamp() - now),
        token=secrets.token_hex(16),
        late=late if purpose is Purpose.RUN else None,
    )
