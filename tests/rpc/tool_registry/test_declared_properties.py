"""TOOL-2, TOOL-6: what a definition declares is enforced. One group of tests for each property."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.tool.v1 import audit_pb2, execution_pb2, tool_pb2
from pawl.tools import Category, EffectClass, Tool, ToolContext, tool
from tests.rpc.tool_registry.registry import KEYS, Registry, as_json, content, context, outcome, reason, running
from tests.rpc.tool_registry.world import execute, refused

SAFE = Category.SAFE
READ_ONLY = EffectClass.READ_ONLY


class Tools:
    """One tool for each property; `ran` counts what had its effect, by tool."""

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()
        self.together = 0
        self.together_max = 0
        self.fails = False

    def all(self) -> list[Tool[..., Any]]:
        return [*self.of_effects(), *self.limited(), *self.for_some()]

    def of_effects(self) -> list[Tool[..., Any]]:
        @tool(category=Category.DESTRUCTIVE, effect=READ_ONLY)
        async def gated() -> None:
            """Need an approval."""
            self.ran["gated"] += 1

        @tool(category=SAFE)
        async def once() -> int:
            """Happen once."""
            self.ran["once"] += 1
            return self.ran["once"]

        @tool(category=SAFE, effect=EffectClass.IDEMPOTENT)
        async def again() -> int:
            """Happen as often as asked."""
            self.ran["again"] += 1
            return self.ran["again"]

        @tool(category=SAFE, effect=READ_ONLY, timeout_seconds=0.1)
        async def slow() -> None:
            """Take long."""
            await asyncio.Event().wait()

        @tool(category=SAFE, effect=READ_ONLY, result_bytes_max=10)
        async def large(size: int) -> str:
            """Return much."""
            return "x" * size

        @tool(category=SAFE, effect=READ_ONLY, resource_keys=["seat:{seat}"])
        async def sit(seat: str) -> None:
            """Touch something."""
            self.together += 1
            self.together_max = max(self.together, self.together_max)
            for _ in range(20):
                await asyncio.sleep(0)
            self.together -= 1

        return [gated, once, again, slow, large, sit]

    def limited(self) -> list[Tool[..., Any]]:
        @tool(category=SAFE, rate_per_minute=2)
        async def rare(n: int = 0) -> None:
            """Happen rarely."""
            self.ran["rare"] += 1

        @tool(category=SAFE, effect=READ_ONLY, rate_per_minute=1)
        async def glance() -> None:
            """Look rarely."""
            self.ran["glance"] += 1

        @tool(category=SAFE, effect=READ_ONLY, cache_seconds=60)
        async def kept(context: ToolContext, n: int = 0) -> str:
            """Be given again."""
            self.ran["kept"] += 1
            if self.fails:
                raise RuntimeError
            return f"{n} for {context.user_id} of {context.store_id}"

        @tool(category=SAFE, effect=READ_ONLY, cache_seconds=60, result_bytes_max=5)
        async def kept_small() -> str:
            """Be too large to be kept."""
            self.ran["kept_small"] += 1
            return "too large"

        @tool(category=SAFE, effect=READ_ONLY)
        async def fresh() -> None:
            """Never be given again."""
            self.ran["fresh"] += 1

        return [rare, glance, kept, kept_small, fresh]

    def for_some(self) -> list[Tool[..., Any]]:
        @tool(category=SAFE, effect=READ_ONLY, allowed_users=["ann"])
        async def for_ann() -> None:
            """Be for ann."""

        @tool(category=SAFE, effect=READ_ONLY, allowed_roles=["operator", "admin"])
        async def for_operators() -> None:
            """Be for operators."""

        @tool(category=SAFE, effect=READ_ONLY, allowed_users=["olga", "bob"], allowed_roles=["operator"])
        async def for_both() -> None:
            """Be for users with a role."""

        return [for_ann, for_operators, for_both]


@pytest.fixture
def tools() -> Tools:
    return Tools()


@pytest.fixture
async def registry(database_url: str, tmp_path: Path, tools: Tools) -> AsyncIterator[Registry]:
    async with running(database_url, tmp_path, tools.all()) as found:
        yield found


# category


async def test_category_a_call_that_is_not_safe_needs_its_approval(registry: Registry, tools: Tools) -> None:
    verdict = await registry.check("gated")
    assert verdict.disposition == execution_pb2.DISPOSITION_APPROVE
    assert await refused(registry.stream("gated")) == (grpc.StatusCode.FAILED_PRECONDITION, "APPROVAL_REQUIRED")
    assert tools.ran["gated"] == 0
    assert outcome(await registry.run("gated", approved_digest=verdict.digest)) == "SUCCEEDED"


# effect class


async def test_effect_class_a_call_happens_once_unless_its_class_allows_more(registry: Registry) -> None:
    assert [content(await registry.run("once", call="c1")) for _ in range(2)] == [1, 1]
    assert [content(await registry.run("again", call="c2")) for _ in range(2)] == [1, 2]


# timeout


async def test_timeout_an_execution_ends_when_its_time_is_up(registry: Registry) -> None:
    result = await registry.run("slow", timeout_seconds=5)
    assert outcome(result) == "FAILED TOOL_TIMEOUT"
    assert "within 0.1 s" in content(result)["error"]


# result_bytes_max


async def test_result_bytes_max_a_larger_result_is_an_error(registry: Registry) -> None:
    assert outcome(await registry.run("large", {"size": 8}, call="c1")) == "SUCCEEDED"
    assert outcome(await registry.run("large", {"size": 9}, call="c2")) == "FAILED RESULT_TOO_LARGE"


# resource_keys


async def test_resource_keys_calls_with_a_common_key_run_one_at_a_time(registry: Registry, tools: Tools) -> None:
    await asyncio.gather(*(registry.run("sit", {"seat": "a"}, call=f"a{number}") for number in range(4)))
    assert tools.together_max == 1


# rate_per_minute


async def test_rate_one_more_is_refused_and_says_when_to_try_again(registry: Registry, tools: Tools) -> None:
    for number in range(2):
        assert outcome(await registry.run("rare", call=f"c{number}")) == "SUCCEEDED"
    over = await registry.run("rare", call="c2")
    assert outcome(over) == "FAILED RATE_LIMITED"
    assert "limited to 2 a minute" in content(over)["error"]
    assert re.search(r"Try again in [123]?\d s", content(over)["error"])
    assert tools.ran["rare"] == 2


async def test_rate_it_is_the_same_over_all_replicas(database_url: str, tmp_path: Path, tools: Tools) -> None:
    async with (
        running(database_url, tmp_path, tools.all(), name="a") as first,
        running(database_url, tmp_path, tools.all(), name="b") as second,
    ):
        ended = await asyncio.gather(
            *((first if number % 2 else second).run("rare", call=f"c{number}") for number in range(8))
        )
    assert Counter(map(outcome, ended)) == {"SUCCEEDED": 2, "FAILED RATE_LIMITED": 6}
    assert tools.ran["rare"] == 2


async def test_rate_it_is_that_of_a_store(registry: Registry) -> None:
    assert outcome(await registry.run("glance", call="c1")) == "SUCCEEDED"
    assert outcome(await registry.run("glance", call="c2")) == "FAILED RATE_LIMITED"
    assert outcome(await registry.run("glance", call="c3", who=context(store="other"))) == "SUCCEEDED"


async def test_rate_asking_again_for_the_same_call_counts_once(registry: Registry, tools: Tools) -> None:
    for _ in range(4):
        assert outcome(await registry.run("rare", call="c1")) == "SUCCEEDED"
    assert outcome(await registry.run("glance", call="g1")) == "SUCCEEDED"
    assert outcome(await registry.run("glance", call="g1", earlier_attempts=1)) == "SUCCEEDED"
    assert outcome(await registry.run("rare", call="c2")) == "SUCCEEDED"
    assert tools.ran["rare"] == 2


async def test_rate_it_comes_back_with_time(registry: Registry, database_url: str) -> None:
    assert outcome(await registry.run("glance", call="c1")) == "SUCCEEDED"
    await execute(database_url, "UPDATE tool_registry.rates SET unused_at = unused_at - interval '30 seconds'")
    assert outcome(await registry.run("glance", call="c2")) == "FAILED RATE_LIMITED"
    await execute(database_url, "UPDATE tool_registry.rates SET unused_at = unused_at - interval '30 seconds'")
    assert outcome(await registry.run("glance", call="c3")) == "SUCCEEDED"


async def test_rate_it_refuses_nobody_for_long_after_the_clock_of_the_database_went_back(
    registry: Registry, database_url: str
) -> None:
    assert outcome(await registry.run("glance", call="c1")) == "SUCCEEDED"
    await execute(database_url, "UPDATE tool_registry.rates SET unused_at = unused_at + interval '1000 seconds'")
    assert outcome(await registry.run("glance", call="c2")) == "SUCCEEDED"
    assert outcome(await registry.run("glance", call="c3")) == "FAILED RATE_LIMITED"


async def test_rate_a_tool_without_one_costs_no_statement(registry: Registry, database_url: str) -> None:
    await execute(database_url, "ALTER TABLE tool_registry.rates RENAME TO rates_away")
    try:
        assert outcome(await registry.run("fresh")) == "SUCCEEDED"
    finally:
        await execute(database_url, "ALTER TABLE tool_registry.rates_away RENAME TO rates")


async def test_rate_of_a_store_holds_for_all_its_tools(database_url: str, tmp_path: Path, tools: Tools) -> None:
    async with running(database_url, tmp_path, tools.all(), store_calls_per_minute=3) as registry:
        ended = [await registry.run(name, call=f"c{name}") for name in ("rare", "once", "again", "fresh")]
        assert list(map(outcome, ended)) == ["SUCCEEDED"] * 3 + ["FAILED RATE_LIMITED"]
        assert "all tools in this store" in content(ended[-1])["error"]
        # What the store refused is not counted against the tool.
        await execute(database_url, "DELETE FROM tool_registry.rates WHERE name = 'store'")
        assert outcome(await registry.run("rare", call="r2")) == "SUCCEEDED"
        assert outcome(await registry.run("rare", call="r3")) == "FAILED RATE_LIMITED"
        # And the other way round: three of the store are left but one.
        assert outcome(await registry.run("fresh", call="f1")) == "SUCCEEDED"
        assert outcome(await registry.run("fresh", call="f2")) == "SUCCEEDED"
        assert outcome(await registry.run("fresh", call="f3")) == "FAILED RATE_LIMITED"


# cache_seconds


async def test_cache_a_result_is_given_again_and_says_how_old_it_is(registry: Registry, tools: Tools) -> None:
    first = await registry.run("kept", {"n": 1}, call="c1")
    second = await registry.run("kept", {"n": 1}, call="c2")
    assert content(first) == content(second)
    assert tools.ran["kept"] == 1
    assert first.result.note == ""
    assert re.fullmatch(r"From the cache: this result is \d+ s old\.", second.result.note)
    entries = (await registry.auditors["acme", "olga"].ListAudit(audit_pb2.ListAuditRequest(call_id="c2"))).entries
    assert [entry.reason for entry in entries] == ["CACHED"]


async def test_cache_it_is_for_the_same_arguments_user_and_store(registry: Registry, tools: Tools) -> None:
    asked = [
        ({"n": 1}, "acme", "ann"),
        ({"n": 2}, "acme", "ann"),
        ({"n": 1}, "acme", "bob"),
        ({"n": 1}, "other", "ann"),
    ]
    for number, (arguments, store, user) in enumerate(asked):
        result = await registry.run("kept", arguments, call=f"c{number}", who=context(store=store, user=user))
        assert content(result) == f"{arguments['n']} for {user} of {store}"
    assert tools.ran["kept"] == len(asked)


async def test_cache_errors_are_not_kept(registry: Registry, tools: Tools) -> None:
    tools.fails = True
    assert outcome(await registry.run("kept", call="c1")) == "FAILED TOOL_ERROR"
    tools.fails = False
    assert outcome(await registry.run("kept", call="c2")) == "SUCCEEDED"
    for number in range(2):
        assert outcome(await registry.run("kept_small", call=f"s{number}")) == "FAILED RESULT_TOO_LARGE"
    assert tools.ran["kept_small"] == 2


async def test_cache_a_tool_that_does_not_ask_for_it_runs_each_time(registry: Registry, tools: Tools) -> None:
    for number in range(2):
        await registry.run("fresh", call=f"c{number}")
    assert tools.ran["fresh"] == 2


# allowed_user_ids and allowed_roles

CALLERS = {
    ("ann", ()): {"for_ann"},
    ("bob", ()): set(),
    ("bob", ("operator",)): {"for_operators", "for_both"},
    ("eve", ("admin", "member")): {"for_operators"},
    ("eve", ("member",)): set(),
}
RESTRICTED = {"for_ann", "for_operators", "for_both"}


@pytest.mark.parametrize("who", CALLERS)
async def test_caller_to_others_a_tool_does_not_exist(registry: Registry, who: tuple[str, tuple[str, ...]]) -> None:
    """Resolve, check and execute, as agent-loop asks."""
    user, roles = who
    behalf = context(user=user, roles=roles)
    everything = await registry.execution.ResolveTools(execution_pb2.ResolveToolsRequest(context=behalf))
    assert {found.definition.name for found in everything.tools} & RESTRICTED == CALLERS[who]
    for name in sorted(RESTRICTED):
        is_known = name in CALLERS[who]
        verdict = await registry.check(name, user=user, roles=roles)
        assert verdict.error_reason == ("" if is_known else "TOOL_NOT_FOUND")
        assert verdict.tool_version == is_known
        named = execution_pb2.ResolveToolsRequest(context=behalf, tool_names=[name])
        pinned = execution_pb2.ResolveToolsRequest(context=behalf, pinned_versions={name: 1})
        if is_known:
            assert len((await registry.execution.ResolveTools(named)).tools) == 1
            assert outcome(await registry.run(name, call=f"c_{name}", who=behalf)) == "SUCCEEDED"
        else:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await registry.execution.ResolveTools(named)
            assert reason(error.value)[1] == "TOOL_NOT_FOUND"
            assert await refused(registry.stream(name, who=behalf)) == (grpc.StatusCode.NOT_FOUND, "TOOL_NOT_FOUND")
            found = (await registry.execution.ResolveTools(pinned)).tools
            assert name not in {one.definition.name for one in found}


@pytest.mark.parametrize(
    ("user", "known"), [("ann", {"for_ann"}), ("bob", set()), ("olga", {"for_operators", "for_both"})]
)
async def test_caller_to_others_a_tool_is_not_shown(registry: Registry, user: str, known: set[str]) -> None:
    """Get and list, as users ask; the roles are those of the key."""
    assert {key.user_id: key.roles for key in KEYS}["olga"] == ["operator"]
    stub = registry.users["acme", user]
    listed = (await stub.ListTools(tool_pb2.ListToolsRequest(page_size=200))).tools
    assert {found.definition.name for found in listed} & RESTRICTED == known
    for name in RESTRICTED - known:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.GetTool(tool_pb2.GetToolRequest(name=name))
        assert reason(error.value)[1] == "TOOL_NOT_FOUND"
    for name in known:
        assert (await stub.GetTool(tool_pb2.GetToolRequest(name=name))).tool.version == 1


async def test_caller_a_restriction_that_came_later_holds_for_runs_that_have_the_old_version(
    database_url: str, tmp_path: Path
) -> None:
    @tool(name="open_book", category=SAFE, effect=READ_ONLY)
    async def before() -> None:
        """Be for everybody."""

    @tool(name="open_book", category=SAFE, effect=READ_ONLY, allowed_roles=["operator"])
    async def after() -> None:
        """Be for operators."""

    async with running(database_url, tmp_path, [before]) as registry:
        assert outcome(await registry.run("open_book")) == "SUCCEEDED"
    async with running(database_url, tmp_path, [after]) as registry:
        assert (await registry.check("open_book", version=1)).error_reason == "TOOL_NOT_FOUND"
        assert (await refused(registry.stream("open_book", version=1)))[1] == "TOOL_NOT_FOUND"


# The same call twice in a batch.


async def check_batch(registry: Registry, *calls: tuple[str, Any]) -> list[execution_pb2.Verdict]:
    proposed = [
        execution_pb2.ProposedCall(
            call_id=f"c{number}", tool_name=name, tool_version=1, arguments_json=as_json(arguments)
        )
        for number, (name, arguments) in enumerate(calls, 1)
    ]
    request = execution_pb2.CheckCallsRequest(context=context(), calls=proposed)
    return list((await registry.execution.CheckCalls(request)).verdicts)


async def test_a_write_that_stands_in_the_batch_already_is_refused(registry: Registry) -> None:
    verdicts = await check_batch(
        registry,
        ("rare", {"n": 1}),
        ("rare", {"n": 2}),
        ("fresh", {}),
        ("fresh", {}),
        ("rare", b'{ "n" : 1.0 }'),
        ("again", {}),
        ("again", {}),
        ("rare", {"n": "x"}),
        ("rare", {"n": "x"}),
    )
    reasons = [verdict.error_reason for verdict in verdicts]
    duplicate, invalid = "DUPLICATE_CALL", "INVALID_ARGUMENTS"
    assert reasons == ["", "", "", "", duplicate, "", duplicate, invalid, invalid]
    assert "call 1 of the batch (c1)" in verdicts[4].error_message
    assert verdicts[4].disposition == execution_pb2.DISPOSITION_REFUSE
    assert verdicts[4].arguments_json == b""


async def test_a_write_of_an_earlier_batch_may_be_meant(registry: Registry) -> None:
    for _ in range(2):
        (verdict,) = await check_batch(registry, ("rare", {"n": 1}))
        assert verdict.error_reason == ""
