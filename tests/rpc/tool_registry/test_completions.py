"""Calls that wait for a completion from outside or for an answer of their user (I5)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.chassis.process.clock import SystemClock
from pawl.chassis.rpc.status import from_rpc_error
from pawl.server.db.database import Database
from pawl.tool.v1 import completion_pb2, execution_pb2
from pawl.tool_registry.execution import completions
from pawl.tool_registry.execution.executor import ExecutorOptions
from pawl.tools import Awaited, Category, CompletionToken, EffectClass, QuestionDeclined, Tool, ToolContext, tool
from tests.poll import until
from tests.rpc.tool_registry.registry import PUBLIC_URL, Registry, content, error_of, outcome, refusal, running
from tests.rpc.tool_registry.test_audit import listed, verified
from tests.rpc.tool_registry.world import execute

SECRETS = {"acme": {"press": "the-password-of-the-press"}}


@dataclass
class Press:
    tokens: dict[str, CompletionToken] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)

    def tools(self) -> list[Tool[..., Any]]:
        @tool(name="print", category=Category.SAFE, timeout_seconds=60, result_bytes_max=1000)
        async def order(context: ToolContext) -> Awaited:
            """Print something."""
            self.started.append(context.call_id)
            context.secret("press")
            self.tokens[context.call_id] = await context.completion_token()
            return Awaited()

        @tool(category=Category.SAFE, timeout_seconds=60)
        def print_in_thread(context: ToolContext) -> Awaited:
            """Print something."""
            self.tokens[context.call_id] = context.completion_token()
            return Awaited()

        @tool(category=Category.SAFE, timeout_seconds=60)
        async def print_and_return(context: ToolContext) -> str:
            """Print something."""
            self.tokens[context.call_id] = await context.completion_token()
            return "printed here"

        @tool(category=Category.SAFE)
        async def print_nothing() -> Awaited:
            """Print nothing."""
            return Awaited()

        @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
        async def print_twice(context: ToolContext) -> Awaited:
            """Print something."""
            await context.completion_token()
            return Awaited()

        return [order, print_in_thread, print_and_return, print_nothing, print_twice]


@pytest.fixture
def press() -> Press:
    return Press()


@pytest.fixture
async def registry(
    database_url: str, tmp_path: Path, press: Press, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Registry]:
    monkeypatch.setattr(completions, "_POLL_SECONDS", 0.05)
    async with running(database_url, tmp_path, press.tools(), secrets=SECRETS) as registry:
        yield registry


async def run(
    registry: Registry, name: str = "print", *, call: str = "call", **more: Any
) -> execution_pb2.ExecutionResult:
    return await registry.run(name, call=call, **more)


async def complete(
    registry: Registry, token: str, result: Any = "done", *, user: str = "ann", store: str = "acme", **end: Any
) -> bool:
    end = end or {"result_json": result if isinstance(result, bytes) else json.dumps(result).encode()}
    return (
        await registry.completions[store, user].CompleteCall(completion_pb2.CompleteCallRequest(token=token, **end))
    ).duplicate


def refused(registry: Registry, token: str, *rest: Any, **end: Any) -> Awaitable[str]:
    return refusal(complete(registry, token, *rest, **end))


async def until_notified(registry: Registry, call: str = "call") -> None:
    """Wait until the ledger was notified that the call is complete."""

    await until(lambda: ("run", call) in registry.ledger.completed_calls)


@pytest.mark.parametrize("name", ["print", "print_in_thread"])
async def test_a_call_waits_without_its_tool_until_it_is_completed(registry: Registry, press: Press, name: str) -> None:
    waiting = await run(registry, name)
    assert outcome(waiting) == "AWAITING_COMPLETION"
    assert 50 < waiting.completion_seconds_left <= 60
    assert registry.executor.running_count == registry.runner.threads_busy == 0
    token = press.tokens["call"]
    assert token.url == f"{PUBLIC_URL}/completions/acme/{token.token}"
    assert len(token.token.removeprefix("cmp_")) >= 43, "256 bits"
    assert not token.token.startswith("-"), "it is not a command-line option"
    assert outcome(await run(registry, name)) == "AWAITING_COMPLETION", "a repeated call is still waiting"

    assert not await complete(registry, token.token, {"pages": 3}, user="door")
    await until_notified(registry)
    ended = await run(registry, name)
    assert (outcome(ended), content(ended)) == ("SUCCEEDED", {"pages": 3})


async def test_only_the_first_completion_counts(registry: Registry, press: Press) -> None:
    await run(registry)
    token = press.tokens["call"].token
    answers = await asyncio.gather(*[complete(registry, token, number) for number in range(8)], return_exceptions=True)
    (first,) = [number for number, answer in enumerate(answers) if answer is False]
    late = [from_rpc_error(answer).reason for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
    assert late == ["CALL_NOT_PENDING"] * 7
    assert await complete(registry, token, first), "a repetition is a duplicate"
    assert await complete(registry, token, f" {first}\n".encode()), "in any formatting"
    assert await refused(registry, token, error="It burnt.") == "CALL_NOT_PENDING"
    assert content(await run(registry)) == first


async def test_tool_that_cannot_wait_gets_an_error(registry: Registry, press: Press) -> None:
    for name, said in (("print_nothing", "not read context.completion_token"), ("print_twice", "only AT_MOST_ONCE")):
        assert said in error_of(await run(registry, name, call=name))


async def test_completion_needs_the_token_and_a_valid_result(
    registry: Registry, press: Press, database_url: str
) -> None:
    await run(registry)
    token = press.tokens["call"].token
    tries = ["", "x", token[:-1], token + "x", token.swapcase(), "\0", "\N{SNOWMAN}" * 50, "x" * 100_000, "%"]
    found = {await refused(registry, each) for each in tries}
    found.add(await refused(registry, token, store="other"))
    assert found == {"COMPLETION_NOT_FOUND"}
    for raw in (b"{'a': 1}", b'{"a": 1, "a": 2}', b"NaN", b"[" * 900):
        assert await refused(registry, token, raw) == "INVALID_JSON", raw[:20]
    assert await refused(registry, token, "x" * 1000) == "TOO_LARGE"
    for error in ("x" * 4001, ""):
        assert await refused(registry, token, error=error) == "INVALID_FIELD"
    registry.ledger.stopped.add("run")
    assert await refused(registry, token) == "CALL_NOT_PENDING", "its run is being stopped"
    registry.ledger.stopped.clear()
    assert outcome(await run(registry)) == "AWAITING_COMPLETION"
    async with Database(database_url, application_name="test") as database:
        rows = str(await database.fetch("SELECT e::text FROM tool_registry.executions e"))
    assert token not in rows + repr(press.tokens["call"]), "stored data does not reveal the token"
    assert token.encode().hex() not in rows
    await complete(registry, token, error="There is no paper.")
    assert error_of(await run(registry)) == "There is no paper."


async def test_call_secrets_are_redacted_from_its_completion(
    registry: Registry, press: Press, database_url: str
) -> None:
    said = {"log": f"login {SECRETS['acme']['press']}"}
    await run(registry, call="slow")
    await complete(registry, press.tokens["slow"].token, said)
    assert content(await run(registry, call="slow")) == {"log": "login [secret]"}


async def test_ended_call_cannot_be_completed(registry: Registry, press: Press, database_url: str) -> None:
    await run(registry)
    await execute(database_url, "UPDATE tool_registry.executions SET awaits_until = now()")
    assert await refused(registry, press.tokens["call"].token) == "DEADLINE_PASSED"
    assert outcome(await run(registry)) == "FAILED NOT_COMPLETED"
    await run(registry, call="cancelled")
    cancelled = await registry.cancel("cancelled")
    assert (cancelled.stopped, outcome(cancelled.result)) == (True, "CANCELLED CANCELLED")
    assert outcome(await run(registry, call="cancelled")) == "CANCELLED CANCELLED"
    assert content(await run(registry, "print_and_return", call="returned")) == "printed here"
    for call in ("cancelled", "returned"):
        assert await refused(registry, press.tokens[call].token) == "CALL_NOT_PENDING"


async def test_completion_is_delivered_and_audited_once_after_an_outage(
    registry: Registry, press: Press, database_url: str
) -> None:
    await run(registry)
    token = press.tokens["call"].token
    registry.ledger.away = True
    assert await refused(registry, token) == "DEPENDENCY_UNAVAILABLE", "its run may have been stopped"
    registry.ledger.away = False
    await complete(registry, token, user="door")
    await until_notified(registry)
    registry.ledger.completed_calls.clear()
    await execute(database_url, "UPDATE tool_registry.executions SET untold_at = now()")
    await until_notified(registry)
    (entry,) = [entry for entry in await listed(registry) if entry.result_sha256]
    assert (entry.verdict, entry.reason, entry.by_user_id) == ("SUCCEEDED", "COMPLETED", "door")
    assert not (await verified(registry)).HasField("problem")


EFFECTS = [EffectClass.READ_ONLY, EffectClass.IDEMPOTENT, EffectClass.AT_MOST_ONCE]


def answers(*given: str | None) -> list[execution_pb2.Answer]:
    """Return answers to the questions of the tools below; None declines a question."""
    asked = ("Which colour?", "Which size?")
    return [
        execution_pb2.Answer(question=question, answer=answer or "", declined=answer is None)
        for question, answer in zip(asked, given, strict=False)
    ]


@dataclass
class Shop:
    started: int = 0
    orders: list[str] = field(default_factory=list)

    def tools(self) -> list[Tool[..., Any]]:
        def order(effect: EffectClass) -> Tool[..., Any]:
            @tool(name=f"order_{effect.lower()}", category=Category.SAFE, effect=effect, timeout_seconds=5)
            async def order(context: ToolContext) -> str:
                """Order."""
                self.started += 1
                colour = await context.ask("Which colour?", why="It comes in two.", options=["red", "blue"])
                try:
                    size = await context.ask("Which size?")
                except QuestionDeclined:
                    size = "any"
                self.orders.append(f"{colour} {size}")
                return self.orders[-1]

            return order

        @tool(category=Category.SAFE)
        def order_in_thread(context: ToolContext) -> str:
            """Order."""
            coroutine = context.ask("Which colour?")
            try:
                coroutine.send(None)
            finally:
                coroutine.close()
            return "ordered"

        return [*(replace(order(effect), on_tool_loop=True) for effect in EFFECTS), order_in_thread]


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture
async def asking(database_url: str, tmp_path: Path, shop: Shop) -> AsyncIterator[Registry]:
    async with running(database_url, tmp_path, shop.tools()) as asking:
        yield asking


@pytest.mark.parametrize("effect", EFFECTS)
async def test_question_ends_the_stream_and_its_answer_resumes_the_call(
    asking: Registry, shop: Shop, effect: EffectClass
) -> None:
    name = f"order_{effect.lower()}"
    first = await asking.run(name)
    assert outcome(first) == "INPUT_REQUIRED"
    assert (first.question.question, list(first.question.options)) == ("Which colour?", ["red", "blue"])
    if effect is EffectClass.IDEMPOTENT:
        assert outcome(await asking.run(name, call="declined", answers=answers(None))) == "FAILED TOOL_ERROR"
        assert content(await asking.run(name, call="declined", answers=answers("red", None))) == "red any"
        assert "only async tools" in content(await asking.run("order_in_thread", call="thread"))["error"]
        shop.started, shop.orders = 1, []
    second = await asking.run(name, answers=answers("red"))
    assert (outcome(second), second.question.question) == ("INPUT_REQUIRED", "Which size?")
    third = await asking.run(name, answers=answers("red", "large"))
    assert (outcome(third), content(third), shop.orders) == ("SUCCEEDED", "red large", ["red large"])
    assert shop.started == (1 if effect is EffectClass.AT_MOST_ONCE else 3)


class MovedClock(SystemClock):
    ahead_seconds = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_seconds


async def test_timeout_pauses_while_a_question_is_open(database_url: str, tmp_path: Path, shop: Shop) -> None:
    clock, options = MovedClock(), ExecutorOptions(lease_seconds=60.0)
    async with running(database_url, tmp_path, shop.tools(), clock=clock, options=options) as asking:
        await asking.run("order_at_most_once")
        clock.ahead_seconds = 10.0
        await asking.run("order_at_most_once", answers=answers("red"))
        assert outcome(await asking.run("order_at_most_once", answers=answers("red", "large"))) == "SUCCEEDED"


async def test_answer_reaches_the_replica_that_runs_the_call(
    asking: Registry, shop: Shop, database_url: str, tmp_path: Path
) -> None:
    other_shop = Shop()
    async with running(database_url, tmp_path, other_shop.tools(), name="b") as other:
        await asking.run("order_at_most_once")
        assert (await other.run("order_at_most_once")).question.question == "Which colour?"
        assert (await other.run("order_at_most_once", answers=answers("red"))).question.question == "Which size?"
        assert content(await other.run("order_at_most_once", answers=answers("red", "large"))) == "red large"
    assert (shop.started, other_shop.started) == (1, 0)


async def test_only_an_at_most_once_call_has_an_unknown_outcome_after_a_crash(
    database_url: str, tmp_path: Path
) -> None:
    options = ExecutorOptions(lease_seconds=2.0, grace_seconds=0.0)
    async with running(database_url, tmp_path, Shop().tools(), options=options) as gone:
        await gone.run("order_at_most_once")
        await gone.run("order_idempotent", call="again")
    async with running(database_url, tmp_path, Shop().tools(), name="b", options=options) as heir:
        assert outcome(await heir.run("order_at_most_once", answers=answers("red"))) == "UNKNOWN OUTCOME_UNKNOWN"
        assert content(await heir.run("order_idempotent", call="again", answers=answers("red", "small"))) == "red small"
