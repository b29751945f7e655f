"""gRPC server reflection in both versions. Newer clients use only v1, and older clients use only v1alpha.

The library implements v1alpha. The messages of v1 differ only in the package name, so the same servicer answers both
after the descriptors of v1 have been added.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2

OLD_NAME: Final = reflection.SERVICE_NAME
NAME: Final = "grpc.reflection.v1.ServerReflection"

_OLD_PACKAGE: Final = "grpc.reflection.v1alpha"
_PACKAGE: Final = "grpc.reflection.v1"
_FILE: Final = "grpc/reflection/v1/reflection.proto"


def add_reflection(service_names: Iterable[str], server: grpc.aio.Server) -> None:
    _add_v1_descriptors()
    names = (*service_names, OLD_NAME, NAME)
    reflection.enable_server_reflection(names, server)
    answer: Any = reflection.aio.ReflectionServicer(names).ServerReflectionInfo
    handler = grpc.stream_stream_rpc_method_handler(
        answer,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, {"ServerReflectionInfo": handler}),))


def _add_v1_descriptors() -> None:
    """Add the descriptors of v1 to the pool that the servicer uses. Idempotent."""
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name, file.package = _FILE, _PACKAGE
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(_OLD_PACKAGE, _PACKAGE)
    for method in file.service[0].method:
        method.input_type = method.input_type.replace(_OLD_PACKAGE, _PACKAGE)
        method.output_type = method.output_type.replace(_OLD_PACKAGE, _PACKAGE)
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
