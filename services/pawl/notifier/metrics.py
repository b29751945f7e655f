"""The metrics of the notifier."""

from __future__ import annotations

from pawl.chassis.process.metrics import Metrics


class PrometheusCounters:
    """The metrics of events, subscriptions and deliveries."""

    def __init__(self, metrics: Metrics) -> None:
        self.events = metrics.counter(
            "events_total",
            "Events taken from the life cycle: notified, ignored (concern nobody), retried or rejected (unreadable).",
            ("outcome",),
        )
        self.published = metrics.counter("published_total", "Notifications handed to NATS.")
        self.subscriptions = metrics.gauge("subscriptions", "Subscribe streams that are open.")
        self.tried = metrics.histogram(
            "delivery_try_seconds",
            "Time that a try of a delivery took, by the kind of its channel (webhook, email) and the state"
            " that it has after it: delivered, waiting (for the next try) or dead.",
            ("kind", "state"),
        )
        self.delay = metrics.gauge(
            "delivery_delay_seconds",
            "Time since when the longest waiting delivery is due, by the kind of its channel, which does not fail.",
            ("kind",),
        )
        self.waiting = metrics.gauge(
            "deliveries_waiting", "Deliveries that wait, by the kind of their channel, over all replicas.", ("kind",)
        )
