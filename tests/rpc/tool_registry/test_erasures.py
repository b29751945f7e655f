"""What the registry keeps of an erased conversation: ids, and an audit chain whose digests reveal nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from pawl.chassis.ids import CallId, CallKey, ConversationId, RequestId, RunId, StoreId
from pawl.errors import ConversationErased, DependencyUnavailable
from pawl.event.v1 import call_pb2
from pawl.server.db.database import Database
from pawl.server.db.erasures import ErasurePart
from pawl.tool.v1 import rule_pb2, worker_pb2
from pawl.tool_registry.builtin.files.folders import FileFolders
from pawl.tool_registry.builtin.files.rules import FileChange, FileLimits, Planned
from pawl.tool_registry.execution.store.erasures import PostgresErasures
from pawl.tool_registry.execution.store.journal import PostgresExecutionJournal
from pawl.tool_registry.policy.rules.rules import RuleScope
from pawl.tool_registry.policy.store.rule_rows import PostgresRuleRepository
from pawl.tool_registry.rules.journal import JournalCall
from pawl.tool_registry.sources.worker.rules import Purpose
from pawl.tool_registry.sources.worker.store.workers import PostgresWorkerRepository, WorkerCall
from pawl.values import EffectClass
from tests.rpc.refusals import raises
from tests.rpc.tool_registry.registry import refusal, running
from tests.rpc.tool_registry.test_audit import decide, listed, tools, verified

MARKER = "zanzibar"
PART = ErasurePart(
    store_id=StoreId("acme"), conversation_id=ConversationId("conversation"), run_ids=["run"], call_ids=["c1", "c2"]
)


async def everything(database: Database) -> str:
    rows = [
        row
        for table in (await database.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'tool_registry'"))
        if table["tablename"] not in {"tool_versions", "schema_version"}
        for row in await database.fetch(f"SELECT * FROM tool_registry.{table['tablename']}")  # noqa: S608
    ]
    return "\n".join(repr(tuple(row)) for row in rows)


async def test_erasure_deletes_executions_rules_and_secrets_but_keeps_the_chain(
    database_url: str, tmp_path: Path
) -> None:
    """TOOL-6: no table still contains the arguments."""
    async with (
        running(database_url, tmp_path, tools()) as registry,
        Database(database_url, application_name="test") as database,
    ):
        digest = (await registry.check("delete", {"path": MARKER}, call="c1")).digest
        await decide(registry, "c1", call_pb2.DECISION_KIND_APPROVE)
        await registry.run("delete", {"path": MARKER}, call="c1", approved_digest=digest)
        await registry.check(MARKER, call="c2")
        await registry.run("pay", call="early")
        rule = rule_pb2.Rule(
            effect=rule_pb2.RULE_EFFECT_DENY,
            scope=rule_pb2.RULE_SCOPE_CONVERSATION,
            scope_id="conversation",
            tool_name="delete",
            arguments=[rule_pb2.ArgumentPattern(argument="path", equals_json=json.dumps(MARKER).encode())],
        )
        await registry.rules["acme", "bob"].CreateRule(rule_pb2.CreateRuleRequest(rule=rule))
        before = await listed(registry)
        assert MARKER in await everything(database)
        erasures = PostgresErasures(database)

        for _ in range(2):
            await erasures.erase(PART)

        assert MARKER not in await everything(database)
        left = await database.fetchval("SELECT count(*) FROM tool_registry.executions")
        assert left == 0, "ASYNC-3: also calls of a run that the ledger no longer knows"
        assert await database.fetchval("SELECT count(*) FROM tool_registry.audit_keys WHERE secret IS NOT NULL") == 0
        assert ((await verified(registry)).HasField("problem"), await listed(registry)) == (False, before)


async def test_rules_of_an_erased_conversation_never_return(database_url: str, tmp_path: Path) -> None:
    """Neither a repeated request nor a request in progress creates them again."""
    async with (
        running(database_url, tmp_path, tools()) as registry,
        Database(database_url, application_name="test") as database,
    ):
        rule = rule_pb2.Rule(
            effect=rule_pb2.RULE_EFFECT_DENY,
            scope=rule_pb2.RULE_SCOPE_CONVERSATION,
            scope_id="conversation",
            tool_name="delete",
            reason=MARKER,
        )
        request = rule_pb2.CreateRuleRequest(rule=rule, request_id="r1")
        made = await registry.rules["acme", "bob"].CreateRule(request)
        (kept,) = await PostgresRuleRepository(database).in_force(StoreId("acme"))
        assert kept.rule_id == made.rule.rule_id
        before = await listed(registry)

        await PostgresErasures(database).erase(PART)

        assert await refusal(registry.rules["acme", "bob"].CreateRule(request)) == "CONVERSATION_ERASED"
        for scope, scope_id in ((RuleScope.CONVERSATION, "conversation"), (RuleScope.RUN, "run")):
            late = replace(kept, scope=scope, scope_id=scope_id)
            await raises(ConversationErased, PostgresRuleRepository(database).add(late, RequestId("r2")))
        assert MARKER not in await everything(database)
        assert await listed(registry) == before


async def test_calls_of_an_erased_run_never_start(database_url: str) -> None:
    """A call of an erased run may come from a process that was suspended during the erasure."""
    async with Database(database_url, application_name="test") as database:
        await PostgresErasures(database).erase(PART)
        details = worker_pb2.Invocation(
            store_id="acme",
            call_id="c1",
            user_id="ann",
            conversation_id="conversation",
            run_id="run",
            tool_name="charge",
            arguments_json=MARKER.encode(),
            attempt=1,
        )
        call = WorkerCall(
            details=details,
            group_name="billing",
            definition_hash="h",
            purpose=Purpose.RUN,
            seconds=60.0,
            token="t",
            late=None,
        )
        journal = PostgresExecutionJournal(database, instance_id="a", lease_seconds=30.0)
        await journal.renew()
        begun = JournalCall(
            key=CallKey(StoreId("acme"), CallId("c1")),
            run_id=RunId("run"),
            tool_name="charge",
            tool_version=1,
            effect=EffectClass.AT_MOST_ONCE,
            fingerprint="f",
            unknowns_resolved=0,
            token="t",
            is_askable=False,
        )
        await raises(DependencyUnavailable, journal.begin(begun))
        assert await database.fetchval("SELECT count(*) FROM tool_registry.executions") == 0
        repository = PostgresWorkerRepository(database, instance_id="a")
        assert await repository.add(call, None) is None
        assert MARKER not in await everything(database)
        details.run_id = "other"
        await repository.add(call, None)
        assert MARKER in await everything(database)


def test_file_tools_erase_their_history_but_keep_the_files(tmp_path: Path) -> None:
    folders = FileFolders(tmp_path, FileLimits(file_bytes_max=1000, store_bytes_max=10_000), lambda: 0.0)
    planned = Planned(outcome=MARKER.encode(), change=FileChange(kind="put", path="note.txt", content=b"kept"))
    folders.change(StoreId("acme"), "c1", lambda _: planned, lambda _: False)
    assert MARKER.encode() in b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())

    folders.forget(StoreId("acme"), ["c1", "c2"])
    folders.forget(StoreId("other"), ["c1"])

    assert MARKER.encode() not in b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert folders.read(StoreId("acme"), "note.txt") == b"kept"
