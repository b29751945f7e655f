"""A container's health check: exits with 0 if the service at the given address is serving."""

from __future__ import annotations

import http.client
import os
import ssl
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_SECONDS = 3


def open_channel(address: str, name: str) -> grpc.Channel:
    """Return a channel, over TLS if the service has a certificate, verified by its authority or by itself."""
    certificate = os.environ.get("PAWL_TLS_CERTIFICATE_FILE")
    if not certificate:
        return grpc.insecure_channel(address)
    roots = Path(os.environ.get("PAWL_TLS_CA_FILE") or certificate).read_bytes()
    options = [("grpc.ssl_target_name_override", name)]
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(roots), options)


def ask_page(address: str) -> int:
    """Check the gateway over HTTP. Its certificate does not name the container, so it is not verified."""
    connection: http.client.HTTPConnection
    if os.environ.get("PAWL_TLS_CERTIFICATE_FILE"):
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(address, timeout=TIMEOUT_SECONDS, context=context)
    else:
        connection = http.client.HTTPConnection(address, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/healthz")
        return int(connection.getresponse().status != http.HTTPStatus.OK)
    except OSError as error:
        print(error, file=sys.stderr)
        return 1


def main(address: str, name: str) -> int:
    """Return 0 if the whole server is serving, else 1."""
    if name == "gateway":
        return ask_page(address)
    with open_channel(address, name) as channel:
        try:
            # The published type stubs lack the methods of this stub.
            check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]
            answer = check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            print(error, file=sys.stderr)
            return 1
    return int(answer.status != health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
