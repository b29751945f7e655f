from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr

from pawl.server.egress.mail import SenderAddress, SmtpUrl
from pawl.server.process.settings import Constant, ListenAddress, PeerAddresses, PublicUrl, ServiceSettings
from pawl.tools.rules.definition import RATE_PER_MINUTE_MAX

_MODULE_OR_FOLDER = re.compile(r"[\w.-]+|[^\x00-\x1f]*/[^\x00-\x1f]*")


def _check_modules(value: str) -> str:
    for name in module_names(value):
        if not _MODULE_OR_FOLDER.fullmatch(name):
            raise ValueError("must be a comma-separated list of Python modules, packages or folders")
    return value


def module_names(value: str) -> list[str]:
    return [name for part in value.split(",") if (name := part.strip())]


class ToolRegistrySettings(ServiceSettings):
    """The registry's settings. The message limit is large enough for a batch of calls with the largest arguments."""

    listen: ListenAddress = "127.0.0.1:7602"
    internal_listen: ListenAddress | None = "127.0.0.1:7632"
    metrics_listen: ListenAddress = "127.0.0.1:7612"
    service_key: SecretStr
    service_keys_file: Path
    # One connection listens for notifications from other replicas.
    database_connections_max: int = Field(default=10, ge=2)
    job_store_address: PeerAddresses = "127.0.0.1:7603"
    public_url: PublicUrl = ""

    tools: Annotated[str, AfterValidator(_check_modules)] = ""
    tool_secrets_file: Path | None = None
    egress_file: Path | None = None
    mcp_programs_file: Path | None = None
    mcp_unconfined: bool = False
    private_files: str = ""
    store_calls_per_minute: int = Field(default=0, ge=0, le=RATE_PER_MINUTE_MAX)

    smtp_url: SmtpUrl = None
    mail_from: SenderAddress = "pawl@localhost"
    data: Path = Path(".pawl")

    message_bytes_max: Constant[int] = 8 * 1024 * 1024
    drain_seconds: Constant[float] = 5.0
    execution_lease_seconds: Constant[float] = 6.0

    @property
    def is_personal(self) -> bool:
        """True for a personal deployment, whose only key is the local key."""
        return self.local_key is not None and not (self.api_keys_file or self.oidc_file)

    def private_paths(self, environment: Mapping[str, str]) -> list[str]:
        """Return the paths that source programs must not access.

        These are the data folder, and files with keys or secrets.
        """
        files = [Path(path) for name, path in environment.items() if re.fullmatch("PAWL_.*_FILE", name) and path]
        files += [Path(path) for path in self.private_files.split(",") if path]
        return [str(path.absolute()) for path in (self.data, *files)]
