"""The settings of the registry."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr

from pawl.chassis.mail import SenderAddress, SmtpUrl
from pawl.chassis.settings import ListenAddress, PeerAddresses, PublicUrl, ServiceSettings
from pawl.tool_registry.app.execution.executor import ExecutorOptions
from pawl.tool_registry.app.workers.workers import WorkerOptions
from pawl.tool_registry.domain.definition import RATE_PER_MINUTE_MAX

_MODULE_OR_FOLDER = re.compile(r"[\w.-]+|[^\x00-\x1f]*/[^\x00-\x1f]*")


def _check_modules(value: str) -> str:
    for name in module_names(value):
        if not _MODULE_OR_FOLDER.fullmatch(name):
            raise ValueError("must be Python modules, packages or folders with commas between")
    return value


def module_names(value: str) -> list[str]:
    """Return the modules, packages and folders in a list with commas."""
    return [name for part in value.split(",") if (name := part.strip())]


class ToolRegistrySettings(ServiceSettings):
    """Settings of the registry. A batch of calls, each with the largest arguments, fits into one message."""

    listen: ListenAddress = "127.0.0.1:7602"
    internal_listen: ListenAddress | None = "127.0.0.1:7632"
    metrics_listen: ListenAddress = "127.0.0.1:7612"
    service_key: SecretStr
    service_keys_file: Path
    message_bytes_max: int = Field(default=8 * 1024 * 1024, ge=1024)
    drain_seconds: float = Field(default=5.0, ge=0)
    # One of them listens for what other replicas say.
    database_connections_max: int = Field(default=10, ge=2)
    job_store_address: PeerAddresses = "127.0.0.1:7603"
    public_url: PublicUrl = ""

    tools: Annotated[str, AfterValidator(_check_modules)] = ""
    tool_threads_max: int = Field(default=16, ge=1, le=1000)
    tool_processes_max: int = Field(default=4, ge=1, le=1000)
    tool_secrets_file: Path | None = None
    egress_file: Path | None = None
    mcp_programs_file: Path | None = None
    mcp_unconfined: bool = False
    private_dir: Path | None = None
    executions_max: int = Field(default=1000, ge=1)
    execution_lease_seconds: float = Field(default=6.0, ge=2)
    execution_retention_days: float = Field(default=30.0, gt=0)
    worker_lease_seconds: float = Field(default=15.0, ge=1)
    store_calls_per_minute: int = Field(default=0, ge=0, le=RATE_PER_MINUTE_MAX)

    smtp_url: SmtpUrl = None
    mail_from: SenderAddress = "pawl@localhost"
    outbox_dir: Path = Path(".pawl/outbox")

    files_dir: Path = Path(".pawl/files")
    file_bytes_max: int = Field(default=1024 * 1024, ge=1024)
    files_bytes_max: int = Field(default=100 * 1024 * 1024, ge=1024)

    @property
    def is_ones_own(self) -> bool:
        """True if there is a key of whoever owns this machine. Others may have keys that are rows."""
        return self.local_key is not None and not (self.api_keys_file or self.oidc_file)

    def private_places(self, environment: Mapping[str, str]) -> list[str]:
        """Return what no program of a source may reach: files of tools, mails, and what holds keys and secrets."""
        files = [Path(path) for name, path in environment.items() if re.fullmatch("PAWL_.*_FILE", name) and path]
        folders = [folder for folder in (self.files_dir, self.outbox_dir, self.private_dir) if folder]
        return [str(path.absolute()) for path in (*folders, *files)]

    @property
    def executor_options(self) -> ExecutorOptions:
        """The limits of executions."""
        return ExecutorOptions(
            executions_max=self.executions_max,
            grace_seconds=self.drain_seconds,
            lease_seconds=self.execution_lease_seconds,
            renew_seconds=min(1.0, self.execution_lease_seconds / 4),
            retention_seconds=self.execution_retention_days * 86400,
        )

    @property
    def worker_options(self) -> WorkerOptions:
        """The limits of remote workers."""
        return WorkerOptions(lease_seconds=self.worker_lease_seconds)
