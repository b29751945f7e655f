"""The gateway's metrics."""

from __future__ import annotations

from pawl.server.process.metrics import Metrics


class Counters:
    def __init__(self, metrics: Metrics) -> None:
        self.requests = metrics.counter(
            "http_requests_total", "HTTP requests completed, by status.", ("route", "status")
        )
        self.seconds = metrics.histogram("http_duration_seconds", "Duration of requests, without streams.", ("route",))
        self.trace_contexts_ignored = metrics.rpc.trace_contexts_ignored
        self.streams = metrics.gauge("streams", "Open server-sent event streams.")
        self.events = metrics.counter("stream_messages_total", "Messages sent on streams.")
