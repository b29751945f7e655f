from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from types import TracebackType
from typing import Any, Final, Literal, Self, cast

import aiohttp
import httpx2
import msgspec
import openai
from aiohttp.http_exceptions import HttpProcessingError

from pawl.agent_loop.model import failure
from pawl.agent_loop.model.answer import Answer
from pawl.agent_loop.model.request import ModelError, ModelRequest, Piece, Sent

PATH: Final = "/chat/completions"
HEADERS: Final = {
    "Content-Type": "application/json",
    "Accept": "text/event-stream",
    # Events are small, and compression delays them.
    "Accept-Encoding": "identity",
}
# After the finish reason, only the usage and the end can follow. Do not wait any longer for a server that keeps the
# connection open.
_AFTER_FINISH_SECONDS: Final = 5.0
# Read a response to its end, so that its connection can be reused.
_DRAIN_SECONDS: Final = 0.1

CONNECTIONS_MAX: Final = 1000
_ERROR_BYTES_MAX: Final = 1024 * 1024
_IDLE_SECONDS: Final = 60.0

# Errors raised when reading a broken response; the last one occurs only without aiohttp's C extension.
_BROKEN: Final = (httpx2.HTTPError, aiohttp.ClientError, HttpProcessingError)

OutputTokensField = Literal["max_completion_tokens", "max_tokens"]


def body_of(
    request: ModelRequest,
    output_tokens_field: OutputTokensField = "max_completion_tokens",
    *,
    format_with_tools: bool = True,
) -> bytes:
    """Return the body of the HTTP request. The same arguments always result in the same bytes."""
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
        body[output_tokens_field] = request.output_tokens_max
    if request.response_format is not None and (format_with_tools or not request.tools):
        body["response_format"] = request.response_format
    if request.reasoning_effort is not None:
        body["reasoning_effort"] = request.reasoning_effort
    return msgspec.json.encode(body)


class OpenAiModel:
    """A client for one model server, with its own connection pool. An async context manager.

    The openai client makes the calls, over aiohttp, and does not retry them. Bodies are bytes, for speed. With the
    openai client's typed parameters, a history of 120 messages takes 24 ms instead of 0.3 ms. The client's parser takes
    ten times as much CPU time for the chunks.
    """

    def __init__(
        self,
        *,
        base_url: str,
        api_key: str,
        body: Callable[[ModelRequest], bytes] = body_of,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._api_key = api_key
        self._body = body
        self._now = now
        url = httpx2.URL(base_url)
        auth = httpx2.BasicAuth(url.username, url.password) if url.userinfo else None
        limits = httpx2.Limits(max_connections=CONNECTIONS_MAX, keepalive_expiry=_IDLE_SECONDS)
        self._client = openai.AsyncOpenAI(
            # aiohttp refuses a URL with credentials if there is also an Authorization header.
            base_url=url.copy_with(userinfo=b""),
            # The client requires a key; servers that do not use keys ignore it.
            api_key=api_key or "none",
            max_retries=0,
            timeout=None,
            http_client=openai.DefaultAioHttpClient(
                limits=limits, timeout=None, follow_redirects=True, auth=auth, event_hooks={"response": [self._check]}
            ),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        await self._client.close()

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Piece, None]:
        deadline = asyncio.get_running_loop().time() + request.deadline_seconds
        answer, response = Answer(), None
        try:
            sent = self._body(request)
            response = await self._open(sent, request)
            yield Sent(request_sha256=hashlib.sha256(sent).hexdigest(), output_tokens_max=request.output_tokens_max)
            body = response.aiter_bytes()
            while not answer.done and (data := await _read(body, answer, request, deadline)) is not None:
                for piece in answer.feed(data):
                    yield piece
            for piece in answer.end():
                yield piece
            await _drain(body)
        except ModelError as error:
            problem = error.problem
            message = self._without_key(problem.message)
            raise ModelError(msgspec.structs.replace(problem, message=message)) from None
        finally:
            if response is not None:
                await response.aclose()

    def _without_key(self, text: str) -> str:
        return text.replace(self._api_key, "***") if self._api_key else text

    async def _open(self, body: bytes, request: ModelRequest) -> httpx2.Response:
        """Send the request. Return the response once its headers have arrived."""
        try:
            async with asyncio.timeout(min(request.headers_timeout_seconds, request.deadline_seconds)):
                return await self._post(body)
        except TimeoutError:
            if request.deadline_seconds <= request.headers_timeout_seconds:
                raise ModelError(failure.ROUND_TIMEOUT) from None
            raise ModelError(failure.headers_timeout(request.headers_timeout_seconds)) from None
        except (openai.APIConnectionError, aiohttp.ClientError, ValueError):
            # The openai client does not wrap all errors of aiohttp, nor a ValueError for a key with a line break.
            raise ModelError(failure.NETWORK) from None

    async def _post(self, body: bytes) -> httpx2.Response:
        # The client can return a raw response, despite its type annotations.
        response: Any = await self._client.post(
            PATH,
            cast_to=httpx2.Response,
            content=body,
            options={"headers": HEADERS},
            stream=True,
            stream_cls=openai.AsyncStream[Any],
        )
        return cast("httpx2.Response", response)

    async def _check(self, response: httpx2.Response) -> None:
        """Raise a ModelError for a response that is neither a success nor a redirect.

        The openai client would read its whole body, however large.
        """
        if response.has_redirect_location:
            # The client would read its whole body too.
            await cast("httpx2.AsyncByteStream", response.stream).aclose()
            response.stream = httpx2.ByteStream(b"")
            return
        if response.is_success:
            return
        text = self._without_key(await _error_text(response))
        retry_after_seconds = failure.retry_after_seconds(response.headers, now=self._now())
        raise ModelError(
            failure.http_status(
                response.status_code, error=failure.error_of(text), retry_after_seconds=retry_after_seconds
            )
        )


async def _error_text(response: httpx2.Response) -> str:
    """Return the text of an error response, which may be truncated. It is empty if the response cannot be decoded."""
    body = bytearray()
    try:
        async for data in response.aiter_bytes():
            body += data
            if len(body) >= _ERROR_BYTES_MAX:
                break
    except httpx2.DecodingError:
        return ""
    except _BROKEN:
        pass
    try:
        return body.decode(response.encoding or "utf-8", errors="replace")
    except (LookupError, ValueError):
        return ""


async def _read(body: AsyncIterator[bytes], answer: Answer, request: ModelRequest, deadline: float) -> bytes | None:
    """Return the next bytes, or None at the end.

    Once the answer is finished, an error or timeout counts as the end.
    """
    timeout_seconds = _AFTER_FINISH_SECONDS if answer.finished else request.idle_timeout_seconds
    silent_at = asyncio.get_running_loop().time() + timeout_seconds
    try:
        async with asyncio.timeout_at(min(silent_at, deadline)):
            return await anext(body, None)
    except TimeoutError:
        fault = failure.ROUND_TIMEOUT if deadline <= silent_at else failure.idle_timeout(timeout_seconds)
    except httpx2.DecodingError:
        fault = failure.garbled()
    except _BROKEN:
        fault = failure.TRUNCATED
    if answer.finished:
        return None
    raise ModelError(fault)


async def _drain(body: AsyncIterator[bytes]) -> None:
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            async for _ in body:
                pass
    except (TimeoutError, *_BROKEN):
        return  # The connection is closed instead of reused.
