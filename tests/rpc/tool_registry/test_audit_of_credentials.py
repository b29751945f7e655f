"""TOOL-6: the audit chain names credentials, and the delegates that acted for users."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pawl.chassis.database import Database
from pawl.event.v1 import call_pb2
from pawl.tool.v1 import execution_pb2
from pawl.tool_registry.adapters.postgres.audit import PostgresAuditLog
from pawl.tool_registry.domain.audit import entry_hash
from tests.rpc.tool_registry.registry import context, running
from tests.rpc.tool_registry.test_audit import draft, listed, tools, verified
from tests.rpc.tool_registry.world import execute

WHO = {
    "credential_id": "key_1",
    "delegate_user_id": "shop",
    "by_credential_id": "key_2",
    "by_delegate_user_id": "desk",
}


async def test_the_chain_names_credentials_and_for_whom_delegates_acted(database_url: str, tmp_path: Path) -> None:
    async with running(database_url, tmp_path, tools()) as registry:
        run = context()
        run.credential_id, run.delegate_user_id = "key_1", "shop"
        proposed = execution_pb2.ProposedCall(call_id="c1", tool_name="look", tool_version=1, arguments_json=b"{}")
        await registry.execution.CheckCalls(execution_pb2.CheckCallsRequest(context=run, calls=[proposed]))
        await registry.run("look", {}, call="c1", who=run)
        decision = execution_pb2.RecordedDecision(
            call_id="c1", tool_name="look", tool_version=1, kind=call_pb2.DECISION_KIND_APPROVE, user_id="bob"
        )
        decision.credential_id, decision.delegate_user_id = "key_2", "desk"
        decided = execution_pb2.RecordDecisionsRequest(context=run, decisions=[decision])
        await registry.execution.RecordDecisions(decided)
        entries = await listed(registry)
        whole = await verified(registry)
    assert not whole.HasField("problem")
    assert [(entry.credential_id, entry.delegate_user_id) for entry in entries] == [("key_1", "shop")] * 4
    told = [(entry.by_user_id, entry.by_credential_id, entry.by_delegate_user_id) for entry in entries]
    assert told == [("", "", "")] * 3 + [("bob", "key_2", "desk")]


@pytest.mark.parametrize("column", WHO)
async def test_tampering_with_credentials_is_found(database_url: str, tmp_path: Path, column: str) -> None:
    """In entries that name them, and in those from before, which do not."""
    async with Database(database_url, application_name="test") as database:
        await PostgresAuditLog(database).append([replace(draft("c1"), **WHO), draft("c2")])  # type: ignore[arg-type]
    async with running(database_url, tmp_path, tools()) as registry:
        assert not (await verified(registry)).HasField("problem")
        await execute(database_url, f"UPDATE tool_registry.audit SET {column} = 'key_3' WHERE seq = 2")  # noqa: S608
        assert (await verified(registry)).problem.seq == 2
        await execute(database_url, f"UPDATE tool_registry.audit SET {column} = '' WHERE seq = 1")  # noqa: S608
        assert (await verified(registry)).problem.seq == 1


def test_an_entry_without_credentials_has_the_hash_that_it_had_before_they_were_kept() -> None:
    assert entry_hash(draft("c1"), 1, "") == "d4fda5c1177047c2f87542396e725a695affbcdda9ecf1c25ca61759c0e89605"
