"""Defines the ledger's Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pawl.errors import LeaseLost, PawlError
from pawl.server.process.metrics import Metrics

_GROUP_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128)
_DELAYS: Final = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 3600)


class PrometheusMeter:
    def __init__(self, metrics: Metrics) -> None:
        self.claim_seconds = metrics.histogram("claim_duration_seconds", "Time of one claim.")
        self.claims = metrics.counter("claims_total", "Runs given to workers.")
        self._group_size = metrics.histogram("group_operations", "Operations in one transaction.", buckets=_GROUP_SIZES)
        self._group_seconds = metrics.histogram("group_duration_seconds", "Time to write one group of operations.")
        self._operations = metrics.counter("operations_total", "Operations answered, including refused ones.")
        self._refused = metrics.counter("refusals_total", "Operations refused, by reason.", ("reason",))
        self._lease_losses = metrics.counter("lease_losses_total", "Steps refused because the lease was lost.")
        self.quarantined = metrics.counter("quarantined_runs_total", "Runs quarantined because their workers died.")
        self.relayed = metrics.counter("lifecycle_relayed_total", "Life-cycle events stored by JetStream.")
        self._runs = metrics.gauge("runs", "Runs that have not ended, by state.", ("state",))
        self._fires = metrics.counter("schedule_fires_total", "Schedule firings, by outcome.", ("outcome",))
        self._fire_delay = metrics.histogram(
            "schedule_delay_seconds", "Delay between a schedule's scheduled time and its firing.", buckets=_DELAYS
        )
        self.events = metrics.counter("trigger_events_total", "Events received by triggers, by outcome.", ("outcome",))
        self.webhooks_refused = metrics.counter("webhook_refusals_total", "Webhooks refused, by reason.", ("reason",))
        over_limit = metrics.gauge("over_limit_runs", "Runs waiting for a slot, by limit.", ("limit",))
        jobs = metrics.gauge("jobs", "Open jobs and the runs below them: working, queued, waiting, late.", ("state",))
        notices = metrics.gauge("notices", "Job notices that no model has answered: pending, entered.", ("state",))
        self._counted = {
            "claimable": metrics.gauge("claimable_runs", "Runs that a worker could claim now."),
            "over_user_limit": over_limit.labels("user"),
            "over_store_limit": over_limit.labels("store"),
            "outbox": metrics.gauge("outbox_events", "Life-cycle events not yet stored by JetStream."),
            **{state: jobs.labels(state) for state in ("working", "queued", "waiting", "late")},
            "notices_pending": notices.labels("pending"),
            "notices_entered": notices.labels("entered"),
            "due_schedules": metrics.gauge("due_schedules", "Due schedules that no worker has claimed."),
            "due_events": metrics.gauge("due_events", "Due trigger events that no worker has claimed."),
        }

    def group_written(self, *, operations: int, seconds: float) -> None:
        self._group_size.observe(operations)
        self._group_seconds.observe(seconds)
        self._operations.inc(operations)

    def refused(self, error: PawlError) -> None:
        self._refused.labels(error.reason).inc()
        if isinstance(error, LeaseLost):
            self._lease_losses.inc()

    def schedule_fired(self, outcome: str, delay_seconds: float) -> None:
        self._fires.labels(outcome).inc()
        self._fire_delay.observe(max(0.0, delay_seconds))

    def ledger_counted(self, counts: Mapping[str, float]) -> None:
        for name, count in counts.items():
            (self._counted.get(name) or self._runs.labels(name)).set(count)
