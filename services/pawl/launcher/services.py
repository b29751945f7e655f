"""The services of the suite as data, in start order."""

from __future__ import annotations

import dataclasses
import sys


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """A service's command, and the variables that the service gets.

    The process must read its settings from the environment, write its addresses (`metrics`, and `grpc` or `http`) to
    the file PAWL_ADDRESS_FILE, and serve `/healthz` at its metrics address.
    """

    name: str
    command: tuple[str, ...]
    # Its NATS user, and its PostgreSQL role if it has a schema. Empty if it only calls other services, like a client.
    role: str
    # The variables that it reads in addition to system variables. None means all of Pawl's variables.
    reads: frozenset[str] | None = None
    # True if it runs Python tools, to which the user can pass additional variables.
    runs_tools: bool = False
    # True if it gets all OTEL_ variables, because it records traces.
    records_traces: bool = False
    # The service is started only if this variable is set. Empty means that it is always started.
    needs: str = ""

    @property
    def address_variable(self) -> str:
        """The variable that holds this service's address, for services that start later."""
        return f"PAWL_{self.name.replace('-', '_').upper()}_ADDRESS"


def pawl_variables(names: str) -> frozenset[str]:
    return frozenset(f"PAWL_{name}" for name in names.split())


_EVERY = pawl_variables(
    "ADDRESS_FILE API_KEYS_FILE LISTEN LOCAL_KEY LOG_LEVEL METRICS_LISTEN OIDC_FILE TLS_CA_FILE TLS_CERTIFICATE_FILE"
    " TLS_KEY_FILE"
)
_DATABASE = pawl_variables("DATABASE_URL DATABASE_OWNER_URL DATABASE_CONNECTIONS_MAX DATABASE_UNSAFE")
_NATS = pawl_variables("NATS_URL")
_SERVICE_KEY = pawl_variables("SERVICE_KEY")
_SERVICE_KEYS = pawl_variables("SERVICE_KEYS_FILE")
_INTERNAL = _SERVICE_KEYS | pawl_variables("INTERNAL_LISTEN")
# A proxy URL may hold a password, so only the process that calls the model server gets it.
_PROXIES = frozenset(
    ["http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"]
)
_READS = {
    "agent-loop": _NATS
    | _SERVICE_KEY
    | _INTERNAL
    | _PROXIES
    | {"OPENAI_BASE_URL", "OPENAI_API_KEY"}
    | pawl_variables(
        "JOB_STORE_ADDRESS TOOL_REGISTRY_ADDRESS MODEL INSTRUCTIONS MODEL_INPUT REASONING_ECHO OUTPUT_TOKENS_FIELD"
        " FORMAT_WITH_TOOLS TITLES ROLE RUNS_MAX LIMITS_FILE"
    ),
    "job-store": _DATABASE
    | _NATS
    | _INTERNAL
    | pawl_variables(
        "ACTIVE_RUNS_PER_STORE ACTIVE_RUNS_PER_USER RUNS EVENT_RETENTION_DAYS CONVERSATION_RETENTION_DAYS"
    ),
    "notifier": _DATABASE
    | _NATS
    | _SERVICE_KEY
    | _SERVICE_KEYS
    | pawl_variables("JOB_STORE_ADDRESS EGRESS_FILE SMTP_URL MAIL_FROM PUBLIC_URL"),
    "gateway": _SERVICE_KEY
    | pawl_variables(
        "AGENT_LOOP_ADDRESS TOOL_REGISTRY_ADDRESS NOTIFIER_ADDRESS JOB_STORE_ADDRESS GATEWAY_HOSTS GATEWAY_ORIGINS"
        " GATEWAY_SEAL_KEY GATEWAY_WEBHOOK_KEYS_FILE GATEWAY_OIDC_FILE PUBLIC_URL DATA"
    ),
    "mailbox": _SERVICE_KEY
    | pawl_variables("JOB_STORE_ADDRESS AGENT_LOOP_ADDRESS TOOL_REGISTRY_ADDRESS EGRESS_FILE MAILBOX_PASSWORDS_FILE"),
    "tool-registry": _DATABASE
    | _SERVICE_KEY
    | _INTERNAL
    | pawl_variables(
        "JOB_STORE_ADDRESS TOOLS TOOL_SECRETS_FILE EGRESS_FILE MCP_PROGRAMS_FILE MCP_UNCONFINED STORE_CALLS_PER_MINUTE"
        " PRIVATE_FILES SMTP_URL MAIL_FROM DATA PUBLIC_URL"
    ),
}


def service(name: str) -> ServiceSpec:
    package = name.replace("-", "_")
    return ServiceSpec(
        name=name,
        command=(sys.executable, "-m", f"pawl.{package}"),
        role=package if name != "gateway" else "",
        reads=_EVERY | _READS[name],
        runs_tools=name == "tool-registry",
        records_traces=name == "agent-loop",
        needs="PAWL_MAILBOX_PASSWORDS_FILE" if name == "mailbox" else "",
    )


# All services start together. Each gets the addresses of the services in earlier stages, and waits for them itself.
# Services stop in the reverse order.
STAGES: tuple[tuple[ServiceSpec, ...], ...] = (
    (service("job-store"),),
    (service("tool-registry"), service("notifier")),
    (service("agent-loop"),),
    (service("gateway"), service("mailbox")),
)
