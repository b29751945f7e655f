"""The metrics of the notifier."""

from __future__ import annotations

from pawl.chassis.metrics import Metrics


class PrometheusCounters:
    """The counters of the use cases."""

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
            "Time that a try of a delivery took, by the kind of its channel (webhook, email) and the state"
            " that it has after it: delivered, waiting (for the next try) or dead.",
            ("kind", "state"),
        )
        self._delay = metrics.gauge(
            "delivery_delay_seconds",
            "Time since when the longest waiting delivery is due, by the kind of its channel, which does not fail.",
            ("kind",),
        )
        self._waiting = metrics.gauge(
            "deliveries_waiting", "Deliveries that wait, by the kind of their channel, over all replicas.", ("kind",)
        )

    def event_taken(self, outcome: str) -> None:
        """`outcome`: notified, ignored, rejected or retried."""
        self._events.labels(outcome).inc()

    def published(self, count: int) -> None:
        """Notifications were handed to the bus."""
        self._published.inc(count)

    def watching(self, count: int) -> None:
        """So many subscriptions are open."""
        self._subscriptions.set(count)

    def delivery_tried(self, kind: str, state: str, seconds: float) -> None:
        """A try of a delivery to a ChannelKind has ended after so long, and it is now `state`: a DeliveryState."""
        self._tried.labels(kind, state).observe(seconds)

    def deliveries_waiting(self, kind: str, count: int, delay_seconds: float) -> None:
        """So many deliveries to a ChannelKind wait, over all replicas, and one is due for so long."""
        self._waiting.labels(kind).set(count)
        self._delay.labels(kind).set(delay_seconds)
