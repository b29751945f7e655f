"""Calls the model server without the openai client and httpx2.

The openai client creates the request head once, and each call appends its body. `python -m bench.model_calls` measures
the savings.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.request import getproxies

import httpx2
import openai

from pawl.agent_loop.model.connection import Connection, Origin, Pool
from pawl.agent_loop.model.request import ModelError
from pawl.agent_loop.model.response import DirectResponse, DirectStream, HttpxResponse, Response

_ERROR_BYTES_MAX: Final = 1024 * 1024
PATH: Final = "/chat/completions"
HEADERS: Final = {
    "Content-Type": "application/json",
    "Accept": "text/event-stream",
    # Events are small, and compression delays them.
    "Accept-Encoding": "identity",
}

_SUCCESS: Final = 2
_REDIRECT: Final = 3
_PORTS: Final = {"http": 80, "https": 443}
# Valid characters in a header line. A line feed in a key would start another line.
_LINE: Final = re.compile(rb"[^\x00-\x08\x0a-\x1f\x7f]+")


class RefusedError(Exception):
    """Raised when the server has answered with an error status."""

    def __init__(self, response: httpx2.Response) -> None:
        self.response = response
        super().__init__(response.status_code)


class _Sample(httpx2.AsyncBaseTransport):
    """Captures a request instead of sending it."""

    request: httpx2.Request

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.request = request
        return httpx2.Response(200)


class Direct:
    """Makes calls with a request head captured from the client.

    The openai client itself makes calls through a proxy, calls with an unusual address or header, and all calls after a
    redirect. `http` is the client's transport, whose cookies are kept up to date.
    """

    def __init__(self, client: openai.AsyncOpenAI, http: httpx2.AsyncClient) -> None:
        self._client = client
        self._http = http
        self._request: httpx2.Request | None = None
        self._head = b""
        self._pool: Pool | None = None
        self._redirected = False

    async def post(self, body: bytes) -> Response | None:
        """Send `body`. Return the response once its head has arrived, or None if the client must make the call.

        Raises:
            RefusedError: the server answered with an error status.
            ModelError: NETWORK
        """
        if self._request is None:
            self._request = await self._learn()
        if self._pool is None or not self._head or self._redirected:
            return None
        connection = await self._pool.take()
        try:
            await connection.send(b"%s%d\r\n\r\n%s" % (self._head, len(body), body))
            if b"set-cookie" in connection.fields:
                self._keep_cookies(self._request, connection)
            if connection.status // 100 == _SUCCESS:
                return self._success(connection, self._pool)
            if connection.status // 100 != _REDIRECT:
                raise RefusedError(await _error(connection))
            self._redirected = True
        except BaseException:
            self._pool.give(connection)
            raise
        self._pool.give(connection)
        return None

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()

    async def _learn(self) -> httpx2.Request:
        sample = _Sample()
        async with httpx2.AsyncClient(transport=sample, cookies=self._http.cookies) as http:
            client = self._client.with_options(http_client=http)
            await client.post(PATH, cast_to=httpx2.Response, content=b"{}", options={"headers": HEADERS})
        request = sample.request
        headers = [(name, value) for name, value in request.headers.raw if name.lower() != b"content-length"]
        lines = [b"POST %s HTTP/1.1" % request.url.raw_path, *(b"%s: %s" % header for header in headers)]
        plain = request.url.scheme in _PORTS and all(map(_LINE.fullmatch, lines))
        self._head = b""
        if plain and not _has_proxy(request.url):
            self._head = b"\r\n".join([*lines, b"Content-Length: "])
            self._pool = self._pool or Pool(_origin(request.url))
        return request

    def _success(self, connection: Connection, pool: Pool) -> Response:
        if connection.fields.get(b"content-encoding", b"identity").lower() == b"identity":
            return DirectResponse(connection, pool)
        stream = DirectStream(connection, pool)
        return HttpxResponse(httpx2.Response(connection.status, headers=connection.headers, stream=stream))

    def _keep_cookies(self, request: httpx2.Request, connection: Connection) -> None:
        """Pass cookies to the client, so that its next request head contains them."""
        response = httpx2.Response(connection.status, headers=connection.headers, request=request)
        self._http.cookies.extract_cookies(response)
        self._request = None


async def _error(connection: Connection) -> httpx2.Response:
    body = bytearray()
    try:
        while len(body) < _ERROR_BYTES_MAX and (data := await connection.read()) is not None:
            body += data
        return httpx2.Response(connection.status, headers=connection.headers, content=bytes(body))
    except (ModelError, httpx2.DecodingError):
        headers = [header for header in connection.headers if header[0].lower() != b"content-encoding"]
        return httpx2.Response(connection.status, headers=headers)


def _has_proxy(url: httpx2.URL) -> bool:
    """Return whether the client may use a proxy. NO_PROXY counts only if it names exactly this host, or all hosts."""
    proxies = getproxies()
    direct = {host.strip() for host in proxies.get("no", "").split(",")}
    return bool((proxies.get(url.scheme) or proxies.get("all")) and not direct & {url.host, "*"})


def _origin(url: httpx2.URL) -> Origin:
    tls = None
    if url.scheme == "https":
        tls = httpx2.create_ssl_context()
        tls.set_alpn_protocols(["http/1.1"])
    return Origin(host=url.raw_host.decode("ascii"), port=url.port or _PORTS[url.scheme], tls=tls)
