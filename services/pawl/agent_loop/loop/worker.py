"""Claims runs, renews their leases and drives them concurrently.

If a run's lease is not confirmed in time, the worker drops the run before the lease ends. After that, another worker
may drive the run. The ledger would refuse late commits anyway, but dropping the run also stops calls to models and
tools.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from pawl.agent_loop.loop.drive import Drive, DriveEnd
from pawl.agent_loop.loop.ports import Claim, Loaded
from pawl.agent_loop.loop.rules.run import FailureClass, RunFailure
from pawl.agent_loop.loop.run_tasks import WorkerDependencies
from pawl.chassis.ids import RunId, RunKey, StoreId, WorkerId
from pawl.chassis.process import logs
from pawl.chassis.process.tasks import within
from pawl.errors import Internal, LeaseLost, PawlError, RunEnded, RunNotFound
from pawl.server.bus.connection import Bus
from pawl.server.process import log_setup

_CLAIMED_AT_ONCE_MAX: Final = 64
# Claiming one run costs as much as claiming many, so claims start at least this far apart.
_CLAIM_SECONDS_MIN: Final = 0.02
# A sleep that ends this late means that the process is overloaded. It then stops claiming for a while, so that its runs
# and the requests it serves stay responsive.
_BUSY_SECONDS: Final = 0.05
_THROTTLE_SECONDS_MAX: Final = 1.0
# Stop work this long before an unconfirmed lease ends.
_FENCE_MARGIN_SECONDS: Final = 0.5
# Retry a failed renewal this soon, so that there is time for many attempts before the lease ends.
_RENEW_AGAIN_SECONDS: Final = 0.25
_REMEMBERED_MAX: Final = 4096
_RELEASE_SECONDS_MAX: Final = 1.0
# If work becomes due later than this, polling finds it.
_DUE_SECONDS_MAX: Final = 3600.0
# Clocks differ slightly. A claim made a moment too early would not find anything, and the next one would wait for the
# poll.
_DUE_AFTER_SECONDS: Final = 0.001
# Fraction of the worker's runs that may be jobs or started by jobs, unless it can drive only one run. The rest is
# reserved for runs that users are waiting for.
_BACKGROUND_FRACTION: Final = 0.75
# When the worker is this full, the next claim may find more due runs than it had room for.
_CROWDED_FRACTION: Final = 0.5

_log = logs.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    runs_max: int = 256
    lease_seconds: float = 10.0
    renew_seconds: float = 2.0
    poll_seconds: float = 1.0
    # Poll interval of a worker without runs while NATS announces new work. job-store returns when known work is due.
    idle_poll_seconds: float = 5.0
    hand_over_seconds: float = 1.0
    # Delay before claiming work announced by another process, which normally claims it itself.
    remote_work_delay_seconds: float = 0.2


@dataclass(slots=True, kw_only=True)
class _Held:
    drive: Drive
    task: asyncio.Task[str]
    # A renewal that was sent earlier may have been executed before the claim.
    answered_at: float
    confirmed_until: float


class Worker:
    """Drives runs until stopped.

    Run `claim_forever`, `renew_forever` and `fence_forever` concurrently, and restart any that fails. At the end,
    cancel them and call `hand_over`.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        dependencies: WorkerDependencies,
        limits: WorkerLimits,
        new_drive: Callable[[Claim, WorkerDependencies, RunFailure | None], Drive] = Drive,
    ) -> None:
        self.worker_id = worker_id
        self._dependencies = replace(dependencies, run_due=self.wake, run_due_at=self._wake_at)
        self._ledger = dependencies.ledger
        self._clock = dependencies.clock
        self._random = dependencies.random
        self.background_steps = dependencies.background_steps
        self._meter = dependencies.meter
        self._limits = limits
        self._new_drive = new_drive
        self._held: dict[Claim, _Held] = {}
        # The time when this worker stopped driving each claim. A late response about such a claim is not a new claim,
        # and the state loaded with it is outdated.
        self._left_at: dict[Claim, float] = {}
        self._work_may_be_there = False
        self._work_is_ours = asyncio.Event()
        # Set when one of the times below has changed, or when something is due sooner.
        self._wakeup = asyncio.Event()
        # A heap of the times when parked runs are due. No other worker polls that soon.
        self._due_times: list[float] = []
        # Claims soon, unless another claim starts first.
        self._soon: asyncio.TimerHandle | None = None
        self._claiming = asyncio.Lock()
        self._claimed_background_at = -math.inf
        self._stopping = False
        self._bus: Bus | None = None
        # Until then, the ledger may count runs as this worker's that it does not drive: the response to a claim was
        # lost, or a drive has ended without the ledger knowing.
        self._may_hold_until = -math.inf

    async def listen(self, bus: Bus) -> None:
        """Subscribe to wake-up hints on the bus. Without them, the worker polls every second."""
        self._bus = bus
        await bus.subscribe("pawl.internal.v1.work", self._on_work)
        await bus.subscribe(f"pawl.internal.v1.worker.{self.worker_id}", self._on_command)

    def wake(self) -> None:
        """Claim runs immediately, because a request to this process may have made a run claimable."""
        self._work_is_ours.set()
        self._work_may_be_there = True
        self._wakeup.set()

    def _wake_at(self, due: float) -> None:
        left = due - self._clock.monotonic()
        if left <= 0:
            self.wake()
        elif left < _DUE_SECONDS_MAX and len(self._due_times) < _REMEMBERED_MAX:
            heapq.heappush(self._due_times, due + _DUE_AFTER_SECONDS)
            self._wakeup.set()

    async def claim_forever(self) -> None:
        while not self._stopping:
            self._work_may_be_there = False
            self._work_is_ours.clear()
            self._cancel_soon()
            room = min(self._limits.runs_max - len(self._held), _CLAIMED_AT_ONCE_MAX)
            started, poll_seconds = self._clock.monotonic(), self._limits.poll_seconds * self._jitter()
            count = 0
            if room > 0:
                is_idle = not self._held
                count, wait_seconds = await self._claim(room, is_idle=is_idle)
                if is_idle and not count:
                    poll_seconds = self._idle_seconds(poll_seconds, wait_seconds)
            if room <= 0 or count < room:
                await self._wait_for_work(started, poll_seconds)
            if not self._is_foreground_due():
                await self._throttle(started + _CLAIM_SECONDS_MIN)

    def _is_foreground_due(self) -> bool:
        """Return whether a user's message has just made a run due, beside background runs only."""
        foreground_is_at_work = self.background_steps.yield_seconds(asyncio.get_running_loop().time()) > 0
        is_first = {claim.in_background for claim in self._held} == {True}
        return self._work_is_ours.is_set() and foreground_is_at_work and is_first

    def _wake_soon(self) -> None:
        """Schedule a claim soon.

        A claim that happens earlier, for example for the user's next message, replaces this one.
        """
        if self._soon is None and not self._stopping:
            self._soon = asyncio.get_running_loop().call_later(_CLAIM_SECONDS_MIN, self.wake)

    def _cancel_soon(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None

    @property
    def _hears(self) -> bool:
        return self._bus is not None and self._bus.connected

    def _jitter(self) -> float:
        return 0.8 + 0.4 * self._random()

    def _idle_seconds(self, poll_seconds: float, wait_seconds: float | None) -> float:
        """Return how long an idle worker waits before the next poll. See ClaimRunsResponse."""
        if not self._hears:
            return poll_seconds
        idle_seconds = self._limits.idle_poll_seconds * self._jitter()
        if wait_seconds is None:
            return idle_seconds
        return min(wait_seconds + _DUE_AFTER_SECONDS, idle_seconds) if wait_seconds > 0 else poll_seconds

    async def _wait_for_work(self, polled_at: float, poll_seconds: float) -> None:
        poll_at = self._clock.monotonic() + poll_seconds
        while not self._work_may_be_there:
            while self._due_times and self._due_times[0] <= polled_at:
                heapq.heappop(self._due_times)
            left = min([poll_at, *self._due_times[:1]]) - self._clock.monotonic()
            if left <= 0:
                return
            self._wakeup.clear()
            await within(min(left, self._limits.poll_seconds), self._wakeup.wait())
            if not self._hears and self._clock.monotonic() - polled_at >= self._limits.poll_seconds:
                return
        await within(self._limits.remote_work_delay_seconds * (1 + 0.5 * self._random()), self._work_is_ours.wait())

    async def _throttle(self, due: float) -> None:
        """Sleep until `due`. If this process is overloaded, sleep up to a second longer."""
        end = due + _THROTTLE_SECONDS_MAX
        while (left := due - self._clock.monotonic()) > 0:
            await self._clock.sleep(left)
            late = self._clock.monotonic() - due
            if self._held and late > _BUSY_SECONDS:
                due = min(due + 2 * late, end)

    async def renew_forever(self) -> None:
        pause, is_failing = self._limits.renew_seconds, False
        while True:
            await self._clock.sleep(pause)
            pause = self._limits.renew_seconds
            if not self._held and self._clock.monotonic() > self._may_hold_until:
                continue
            try:
                async with asyncio.timeout(self._limits.renew_seconds):
                    await self._renew()
                is_failing = False
            except Exception as error:  # noqa: BLE001  # without renewals all drives would be fenced
                is_known = isinstance(error, TimeoutError | PawlError)
                log = _log.debug if is_failing and is_known else _log.warning
                log("lease.not_renewed", error=_error_text(error), exc_info=not is_known)
                is_failing = True
                pause = min(pause, _RENEW_AGAIN_SECONDS * self._jitter())

    async def fence_forever(self) -> None:
        """Drop every run whose unconfirmed lease is about to end."""
        while True:
            now = self._clock.monotonic()
            for claim, held in list(self._held.items()):
                if held.confirmed_until - _FENCE_MARGIN_SECONDS <= now:
                    self._drop(claim, held, "lease.unconfirmed")
            soonest = min((held.confirmed_until for held in self._held.values()), default=now + 1.0)
            await self._clock.sleep(min(1.0, max(0.05, soonest - _FENCE_MARGIN_SECONDS - now)))

    async def hand_over(self) -> None:
        """Stop all drives at their next commit or after a timeout, and release all runs. No calls are settled."""
        self._stopping = True
        self._cancel_soon()
        tasks = [held.task for held in self._held.values()]
        for held in self._held.values():
            held.drive.hand_over()
        if tasks:
            await asyncio.wait(tasks, timeout=self._limits.hand_over_seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            # Also release the runs from a claim that is still in flight.
            async with asyncio.timeout(_RELEASE_SECONDS_MAX), self._claiming:
                await self._ledger.release(self.worker_id)
        except (TimeoutError, PawlError) as error:
            # The leases will expire on their own.
            _log.warning("worker.not_released", error=_error_text(error))

    async def _on_work(self, _subject: str, _data: bytes) -> None:
        self._work_may_be_there = True
        self._wakeup.set()

    async def _on_command(self, _subject: str, data: bytes) -> None:
        store_id, _, run_id = data.decode(errors="replace").partition("/")
        key = RunKey(StoreId(store_id), RunId(run_id))
        for claim, held in self._held.items():
            if claim.key == key:
                held.drive.wake()

    async def _claim(self, room: int, *, is_idle: bool) -> tuple[int, float | None]:
        async with self._claiming:
            if self._stopping:
                return 0, None
            started = self._clock.monotonic()
            try:
                claims, wait_seconds = await self._ledger.claim(
                    self.worker_id,
                    runs_max=room,
                    lease_seconds=self._limits.lease_seconds,
                    background_runs_max=self._background_runs_max(),
                    is_idle=is_idle,
                )
            except PawlError:
                self._note_doubt()
                raise
        for claim, loaded in claims.items():
            self._start(claim, started, loaded)
        return len(claims), wait_seconds

    def _background_runs_max(self) -> int:
        """Return the maximum number of background runs that the worker may hold after its next claim.

        If it holds some, it claims no more while its foreground is at work.
        """
        wait_seconds = self.background_steps.yield_seconds(self._claimed_background_at)
        if wait_seconds and any(claim.in_background for claim in self._held):
            self._wake_at(self._clock.monotonic() + wait_seconds)
            return 0
        self._claimed_background_at = asyncio.get_running_loop().time()
        return max(1, int(self._limits.runs_max * _BACKGROUND_FRACTION))

    def _note_doubt(self) -> None:
        # A claim without a response may still be executed later, and its lease starts then.
        self._may_hold_until = self._clock.monotonic() + 2 * self._limits.lease_seconds

    async def _renew(self) -> None:
        started = self._clock.monotonic()
        renewal = await self._ledger.renew(self.worker_id, lease_seconds=self._limits.lease_seconds)
        confirmed = set(renewal.held)
        for claim, held in list(self._held.items()):
            if claim in confirmed:
                held.confirmed_until = started + self._limits.lease_seconds
            elif held.answered_at < started:
                self._drop(claim, held, "lease.lost")
        for claim in renewal.held:
            # This worker holds the run but does not drive it: the claim's response was lost, or its drive ended without
            # the ledger knowing. If it were not driven, its lease would be renewed forever.
            if not self._has_driven(claim, started):
                _log.warning("run.not_driven", store=claim.key.store_id, run=claim.key.run_id, epoch=claim.epoch)
                self._start(claim, started)
        for claim in renewal.with_commands:
            if claim in self._held:
                self._held[claim].drive.wake()

    def _start(self, claim: Claim, started: float, loaded: Loaded | None = None) -> None:
        if self._has_driven(claim, started) or self._stopping:
            return
        loaded = None if claim in self._left_at else loaded
        self._note(claim, -math.inf)
        drive = self._new_drive(claim, self._dependencies, None)
        task = asyncio.get_running_loop().create_task(self._drive(drive, loaded), name=f"drive {claim.key.run_id}")
        task.add_done_callback(lambda ended: self._remove(claim, ended))
        self._held[claim] = _Held(
            drive=drive,
            task=task,
            answered_at=self._clock.monotonic(),
            confirmed_until=started + self._limits.lease_seconds,
        )
        self._meter.runs_held(len(self._held))

    def _note(self, claim: Claim, left_at: float) -> None:
        self._left_at.pop(claim, None)
        self._left_at[claim] = left_at
        if len(self._left_at) > _REMEMBERED_MAX:
            del self._left_at[next(iter(self._left_at))]

    def _has_driven(self, claim: Claim, since: float) -> bool:
        held = self._held.get(claim)
        is_driving = held is not None and not held.task.done()
        return is_driving or self._left_at.get(claim, -math.inf) >= since

    def _drop(self, claim: Claim, held: _Held, why: str) -> None:
        """Cancel a drive.

        The claim stays until the drive has ended, so that no second drive starts for the same claim.
        """
        if held.task.cancelling():
            return
        _log.warning(why, store=claim.key.store_id, run=claim.key.run_id, epoch=claim.epoch)
        held.task.cancel()

    def _remove(self, claim: Claim, ended: asyncio.Task[str]) -> None:
        self._note_doubt()
        if claim in self._held and self._held[claim].task is ended:
            del self._held[claim]
        how = "lost" if ended.cancelled() else "crashed"
        if not ended.cancelled():
            error = ended.exception()
            if error is None:
                how = ended.result()
            else:
                _log.error("run.not_given_up", run=claim.key.run_id, epoch=claim.epoch, exc_info=error)
        self._meter.runs_held(len(self._held))
        self._meter.run_left(how)
        # The conversation's next run may be due, or a run that was waiting for a slot. The ledger reports the latter
        # when a run parks, but if this worker was full, more runs may be waiting.
        if len(self._held) >= self._limits.runs_max * _CROWDED_FRACTION:
            self.wake()
        elif how != DriveEnd.PARKED:
            self._wake_soon()

    async def _drive(self, drive: Drive, loaded: Loaded | None) -> str:
        claim = drive.claim
        log_setup.bind(store=claim.key.store_id, run=claim.key.run_id)
        try:
            left: str = await drive.run(loaded)
        except (LeaseLost, RunEnded, RunNotFound) as error:
            left = "lost"
            _log.info("run.lost", reason=error.reason, epoch=claim.epoch)
        except Exception:  # noqa: BLE001  # one run must not affect the others
            left = "failed" if await self._fail(claim) else await self._report_crash(claim)
        else:
            _log.info("run.left", how=left, epoch=claim.epoch)
        if left != "crashed":
            self._note(claim, self._clock.monotonic())
        return left

    async def _fail(self, claim: Claim) -> bool:
        error_id = self._dependencies.ids.new("err")
        _log.exception("run.crashed", error_id=error_id)
        message = f"{Internal().message} ({error_id})"
        failure = RunFailure(failure_class=FailureClass.INTERNAL, reason=Internal.reason, message=message)
        try:
            await self._new_drive(claim, self._dependencies, failure).run()
        except (LeaseLost, RunEnded, RunNotFound):
            return True
        except Exception:  # noqa: BLE001  # logged, and reported as a crash
            _log.exception("run.cannot_be_failed", error_id=error_id)
            return False
        return True

    async def _report_crash(self, claim: Claim) -> str:
        """Release a run that can be neither driven nor ended, as if this worker had crashed while driving it.

        Return the reason to count in the metrics. If the ledger is unreachable too, the worker tries again at the next
        renewal.
        """
        try:
            quarantined = await self._ledger.report_crash(claim)
        except (LeaseLost, RunEnded, RunNotFound):
            return "lost"
        except Exception as error:  # noqa: BLE001  # the next renewal tries the run again
            _log.warning("run.not_given_up", error=_error_text(error), exc_info=not isinstance(error, PawlError))
            return "crashed"
        _log.error("run.given_up", epoch=claim.epoch, quarantined=quarantined)
        return "given_up"


def _error_text(error: Exception) -> str:
    return str(error) or type(error).__name__
