"""Clients that connect to a suite with TLS: the command line, a worker and a metrics scraper."""

from __future__ import annotations

import asyncio
import os
import ssl
from urllib.request import urlopen

import pytest

from pawl.worker import Worker
from tests import commands
from tests.poll import until
from tests.system.access.conftest import Walked

pytestmark = pytest.mark.asyncio(loop_scope="session")

KEYS = {name: f"key-of-{name}-0123456789" for name in ("member", "worker")}


async def pawl(*arguments: str, keyboard: str = "", **variables: str) -> str:
    """Run a command as a member and return its output. The command must succeed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PAWL_", "OPENAI_"))}
    environment = {**kept, "COLUMNS": "200", "PAWL_API_KEY": KEYS["member"], **variables}
    done = await asyncio.to_thread(lambda: commands.pawl(*arguments, environment=environment, keyboard=keyboard))
    assert (done.code, done.errors) == (0, "")
    return done.output


async def test_worker_and_metrics_scraper_use_tls(walked: Walked, monkeypatch: pytest.MonkeyPatch) -> None:
    (address,) = walked.suite.endpoints.addresses("tool-registry")
    authority = walked.folder / "tool-registry-authority.pem"
    monkeypatch.setenv("PAWL_TLS_CA_FILE", str(authority))
    for number, given in enumerate((None, authority)):
        worker = Worker(address, name=f"billing-{number}", api_key=KEYS["worker"], authority=given)

        async def pay() -> str:
            """Pay."""
            return "paid"

        pay.__name__ = f"pay_{number}"
        worker.tool(category="SAFE")(pay)
        running = asyncio.create_task(worker.run())

        async def is_there(name: str = pay.__name__) -> bool:
            return f"{name}\t" in await pawl("tools", PAWL_DATA=str(walked.suite.folder.path))

        await until(is_there)
        worker.drain()
        await running
        monkeypatch.delenv("PAWL_TLS_CA_FILE", raising=False)
    for name, (replica, *_) in walked.suite.endpoints.services.items():
        trusting = ssl.create_default_context(cafile=walked.folder / f"{name}-authority.pem")

        def get(path: str, address: str = replica.metrics, context: ssl.SSLContext = trusting) -> bytes:
            with urlopen(f"https://{address}{path}", context=context, timeout=60) as response:  # a URL of the suite
                body: bytes = response.read()
                return body

        assert b'"serving":true' in await asyncio.to_thread(get, "/healthz"), name
        assert b"rpc_requests_total" in await asyncio.to_thread(get, "/metrics"), name
