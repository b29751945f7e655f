"""Calls the model server without httpx2.

httpx2 creates the request head once, and each call appends its body. `python -m bench.model_calls` measures how much
that saves.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.request import getproxies

import httpx2

from pawl.agent_loop.model.connection import Connection, Origin, Pool
from pawl.agent_loop.model.request import ModelError
from pawl.agent_loop.model.response import DirectResponse, DirectStream, HttpxResponse, Response

_ERROR_BYTES_MAX: Final = 1024 * 1024
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


class Direct:
    """Makes calls with the request head of the client `http`, and keeps the client's cookies up to date.

    The client itself must make calls through a proxy, calls with an unusual address or header, and all calls after a
    redirect.
    """

    def __init__(self, http: httpx2.AsyncClient, url: str) -> None:
        self._http = http
        self._url = url
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
            self._request = self._learn()
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

    def _learn(self) -> httpx2.Request:
        request = self._http.build_request("POST", self._url)
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
