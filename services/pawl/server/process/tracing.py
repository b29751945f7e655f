"""Records spans and sends them over OTLP, as configured by the standard OTEL_* variables.

Recording never waits for the receiver. While it is down or slow, spans are dropped and counted. `Service.open_tracer`
imports this module only if tracing is enabled, because the SDK costs time and memory.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final, Self, TypeAlias

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from pawl.chassis.process import logs
from pawl.chassis.process.start import StartError
from pawl.chassis.process.tasks import within
from pawl.server.process.metrics import Metrics

# ruff: noqa: PLC0415  # only one of the exporters is needed

_QUEUE_SPANS_MAX: Final = 2048
# How long the process waits at its end for the receiver to take the last spans.
_LAST_EXPORT_SECONDS: Final = 1.0
_PROTOCOLS: Final = ("grpc", "http/protobuf")

Attributes: TypeAlias = Mapping[str, Any]

_log = logs.get_logger(__name__)


class Tracer:
    """Records the spans of one process. An async context manager that sends the last spans on exit.

    Raises:
        StartError: An OTEL_* variable has a value that cannot be used.
    """

    def __init__(self, service: str, instance_id: str, metrics: Metrics) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        spans = metrics.counter("trace_spans_total", "Spans ended, by what happened to them.", ("outcome",))
        self._ids = _Ids()
        own = {
            "service.name": f"pawl-{service.replace('_', '-')}",
            "service.version": version("pawl-runtime"),
            "service.instance.id": instance_id,
        }
        try:
            resource = Resource.create(own).merge(OTELResourceDetector().detect())
            self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
            self._provider.add_span_processor(_Bounded(_exporter(), spans))
        except ValueError as error:
            raise StartError(f"tracing: an OTEL_* variable cannot be used: {error}") from None
        self._tracer = self._provider.get_tracer("pawl", own["service.version"])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        ended, loop = asyncio.Event(), asyncio.get_running_loop()

        def send_last() -> None:
            self.shut_down()
            if not loop.is_closed():
                loop.call_soon_threadsafe(ended.set)

        # A daemon, so that a receiver that hangs does not keep the process alive.
        threading.Thread(target=send_last, name="last spans", daemon=True).start()
        await within(_LAST_EXPORT_SECONDS, ended.wait())

    def shut_down(self) -> None:
        """Send the last spans. Blocks until the receiver has answered."""
        self._provider.shutdown()

    def start(
        self,
        name: str,
        attributes: Attributes,
        *,
        parent: str = "",
        links: Sequence[str] = (),
        trace_id: int = 0,
        span_id: int = 0,
        is_client: bool = False,
    ) -> Span:
        """Start a span, in a new trace if it has no parent. `parent` and `links` must be valid `traceparent` values.

        An ID of 0 is replaced by a random one. The sampler decides whether to record new traces. Other spans follow
        their parents.
        """
        self._ids.trace_id, self._ids.span_id = trace_id, span_id
        context = set_span_in_context(NonRecordingSpan(_context(parent)), Context()) if parent else Context()
        return self._tracer.start_span(
            name,
            context,
            SpanKind.CLIENT if is_client else SpanKind.INTERNAL,
            attributes,
            [Link(_context(link)) for link in links],
        )

    @staticmethod
    def end(span: Span, attributes: Attributes, error_type: str = "") -> None:
        span.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if error_type:
            span.set_attribute("error.type", error_type)
            span.set_status(StatusCode.ERROR)
        span.end()

    @staticmethod
    def traceparent_of(span: Span) -> str:
        context = span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _context(traceparent: str) -> SpanContext:
    _, trace_id, span_id, flags = traceparent.split("-")
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))


def _exporter() -> SpanExporter:
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    match protocol or "http/protobuf":
        case "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

            return OverGrpc()
        case "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

            return OverHttp()
        case _:
            raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL must be one of {', '.join(_PROTOCOLS)}, got {protocol!r}")


class _Ids(IdGenerator):
    """Returns the IDs that were set for the next span, once each, and otherwise random ones."""

    trace_id = span_id = 0

    def generate_trace_id(self) -> int:
        trace_id, self.trace_id = self.trace_id, 0
        return trace_id or random.getrandbits(128) or 1

    def generate_span_id(self) -> int:
        span_id, self.span_id = self.span_id, 0
        return span_id or random.getrandbits(64) or 1


class _Bounded(SpanProcessor):
    """A queue that exports spans in batches from a thread.

    It counts the spans that were exported, refused by the receiver, or dropped.
    """

    def __init__(self, exporter: SpanExporter, spans: Any) -> None:
        self._queue_spans_max = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE") or _QUEUE_SPANS_MAX)
        self._dropped = spans.labels("dropped")
        self._counted = _Counted(exporter, spans)
        self._batches = BatchSpanProcessor(self._counted, max_queue_size=self._queue_spans_max)
        self._given = 0

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._given - self._counted.taken >= self._queue_spans_max:
            self._dropped.inc()
            return
        self._given += 1
        self._batches.on_end(span)

    def shutdown(self) -> None:
        self._batches.shutdown()  # type: ignore[no-untyped-call]  # the library leaves this one untyped


class _Counted(SpanExporter):
    def __init__(self, exporter: SpanExporter, spans: Any) -> None:
        self.taken = 0
        self._exporter = exporter
        self._exported, self._failed = spans.labels("exported"), spans.labels("failed")
        self._is_failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            is_failing = result is not SpanExportResult.SUCCESS
            (self._failed if is_failing else self._exported).inc(len(spans))
            if is_failing is not self._is_failing:
                (_log.warning if is_failing else _log.info)("tracing.failing" if is_failing else "tracing.exporting")
            self._is_failing = is_failing
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
