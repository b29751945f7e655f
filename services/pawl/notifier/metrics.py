"""Defines the notifier's Prometheus metrics."""

from __future__ import annotations

from pawl.server.process.metrics import Metrics


class PrometheusCounters:
    def __init__(self, metrics: Metrics) -> None:
        self.events = metrics.counter(
            "events_total",
            "Run events consumed: notified, ignored (no notification), retried or rejected (unreadable).",
            ("outcome",),
        )
        self.published = metrics.counter("published_total", "Notifications published to NATS.")
        self.subscriptions = metrics.gauge("subscriptions", "Open Subscribe streams.")
        self.tried = metrics.histogram(
            "delivery_try_seconds",
            "Duration of a delivery attempt, by the kind of its channel (webhook, email) and the resulting state:"
            " delivered, waiting (for the next attempt) or dead.",
            ("kind", "state"),
        )
        self.delay = metrics.gauge(
            "delivery_delay_seconds",
            "How long the oldest due delivery has been due, by channel kind. Failing channels are excluded.",
            ("kind",),
        )
        self.waiting = metrics.gauge(
            "deliveries_waiting", "Waiting deliveries across all replicas, by channel kind.", ("kind",)
        )
