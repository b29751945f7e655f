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
        self._tried = metrics.histogram(
            "delivery_try_seconds",
            "Time that a try of a delivery to a webhook took, by the state that the delivery has after it: delivered,"
            " waiting (for the next try) or dead.",
            ("state",),
        )
        self._waiting = metrics.gauge("deliveries_waiting", "Deliveries to webhooks that wait, over all replicas.")

    def event_taken(self, outcome: str) -> None:
        self._events.labels(outcome).inc()

    def published(self, count: int) -> None:
        self._published.inc(count)

    def watching(self, count: int) -> None:
        self._subscriptions.set(count)

    def delivery_tried(self, state: str, seconds: float) -> None:
        self._tried.labels(state).observe(seconds)

    def deliveries_waiting(self, count: int) -> None:
        self._waiting.set(count)
