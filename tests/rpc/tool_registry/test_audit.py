"""TOOL-6: the audit chain records events before they happen and reveals every change to it."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pawl.errors import PawlError
from pawl.event.v1 import call_pb2
from pawl.server.db.database import Database
from pawl.tool.v1 import audit_pb2, execution_pb2
from pawl.tool_registry.audit.rules import Head, entry_hash
from pawl.tool_registry.audit.store.audit import PostgresAuditLog
from pawl.tools import Category, Tool, tool
from pawl.values import EffectClass
from tests.rpc.refusals import raises
from tests.rpc.tool_registry.registry import (
    ANN,
    Registry,
    all_pages,
    context,
    outcome,
    proposed,
    refusal,
    running,
)
from tests.rpc.tool_registry.world import World, digest_of, execute


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
async def look(n: int = 0) -> int:
    """Look."""
    return n


def tools() -> list[Tool[..., Any]]:
    return [*World().tools(), look]


@pytest.fixture
async def registry(database_url: str, tmp_path: Path) -> AsyncIterator[Registry]:
    async with running(database_url, tmp_path, tools()) as registry:
        yield registry


async def listed(registry: Registry, *, store: str = "acme", **wanted: Any) -> list[audit_pb2.AuditEntry]:
    request = audit_pb2.ListAuditRequest(page_size=2, **wanted)
    return (await all_pages(registry.auditors[store, "olga"].ListAudit, request, "entries"))[::-1]


def fields_of(entries: Sequence[audit_pb2.AuditEntry]) -> list[tuple[str, str, str, str]]:
    return [
        (audit_pb2.AuditKind.Name(entry.kind).removeprefix("AUDIT_KIND_"), entry.call_id, entry.verdict, entry.reason)
        for entry in entries
    ]


async def verified(registry: Registry, **known: Any) -> audit_pb2.VerifyAuditResponse:
    answers = [
        answer async for answer in registry.auditors["acme", "olga"].VerifyAudit(audit_pb2.VerifyAuditRequest(**known))
    ]
    assert [answer.done for answer in answers] == [False] * (len(answers) - 1) + [True]
    return answers[-1]


async def problem(registry: Registry, **known: Any) -> tuple[int, str]:
    found = (await verified(registry, **known)).problem
    return found.seq, found.kind


async def decide(registry: Registry, call: str, kind: Any, *, by: str = "bob", version: int = 1) -> None:
    decision = execution_pb2.RecordedDecision(
        call_id=call, tool_name="delete", tool_version=version, kind=kind, user_id=by, arguments_json=b"{}"
    )
    request = execution_pb2.RecordDecisionsRequest(context=context(), decisions=[decision])
    await registry.execution.RecordDecisions(request)


async def test_chain_records_each_calls_history(registry: Registry, database_url: str) -> None:
    await registry.check("look", {"n": 7}, call="c1")
    await registry.run("look", {"n": 7}, call="c1")
    digest = (await registry.check("delete", {"path": "notes"}, call="c2")).digest
    await decide(registry, "c2", call_pb2.DECISION_KIND_APPROVE)
    await registry.run("delete", {"path": "notes"}, call="c2", approved_digest=digest)
    await registry.check("nothing\0of the kind", call="c3")
    entries = await listed(registry)
    assert fields_of(entries) == [
        ("PROPOSED", "c1", "RUN", ""),
        ("EXECUTED", "c1", "", ""),
        ("RETURNED", "c1", "SUCCEEDED", ""),
        ("PROPOSED", "c2", "APPROVE", "category DESTRUCTIVE"),
        ("DECIDED", "c2", "APPROVE", ""),
        ("EXECUTED", "c2", "APPROVED", ""),
        ("RETURNED", "c2", "SUCCEEDED", ""),
        ("PROPOSED", "c3", "REFUSE", "TOOL_NOT_FOUND"),
    ]
    assert ([entry.seq for entry in entries], entries[-1].tool_name) == (list(range(1, 9)), "?")
    assert entries[0].arguments_sha256 == entries[1].arguments_sha256 == await digest_of(database_url, b'{"n":7}')
    assert (entries[2].result_sha256, entries[2].result_bytes) == (await digest_of(database_url, b"7"), 1)
    assert (entries[4].user_id, entries[4].by_user_id) == ("ann", "bob")
    assert all(not entry.prev_hash or entry.prev_hash == before.hash for before, entry in itertools.pairwise(entries))


ALL = (
    "store_id, seq, kind, recorded_at, user_id, run_id, call_id, tool_name, tool_version, verdict, reason, by_user_id,"
    " arguments_sha256, result_sha256, result_bytes, duration_us, prev_hash, hash, credential_id, delegate_user_id,"
    " by_credential_id, by_delegate_user_id, agent_name"
)
COPY_OF_FIVE = (
    f"INSERT INTO tool_registry.audit SELECT {ALL.replace('seq', '{}', 1)} FROM tool_registry.audit WHERE seq = 5"  # noqa: S608
)

TAMPERINGS = {
    "update": ("UPDATE tool_registry.audit SET verdict = 'APPROVE' WHERE seq = 3", 3, "HASH_MISMATCH"),
    "update of a kind": ("UPDATE tool_registry.audit SET kind = 'WEIRD' WHERE seq = 2", 2, "HASH_MISMATCH"),
    "update of a time": (
        "UPDATE tool_registry.audit SET recorded_at = recorded_at + interval '1 microsecond' WHERE seq = 4",
        4,
        "HASH_MISMATCH",
    ),
    **{
        f"update of {column}": (f"UPDATE tool_registry.audit SET {column} = 'key_3' WHERE seq = 3", 3, "HASH_MISMATCH")  # noqa: S608
        for column in ("credential_id", "delegate_user_id", "by_credential_id", "by_delegate_user_id", "agent_name")
    },
    "delete": ("DELETE FROM tool_registry.audit WHERE seq = 2", 2, "GAP"),
    "delete of the first": ("DELETE FROM tool_registry.audit WHERE seq = 1", 1, "GAP"),
    "truncated tail": ("DELETE FROM tool_registry.audit WHERE seq >= 4", 4, "CUT_TAIL"),
    "everything gone": ("DELETE FROM tool_registry.audit", 1, "CUT_TAIL"),
    "swap": (
        """UPDATE tool_registry.audit SET seq = seq + 100 WHERE seq IN (2, 3);
        UPDATE tool_registry.audit SET seq = 3 WHERE seq = 102;
        UPDATE tool_registry.audit SET seq = 2 WHERE seq = 103""",
        2,
        "HASH_MISMATCH",
    ),
    "insert in front": (COPY_OF_FIVE.format(0), 1, "GAP"),
    "insert behind": (COPY_OF_FIVE.format(6), 6, "BEYOND_HEAD"),
    "head moved back": ("UPDATE tool_registry.audit_heads SET seq = 4", 5, "BEYOND_HEAD"),
    "head of something else": ("UPDATE tool_registry.audit_heads SET hash = 'x'", 5, "HEAD_MISMATCH"),
    "head gone": ("DELETE FROM tool_registry.audit_heads", 1, "BEYOND_HEAD"),
}


async def test_analytics_count_executions_errors_and_decisions_per_tool(database_url: str, tmp_path: Path) -> None:
    @tool(category=Category.SAFE)
    async def fail() -> str:
        """Fail."""
        raise RuntimeError

    async with running(database_url, tmp_path, [*tools(), fail]) as registry:
        for number in range(3):
            await registry.run("look", {"n": number}, call=f"l{number}")
        await registry.run("fail", call="f")
        for number, kind in enumerate((1, 1, 2, 3, 4)):
            for _ in range(2):  # Reported again after a crash: counted once
                await registry.check("delete", {"path": "x"}, call=f"d{number}")
                await decide(registry, f"d{number}", kind)
        request = audit_pb2.GetToolAnalyticsRequest()
        figures = {
            found.tool_name: found
            for found in (await registry.auditors["acme", "olga"].GetToolAnalytics(request)).tools
        }
        elsewhere = await registry.auditors["other", "olga"].GetToolAnalytics(request)
    assert list(elsewhere.tools) == []
    assert (figures["look"].execution_count, figures["look"].error_count, figures["look"].result_bytes) == (3, 0, 3)
    assert 0 < figures["look"].p50_seconds <= figures["look"].p95_seconds
    assert (figures["fail"].execution_count, figures["fail"].error_count) == (1, 1)
    gated = figures["delete"]
    assert (gated.approval_asked_count, gated.approved_count, gated.edited_count, gated.rejected_count) == (5, 2, 1, 1)


def returned(call: str, **changes: Any) -> execution_pb2.RecordResultsRequest:
    fields: dict[str, Any] = {
        "call_id": call,
        "tool_name": "show",
        "tool_version": 1,
        "user_id": "bob",
        "arguments_sha256": hashlib.sha256(b"{}").hexdigest(),
        "state": call_pb2.CALL_STATE_SUCCEEDED,
        "result_sha256": hashlib.sha256(b'"shown"').hexdigest(),
        "result_bytes": 7,
        "duration_seconds": 1.5,
    }
    result = execution_pb2.RecordedResult(**{**fields, **changes})
    return execution_pb2.RecordResultsRequest(context=context(), results=[result])


async def test_front_end_results_are_counted_once(registry: Registry, database_url: str) -> None:
    """TOOL-6: a result that is reported several times concurrently is counted once too."""
    await registry.check("look", call="c0")
    for _ in range(2):  # Reported again after a crash
        tellings = [
            returned("c1"),
            returned("c1"),
            returned("c2", state=call_pb2.CALL_STATE_FAILED, duration_seconds=4),
            returned("c3", state=call_pb2.CALL_STATE_EXPIRED, duration_seconds=9),
            returned("c4", state=call_pb2.CALL_STATE_CANCELLED, duration_seconds=2),
        ]
        await asyncio.gather(*map(registry.execution.RecordResults, tellings))
    _, *entries = sorted(await listed(registry), key=lambda entry: entry.call_id)
    answer = await registry.auditors["acme", "olga"].GetToolAnalytics(
        audit_pb2.GetToolAnalyticsRequest(tool_name="show")
    )
    assert not (await verified(registry)).HasField("problem")
    assert fields_of(entries) == [
        ("RETURNED", "c1", "SUCCEEDED", ""),
        ("RETURNED", "c2", "FAILED", "TOOL_ERROR"),
        ("RETURNED", "c3", "FAILED", "EXPIRED"),
        ("RETURNED", "c4", "CANCELLED", "CANCELLED"),
    ]
    assert (entries[0].user_id, entries[0].by_user_id) == ("ann", "bob")
    assert entries[0].result_sha256 == await digest_of(database_url, b'"shown"')
    (figures,) = answer.tools
    assert (figures.execution_count, figures.error_count, figures.result_bytes) == (4, 3, 28)
    assert (figures.p50_seconds, figures.p95_seconds) == (2, 9)


async def test_operators_find_entries_by_run_tool_user_kind_and_time(
    registry: Registry,
) -> None:
    await registry.check("look", call="c1")
    await registry.check("pay", call="c2", run="other", user="bob")
    first, second = await listed(registry)
    wanted: list[tuple[dict[str, Any], list[int]]] = [
        ({"run_id": "other"}, [2]),
        ({"tool_name": "pay"}, [2]),
        ({"user_id": "bob"}, [2]),
        ({"call_id": "c2"}, [2]),
        ({"kind": audit_pb2.AUDIT_KIND_EXECUTED}, []),
        ({"since_time": second.time, "before_time": first.time}, []),
        ({"since_time": second.time}, [2]),
        ({"before_time": second.time}, [1]),
        ({"store": "other"}, []),
    ]
    for fields, found in wanted:
        assert [entry.seq for entry in await listed(registry, **fields)] == found, fields
    bad: list[dict[str, Any]] = [
        {"page_size": 1001},
        {"page_token": "YXVkaXQ6MV8w"},
        {"page_token": "!"},
        {"kind": 9},
        {"run_id": "\0"},
        {"since_time": {"seconds": 1 << 60}},
    ]

    for fields in bad:
        request = audit_pb2.ListAuditRequest(**fields)
        assert await refusal(registry.auditors["acme", "olga"].ListAudit(request)) in INVALID, fields


INVALID = {"INVALID_FIELD", "INVALID_ID", "INVALID_PAGE_TOKEN"}


async def test_invalid_decisions_and_results_are_rejected(registry: Registry) -> None:
    decisions: list[dict[str, Any]] = [
        {"kind": 0},
        {"kind": 99},
        {"kind": 1, "version": 2**31},
        {"kind": 1, "by": "\0"},
    ]
    for fields in decisions:
        assert await refusal(decide(registry, "c1", **fields)) in INVALID, fields
    results: list[dict[str, Any]] = [
        {"state": call_pb2.CALL_STATE_UNSPECIFIED},
        {"state": call_pb2.CALL_STATE_RUNNING},
        {"duration_seconds": -1},
        {"duration_seconds": float("nan")},
        {"duration_seconds": 1e11},
        {"result_bytes": 1 << 63},
        {"result_sha256": "x"},
        {"arguments_sha256": ""},
        {"user_id": ""},
        {"call_id": ""},
        {"tool_version": 1 << 31},
    ]
    record = registry.execution.RecordResults
    for fields in results:
        assert await refusal(record(returned("c1", **fields))) in INVALID, fields
    assert await refusal(record(execution_pb2.RecordResultsRequest(context=context()))) in INVALID
    assert await listed(registry) == []


async def chain_of_five(registry: Registry) -> Head:
    for number in range(1, 6):
        await registry.check("look", {"n": number}, call=f"c{number}")
    answer = await verified(registry)
    assert (answer.HasField("problem"), answer.verified_seq) == (False, 5)
    return Head(seq=5, hash=answer.verified_hash)


async def test_tampering_is_found_at_the_first_bad_entry(registry: Registry, database_url: str) -> None:
    await chain_of_five(registry)
    tables = ("audit", "audit_heads")
    kept = [f"CREATE TABLE public.kept_{table} AS TABLE tool_registry.{table}" for table in tables]
    restore = [
        f"DELETE FROM tool_registry.{table}; INSERT INTO tool_registry.{table} TABLE public.kept_{table}"  # noqa: S608
        for table in tables
    ]
    await execute(database_url, "; ".join(kept))
    for how, (sql, seq, kind) in TAMPERINGS.items():
        await execute(database_url, sql)
        assert await problem(registry) == (seq, kind), how
        await execute(database_url, "; ".join(restore))
    await execute(database_url, "DROP TABLE public.kept_audit, public.kept_audit_heads")
    assert not (await verified(registry)).HasField("problem")


async def rewrite(database_url: str, from_seq: int, *, most: int = 100) -> None:
    """Change an entry and recompute up to `most` hashes from there on, as an informed attacker would."""
    async with Database(database_url, application_name="test") as database:
        entries = await PostgresAuditLog(database).page(ANN.store_id, after_seq=None, up_to_seq=100, rows_max=100)
        prev = entries[from_seq - 2].hash
        object.__setattr__(entries[from_seq - 1].draft, "verdict", "REFUSE")
        for entry in entries[from_seq - 1 :][:most]:
            new = entry_hash(entry.draft, entry.seq, prev)
            values = f"verdict = '{entry.draft.verdict}', prev_hash = '{prev}', hash = '{new}'"
            await execute(database_url, f"UPDATE tool_registry.audit SET {values} WHERE seq = {entry.seq}")  # noqa: S608
            prev = new
        if most > len(entries):
            await execute(database_url, f"UPDATE tool_registry.audit_heads SET hash = '{prev}'")  # noqa: S608


async def test_saved_head_reveals_a_rebuilt_chain(registry: Registry, database_url: str) -> None:
    head = await chain_of_five(registry)
    kept = {"known_seq": head.seq, "known_hash": head.hash}
    await registry.check("look", call="c6")
    assert not (await verified(registry, **kept)).HasField("problem")
    await rewrite(database_url, 3)
    assert not (await verified(registry)).HasField("problem")  # Nothing inside the database shows it
    assert await problem(registry, **kept) == (5, "HEAD_MISMATCH")
    await rewrite(database_url, 4, most=1)
    assert await problem(registry) == (5, "BROKEN_LINK"), "one entry does not fit the next"
    await execute(database_url, "DELETE FROM tool_registry.audit; DELETE FROM tool_registry.audit_heads")
    assert await problem(registry, **kept) == (1, "CUT_TAIL")


async def test_call_runs_only_after_its_audit_entry_is_written(database_url: str, tmp_path: Path) -> None:
    """Without the entry there is no verdict and no effect, so the call can be repeated."""
    world = World()
    async with running(database_url, tmp_path, [*world.tools(), look]) as registry:
        await registry.check("pay", call="c1")
        await execute(database_url, "ALTER TABLE tool_registry.audit RENAME TO audit_away")
        try:
            await raises(PawlError, registry.check("pay", call="c2"), registry.run("pay", call="c1"))
        finally:
            await execute(database_url, "ALTER TABLE tool_registry.audit_away RENAME TO audit")
        # Moving the head back by one makes each new entry use a number that is taken. Other stores are not affected.
        await execute(database_url, "UPDATE tool_registry.audit_heads SET seq = 0")
        assert await refusal(registry.run("pay", call="c1")) == "DEPENDENCY_UNAVAILABLE"
        asked = [registry.check("look", call=f"c{n}", store="other" if n % 2 else "acme") for n in range(12)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert [isinstance(answer, BaseException) for answer in answers] == [True, False] * 6
        assert [entry.seq for entry in await listed(registry, store="other")] == list(range(1, 7))
        assert world.effects == []
        await execute(database_url, "DELETE FROM tool_registry.audit; DELETE FROM tool_registry.audit_heads")
        assert outcome(await registry.run("pay", call="c1")) == "SUCCEEDED"
    assert world.effects == ["paid 1"]


async def test_replicas_write_each_decision_once_to_one_chain_without_gaps(
    database_url: str, tmp_path: Path, registry: Registry
) -> None:
    async with running(database_url, tmp_path, tools(), name="b") as other:
        both = (registry, other)
        await asyncio.gather(
            *(both[n % 2].check("look", call=f"c{n}", store="acme" if n % 3 else "other") for n in range(60))
        )
        answer = await verified(registry)
        assert (answer.verified_seq, answer.HasField("problem")) == (40, False)
        assert len(await listed(registry, store="other")) == 20
        reports = [decide(which, "c1", call_pb2.DECISION_KIND_EDIT) for which in both * 4]
        await asyncio.gather(*reports, decide(registry, "c1", call_pb2.DECISION_KIND_EDIT, by="eve"))
        entries = await listed(registry, kind=audit_pb2.AUDIT_KIND_DECIDED)
        assert sorted((entry.verdict, entry.by_user_id) for entry in entries) == [("EDIT", "bob"), ("EDIT", "eve")]
        assert not (await verified(registry)).HasField("problem")


async def test_chain_names_credentials_and_the_users_of_delegates(registry: Registry) -> None:
    run = context(credential_id="key_1", delegate_user_id="shop")
    await registry.verdicts(proposed("c1", "look"), who=run)
    await registry.run("look", {}, call="c1", who=run)
    decision = execution_pb2.RecordedDecision(
        call_id="c1", tool_name="look", tool_version=1, kind=call_pb2.DECISION_KIND_APPROVE, user_id="bob"
    )
    decision.credential_id, decision.delegate_user_id = "key_2", "desk"
    await registry.execution.RecordDecisions(execution_pb2.RecordDecisionsRequest(context=run, decisions=[decision]))
    entries = await listed(registry)
    assert [(entry.credential_id, entry.delegate_user_id) for entry in entries] == [("key_1", "shop")] * 4
    by = [(entry.by_user_id, entry.by_credential_id, entry.by_delegate_user_id) for entry in entries]
    assert by == [("", "", "")] * 3 + [("bob", "key_2", "desk")]
    assert not (await verified(registry)).HasField("problem")
