"""Claims runs, keeps their leases and drives them side by side.

A run whose lease could not be confirmed in time is dropped before the lease
ends: another worker may drive it then. The ledger refuses what a late worker
writes all the same; dropping it keeps it from calling models and tools.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from services.agent_loop.app.drive import Drive
from services.agent_loop.app.patience import TRANSIENT
from services.agent_loop.app.ports import Claim, Meter, Randomness, RunKey, Wakeups, WorkerLedger
from services.agent_loop.domain.failure import FailureClass
from services.agent_loop.domain.run import RunFailure
from services.chassis import logs
from services.chassis.clock import Clock
from services.chassis.ids import IdSource
from services.errors import Internal, LeaseLost, RunEnded, RunNotFound

_CLAIMED_AT_ONCE_MAX: Final = 64
# A claim costs the same for one run as for many. So the next one comes at the earliest so long after the last began.
_CLAIM_SECONDS_MIN: Final = 0.02
# A sleep that ends so late says that this process has more to do than it can: it takes on nothing more for a while,
# so that what it has, and the requests that it serves, do not wait for each other.
_BUSY_SECONDS: Final = 0.05
_BREATH_SECONDS_MAX: Final = 1.0
# Work is stopped this long before a lease that nobody confirmed ends.
_FENCE_MARGIN_SECONDS: Final = 0.5
_REMEMBERED_MAX: Final = 4096
_RELEASE_SECONDS_MAX: Final = 1.0

_log = logs.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """How much a worker takes on, and its rhythm."""

    runs_max: int = 256
    lease_seconds: float = 10.0
    renew_seconds: float = 3.0
    poll_seconds: float = 1.0
    hand_over_seconds: float = 1.0


@dataclass(slots=True, kw_only=True)
class _Held:
    drive: Drive
    task: asyncio.Task[str]
    claimed_at: float
    confirmed_until: float


@dataclass(slots=True)
class _Recent:
    """The claims that ended lately, so that a late answer about them is not taken for a new claim."""

    claims: dict[Claim, None] = field(default_factory=dict)

    def add(self, claim: Claim) -> None:
        self.claims[claim] = None
        if len(self.claims) > _REMEMBERED_MAX:
            del self.claims[next(iter(self.claims))]

    def __contains__(self, claim: Claim) -> bool:
        return claim in self.claims


class Worker:
    """Drives runs until it is told to stop.

    Run `claim_forever`, `renew_forever` and `fence_forever` side by side, each
    again if it fails; at the end cancel them and call `hand_over`.
    """

    def __init__(
        self,
        worker_id: str,
        *,
        ledger: WorkerLedger,
        new_drive: Callable[[Claim, RunFailure | None], Drive],
        clock: Clock,
        ids: IdSource,
        random: Randomness,
        meter: Meter,
        limits: WorkerLimits,
    ) -> None:
        self.worker_id = worker_id
        self._ledger = ledger
        self._new_drive = new_drive
        self._clock = clock
        self._ids = ids
        self._random = random
        self._meter = meter
        self._limits = limits
        self._held: dict[Claim, _Held] = {}
        self._recent = _Recent()
        self._work_may_be_there = asyncio.Event()
        self._claiming = asyncio.Lock()
        self._stopping = False

    async def listen(self, wakeups: Wakeups) -> None:
        """Be woken by hints from now on. Without them the worker polls."""
        await wakeups.subscribe(self.worker_id, on_work=self._on_work, on_command=self._on_command)

    async def claim_forever(self) -> None:
        """Claim runs whenever there may be some and there is room."""
        while not self._stopping:
            self._work_may_be_there.clear()
            room = min(self._limits.runs_max - len(self._held), _CLAIMED_AT_ONCE_MAX)
            began = self._clock.monotonic()
            if room <= 0 or await self._claim(room) < room:
                pause = self._limits.poll_seconds * (0.8 + 0.4 * self._random())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._work_may_be_there.wait()
            await self._breathe(began + _CLAIM_SECONDS_MIN)

    async def _breathe(self, due: float) -> None:
        """Sleep until `due`, and on for up to a second as long as this process has too much to do."""
        end = due + _BREATH_SECONDS_MAX
        while (left := due - self._clock.monotonic()) > 0:
            await self._clock.sleep(left)
            late = self._clock.monotonic() - due
            if self._held and late > _BUSY_SECONDS:
                due = min(due + 2 * late, end)

    async def renew_forever(self) -> None:
        """Renew all leases, and find out what was lost and who got commands."""
        while True:
            await self._clock.sleep(self._limits.renew_seconds)
            try:
                async with asyncio.timeout(self._limits.renew_seconds):
                    await self._renew()
            except (TimeoutError, *TRANSIENT) as error:
                _log.warning("lease.not_renewed", error=str(error) or type(error).__name__)

    async def fence_forever(self) -> None:
        """Drop each run whose lease is about to end unconfirmed."""
        while True:
            now = self._clock.monotonic()
            for claim, held in list(self._held.items()):
                if held.confirmed_until - _FENCE_MARGIN_SECONDS <= now:
                    self._drop(claim, held, "lease.unconfirmed")
            soonest = min((held.confirmed_until for held in self._held.values()), default=now + 1.0)
            await self._clock.sleep(min(1.0, max(0.05, soonest - _FENCE_MARGIN_SECONDS - now)))

    async def hand_over(self) -> None:
        """Stop all drives at their next commit point and give all runs back. Nothing is settled."""
        self._stopping = True
        tasks = [held.task for held in self._held.values()]
        for held in self._held.values():
            held.drive.hand_over()
        if tasks:
            await asyncio.wait(tasks, timeout=self._limits.hand_over_seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            # What a claim that is under way still brings is given back too.
            async with asyncio.timeout(_RELEASE_SECONDS_MAX), self._claiming:
                await self._ledger.release(self.worker_id)
        except (TimeoutError, *TRANSIENT) as error:
            # The leases end by themselves.
            _log.warning("worker.not_released", error=str(error) or type(error).__name__)

    async def _on_work(self) -> None:
        self._work_may_be_there.set()

    async def _on_command(self, key: RunKey) -> None:
        for claim, held in self._held.items():
            if claim.key == key:
                held.drive.poke()

    async def _claim(self, room: int) -> int:
        async with self._claiming:
            if self._stopping:
                return 0
            began = self._clock.monotonic()
            claims = await self._ledger.claim(self.worker_id, runs_max=room, lease_seconds=self._limits.lease_seconds)
        for claim in claims:
            self._start(claim, began)
        return len(claims)

    async def _renew(self) -> None:
        began = self._clock.monotonic()
        renewal = await self._ledger.renew(self.worker_id, lease_seconds=self._limits.lease_seconds)
        for claim, held in list(self._held.items()):
            if claim in renewal.held:
                held.confirmed_until = began + self._limits.lease_seconds
            elif held.claimed_at < began:
                self._drop(claim, held, "lease.lost")
        for claim in renewal.held:
            # Held by this worker and driven by nobody: the answer to the claim was lost, or its drive crashed and
            # the ledger could not be told.
            if claim not in self._held and claim not in self._recent:
                self._start(claim, began)
        for claim in renewal.with_commands:
            if claim in self._held:
                self._held[claim].drive.poke()

    def _start(self, claim: Claim, began: float) -> None:
        if claim in self._held or self._stopping:
            return
        drive = self._new_drive(claim, None)
        task = asyncio.get_running_loop().create_task(self._drive(drive), name=f"drive {claim.key.run_id}")
        task.add_done_callback(lambda ended: self._forget(claim, "lost" if ended.cancelled() else ended.result()))
        self._held[claim] = _Held(
            drive=drive, task=task, claimed_at=began, confirmed_until=began + self._limits.lease_seconds
        )
        self._meter.runs_held(len(self._held))

    def _drop(self, claim: Claim, held: _Held, why: str) -> None:
        """Stop a drive. It is held until it has ended, so that no other begins under the same claim before."""
        if held.task.cancelling():
            return
        _log.warning(why, store=claim.key.store_id, run=claim.key.run_id, epoch=claim.epoch)
        held.task.cancel()

    def _forget(self, claim: Claim, how: str) -> None:
        del self._held[claim]
        self._meter.runs_held(len(self._held))
        self._meter.run_left(how)
        self._work_may_be_there.set()

    async def _drive(self, drive: Drive) -> str:
        """Drive a run; return how it was left."""
        claim = drive.claim
        logs.bind(store=claim.key.store_id, run=claim.key.run_id)
        try:
            left: str = await drive.run()
        except (LeaseLost, RunEnded, RunNotFound) as error:
            left = "lost"
            _log.info("run.lost", reason=error.reason, epoch=claim.epoch)
        except Exception:  # noqa: BLE001  # one run must not hurt the others
            left = "failed" if await self._fail(claim) else await self._give_up(claim)
        else:
            _log.info("run.left", how=left, epoch=claim.epoch)
        if left != "crashed":
            self._recent.add(claim)
        return left

    async def _fail(self, claim: Claim) -> bool:
        """End a run whose drive crashed; whether it could be ended."""
        error_id = self._ids.new("err")
        _log.exception("run.crashed", error_id=error_id)
        message = f"{Internal().message} ({error_id})"
        failure = RunFailure(failure_class=FailureClass.INTERNAL, reason=Internal.reason, message=message)
        try:
            await self._new_drive(claim, failure).run()
        except (LeaseLost, RunEnded, RunNotFound):
            return True
        except Exception:  # noqa: BLE001  # logged, and given up
            _log.exception("run.cannot_be_failed", error_id=error_id)
            return False
        return True

    async def _give_up(self, claim: Claim) -> str:
        """Give a run back that can neither be driven nor ended, as if this worker had died of it.

        Return how it was left. If the ledger cannot be told either, the next renewal tries the run again.
        """
        try:
            quarantined = await self._ledger.report_crash(claim)
        except (LeaseLost, RunEnded, RunNotFound):
            return "lost"
        except TRANSIENT as error:
            _log.warning("run.not_given_up", error=str(error) or type(error).__name__)
            return "crashed"
        _log.error("run.given_up", epoch=claim.epoch, quarantined=quarantined)
        return "given_up"
