"""What the result cache keeps, and for how long."""

from __future__ import annotations

from typing import Any

from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId, UserId
from pawl.tool_registry.app.policy.call import Job
from pawl.tool_registry.app.policy.result_cache import ResultCache
from pawl.tool_registry.domain.execution import ended_badly, succeeded
from pawl.tool_registry.domain.verdict import CallContext
from pawl.tools import tool
from pawl.values import EffectClass, Outcome
from tests.fakes.manual_clock import ManualClock


@tool
def look() -> None:
    """Look."""


def job(arguments: str = "a", **changes: Any) -> Job:
    context = CallContext(
        store_id=StoreId("acme"),
        user_id=UserId("ann"),
        conversation_id=ConversationId("c"),
        run_id=RunId("r"),
        call_id=CallId("call"),
        agent_name="default",
    )
    fields: dict[str, Any] = {
        "context": context,
        "tool": look,
        "definition": look.definition,
        "version": 1,
        "effect": EffectClass.READ_ONLY,
        "arguments": {},
        "resource_keys": (),
        "timeout_seconds": 1.0,
        "attempt": 1,
        "fingerprint": "",
        "unknowns_resolved": 0,
        "source": "builtin",
        "is_of_store": False,
        "running_version": 1,
        "arguments_sha256": arguments,
        "ruled": None,
        "answers": (),
        "allowing_rule_id": "",
        "is_approved": False,
        "rate_per_minute": 0,
        "cache_seconds": 10.0,
    }
    return Job(**fields | changes)


async def test_a_result_is_kept_for_its_time_counted_from_when_the_call_began(clock: ManualClock) -> None:
    cache = ResultCache(clock.monotonic)
    cache.put(job(), succeeded(b"1", 4.0))
    await clock.advance(4.0)
    found = cache.find(job())
    assert found is not None
    assert (found.content, found.note, found.duration_seconds) == (
        b"1",
        "From the cache: this result is 8 s old.",
        0.0,
    )
    await clock.advance(2.0)
    assert cache.find(job()) is None
    await clock.advance(61)
    cache.put(job("b"), succeeded(b"1", 0))
    assert (len(cache._kept), cache._bytes) == (1, 1), "what has expired is swept"


def test_another_version_source_or_function_has_its_own_results(clock: ManualClock) -> None:
    cache = ResultCache(clock.monotonic)
    cache.put(job(), succeeded(b"1", 0))
    for changes in ({"version": 2}, {"running_version": 2}, {"source": "mcp:x"}, {"arguments_sha256": "b"}):
        assert cache.find(job(**changes)) is None
    assert cache.find(job(cache_seconds=0.0)) is None
    cache.put(job("error"), ended_badly(Outcome.FAILED, "TOOL_ERROR", "no"))
    cache.put(job("short", cache_seconds=0.0), succeeded(b"1", 0))
    assert len(cache._kept) == 1, "nor are errors kept"


def test_it_has_a_limit_and_forgets_the_longest_unused(clock: ManualClock) -> None:
    cache = ResultCache(clock.monotonic, entries_max=3, bytes_max=10)
    for name in "abc":
        cache.put(job(name), succeeded(b"1", 0))
    cache.find(job("a"))
    cache.put(job("d"), succeeded(b"1", 0))
    assert cache.find(job("b")) is None
    assert cache.find(job("a")) is not None
    cache.put(job("e"), succeeded(b"x" * 9, 0))
    assert (len(cache._kept), cache._bytes) == (2, 10)
    cache.put(job("f"), succeeded(b"x" * 11, 0))
    assert (len(cache._kept), cache._bytes) == (2, 10)
