"""The suite to talk to, and the user to talk as."""

from __future__ import annotations

import os
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, Protocol, Self, TypeVar

import grpc

from pawl.agent.v1.agent_pb2_grpc import AgentServiceStub
from pawl.agent.v1.operator_pb2_grpc import OperatorServiceStub
from pawl.chassis import tls
from pawl.chassis.clock import SystemClock
from pawl.chassis.local_key import check_hidden, find_key
from pawl.chassis.rpc_client import connect, open_channel
from pawl.chassis.settings import is_loopback, split_address
from pawl.cli.failure import SERVICES, Asks, CommandError
from pawl.identity.v1.key_pb2_grpc import KeyServiceStub
from pawl.launcher.endpoints import Endpoints, read_endpoints
from pawl.launcher.services import DEFAULT_PORTS
from pawl.notify.v1.notify_pb2_grpc import NotifyServiceStub
from pawl.tool.v1.audit_pb2_grpc import AuditServiceStub
from pawl.tool.v1.document_pb2_grpc import DocumentServiceStub
from pawl.tool.v1.rule_pb2_grpc import RuleServiceStub
from pawl.tool.v1.source_pb2_grpc import SourceServiceStub
from pawl.tool.v1.tool_pb2_grpc import ToolServiceStub

DEADLINE_SECONDS: Final = 15.0
_PAGE: Final = 200


class _Page(Protocol):
    @property
    def next_page_token(self) -> str: ...


Page = TypeVar("Page", bound=_Page)
Stub = TypeVar("Stub")


def _stub(kind: Callable[[grpc.aio.Channel], Stub], service: Asks) -> cached_property[Stub]:
    """Return a property of a target: a stub of what a service serves, made when it is first asked for."""
    return cached_property(lambda target: kind(target.channel(service)))


@dataclass(frozen=True, kw_only=True)
class Target:
    """The public services of a suite, and as whom to call them. A context manager, which closes what was opened.

    Each field of addresses has every replica of a service; calls carry the metadata of the moment.
    """

    agent: tuple[str, ...]
    tools: tuple[str, ...]
    notifications: tuple[str, ...]
    keys: tuple[str, ...] = ()
    key: Callable[[], str | None] = lambda: None
    """Looks for the key, for each call: others may listen there by then."""
    names: tuple[tuple[str, str], ...] = ()
    data: Path = Path(".pawl")
    """The data folder of the suite, if it runs on this machine."""
    certificates: tls.Tls | None = None
    """The authority by which to check certificates; None for no TLS."""
    key_in_clear: bool = False
    """True to send the key without TLS beyond this machine, too."""
    _channels: dict[str, grpc.aio.Channel] = field(default_factory=dict, init=False)

    agents = _stub(AgentServiceStub, "agent")
    operators = _stub(OperatorServiceStub, "agent")
    tool_register = _stub(ToolServiceStub, "tools")
    rules = _stub(RuleServiceStub, "tools")
    auditor = _stub(AuditServiceStub, "tools")
    documents = _stub(DocumentServiceStub, "tools")
    sources = _stub(SourceServiceStub, "tools")
    notifier = _stub(NotifyServiceStub, "notifications")
    key_register = _stub(KeyServiceStub, "keys")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels.values():
            await channel.close()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of a call that is made now: key, store and user."""
        key = self.key()
        return ((("authorization", f"Bearer {key}"),) if key else ()) + self.names

    def channel(self, service: Asks) -> grpc.aio.Channel:
        """Return the one channel to a service. Nothing is connected before the first call.

        Raises:
            KeyInClear: the key would go there unencrypted.
        """
        if service not in self._channels:
            addresses = ",".join(getattr(self, service))
            self._check_hidden(getattr(self, service))
            self._channels[service] = open_channel(
                addresses,
                metadata=lambda: self.metadata,
                deadline_seconds=DEADLINE_SECONDS,
                tls=self.certificates,
                server_name=tls.server_name(addresses, SERVICES[service]),
            )
        return self._channels[service]

    def connect(self, address: str) -> grpc.aio.Channel:
        """Return a channel to one replica, whose calls bring their own metadata.

        Raises:
            KeyInClear: the key would go there unencrypted.
        """
        self._check_hidden([address])
        return connect(address, self.certificates)

    def _check_hidden(self, addresses: Iterable[str]) -> None:
        if self.key():
            check_hidden(addresses, speaks_tls=self.certificates is not None, in_clear=self.key_in_clear)

    async def pages(self, call: Callable[..., Awaitable[Page]], request: Any) -> AsyncIterator[Page]:
        """Yield the pages of a list, from the one that `request` asks for to the last."""
        request.page_size = _PAGE
        while True:
            page = await call(request)
            yield page
            request.page_token = page.next_page_token
            if not request.page_token:
                return


def find(
    *,
    address: str | None,
    data: Path | None,
    store: str | None,
    user: str | None,
    authority: Path | None = None,
    key_in_clear: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> Target:
    """Return where to send requests: `address`, else what runs in the data folder, else the default ports.

    A folder that was named must have a suite that runs; the default ports may
    belong to another one. With addresses of another suite, the other services are looked for on
    their default ports beside it, unless PAWL_TOOL_REGISTRY_ADDRESS,
    PAWL_NOTIFIER_ADDRESS or PAWL_JOB_STORE_ADDRESS say where they are. `authority` has the certificates by which
    to check those of the services; a suite of the data folder says itself whether it speaks TLS.

    Raises:
        CommandError: the address has another form, no suite runs on `data`, or PAWL_API_KEY cannot be a key.
        StartError: the certificates cannot be used.
    """
    _check_given(environment)
    named = _addresses(address) if address else ()
    folder = data or Path(".pawl")
    running = _running(folder)
    if running is not None and not set(named) <= set(running.addresses("agent-loop")):
        running = None
    if running is None and not named and data is not None:
        raise CommandError(f"No Pawl suite runs on {data}. Start one with `pawl up --data {shlex.quote(str(data))}`.")

    def of(service: str, given: str | None) -> tuple[str, ...]:
        if running is not None:
            return tuple(running.addresses(service)) or _beside((), service)
        return _addresses(given) if given else _beside(named, service)

    agent = named or of("agent-loop", None)
    tools = of("tool-registry", environment.get("PAWL_TOOL_REGISTRY_ADDRESS"))
    notifications = of("notifier", environment.get("PAWL_NOTIFIER_ADDRESS"))
    keys = of("job-store", environment.get("PAWL_JOB_STORE_ADDRESS"))
    return Target(
        agent=agent,
        tools=tools,
        notifications=notifications,
        keys=keys,
        key=partial(find_key, (*agent, *tools, *notifications, *keys), data=data, environment=environment),
        data=folder,
        certificates=tls.of_client(_authority_of(running) if running else authority, SystemClock()),
        key_in_clear=key_in_clear,
        names=tuple((name, value) for name, value in (("pawl-store", store), ("pawl-user", user)) if value),
    )


def _check_given(environment: Mapping[str, str]) -> None:
    """Return if PAWL_API_KEY may be a key: one that was meant to be given is not made up for by the local one."""
    given = environment.get("PAWL_API_KEY")
    if given is None:
        return
    if not given.strip():
        raise CommandError(
            "PAWL_API_KEY is empty. Set it to your key; `unset PAWL_API_KEY` for that of the suite on this machine."
        )
    if not given.isascii() or not given.isprintable() or " " in given:
        raise CommandError(
            "PAWL_API_KEY has a space, a line break or another character that no key has. Set it to the key alone."
        )


def _running(folder: Path) -> Endpoints | None:
    """Return the suite of a folder; none that is elsewhere: `pawl up` runs here, and anybody may write such a file."""
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
            hint = " For TLS give --ca FILE or PAWL_TLS_CA_FILE." if "://" in address else ""
            raise CommandError(f"The address {address!r} {error}.{hint}") from None
    if not addresses:
        raise CommandError("The address is empty; it must be host:port, for example 127.0.0.1:7601.")
    return addresses


def _authority_of(suite: Endpoints) -> Path | None:
    return Path(suite.authority) if suite.authority else None


def _beside(agent: tuple[str, ...], service: str) -> tuple[str, ...]:
    """Return the default address of a service, on the hosts of the agent-loop."""
    hosts = dict.fromkeys(address.rpartition(":")[0] for address in agent) or {"127.0.0.1": None}
    return tuple(f"{host}:{DEFAULT_PORTS[service]}" for host in hosts)
