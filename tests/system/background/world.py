"""A suite with two replicas of each service, and receivers of its notifications."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import asyncpg

from pawl.client import AsyncClient
from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite
from tests.keys import LOCAL_KEY
from tests.mail_server import Postbox, mail_server
from tests.web_server import Reply, WebServer, web_server

SERVICES: Final = ("agent-loop", "job-store", "tool-registry", "notifier")
REPLICAS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    suite: Suite
    # Receives webhooks.
    receiver: WebServer
    # Receives mails.
    postbox: Postbox
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def client(self, store: str = "") -> AsyncClient:
        replicas = self.suite.endpoints.services
        elsewhere = {
            f"PAWL_{name}_ADDRESS": ",".join(each.grpc for each in replicas[name.lower().replace("_", "-")])
            for name in ("TOOL_REGISTRY", "NOTIFIER")
        }
        return AsyncClient(
            [each.grpc for each in replicas["agent-loop"]],
            api_key=LOCAL_KEY,
            store=store or f"story-{next(self.numbers)}",
            retry_seconds=240.0,
            environment=elsewhere,
        )

    async def database(self, statement: str, *arguments: Any) -> list[asyncpg.Record]:
        connection = await asyncpg.connect(self.suite.database_url)
        try:
            return list(await connection.fetch(statement, *arguments))
        finally:
            await connection.close()

    async def kill(self, service: str) -> None:
        for index in range(REPLICAS):
            self.suite.kill(service, index)
        # Stopped too, because the launcher would delay each restart more and more.
        await self.deploy(service)

    async def deploy(self, service: str) -> None:
        await asyncio.gather(*(self.suite.stop_process(service, index) for index in range(REPLICAS)))
        await asyncio.gather(*(self.suite.start_process(service, index) for index in range(REPLICAS)))

    async def roll(self, service: str) -> None:
        """Stop one replica of a service gracefully and start it again, while the other replica works."""
        await self.suite.stop_process(service, 0)
        await self.suite.start_process(service, 0)


@asynccontextmanager
async def running(
    folder: Path, *, reach: Sequence[int] = (), files: Mapping[str, object] | None = None, **choices: Any
) -> AsyncIterator[World]:
    """Run a suite with its data in `folder` and these SuiteOptions.

    `reach` lists further local ports that the suite may call. Variables may name `files`, which are written as JSON.
    `folder` must not be in pytest's tmp_path, which PostgreSQL's account cannot read if the tests run as root.
    """
    async with web_server(lambda _: Reply()) as receiver, mail_server() as (postbox, port):
        open_to = {"*": {"private": [f"127.0.0.1:{each}" for each in (receiver.port, *reach)]}}
        environment = {"PAWL_SMTP_URL": f"smtp://127.0.0.1:{port}", "PAWL_MAIL_FROM": "pawl@example.org"}
        for variable, content in {"PAWL_EGRESS_FILE": open_to, **(files or {})}.items():
            file = folder / f"{variable}.json"
            file.write_text(json.dumps(content))
            environment[variable] = str(file)
        options = SuiteOptions(
            data=folder / "data",
            local_key=LOCAL_KEY,
            environment=environment,
            service_environment={"tool-registry": {"PAWL_TOOLS": "tests.system.suite.slow_tools"}},
            **choices,
        )
        async with Suite(options) as suite:
            yield World(suite=suite, receiver=receiver, postbox=postbox)
