"""Settings of the ledger."""

from __future__ import annotations

from pydantic import Field

from services.chassis.settings import ListenAddress, ServiceSettings


class JobStoreSettings(ServiceSettings):
    """What the ledger can be told, beyond what every service can."""

    listen: ListenAddress = "127.0.0.1:7603"
    metrics_listen: ListenAddress = "127.0.0.1:7613"
    # A step may bring the results of a whole batch: 20 of 1 MiB.
    message_bytes_max: int = Field(default=32 * 1024 * 1024, ge=1024)
    conversation_queue_max: int = Field(default=100, ge=1, le=1000)
    request_retention_hours: float = Field(default=48.0, ge=24.0)
    event_retention_days: float = Field(default=7.0, ge=1.0)
    conversation_retention_days: float = Field(default=30.0, ge=1.0)
    retention_interval_seconds: float = Field(default=600.0, gt=0)
