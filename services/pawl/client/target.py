"""The services of a suite: where they are, and as whom to call them."""

from __future__ import annotations

import math
import os
import secrets
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeAlias, TypeVar

import grpc

from pawl.agent.v1.agent_pb2_grpc import AgentServiceStub
from pawl.agent.v1.agents_pb2_grpc import AgentRegistryServiceStub
from pawl.agent.v1.conversation_pb2_grpc import ConversationServiceStub
from pawl.agent.v1.jobs_pb2_grpc import JobServiceStub
from pawl.agent.v1.operator_pb2_grpc import OperatorServiceStub
from pawl.agent.v1.schedule_pb2_grpc import ScheduleServiceStub
from pawl.agent.v1.trigger_pb2_grpc import TriggerServiceStub
from pawl.chassis.identity.local_key import IN_CLEAR, check_hidden, find_key
from pawl.chassis.process.clock import SystemClock
from pawl.chassis.process.settings import is_loopback, split_address
from pawl.chassis.process.start import StartError
from pawl.chassis.rpc import tls
from pawl.chassis.rpc.client import connect, open_channel
from pawl.chassis.rpc.replicas import DEFAULT_PORTS, Endpoints, read_endpoints
from pawl.chassis.rpc.retry import Retry
from pawl.chassis.rpc.status import from_rpc_error, has_reason
from pawl.errors import DeadlineExceeded, PawlError, Unavailable
from pawl.identity.v1.key_pb2_grpc import KeyServiceStub
from pawl.notify.v1.channel_pb2_grpc import ChannelServiceStub
from pawl.notify.v1.notify_pb2_grpc import NotifyServiceStub
from pawl.notify.v1.preference_pb2_grpc import PreferenceServiceStub
from pawl.tool.v1.audit_pb2_grpc import AuditServiceStub
from pawl.tool.v1.completion_pb2_grpc import CompletionServiceStub
from pawl.tool.v1.document_pb2_grpc import DocumentServiceStub
from pawl.tool.v1.memory_pb2_grpc import MemoryServiceStub
from pawl.tool.v1.rule_pb2_grpc import RuleServiceStub
from pawl.tool.v1.source_pb2_grpc import SourceServiceStub
from pawl.tool.v1.tool_pb2_grpc import ToolServiceStub

Asks: TypeAlias = Literal["agent", "tools", "notifications", "keys"]
"""The service that a call goes to."""

SERVICES: Final = {
    "agent": "agent-loop",
    "tools": "tool-registry",
    "notifications": "notifier",
    "keys": "job-store",
}
"""The names of the services, in logs and certificates."""
DEADLINE_SECONDS: Final = 15.0
_RETRY_SECONDS: Final = 60.0
_PAGE: Final = 200
# Codes that gRPC gives by itself where a connection cannot be made, or breaks.
_BROKEN: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
)


class NoAnswer(Unavailable):
    """Nobody answered: no service listens there, or the connection broke. The message names the addresses."""


Stub = TypeVar("Stub")
Answer = TypeVar("Answer")


def _stub(kind: Callable[[grpc.aio.Channel], Stub], service: Asks) -> cached_property[Stub]:
    """Return a property of a target: a stub of what a service serves, made when it is first asked for."""
    return cached_property(lambda target: kind(target.channel(service)))


class Target:
    """The public services of a suite, and as whom to call them. A context manager, which closes what was opened.

    The suite is that at `address` (one, or those of all replicas of agent-loop), else the one that runs on the folder
    `data`, else one at the default ports of this machine; where neither is given, PAWL_ADDRESS and PAWL_DATA stand for
    them. A folder that was named must have a suite that runs; the default ports may belong to another one. With
    addresses of another suite, the other services are looked for on their default ports beside it, unless
    PAWL_TOOL_REGISTRY_ADDRESS, PAWL_NOTIFIER_ADDRESS or PAWL_JOB_STORE_ADDRESS say where they are.

    The key is `api_key`, else PAWL_API_KEY, else that of a suite on this machine, which is shown to that suite only
    and looked for before each call: others may listen there by then. `store` and `user` name on whose behalf to act,
    for keys that may choose. `authority` (or PAWL_TLS_CA_FILE) is a file with the certificates by which to check those
    of the services; a suite of the data folder says itself whether it speaks TLS. Without TLS the key goes beyond this
    machine only with `key_in_clear` (or PAWL_KEY_IN_CLEAR=1).

    Nothing is connected before the first call. Calls of the stubs raise the classes of pawl.errors. Methods, streams
    and sessions ask again for `retry_seconds` while no service answers, or an answer takes too long; None: for ever.

    Raises:
        StartError: an address has another form, no suite runs on `data`, the key cannot be one, or the certificates
            cannot be used.
    """

    agents = _stub(AgentServiceStub, "agent")
    agent_register = _stub(AgentRegistryServiceStub, "agent")
    conversations = _stub(ConversationServiceStub, "agent")
    jobs = _stub(JobServiceStub, "agent")
    scheduler = _stub(ScheduleServiceStub, "agent")
    triggers = _stub(TriggerServiceStub, "agent")
    operators = _stub(OperatorServiceStub, "agent")
    tool_register = _stub(ToolServiceStub, "tools")
    rules = _stub(RuleServiceStub, "tools")
    auditor = _stub(AuditServiceStub, "tools")
    completions = _stub(CompletionServiceStub, "tools")
    document_store = _stub(DocumentServiceStub, "tools")
    memories = _stub(MemoryServiceStub, "tools")
    sources = _stub(SourceServiceStub, "tools")
    notifier = _stub(NotifyServiceStub, "notifications")
    preferences = _stub(PreferenceServiceStub, "notifications")
    notify_channels = _stub(ChannelServiceStub, "notifications")
    key_register = _stub(KeyServiceStub, "keys")

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
        named = _addresses(given) if given else ()
        folder = data or environment.get("PAWL_DATA")
        self.data = Path(folder or ".pawl")
        running = _running(self.data)
        if running is not None and not set(named) <= set(running.addresses("agent-loop")):
            running = None
        if running is None and not named and folder:
            raise StartError(
                f"No Pawl suite runs on {self.data}. Start one with `pawl up --data {shlex.quote(str(self.data))}`."
            )

        def of(service: str, variable: str = "") -> tuple[str, ...]:
            if running is not None:
                return tuple(running.addresses(service)) or _beside((), service)
            elsewhere = environment.get(variable)
            return _addresses(elsewhere) if elsewhere else _beside(named, service)

        self.agent = named or of("agent-loop")
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
        """The metadata of a call that is made now: key, store and user."""
        key = self._key()
        return ((("authorization", f"Bearer {key}"),) if key else ()) + self._names

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
                tls=self._certificates,
                server_name=tls.server_name(addresses, SERVICES[service]),
                translate=partial(error_of, addresses=addresses),
            )
        return self._channels[service]

    def connect(self, address: str) -> grpc.aio.Channel:
        """Return a channel to one replica, whose calls bring their own metadata.

        Raises:
            KeyInClear: the key would go there unencrypted.
        """
        self._check_hidden([address])
        return connect(address, self._certificates)

    def _check_hidden(self, addresses: Iterable[str]) -> None:
        if self._key():
            check_hidden(addresses, speaks_tls=self._certificates is not None, in_clear=self._in_clear)

    async def once(self, method: Callable[[Any], Awaitable[Answer]], request: Any) -> Answer:
        """Make a request whose effect comes once, under the id that it has or gets, however often it is sent."""
        request.request_id = request.request_id or f"py_{secrets.token_hex(12)}"
        return await self.again(method, request)

    async def again(self, method: Callable[[Any], Awaitable[Answer]], request: Any) -> Answer:
        """Make a request that does no harm when it is sent again."""
        return await self._retry.until_answered(partial(method, request), seconds_max=self.retry_seconds)

    async def pages(self, call: Callable[..., Awaitable[Answer]], request: Any) -> AsyncIterator[Answer]:
        """Yield the pages of a list, from the one that `request` asks for to the last."""
        request.page_size = _PAGE
        while True:
            page: Any = await self.again(call, request)
            yield page
            request.page_token = page.next_page_token
            if not request.page_token:
                return


def error_of(error: grpc.aio.AioRpcError, addresses: str) -> PawlError:
    """Return the error that a service reported, or, where nobody answered, one that names the addresses."""
    if error.code() in _BROKEN and not has_reason(error):
        return NoAnswer(f"no answer from {addresses}: {error.details() or error.code().name}")
    return from_rpc_error(error)


def _check_key(name: str, key: str | None) -> None:
    """Return if a key may be one: one that was meant to be given is not made up for by the local one."""
    if key is None:
        return
    if not key.strip():
        instead = f"; `unset {name}` for that of the suite on this machine" if name.isupper() else ""
        raise StartError(f"{name} is empty. Set it to your key{instead}.")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise StartError(
            f"{name} has a space, a line break or another character that no key has. Set it to the key alone."
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
            raise StartError(f"The address {address!r} {error}.{hint}") from None
    if not addresses:
        raise StartError("The address is empty; it must be host:port, for example 127.0.0.1:7601.")
    return addresses


def _beside(agent: tuple[str, ...], service: str) -> tuple[str, ...]:
    """Return the default address of a service, on the hosts of the agent-loop."""
    hosts = dict.fromkeys(address.rpartition(":")[0] for address in agent) or {"127.0.0.1": None}
    return tuple(f"{host}:{DEFAULT_PORTS[service]}" for host in hosts)
