from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from pawl.server.process.settings import Constant, ListenAddress, ServiceSettings


class JobStoreSettings(ServiceSettings):
    listen: ListenAddress = "127.0.0.1:7603"
    internal_listen: ListenAddress | None = "127.0.0.1:7633"
    metrics_listen: ListenAddress = "127.0.0.1:7613"
    service_keys_file: Path
    active_runs_per_store: int = Field(default=20, ge=1, le=10_000)
    active_runs_per_user: int = Field(default=5, ge=1, le=10_000)
    runs: Literal["on", "off"] = "on"
    event_retention_days: float = Field(default=7.0, ge=1.0)
    conversation_retention_days: int = Field(default=30, ge=1, le=100_000)

    # A step can contain the results of a whole batch of calls: up to 20 of 1 MiB each.
    message_bytes_max: Constant[int] = 32 * 1024 * 1024
    queued_runs_per_store: Constant[int] = 10_000
