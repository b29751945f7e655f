"""Exit with 0 if the service at the given address says that it is serving; a container's health check.

healthcheck.py 127.0.0.1:7601 agent-loop: the name is what to look for in its certificate, if it has one. The gateway
is asked over HTTP.
"""

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
    """Return a channel over TLS if the service has a certificate, which is checked by its authority or by itself."""
    certificate = os.environ.get("PAWL_TLS_CERTIFICATE_FILE")
    if not certificate:
        return grpc.insecure_channel(address)
    roots = Path(os.environ.get("PAWL_TLS_CA_FILE") or certificate).read_bytes()
    options = [("grpc.ssl_target_name_override", name)]
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(roots), options)


def ask_page(address: str) -> int:
    """Ask for the page of the gateway, in the same container: its certificate has another name."""
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
    """Ask the standard health service about the whole server."""
    if name == "gateway":
        return ask_page(address)
    with open_channel(address, name) as channel:
        try:
            # The published types of this stub leave its methods out.
            check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]
            answer = check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            print(error, file=sys.stderr)
            return 1
    return int(answer.status != health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
