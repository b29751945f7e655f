"""The metrics of the notifier."""

from __future__ import annotations

from pawl.chassis.metrics import Metrics


class PrometheusCounters:
    """See `ports.Counters`."""

    def __init__(self, metrics: Metrics) -> None:
        self._events = metrics.counter(
            "events_total",
            "Events taken from the life cycle: notified, ignored (concern nobody), retried or rejected (unreadable).",
            ("outcome",),
        )
        self._published = metrics.counter("published_total", "Notifications handed to NATS.")
        self._subscriptions = metrics.gauge("subscriptions", "Subscribe streams that are open.")

    def event_taken(self, outcome: str) -> None:
        self._events.labels(outcome).inc()

    def published(self, count: int) -> None:
        self._published.inc(count)

    def watching(self, count: int) -> None:
        self._subscriptions.set(count)
