"""Sends each model call to its model server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping

from pawl.agent_loop.model.request import SERVER_UNKNOWN, ModelError, ModelPort, ModelRequest, Piece, Problem


class ModelServers:
    """The deployment's model servers by name. The default server's name is empty."""

    def __init__(self, servers: Mapping[str, ModelPort]) -> None:
        self._servers = servers

    def stream(self, request: ModelRequest) -> AsyncGenerator[Piece, None]:
        server = self._servers.get(request.server)
        if server is None:
            message = f"This agent-loop has no model server {request.server!r}: add it to the limits file."
            raise ModelError(Problem(reason=SERVER_UNKNOWN, retryable=False, message=message))
        return server.stream(request)
