"""The processes that a service needs: for each replica a command, an environment and a readiness check."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pawl.chassis.local_key import LOCAL_KEY
from pawl.launcher.environment import read_by, system_environment
from pawl.launcher.folder import DataFolder
from pawl.launcher.options import SuiteOptions
from pawl.launcher.ports import address
from pawl.launcher.processes import Addresses, Command, ProcessSpec
from pawl.launcher.secrets import SecretFiles
from pawl.launcher.services import ServiceSpec

MODEL_ID = "pawl-scripted"
SERVICE_KEYS = "service-keys.json"
"""The name of the file with the digests of the keys that services show."""
_KEYS_FILE_VARIABLE = "PAWL_API_KEYS_FILE"
_LOCAL_KEY_VARIABLE = "PAWL_LOCAL_KEY"
_HEALTH_SECONDS = 2.0

# Set by the launcher for each process, or true for one process only: not inherited from its own environment.
_OWN = (
    "PAWL_LISTEN",
    "PAWL_METRICS_LISTEN",
    "PAWL_ADDRESS_FILE",
    "PAWL_INSTANCE_ID",
    "PAWL_DATABASE_URL",
    "PAWL_DATABASE_URL_FILE",
    "PAWL_NATS_URL",
    "PAWL_NATS_URL_FILE",
    "PAWL_SERVICE_KEY",
    "PAWL_SERVICE_KEY_FILE",
    "PAWL_SERVICE_KEYS_FILE",
    _LOCAL_KEY_VARIABLE,
    f"{_LOCAL_KEY_VARIABLE}_FILE",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The things that the processes of one suite share. `peers` and `model` are asked when a process starts."""

    options: SuiteOptions
    folder: DataFolder
    secrets: SecretFiles
    peers: Callable[[ServiceSpec], Mapping[str, str]]
    model: Callable[[], Mapping[str, str]]


def process_name(service: str, replica: int) -> str:
    """The name of a process in logs and files: `agent-loop`, then `agent-loop-1`."""
    return service if replica == 0 else f"{service}-{replica}"


def service_process(spec: ServiceSpec, replica: int, around: Surroundings) -> ProcessSpec:
    """One replica of a service."""
    name = process_name(spec.name, replica)
    address_file = around.folder.run / f"{name}.addresses"

    def command(before: Addresses | None) -> Command:
        address_file.unlink(missing_ok=True)
        return Command(arguments=spec.command, environment=_environment(spec, replica, address_file, before, around))

    async def probe() -> Addresses | None:
        found = _read_addresses(address_file)
        return found if found and "grpc" in found and await _is_serving(found["grpc"]) else None

    return ProcessSpec(name=name, command=command, probe=probe)


def model_process(around: Surroundings) -> ProcessSpec:
    """The scripted model server."""
    address_file = around.folder.run / "model.addresses"

    def command(before: Addresses | None) -> Command:
        address_file.unlink(missing_ok=True)
        listen = before["http"] if before else address(around.options.port("model"))
        program = (sys.executable, "-m", "pawl.model_server", "--listen", listen, "--address-file", str(address_file))
        return Command(arguments=(*program, *around.options.model_arguments), environment=_system(around.options))

    async def probe() -> Addresses | None:
        return _read_addresses(address_file)

    return ProcessSpec(name="model", command=command, probe=probe, grace_seconds=2.0)


def _environment(
    spec: ServiceSpec, replica: int, address_file: Path, before: Addresses | None, around: Surroundings
) -> dict[str, str]:
    options, before = around.options, before or {}
    chosen = {
        "PAWL_LISTEN": before.get("grpc") or address(options.port(spec.name, replica)),
        "PAWL_METRICS_LISTEN": before.get("metrics") or address(options.port(f"{spec.name}-metrics", replica)),
        "PAWL_ADDRESS_FILE": str(address_file),
        "PAWL_PRIVATE_DIR": str(around.folder.path),
        "PAWL_DATABASE_URL_FILE": str(around.secrets.path("database.url")),
        "PAWL_NATS_URL_FILE": str(around.secrets.path(nats_url_file(spec.nats_user))),
        "PAWL_SERVICE_KEY_FILE": str(around.secrets.path(service_key_file(spec.name))),
        "PAWL_SERVICE_KEYS_FILE": str(around.secrets.path(SERVICE_KEYS)),
        **around.peers(spec),
    }
    given = {name: value for name, value in options.environment.items() if name not in _OWN}
    if not has_keys(options):
        chosen[f"{_LOCAL_KEY_VARIABLE}_FILE"] = str(around.secrets.path(LOCAL_KEY))
    folders = {"PAWL_OUTBOX_DIR": str(around.folder.outbox), "PAWL_FILES_DIR": str(around.folder.files)}
    named = options.tool_environment if spec.runs_tools else ()
    return {
        **_system(options),
        **{name: options.environment[name] for name in named if name in options.environment},
        **read_by(spec, {**folders, **around.model(), **given, **chosen}),
        **options.service_environment.get(spec.name, {}),
    }


def _system(options: SuiteOptions) -> dict[str, str]:
    return system_environment(os.environ, options.environment)


def has_keys(options: SuiteOptions) -> bool:
    """Return whether callers have keys of their own; else the key of this machine is for all of them."""
    return bool(options.environment.get(_KEYS_FILE_VARIABLE))


def service_key_file(service: str) -> str:
    """The name of the secret that a service shows to the others."""
    return f"service-key-{service}"


def nats_url_file(user: str) -> str:
    """The name of the secret that holds the NATS URL of a user, credentials included."""
    return f"nats-{user}.url"


def _read_addresses(path: Path) -> dict[str, str] | None:
    """Return the addresses that a process wrote; None if it has not yet."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return {str(protocol): str(address) for protocol, address in found.items()} if isinstance(found, dict) else None


async def _is_serving(address: str) -> bool:
    """Ask the gRPC health service once."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_HEALTH_SECONDS)
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
