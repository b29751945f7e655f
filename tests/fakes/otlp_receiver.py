"""An OTLP receiver that stores the spans it receives, over HTTP or gRPC."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

SECONDS_MAX = 60.0


@dataclass(frozen=True)
class Received:
    name: str
    # In hex, as in a `traceparent`. `links` contains `trace_id-span_id`.
    trace_id: str
    span_id: str
    parent: str
    links: tuple[str, ...]
    kind: int
    is_error: bool
    attributes: dict[str, Any]
    resource: dict[str, Any]

    @property
    def context(self) -> str:
        return f"{self.trace_id}-{self.span_id}"


@dataclass
class Receiver:
    protocol: str
    endpoint: str = ""
    spans: list[Received] = field(default_factory=list)
    # While set, the receiver does not answer.
    held: threading.Event = field(default_factory=threading.Event)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": self.protocol,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }

    def take(self, request: ExportTraceServiceRequest) -> None:
        with self._changed:
            for of_resource in request.resource_spans:
                resource = _values(of_resource.resource.attributes)
                for of_scope in of_resource.scope_spans:
                    self.spans += (_received(span, resource) for span in of_scope.spans)
            self._changed.notify_all()

    def wait(self, is_enough: Callable[[list[Received]], bool]) -> list[Received]:
        with self._changed:
            assert self._changed.wait_for(lambda: is_enough(self.spans), SECONDS_MAX), self.spans
            return list(self.spans)

    def named(self, *names: str) -> list[Received]:
        """Return spans with these names, one for each, in this order, once all have arrived."""
        spans = self.wait(lambda spans: all(any(span.name == name for span in spans) for name in names))
        return [next(span for span in spans if span.name == name) for name in names]


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def _received(span: Any, resource: dict[str, Any]) -> Received:
    return Received(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        links=tuple(f"{link.trace_id.hex()}-{link.span_id.hex()}" for link in span.links),
        kind=span.kind,
        is_error=span.status.code == span.status.STATUS_CODE_ERROR,
        attributes=_values(span.attributes),
        resource=resource,
    )


@contextmanager
def over_http() -> Iterator[Receiver]:
    receiver = Receiver("http/protobuf")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces"
            receiver.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def over_grpc() -> Iterator[Receiver]:
    receiver = Receiver("grpc")

    class Servicer(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:
            receiver.take(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Servicer(), server)  # type: ignore[no-untyped-call]
    receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()
