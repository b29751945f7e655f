"""The loop's Prometheus metrics."""

from __future__ import annotations

from pawl.server.process.metrics import Metrics
from pawl.values import Usage


class PrometheusMeter:
    def __init__(self, metrics: Metrics) -> None:
        self._model_calls = metrics.counter("model_calls_total", "Model calls ended.", ("outcome",))
        self._tokens = metrics.counter("model_tokens_total", "Tokens reported or estimated, by kind.", ("kind",))
        self._executions = metrics.counter("executions_total", "Tool executions ended.", ("outcome",))
        self._held = metrics.gauge("runs_held", "Runs that this worker is driving.")
        self._left = metrics.counter("runs_left_total", "Runs that this worker released, by reason.", ("how",))

    def model_called(self, outcome: str, usage: Usage) -> None:
        self._model_calls.labels(outcome).inc()
        self._tokens.labels("input").inc(usage.input_tokens)
        self._tokens.labels("cached_input").inc(usage.cached_input_tokens)
        self._tokens.labels("output").inc(usage.output_tokens)
        self._tokens.labels("reasoning").inc(usage.reasoning_tokens)

    def call_executed(self, outcome: str) -> None:
        self._executions.labels(outcome.lower()).inc()

    def runs_held(self, count: int) -> None:
        self._held.set(count)

    def run_left(self, how: str) -> None:
        self._left.labels(how).inc()
