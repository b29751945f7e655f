"""A suite with two replicas of each service, receivers of its notifications, and checks of its ledger."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import asyncpg

from pawl.client import AsyncClient
from pawl.event.v1 import event_pb2
from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite
from pawl.notify.v1 import notify_pb2
from tests.chaos import checkers
from tests.chaos.history import History
from tests.chaos.world import Record
from tests.keys import LOCAL_KEY
from tests.mail_server import Postbox, mail_server
from tests.poll import until
from tests.simulation.checkers import ENDED, LEDGER_CHECKERS
from tests.simulation.record import run_state
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


_CHECKERS: Final = (
    checkers.runs_do_not_fail,
    checkers.terminal_states_are_final,
    checkers.logs_have_no_gaps,
    checkers.earlier_owners_stop_writing,
    *LEDGER_CHECKERS,
)
# Checkers of things that happen a little later.
_IN_TIME: Final = (checkers.runs_end, checkers.every_run_end_is_notified, checkers.job_ends_are_reported)


async def check_ledger(pawl: AsyncClient) -> None:
    """Check the client's store after its runs have ended and their ends were reported."""
    record = await _read(pawl)

    async def is_quiet() -> bool:
        nonlocal record
        return not list(_wrong(await _read(pawl), _IN_TIME))

    with suppress(TimeoutError):
        await until(is_quiet)
    assert list(_wrong(record, _IN_TIME)) == []
    assert list(_wrong(record, _CHECKERS)) == []


def _wrong(record: Record, wanted: tuple[checkers.Checker, ...]) -> Iterator[str]:
    return (f"{checker.__name__}: {found}" for checker in wanted for found in checker(record))


async def _read(pawl: AsyncClient) -> Record:
    record = Record(history=History())
    record.runs = {run.run_id: run async for run in pawl.runs()}
    for run in record.runs.values():
        record.calls |= {call.call_id: call async for call in pawl.calls(run.run_id)}
        record.messages[run.conversation_id] = [message async for message in pawl.messages(run.conversation_id)]
        if run_state(run.state) in ENDED:
            record.logs[run.run_id] = [
                each async for each in pawl.watch(run.run_id) if isinstance(each, event_pb2.RunEvent)
            ]
    request = notify_pb2.ListNotificationsRequest()
    pages = [page async for page in pawl.pages(pawl.notifier.ListNotifications, request)]
    record.notifications["", ""] = [reported for page in pages for reported in page.notifications]
    return record
