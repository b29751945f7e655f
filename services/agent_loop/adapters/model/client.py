"""The model server behind `ModelPort`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from types import TracebackType
from typing import Any, Final, Literal, Self, cast

import httpx2
import msgspec
import openai

from services.agent_loop.adapters.model import failure
from services.agent_loop.adapters.model.answer import Answer
from services.agent_loop.domain.model import ModelError, ModelRequest, Piece

# After the finish reason only usage and the end can come; a server that keeps the
# connection open instead is not waited for.
_AFTER_FINISH_SECONDS: Final = 5.0
# A response read to its end leaves its connection for the next call.
_DRAIN_SECONDS: Final = 0.1

_LIMITS: Final = httpx2.Limits(max_connections=1000, max_keepalive_connections=100, keepalive_expiry=60.0)

OutputTokensField = Literal["max_completion_tokens", "max_tokens"]


class OpenAiModel:
    """A client of one model server, with its own pool of connections.

    Requests go out through the openai client (its credential headers, proxies
    and base URL), as bytes: its typed parameters cost 24 ms for a history of 120
    messages, this way 0.3. It makes no retries. Use as an async context manager.
    """

    def __init__(
        self,
        *,
        base_url: str,
        api_key: str,
        output_tokens_field: OutputTokensField = "max_completion_tokens",
        now: Callable[[], float] = time.time,
    ) -> None:
        self._api_key = api_key
        self._output_tokens_field = output_tokens_field
        self._now = now
        self._client = openai.AsyncOpenAI(
            base_url=base_url,
            # The client insists on a key; servers without one ignore it.
            api_key=api_key or "none",
            max_retries=0,
            timeout=None,
            http_client=httpx2.AsyncClient(limits=_LIMITS, timeout=None, follow_redirects=True),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        await self._client.close()

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Piece, None]:
        deadline = asyncio.get_running_loop().time() + request.deadline_seconds
        response = await self._open(request)
        answer = Answer()
        try:
            async with aclosing(response.aiter_bytes()) as chunks:
                while not answer.done and (data := await _read(chunks, answer, request, deadline)) is not None:
                    for piece in answer.feed(data):
                        yield piece
                for piece in answer.end():
                    yield piece
                await _drain(chunks)
        finally:
            await response.aclose()

    async def _open(self, request: ModelRequest) -> httpx2.Response:
        """Send the request and return the response once its headers are there."""
        try:
            async with asyncio.timeout(min(request.headers_timeout_seconds, request.deadline_seconds)):
                # Asked for a raw response, the client gives one, whatever its overloads say.
                response: Any = await self._client.post(
                    "/chat/completions",
                    cast_to=httpx2.Response,
                    content=msgspec.json.encode(self._body(request)),
                    options={"headers": {"Content-Type": "application/json", "Accept": "text/event-stream"}},
                    stream=True,
                    stream_cls=openai.AsyncStream[Any],
                )
                return cast("httpx2.Response", response)
        except TimeoutError:
            if request.deadline_seconds <= request.headers_timeout_seconds:
                raise failure.round_timeout() from None
            raise failure.headers_timeout(request.headers_timeout_seconds) from None
        except openai.APIStatusError as error:
            raise self._refused(error) from None
        except openai.APIConnectionError:
            raise failure.network() from None

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
        return body

    def _refused(self, error: openai.APIStatusError) -> ModelError:
        body = error.body
        detail = body.get("message") if isinstance(body, dict) else None
        detail = detail if isinstance(detail, str) else ""
        if self._api_key:
            detail = detail.replace(self._api_key, "***")
        return failure.http_status(
            error.status_code,
            detail=detail,
            retry_after_seconds=failure.retry_after_seconds(error.response.headers, now=self._now()),
        )


async def _read(chunks: AsyncIterator[bytes], answer: Answer, request: ModelRequest, deadline: float) -> bytes | None:
    """Return the next bytes, or None at the end.

    Once the answer is finished, no fault of the connection can harm it.
    """
    patience = _AFTER_FINISH_SECONDS if answer.finished else request.idle_timeout_seconds
    silent_at = asyncio.get_running_loop().time() + patience
    try:
        async with asyncio.timeout_at(min(silent_at, deadline)):
            return await anext(chunks, None)
    except TimeoutError:
        fault = failure.round_timeout() if deadline <= silent_at else failure.idle_timeout(patience)
    except httpx2.RemoteProtocolError:
        fault = failure.truncated()
    except httpx2.DecodingError:
        fault = failure.garbled()
    except httpx2.HTTPError:
        fault = failure.network()
    if answer.finished:
        return None
    raise fault


async def _drain(chunks: AsyncIterator[bytes]) -> None:
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            async for _ in chunks:
                pass
    except (TimeoutError, httpx2.HTTPError):
        return  # The connection is closed instead of used again.
