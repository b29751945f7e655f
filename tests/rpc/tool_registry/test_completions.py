"""Calls that somebody outside completes: nothing of them runs meanwhile, and they have one end. I5."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import grpc
import pytest

from pawl.tool.v1 import completion_pb2 as pb
from pawl.tool.v1 import execution_pb2
from pawl.tools import (
    Awaited,
    Category,
    CompletionToken,
    EffectClass,
    ReconcileResult,
    Tool,
    ToolContext,
    happened,
    tool,
)
from tests.poll import until
from tests.rpc.tool_registry.registry import PUBLIC_URL, Registry, content, context, outcome, reason, running
from tests.rpc.tool_registry.test_audit import listed, verified

SECRETS = {"acme": {"press": "the-password-of-the-press"}}


class Press:
    """Tools that hand a job to a print shop, which tells later how it ended."""

    def __init__(self) -> None:
        self.tokens: dict[str, CompletionToken] = {}
        self.begun: list[str] = []
        self.holds: dict[str, asyncio.Event] = {}

    def tools(self) -> list[Tool[..., Any]]:
        @tool(name="print", category=Category.SAFE, timeout_seconds=60, result_bytes_max=1000)
        async def order(context: ToolContext) -> Awaited:
            """Have something printed."""
            self.begun.append(context.call_id)
            context.secret("press")
            self.tokens[context.call_id] = await context.completion_token()
            await self._held(context.call_id)
            return Awaited()

        @tool(category=Category.SAFE, timeout_seconds=60)
        def print_in_thread(context: ToolContext) -> Awaited:
            """Have something printed."""
            self.tokens[context.call_id] = context.completion_token()
            return Awaited()

        @tool(category=Category.SAFE, timeout_seconds=60)
        async def print_and_return(context: ToolContext) -> str:
            """Have something printed."""
            self.tokens[context.call_id] = await context.completion_token()
            await self._held(context.call_id)
            return "printed here"

        @tool(category=Category.SAFE)
        async def print_nothing() -> Awaited:
            """Have nothing printed."""
            return Awaited()

        @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
        async def print_twice(context: ToolContext) -> Awaited:
            """Have something printed."""
            await context.completion_token()
            return Awaited()

        @tool(category=Category.SAFE, timeout_seconds=3)
        async def print_soon(context: ToolContext) -> Awaited:
            """Have something printed soon."""
            self.tokens[context.call_id] = await context.completion_token()
            return Awaited()

        @tool(category=Category.SAFE, timeout_seconds=60)
        async def print_with_password(context: ToolContext) -> Awaited:
            """Have something printed by a shop that wants a password."""
            self.tokens[context.call_id] = await context.completion_token()
            context.secret("press")
            await self._held(context.call_id)
            return Awaited()

        return [order, print_in_thread, print_and_return, print_nothing, print_twice, print_soon, print_with_password]

    async def _held(self, call: str) -> None:
        if call in self.holds:
            await self.holds[call].wait()


@pytest.fixture
def press() -> Press:
    return Press()


@pytest.fixture
async def registry(database_url: str, tmp_path: Path, press: Press) -> AsyncIterator[Registry]:
    async with running(database_url, tmp_path, press.tools(), secrets=SECRETS) as registry:
        yield registry


async def run(
    registry: Registry, name: str = "print", *, call: str = "call", **more: Any
) -> execution_pb2.ExecutionResult:
    return await registry.run(name, call=call, may_await_completion=True, **more)


async def complete(
    registry: Registry, token: str, result: Any = "done", *, user: str = "ann", store: str = "acme", **end: Any
) -> bool:
    end = end or {"result_json": result if isinstance(result, bytes) else json.dumps(result).encode()}
    request = pb.CompleteCallRequest(token=token, **end)
    return (await registry.completions[store, user].CompleteCall(request)).duplicate


async def refused(registry: Registry, token: str, *rest: Any, **end: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await complete(registry, token, *rest, **end)
    return reason(caught.value)[1]


async def told(registry: Registry, call: str = "call") -> None:
    """Wait until the run of a call was told that it was completed."""

    async def is_told() -> bool:
        return ("run", call) in registry.awaited.told

    await until(is_told)


@pytest.mark.parametrize("name", ["print", "print_in_thread"])
async def test_a_call_waits_without_its_tool_until_somebody_completes_it(
    registry: Registry, press: Press, name: str
) -> None:
    waiting = await run(registry, name)
    assert outcome(waiting) == "AWAITING_COMPLETION"
    assert 50 < waiting.completion_seconds_left <= 60
    assert registry.executor.running_count == registry.runner.threads_busy == 0
    token = press.tokens["call"]
    assert token.url == f"{PUBLIC_URL}/completions/acme/{token.token}"
    assert len(token.token.removeprefix("cmp_")) >= 43, "256 bits"
    assert not token.token.startswith("-"), "it is no option of a command"
    assert outcome(await run(registry, name)) == "AWAITING_COMPLETION", "asked again it waits still"

    assert not await complete(registry, token.token, {"pages": 3}, user="door")
    await told(registry)
    ended = await run(registry, name)
    assert (outcome(ended), content(ended)) == ("SUCCEEDED", {"pages": 3})


async def test_the_first_end_counts_and_the_same_one_again_is_a_duplicate(registry: Registry, press: Press) -> None:
    await run(registry)
    token = press.tokens["call"].token
    ends: list[Any] = [complete(registry, token, number) for number in range(8)]
    answers = await asyncio.gather(*ends, return_exceptions=True)
    (first,) = [number for number, answer in enumerate(answers) if answer is False]
    late = [reason(answer)[1] for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
    assert late == ["CALL_NOT_PENDING"] * 7
    assert await complete(registry, token, first), "the same again is a duplicate"
    assert await complete(registry, token, f" {first}\n".encode()), "however it is written"
    assert await refused(registry, token, error="It burnt.") == "CALL_NOT_PENDING"
    assert content(await run(registry)) == first


async def test_an_error_is_for_the_model(registry: Registry, press: Press) -> None:
    await run(registry)
    await complete(registry, press.tokens["call"].token, error="There is no paper.")
    ended = await run(registry)
    assert (outcome(ended), content(ended)) == ("FAILED TOOL_ERROR", {"error": "There is no paper."})


async def test_guessed_foreign_and_garbled_tokens_are_all_the_same(registry: Registry, press: Press) -> None:
    await run(registry)
    token = press.tokens["call"].token
    tries = ["", "x", token[:-1], token + "x", token.swapcase(), "\0", "\N{SNOWMAN}" * 50, "x" * 100_000, "%"]
    found = {await refused(registry, each) for each in tries}
    found.add(await refused(registry, token, store="other"))
    assert found == {"COMPLETION_NOT_FOUND"}
    assert outcome(await run(registry)) == "AWAITING_COMPLETION"


async def test_what_the_tool_could_not_return_is_refused_and_changes_nothing(registry: Registry, press: Press) -> None:
    await run(registry)
    token = press.tokens["call"].token
    assert await refused(registry, token, b"{'a': 1}") == "INVALID_JSON"
    assert await refused(registry, token, b'{"a": 1, "a": 2}') == "INVALID_JSON"
    assert await refused(registry, token, b"NaN") == "INVALID_JSON"
    assert await refused(registry, token, b"[" * 900) == "INVALID_JSON"
    assert await refused(registry, token, "x" * 1000) == "TOO_LARGE"
    assert await refused(registry, token, error="x" * 4001) == "INVALID_FIELD"
    assert await refused(registry, token, error="") == "INVALID_FIELD"
    assert outcome(await run(registry)) == "AWAITING_COMPLETION"
    assert not await complete(registry, token)


async def test_the_secrets_of_the_call_are_hidden(registry: Registry, press: Press) -> None:
    await run(registry)
    await complete(registry, press.tokens["call"].token, {"log": f"login {SECRETS['acme']['press']}"})
    assert content(await run(registry)) == {"log": "login [secret]"}


async def test_a_secret_that_is_read_behind_the_token_is_hidden_from_quick_answers_too(
    registry: Registry, press: Press, database_url: str
) -> None:
    press.holds["call"] = asyncio.Event()
    running = asyncio.ensure_future(run(registry, "print_with_password"))
    connection = await asyncpg.connect(database_url)

    async def is_noted() -> bool:
        terms = await connection.fetchval("SELECT completion_terms FROM tool_registry.executions")
        return terms is not None and b"press" in terms

    await until(is_noted)
    await connection.close()
    await complete(registry, press.tokens["call"].token, {"log": f"login {SECRETS['acme']['press']}"})
    press.holds["call"].set()
    assert content(await running) == {"log": "login [secret]"}


async def test_nobody_completes_a_call_whose_time_is_over(registry: Registry, press: Press) -> None:
    assert outcome(await run(registry, "print_soon")) == "AWAITING_COMPLETION"

    async def is_over() -> bool:
        return outcome(await run(registry, "print_soon")) != "AWAITING_COMPLETION"

    await until(is_over)
    ended = await run(registry, "print_soon")
    assert outcome(ended) == "FAILED NOT_COMPLETED"
    assert "nobody completed" in content(ended)["error"]
    assert await refused(registry, press.tokens["call"].token) == "DEADLINE_PASSED"


async def test_time_is_over_also_before_anybody_has_looked(registry: Registry, press: Press, database_url: str) -> None:
    await run(registry)
    connection = await asyncpg.connect(database_url)
    await connection.execute("UPDATE tool_registry.executions SET awaits_until = now()")
    await connection.close()
    assert await refused(registry, press.tokens["call"].token) == "DEADLINE_PASSED"
    assert outcome(await run(registry)) == "FAILED NOT_COMPLETED"


async def test_nobody_completes_a_call_that_was_cancelled(registry: Registry, press: Press) -> None:
    await run(registry)
    cancelled = await registry.cancel()
    assert (cancelled.stopped, outcome(cancelled.result)) == (True, "CANCELLED CANCELLED")
    assert await refused(registry, press.tokens["call"].token) == "CALL_NOT_PENDING"
    assert outcome(await run(registry)) == "CANCELLED CANCELLED"


async def test_nobody_completes_a_call_whose_run_is_being_stopped(registry: Registry, press: Press) -> None:
    await run(registry)
    registry.awaited.stopped.add("run")
    assert await refused(registry, press.tokens["call"].token) == "CALL_NOT_PENDING"
    assert outcome(await run(registry)) == "AWAITING_COMPLETION"


async def test_a_completion_that_comes_before_the_tool_has_ended_counts(registry: Registry, press: Press) -> None:
    for name, late in (("print", []), ("print_and_return", ["LATE"])):
        press.holds[name] = asyncio.Event()
        running = asyncio.ensure_future(run(registry, name, call=name))

        async def has_token(name: str = name) -> bool:
            return name in press.tokens

        await until(has_token)
        assert not await complete(registry, press.tokens[name].token, "very fast")
        press.holds[name].set()
        ended = await running
        assert (outcome(ended), content(ended)) == ("SUCCEEDED", "very fast")
        await told(registry, name)
        ends = [entry.reason for entry in await listed(registry, call_id=name) if entry.result_sha256]
        assert sorted(ends) == sorted(["COMPLETED", *late])


async def test_a_result_of_the_tool_itself_ends_the_call_for_good(registry: Registry, press: Press) -> None:
    assert content(await run(registry, "print_and_return")) == "printed here"
    assert await refused(registry, press.tokens["call"].token) == "CALL_NOT_PENDING"


async def test_who_cannot_wait_is_told_so(registry: Registry, press: Press) -> None:
    no_token = await run(registry, "print_nothing", call="a")
    assert (outcome(no_token), "taken no token" in content(no_token)["error"]) == ("FAILED TOOL_ERROR", True)
    idempotent = await run(registry, "print_twice", call="b")
    assert (outcome(idempotent), "at most once" in content(idempotent)["error"]) == ("FAILED TOOL_ERROR", True)
    older = await registry.run("print", call="c")
    assert (outcome(older), "older version" in content(older)["error"]) == ("FAILED TOOL_ERROR", True)


async def test_the_end_is_in_the_audit_chain_once_with_whoever_brought_it(registry: Registry, press: Press) -> None:
    for call in ("done", "cancelled"):
        await run(registry, call=call)
    await complete(registry, press.tokens["done"].token, user="door")
    await registry.cancel("cancelled")

    async def are_there() -> bool:
        return len([entry for entry in await listed(registry) if entry.result_sha256]) == 2

    await until(are_there)
    ends = {entry.call_id: entry for entry in await listed(registry) if entry.result_sha256}
    assert (ends["done"].verdict, ends["done"].reason, ends["done"].by_user_id) == ("SUCCEEDED", "COMPLETED", "door")
    assert (ends["cancelled"].verdict, ends["cancelled"].by_user_id) == ("CANCELLED", "")
    assert not (await verified(registry)).HasField("problem")


async def test_the_run_is_told_later_if_the_ledger_is_away(registry: Registry, press: Press, database_url: str) -> None:
    await run(registry)
    token = press.tokens["call"].token
    registry.awaited.away = True
    assert await refused(registry, token) == "DEPENDENCY_UNAVAILABLE", "nobody knows whether it was stopped"
    registry.awaited.away = False
    await complete(registry, token)
    await told(registry)
    connection = await asyncpg.connect(database_url)
    registry.awaited.away = True
    registry.awaited.told.clear()
    await connection.execute("UPDATE tool_registry.executions SET untold_at = now()")
    await connection.close()
    registry.awaited.away = False
    await told(registry)
    assert len([entry for entry in await listed(registry) if entry.result_sha256]) == 1, "written once"


async def test_a_wait_survives_the_end_of_its_process(database_url: str, tmp_path: Path, press: Press) -> None:
    async with running(database_url, tmp_path, press.tools(), secrets=SECRETS, name="a") as first:
        await run(first)
    async with running(database_url, tmp_path, press.tools(), secrets=SECRETS, name="b") as second:
        assert outcome(await run(second)) == "AWAITING_COMPLETION", "no outcome is unknown"
        await complete(second, press.tokens["call"].token)
        assert outcome(await run(second)) == "SUCCEEDED"
    assert press.begun == ["call"]


async def test_a_tool_that_is_asked_what_became_of_its_call_may_say_that_it_waits(
    database_url: str, tmp_path: Path
) -> None:
    tokens: list[str] = []

    async def reconcile(context: ToolContext) -> ReconcileResult:
        return happened(Awaited())

    @tool(category=Category.SAFE, effect=EffectClass.RECONCILABLE, reconcile=reconcile, timeout_seconds=60)
    async def order(context: ToolContext) -> Awaited:
        """Have something printed."""
        tokens.append((await context.completion_token()).token)
        await asyncio.Event().wait()
        return Awaited()

    async with running(database_url, tmp_path, [order], name="a", drain_seconds=0.1) as first:
        lost = asyncio.ensure_future(run(first, "order"))

        async def has_token() -> bool:
            return bool(tokens)

        await until(has_token)
    await asyncio.gather(lost, return_exceptions=True)
    async with running(database_url, tmp_path, [order], name="b") as second:
        assert outcome(await run(second, "order", earlier_attempts=1)) == "AWAITING_COMPLETION"
        await complete(second, tokens[0], "printed")
        assert content(await run(second, "order", earlier_attempts=1)) == "printed"


async def test_a_tool_that_says_that_it_waits_without_a_token_has_an_end_all_the_same(
    database_url: str, tmp_path: Path
) -> None:
    """Nobody could complete it: the outcome is unknown, for good, in every process."""
    begun = asyncio.Event()

    async def reconcile(context: ToolContext) -> ReconcileResult:
        return happened(Awaited())

    @tool(category=Category.SAFE, effect=EffectClass.RECONCILABLE, reconcile=reconcile, timeout_seconds=60)
    async def order(context: ToolContext) -> Awaited:
        """Have something printed."""
        begun.set()
        await asyncio.Event().wait()
        return Awaited()

    async with running(database_url, tmp_path, [order], name="a", drain_seconds=0.1) as first:
        lost = asyncio.ensure_future(run(first, "order"))
        await begun.wait()
    await asyncio.gather(lost, return_exceptions=True)
    async with (
        running(database_url, tmp_path, [order], name="b") as second,
        running(database_url, tmp_path, [order], name="c") as third,
    ):
        for registry in (second, third):
            async with asyncio.timeout(60):
                assert outcome(await run(registry, "order", earlier_attempts=1)) == "UNKNOWN OUTCOME_UNKNOWN"
        assert [entry.verdict for entry in await listed(second) if entry.result_sha256] == ["UNKNOWN"]


async def test_no_viewer_and_no_worker_completes_calls(registry: Registry, press: Press) -> None:
    await run(registry)
    for user in ("vic", "machine"):
        assert await refused(registry, press.tokens["call"].token, user=user) == "PERMISSION_DENIED"


async def test_nothing_that_is_kept_gives_the_token_away(registry: Registry, press: Press, database_url: str) -> None:
    await run(registry, who=context())
    token = press.tokens["call"].token
    connection = await asyncpg.connect(database_url)
    rows = await connection.fetch("SELECT e::text FROM tool_registry.executions e")
    await connection.close()
    assert token.encode().hex() not in str(rows)
    assert token not in str(rows) + repr(press.tokens["call"])
