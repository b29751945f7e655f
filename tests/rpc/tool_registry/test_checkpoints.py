"""Checkpoints: a call that is begun again goes on where an earlier execution was. I5."""

from __future__ import annotations

import asyncio
import signal
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.chassis.database import Database
from pawl.chassis.erasures import ErasurePart
from pawl.chassis.ids import CallId, CallKey, ConversationId, RunId, StoreId
from pawl.tool.v1 import worker_pb2
from pawl.tool_registry.adapters.postgres.checkpoints import PostgresCheckpoints
from pawl.tool_registry.adapters.postgres.erasures import PostgresErasures
from pawl.tool_registry.app.workers.workers import WorkerOptions
from pawl.tool_registry.domain.journal import Writer
from pawl.tools import Category, EffectClass, ToolContext, tool
from tests.poll import until
from tests.rpc.tool_registry.attached import EffectClass as WireEffect
from tests.rpc.tool_registry.attached import attached, definition
from tests.rpc.tool_registry.registry import content, outcome, running
from tests.rpc.tool_registry.test_process import execute, process
from tests.rpc.tool_registry.test_worker_loss import answer, invocation

BRIEF = WorkerOptions(lease_seconds=4.0, poll_seconds=0.1)

STEPS = '''
import asyncio
from pathlib import Path
from pawl.tools import Category, EffectClass, ProcessLimits, ToolContext, tool

def step(path: str, number: int) -> None:
    with Path(path).open("a") as file:
        file.write(f"{number}\\n")

async def _steps(path: str, context: ToolContext) -> int:
    first = 0 if context.last_checkpoint is None else context.last_checkpoint["next"]
    for number in range(first, 6):
        step(path, number)
        await context.checkpoint({"next": number + 1})
        while number == 2:
            await asyncio.sleep(0.02)
    return context.attempt

@tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT, timeout_seconds=60)
async def count_here(path: str, context: ToolContext) -> int:
    """Count, in the registry."""
    return await _steps(path, context)

@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY, timeout_seconds=60, process=ProcessLimits())
async def count_apart(path: str, context: ToolContext) -> int:
    """Count, in a process of its own."""
    return await _steps(path, context)
'''


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("count_here", signal.SIGTERM),
        ("count_apart", signal.SIGKILL),
    ],
)
async def test_a_tool_goes_on_from_its_checkpoint_after_the_registry_has_ended(
    database_url: str, tmp_path: Path, name: str, end: signal.Signals
) -> None:
    """By a crash, or by a deploy that does not wait for it."""
    (tmp_path / "slow_tools.py").write_text(STEPS)
    steps = tmp_path / "steps"

    async def is_at_the_third() -> bool:
        # The checkpoint of the third step is kept by then, or the step is done again.
        return steps.exists() and len(steps.read_text().split()) >= 3

    async with process(database_url, tmp_path, "a") as (first, address):
        asked = asyncio.ensure_future(execute(address, name, path=str(steps)))
        await until(is_at_the_third)
        async with Database(database_url, application_name="test") as database:

            async def is_kept() -> bool:
                found = await database.fetchval("SELECT content FROM tool_registry.checkpoints")
                return bool(found == b'{"next":3}')

            await until(is_kept)
        first.send_signal(end)
        with pytest.raises(grpc.aio.AioRpcError):
            await asked
    async with process(database_url, tmp_path, "b") as (_, address):
        result = await execute(address, name, path=str(steps), earlier_attempts=1)
    assert content(result) == 2
    assert steps.read_text().split() == ["0", "1", "2", "3", "4", "5"], "each step once"


def writer(token: str, *, attempt: int = 1) -> Writer:
    key = CallKey(StoreId("acme"), CallId("c1"))
    return Writer(key=key, run_id=RunId("run"), attempt=attempt, token=token)


@asynccontextmanager
async def record(database_url: str) -> Any:
    async with Database(database_url, application_name="test") as database:
        yield database, PostgresCheckpoints(database)


async def test_who_begins_last_writes_however_attempts_are_counted(database_url: str) -> None:
    """The count of a caller that died may begin anew."""
    async with record(database_url) as (_, checkpoints):
        assert await checkpoints.keep(writer("a"), b"1", is_first=True)
        assert await checkpoints.take(writer("b", attempt=5)) == b"1"
        assert not await checkpoints.keep(writer("a"), b"2", is_first=False)
        assert not await checkpoints.keep(writer("late"), b"2", is_first=True)
        assert await checkpoints.take(writer("c", attempt=2)) == b"1"
        assert not await checkpoints.keep(writer("b", attempt=5), b"3", is_first=False)
        assert await checkpoints.keep(writer("c", attempt=2), b"4", is_first=True)
        assert await checkpoints.take(writer("d", attempt=3)) == b"4"


async def test_checkpoints_go_with_time_and_with_their_conversation(database_url: str) -> None:
    part = ErasurePart(
        store_id=StoreId("acme"),
        conversation_id=ConversationId("conversation"),
        run_ids=(RunId("run"),),
        call_ids=(CallId("c1"),),
    )
    async with record(database_url) as (database, checkpoints):
        assert await checkpoints.keep(writer("a"), b"1", is_first=True)
        await checkpoints.forget(60.0)
        assert await database.fetchval("SELECT count(*) FROM tool_registry.checkpoints") == 1
        await checkpoints.forget(0.0)
        assert await database.fetchval("SELECT count(*) FROM tool_registry.checkpoints") == 0
        assert await checkpoints.keep(writer("b"), b"1", is_first=True)
        await PostgresErasures(database).erase(part)
        assert await database.fetchval("SELECT count(*) FROM tool_registry.checkpoints") == 0
        assert not await checkpoints.keep(writer("b"), b"2", is_first=False), "nothing of it comes back"
        assert await checkpoints.take(writer("c", attempt=2)) is None


async def test_what_cannot_be_kept_is_refused_and_secrets_are_not_kept(database_url: str, tmp_path: Path) -> None:
    """What is too large without its secrets could be kept, and never be read again."""
    kept = {
        "large": ("x" * 16_384, "over the limit of 16384"),
        "nan": (float("nan"), "must be JSON"),
        "object": (object(), "JSON"),
        "pin": ("1234" * 4000, "over the limit"),
    }

    @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
    async def leak(context: ToolContext, what: str) -> Any:
        """Keep something."""
        if context.attempt == 1:
            secrets = {"key": context.secret("api_key"), "pin": context.secret("pin")}
            await context.checkpoint(kept[what][0] if what in kept else {"key": secrets["key"]})
        return context.last_checkpoint

    async with running(
        database_url, tmp_path, [leak], secrets={"acme": {"api_key": "hunter2", "pin": "1234"}}
    ) as registry:
        for what, (_, said) in kept.items():
            assert said in content(await registry.run("leak", {"what": what}, call=what))["error"]
            assert content(await registry.run("leak", {"what": what}, call=what, earlier_attempts=1)) is None
        await registry.run("leak", {"what": "secret"})
        found = await registry.run("leak", {"what": "secret"}, earlier_attempts=1)
        assert content(found) == {"key": "[secret]"}


async def test_another_worker_continues_from_the_checkpoint_of_one_that_was_lost(
    database_url: str, tmp_path: Path
) -> None:
    tool = definition(effect=WireEffect.EFFECT_CLASS_IDEMPOTENT)
    async with running(database_url, tmp_path, worker_options=BRIEF) as registry, attached(registry, tool) as first:
        asked = asyncio.ensure_future(registry.run("charge"))
        call = await first.invocation()
        assert not call.last_checkpoint_json
        made: dict[str, Any] = {"call_id": call.call_id, "lease_epoch": call.lease_epoch, "number": 7}

        async def keep(content_json: bytes) -> bool:
            await first.send(checkpoint=worker_pb2.WorkerCheckpoint(content_json=content_json, **made))
            while not isinstance(receipt := await first.next(), worker_pb2.CheckpointReceipt):
                pass
            assert receipt.number == 7
            return receipt.kept

        for bad in (b"", b"{", b'"\\u0000"', b"[" * 40 + b"]" * 40, b'"' + b"x" * 16_384 + b'"'):
            assert not await keep(bad), bad[:9]
        assert await keep(b'{"at": 1}')
        async with attached(registry, tool, worker="w2") as second:
            found = await invocation(second)
            assert found.last_checkpoint_json == b'{"at":1}'
            assert not await keep(b'{"at": 0}'), "it is not its call any more"
            await answer(second, found)
        assert outcome(await asked) == "SUCCEEDED"
    # Checkpoints of calls that the ledger does not name any more go with their run.
    async with record(database_url) as (database, _):
        part = ErasurePart(store_id=StoreId("acme"), conversation_id=CONVERSATION, run_ids=(RunId("run"),), call_ids=())
        await PostgresErasures(database).erase(part)
        for table in ("checkpoints", "worker_calls"):
            assert await database.fetchval(f"SELECT count(*) FROM tool_registry.{table}") == 0  # noqa: S608


CONVERSATION = ConversationId("conversation")
