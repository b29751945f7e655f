"""Spans of runs, named as in version 0.1.0 of OpenTelemetry's GenAI conventions.

Each drive of a run has a span, which ends when the run parks. The span of a later drive is a child of the first drive's
span, in the same trace, and links to the span of the previous drive. The IDs of these spans are derived from the run
and its epoch, so that a worker can reconstruct them after a crash. Without a tracer, the caller's context is passed on
unchanged.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from pawl.agent_loop.loop.ports import Claim
from pawl.agent_loop.loop.rules.assembly import ModelAnswer
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.run import Delegation
from pawl.agent_loop.loop.rules.state import State
from pawl.agent_loop.loop.rules.tool import ExecutionResult, ProposedCall
from pawl.agent_loop.model.request import ModelRequest
from pawl.chassis.ids import RunId
from pawl.values import Outcome, RunState, Usage

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from pawl.server.process.tracing import Tracer

_WITH_CONTENTS: Final = frozenset({"true", "span_only", "span_and_event"})
_TEXTS_BYTES_MAX: Final = 256 * 1024
_ENDED_WELL: Final = frozenset({Outcome.SUCCEEDED, Outcome.INPUT_REQUIRED, Outcome.AWAITING_COMPLETION})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracing:
    """The settings for recording runs. `model_servers` maps each model server to the attributes of its calls.

    With `contents`, spans contain prompts, answers, arguments and results.
    """

    tracer: Tracer
    model_servers: Mapping[str, Mapping[str, str | int]] = field(default_factory=dict)
    contents: bool = False


def tracing_of(tracer: Tracer | None, model_urls: Mapping[str, str]) -> Tracing | None:
    """Return the settings for recording runs that call these model servers, or None without a tracer."""
    if tracer is None:
        return None
    servers = {name: _server(url) for name, url in model_urls.items()}
    asked = os.environ.get("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "").lower()
    return Tracing(tracer=tracer, model_servers=servers, contents=asked in _WITH_CONTENTS)


def _server(model_url: str) -> dict[str, str | int]:
    url = urlsplit(model_url)
    port = url.port or (443 if url.scheme == "https" else 80)
    return {"server.address": url.hostname or "", "server.port": port}


class Traced:
    """Work in progress, and its span if it has one. `traceparent` is the context for nested work."""

    def __init__(self, tracing: Tracing | None = None, span: Span | None = None, *, traceparent: str = "") -> None:
        self.traceparent = tracing.tracer.traceparent_of(span) if tracing and span else traceparent
        self.attributes: dict[str, Any] = {}
        self.error_type = ""
        self._tracing, self._span = tracing, span

    def contain(self, **contents: Any) -> None:
        """Add contents as JSON if they are enabled and not too large. `__` in a name stands for a dot."""
        if self._tracing is None or not self._tracing.contents:
            return
        with suppress(Exception):  # tracing never fails a run
            for name, value in contents.items():
                encoded = value if isinstance(value, bytes) else msgspec.json.encode(list(value))
                if encoded and len(encoded) <= _TEXTS_BYTES_MAX:
                    self.attributes[name.replace("__", ".")] = encoded.decode()

    def end(self) -> None:
        if self._tracing is not None and self._span is not None:
            self._tracing.tracer.end(self._span, self.attributes, self.error_type)


class RunSpans:
    """The spans of one drive of a run.

    `new_trace` is the context of the run's first span, until it is stored with the run. Jobs have no spans, but their
    calls do. Each iteration of a series has its own trace.
    """

    def __init__(self, tracing: Tracing | None, claim: Claim, state: State, *, is_failing: bool = False) -> None:
        run = state.run
        first = "" if run.trace == run.traceparent else run.trace
        self.new_trace = ""
        self._tracing = tracing
        self._run = run
        self._is_series = run.series is not None
        self._usage_before = run.usage
        self._drive = Traced(traceparent="" if self._is_series else run.trace or run.traceparent)
        self._common = {
            "gen_ai.conversation.id": run.conversation_id,
            "pawl.store.id": run.store_id,
            "pawl.run.id": run.run_id,
        }
        if tracing is None or run.is_job:
            return
        epochs = first and [_with_span_id(first, _span_id(run.run_id, claim.epoch - 1))]
        self._drive = self._start(
            "invoke_workflow" if run.workflow is not None else "invoke_agent",
            run.workflow.name if run.workflow is not None else run.agent_name,
            {
                "gen_ai.agent.name": run.workflow.name if run.workflow is not None else run.agent_name,
                "gen_ai.request.model": run.options.model or None,
                "pawl.resumed": True if claim.epoch > 1 else None,
            },
            parent=first or run.traceparent,
            links=epochs or [each for each in dict.fromkeys((run.trace_link, *_starts_of_jobs(state))) if each],
            trace_id=_id(run.run_id, size_bytes=16),
            # The drive that ends a crashed run has the same epoch as the drive that crashed.
            span_id=0 if is_failing else _span_id(run.run_id, claim.epoch),
        )
        self.new_trace = "" if first else self._drive.traceparent

    def end(self, state: State, left: str) -> None:
        """End the drive's span, including what the drive has added to the run.

        `left` is the reason for releasing the run.
        """
        run, span = state.run, self._drive
        span.attributes |= _usage(run.usage - self._usage_before) | {
            "pawl.run.state": run.state.name,
            "pawl.run.waits": [wait.name for wait in run.waits] or None,
            "pawl.run.left": left,
        }
        if run.state is RunState.FAILED and run.failure is not None:
            span.error_type = run.failure.reason
        if self._tracing is not None and self._tracing.contents and run.output_text:
            span.contain(gen_ai__output__messages=[_message("assistant", run.output_text)])
        span.end()

    @contextmanager
    def model_call(self, request: ModelRequest) -> Iterator[Traced]:
        if self._tracing is None:
            yield self._drive
            return
        attributes = {
            **self._tracing.model_servers.get(request.server, {}),
            "gen_ai.provider.name": "openai",
            "gen_ai.request.model": request.model,
            "gen_ai.request.stream": True,
            "gen_ai.request.temperature": request.temperature,
            "gen_ai.request.max_tokens": request.output_tokens_max,
            "gen_ai.request.reasoning.level": request.reasoning_effort,
            "gen_ai.output.type": "json" if request.response_format else None,
        }
        span = self._start("chat", request.model, attributes, parent=self._drive.traceparent, is_client=True)
        span.contain(gen_ai__input__messages=map(_of_request, request.messages))
        try:
            yield span
        except BaseException as error:
            span.error_type = span.error_type or type(error).__name__
            raise
        finally:
            span.end()

    @contextmanager
    def tool_call(self, call: Call | ProposedCall) -> Iterator[Traced]:
        span = self.start_tool_call(call)
        try:
            yield span
        except BaseException as error:
            span.error_type = type(error).__name__
            raise
        finally:
            span.end()

    def start_tool_call(self, call: Call | ProposedCall) -> Traced:
        """Start the span of a call. A span that is never ended is not recorded."""
        if self._tracing is None:
            return self._drive
        attributes = {
            "gen_ai.tool.name": call.tool_name,
            "gen_ai.tool.type": "function",
            "gen_ai.tool.call.id": call.call_id,
        }
        run, trace = self._run, self._drive.traceparent
        links = [run.traceparent] if self._is_series and run.traceparent else []
        own = f"{run.run_id}/{call.round}" if self._is_series and isinstance(call, Call) else run.run_id
        trace_id = _id(own, size_bytes=16)
        span = self._start("execute_tool", call.tool_name, attributes, parent=trace, links=links, trace_id=trace_id)
        span.contain(gen_ai__tool__call__arguments=call.arguments_json)
        return span

    def delegated(self, delegations: Iterable[Delegation]) -> tuple[Delegation, ...]:
        """Return the runs to create, each with the trace context that it continues or links to."""
        context = self._drive.traceparent
        if self._is_series:
            return tuple(replace(each, trace_link=self._run.traceparent) for each in delegations)
        return tuple(
            replace(each, trace_link=context)
            if each.workflow is not None and each.workflow.chunk is not None
            else replace(each, traceparent=context)
            for each in delegations
        )

    def _start(self, operation: str, subject: str, attributes: Mapping[str, Any], **options: Any) -> Traced:
        if self._tracing is None:
            return Traced()
        known = {name: value for name, value in attributes.items() if value is not None}
        known |= {"gen_ai.operation.name": operation, **self._common}
        return Traced(self._tracing, self._tracing.tracer.start(f"{operation} {subject}", known, **options))


def answered(span: Traced, answer: ModelAnswer, *, error_type: str, first_seconds: float | None) -> None:
    """Record a model call's outcome on its span. `first_seconds` is the time until the first output."""
    span.error_type = error_type
    span.attributes |= _usage(answer.usage) | {
        "gen_ai.response.finish_reasons": [answer.finish_reason] if answer.finish_reason else None,
        "gen_ai.response.time_to_first_chunk": first_seconds,
    }
    calls = [{"type": "tool_call", "name": call.name, "arguments": call.arguments} for call in answer.calls]
    message = _message("assistant", answer.text, calls) | {"finish_reason": answer.finish_reason}
    span.contain(gen_ai__output__messages=[message])


def executed(span: Traced, ended: ExecutionResult) -> None:
    """Record a tool call's outcome on its span."""
    if ended.outcome not in _ENDED_WELL:
        span.error_type = ended.result.error_reason or ended.outcome
    span.attributes["pawl.call.outcome"] = ended.outcome
    span.contain(gen_ai__tool__call__result=ended.result.content_json)


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
        "pawl.usage.estimated_tokens": usage.estimated_tokens,
    }


def _id(of: str, *, size_bytes: int) -> int:
    return int.from_bytes(hashlib.sha256(of.encode()).digest()[:size_bytes])


def _span_id(run_id: RunId, epoch: int) -> int:
    return _id(f"{run_id}/{epoch}", size_bytes=8)


def first_span(run_id: RunId) -> str:
    """Return the context of the first span of a run that has its own trace."""
    return f"00-{_id(run_id, size_bytes=16):032x}-{_span_id(run_id, 1):016x}-01"


def _with_span_id(traceparent: str, span_id: int) -> str:
    form, trace_id, _, flags = traceparent.split("-")
    return f"{form}-{trace_id}-{span_id:016x}-{flags}"


def _starts_of_jobs(state: State) -> Sequence[str]:
    """Return the trace contexts of the jobs whose reports started this turn."""
    jobs = (notice.run for notice in state.notices) if state.run.is_turn else ()
    return [job.traceparent or job.trace_link for job in jobs]


def _message(role: str, text: str, more: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    return {"role": role, "parts": [*([{"type": "text", "content": text}] if text else ()), *more]}


def _of_request(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a chat-completions message to the form that spans contain."""
    content = message.get("content") or ""
    if message["role"] == "tool":
        part = {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}
        return _message("tool", "", [part])
    calls = [{"type": "tool_call", "id": call["id"], **call["function"]} for call in message.get("tool_calls") or ()]
    text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
    return _message(message["role"], text, calls)
