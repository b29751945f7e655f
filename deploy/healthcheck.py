"""Exit with 0 if the service at the given address says that it is serving; a container's health check."""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_SECONDS = 3


def main(address: str) -> int:
    """Ask the standard health service about the whole server."""
    with grpc.insecure_channel(address) as channel:
        try:
            # The published types of this stub leave its methods out.
            check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]
            answer = check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            print(error, file=sys.stderr)
            return 1
    return int(answer.status != health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
