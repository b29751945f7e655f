"""Settings of the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import Field

from pawl.chassis.settings import ListenAddress, ServiceSettings

UNSENT_HOURS_MIN: Final = 24.0
"""So long life-cycle events wait for a NATS that is away, also if none that were sent are kept."""


class JobStoreSettings(ServiceSettings):
    """The settings of the ledger, beyond those of every service."""

    listen: ListenAddress = "127.0.0.1:7603"
    internal_listen: ListenAddress | None = "127.0.0.1:7633"
    metrics_listen: ListenAddress = "127.0.0.1:7613"
    service_keys_file: Path
    # A step may bring the results of a whole batch: 20 of 1 MiB.
    message_bytes_max: int = Field(default=32 * 1024 * 1024, ge=1024)
    conversation_queue_max: int = Field(default=100, ge=1, le=1000)
    active_runs_per_store: int = Field(default=20, ge=1, le=10_000)
    active_runs_per_user: int = Field(default=5, ge=1, le=10_000)
    active_jobs_per_store: int = Field(default=100, ge=1, le=10_000)
    queued_runs_per_store: int = Field(default=10_000, ge=1, le=1_000_000)
    # The first two crashes may have been of anybody else: only from then on a run is looked at alone.
    crashes_max: int = Field(default=3, ge=3, le=100)
    request_retention_hours: float = Field(default=48.0, ge=24.0)
    lifecycle_resend_hours: float = Field(default=24.0, ge=0.0)
    event_retention_days: float = Field(default=7.0, ge=1.0)
    conversation_retention_days: float = Field(default=30.0, ge=1.0)
    retention_interval_seconds: float = Field(default=600.0, gt=0)
