from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pawl.server.process.metrics import FirstValues, Metrics

# Number of pairs of store and tool with their own label.
_TOOLS_MAX: Final = 1000


class RegistryMetrics:
    """Metrics for checks and executions. Only the names of loaded tools are used as label values."""

    def __init__(self, metrics: Metrics) -> None:
        self._store = metrics.store
        self._tools = FirstValues(_TOOLS_MAX)
        self._executions = metrics.counter(
            "executions_total", "Executions ended, by outcome.", ("store", "tool", "outcome")
        )
        self._seconds = metrics.histogram("execution_duration_seconds", "Duration of an execution.", ("tool",))
        self.checks = metrics.counter("checks_total", "Calls checked, by disposition.", ("disposition",))
        self._running = metrics.gauge("executions_in_flight", "Executions in progress.")
        self._threads = metrics.gauge("tool_threads_busy", "Threads busy with sync tools, including unstoppable ones.")
        self._processes = metrics.gauge(
            "tool_processes_busy", "Processes busy with tools that run in their own process."
        )

    def executed(self, store_id: str, tool_name: str, outcome: str, seconds: float) -> None:
        store = self._store(store_id)
        tool = self._tools.label(tool_name, store)
        self._executions.labels(store, tool, outcome).inc()
        self._seconds.labels(tool).observe(seconds)

    def watch(
        self, *, running: Callable[[], float], threads_busy: Callable[[], float], processes_busy: Callable[[], float]
    ) -> None:
        """Set the functions that return the gauges' values."""
        self._running.set_function(running)
        self._threads.set_function(threads_busy)
        self._processes.set_function(processes_busy)
