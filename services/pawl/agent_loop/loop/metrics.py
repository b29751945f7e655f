from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pawl.agent_loop.loop.ports import ModelTiming
from pawl.chassis.ids import StoreId
from pawl.server.process.metrics import Metrics
from pawl.values import Usage, WaitKind

_CALL_SECONDS: Final = (0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 60, 120)
_ADDED_SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2)


class PrometheusMeter:
    """Metrics of the loop. `provider` is the deployment's default model server. Other servers are labelled by name."""

    def __init__(self, metrics: Metrics, provider: str, monotonic: Callable[[], float]) -> None:
        self._store, self._provider, self._monotonic = metrics.store, provider, monotonic
        self._model_calls = metrics.counter(
            "model_calls_total",
            "Model calls that ended, by outcome: answered, cut (stopped early), forgotten (step refused), timeout, "
            "or a failure class.",
            ("store", "provider", "outcome"),
        )
        self._tokens = metrics.counter(
            "model_tokens_total",
            "Tokens by kind: input (includes cached_input), output (includes reasoning), and estimated (not reported).",
            ("store", "provider", "kind"),
        )
        self._first_token = metrics.histogram(
            "model_first_token_seconds",
            "Time from a model request to the first output.",
            ("store", "provider"),
            buckets=_CALL_SECONDS,
        )
        self._seconds = metrics.histogram(
            "model_duration_seconds",
            "Time from a model request to the end of its answer or its failure.",
            ("store", "provider"),
            buckets=_CALL_SECONDS,
        )
        self._added = metrics.histogram(
            "model_added_latency_seconds",
            "Latency that Pawl adds before a model request: the time since the message, result or retry that "
            "caused it.",
            buckets=_ADDED_SECONDS,
        )
        self._waits = metrics.counter(
            "model_call_waits_total",
            "Model calls that had to wait, by limit: rate (per minute) or a token budget (agent_quota and so on).",
            ("limit",),
        )
        self._executions = metrics.counter("executions_total", "Tool executions ended.", ("outcome",))
        self._held = metrics.gauge("runs_held", "Runs that this worker is driving.")
        self._left = metrics.counter("runs_left_total", "Runs that this worker released, by reason.", ("how",))

    def model_called(self, store_id: StoreId, outcome: str, usage: Usage, timing: ModelTiming) -> None:
        store, provider = self._store(store_id), timing.server or self._provider
        self._model_calls.labels(store, provider, outcome).inc()
        for kind in ("input", "cached_input", "output", "reasoning", "estimated"):
            if tokens := getattr(usage, f"{kind}_tokens"):
                self._tokens.labels(store, provider, kind).inc(tokens)
        self._seconds.labels(store, provider).observe(self._monotonic() - timing.sent_at)
        if timing.first_output_at is not None:
            self._first_token.labels(store, provider).observe(timing.first_output_at - timing.sent_at)
        if timing.due_at is not None:
            self._added.observe(timing.sent_at - timing.due_at)

    def model_call_waits(self, limit: WaitKind) -> None:
        self._waits.labels(limit.name.lower()).inc()

    def call_executed(self, outcome: str) -> None:
        self._executions.labels(outcome.lower()).inc()

    def runs_held(self, count: int) -> None:
        self._held.set(count)

    def run_left(self, how: str) -> None:
        self._left.labels(how).inc()
