"""The suite to talk to, and the user to talk as."""

from __future__ import annotations

import os
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

from pawl.agent.v1.agent_pb2_grpc import AgentServiceStub
from pawl.agent.v1.operator_pb2_grpc import OperatorServiceStub
from pawl.chassis.local_key import find_key
from pawl.chassis.rpc_client import open_channel
from pawl.chassis.settings import split_address
from pawl.cli.failure import CommandError
from pawl.launcher.endpoints import read_endpoints
from pawl.launcher.services import DEFAULT_PORTS
from pawl.notify.v1.notify_pb2_grpc import NotifyServiceStub
from pawl.tool.v1.audit_pb2_grpc import AuditServiceStub
from pawl.tool.v1.document_pb2_grpc import DocumentServiceStub
from pawl.tool.v1.rule_pb2_grpc import RuleServiceStub
from pawl.tool.v1.source_pb2_grpc import SourceServiceStub
from pawl.tool.v1.tool_pb2_grpc import ToolServiceStub

if TYPE_CHECKING:
    import grpc

    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub
    from pawl.agent.v1.operator_pb2_grpc import OperatorServiceAsyncStub
    from pawl.notify.v1.notify_pb2_grpc import NotifyServiceAsyncStub
    from pawl.tool.v1.audit_pb2_grpc import AuditServiceAsyncStub
    from pawl.tool.v1.document_pb2_grpc import DocumentServiceAsyncStub
    from pawl.tool.v1.rule_pb2_grpc import RuleServiceAsyncStub
    from pawl.tool.v1.source_pb2_grpc import SourceServiceAsyncStub
    from pawl.tool.v1.tool_pb2_grpc import ToolServiceAsyncStub

DEADLINE_SECONDS: Final = 15.0
_PAGE: Final = 200


class _Page(Protocol):
    @property
    def next_page_token(self) -> str: ...


Page = TypeVar("Page", bound=_Page)
Stub = TypeVar("Stub")
Opened: TypeAlias = AbstractAsyncContextManager[Stub]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The addresses of each public service, every replica of it, and as whom to call."""

    agent: tuple[str, ...]
    tools: tuple[str, ...]
    notifications: tuple[str, ...]
    key: Callable[[], str | None] = lambda: None
    """Looks for the key, for each call: others may listen there by then."""
    names: tuple[tuple[str, str], ...] = ()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of a call that is made now: key, store and user."""
        key = self.key()
        return ((("authorization", f"Bearer {key}"),) if key else ()) + self.names

    def agents(self) -> Opened[AgentServiceAsyncStub]:
        """Open AgentService."""
        return self._open(self.agent, AgentServiceStub)

    def operators(self) -> Opened[OperatorServiceAsyncStub]:
        """Open OperatorService, which agent-loop serves too."""
        return self._open(self.agent, OperatorServiceStub)

    def tool_register(self) -> Opened[ToolServiceAsyncStub]:
        """Open ToolService."""
        return self._open(self.tools, ToolServiceStub)

    def rules(self) -> Opened[RuleServiceAsyncStub]:
        """Open RuleService, which tool-registry serves too."""
        return self._open(self.tools, RuleServiceStub)

    def auditor(self) -> Opened[AuditServiceAsyncStub]:
        """Open AuditService, which tool-registry serves too."""
        return self._open(self.tools, AuditServiceStub)

    def documents(self) -> Opened[DocumentServiceAsyncStub]:
        """Open DocumentService, which tool-registry serves too."""
        return self._open(self.tools, DocumentServiceStub)

    def sources(self) -> Opened[SourceServiceAsyncStub]:
        """Open SourceService."""
        return self._open(self.tools, SourceServiceStub)

    def notifier(self) -> Opened[NotifyServiceAsyncStub]:
        """Open NotifyService."""
        return self._open(self.notifications, NotifyServiceStub)

    async def pages(self, call: Callable[..., Awaitable[Page]], request: Any) -> AsyncIterator[Page]:
        """Yield the pages of a list, from the one that `request` asks for to the last."""
        request.page_size = _PAGE
        while True:
            page = await call(request, metadata=self.metadata)
            yield page
            request.page_token = page.next_page_token
            if not request.page_token:
                return

    @asynccontextmanager
    async def _open(self, addresses: tuple[str, ...], stub: Callable[[grpc.aio.Channel], Stub]) -> AsyncIterator[Stub]:
        async with open_channel(",".join(addresses), deadline_seconds=DEADLINE_SECONDS) as channel:
            yield stub(channel)


def find(
    *,
    address: str | None,
    data: Path | None,
    store: str | None,
    user: str | None,
    environment: Mapping[str, str] = os.environ,
) -> Target:
    """Return where to send requests: `address`, else what runs in the data folder, else the default ports.

    A folder that was named must have a suite that runs; the default ports may
    belong to another one. With addresses of another suite, tool-registry and notifier are looked for on
    their default ports beside it, unless PAWL_TOOL_REGISTRY_ADDRESS or
    PAWL_NOTIFIER_ADDRESS say where they are.

    Raises:
        CommandError: the address has another form, or no suite runs on `data`.
    """
    agent = _addresses(address) if address else ()
    running = read_endpoints(data or Path(".pawl"))
    if running is not None and set(agent) <= set(running.addresses("agent-loop")):
        target = Target(
            agent=agent or tuple(running.addresses("agent-loop")) or _beside((), "agent-loop"),
            tools=tuple(running.addresses("tool-registry")) or _beside((), "tool-registry"),
            notifications=tuple(running.addresses("notifier")) or _beside((), "notifier"),
        )
        return _with_credential(target, data, store, user, environment)
    if not agent and data is not None:
        raise CommandError(f"No Pawl suite runs on {data}. Start one with `pawl up --data {shlex.quote(str(data))}`.")
    agent = agent or _beside((), "agent-loop")
    tools = environment.get("PAWL_TOOL_REGISTRY_ADDRESS")
    notifications = environment.get("PAWL_NOTIFIER_ADDRESS")
    target = Target(
        agent=agent,
        tools=_addresses(tools) if tools else _beside(agent, "tool-registry"),
        notifications=_addresses(notifications) if notifications else _beside(agent, "notifier"),
    )
    return _with_credential(target, data, store, user, environment)


def _with_credential(
    target: Target, data: Path | None, store: str | None, user: str | None, environment: Mapping[str, str]
) -> Target:
    addresses = (*target.agent, *target.tools, *target.notifications)
    return replace(
        target,
        key=partial(find_key, addresses, data=data, environment=environment),
        names=tuple((name, value) for name, value in (("pawl-store", store), ("pawl-user", user)) if value),
    )


def _addresses(text: str) -> tuple[str, ...]:
    addresses = tuple(part.strip() for part in text.split(",") if part.strip())
    for address in addresses:
        try:
            split_address(address)
        except ValueError as error:
            raise CommandError(f"The address {address!r} {error}.") from None
    if not addresses:
        raise CommandError("The address is empty; it must be host:port, for example 127.0.0.1:7601.")
    return addresses


def _beside(agent: tuple[str, ...], service: str) -> tuple[str, ...]:
    """Return the default address of a service, on the hosts of the agent-loop."""
    hosts = dict.fromkeys(address.rpartition(":")[0] for address in agent) or {"127.0.0.1": None}
    return tuple(f"{host}:{DEFAULT_PORTS[service]}" for host in hosts)
