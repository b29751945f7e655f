"""Runs at most one execution of each call at a time. Records calls in the journal if their effect class requires it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Final, Self, TypeVar

from pawl.chassis.ids import CallKey
from pawl.chassis.process import logs, tasks
from pawl.chassis.rpc.retry import ANY, INTERNAL_SECONDS_MAX, Retry
from pawl.errors import (
    Cancelled,
    DependencyUnavailable,
    InvalidArguments,
    Overloaded,
    PawlError,
    ShuttingDown,
)
from pawl.tool_registry import outcome
from pawl.tool_registry.execution.attempt import Attempt, AttemptParts
from pawl.tool_registry.execution.execution import PROCESS_CAUSES, CancelCause, Execution, wait_any
from pawl.tool_registry.metrics import RegistryMetrics
from pawl.tool_registry.outcome import ToolEnd
from pawl.tool_registry.policy.call import ExecuteRequest, Job
from pawl.tool_registry.rules.execution import ENDS, NOT_STOPPED, OPEN, ExecutionResult, input_required
from pawl.tool_registry.rules.journal import HeldElsewhere
from pawl.tools.rules.definition import given
from pawl.values import Outcome, Progress

# Maximum number of executions waiting for users, per execution that may run.
_WAITING_PER_RUNNING: Final = 10
_POLL_SECONDS: Final = 0.1
# A lease that was not renewed this many times is treated as expired.
_IDLE_RENEWALS: Final = 2
# A call that was started early, or its result, is kept this long for its run, which executes the call after it has
# written the step.
KEPT_SECONDS: Final = 10.0
_KEPT_MAX: Final = 100
# Maximum time for an async tool to clean up after it was cancelled.
_UNWIND_SECONDS: Final = 1.0

T = TypeVar("T")

_log = logs.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOptions:
    executions_max: int = 1000
    grace_seconds: float = 5.0
    lease_seconds: float = 6.0
    renew_seconds: float = 1.0
    retention_seconds: float = 30 * 86400.0
    forget_seconds: float = 3600.0
    internal_seconds_max: float = INTERNAL_SECONDS_MAX


class Executor:
    """Runs tools independently of their callers. An async context manager.

    The executor renews its lease when it starts a call, and while it has running calls. An idle executor lets the lease
    expire, because no other process needs its state.

    On exit, running executions have `grace_seconds` to end, counted from when `stopping` returned. The executor then
    cancels them, and records the outcome as unknown if the call may have taken effect.
    """

    def __init__(
        self,
        *,
        parts: AttemptParts,
        observer: RegistryMetrics,
        stopping: Callable[[], Awaitable[object]],
        options: ExecutorOptions,
    ) -> None:
        self._admission = parts.admission
        self._journal = parts.admission.journal
        self._parts = parts
        self._observer = observer
        self._clock = parts.clock
        self._stopping = stopping
        self._options = options
        self._retry = Retry(
            parts.clock, transient=ANY, internal_seconds_max=options.internal_seconds_max, event="journal.end_delayed"
        )
        self._running: dict[CallKey, Execution] = {}
        self._kept: dict[CallKey, Execution] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._attempts: set[asyncio.Task[None]] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._stop_at: float | None = None
        self._renewed_at = 0.0
        self._renewal: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._renewed_at = self._clock.monotonic()
        await self._journal.renew()
        loops = (self._watch_stop(), self._renew_leases(), self._forget())
        self._loops = [asyncio.create_task(loop) for loop in loops]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._stop_at is None:
            self._stop_at = self._clock.monotonic() + self._options.grace_seconds
        for execution in self._running.values():
            if execution.dialogue.question is not None:  # No answer will arrive before the process ends.
                execution.cancel(CancelCause.SHUTDOWN)
        await self._wait_for_tasks(self._stop_at - self._clock.monotonic())
        for execution in self._running.values():
            execution.cancel(CancelCause.SHUTDOWN)
        await self._wait_for_tasks(2 * _UNWIND_SECONDS)
        every = self._tasks | self._attempts | set(self._loops)
        for task in every:
            task.cancel()
        left = (await asyncio.wait(every, timeout=_UNWIND_SECONDS))[1]
        if left:
            _log.error("execution.not_stopped", tasks=sorted(task.get_name() for task in left))
        try:
            await self._journal.release()
        except Exception as error:  # noqa: BLE001  # the lease expires instead
            _log.warning("journal.not_released", error=type(error).__name__)

    async def execute(self, request: ExecuteRequest) -> AsyncGenerator[Progress | ExecutionResult, None]:
        """Run a call, or attach to its running execution. Yield progress, and then the result.

        Raises:
            ToolNotFound, InvalidArguments, ApprovalRequired, PermissionDenied: The call may not run. See `Admission`.
            Overloaded, ShuttingDown, DependencyUnavailable: The call did not run, or repeating the request returns its
                outcome.
        """
        job = await self._admission.admit(request)
        if job.key not in self._running:
            await self._admission.check_rules(job)
        cached = None if job.key in self._kept else await self._admission.cached(job)
        if cached is not None:
            yield cached
            return
        execution = await self.start(job)
        async with aclosing(execution.watch()) as watched:
            async for item in watched:
                yield item

    def keep(self, execution: Execution) -> None:
        """Retain a running call, or its result, for the next caller.

        At most `_KEPT_MAX` results are retained, each for `KEPT_SECONDS`.
        """
        execution.is_kept = True
        if execution.ended.done():
            self._keep_result(execution)
        else:
            asyncio.get_running_loop().call_later(KEPT_SECONDS, _expire_kept, execution)

    def _keep_result(self, execution: Execution) -> None:
        if execution.ended.exception() is not None or execution.ended.result().outcome not in ENDS:
            return  # An abandoned call, or a call with a question, starts again.
        if len(self._kept) >= _KEPT_MAX:
            del self._kept[next(iter(self._kept))]
        self._kept[execution.job.key] = execution
        asyncio.get_running_loop().call_later(KEPT_SECONDS, self._kept.pop, execution.job.key, None)

    @property
    def running_count(self) -> int:
        return len(self._running)

    async def cancel(self, key: CallKey, wait_seconds: float) -> tuple[bool, ExecutionResult | None]:
        """Cancel a call and wait up to `wait_seconds` for its end.

        Return whether the call has stopped completely, and its result if it has one.
        """
        has_stopped, result = await self._cancel(key, wait_seconds)
        if result is not None and result.outcome is Outcome.AWAITING_COMPLETION:
            return True, await self._parts.completing.withdraw(key)
        return has_stopped, result

    async def _cancel(self, key: CallKey, wait_seconds: float) -> tuple[bool, ExecutionResult | None]:
        known = await self._journal.cancel(key)
        execution = self._running.get(key) or self._kept.get(key)
        if execution is not None:
            execution.cancel(CancelCause.USER)
            await asyncio.wait({execution.ended}, timeout=wait_seconds)
            if not execution.ended.done():
                return False, None
            if execution.ended.exception() is None:
                ended = execution.ended.result()
                return ended.error_reason != NOT_STOPPED, ended
        if execution is not None or isinstance(known, ExecutionResult):
            # The call may have ended since the journal was read.
            known = await self._journal.find(key)
        deadline = self._clock.monotonic() + wait_seconds
        while isinstance(known, HeldElsewhere) and self._clock.monotonic() < deadline:
            await self._clock.sleep(_POLL_SECONDS)
            known = await self._journal.find(key)
        if isinstance(known, ExecutionResult):
            return known.error_reason != NOT_STOPPED, known
        return known is None, None

    async def start(self, job: Job) -> Execution:
        """Start a call, or return its execution if it is already running or its result is still available.

        Raises:
            InvalidArguments: The call was started with another tool or other arguments.
            Overloaded, ShuttingDown: The call was not started.
        """
        existing = self._running.get(job.key)
        while existing is not None and existing.is_abandoned:
            await asyncio.wait({existing.ended})
            existing = self._running.get(job.key)
        existing = existing or self._kept.pop(job.key, None)
        if existing is not None:
            existing.is_kept = False
            if existing.job.fingerprint != job.fingerprint:
                raise InvalidArguments("this call was already started with another tool or other arguments")
            existing.dialogue.give(job.answers)
            return existing
        if self._stop_at is not None:
            raise ShuttingDown
        self._check_capacity()
        execution = Execution(job)
        self._running[job.key] = execution
        tasks.start(self._tasks, self._drive(execution, job), name=f"execution {job.definition.name}")
        return execution

    def _check_capacity(self) -> None:
        """Check the limits. Executions that are waiting for users have their own limit, because they can take days.

        Raises:
            Overloaded: A limit is reached.
        """
        most = self._options.executions_max
        if len(self._running) < most:
            return
        asking = sum(execution.dialogue.question is not None for execution in self._running.values())
        if len(self._running) - asking >= most:
            raise Overloaded(f"{most} executions are running, which is the limit: try again later")
        if asking >= most * _WAITING_PER_RUNNING:
            raise Overloaded(f"{asking} executions are waiting for users, which is the limit: try again later")

    async def _drive(self, execution: Execution, job: Job) -> None:
        """Run an execution. The execution always completes with a result or an error."""
        error: BaseException | None = None
        try:
            result = await self._settle(execution, job)
        except asyncio.CancelledError:
            error = ShuttingDown()
            raise
        except PawlError as refusal:
            error = refusal
        except Exception as fault:  # noqa: BLE001  # callers must not wait forever
            _log.exception("execution.crashed", tool=job.definition.name, call=job.context.call_id)
            error = fault
        finally:
            # There is no await in between, so that no caller attaches to an ended execution.
            del self._running[job.key]
            if error is not None:
                execution.fail(error)
        if error is None:
            execution.finish(result)
            if execution.is_kept or result.inverse is not None:
                # If the call is stopped now, its caller still gets the inverse, which an undo needs.
                self._keep_result(execution)

    async def _settle(self, execution: Execution, job: Job) -> ExecutionResult:
        while True:
            known = await self._try(execution, job)
            if isinstance(known, ExecutionResult):
                return known
            if known.question is not None:
                if given(job.answers, known.position, known.question) is None:
                    return input_required(known.question, execution.seconds())
                await self._journal.answer(job.key, job.answers)
            await asyncio.wait({execution.cancelled}, timeout=_POLL_SECONDS)
            if not execution.listeners:
                raise Cancelled  # No caller is left; the other process continues.
            if execution.cancelled.done() and execution.cancelled.result() is CancelCause.SHUTDOWN:
                raise ShuttingDown

    async def _try(self, execution: Execution, job: Job) -> ExecutionResult | HeldElsewhere:
        if _needs_lease(job):
            await self._hold_lease()
        started = self._clock.monotonic()
        attempt = Attempt(execution, job, self._parts)
        tasks.hold(self._attempts, attempt.task)
        left = await self._wait(attempt, execution, job)
        seconds = self._clock.monotonic() - started
        if attempt.outcome.done():
            known = attempt.outcome.result()
            if attempt.was_known or not isinstance(known, ExecutionResult):
                return await self._parts.completing.ended_if_lapsed(job, known)
        else:
            # Do not wait for a thread that timed out. A caller that cancels wants to know whether the thread stops.
            waits = job.tool.is_stoppable or execution.cancelled.done()
            has_stopped = await attempt.stop(_UNWIND_SECONDS if waits else 0)
            known = self._interrupted(execution, job, attempt, seconds, still_runs=not has_stopped)
        result: ExecutionResult | None = None
        if known.outcome is Outcome.AWAITING_COMPLETION:
            hold = partial(self._parts.completing.hold, job, attempt.completion_terms, left)
            result = await self._until_written(job, hold)
            known = outcome.of_doubt(job.definition.name, seconds)
        if result is None:
            result = await self._write_end(job, known, attempt)
        if not attempt.task.done():
            tasks.start(self._attempts, self._follow(attempt, job), name="execution late")
        self._observer.executed(job.context.store_id, job.tool.name, result.outcome, seconds)
        _log.info(
            "execution.ended",
            tool=job.definition.name,
            run=job.context.run_id,
            call=job.context.call_id,
            outcome=result.outcome,
            reason=result.error_reason,
            milliseconds=round(seconds * 1000, 1),
        )
        return result

    async def _wait(self, attempt: Attempt, execution: Execution, job: Job) -> float:
        """Wait until there is an outcome or the attempt must end. Return the remaining seconds of the timeout.

        The clock stops while a question is open.
        """
        left = job.timeout_seconds
        dialogue = execution.dialogue
        while True:
            started = self._clock.monotonic()
            await wait_any(attempt.outcome, execution.cancelled, dialogue.asked, timeout_seconds=left)
            left -= self._clock.monotonic() - started
            if attempt.outcome.done() or execution.cancelled.done() or not dialogue.asked.done():
                return left
            if not job.effect.is_journaled:
                return left  # The call runs again once the answer arrives.
            if dialogue.question is not None:
                ask = partial(self._journal.ask, job.key, dialogue.question, dialogue.position)
                await self._until_written(job, ask)
            await wait_any(attempt.outcome, execution.cancelled, dialogue.answered)

    def _interrupted(
        self, execution: Execution, job: Job, attempt: Attempt, seconds: float, *, still_runs: bool
    ) -> ExecutionResult:
        if not execution.cancelled.done() and execution.dialogue.question is not None:
            return input_required(execution.dialogue.question, seconds)
        cause = execution.cancelled.result() if execution.cancelled.done() else None
        if cause in PROCESS_CAUSES:
            if execution.has_started and not execution.will_restart:
                if attempt.never_started:
                    return outcome.of_unstarted(job.definition, "TOOL_ERROR", "the registry was stopping", seconds)
                return outcome.of_doubt(job.definition.name, seconds)
            # The next process that gets the call reconciles it or runs it again.
            raise ShuttingDown if cause is CancelCause.SHUTDOWN else DependencyUnavailable("its execution was lost")
        if attempt.is_reconciling:
            return outcome.of_doubt(job.definition.name, seconds)
        if cause is None and attempt.never_started:
            why = f"its process was busy or still starting for {job.timeout_seconds:g} s"
            return outcome.of_unstarted(job.definition, "TOOL_TIMEOUT", why, seconds)
        if cause is None:
            end = (
                ToolEnd.ASKED_TO_STOP
                if job.tool.is_remote
                else ToolEnd.STILL_RUNNING
                if still_runs
                else ToolEnd.STOPPED
            )
            return outcome.of_timeout(job.definition, job.timeout_seconds, seconds, end, hindrance=attempt.hindrance)
        if attempt.late_end is not None and attempt.late_end.inverse is not None:
            return attempt.late_end  # The call has taken effect, and an undo needs its inverse.
        end = (
            ToolEnd.STILL_RUNNING if still_runs else ToolEnd.NEVER_STARTED if attempt.never_started else ToolEnd.STOPPED
        )
        return outcome.of_cancel(job.definition, seconds, end)

    async def _write_end(self, job: Job, result: ExecutionResult, attempt: Attempt) -> ExecutionResult:
        """Make the result and its audit entry durable before any caller receives the result.

        Return the stored result.
        """
        if result.outcome is Outcome.INPUT_REQUIRED:
            return result  # It has not ended: it starts again with the answer.
        if attempt.completion_token:
            # The call may have been completed from outside while its tool ran.
            written = await self._until_written(job, lambda: self._journal.end(job.key, result))
            reason = "" if written == result else "LATE"
            await self._until_written(job, lambda: self._admission.audit.ended(job, result, reason=reason))
            return written
        audited = self._until_written(job, lambda: self._admission.ended(job, result, has_begun=attempt.has_run))
        if not attempt.has_asked_journal:
            await audited
            return result
        # Concurrently, because both wait for the disk.
        written, _ = await asyncio.gather(self._until_written(job, lambda: self._journal.end(job.key, result)), audited)
        return written

    async def _follow(self, attempt: Attempt, job: Job) -> None:
        """Wait for a tool whose call already has a result. Record in the audit chain how the tool ended.

        The tool may have taken effect since the result was recorded.
        """
        await asyncio.wait({attempt.task})
        late = attempt.late_end
        if late is not None and late.outcome not in OPEN:
            await self._until_written(job, lambda: self._admission.audit.ended(job, late, reason="LATE"))

    async def _until_written(self, job: Job, write: Callable[[], Awaitable[T]]) -> T:
        """Repeat a write until it succeeds. Raises the same errors as `Retry.until_answered`."""
        return await self._retry.until_answered(write, call=job.context.call_id)

    async def _wait_for_tasks(self, seconds: float) -> None:
        if self._tasks and seconds > 0:
            await asyncio.wait(self._tasks, timeout=seconds)

    async def _watch_stop(self) -> None:
        await self._stopping()
        self._stop_at = self._clock.monotonic() + self._options.grace_seconds

    async def _hold_lease(self) -> None:
        """Ensure that the lease is valid before anything relies on it.

        Raises:
            DependencyUnavailable: The lease could not be renewed.
        """
        idle_seconds = self._clock.monotonic() - self._renewed_at
        if idle_seconds < self._options.renew_seconds * _IDLE_RENEWALS:
            return
        if self._renewal is None or self._renewal.done():
            self._renewal = tasks.start(self._tasks, self._renew_alone(), name="lease")
        await tasks.shield(self._renewal)

    async def _renew_alone(self) -> None:
        asked_at = self._clock.monotonic()
        await self._journal.renew()
        self._renewed_at = asked_at

    async def _renew_leases(self) -> None:
        while True:
            await self._clock.sleep(self._options.renew_seconds)
            asked_at = self._clock.monotonic()
            is_idle = not self._running and not self._attempts
            try:
                async with asyncio.timeout(self._options.lease_seconds / 2):
                    await (self._journal.read_leases() if is_idle else self._renew())
            except Exception as error:  # noqa: BLE001  # the loop must still check whether the lease expired
                log = _log.debug if isinstance(error, DependencyUnavailable) else _log.warning
                log("journal.lease_not_renewed", error=type(error).__name__)
            else:
                self._renewed_at = self._renewed_at if is_idle else asked_at
            if self._clock.monotonic() - self._renewed_at > self._options.lease_seconds:
                self._fence()

    async def _renew(self) -> None:
        """Renew the lease.

        Apply the cancellations and answers that other replicas have recorded for calls running here.
        """
        await self._take_answers()
        unjournaled = [key for key, execution in self._running.items() if not execution.job.effect.is_journaled]
        for key in await self._journal.renew(unjournaled):
            if key in self._running:
                self._running[key].cancel(CancelCause.USER)

    async def _take_answers(self) -> None:
        asking = [key for key, execution in self._running.items() if execution.dialogue.question is not None]
        for key, answers in (await self._journal.answers(asking)).items():
            if key in self._running:
                self._running[key].dialogue.give(answers)

    def _fence(self) -> None:
        """Cancel executions that another process may now repeat because this process's lease has expired."""
        for execution in self._running.values():
            if execution.has_started and execution.job.is_askable:
                execution.cancel(CancelCause.LEASE_LOST)

    async def _forget(self) -> None:
        while True:
            try:
                await self._admission.forget(self._options.retention_seconds)
                await self._journal.forget(self._options.retention_seconds)
                await self._parts.checkpoints.forget(self._options.retention_seconds)
            except Exception as error:  # noqa: BLE001  # the next round may succeed
                _log.warning("journal.not_cleaned", error=type(error).__name__)
            await self._clock.sleep(self._options.forget_seconds)


def _needs_lease(job: Job) -> bool:
    """Return whether other processes check this process's lease to find out if the call is still running."""
    return job.effect.is_journaled or bool(job.resource_keys) or job.is_of_store


def _expire_kept(execution: Execution) -> None:
    """Cancel a call that was retained for a caller that never came.

    This happens if the run was cancelled or its worker died.
    """
    if execution.is_kept:
        execution.is_kept = False
        execution.leave()
