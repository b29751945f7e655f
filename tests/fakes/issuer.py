"""A token issuer: it creates keys, publishes them and signs any claims."""

from __future__ import annotations

import asyncio
import base64
import functools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from joserfc import jwk
from joserfc.jws import JWSRegistry

from pawl.server.identity.tokens import Provider, PublicKey, parse_keys, parse_providers

ISSUER: Final = "https://id.example.com"
AUDIENCE: Final = "pawl"
NOW: Final = 1_800_000_000
CLAIMS: Final[dict[str, Any]] = {
    "iss": ISSUER,
    "aud": AUDIENCE,
    "sub": "ann",
    "exp": NOW + 600,
    "iat": NOW,
    "tenant": "acme",
}


def provider(**more: Any) -> Provider:
    """Return a provider as read from an entry of PAWL_OIDC_FILE."""
    base = {"issuer": ISSUER, "audience": AUDIENCE, "store": {"claim": "tenant"}, "user": {"claim": "sub"}}
    [made] = parse_providers(json.dumps([base | more]).encode())
    return made


@functools.cache
def key(kind: str = "EC", form: int | str = "P-256", name: str = "k1") -> jwk.Key:
    """Return a private key, cached by name, kind and form."""
    return jwk.generate_key(kind, form, {"kid": name})  # type: ignore[call-overload,no-any-return]  # of literals


def published(private: jwk.Key, **more: Any) -> dict[str, Any]:
    return {**private.as_dict(private=False), **more}


def keys(*entries: dict[str, Any] | jwk.Key) -> tuple[PublicKey, ...]:
    return parse_keys(key_set(*entries))


def key_set(*entries: dict[str, Any] | jwk.Key) -> bytes:
    return json.dumps({"keys": [each if isinstance(each, dict) else published(each) for each in entries]}).encode()


def part(content: bytes | dict[str, Any]) -> str:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def token(
    claims: bytes | dict[str, Any] | None = None,
    *,
    private: jwk.Key | None = None,
    alg: str = "ES256",
    header: dict[str, Any] | None = None,
    **more: Any,
) -> str:
    """Return a signed token.

    Its claims are `claims` or, by default, CLAIMS updated with `more`. None omits a claim or header.
    """
    private = private or key()
    head = {"alg": alg, "kid": private.kid, "typ": "at+jwt", **(header or {})}
    head = {name: value for name, value in head.items() if value is not None}
    if claims is None:
        claims = {name: value for name, value in (CLAIMS | more).items() if value is not None}
    signed = f"{part(head)}.{part(claims)}"
    return f"{signed}.{part(JWSRegistry.algorithms[alg].sign(signed.encode(), private))}"


DISCOVERY: Final = "/realms/a/.well-known/openid-configuration"
OK: Final = b"HTTP/1.1 200 OK\r\nconnection: close\r\n"


class IssuerServer:
    def __init__(self) -> None:
        self.answers: dict[str, bytes | None] = {}
        self.asked: list[str] = []
        self.url = ""

    @property
    def issuer(self) -> str:
        return f"{self.url}/realms/a"

    def say(self, path: str, body: bytes | dict[str, Any], head: bytes = OK) -> None:
        self.answers[path] = head + b"\r\n" + (body if isinstance(body, bytes) else json.dumps(body).encode())

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).decode().split(" ")[1]
        self.asked.append(path)
        answer = self.answers.get(path, b"HTTP/1.1 404 Not Found\r\nconnection: close\r\n\r\n")
        if answer is None:
            await reader.read()  # until the client cancels
        else:
            writer.write(answer)
        writer.close()


@asynccontextmanager
async def issuer_server() -> AsyncIterator[IssuerServer]:
    made = IssuerServer()
    async with await asyncio.start_server(made.serve, "127.0.0.1", 0) as listening:
        made.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        made.say(DISCOVERY, {"issuer": made.issuer, "jwks_uri": f"{made.url}/keys", "claims_supported": ["sub"]})
        yield made
