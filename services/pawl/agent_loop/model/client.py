"""The model server behind `ModelPort`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any, Final, Literal, Self

import httpx2
import msgspec
import openai

from pawl.agent_loop.model import failure, words
from pawl.agent_loop.model.answer import Answer
from pawl.agent_loop.model.request import ModelError, ModelRequest, Piece, Problem

# After the finish reason only usage and the end can come; a server that keeps the
# connection open instead is not waited for.
_AFTER_FINISH_SECONDS: Final = 5.0
# A response read to its end leaves its connection for the next call.
_DRAIN_SECONDS: Final = 0.1
_ERROR_BYTES_MAX: Final = 1024 * 1024

_LIMITS: Final = httpx2.Limits(max_connections=1000, max_keepalive_connections=100, keepalive_expiry=60.0)
_HEADERS: Final = {
    "Content-Type": "application/json",
    "Accept": "text/event-stream",
    # Events are small, and what is compressed comes late.
    "Accept-Encoding": "identity",
}

OutputTokensField = Literal["max_completion_tokens", "max_tokens"]


class _Sample(httpx2.AsyncBaseTransport):
    """Keeps a request instead of sending it."""

    request: httpx2.Request

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.request = request
        return httpx2.Response(200)


class OpenAiModel:
    """A client of one model server, with its own pool of connections.

    The openai client is what is configured: credential headers and base URL. It makes the head of a request once;
    httpx2 sends each call with it, so that a call does not pay for the typed parameters of that client.
    Nothing is retried. Use as an async context manager.
    """

    def __init__(
        self,
        *,
        base_url: str,
        api_key: str,
        output_tokens_field: OutputTokensField = "max_completion_tokens",
        format_with_tools: bool = True,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._base_url = base_url
        self._api_key = api_key
        self._output_tokens_field = output_tokens_field
        self._format_with_tools = format_with_tools
        self._now = now
        self._http = httpx2.AsyncClient(limits=_LIMITS, timeout=None, follow_redirects=True)
        self._head: httpx2.Request | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Piece, None]:
        deadline = asyncio.get_running_loop().time() + request.deadline_seconds
        answer = Answer()
        try:
            response = await self._open(request)
            async with aclosing(response), aclosing(response.aiter_bytes()) as body:
                while not answer.done and (data := await _read(body, answer, request, deadline)) is not None:
                    for piece in answer.feed(data):
                        yield piece
                for piece in answer.end():
                    yield piece
                with suppress(TimeoutError, httpx2.HTTPError):
                    async with asyncio.timeout(_DRAIN_SECONDS):
                        async for _ in body:
                            pass
        except ModelError as error:
            problem = error.problem
            message = self._without_key(problem.message)
            raise ModelError(msgspec.structs.replace(problem, message=message)) from None

    def _without_key(self, said: str) -> str:
        return said.replace(self._api_key, "***") if self._api_key else said

    async def _open(self, request: ModelRequest) -> httpx2.Response:
        """Send the request and return the response once its headers are there."""
        body = msgspec.json.encode(self._body(request))
        try:
            async with asyncio.timeout(min(request.headers_timeout_seconds, request.deadline_seconds)):
                self._head = head = self._head or await self._make_head()
                sent = self._http.build_request("POST", head.url, headers=head.headers, content=body)
                response = await self._http.send(sent, stream=True)
                if not response.is_success:
                    raise ModelError(await self._refusal(response))
                return response
        except TimeoutError:
            if request.deadline_seconds <= request.headers_timeout_seconds:
                raise ModelError(failure.ROUND_TIMEOUT) from None
            raise ModelError(failure.headers_timeout(request.headers_timeout_seconds)) from None
        except (openai.APIConnectionError, httpx2.HTTPError):
            raise ModelError(failure.NETWORK) from None

    async def _make_head(self) -> httpx2.Request:
        """Return a request of the openai client, with the headers that all calls have."""
        sample = _Sample()
        async with httpx2.AsyncClient(transport=sample) as http:
            # The client insists on a key; servers without one ignore it.
            client = openai.AsyncOpenAI(base_url=self._base_url, api_key=self._api_key or "none", http_client=http)
            await client.post(
                "/chat/completions", cast_to=httpx2.Response, content=b"{}", options={"headers": _HEADERS}
            )
        del sample.request.headers["content-length"]
        return sample.request

    def _body(self, request: ModelRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": request.model,
            "messages": request.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.tools:
            body["tools"] = request.tools
        if request.tool_choice is not None:
            body["tool_choice"] = request.tool_choice
        if request.temperature is not None:
            body["temperature"] = request.temperature
        if request.output_tokens_max is not None:
            body[self._output_tokens_field] = request.output_tokens_max
        if request.response_format is not None and (self._format_with_tools or not request.tools):
            body["response_format"] = request.response_format
        if request.reasoning_effort is not None:
            body["reasoning_effort"] = request.reasoning_effort
        return body

    async def _refusal(self, response: httpx2.Response) -> Problem:
        """Return the problem of a response that is no success, with as much of its body as there is."""
        body = bytearray()
        async with aclosing(response), aclosing(response.aiter_raw()) as parts:
            with suppress(httpx2.HTTPError):
                while len(body) < _ERROR_BYTES_MAX and (data := await anext(parts, None)) is not None:
                    body += data
        try:
            text = httpx2.Response(response.status_code, headers=response.headers, content=bytes(body)).text
        except httpx2.DecodingError:
            text = ""
        return failure.http_status(
            response.status_code,
            error=words.error_of(self._without_key(text)),
            retry_after_seconds=failure.retry_after_seconds(response.headers, now=self._now()),
        )


async def _read(body: AsyncIterator[bytes], answer: Answer, request: ModelRequest, deadline: float) -> bytes | None:
    """Return the next bytes, or None at the end.

    Once the answer is finished, no fault of the connection can harm it.
    """
    patience = _AFTER_FINISH_SECONDS if answer.finished else request.idle_timeout_seconds
    silent_at = asyncio.get_running_loop().time() + patience
    try:
        async with asyncio.timeout_at(min(silent_at, deadline)):
            return await anext(body, None)
    except TimeoutError:
        fault = failure.ROUND_TIMEOUT if deadline <= silent_at else failure.idle_timeout(patience)
    except httpx2.RemoteProtocolError:
        fault = failure.TRUNCATED
    except httpx2.DecodingError:
        fault = failure.garbled()
    except httpx2.HTTPError:
        fault = failure.NETWORK
    if answer.finished:
        return None
    raise ModelError(fault)
