"""The counts of the gateway."""

from __future__ import annotations

from pawl.chassis.process.metrics import Metrics


class Counters:
    """The metrics of the door."""

    def __init__(self, metrics: Metrics) -> None:
        self.requests = metrics.counter("http_requests_total", "HTTP requests ended, by status.", ("route", "status"))
        self.seconds = metrics.histogram(
            "http_duration_seconds", "Duration of a request; streams are excluded.", ("route",)
        )
        self.streams = metrics.gauge("streams", "Streams of server-sent events that are open.")
        self.events = metrics.counter("stream_messages_total", "Messages sent on streams.")
