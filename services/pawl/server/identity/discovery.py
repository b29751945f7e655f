"""Fetches the metadata of identity providers. This module does not import cryptography, which takes 8 MB of memory."""

from __future__ import annotations

import ssl
from typing import Annotated, Final, TypeVar

import httpx2
import msgspec

from pawl.chassis.process.address import is_safe_url

_WELL_KNOWN: Final = "/.well-known/openid-configuration"
_METADATA_BYTES_MAX: Final = 512 * 1024


class FetchFailed(Exception):
    """Raised when a response is an error, too large or not trusted."""


class Description(msgspec.Struct, frozen=True):
    """The part of an issuer's metadata (OpenID Connect Discovery 1.0, section 4) that token checks need."""

    issuer: str
    jwks_uri: Annotated[str, msgspec.Meta(max_length=1024)]


D = TypeVar("D", bound=Description)


def open_client(tls: ssl.SSLContext) -> httpx2.AsyncClient:
    # Plain http is only for this machine, so an environment proxy must not answer instead.
    here = {"http://": None}
    return httpx2.AsyncClient(verify=tls, headers={"accept-encoding": "identity"}, mounts=here)


async def describe(client: httpx2.AsyncClient, issuer: str, kind: type[D]) -> D:
    """Return an issuer's metadata.

    Raises:
        FetchFailed: The response is an error or cannot be trusted.
        httpx2.HTTPError, httpx2.InvalidURL, msgspec.MsgspecError: The request or decoding failed.
    """
    url = issuer.removesuffix("/") + _WELL_KNOWN
    found = msgspec.json.decode(await get(client, url, _METADATA_BYTES_MAX), type=kind)
    if found.issuer != issuer:
        raise FetchFailed("it describes another issuer")
    is_downgrade = issuer.startswith("https:") and not found.jwks_uri.startswith("https:")
    if is_downgrade or not is_safe_url(found.jwks_uri):
        raise FetchFailed("its keys are not at an https:// URL")
    return found


async def get(client: httpx2.AsyncClient, url: str, bytes_max: int) -> bytes:
    """Return the body of a successful response. Otherwise, raise FetchFailed."""
    async with client.stream("GET", url) as response:
        if response.status_code != httpx2.codes.OK:
            raise FetchFailed(f"status {response.status_code} from {url}")
        return await read_at_most(response, bytes_max)


async def read_at_most(response: httpx2.Response, bytes_max: int) -> bytes:
    """Return a response's body.

    Raises:
        FetchFailed: The body has more than `bytes_max` bytes.
    """
    content = bytearray()
    async for part in response.aiter_raw():
        content += part
        if len(content) > bytes_max:
            raise FetchFailed(f"more than {bytes_max} bytes from {response.url}")
    return bytes(content)
