"""A suite with user keys in two stores, two replicas of each service, and one address for its gateways."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx2
from playwright.async_api import Browser, Page

from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite


@asynccontextmanager
async def front(addresses: Sequence[str]) -> AsyncIterator[str]:
    turn = 0

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        nonlocal turn
        turn += 1
        for replica in range(len(addresses)):
            host, _, port = addresses[(turn + replica) % len(addresses)].rpartition(":")
            with suppress(OSError):
                return await asyncio.open_connection(host, int(port))
        raise ConnectionRefusedError("no gateway is available")

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await connect()
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while content := await reader.read(64 * 1024):
            writer.write(content)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


SERVICES = ("gateway", "agent-loop", "job-store", "tool-registry", "notifier")
STORES = ("acme", "other")
ROLES = {"ann": ["member"], "bob": ["approver"], "vic": ["viewer"], "eve": ["admin"]}


def key_of(store: str, user: str) -> str:
    return f"key-of-{user}-in-{store}-0123456789"


@dataclass(frozen=True)
class World:
    suite: Suite
    url: str
    browser: Browser

    async def enter(self, store: str, user: str, path: str = "/") -> Page:
        context = await self.browser.new_context(base_url=self.url)
        context.set_default_timeout(60_000)
        login = {"key": key_of(store, user)}
        answer = await context.request.post("/login", data=login, headers={"origin": self.url})
        assert answer.ok, await answer.text()
        page = await context.new_page()
        await page.goto(path)
        return page

    def program(self, store: str, user: str) -> httpx2.AsyncClient:
        headers = {"authorization": f"Bearer {key_of(store, user)}"}
        return httpx2.AsyncClient(base_url=self.url, headers=headers, timeout=60.0)

    async def kill(self, replica: int, *services: str) -> None:
        await self.whole(services)
        for service in services:
            self.suite.kill(service, replica)

    async def whole(self, services: Sequence[str] = SERVICES) -> None:
        for service in services:
            for each in (0, 1):
                await self.suite.wait_ready(service, each)


@asynccontextmanager
async def running(browser: Browser) -> AsyncIterator[World]:
    with tempfile.TemporaryDirectory(prefix="pawl-two-of-each-") as folder:
        keys = Path(folder) / "keys.json"
        entries = [
            {"key": key_of(store, user), "user_id": user, "store_id": store, "roles": roles}
            for store in STORES
            for user, roles in ROLES.items()
        ]
        keys.write_text(json.dumps(entries))
        options = SuiteOptions(
            data=Path(folder) / "data",
            replicas=dict.fromkeys(SERVICES, 2),
            environment={"PAWL_API_KEYS_FILE": str(keys)},
        )
        async with Suite(options) as suite:
            gateways = [replica.http for replica in suite.endpoints.services["gateway"]]
            async with front(gateways) as url:
                yield World(suite, url, browser)
