"""The suite to talk to, and the user to talk as."""

from __future__ import annotations

import os
import shlex
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

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

    @asynccontextmanager
    async def agents(self) -> AsyncIterator[AgentServiceAsyncStub]:
        """Open AgentService."""
        async with self._channel(self.agent) as channel:
            yield AgentServiceStub(channel)

    @asynccontextmanager
    async def operators(self) -> AsyncIterator[OperatorServiceAsyncStub]:
        """Open OperatorService, which agent-loop serves too."""
        async with self._channel(self.agent) as channel:
            yield OperatorServiceStub(channel)

    @asynccontextmanager
    async def tool_register(self) -> AsyncIterator[ToolServiceAsyncStub]:
        """Open ToolService."""
        async with self._channel(self.tools) as channel:
            yield ToolServiceStub(channel)

    @asynccontextmanager
    async def rules(self) -> AsyncIterator[RuleServiceAsyncStub]:
        """Open RuleService, which tool-registry serves too."""
        async with self._channel(self.tools) as channel:
            yield RuleServiceStub(channel)

    @asynccontextmanager
    async def auditor(self) -> AsyncIterator[AuditServiceAsyncStub]:
        """Open AuditService, which tool-registry serves too."""
        async with self._channel(self.tools) as channel:
            yield AuditServiceStub(channel)

    @asynccontextmanager
    async def documents(self) -> AsyncIterator[DocumentServiceAsyncStub]:
        """Open DocumentService, which tool-registry serves too."""
        async with self._channel(self.tools) as channel:
            yield DocumentServiceStub(channel)

    @asynccontextmanager
    async def sources(self) -> AsyncIterator[SourceServiceAsyncStub]:
        """Open SourceService."""
        async with self._channel(self.tools) as channel:
            yield SourceServiceStub(channel)

    @asynccontextmanager
    async def notifier(self) -> AsyncIterator[NotifyServiceAsyncStub]:
        """Open NotifyService."""
        async with self._channel(self.notifications) as channel:
            yield NotifyServiceStub(channel)

    def _channel(self, addresses: tuple[str, ...]) -> grpc.aio.Channel:
        return open_channel(",".join(addresses), deadline_seconds=DEADLINE_SECONDS)


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
