"""A real, certified identity provider from npm: oidc-provider."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
from joserfc import jwk

from tests import npm
from tests.poll import until

_PACKAGE = "oidc-provider@9.13.3"
_INSTALL_SECONDS_MAX = 150
_PROGRAM = """
import Provider from 'oidc-provider';
const { ISSUER, KEYS, CLIENTS, TOKEN_SECONDS } = process.env;
const provider = new Provider(ISSUER, {
  jwks: JSON.parse(KEYS),
  clients: JSON.parse(CLIENTS),
  // Whoever logs in, by whatever password, is taken for whom they say.
  features: {
    clientCredentials: { enabled: true },
    devInteractions: { enabled: true },
    resourceIndicators: {
      enabled: true,
      defaultResource: () => 'https://pawl.example.com',
      useGrantedResource: () => true,
      getResourceServerInfo: (ctx) => ({
        scope: '', audience: ctx.get('x-audience') || 'pawl', accessTokenFormat: 'jwt',
        accessTokenTTL: Number(TOKEN_SECONDS), jwt: { sign: { alg: 'ES256' } },
      }),
    },
  },
  extraTokenClaims: () => ({ tenant: 'acme', groups: ['leads'] }),
});
provider.listen(Number(new URL(ISSUER).port), '127.0.0.1');
"""


def install(folder: Path) -> Path:
    """Install the provider and return its folder; skip the test if npm cannot reach a registry."""
    npm.add(folder, _PACKAGE, timeout_seconds=_INSTALL_SECONDS_MAX)
    (folder / "provider.mjs").write_text(_PROGRAM)
    return folder


@asynccontextmanager
async def provider(
    modules: Path, issuer: str, clients: Sequence[dict[str, Any]], *private: jwk.Key, token_seconds: int = 60
) -> AsyncIterator[None]:
    """Run the provider for these clients. It signs tokens with the first key."""
    keys = [{**each.as_dict(private=True), "use": "sig", "alg": "ES256"} for each in private]
    choices = {"KEYS": json.dumps({"keys": keys}), "CLIENTS": json.dumps(clients), "TOKEN_SECONDS": str(token_seconds)}
    process = await asyncio.create_subprocess_exec(
        npm.NODE,
        "provider.mjs",
        cwd=modules,
        env=os.environ | choices | {"ISSUER": issuer},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        await until(lambda: _listens(issuer, process))
        yield
    finally:
        process.kill()
        await process.wait()


async def _listens(issuer: str, process: asyncio.subprocess.Process) -> bool:
    assert process.returncode is None
    async with httpx2.AsyncClient(trust_env=False) as client:
        try:
            return (await client.get(f"{issuer}/.well-known/openid-configuration")).is_success
        except httpx2.TransportError:
            return False
