"""Calls to the public methods of the services behind the gateway, by name."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from types import ModuleType
from typing import Any, Final, TypeAlias

import grpc
import msgspec
from google.protobuf import json_format
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from pawl.agent.v1 import (
    agent_pb2,
    agents_pb2,
    conversation_pb2,
    declaration_pb2,
    goal_pb2,
    jobs_pb2,
    operator_pb2,
    schedule_pb2,
    trigger_pb2,
    usage_pb2,
    workflow_pb2,
)
from pawl.chassis.identity.auth import CLIENT_ADDRESS, GATEWAY_KEY
from pawl.chassis.identity.roles import CALLERS, READERS
from pawl.chassis.ids import is_id
from pawl.errors import InvalidField, MethodNotFound, PawlError
from pawl.notify.v1 import channel_pb2, notify_pb2, preference_pb2
from pawl.settings.v1 import settings_pb2
from pawl.tool.v1 import audit_pb2, completion_pb2, document_pb2, memory_pb2, rule_pb2, source_pb2, tool_pb2

Metadata: TypeAlias = tuple[tuple[str, str], ...]
CallsOfStore: TypeAlias = Callable[[str, type[PawlError]], Callable[[str, Message], Awaitable[Any]]]

# The services behind the gateway, and the modules that define their public APIs.
PEERS: Final[Mapping[str, tuple[ModuleType, ...]]] = {
    "agent_loop": (
        agent_pb2,
        agents_pb2,
        conversation_pb2,
        declaration_pb2,
        goal_pb2,
        jobs_pb2,
        operator_pb2,
        schedule_pb2,
        trigger_pb2,
        usage_pb2,
        workflow_pb2,
    ),
    "tool_registry": (audit_pb2, completion_pb2, document_pb2, memory_pb2, rule_pb2, source_pb2, tool_pb2),
    "notifier": (channel_pb2, notify_pb2, preference_pb2),
    "job_store": (settings_pb2,),
}
UNSUBSCRIBE: Final = "pawl.notify.v1.ChannelService/UnsubscribeChannel"
DELIVER_WEBHOOK: Final = "pawl.agent.v1.TriggerService/DeliverWebhook"
COMPLETE_CALL: Final = "pawl.tool.v1.CompletionService/CompleteCall"
SEND_EVENT: Final = "pawl.agent.v1.WorkflowService/SendEvent"
WHO_AM_I: Final = "pawl.agent.v1.AgentService/WhoAmI"
GET_RUN: Final = "pawl.agent.v1.AgentService/GetRun"
WATCH_RUN: Final = "pawl.agent.v1.AgentService/WatchRun"
# The current request's client address, in gRPC format.
CLIENT: Final[ContextVar[str]] = ContextVar("pawl_client", default="")
_DEADLINE_SECONDS: Final = 10.0


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """A method with a single request. `name` is `package.Service/Method`.

    `peer` is the service that implements it.
    """

    name: str
    peer: str
    request: type[Message]
    response: type[Message]
    streams: bool

    def read(self, value: Any) -> Message:
        """Parse a request from protobuf JSON.

        Raises:
            InvalidField: The value is invalid. The message contains the position.
        """
        if not isinstance(value, dict):
            raise InvalidField("The request must be a JSON object.", field="request")
        try:
            return json_format.ParseDict(value, self.request())
        except (json_format.ParseError, RecursionError, ValueError, TypeError) as error:
            raise InvalidField(
                f"The request is not a valid {self.request.DESCRIPTOR.name}: {error}"[:500], field="request"
            ) from None


def write(message: Message) -> dict[str, Any]:
    return json_format.MessageToDict(message)


def _methods() -> Iterator[Method]:
    for peer, modules in PEERS.items():
        for module in modules:
            for service in module.DESCRIPTOR.services_by_name.values():
                for method in service.methods:
                    if not method.client_streaming:
                        yield Method(
                            name=f"{service.full_name}/{method.name}",
                            peer=peer,
                            request=GetMessageClass(method.input_type),
                            response=GetMessageClass(method.output_type),
                            streams=method.server_streaming,
                        )


_METHODS: Final = {method.name: method for method in _methods()}
# Methods that users may call. The gateway does not expose any others.
PUBLIC: Final[Mapping[str, Method]] = {
    name: method for name, method in _METHODS.items() if not READERS.isdisjoint(CALLERS.get(f"/{name}", ()))
}


def find(name: str, *, streams: bool) -> Method:
    """Return a public method.

    Raises:
        MethodNotFound: The method does not exist, or does not match `streams`.
    """
    method = PUBLIC.get(name)
    if method is None:
        raise MethodNotFound(
            "The gateway has no such method. An example is POST /rpc/pawl.agent.v1.AgentService/WhoAmI."
        )
    if method.streams != streams:
        route = "POST /stream" if method.streams else f"POST /rpc/{name}"
        raise MethodNotFound(f"Call {name} with {route}.")
    return method


class Services:
    """Calls public methods with the caller's credential.

    With `service_key`, failed logins count against the client's address.
    """

    def __init__(self, channels: Mapping[str, grpc.aio.Channel], service_key: Callable[[], str] | None = None) -> None:
        self._service_key = service_key
        self._calls = {name: _callable(channels[method.peer], method) for name, method in _METHODS.items()}

    async def call(self, name: str, request: Message, metadata: Metadata, *, timeout_seconds: float) -> Any:
        """Call a method and return its response.

        Raises:
            PawlError: The service returned an error, or is unavailable (DependencyUnavailable).
        """
        return await self._calls[name](request, metadata=(*metadata, *self._client()), timeout=timeout_seconds)

    async def watch(self, name: str, request: Message, metadata: Metadata) -> AsyncGenerator[Any, None]:
        """Yield a stream's messages. Raises the same errors as `call`. Consume it inside `contextlib.aclosing`."""
        call = self._calls[name](request, metadata=(*metadata, *self._client()))
        try:
            async for message in call:
                yield message
                del message
        finally:
            # gRPC would keep the unread stream open.
            call.cancel()

    def _client(self) -> Metadata:
        if self._service_key is None:
            return ()
        return (GATEWAY_KEY, self._service_key()), (CLIENT_ADDRESS, CLIENT.get())


def calls_of_store(
    services: Services, key_of: Callable[[str], Metadata | None], store_id: str, absent: type[PawlError]
) -> Callable[[str, Message], Awaitable[Any]]:
    """Return a function that calls methods in a store, using the gateway's key for that store.

    Raises:
        PawlError: `absent`, if there is no key for the store.
    """
    metadata = key_of(store_id) if is_id(store_id) else None
    if metadata is None:
        raise absent
    return partial(services.call, metadata=metadata, timeout_seconds=_DEADLINE_SECONDS)


def _callable(channel: grpc.aio.Channel, method: Method) -> Any:
    kind: Any = channel.unary_stream if method.streams else channel.unary_unary
    return kind(
        f"/{method.name}",
        request_serializer=method.request.SerializeToString,
        response_deserializer=method.response.FromString,
    )
