from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from pawl.chassis.ids import StoreId
from pawl.errors import LeaseLost, PawlError
from pawl.event.v1.run_pb2 import FailureClass, Run
from pawl.job_store.ledger.reading import Claimed
from pawl.job_store.ledger.rules.rows import CallRow, RunRow
from pawl.server.process.metrics import Metrics
from pawl.values import RunState, WaitKind

_GROUP_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128)
_BATCH_SIZES: Final = (1, 2, 4, 8, 16, 64, 256)
_DELAYS: Final = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 3600)
_PARTS: Final = (0.5, 0.8, 0.9, 1)
_WAITS: Final = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60, 300)
_DURATIONS: Final = (0.5, 1, 2, 5, 10, 30, 60, 300, 1800, 7200, 86400)
_ROUNDS: Final = (1, 2, 3, 5, 10, 20, 50, 100)


class PrometheusMeter:
    def __init__(self, metrics: Metrics) -> None:
        self._store = metrics.store
        self._started = metrics.counter("runs_started_total", "Runs created, including child runs.", ("store",))
        self._ended = metrics.counter(
            "runs_ended_total",
            "Runs ended: completed, failed, cancelled or expired, with the failure class or stop cause.",
            ("store", "outcome", "cause"),
        )
        self._run_seconds = metrics.histogram(
            "run_duration_seconds", "Time from a run's creation to its end.", ("store",), buckets=_DURATIONS
        )
        self._run_rounds = metrics.histogram("run_rounds", "Rounds of an ended run.", ("store",), buckets=_ROUNDS)
        self._calls = metrics.counter("calls_ended_total", "Tool calls ended, by final state.", ("store", "outcome"))
        self._wait_seconds = metrics.histogram(
            "queue_wait_seconds", "How long a run was due before a worker claimed it.", ("store",), buckets=_WAITS
        )
        self._batch_size = metrics.histogram(
            "batch_events", "Events of a run in one row of its log.", buckets=_BATCH_SIZES
        )
        waiting = metrics.gauge(
            "waiting_runs", "Runs in state WAITING. A run with several reasons counts for each.", ("reason",)
        )
        self.claim_seconds = metrics.histogram("claim_duration_seconds", "Time taken by one claim.")
        self._claims = metrics.counter("claims_total", "Runs claimed by workers.")
        self._group_size = metrics.histogram("group_operations", "Operations in one transaction.", buckets=_GROUP_SIZES)
        self._group_seconds = metrics.histogram(
            "group_duration_seconds", "Time taken to write one group of operations."
        )
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
        self._limit_used = metrics.histogram(
            "model_limit_used_ratio",
            "Used fraction of each limit on model calls (limits per minute and token budgets), at each call.",
            ("store", "limit"),
            buckets=_PARTS,
        )
        over_limit = metrics.gauge("over_limit_runs", "Runs waiting for a slot, by limit.", ("limit",))
        jobs = metrics.gauge("jobs", "Open jobs and the runs below them: working, queued, waiting, late.", ("state",))
        notices = metrics.gauge("notices", "Job notices that no model has answered: pending, entered.", ("state",))
        self._counted = {
            "claimable": metrics.gauge("claimable_runs", "Runs that a worker could claim now."),
            "over_user_limit": over_limit.labels("user"),
            "over_store_limit": over_limit.labels("store"),
            "outbox": metrics.gauge("outbox_events", "Life-cycle events not yet stored by JetStream."),
            **{state: jobs.labels(state) for state in ("working", "queued", "waiting", "late")},
            **{kind.name: waiting.labels(kind.name.lower()) for kind in WaitKind},
            "notices_pending": notices.labels("pending"),
            "notices_entered": notices.labels("entered"),
            "due_schedules": metrics.gauge("due_schedules", "Due schedules that no worker has claimed."),
            "due_events": metrics.gauge("due_events", "Due trigger events that no worker has claimed."),
        }

    def group_written(self, *, operations: int, seconds: float) -> None:
        self._group_size.observe(operations)
        self._group_seconds.observe(seconds)
        self._operations.inc(operations)

    def batches_written(self, sizes: Iterable[int]) -> None:
        for events in sizes:
            self._batch_size.observe(events)

    def work_ended(self, started: Iterable[RunRow], ended: Iterable[RunRow], ended_calls: Iterable[CallRow]) -> None:
        """Record the metrics of a group that is durable."""
        for run in started:
            self._started.labels(self._store(run.store_id)).inc()
        for run in ended:
            store = self._store(run.store_id)
            self._ended.labels(store, run.state.name.lower(), _cause(run)).inc()
            if run.end_time is not None:
                self._run_seconds.labels(store).observe((run.end_time - run.create_time).total_seconds())
            self._run_rounds.labels(store).observe(run.round)
        for call in ended_calls:
            self._calls.labels(self._store(call.store_id), call.state.name.lower()).inc()

    def claimed(self, runs: Iterable[Claimed]) -> None:
        for run in runs:
            self._claims.inc()
            self._wait_seconds.labels(self._store(run.store_id)).observe(run.waited_seconds)

    def limit_used(self, store_id: StoreId, limit: str, part: float) -> None:
        self._limit_used.labels(self._store(store_id), limit).observe(part)

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


def _cause(run: RunRow) -> str:
    """Return a failed run's failure class or a cancelled run's stop cause. For other runs, return an empty string."""
    if run.state is RunState.FAILED:
        name = FailureClass.Name(Run.FromString(run.failure).failure.failure_class)
        return name.removeprefix("FAILURE_CLASS_").lower()
    return run.stop_cause.name.lower() if run.state is RunState.CANCELLED and run.stop_cause else ""
