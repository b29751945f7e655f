"""Reflection in both of its versions: newer clients ask for v1 only, older ones for v1alpha only.

The library has v1alpha. The messages of v1 are the same on the wire, so the same servicer answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

OLD_NAME: Final = reflection.SERVICE_NAME
NAME: Final = "grpc.reflection.v1.ServerReflection"


def add_reflection(service_names: Iterable[str], server: grpc.aio.Server) -> None:
    """Have the server describe these services, and this one."""
    names = (*service_names, OLD_NAME)
    reflection.enable_server_reflection(names, server)
    answer: Any = reflection.aio.ReflectionServicer(names).ServerReflectionInfo
    handler = grpc.stream_stream_rpc_method_handler(
        answer,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, {"ServerReflectionInfo": handler}),))
