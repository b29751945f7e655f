"""The processes of a service. Each replica has a command, an environment and a readiness check."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import ssl
import sys
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Final

import pawl.chassis
import pawl.launcher
from pawl.chassis.identity.local_key import LOCAL_KEY
from pawl.chassis.process.address import split_address
from pawl.launcher.folder import DataFolder, SecretFiles
from pawl.launcher.options import SuiteOptions
from pawl.launcher.ports import address
from pawl.launcher.processes import Addresses, Command, ProcessSpec
from pawl.launcher.services import ServiceSpec, pawl_variables
from pawl.server.identity.browser_seal import SEAL_FILE

MODEL_ID = "pawl-scripted"
# The file with the digests of all service keys.
SERVICE_KEYS = "service-keys.json"
# The secret with the PostgreSQL URL of the role that owns the schemas.
OWNER_URL = "database-owner.url"
_SEAL_KEY: Final = "PAWL_GATEWAY_SEAL_KEY"
_PUBLIC_URL: Final = "PAWL_PUBLIC_URL"
_HEALTH_SECONDS = 2.0
# How long a starting HTTP service may report unavailable dependencies before it counts as ready anyway.
_DEPENDENCIES_SECONDS = 10.0
_HEALTH_REQUEST: Final = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
# Operating systems allow 104 or 108 bytes.
_SOCKET_PATH_BYTES_MAX: Final = 100
# A comma separates addresses, and gRPC parses the path as part of a URL.
_NOT_IN_SOCKETS: Final = frozenset(",%#?")

# The launcher sets these variables for each process, so they are not inherited from its own environment.
_OWN = pawl_variables(
    "LISTEN INTERNAL_LISTEN METRICS_LISTEN ADDRESS_FILE DATABASE_URL DATABASE_URL_FILE DATABASE_OWNER_URL"
    " DATABASE_OWNER_URL_FILE NATS_URL NATS_URL_FILE LOCAL_KEY LOCAL_KEY_FILE SERVICE_KEY SERVICE_KEY_FILE"
    " SERVICE_KEYS_FILE"
)
_OURS: Final = ("PAWL_", "OPENAI_")
# System variables that any program may need. They do not include proxy variables, whose URLs may contain passwords.
_SYSTEM_VARIABLES: Final = (
    "PATH HOME USER LOGNAME LANG LANGUAGE TZ TMPDIR TEMP TMP LD_LIBRARY_PATH DYLD_LIBRARY_PATH SSL_CERT_FILE"
    " SSL_CERT_DIR PYTHONPATH PYTHONHOME PYTHONUTF8 PYTHONUNBUFFERED PYTHONWARNINGS PYTHONDEVMODE"
    " PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX PYTHONASYNCIODEBUG PYTHONTRACEMALLOC PYTHONMALLOC VIRTUAL_ENV"
    " GRPC_VERBOSITY GRPC_TRACE GRPC_DNS_RESOLVER GRPC_EXPERIMENTS"
)
_SYSTEM: Final = frozenset(_SYSTEM_VARIABLES.split())
_LOCALE: Final = "LC_"
# With the sockets of gRPC's event engine, each message wakes more threads. Without them, agent-loop and job-store have
# 40 % fewer context switches in a run alone.
_GRPC: Final = {"GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SuiteContext:
    """Values that all processes of a suite share. `peers` and `model` are called when a process starts."""

    options: SuiteOptions
    folder: DataFolder
    secrets: SecretFiles
    peers: Callable[[ServiceSpec], Mapping[str, str]]
    model: Callable[[], Mapping[str, str]]


def process_name(service: str, replica: int) -> str:
    """Return the name of a process in logs and files: `agent-loop` for the first replica, then `agent-loop-1`."""
    return service if replica == 0 else f"{service}-{replica}"


def service_process(spec: ServiceSpec, replica: int, context: SuiteContext) -> ProcessSpec:
    name = process_name(spec.name, replica)
    address_file = context.folder.run / f"{name}.addresses"
    listens = _listens(spec, replica, context)
    started = 0.0

    def command() -> Command:
        nonlocal started
        started = time.monotonic()
        address_file.unlink(missing_ok=True)
        return Command(arguments=spec.command, environment=_environment(spec, replica, address_file, listens, context))

    async def probe() -> Addresses | None:
        found = _read_addresses(address_file) or {}
        status = await _status(found, spec, context.options)
        # An HTTP service can report outages to its users, so it needs no dependencies to be ready. But services that
        # start together should find each other first.
        is_alone = status and "http" in found and time.monotonic() - started >= _DEPENDENCIES_SECONDS
        return found if status == HTTPStatus.OK or is_alone else None

    async def answers() -> bool:
        return bool(await _status(_read_addresses(address_file) or {}, spec, context.options))

    return ProcessSpec(name=name, command=command, probe=probe, answers=answers, listens=listens)


def model_process(context: SuiteContext) -> ProcessSpec:
    address_file = context.folder.run / "model.addresses"
    listen = address(context.options.port("model"))

    def command() -> Command:
        address_file.unlink(missing_ok=True)
        program = (sys.executable, "-m", "pawl.model_server", "--listen", listen, "--address-file", str(address_file))
        return Command(arguments=(*program, *context.options.model_arguments), environment=_system(context.options))

    async def probe() -> Addresses | None:
        return _read_addresses(address_file)

    return ProcessSpec(name="model", command=command, probe=probe, listens={"public": listen}, grace_seconds=2.0)


def _environment(
    spec: ServiceSpec, replica: int, address_file: Path, listens: Addresses, context: SuiteContext
) -> dict[str, str]:
    options = context.options
    chosen = {
        "PAWL_LISTEN": listens["public"],
        "PAWL_INTERNAL_LISTEN": listens.get("internal", ""),
        "PAWL_METRICS_LISTEN": listens["metrics"],
        "PAWL_ADDRESS_FILE": str(address_file),
        "PAWL_DATA": str(context.folder.path),
        "PAWL_PRIVATE_FILES": _secret_files(options.environment),
        "PAWL_DATABASE_URL_FILE": str(context.secrets.path(database_url_file(spec.role))),
        "PAWL_NATS_URL_FILE": str(context.secrets.path(nats_url_file(spec.role))),
        "PAWL_SERVICE_KEY_FILE": str(context.secrets.path(service_key_file(spec.name))),
        "PAWL_SERVICE_KEYS_FILE": str(context.secrets.path(SERVICE_KEYS)),
        **context.peers(spec),
    }
    given = {name: value for name, value in options.environment.items() if name not in _OWN}
    if not given.get("PAWL_TLS_CERTIFICATE_FILE"):
        # Without a certificate, the CA is only for commands that connect to other suites.
        given.pop("PAWL_TLS_CA_FILE", None)
    if not (given.get(_SEAL_KEY) or given.get(f"{_SEAL_KEY}_FILE")):
        chosen[f"{_SEAL_KEY}_FILE"] = str(context.secrets.path(SEAL_FILE))
    if not given.get(_PUBLIC_URL) and options.port("gateway"):
        scheme = "https" if given.get("PAWL_TLS_CERTIFICATE_FILE") else "http"
        chosen[_PUBLIC_URL] = f"{scheme}://{address(options.port('gateway'))}"
    if has_owner(options):
        chosen["PAWL_DATABASE_OWNER_URL_FILE"] = str(context.secrets.path(OWNER_URL))
    if not has_keys(options):
        chosen["PAWL_LOCAL_KEY_FILE"] = str(context.secrets.path(LOCAL_KEY))
    named = list(options.tool_environment if spec.runs_tools else ())
    named += (name for name in options.environment if spec.records_traces and name.startswith("OTEL_"))
    return {
        **_system(options),
        **{name: options.environment[name] for name in named if name in options.environment},
        **_read_by(spec, {**context.model(), **given, **chosen}),
        **options.service_environment.get(spec.name, {}),
        **options.service_environment.get(process_name(spec.name, replica), {}),
    }


def _secret_files(environment: Mapping[str, str]) -> str:
    """Return the paths in all `_FILE` variables, separated by commas. The files are hidden from tool sources."""
    return ",".join(path for name, path in environment.items() if name.endswith("_FILE") and path)


def _listens(spec: ServiceSpec, replica: int, context: SuiteContext) -> Addresses:
    """Return the addresses at which a process will listen: `public`, `metrics`, and possibly `internal`.

    `internal` is for other services: a Unix socket, or a port for TLS with a CA. On Windows, and if the path is
    unsuitable for a socket, other services also use `public`.
    """
    options = context.options
    found = {
        "public": address(options.port(spec.name, replica)),
        "metrics": address(options.port(f"{spec.name}-metrics", replica)),
    }
    if "PAWL_INTERNAL_LISTEN" not in (spec.reads or ()):
        return found
    if authority_of(spec, options) is not None:
        return found | ({"internal": address(0)} if _variables(spec, options).get("PAWL_TLS_CA_FILE") else {})
    last = _socket(spec, options.replicas.get(spec.name, 1) - 1, context)  # All replicas use sockets, or none.
    is_possible = len(os.fsencode(last)) <= _SOCKET_PATH_BYTES_MAX and _NOT_IN_SOCKETS.isdisjoint(last)
    if sys.platform == "win32" or not is_possible:
        return found
    return found | {"internal": f"unix:{_socket(spec, replica, context)}"}


def _socket(spec: ServiceSpec, replica: int, context: SuiteContext) -> str:
    return f"{context.folder.run.absolute()}/{process_name(spec.name, replica)}.sock"


def _system(options: SuiteOptions) -> dict[str, str]:
    """Return the system variables that every program gets.

    With these variables, children import the same Pawl as this process, regardless of the working directory.
    """
    outer = {**os.environ, **options.environment}
    found = {name: value for name, value in outer.items() if name in _SYSTEM or name.startswith(_LOCALE)}
    roots = [str(Path(package.__path__[0]).parents[1]) for package in (pawl.launcher, pawl.chassis)]
    path = filter(None, (*dict.fromkeys(roots), found.get("PYTHONPATH")))
    return {**_GRPC, **found, "PYTHONPATH": os.pathsep.join(path)}


def _read_by(spec: ServiceSpec, variables: Mapping[str, str]) -> dict[str, str]:
    if spec.reads is None:
        return {name: value for name, value in variables.items() if name.startswith(_OURS)}
    return {
        name: value
        for name, value in variables.items()
        if name in spec.reads or name.removesuffix("_FILE") in spec.reads
    }


def has_keys(options: SuiteOptions) -> bool:
    """Return whether callers have their own keys. Otherwise, all callers use the local key."""
    return bool(options.environment.get("PAWL_API_KEYS_FILE"))


def has_owner(options: SuiteOptions) -> bool:
    """Return whether the schemas belong to a separate role, which no service uses."""
    return options.database_url is None or options.database_owner_url is not None


def service_key_file(service: str) -> str:
    return f"service-key-{service}"


def nats_url_file(user: str) -> str:
    return f"nats-{user}.url"


def database_url_file(role: str) -> str:
    return f"database-{role}.url"


def _read_addresses(path: Path) -> dict[str, str] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return {str(protocol): str(address) for protocol, address in found.items()} if isinstance(found, dict) else None


def authority_of(spec: ServiceSpec, options: SuiteOptions) -> Path | None:
    """Return the file that verifies a service's certificate, or None without TLS.

    Without PAWL_TLS_CA_FILE, this is the certificate itself.
    """
    variables = _variables(spec, options)
    certificate = variables.get("PAWL_TLS_CERTIFICATE_FILE")
    return Path(variables.get("PAWL_TLS_CA_FILE") or certificate).absolute() if certificate else None


def _variables(spec: ServiceSpec, options: SuiteOptions) -> Mapping[str, str]:
    return {**options.environment, **options.service_environment.get(spec.name, {})}


async def _status(found: Addresses, spec: ServiceSpec, options: SuiteOptions) -> int:
    """Return the HTTP status of `/healthz`.

    Return 0 if the process does not answer, for example because it is frozen.
    """
    context = None
    if authority_of(spec, options) is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # The probe sends no secrets.
    try:
        host, port = split_address(found.get("metrics", ""))
        async with asyncio.timeout(_HEALTH_SECONDS):
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
            try:
                writer.write(_HEALTH_REQUEST)
                return int((await reader.readline()).split()[1])
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError, IndexError):
        return 0
