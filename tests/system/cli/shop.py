"""An HTTP service with an OpenAPI document, for tests."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final, Self

_DOCUMENT: Final = {
    "openapi": "3.1.0",
    "info": {"title": "Shop", "version": "1"},
    "paths": {
        "/items/{item}": {
            "get": {
                "operationId": "getItem",
                "summary": "Look an item up.",
                "parameters": [{"name": "item", "in": "path", "required": True, "schema": {"type": "string"}}],
                "responses": {"200": {"description": "The item."}},
            }
        }
    },
}


class Shop:
    """Serves /openapi.json and GET /items/NAME, and remembers what it was asked; a context manager."""

    def __init__(self) -> None:
        self.document: dict[str, Any] = json.loads(json.dumps(_DOCUMENT))
        self.asked: list[str] = []
        shop = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                shop.answer(self)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"

    def describe(self, summary: str) -> None:
        """Have its document say this of its operation from now on."""
        self.document["paths"]["/items/{item}"]["get"]["summary"] = summary

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer a request."""
        self.asked.append(f"{request.command} {request.path}")
        answer = self.document if request.path == "/openapi.json" else {"path": request.path, "price": 42}
        data = json.dumps(answer).encode()
        request.send_response(302 if request.path == "/elsewhere.json" else 200)
        request.send_header("Location", "http://127.0.0.1:9/openapi.json")
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
