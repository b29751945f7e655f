"""The plans of all statements of the job-store, as they are made before the tables have statistics, and kept."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from pawl.chassis.database import Database
from pawl.job_store import adapters
from tests.databases import ServiceDatabase, planned

_TABLES = ("runs", "calls", "commands", "events", "conversations", "messages")
_STATEMENT = re.compile(rf"\s*(WITH|SELECT|UPDATE|DELETE)\b.*\bjob_store\.({'|'.join(_TABLES)})\b", re.DOTALL)
# These have few rows of a store: what a worker has now, and, in order, what waits for somebody.
_FEW = {"runs_active", "runs_attention", "calls_to_approve", "runs_short_of_tokens", "conversations_shared"}
# These are for all of a store, or of all stores: what operators and metrics ask for, and what a sweep looks after.
_OF_ALL = (
    "run_lists.LISTS.running_jobs_of_store.",
    "erasures._LOG_AGAIN",
    "leases._BRING_FORWARD",
    "search_index._DUE",
    "upkeep._NOTICES",
    "upkeep._NOT_COUNTED",
    "upkeep._OPEN_RUNS",
)
# Of a store, by no column that tells its rows apart.
_WHOLE = {"store_id", "user_id", "state"}
_RUNS = """
INSERT INTO job_store.runs (
    store_id, run_id, conversation_id, user_id, state, waits, epoch, crashes, last_seq, command_count, round,
    active_seconds, token_budget, token_ceiling, options, tools, usage, failure, unstopped, output, create_time,
    end_time, parent_run_id, reports_to
)
SELECT 'acme', 'run_' || n, 'conv' || n, 'ann', CASE n % 10 WHEN 0 THEN 3 ELSE 10 END, '', 1, 0, 2, 0, 1, 0, 0, 0, '',
    '', '', '', '', '', now() + n * interval '1 second', now(), CASE n % 5 WHEN 1 THEN 'run_' || n / 50 ELSE '' END,
    CASE n % 5 WHEN 2 THEN 'conv' || n / 50 ELSE '' END
FROM generate_series(1, $1) AS n
"""


@pytest.fixture
def new_database_url(postgres_url: str) -> Iterator[str]:
    """The URL of a database in which nothing has ever been."""
    with ServiceDatabase(postgres_url, "job_store") as database:
        yield database.url


@pytest.mark.parametrize("rows", [0, 20_000], ids=["a new database", "many runs"])
async def test_no_lookup_reads_all_that_a_store_has(new_database_url: str, rows: int) -> None:
    """As long as nobody has counted the rows, an index that begins with the store looks as good as the right one."""
    whole: list[str] = []
    async with Database(new_database_url, application_name="test") as database, database.acquire() as connection:
        await connection.execute(_RUNS, rows)
        for name, statement in _statements():
            for node in await planned(connection, statement):
                columns = {*re.findall(r"\(?\b(\w+)\)? (?:=|<|>|<=|>=) ", node.get("Index Cond", ""))}
                if (
                    node.get("Index Name", "").startswith(_TABLES)
                    and columns <= _WHOLE
                    and not (columns == {"store_id", "state"} and node["Index Name"] == "runs_open")
                    and node["Index Name"] not in _FEW
                    and not name.startswith(_OF_ALL)
                ):
                    whole.append(f"{name}: {node['Index Name']} by {node.get('Index Cond')}")
    assert not whole, "\n".join(whole)


def _statements() -> Iterator[tuple[str, str]]:
    """Return the constants of the adapters that are whole statements, and their names."""
    for module in pkgutil.iter_modules(adapters.__path__):
        constants = vars(importlib.import_module(f"{adapters.__name__}.{module.name}"))
        for name, value in constants.items():
            yield from _within(f"{module.name}.{name}", value)


def _within(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        if _STATEMENT.match(value) and not value.endswith(("= ", "AS ")):
            yield name, value
    elif isinstance(value, Mapping) and not name.endswith("__"):
        for key, each in value.items():
            yield from _within(f"{name}.{key}", each)
    elif isinstance(value, tuple):
        for number, each in enumerate(value):
            yield from _within(f"{name}.{number}", each)
