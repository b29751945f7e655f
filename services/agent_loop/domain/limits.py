"""Bounds of a run, with the deployment's defaults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Every bound that holds for a run; see pawl.event.v1.RunLimits for what each means."""

    rounds_max: int = 10
    calls_per_round_max: int = 20
    identical_calls_max: int = 4
    tool_timeout_seconds: float = 10.0
    round_timeout_seconds: float = 120.0
    run_timeout_seconds: float = 300.0
    model_headers_timeout_seconds: float = 30.0
    model_idle_timeout_seconds: float = 45.0
    model_attempts_max: int = 4
    result_bytes_per_round_max: int = 51_200
    approval_expiry_seconds: float = 900.0
    offer_deadline_seconds: float = 600.0
    answer_timeout_seconds: float = 86_400.0
    context_bytes_max: int = 400_000
