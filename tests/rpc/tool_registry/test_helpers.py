"""What strangers wrote is worked out by helpers, which are killed when it is too much: nobody else waits."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
from collections.abc import AsyncIterator

import pytest

from pawl.chassis.ids import StoreId
from pawl.errors import DependencyUnavailable, InvalidSchema
from pawl.tool_registry.adapters.process.helpers import Helpers
from pawl.tool_registry.app.catalog.ports import TooCostly
from pawl.tool_registry.builtin.web_text import read_page
from pawl.tool_registry.domain.check import Refused, check_strange, schema_problem
from pawl.tool_registry.domain.schema import PATTERNS_MAX, compile_schema

ACME = StoreId("acme")

ENDLESS = 10**8
"""Its factorial takes longer than anybody waits."""


@pytest.fixture
async def helpers() -> AsyncIterator[Helpers]:
    """Two helpers."""
    async with Helpers(processes_max=2) as helpers:
        yield helpers


async def test_a_helper_answers_and_passes_on_what_is_raised(helpers: Helpers) -> None:
    assert await helpers.run(ACME, math.factorial, 5, cpu_seconds=5) == 120
    with pytest.raises(ValueError, match="math domain error"):
        await helpers.run(ACME, math.sqrt, -1, cpu_seconds=5)


async def test_a_helper_that_uses_too_much_is_killed_and_another_one_goes_on(helpers: Helpers) -> None:
    with pytest.raises(TooCostly):
        await helpers.run(ACME, math.factorial, ENDLESS, cpu_seconds=0.2)
    with pytest.raises(TooCostly):
        await helpers.run(ACME, bytearray, 2**40, cpu_seconds=5)
    assert await helpers.run(ACME, math.factorial, 5, cpu_seconds=5) == 120


async def test_a_helper_that_was_ended_by_another_is_replaced_before_anybody_hears_of_it(helpers: Helpers) -> None:
    """A machine without memory ends processes, too, and no job is to blame for it."""
    process_id = await helpers.run(ACME, os.getpid, cpu_seconds=5)
    os.kill(process_id, signal.SIGKILL)
    assert await helpers.run(ACME, math.factorial, 5, cpu_seconds=5) == 120
    with pytest.raises(TooCostly):
        await helpers.run(ACME, os.abort, cpu_seconds=5)


@pytest.mark.parametrize("executable", ["/nowhere/python", "/bin/false"])
async def test_without_helpers_nothing_is_refused_for_good(
    executable: str, helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", executable)
        with pytest.raises(DependencyUnavailable):
            await helpers.run(ACME, math.factorial, 5, cpu_seconds=5)
    assert await helpers.run(ACME, math.factorial, 5, cpu_seconds=5) == 120


async def test_a_store_waits_for_nobody_elses_jobs(helpers: Helpers) -> None:
    """However many jobs of others there are, they leave a process free, and each store has one at a time."""
    waiting = [
        asyncio.ensure_future(helpers.run(StoreId(store), math.factorial, ENDLESS, cpu_seconds=600))
        for store in ("slow", "slow", "slower", "acme")
    ]
    await helpers.run(StoreId("other"), math.factorial, 5, cpu_seconds=1)
    for store in ("acme", "slow"):  # Their own pages and documents hold up no call either.
        assert await helpers.run(StoreId(store), math.factorial, 5, cpu_seconds=1) == 120
    assert not any(each.done() for each in waiting)


async def test_a_store_that_was_slow_leaves_a_process_to_the_others(helpers: Helpers) -> None:
    with pytest.raises(TooCostly):
        await helpers.run(StoreId("slow"), math.factorial, ENDLESS, cpu_seconds=0.2)
    long = asyncio.ensure_future(helpers.run(StoreId("other"), math.factorial, ENDLESS, cpu_seconds=600))
    await helpers.run(ACME, math.factorial, 5, cpu_seconds=1)
    slow = asyncio.ensure_future(helpers.run(StoreId("slow"), math.factorial, 5, cpu_seconds=1))
    assert await helpers.run(ACME, math.factorial, 5, cpu_seconds=1) == 120
    assert not long.done()
    assert not slow.done()


async def test_a_header_is_read_in_time_whatever_is_in_it(helpers: Helpers) -> None:
    for header in ("charset=" + " " * 90_000, "text/html; charset=" + "a" * 90_000, "application/" + "+" * 90_000):
        page = await helpers.run(ACME, _read_header, header, cpu_seconds=5)
        assert page == "", header[:20]


def _read_header(header: str) -> str:
    try:
        return read_page(b"", header, "http://a/").text
    except Exception as error:  # noqa: BLE001  # that it is no text
        return "" if type(error).__name__ == "NotText" else repr(error)


async def test_patterns_are_bounded_together(helpers: Helpers) -> None:
    """Each of these compiles to less than a pattern may have, or would have been more than that."""
    properties = {str(number): {"type": "string", "pattern": f"\\w{{{number + 100}}}"} for number in range(300)}
    problem = await helpers.run(ACME, schema_problem, {"type": "object", "properties": properties}, cpu_seconds=5)
    assert f"the limit is {PATTERNS_MAX}" in problem
    with pytest.raises(InvalidSchema, match="regex"):
        compile_schema({"type": "object", "properties": {"a": {"type": "string", "pattern": "\\w{9}{99}{999}"}}})


async def test_a_schema_that_multiplies_errors_ends_with_its_helper(helpers: Helpers) -> None:
    branches = [{"type": "object", "required": [f"k{number}"]} for number in range(700)]
    nested = {"anyOf": [{"anyOf": branches}, {"anyOf": branches}]}
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": nested}}}
    raw = json.dumps({"a": ["x"] * 700}).encode()
    try:
        checked = await helpers.run(ACME, _refuses, json.dumps(schema).encode(), raw, cpu_seconds=1.0)
    except TooCostly:
        checked = True
    assert checked


def _refuses(schema: bytes, raw: bytes) -> bool:
    return isinstance(check_strange("make", schema, raw, None, recursion=False), Refused)
