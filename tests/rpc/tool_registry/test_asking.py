"""Tools that ask their user a question."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pawl.chassis.process.clock import SystemClock
from pawl.tool.v1 import execution_pb2
from pawl.tool_registry.execution.executor import ExecutorOptions
from pawl.tools import QuestionDeclined, Tool, ToolContext, tool
from pawl.values import Category, EffectClass
from tests.rpc.tool_registry.registry import Registry, content, outcome, running

EFFECTS = [EffectClass.READ_ONLY, EffectClass.IDEMPOTENT, EffectClass.AT_MOST_ONCE]


def answers(*given: str | None) -> list[execution_pb2.Answer]:
    """Return answers to the questions of the tools below; None declines a question."""
    asked = ("Which colour?", "Which size?")
    return [
        execution_pb2.Answer(question=question, answer=answer or "", declined=answer is None)
        for question, answer in zip(asked, given, strict=False)
    ]


class Shop:
    def __init__(self) -> None:
        self.started = 0
        self.orders: list[str] = []

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
async def registry(database_url: str, tmp_path: Path, shop: Shop) -> AsyncIterator[Registry]:
    async with running(database_url, tmp_path, shop.tools()) as registry:
        yield registry


@pytest.mark.parametrize("effect", EFFECTS)
async def test_question_ends_the_stream_and_its_answer_resumes_the_call(
    registry: Registry, shop: Shop, effect: EffectClass
) -> None:
    name = f"order_{effect.lower()}"
    first = await registry.run(name)
    assert outcome(first) == "INPUT_REQUIRED"
    assert (first.question.question, list(first.question.options)) == ("Which colour?", ["red", "blue"])
    if effect is EffectClass.IDEMPOTENT:
        assert outcome(await registry.run(name, call="declined", answers=answers(None))) == "FAILED TOOL_ERROR"
        assert content(await registry.run(name, call="declined", answers=answers("red", None))) == "red any"
        assert "only async tools" in content(await registry.run("order_in_thread", call="thread"))["error"]
        shop.started, shop.orders = 1, []
    second = await registry.run(name, answers=answers("red"))
    assert (outcome(second), second.question.question) == ("INPUT_REQUIRED", "Which size?")
    third = await registry.run(name, answers=answers("red", "large"))
    assert (outcome(third), content(third)) == ("SUCCEEDED", "red large")
    assert shop.orders == ["red large"]
    assert shop.started == (1 if effect is EffectClass.AT_MOST_ONCE else 3)


class MovedClock(SystemClock):
    ahead_seconds = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_seconds


async def test_timeout_pauses_while_a_question_is_open(database_url: str, tmp_path: Path, shop: Shop) -> None:
    clock, options = MovedClock(), ExecutorOptions(lease_seconds=60.0)
    async with running(database_url, tmp_path, shop.tools(), clock=clock, options=options) as registry:
        await registry.run("order_at_most_once")
        clock.ahead_seconds = 10.0
        await registry.run("order_at_most_once", answers=answers("red"))
        assert outcome(await registry.run("order_at_most_once", answers=answers("red", "large"))) == "SUCCEEDED"


async def test_answer_reaches_the_replica_that_runs_the_call(
    registry: Registry, shop: Shop, database_url: str, tmp_path: Path
) -> None:
    other_shop = Shop()
    async with running(database_url, tmp_path, other_shop.tools(), name="b") as other:
        await registry.run("order_at_most_once")
        assert (await other.run("order_at_most_once")).question.question == "Which colour?"
        second = await other.run("order_at_most_once", answers=answers("red"))
        assert second.question.question == "Which size?"
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
        done = await heir.run("order_idempotent", call="again", answers=answers("red", "small"))
        assert content(done) == "red small"
