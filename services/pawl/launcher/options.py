"""A suite's options, read from flags and the environment."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pawl.chassis.process.start import StartError
from pawl.chassis.rpc.replicas import DEFAULT_PORTS
from pawl.event.v1 import run_pb2
from pawl.launcher.services import STAGES, ServiceSpec, pawl_variables
from pawl.server.process.settings import read_secret

PORT_MAX = 65535
REPLICAS_MAX = 16
# Variables that no service reads. They are for the launcher, clients and examples.
_OURS = pawl_variables("DATA APPLY TOOL_ENVIRONMENT ADDRESS API_KEY KEY_IN_CLEAR KEY GATEWAY PROTO")
# The minimum similarity between a misspelt name and the suggested one.
_NEAR = 0.82
# Kubernetes sets these variables for services named `pawl` and `pawl-...`.
_KUBERNETES = re.compile(r"PAWL_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_\w+)=.*|PAWL_(\w+_)?PORT=\w+://.*")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ApplyOptions:
    """A set to apply, with its store and user, which default to the local key's store and user."""

    folder: Path
    store: str = ""
    user: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SuiteOptions:
    """A suite's options. By default, it has embedded servers, the scripted model, one replica each, and free ports.

    `ports` maps names in DEFAULT_PORTS to numbers. If a name is missing or has the number 0, a free port is used. Each
    service gets the variables in `environment` that it reads. The process that runs Python tools also gets the
    variables named in `tool_environment`. `service_environment` adds variables to one service, or to one replica
    (`agent-loop-1`). `apply` is a set to apply once the suite is running. `local_key` is the key for callers on this
    machine. By default, the data folder contains one.
    """

    data: Path
    ports: Mapping[str, int] = dataclasses.field(default_factory=dict)
    replicas: Mapping[str, int] = dataclasses.field(default_factory=dict)
    database_url: str | None = None
    database_owner_url: str | None = None
    nats_url: str | None = None
    local_key: str | None = None
    scripted_model: bool = True
    model_arguments: Sequence[str] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    service_environment: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    tool_environment: Sequence[str] = ()
    stages: tuple[tuple[ServiceSpec, ...], ...] = STAGES
    ready_seconds: float = 240.0
    apply: ApplyOptions | None = None

    def port(self, name: str, replica: int = 0) -> int:
        """Return the chosen port of a replica. 0 means any free port."""
        return self.ports.get(name, 0) if replica == 0 else 0


def read_options(
    environment: Mapping[str, str],
    *,
    data: Path | None = None,
    ports: Sequence[str] = (),
    replicas: Sequence[str] = (),
) -> SuiteOptions:
    """Return the options from the flags of `pawl up` and the environment.

    `data` overrides PAWL_DATA (default: `.pawl`). `ports` have the form `name=number`, where `all` means every port
    that is not listed. `replicas` have the form `service=count`. PAWL_DATABASE_URL (with PAWL_DATABASE_OWNER_URL) and
    PAWL_NATS_URL replace the embedded servers, and PAWL_LOCAL_KEY replaces the key. Each of them can also be read from
    a file whose path is in the variable with the suffix `_FILE`. OPENAI_API_KEY or OPENAI_BASE_URL replaces the
    scripted model.

    Raises:
        StartError: An option is invalid, for example an unknown PAWL_ variable. The message is one sentence about the
            first mistake.
    """
    if unknown := unknown_of(environment):
        named = (f"{name} (did you mean {near}?)" if near else name for name, near in unknown.items())
        raise StartError(f"unknown setting: {', '.join(named)}")
    chosen = _pairs("--port", ports, (*DEFAULT_PORTS, "all"), 0, PORT_MAX)
    services = [spec.name for stage in STAGES for spec in stage]
    copies = _pairs("--replicas", replicas, services, 1, REPLICAS_MAX)
    database_url, owner_url = _secret(environment, "PAWL_DATABASE_URL"), _secret(environment, "PAWL_DATABASE_OWNER_URL")
    if owner_url and not database_url:
        raise StartError(
            "PAWL_DATABASE_OWNER_URL requires PAWL_DATABASE_URL; the embedded PostgreSQL has its own owner."
        )
    if environment.get("PAWL_TLS_CERTIFICATE_FILE") and not environment.get("PAWL_TLS_CA_FILE"):
        raise StartError(
            "PAWL_TLS_CERTIFICATE_FILE requires PAWL_TLS_CA_FILE, the CA that services use to verify each other."
        )
    base = dict.fromkeys(DEFAULT_PORTS, chosen.pop("all")) if "all" in chosen else DEFAULT_PORTS
    return SuiteOptions(
        data=(data or Path(environment.get("PAWL_DATA") or ".pawl")).resolve(),
        ports={**base, **chosen},
        replicas=copies,
        database_url=database_url,
        database_owner_url=owner_url,
        nats_url=_secret(environment, "PAWL_NATS_URL"),
        local_key=_secret(environment, "PAWL_LOCAL_KEY"),
        scripted_model=not (environment.get("OPENAI_API_KEY") or environment.get("OPENAI_BASE_URL")),
        environment=dict(environment),
        tool_environment=_of_tools(environment),
        apply=_apply(environment.get("PAWL_APPLY", "")),
    )


def unknown_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the unknown PAWL_ variables, each with a similar known name or an empty string.

    For the name of a run limit, the suggestion is PAWL_LIMITS_FILE. Variables named in PAWL_TOOL_ENVIRONMENT count as
    known.
    """
    ours = {name for stage in STAGES for spec in stage for name in spec.reads or ()} | _OURS
    known = {each for name in ours for each in (name, f"{name}_FILE")} | {*_of_tools(environment)}
    unknown = sorted(
        name
        for name, value in environment.items()
        if name.startswith("PAWL_") and name not in known and not _KUBERNETES.fullmatch(f"{name}={value}")
    )
    limits = run_pb2.RunLimits.DESCRIPTOR.fields_by_name
    return {
        name: "PAWL_LIMITS_FILE"
        if name.removeprefix("PAWL_").lower() in limits
        else next(iter(difflib.get_close_matches(name, known, 1, _NEAR)), "")
        for name in unknown
    }


def _of_tools(environment: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, environment.get("PAWL_TOOL_ENVIRONMENT", "").split(","))))


def _apply(text: str) -> ApplyOptions | None:
    """Parse PAWL_APPLY: `FOLDER[,store=STORE][,user=USER]`."""
    folder, *rest = text.split(",")
    named = dict(each.partition("=")[::2] for each in rest)
    if not text:
        return None
    if not folder or not set(named) <= {"store", "user"} or not all(named.values()):
        raise StartError(f"PAWL_APPLY must be FOLDER[,store=STORE][,user=USER], got {text!r}.")
    return ApplyOptions(folder=Path(folder), **named)


def _pairs(source: str, texts: Sequence[str], names: Sequence[str], low: int, high: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for text in texts:
        name, _, number = text.partition("=")
        if name not in names:
            raise StartError(f"{source}: unknown name {name!r}; choose from {', '.join(names)}.")
        if not number.isdecimal() or not low <= int(number) <= high:
            raise StartError(f"{source}: {name} must be a number between {low} and {high}, got {number!r}.")
        found[name] = int(number)
    return found


def _secret(environment: Mapping[str, str], name: str) -> str | None:
    try:
        return read_secret(name, environment)
    except ValueError as error:
        raise StartError(f"{error}.") from None
