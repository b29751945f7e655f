"""Defines the registry's Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable

from pawl.server.process.metrics import Metrics


class RegistryMetrics:
    """Metrics for checks and executions. Only loaded tools appear as label values."""

    def __init__(self, metrics: Metrics) -> None:
        self.executions = metrics.counter("executions_total", "Executions ended, by outcome.", ("tool", "outcome"))
        self.seconds = metrics.histogram("execution_duration_seconds", "Duration of an execution.", ("tool",))
        self.checks = metrics.counter("checks_total", "Calls checked, by disposition.", ("disposition",))
        self._running = metrics.gauge("executions_in_flight", "Executions in progress.")
        self._threads = metrics.gauge("tool_threads_busy", "Threads busy with sync tools, including unstoppable ones.")
        self._processes = metrics.gauge(
            "tool_processes_busy", "Processes busy with tools that run in their own process."
        )

    def watch(
        self, *, running: Callable[[], float], threads_busy: Callable[[], float], processes_busy: Callable[[], float]
    ) -> None:
        """Set the functions that return the gauges' values."""
        self._running.set_function(running)
        self._threads.set_function(threads_busy)
        self._processes.set_function(processes_busy)
