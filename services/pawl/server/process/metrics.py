"""The Prometheus metrics of a process.

Names have the form `pawl_<service>_<noun>_<unit or total>`. Label values come from closed sets.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4

_RPC_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


# Number of stores with their own label in a process.
STORES_MAX: Final = 100
# The label of all other stores.
OTHER: Final = "other"


class FirstValues:
    """Limits the number of values of a label.

    The first `values_max` values become labels until the process ends. Later values share the label `other`.
    """

    def __init__(self, values_max: int) -> None:
        self._left = values_max
        self._labels: dict[Hashable, str] = {}

    def label(self, value: str, *scope: str) -> str:
        """Return the label for a value. The same value in another `scope` counts as another value."""
        key = (value, *scope) if scope else value
        label = self._labels.get(key)
        if label is None:
            if self._left <= 0:
                return OTHER
            self._left -= 1
            label = self._labels[key] = value
        return label


class Metrics:
    """The metrics of one process, in its own registry.

    `service` becomes part of every name (for example, `pawl_job_store_...`).
    """

    def __init__(self, service: str) -> None:
        # Otherwise every counter and histogram has a second series that no one uses.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library leaves this one untyped
        self.registry = CollectorRegistry()
        self._prefix = f"pawl_{service}"
        ProcessCollector(namespace=self._prefix, registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.rpc = RpcMetrics(self)
        self._stores = FirstValues(STORES_MAX)

    def store(self, store_id: str) -> str:
        """Return the value of the label `store` for a store."""
        return self._stores.label(store_id)

    def counter(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Counter:
        """Create a counter `pawl_<service>_<name>`. The name must end with `_total`."""
        return Counter(f"{self._prefix}_{name}", documentation, labels, registry=self.registry)

    def gauge(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(f"{self._prefix}_{name}", documentation, labels, registry=self.registry)

    def histogram(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float] = _RPC_SECONDS,
    ) -> Histogram:
        """Create a histogram `pawl_<service>_<name>`. The default buckets are in seconds."""
        return Histogram(f"{self._prefix}_{name}", documentation, labels, registry=self.registry, buckets=buckets)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class RpcMetrics:
    def __init__(self, metrics: Metrics) -> None:
        self.requests = metrics.counter("rpc_requests_total", "RPCs ended, by gRPC code.", ("method", "code"))
        self.seconds = metrics.histogram(
            "rpc_duration_seconds", "Time from the start of an RPC to its end, streams included.", ("method",)
        )
        self.login_failures = metrics.counter(
            "login_failures_total", "Calls without a valid credential, by kind of problem.", ("kind",)
        )
        self.trace_contexts_ignored = metrics.counter(
            "trace_contexts_ignored_total", "Calls with an invalid traceparent, which was ignored."
        )
        self.in_flight = metrics.gauge("rpc_in_flight", "RPCs being served.", ("method",))
