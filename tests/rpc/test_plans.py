"""Query plans of all statements of the services, as prepared before the tables have statistics.

Also what sharding by store needs: keys that contain the store, and statements that name it.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pawl.server.db.database import Database
from tests.databases import ServiceDatabase, planned


@dataclass(frozen=True, kw_only=True)
class Service:
    schema: str
    tables: tuple[str, ...]
    rows: tuple[str, ...]
    # Indexes with only a few rows for each store
    few: frozenset[str]
    # Statements that cover a whole store or all stores, for operators, metrics and sweeps
    of_all: tuple[str, ...]
    # Small tables of the whole deployment, which a sharded database keeps on every node
    reference: frozenset[str] = frozenset()


JOB_STORE = Service(
    schema="job_store",
    tables=("runs", "calls", "commands", "events", "conversations", "messages"),
    rows=(
        """

INSERT INTO job_store.runs (
    store_id, run_id, conversation_id, user_id, state, waits, epoch, crashes, last_seq, command_count, round,
    active_seconds, token_budget, token_ceiling, options, tools, usage, failure, unstopped, output, create_time,
    update_time, state_time, end_time, parent_run_id, reports_to
)
SELECT 'acme', 'run_' || n, 'conv' || n, 'ann', CASE n % 10 WHEN 0 THEN 3 ELSE 10 END, '', 1, 0, 2, 0, 1, 0, 0, 0, '',
    '', '', '', '', '', now() + n * interval '1 second', now(), now(), now(),
    CASE n % 5 WHEN 1 THEN 'run_' || n / 50 ELSE '' END,
    CASE n % 5 WHEN 2 THEN 'conv' || n / 50 ELSE '' END
FROM generate_series(1, $1) AS n
""",
    ),
    # Current work of a worker, due work, and pending items in order.
    few=frozenset(
        {"runs_active", "runs_waiting", "runs_claimable", "runs_attention", "runs_short_of_tokens"}
        | {"calls_pending", "calls_to_approve", "conversations_shared"}
    ),
    of_all=(
        "ledger.store.run_lists.LISTS.running_jobs_of_store.",
        "erasure.store.erasures._LOG_AGAIN",
        "erasure.store.retention._CONVERSATION_AGES",
        "erasure.store.retention._SUMMARY_AGES",
        "ledger.store.leases._BRING_FORWARD",
        "conversations.store.search_index._DUE",
        "ledger.store.upkeep._NOTICES",
        "ledger.store.upkeep._RUNS_BY_STATE",
        "store_settings.store._RUNS_TO_CANCEL",
        "store_settings.store._STORES",
        "store_settings.store._STORES_WITH_OPEN_RUNS",
        "store_settings.store._WAKE",
        "store_settings.store._WITH_NOTICES",
    ),
    reference=frozenset({"clock", "key_changes", "api_keys", "key_events", "settings_changes", "schema_version"}),
)
TOOL_REGISTRY = Service(
    schema="tool_registry",
    tables=("executions", "worker_calls", "checkpoints", "audit", "plan_changes", "rule_uses", "grant_uses"),
    rows=(
        """
INSERT INTO tool_registry.executions
    (store_id, call_id, run_id, tool_name, tool_version, effect, fingerprint, instance_id, token, ended_at, outcome)
SELECT 'acme', 'call' || n, 'run' || n / 5, 't', 1, '', '', 'i', '', now(), 'SUCCEEDED' FROM generate_series(1, $1) AS n
""",
        """
INSERT INTO tool_registry.worker_calls
    (store_id, call_id, group_name, tool_name, definition_hash, purpose, details, attempt, deadline, token, asker_id,
     state, lease_epoch, worker_id, run_id, told_epochs)
SELECT 'acme', 'call' || n, 'group', 't', '', '', '', 1, now(), '', '',
    (ARRAY['WAITING', 'HELD', 'DONE'])[n % 3 + 1], 1, 'worker' || n / 50, 'run' || n / 5, '{}'
FROM generate_series(1, $1) AS n
""",
    ),
    # Pending notifications.
    few=frozenset({"executions_untold"}),
    of_all=(
        "audit.store.audit._BEYOND",
        "audit.store.audit._FIGURES",
        "audit.store.audit._LIST",
        "execution.store.completions._ROW",
        "sources.worker.store.statements.WAITING_GROUPS",
    ),
    reference=frozenset({"instances", "schema_version"}),
)
NOTIFIER = Service(
    schema="notifier",
    tables=("notifications", "webhook_deliveries", "codes_sent", "viewers"),
    rows=(
        """
INSERT INTO notifier.notifications
    (store_id, user_id, number, notification_id, kind, run_id, conversation_id, event_id, title, body, create_time,
     call_id, channel_id)
SELECT 'acme', 'ann', n, 'ntf' || n, '', 'run' || n, 'conv' || n / 5, '', '', '', now(), '', ''
FROM generate_series(1, $1) AS n
""",
        """
INSERT INTO notifier.webhook_deliveries (delivery_id, webhook_id, store_id, user_id, number, type, body)
SELECT 'dlv' || n, 'webhook' || n / 50, 'acme', 'ann', n, '', '' FROM generate_series(1, $1) AS n
""",
    ),
    # Pending publications, unread items in order, and channel tests.
    few=frozenset({"notifications_unpublished", "notifications_unread", "webhook_deliveries_tests_of_webhook"}),
    of_all=("deliveries.store.DUE", "deliveries.store._DUE_SECONDS", "deliveries.store._COUNT_WAITING"),
    reference=frozenset({"schema_version"}),
)
# Columns that select a whole store or user and do not identify a row.
_WHOLE = {"store_id", "user_id", "state"}
_TABLES = "SELECT oid::regclass::text AS name FROM pg_class WHERE relkind = 'r' AND relnamespace = to_regnamespace($1)"
_INDEXES = """
SELECT i.relname, t.relname AS of_table,
    ARRAY(SELECT pg_get_indexdef(indexrelid, n, true) FROM generate_series(1, indnkeyatts) AS n) AS columns
FROM pg_index JOIN pg_class i ON i.oid = indexrelid JOIN pg_class t ON t.oid = indrelid
"""


# Each table's keys: the names of the columns of primary keys, unique indexes and foreign keys.
_KEYS = """
SELECT t.relname AS of_table, i.indexrelid::regclass::text AS name,
    ARRAY(SELECT pg_get_indexdef(i.indexrelid, n, true) FROM generate_series(1, i.indnkeyatts) AS n) AS columns
FROM pg_index i JOIN pg_class t ON t.oid = i.indrelid
WHERE i.indisunique AND t.relkind = 'r' AND t.relnamespace = to_regnamespace($1)
UNION ALL
SELECT t.relname, c.conname, ARRAY(
    SELECT a.attname FROM pg_attribute a JOIN unnest(c.conkey) AS k (number) ON a.attnum = k.number
    WHERE a.attrelid = t.oid
) FROM pg_constraint c JOIN pg_class t ON t.oid = c.conrelid
WHERE c.contype = 'f' AND t.relnamespace = to_regnamespace($1)
"""
_STORES = """
SELECT t.relname AS of_table, a.attnotnull, a.atttypid::regtype::text || ' ' || a.attcollation::regcollation AS type
FROM pg_class t LEFT JOIN pg_attribute a ON a.attrelid = t.oid AND a.attname = 'store_id'
WHERE t.relkind = 'r' AND t.relnamespace = to_regnamespace($1)
"""
# Statements of job-store that concern several stores: claims and leases of workers, sweeps, figures, searches by the
# marks of users, and the relay of life-cycle events. A sharded database asks all its nodes for them.
_OF_SEVERAL_STORES = (
    "ledger.store.due_runs._DUE",
    "ledger.store.due_runs._HAS_LAST_CHANCE",
    "ledger.store.leases.",
    "schedules.store._CLAIM",
    "schedules.store._WAIT",
    "triggers.store._CLAIM",
    "triggers.store._WAIT",
    "triggers.store._LEASE_MAILBOXES",
    "ledger.store.situations._DOOMED",
    "ledger.store.upkeep._RUN_OUT",
    "ledger.store.upkeep._RUNS_BY_STATE",
    "ledger.store.upkeep._NOTICES",
    "ledger.store.upkeep._BACKLOG",
    "store_settings.store._",
    "lifecycle.store.",
    "erasure.store.retention.",
    "erasure.store.erasures._LOG_AGAIN",
    "conversations.store.search_index._DUE",
    "conversations.store.titles._CLAIM",
    "conversations.store.conversations.SEARCHED",
    "conversations.store.conversations.SHARED_SEARCHED",
)
_CONDITIONS = ("Index Cond", "Filter", "Recheck Cond", "Join Filter", "Hash Cond", "Merge Cond")


@pytest.fixture
def new_database_url(postgres_url: str, service: Service) -> Iterator[str]:
    with ServiceDatabase(postgres_url, service.schema) as database:
        yield database.url


@pytest.mark.parametrize("rows", [0, 20_000], ids=["a new database", "many rows"])
@pytest.mark.parametrize("service", [JOB_STORE, TOOL_REGISTRY, NOTIFIER], ids=lambda service: service.schema)
async def test_queries_never_scan_all_rows_of_a_store(new_database_url: str, service: Service, rows: int) -> None:
    """Without statistics, PostgreSQL may prefer an index that only selects the store."""
    whole: list[str] = []
    async with Database(new_database_url, application_name="test") as database, database.acquire() as connection:
        # PostgreSQL would otherwise analyze them during the test on a busy machine.
        for table in await connection.fetch(_TABLES, service.schema):
            await connection.execute(f"ALTER TABLE {table['name']} SET (autovacuum_enabled = false)")
        for statement in service.rows:
            await connection.execute(statement, rows)
        indexes = {row["relname"]: dict(row) for row in await connection.fetch(_INDEXES)}
        for name, statement in _statements(service):
            whole += [
                f"{name}: {node['Node Type']} by {node.get('Index Name')}: {node.get('Index Cond')}"
                for node in await planned(connection, statement)
                if not name.startswith(service.of_all) and _reads_everything(service, indexes, node)
            ]
    assert not whole, "\n".join(whole)


@pytest.mark.parametrize("service", [JOB_STORE, TOOL_REGISTRY, NOTIFIER], ids=lambda service: service.schema)
async def test_every_key_contains_the_store(new_database_url: str, service: Service) -> None:
    """Otherwise the tables could not be distributed by store: a shard can only check keys that belong to it."""
    async with Database(new_database_url, application_name="test") as database:
        keys = await database.fetch(_KEYS, service.schema)
        stores = await database.fetch(_STORES, service.schema)
    distributed = [store for store in stores if store["of_table"] not in service.reference]
    assert {store["of_table"] for store in stores} >= service.reference
    assert [store["of_table"] for store in distributed if not store["attnotnull"]] == []
    assert len({store["type"] for store in distributed}) == 1, "tables of different types are not in the same shards"
    keys = [key for key in keys if key["of_table"] not in service.reference]
    assert [key["name"] for key in keys if "store_id" not in key["columns"]] == []


@pytest.mark.parametrize("service", [JOB_STORE], ids=lambda service: service.schema)
async def test_statements_name_the_store(new_database_url: str, service: Service) -> None:
    wide: list[str] = []
    async with Database(new_database_url, application_name="test") as database, database.acquire() as connection:
        names = [table["name"].split(".")[-1] for table in await connection.fetch(_TABLES, service.schema)]
        tables = tuple(name for name in names if name not in service.reference)
        for name, statement in _statements(replace(service, tables=tables)):
            for node in await planned(connection, statement):
                conditions = " ".join(str(node.get(key, "")) for key in _CONDITIONS)
                read = node.get("Relation Name") in tables and node["Node Type"] != "ModifyTable"
                wide += [name] if read and "store_id" not in conditions else []
    assert {name for name in wide if not name.startswith(_OF_SEVERAL_STORES)} == set()
    assert [each for each in _OF_SEVERAL_STORES if not any(name.startswith(each) for name in wide)] == []


def _reads_everything(service: Service, indexes: Mapping[str, Mapping[str, Any]], node: Mapping[str, Any]) -> bool:
    """Return whether a plan node reads a whole table, or all rows of a store or user."""
    index = node.get("Index Name", "")
    if not index:
        return node["Node Type"] == "Seq Scan" and node["Relation Name"] in service.tables
    if indexes[index]["of_table"] not in service.tables or index in service.few:
        return False
    conditions = {*re.findall(r"\(?\b(\w+)\)? (?:=|<|>|<=|>=) ", node.get("Index Cond", ""))}
    columns = [re.findall(r"\w+", each)[-1] for each in indexes[index]["columns"]]
    prefix = {*itertools.takewhile(conditions.__contains__, columns)}
    return prefix <= _WHOLE and not (prefix == {"store_id", "state"} and index == "runs_open")


def _statements(service: Service) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each complete statement among the constants of the store modules."""
    statement = re.compile(
        rf"\s*(WITH|SELECT|UPDATE|DELETE)\b.*\b{service.schema}\.({'|'.join(service.tables)})\b", re.DOTALL
    )
    package = importlib.import_module(f"pawl.{service.schema}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if "store" not in module.name.split("."):
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            for path, each in _within(f"{module.name.removeprefix(f'{package.__name__}.')}.{name}", value):
                if statement.match(each) and not each.endswith(("= ", "AS ")) and "{" not in each:
                    yield path, each


def _within(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping) and not name.endswith("__"):
        for key, each in value.items():
            yield from _within(f"{name}.{key}", each)
    elif isinstance(value, tuple):
        for number, each in enumerate(value):
            yield from _within(f"{name}.{number}", each)
