"""The metrics of the registry."""

from __future__ import annotations

from collections.abc import Callable

from pawl.chassis.process.metrics import Metrics


class RegistryMetrics:
    """The metrics of checks and executions. Tools are labels only if the process has loaded them."""

    def __init__(self, metrics: Metrics) -> None:
        self.executions = metrics.counter("executions_total", "Executions ended, by outcome.", ("tool", "outcome"))
        self.seconds = metrics.histogram("execution_duration_seconds", "Time of an execution.", ("tool",))
        self.checks = metrics.counter("checks_total", "Calls checked, by what may be done.", ("disposition",))
        self._running = metrics.gauge("executions_in_flight", "Executions under way.")
        self._threads = metrics.gauge("tool_threads_busy", "Threads of sync tools, those that cannot be stopped too.")
        self._processes = metrics.gauge("tool_processes_busy", "Processes of tools that run in one of their own.")

    def watch(
        self, *, running: Callable[[], float], threads_busy: Callable[[], float], processes_busy: Callable[[], float]
    ) -> None:
        """Read these whenever the metrics are read."""
        self._running.set_function(running)
        self._threads.set_function(threads_busy)
        self._processes.set_function(processes_busy)
