"""Prometheus metrics of the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pawl.chassis.ids import WorkerId
from pawl.chassis.metrics import Metrics
from pawl.errors import LeaseLost, PawlError
from pawl.job_store.app.reading import Claimed, Leases, Renewed

_GROUP_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128)
_DELAYS: Final = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 3600)


class PrometheusMeter:
    """See `ports.Meter`."""

    def __init__(self, metrics: Metrics) -> None:
        self._group_size = metrics.histogram("group_operations", "Operations of one transaction.", buckets=_GROUP_SIZES)
        self._group_seconds = metrics.histogram("group_duration_seconds", "Time to write one group of operations.")
        self._operations = metrics.counter("operations_total", "Operations answered, refused ones included.")
        self._refused = metrics.counter("refusals_total", "Operations refused, by reason.", ("reason",))
        self._lease_losses = metrics.counter("lease_losses_total", "Steps refused because the lease was lost.")
        self._quarantined = metrics.counter("quarantined_runs_total", "Runs quarantined because their workers died.")
        self._relayed = metrics.counter("lifecycle_relayed_total", "Life-cycle events stored by JetStream.")
        self._runs = metrics.gauge("runs", "Runs that have not ended, by state.", ("state",))
        self._claimable = metrics.gauge("claimable_runs", "Runs that a worker could claim now.")
        self._over_limit = metrics.gauge("over_limit_runs", "Runs that wait for a place, by the limit.", ("limit",))
        self._outbox = metrics.gauge("outbox_events", "Life-cycle events that JetStream does not have yet.")
        self._fires = metrics.counter(
            "schedule_fires_total", "Fires of schedules, by what became of them.", ("outcome",)
        )
        self._fire_delay = metrics.histogram(
            "schedule_delay_seconds", "Time from when a schedule was due to its fire.", buckets=_DELAYS
        )
        self._events = metrics.counter(
            "trigger_events_total", "Events that came to triggers, by what became of them.", ("outcome",)
        )
        self._webhooks_refused = metrics.counter(
            "webhook_refusals_total", "Webhooks that could fire nothing, by reason.", ("reason",)
        )
        self._due_events = metrics.gauge(
            "due_events", "Events that need not wait any more and that nobody has claimed."
        )
        self._jobs = metrics.gauge(
            "jobs", "Open jobs and the runs below them: working, queued, waiting, late.", ("state",)
        )
        self._notices = metrics.gauge(
            "notices", "What jobs tell conversations and no model has answered: pending, entered.", ("state",)
        )
        self._due_schedules = metrics.gauge("due_schedules", "Schedules that are due and that nobody has claimed.")

    def group_written(self, *, operations: int, seconds: float) -> None:
        self._group_size.observe(operations)
        self._group_seconds.observe(seconds)
        self._operations.inc(operations)

    def refused(self, error: PawlError) -> None:
        self._refused.labels(error.reason).inc()
        if isinstance(error, LeaseLost):
            self._lease_losses.inc()

    def quarantined(self, runs: int) -> None:
        self._quarantined.inc(runs)

    def relayed(self, events: int) -> None:
        self._relayed.inc(events)

    def schedule_fired(self, outcome: str, delay_seconds: float) -> None:
        self._fires.labels(outcome).inc()
        self._fire_delay.observe(max(0.0, delay_seconds))

    def trigger_fired(self, outcome: str) -> None:
        self._events.labels(outcome).inc()

    def webhook_refused(self, error: PawlError) -> None:
        self._webhooks_refused.labels(error.reason).inc()

    def ledger_counted(self, counts: Mapping[str, float]) -> None:
        for name, count in counts.items():
            match name:
                case "claimable":
                    self._claimable.set(count)
                case "over_user_limit":
                    self._over_limit.labels("user").set(count)
                case "over_store_limit":
                    self._over_limit.labels("store").set(count)
                case "working" | "queued" | "waiting" | "late":
                    self._jobs.labels(name).set(count)
                case "notices_pending" | "notices_entered":
                    self._notices.labels(name.removeprefix("notices_")).set(count)
                case "due_schedules":
                    self._due_schedules.set(count)
                case "due_events":
                    self._due_events.set(count)
                case "outbox":
                    self._outbox.set(count)
                case _:
                    self._runs.labels(name).set(count)


class CountedLeases:
    """Leases that count and time claims."""

    def __init__(self, leases: Leases, metrics: Metrics) -> None:
        self._leases = leases
        self._seconds = metrics.histogram("claim_duration_seconds", "Time of one claim.")
        self._claimed = metrics.counter("claims_total", "Runs given to workers.")

    async def claim(
        self, worker_id: WorkerId, *, runs_max: int, lease_seconds: float, background_runs_max: int
    ) -> list[Claimed]:
        with self._seconds.time():
            claimed = await self._leases.claim(
                worker_id,
                runs_max=runs_max,
                lease_seconds=lease_seconds,
                background_runs_max=background_runs_max,
            )
        self._claimed.inc(len(claimed))
        return claimed

    async def renew(self, worker_id: WorkerId, *, lease_seconds: float) -> Renewed:
        return await self._leases.renew(worker_id, lease_seconds=lease_seconds)

    async def release(self, worker_id: WorkerId) -> int:
        return await self._leases.release(worker_id)
