"""An erased conversation is found nowhere: in no table, no stream, no file, and in no backup that is restored."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import asyncpg
import pytest

from pawl.agent.v1 import agent_pb2, types_pb2
from pawl.agent.v1 import conversation_pb2 as pb
from pawl.agent.v1.conversation_pb2_grpc import ConversationServiceStub
from pawl.event.v1 import call_pb2, conversation_pb2, run_pb2
from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite
from pawl.notify.v1 import notify_pb2
from pawl.notify.v1.notify_pb2_grpc import NotifyServiceStub
from pawl.tool.v1 import audit_pb2, rule_pb2
from pawl.tool.v1.audit_pb2_grpc import AuditServiceStub
from pawl.tool.v1.rule_pb2_grpc import RuleServiceStub
from tests.keys import LOCAL_KEY, keyed_channel
from tests.poll import until
from tests.system.suite.client import Agent, addresses

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]

MARKER = b"zanzibar"
WORD = MARKER.decode()
# Of PostgreSQL the tables are looked at. The mail that was sent has left, as the receipt says.
_NOT_LOOKED_AT = ("postgres", "outbox")


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[Suite, Agent]]:
    options = SuiteOptions(
        data=folder,
        local_key=LOCAL_KEY,
        service_environment={"tool-registry": {"PAWL_TOOLS": "tests.system.suite.reversible_tools"}},
    )
    async with Suite(options) as suite, Agent(addresses(suite)[0]) as agent:
        yield suite, agent


async def tables_with(suite: Suite) -> set[str]:
    """The tables, of all schemas, in which the marker stands."""
    database = await asyncpg.connect(suite.database_url)
    try:
        tables = await database.fetch(
            "SELECT schemaname || '.' || tablename AS name FROM pg_tables"
            " WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"
        )
        found = set()
        for (name,) in tables:
            rows = await database.fetch(f"SELECT t.*, t::text AS whole FROM {name} AS t")  # noqa: S608
            if any(MARKER in _bytes(value) for row in rows for value in row.values()):
                found.add(name)
        return found
    finally:
        await database.close()


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def files_with(folder: Path) -> set[str]:
    """The files of the data folder in which the marker stands, by their first folder."""
    found = set()
    for root, _, names in os.walk(folder):
        for path in (Path(root, name) for name in names):
            place = path.relative_to(folder).parts[0]
            # What runs there makes and removes files meanwhile.
            with suppress(FileNotFoundError):
                if place not in _NOT_LOOKED_AT and path.is_file() and MARKER in path.read_bytes():
                    found.add(place)
    return found


async def receipt(agent: Agent, conversation_id: str) -> pb.EraseConversationResponse:
    request = pb.EraseConversationRequest(conversation_id=conversation_id, page_size=200)
    return await ConversationServiceStub(agent.channel).EraseConversation(request, metadata=agent.metadata)


async def erased(agent: Agent, conversation_id: str) -> pb.EraseConversationResponse:
    async def is_done() -> bool:
        return (await receipt(agent, conversation_id)).erasure.HasField("end_time")

    await until(is_done)
    return await receipt(agent, conversation_id)


async def plant(suite: Suite, agent: Agent, effects: Path) -> str:
    """A conversation with the marker wherever somebody can put it: one run that has ended, one that waits."""
    line = json.dumps({"path": str(effects), "line": WORD})
    start = agent_pb2.StartRunRequest(
        text=f"call put_line with {line} then ask me which {WORD} colour"
        f" then e-mail ann@example.com about {WORD}: {WORD} then ask an agent to work out 6 * 7",
        conversation_key=f"{WORD} key",
        request_id="planted",
        labels={"case": f"{WORD} label"},
    )
    run = (await agent.stub.StartRun(start, metadata=agent.metadata)).run
    question = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_ASKED)
    await agent.decide(question, call_pb2.DECISION_KIND_ANSWER, answer=WORD)
    await agent.until_pending(run.run_id, call_pb2.CALL_STATE_AWAITING_APPROVAL)
    steer = agent_pb2.SendMessageRequest(
        conversation_id=run.conversation_id, text=f"{WORD} steered", policy=types_pb2.MESSAGE_POLICY_STEER
    )
    await agent.stub.SendMessage(steer, metadata=agent.metadata)
    # What was steered is the last message, and so what the model goes on with.
    await agent.until_ended(run.run_id)
    second = await agent.start(
        f"e-mail ann@example.com about {WORD}: {WORD} then ask an agent to work out 6 * 7",
        conversation_id=run.conversation_id,
    )
    mail = await agent.until_pending(second.run_id, call_pb2.CALL_STATE_AWAITING_APPROVAL)
    await agent.decide(mail, call_pb2.DECISION_KIND_APPROVE, reason=f"{WORD} approved")
    await agent.until_ended(second.run_id)
    stub = ConversationServiceStub(agent.channel)
    labels = {"case": f"{WORD} label"}
    named = pb.UpdateConversationRequest(
        conversation_id=run.conversation_id,
        title=f"{WORD} title",
        request_id="titled",
        labels=conversation_pb2.Labels(labels=labels),
    )
    await stub.UpdateConversation(named, metadata=agent.metadata)
    async with keyed_channel(addresses(suite, "tool-registry")[0]) as channel:
        rule = rule_pb2.Rule(
            effect=rule_pb2.RULE_EFFECT_ASK,
            scope=rule_pb2.RULE_SCOPE_CONVERSATION,
            scope_id=run.conversation_id,
            tool_name="put_line",
            arguments=[rule_pb2.ArgumentPattern(argument="line", glob=f"{WORD}*")],
            reason=WORD,
        )
        await RuleServiceStub(channel).CreateRule(rule_pb2.CreateRuleRequest(rule=rule), metadata=agent.metadata)
    waiting = await agent.start(f"ask me which {WORD} then what is 2 + 2", conversation_id=run.conversation_id)
    await agent.until_pending(waiting.run_id, call_pb2.CALL_STATE_ASKED)
    await agent.start(f"{WORD} queued", conversation_id=run.conversation_id)

    async def is_found() -> bool:
        request = pb.ListConversationsRequest(query=WORD)
        return bool((await stub.ListConversations(request, metadata=agent.metadata)).conversations)

    await until(is_found)
    return run.conversation_id


async def told(suite: Suite, user: str) -> bool:
    """Whether a user who may approve has been told of a call with the marker; from the first time on they are told."""
    async with keyed_channel(addresses(suite, "notifier")[0]) as channel:
        metadata = (("pawl-store", "local"), ("pawl-user", user))
        request = notify_pb2.ListNotificationsRequest()
        inbox = await NotifyServiceStub(channel).ListNotifications(request, metadata=metadata)
    return any(WORD in each.body and not each.conversation_id for each in inbox.notifications)


async def audit_is_whole(suite: Suite, agent: Agent) -> bool:
    async with keyed_channel(addresses(suite, "tool-registry")[0]) as channel:
        answers = AuditServiceStub(channel).VerifyAudit(audit_pb2.VerifyAuditRequest(), metadata=agent.metadata)
        return not any([answer.HasField("problem") async for answer in answers])


def copy(source: Path, target: Path) -> None:
    """Copy a folder with its owner, as a backup does."""
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)  # paths of the test


async def test_nothing_of_an_erased_conversation_is_found_anywhere_nor_in_a_restored_backup() -> None:
    """I22."""
    with tempfile.TemporaryDirectory(prefix="pawl-erase-") as name, tempfile.TemporaryDirectory() as effects:
        folder, backup = Path(name) / "data", Path(name) / "backup"
        async with running(folder) as (suite, agent):
            assert not await told(suite, "cyd")
            conversation_id = await plant(suite, agent, Path(effects) / "lines")
            await until(partial(told, suite, "cyd"))
            before = await tables_with(suite)
            assert {
                *("job_store.messages", "job_store.calls", "job_store.events", "job_store.runs"),
                *("job_store.conversations", "job_store.conversation_words"),
                *("tool_registry.executions", "tool_registry.rules", "notifier.notifications"),
            } <= before
            assert files_with(folder) == {"nats"}
        copy(folder / "postgres", backup)
        async with running(folder) as (suite, agent):
            begun = await receipt(agent, conversation_id)
            assert begun.erasure.waits_for
            end = await erased(agent, conversation_id)
            assert await tables_with(suite) == set()
            assert {call.tool_name for call in end.left_calls} >= {"put_line", "send_email"}
            assert not any(MARKER in call.SerializeToString() for call in end.left_calls)
            assert not await told(suite, "cyd")
            assert await audit_is_whole(suite, agent)
            assert files_with(folder) == set()
        assert files_with(folder) == set()

        # The database is that of before. What was erased since then goes again.
        shutil.rmtree(folder / "postgres")
        copy(backup, folder / "postgres")
        async with running(folder) as (suite, agent):
            await erased(agent, conversation_id)
            assert await tables_with(suite) == set()
            assert files_with(folder) == set()
            assert await audit_is_whole(suite, agent)
            request = agent_pb2.ListRunsRequest(conversation_id=conversation_id)
            assert not (await agent.stub.ListRuns(request, metadata=agent.metadata)).runs
            assert (await agent.start("what is 1 + 1")).state != run_pb2.RUN_STATE_FAILED
