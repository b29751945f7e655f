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
from pawl.tool_registry.app.execution.ports import Writer
from pawl.tool_registry.app.workers.workers import WorkerOptions
from pawl.tools import Category, EffectClass, Superseded, Tool, ToolContext, ToolError, tool
from pawl.worker import CallContext, Worker
from tests.poll import until
from tests.rpc.tool_registry.attached import EffectClass as WireEffect
from tests.rpc.tool_registry.attached import attached, definition
from tests.rpc.tool_registry.registry import content, context, outcome, running
from tests.rpc.tool_registry.test_process import pay, process
from tests.rpc.tool_registry.test_worker_library import KEY, OPTIONS, working
from tests.rpc.tool_registry.test_worker_loss import answer, invocation

BRIEF = WorkerOptions(lease_seconds=4.0, poll_seconds=0.1)

STEPS = '''
import asyncio
import time
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

def _sync_steps(path: str, context: ToolContext) -> int:
    first = context.last_checkpoint or 0
    for number in range(first, 6):
        step(path, number)
        context.checkpoint(number + 1)
        while number == 2:
            time.sleep(0.02)
    return context.attempt

@tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT, timeout_seconds=60)
def count_in_thread(path: str, context: ToolContext) -> int:
    """Count, in a thread."""
    return _sync_steps(path, context)

@tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT, timeout_seconds=60, process=ProcessLimits())
def count_in_process(path: str, context: ToolContext) -> int:
    """Count, in the thread of a process of its own."""
    return _sync_steps(path, context)
'''


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("count_here", signal.SIGKILL),
        ("count_here", signal.SIGTERM),
        ("count_apart", signal.SIGKILL),
        ("count_in_thread", signal.SIGKILL),
        ("count_in_process", signal.SIGKILL),
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
        asked = asyncio.ensure_future(pay(address, steps, tool_name=name))
        await until(is_at_the_third)
        async with Database(database_url, application_name="test") as database:

            async def is_kept() -> bool:
                found = await database.fetchval("SELECT content FROM tool_registry.checkpoints")
                return found in {b'{"next":3}', b"3"}

            await until(is_kept)
        first.send_signal(end)
        with pytest.raises(grpc.aio.AioRpcError):
            await asked
    async with process(database_url, tmp_path, "b") as (_, address):
        result = await pay(address, steps, tool_name=name, earlier_attempts=1)
    assert content(result) == 2
    assert steps.read_text().split() == ["0", "1", "2", "3", "4", "5"], "each step once"


class Gate:
    """A tool that keeps what it is told to, when it is told to."""

    def __init__(self) -> None:
        self.given: list[Any] = []
        self.values: dict[int, asyncio.Queue[Any]] = {}
        self.raised: list[Exception] = []

    def tool(self) -> Tool[..., Any]:
        @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT, timeout_seconds=60, name="go_on")
        async def go_on(context: ToolContext) -> str:
            """Go on."""
            self.given.append(context.last_checkpoint)
            values = self.values[context.attempt] = asyncio.Queue()
            while True:
                value = await values.get()
                try:
                    if value is None:
                        return f"attempt {context.attempt}"
                    await context.checkpoint(value)
                except Exception as error:
                    self.raised.append(error)
                    raise
                finally:
                    values.task_done()

        return go_on

    async def keep(self, attempt: int, value: Any) -> None:
        """Have an attempt keep something, once it runs; returns when that is done."""

        async def runs() -> bool:
            return attempt in self.values

        await until(runs)
        self.values[attempt].put_nowait(value)
        await self.values[attempt].join()


async def test_of_two_attempts_only_the_newest_writes(database_url: str, tmp_path: Path) -> None:
    gate = Gate()
    (tmp_path / "b").mkdir()
    async with (
        running(database_url, tmp_path, [gate.tool()]) as one,
        running(database_url, tmp_path / "b", [gate.tool()]) as other,
    ):
        old = asyncio.ensure_future(one.run("go_on"))
        await gate.keep(1, "old")
        new = asyncio.ensure_future(other.run("go_on", earlier_attempts=1))

        async def is_begun() -> bool:
            return 2 in gate.values

        await until(is_begun)
        await gate.keep(1, "older")
        assert outcome(await old) == "FAILED TOOL_ERROR", "it has no say any more, and stops"
        await gate.keep(2, "new")
        await gate.keep(2, None)
        assert content(await new) == "attempt 2"
    assert gate.given == [None, "old"]
    assert [type(error) for error in gate.raised] == [Superseded]
    async with Database(database_url, application_name="test") as database:
        assert await database.fetchval("SELECT content FROM tool_registry.checkpoints") == b'"new"'


@pytest.mark.parametrize(
    ("value", "said"), [("x" * 16_384, "over the limit of 16384"), (float("nan"), "must be JSON"), (object(), "JSON")]
)
async def test_what_cannot_be_kept_is_refused(database_url: str, tmp_path: Path, value: Any, said: str) -> None:
    gate = Gate()
    async with running(database_url, tmp_path, [gate.tool()]) as registry:
        asked = asyncio.ensure_future(registry.run("go_on"))
        await gate.keep(1, value)
        assert said in content(await asked)["error"]
    assert isinstance(gate.raised[0], ToolError)


async def test_a_secret_is_not_kept(database_url: str, tmp_path: Path) -> None:
    @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
    async def leak(context: ToolContext) -> None:
        """Keep a secret."""
        await context.checkpoint({"key": context.secret("api_key")})

    async with running(database_url, tmp_path, [leak], secrets={"acme": {"api_key": "hunter2"}}) as registry:
        assert outcome(await registry.run("leak")) == "SUCCEEDED"
    async with Database(database_url, application_name="test") as database:
        assert await database.fetchval("SELECT content FROM tool_registry.checkpoints") == b'{"key":"[secret]"}'


async def test_what_is_too_large_without_its_secrets_is_refused(database_url: str, tmp_path: Path) -> None:
    """It could be kept, and never be read again: the call could not be begun any more."""

    @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
    async def leak(context: ToolContext) -> Any:
        """Keep a short secret many times."""
        if context.attempt == 1:
            await context.checkpoint(context.secret("pin") * 4000)
        return context.last_checkpoint

    async with running(database_url, tmp_path, [leak], secrets={"acme": {"pin": "1234"}}) as registry:
        assert "over the limit" in content(await registry.run("leak"))["error"]
        assert content(await registry.run("leak", earlier_attempts=1)) is None


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


async def test_a_first_attempt_that_was_given_up_before_its_run_asked_is_in_nobodys_way(database_url: str) -> None:
    """As a read that was begun with its check, in a process that died."""
    async with record(database_url) as (_, checkpoints):
        assert await checkpoints.keep(writer("a"), b"1", is_first=True)
        assert await checkpoints.keep(writer("b"), b"2", is_first=True)
        assert not await checkpoints.keep(writer("a"), b"3", is_first=False)


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


async def test_checkpoints_of_calls_that_the_ledger_does_not_name_any_more_go_with_their_run(
    database_url: str, tmp_path: Path
) -> None:
    """Those of the old iterations of a job, however they came about."""
    gate, tool = Gate(), definition(effect=WireEffect.EFFECT_CLASS_IDEMPOTENT)
    async with running(database_url, tmp_path, [gate.tool()], worker_options=BRIEF) as registry:
        here = asyncio.ensure_future(registry.run("go_on", call="here", who=context(run="job")))
        await gate.keep(1, "a name")
        await gate.keep(1, None)
        await here
        async with attached(registry, tool) as worker:
            there = asyncio.ensure_future(registry.run("charge", call="there", who=context(run="job")))
            call = await worker.invocation()
            await worker.send(
                checkpoint=worker_pb2.WorkerCheckpoint(
                    call_id=call.call_id, lease_epoch=call.lease_epoch, number=1, content_json=b'"a name"'
                )
            )
            await worker.next()
            await answer(worker, call)
            await there
    async with record(database_url) as (database, checkpoints):
        assert await checkpoints.take(writer("again", attempt=2)) is None, "a call of another run"
        conversation, job = ConversationId("conversation"), RunId("job")
        part = ErasurePart(store_id=StoreId("acme"), conversation_id=conversation, run_ids=(job,), call_ids=())
        await PostgresErasures(database).erase(part)
        assert [row["call_id"] for row in await database.fetch("SELECT call_id FROM tool_registry.checkpoints")] == [
            "c1"
        ]
        assert await database.fetchval("SELECT count(*) FROM tool_registry.worker_calls") == 0


async def test_another_worker_goes_on_from_the_checkpoint_of_one_that_was_lost(
    database_url: str, tmp_path: Path
) -> None:
    tool = definition(effect=WireEffect.EFFECT_CLASS_IDEMPOTENT)
    async with running(database_url, tmp_path, worker_options=BRIEF) as registry, attached(registry, tool) as first:
        asked = asyncio.ensure_future(registry.run("charge"))
        call = await first.invocation()
        assert not call.last_checkpoint_json
        kept = worker_pb2.WorkerCheckpoint(
            call_id=call.call_id, lease_epoch=call.lease_epoch, number=7, content_json=b'{"at": 1}'
        )
        await first.send(checkpoint=kept)
        receipt = await first.next()
        assert (receipt.number, receipt.kept) == (7, True)
        async with attached(registry, tool, worker="w2") as second:
            again: asyncio.Future[Any] = asyncio.ensure_future(invocation(second))
            found = await again
            assert found.last_checkpoint_json == b'{"at":1}'
            kept.content_json = b'{"at": 0}'
            await first.send(checkpoint=kept)
            while not isinstance(receipt := await first.next(), worker_pb2.CheckpointReceipt):
                pass
            assert not receipt.kept, "it is not its call any more"
            await answer(second, found)
        assert outcome(await asked) == "SUCCEEDED"


@pytest.mark.parametrize("value", [b"", b"{", b'"\\u0000"', b"[" * 40 + b"]" * 40, b'"' + b"x" * 16_384 + b'"'])
async def test_what_a_worker_cannot_have_kept_is_its_own_call_alone(
    database_url: str, tmp_path: Path, value: bytes
) -> None:
    tool = definition(effect=WireEffect.EFFECT_CLASS_IDEMPOTENT)
    async with running(database_url, tmp_path, worker_options=BRIEF) as registry, attached(registry, tool) as worker:
        asked = asyncio.ensure_future(registry.run("charge"))
        call = await worker.invocation()
        made: dict[str, Any] = {"call_id": call.call_id, "lease_epoch": call.lease_epoch, "number": 7}
        await worker.send(checkpoint=worker_pb2.WorkerCheckpoint(content_json=value, **made))
        receipt = await worker.next()
        assert (receipt.number, receipt.kept) == (7, False)
        await answer(worker, call)
        assert outcome(await asked) == "SUCCEEDED"


async def test_functions_of_the_worker_library_have_checkpoints(database_url: str, tmp_path: Path) -> None:
    given: list[Any] = []

    def made(name: str, address: str) -> Worker:
        worker = Worker(address, name="billing", api_key=KEY)

        @worker.tool(category="SAFE", effect="IDEMPOTENT", timeout_seconds=60)
        async def build(context: CallContext) -> str:
            """Build."""
            given.append(context.last_checkpoint)
            await context.checkpoint({"of": name})
            if name == "lost":
                await asyncio.Event().wait()
            return name

        @worker.tool(category="SAFE", effect="READ_ONLY", timeout_seconds=60)
        def measure(context: CallContext) -> Any:
            """Measure, in a thread."""
            context.checkpoint(1)
            context.checkpoint("x" * 20_000)

        return worker

    async with running(database_url, tmp_path, worker_options=OPTIONS) as registry:
        lost = made("lost", registry.address)
        task = asyncio.create_task(lost.run())

        async def is_there() -> bool:
            try:
                await registry.check("build")
            except grpc.aio.AioRpcError:
                return False
            return (await registry.check("build")).tool_version == 1

        await until(is_there)
        asked = asyncio.ensure_future(registry.run("build"))

        async def is_kept() -> bool:
            async with Database(database_url, application_name="test") as database:
                return bool(await database.fetchval("SELECT content FROM tool_registry.checkpoints"))

        await until(is_kept)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with working(made("next", registry.address), registry, "measure"):
            assert content(await asked) == "next"
            too_large = await registry.run("measure", call="other")
            assert "over the 16384 that the registry keeps" in content(too_large)["error"]
    assert given == [None, {"of": "lost"}]
