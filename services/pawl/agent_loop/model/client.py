"""Implements the client for the model server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Any, Final, Literal, Self, cast

import httpx2
import msgspec
import openai

from pawl.agent_loop.model import failure
from pawl.agent_loop.model.answer import Answer
from pawl.agent_loop.model.direct import HEADERS, PATH, Direct, RefusedError
from pawl.agent_loop.model.request import ModelError, ModelRequest, Piece
from pawl.agent_loop.model.response import HttpxResponse, Response

# After the finish reason, only the usage and the end can follow. Do not wait any longer for a server that keeps the
# connection open.
_AFTER_FINISH_SECONDS: Final = 5.0
# Read a response to its end, so that its connection can be reused.
_DRAIN_SECONDS: Final = 0.1

_LIMITS: Final = httpx2.Limits(max_connections=1000, max_keepalive_connections=100, keepalive_expiry=60.0)

OutputTokensField = Literal["max_completion_tokens", "max_tokens"]


class OpenAiModel:
    """Client for one model server, with its own connection pool.

    The openai client supplies the configuration: credential headers, proxies and base URL. Most calls only use the
    request head that it creates; see `Direct`. Bodies are bytes, because with the client's typed parameters, a history
    of 120 messages takes 24 ms instead of 0.3 ms. This class does not retry. Use it as an async context manager.
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
        self._api_key = api_key
        self._output_tokens_field = output_tokens_field
        self._format_with_tools = format_with_tools
        self._now = now
        http = httpx2.AsyncClient(limits=_LIMITS, timeout=None, follow_redirects=True)
        self._client = openai.AsyncOpenAI(
            base_url=base_url,
            # The client requires a key; servers that do not use keys ignore it.
            api_key=api_key or "none",
            max_retries=0,
            timeout=None,
            http_client=http,
        )
        self._direct = Direct(self._client, http)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        await self._direct.close()
        await self._client.close()

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Piece, None]:
        deadline = asyncio.get_running_loop().time() + request.deadline_seconds
        answer, response = Answer(), None
        try:
            response = await self._open(request)
            while not answer.done and (data := await _read(response, answer, request, deadline)) is not None:
                for piece in answer.feed(data):
                    yield piece
            for piece in answer.end():
                yield piece
            await _drain(response)
        except ModelError as error:
            problem = error.problem
            message = self._without_key(problem.message)
            raise ModelError(msgspec.structs.replace(problem, message=message)) from None
        finally:
            if response is not None:
                await response.close()

    def _without_key(self, text: str) -> str:
        return text.replace(self._api_key, "***") if self._api_key else text

    async def _open(self, request: ModelRequest) -> Response:
        """Send the request. Return the response once its headers have arrived."""
        body = msgspec.json.encode(self._body(request))
        try:
            async with asyncio.timeout(min(request.headers_timeout_seconds, request.deadline_seconds)):
                return await self._direct.post(body) or HttpxResponse(await self._post(body))
        except TimeoutError:
            if request.deadline_seconds <= request.headers_timeout_seconds:
                raise ModelError(failure.ROUND_TIMEOUT) from None
            raise ModelError(failure.headers_timeout(request.headers_timeout_seconds)) from None
        except RefusedError as error:
            raise self._refused(error.response) from None
        except openai.APIStatusError as error:
            raise self._refused(error.response) from None
        except openai.APIConnectionError:
            raise ModelError(failure.NETWORK) from None

    async def _post(self, body: bytes) -> httpx2.Response:
        # When asked for a raw response, the client returns one, despite what its overloads say.
        response: Any = await self._client.post(
            PATH,
            cast_to=httpx2.Response,
            content=body,
            options={"headers": HEADERS},
            stream=True,
            stream_cls=openai.AsyncStream[Any],
        )
        return cast("httpx2.Response", response)

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

    def _refused(self, response: httpx2.Response) -> ModelError:
        problem = failure.http_status(
            response.status_code,
            error=failure.error_of(self._without_key(response.text)),
            retry_after_seconds=failure.retry_after_seconds(response.headers, now=self._now()),
        )
        return ModelError(problem)


async def _read(response: Response, answer: Answer, request: ModelRequest, deadline: float) -> bytes | None:
    """Return the next bytes, or None at the end.

    Once the answer is finished, an error or timeout counts as the end.
    """
    timeout_seconds = _AFTER_FINISH_SECONDS if answer.finished else request.idle_timeout_seconds
    silent_at = asyncio.get_running_loop().time() + timeout_seconds
    try:
        return await response.read(until=min(silent_at, deadline))
    except TimeoutError:
        fault = ModelError(failure.ROUND_TIMEOUT if deadline <= silent_at else failure.idle_timeout(timeout_seconds))
    except ModelError as error:
        fault = error
    if answer.finished:
        return None
    raise fault


async def _drain(response: Response) -> None:
    until = asyncio.get_running_loop().time() + _DRAIN_SECONDS
    try:
        while await response.read(until=until) is not None:
            pass
    except (TimeoutError, ModelError):
        return  # The connection is closed instead of reused.
