"""Connections to Pawl: addresses, credentials, channels and stubs."""

from __future__ import annotations

import math
import os
import secrets
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias, TypeVar

import grpc

from pawl.chassis.identity.local_key import IN_CLEAR, check_hidden, find_key
from pawl.chassis.process.address import is_loopback, split_address
from pawl.chassis.process.clock import SystemClock
from pawl.chassis.process.start import StartError
from pawl.chassis.rpc import tls
from pawl.chassis.rpc.client import connect, open_channel
from pawl.chassis.rpc.replicas import DEFAULT_PORTS, Endpoints, read_endpoints
from pawl.chassis.rpc.retry import Retry
from pawl.chassis.rpc.status import from_rpc_error, has_reason
from pawl.errors import DeadlineExceeded, PawlError, Unavailable

if TYPE_CHECKING:
    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub
    from pawl.agent.v1.agents_pb2_grpc import AgentRegistryServiceAsyncStub
    from pawl.agent.v1.conversation_pb2_grpc import ConversationServiceAsyncStub
    from pawl.agent.v1.declaration_pb2_grpc import DeclarationServiceAsyncStub
    from pawl.agent.v1.goal_pb2_grpc import GoalServiceAsyncStub
    from pawl.agent.v1.jobs_pb2_grpc import JobServiceAsyncStub
    from pawl.agent.v1.operator_pb2_grpc import OperatorServiceAsyncStub
    from pawl.agent.v1.schedule_pb2_grpc import ScheduleServiceAsyncStub
    from pawl.agent.v1.trigger_pb2_grpc import TriggerServiceAsyncStub
    from pawl.agent.v1.usage_pb2_grpc import UsageServiceAsyncStub
    from pawl.agent.v1.workflow_pb2_grpc import WorkflowServiceAsyncStub
    from pawl.identity.v1.key_pb2_grpc import KeyServiceAsyncStub
    from pawl.notify.v1.channel_pb2_grpc import ChannelServiceAsyncStub
    from pawl.notify.v1.notify_pb2_grpc import NotifyServiceAsyncStub
    from pawl.notify.v1.preference_pb2_grpc import PreferenceServiceAsyncStub
    from pawl.settings.v1.settings_pb2_grpc import SettingsServiceAsyncStub
    from pawl.tool.v1.audit_pb2_grpc import AuditServiceAsyncStub
    from pawl.tool.v1.completion_pb2_grpc import CompletionServiceAsyncStub
    from pawl.tool.v1.document_pb2_grpc import DocumentServiceAsyncStub
    from pawl.tool.v1.file_pb2_grpc import FileServiceAsyncStub
    from pawl.tool.v1.memory_pb2_grpc import MemoryServiceAsyncStub
    from pawl.tool.v1.rule_pb2_grpc import RuleServiceAsyncStub
    from pawl.tool.v1.source_pb2_grpc import SourceServiceAsyncStub
    from pawl.tool.v1.tool_pb2_grpc import ToolServiceAsyncStub

# The name of one of the suite's public services.
Service: TypeAlias = Literal["agent", "tools", "notifications", "keys"]

# Service names in logs and certificates.
SERVICES: Final = {
    "agent": "agent-loop",
    "tools": "tool-registry",
    "notifications": "notifier",
    "keys": "job-store",
}
DEADLINE_SECONDS: Final = 15.0
_RETRY_SECONDS: Final = 60.0
_PAGE: Final = 200
# Codes that gRPC itself reports if a connection fails or breaks.
_BROKEN: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
)


class NoAnswer(Unavailable):
    """Raised when no service answers at the addresses in the message, or when a connection breaks or goes silent."""


Answer = TypeVar("Answer")


def _stub(name: str, service: Service) -> cached_property[Any]:
    """Return a property that holds a stub. Its module is imported on first use, because few programs need all stubs."""
    module, _, kind = name.rpartition(".")

    def made(target: Target) -> Any:
        return getattr(import_module(f"pawl.{module}_pb2_grpc"), f"{kind}Stub")(target.channel(service))

    return cached_property(made)


class Target:
    """The public services of a suite, and the credentials for them. A context manager that closes its channels.

    The suite is found at `address` (one address, or the addresses of all agent-loop replicas). Without an address, it
    is the suite that runs in the folder `data` or, failing that, a suite at this machine's default ports. If neither is
    given, PAWL_ADDRESS and PAWL_DATA apply. If a folder is given explicitly, a suite must be running in it, because the
    default ports may belong to another suite. For a remote suite, the other services are expected at their default
    ports on the same hosts, unless PAWL_TOOL_REGISTRY_ADDRESS, PAWL_NOTIFIER_ADDRESS or PAWL_JOB_STORE_ADDRESS is set.

    The key is `api_key`, else PAWL_API_KEY, else the local key of a suite on this machine. The local key is read before
    each call and sent only to that suite, because another program may later listen on the same port. `store` and `user`
    name the identity to act for, if the key allows this. `authority` (or PAWL_TLS_CA_FILE) is a file with CA
    certificates. A suite in a data folder provides its own. Without TLS, the key is sent to other machines only with
    `key_in_clear` (or PAWL_KEY_IN_CLEAR=1).

    Each connection is opened on its first call. Stubs raise the classes in pawl.errors. Methods, streams and sessions
    retry for `retry_seconds` while no service answers or a deadline is exceeded. None means forever.

    Raises:
        StartError: An address is malformed, no suite is running in `data`, the key is malformed, or the certificates
            cannot be used.
    """

    agents: cached_property[AgentServiceAsyncStub] = _stub("agent.v1.agent.AgentService", "agent")
    agent_register: cached_property[AgentRegistryServiceAsyncStub] = _stub(
        "agent.v1.agents.AgentRegistryService", "agent"
    )
    conversations: cached_property[ConversationServiceAsyncStub] = _stub(
        "agent.v1.conversation.ConversationService", "agent"
    )
    declarations: cached_property[DeclarationServiceAsyncStub] = _stub(
        "agent.v1.declaration.DeclarationService", "agent"
    )
    goals: cached_property[GoalServiceAsyncStub] = _stub("agent.v1.goal.GoalService", "agent")
    jobs: cached_property[JobServiceAsyncStub] = _stub("agent.v1.jobs.JobService", "agent")
    scheduler: cached_property[ScheduleServiceAsyncStub] = _stub("agent.v1.schedule.ScheduleService", "agent")
    triggers: cached_property[TriggerServiceAsyncStub] = _stub("agent.v1.trigger.TriggerService", "agent")
    usage_register: cached_property[UsageServiceAsyncStub] = _stub("agent.v1.usage.UsageService", "agent")
    workflows: cached_property[WorkflowServiceAsyncStub] = _stub("agent.v1.workflow.WorkflowService", "agent")
    operators: cached_property[OperatorServiceAsyncStub] = _stub("agent.v1.operator.OperatorService", "agent")
    tool_register: cached_property[ToolServiceAsyncStub] = _stub("tool.v1.tool.ToolService", "tools")
    rules: cached_property[RuleServiceAsyncStub] = _stub("tool.v1.rule.RuleService", "tools")
    auditor: cached_property[AuditServiceAsyncStub] = _stub("tool.v1.audit.AuditService", "tools")
    completions: cached_property[CompletionServiceAsyncStub] = _stub("tool.v1.completion.CompletionService", "tools")
    document_store: cached_property[DocumentServiceAsyncStub] = _stub("tool.v1.document.DocumentService", "tools")
    files: cached_property[FileServiceAsyncStub] = _stub("tool.v1.file.FileService", "tools")
    memories: cached_property[MemoryServiceAsyncStub] = _stub("tool.v1.memory.MemoryService", "tools")
    sources: cached_property[SourceServiceAsyncStub] = _stub("tool.v1.source.SourceService", "tools")
    notifier: cached_property[NotifyServiceAsyncStub] = _stub("notify.v1.notify.NotifyService", "notifications")
    preferences: cached_property[PreferenceServiceAsyncStub] = _stub(
        "notify.v1.preference.PreferenceService", "notifications"
    )
    notify_channels: cached_property[ChannelServiceAsyncStub] = _stub(
        "notify.v1.channel.ChannelService", "notifications"
    )
    key_register: cached_property[KeyServiceAsyncStub] = _stub("identity.v1.key.KeyService", "keys")
    settings: cached_property[SettingsServiceAsyncStub] = _stub("settings.v1.settings.SettingsService", "keys")

    def __init__(
        self,
        address: str | Sequence[str] | None = None,
        *,
        api_key: str | None = None,
        data: str | Path | None = None,
        store: str | None = None,
        user: str | None = None,
        authority: str | Path | None = None,
        key_in_clear: bool = False,
        retry_seconds: float | None = _RETRY_SECONDS,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        own = environment.get("PAWL_API_KEY") if api_key is None else api_key
        _check_key("PAWL_API_KEY" if api_key is None else "api_key", own)
        given = address or (not data and environment.get("PAWL_ADDRESS")) or ""
        given = given if isinstance(given, str) else ",".join(given)
        explicit = _addresses(given) if given else ()
        folder = data or environment.get("PAWL_DATA")
        self.data = Path(folder or ".pawl")
        running = _running(self.data)
        if running is not None and not set(explicit) <= set(running.addresses("agent-loop")):
            running = None
        if running is None and not explicit and folder:
            raise StartError(
                f"No Pawl suite is running in {self.data}."
                f" Start one with `pawl up --data {shlex.quote(str(self.data))}`."
            )

        def of(service: str, variable: str = "") -> tuple[str, ...]:
            if running is not None:
                return tuple(running.addresses(service)) or _default_addresses((), service)
            elsewhere = environment.get(variable)
            return _addresses(elsewhere) if elsewhere else _default_addresses(explicit, service)

        self.agent = explicit or of("agent-loop")
        self.tools = of("tool-registry", "PAWL_TOOL_REGISTRY_ADDRESS")
        self.notifications = of("notifier", "PAWL_NOTIFIER_ADDRESS")
        self.keys = of("job-store", "PAWL_JOB_STORE_ADDRESS")
        every = (*self.agent, *self.tools, *self.notifications, *self.keys)
        find = partial(find_key, every, data=Path(folder) if folder else None, environment=environment)
        self._key: Callable[[], str | None] = find if api_key is None else lambda: api_key
        self._names = tuple((name, value) for name, value in (("pawl-store", store), ("pawl-user", user)) if value)
        trusted = (running.authority if running else authority or environment.get("PAWL_TLS_CA_FILE")) or None
        self._certificates = tls.of_client(Path(trusted) if trusted else None, SystemClock())
        self._in_clear = key_in_clear or environment.get(IN_CLEAR) in {"1", "true"}
        self.retry_seconds = math.inf if retry_seconds is None else retry_seconds
        self._retry = Retry(SystemClock(), transient=(Unavailable, DeadlineExceeded))
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels.values():
            await channel.close()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of a new call: key, store and user."""
        key = self._key()
        return ((("authorization", f"Bearer {key}"),) if key else ()) + self._names

    def channel(self, service: Service) -> grpc.aio.Channel:
        """Return the shared channel to a service. It connects on the first call.

        Raises:
            KeyInClear: The key would be sent unencrypted to another machine.
        """
        if service not in self._channels:
            addresses = ",".join(getattr(self, service))
            self._check_hidden(getattr(self, service))
            self._channels[service] = open_channel(
                addresses,
                metadata=lambda: self.metadata,
                deadline_seconds=DEADLINE_SECONDS,
                tls=self._certificates,
                server_name=tls.server_name(addresses, SERVICES[service]),
                translate=partial(error_of, addresses=addresses),
            )
        return self._channels[service]

    def connect(self, address: str) -> grpc.aio.Channel:
        """Return a channel to one replica. Calls must provide their own metadata.

        Raises:
            KeyInClear: The key would be sent unencrypted to another machine.
        """
        self._check_hidden([address])
        return connect(address, self._certificates)

    def _check_hidden(self, addresses: Iterable[str]) -> None:
        if self._key():
            check_hidden(addresses, speaks_tls=self._certificates is not None, in_clear=self._in_clear)

    async def once(self, method: Callable[[Any], Awaitable[Answer]], request: Any) -> Answer:
        """Send a request that takes effect once, however often it is retried. Set its `request_id` if it has none."""
        request.request_id = request.request_id or f"py_{secrets.token_hex(12)}"
        return await self.again(method, request)

    async def again(self, method: Callable[[Any], Awaitable[Answer]], request: Any) -> Answer:
        """Send a request that is safe to retry."""
        return await self._retry.until_answered(partial(method, request), seconds_max=self.retry_seconds)

    async def pages(self, call: Callable[..., Awaitable[Answer]], request: Any) -> AsyncIterator[Answer]:
        """Yield a list's pages, starting at the page token in `request`."""
        request.page_size = _PAGE
        while True:
            page: Any = await self.again(call, request)
            yield page
            request.page_token = page.next_page_token
            if not request.page_token:
                return


def error_of(error: grpc.aio.AioRpcError, addresses: str) -> PawlError:
    """Return the error reported by a service, or NoAnswer with the addresses if the connection failed."""
    if error.code() in _BROKEN and not has_reason(error):
        return NoAnswer(f"no answer from {addresses}: {error.details() or error.code().name}")
    return from_rpc_error(error)


def _check_key(name: str, key: str | None) -> None:
    """Check that the key is well formed. Otherwise, the local key would silently replace the intended key."""
    if key is None:
        return
    if not key.strip():
        instead = f", or `unset {name}` to use the local key of this machine" if name.isupper() else ""
        raise StartError(f"{name} is empty. Set it to your key{instead}.")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise StartError(
            f"{name} contains a space, a line break or another invalid character. Set it to the key alone."
        )


def _running(folder: Path) -> Endpoints | None:
    """Return the endpoints of a folder's suite. Return None if no suite is running there.

    Endpoints on other machines are ignored, because anyone could write such a file.
    """
    found = read_endpoints(folder)
    try:
        is_here = found is None or all(is_loopback(each) for name in found.services for each in found.addresses(name))
    except ValueError:
        is_here = False
    return found if is_here else None


def _addresses(text: str) -> tuple[str, ...]:
    addresses = tuple(part.strip() for part in text.split(",") if part.strip())
    for address in addresses:
        try:
            split_address(address)
        except ValueError as error:
            hint = " For TLS, pass --ca FILE or set PAWL_TLS_CA_FILE." if "://" in address else ""
            raise StartError(f"The address {address!r} {error}.{hint}") from None
    if not addresses:
        raise StartError("The address is empty; it must be host:port, for example 127.0.0.1:7601.")
    return addresses


def _default_addresses(agent: tuple[str, ...], service: str) -> tuple[str, ...]:
    """Return a service's default addresses on the hosts of agent-loop."""
    hosts = dict.fromkeys(address.rpartition(":")[0] for address in agent) or {"127.0.0.1": None}
    return tuple(f"{host}:{DEFAULT_PORTS[service]}" for host in hosts)
