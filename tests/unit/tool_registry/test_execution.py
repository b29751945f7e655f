"""Executions: journal, process leases, result cache and threads (I5, decision 14)."""

from __future__ import annotations

import asyncio
import itertools
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId, UserId
from pawl.tool_registry.execution.execution import LeaseWatch
from pawl.tool_registry.policy.call import Job
from pawl.tool_registry.policy.result_cache import ResultCache
from pawl.tool_registry.rules.execution import ExecutionResult, ended_badly, succeeded
from pawl.tool_registry.rules.journal import Entry, Step, next_step
from pawl.tool_registry.rules.verdict import CallContext
from pawl.tool_registry.sources.python.runner import PythonRunner
from pawl.tools import tool
from pawl.values import EffectClass, Outcome
from tests.fakes.manual_clock import ManualClock
from tests.poll import PATIENCE_SECONDS

JOURNALED = (EffectClass.AT_MOST_ONCE, EffectClass.RECONCILABLE)
BOTH = (False, True)


def result(outcome: Outcome) -> ExecutionResult:
    return ExecutionResult(outcome=outcome, content=b"null")


def step(
    *,
    fingerprint: str = "f",
    effect: EffectClass = EffectClass.AT_MOST_ONCE,
    outcome: Outcome | None = None,
    unknowns: int = 0,
    is_own: bool = False,
    alive: bool = False,
    resolved: int = 0,
    unexecuted: bool = False,
) -> Step:
    entry = Entry(
        fingerprint=fingerprint,
        effect=effect,
        unknowns=unknowns,
        is_own=is_own,
        is_unexecuted=unexecuted,
        is_holder_alive=alive,
        result=None if outcome is None else result(outcome),
    )
    return next_step(entry, fingerprint="f", unknowns_resolved=resolved)


def test_a_settled_call_is_never_run_again() -> None:
    """The stored result is final for every caller and effect class."""
    ended = (Outcome.SUCCEEDED, Outcome.FAILED, Outcome.CANCELLED)
    for effect, outcome, own, alive, never in itertools.product(JOURNALED, ended, BOTH, BOTH, BOTH):
        found = step(effect=effect, outcome=outcome, is_own=own, alive=alive, unexecuted=never, resolved=9)
        assert found is Step.STORED


def test_a_different_call_with_the_same_id_is_refused() -> None:
    for outcome, own, alive in itertools.product((None, *Outcome), (False, True), (False, True)):
        found = step(fingerprint="other", outcome=outcome, is_own=own, alive=alive, unexecuted=True, resolved=9)
        assert found is Step.MISMATCH


RECONCILABLE, UNKNOWN = {"effect": EffectClass.RECONCILABLE}, {"outcome": Outcome.UNKNOWN}


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"alive": True}, Step.ELSEWHERE),
        (RECONCILABLE | {"alive": True}, Step.ELSEWHERE),
        *((RECONCILABLE | {"is_own": own, "alive": own}, Step.RECONCILE) for own in BOTH),
        *(({"is_own": own, "alive": own}, Step.CONCLUDE_UNKNOWN) for own in BOTH),
        ({"is_own": True, "alive": True, "unexecuted": True}, Step.RUN),
        (RECONCILABLE | {"is_own": True, "alive": True, "unexecuted": True}, Step.RUN),
        (UNKNOWN | {"unknowns": 1, "resolved": 0}, Step.STORED),
        (UNKNOWN | {"unknowns": 1, "resolved": 1}, Step.RUN),
        (UNKNOWN | {"unknowns": 2, "resolved": 1}, Step.STORED),
        ({"fingerprint": "", "outcome": Outcome.CANCELLED}, Step.STORED),
    ],
)
def test_a_call_without_a_final_outcome_runs_again_only_if_it_cannot_have_acted(
    entry: dict[str, Any], expected: Step
) -> None:
    """D9: a resolution by an operator covers one interruption. A call of a live process is awaited."""
    assert step(**entry) is expected


END = datetime(2026, 1, 1, tzinfo=UTC)
JUMP = timedelta(seconds=130)


def see(watch: LeaseWatch, seconds: float, **ends: datetime) -> list[str]:
    watch.see(ends, asked_at=seconds, now=seconds)
    return watch.unrenewed()[0]


def test_a_lease_ends_after_one_period_without_renewal() -> None:
    watch = LeaseWatch(6)
    assert [see(watch, second, a=END, b=END) for second in range(6)] == [[]] * 6
    assert see(watch, 6, a=END, b=END + JUMP) == ["a"]
    assert watch.unrenewed() == (["a"], [END])
    assert see(watch, 7, b=END + JUMP) == []


def test_a_renewal_counts_despite_clock_jumps() -> None:
    watch = LeaseWatch(6)
    seen = [see(watch, second, a=END if second < 6 else END - JUMP) for second in range(13)]
    assert seen == [[]] * 12 + [["a"]]


def test_time_without_the_database_does_not_count_towards_a_lease() -> None:
    """Holders could not renew their leases during that time."""
    watch = LeaseWatch(6)
    for second in range(6):
        see(watch, second, a=END)
    assert see(watch, 60, a=END) == []
    assert [see(watch, 60 + second, a=END) for second in (2, 4, 6)] == [[], [], ["a"]]


def test_a_slow_response_renews_a_lease_only_from_its_request_time() -> None:
    watch = LeaseWatch(6)
    watch.see({"a": END}, asked_at=0, now=2)
    watch.see({"a": END}, asked_at=3, now=9)
    assert watch.unrenewed() == ([], [])
    assert [see(watch, second, a=END) for second in (6, 7.9, 8)] == [[], [], ["a"]]


@tool
def read_page() -> None:
    """Read the page."""


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
        "tool": read_page,
        "definition": read_page.definition,
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


async def test_the_lifetime_of_a_cached_result_starts_with_the_call(clock: ManualClock) -> None:
    cache = ResultCache(clock.monotonic)
    cache.put(job(), succeeded(b"1", 4.0))
    await clock.advance(4.0)
    found: Any = cache.find(job())
    note = "From the cache: this result is 8 s old."
    assert (found.content, found.note, found.duration_seconds) == (b"1", note, 0.0)
    await clock.advance(2.0)
    assert cache.find(job()) is None
    await clock.advance(61)
    cache.put(job("b"), succeeded(b"1", 0))
    assert (len(cache._kept), cache._bytes) == (1, 1), "expired entries are removed"


def test_cached_results_are_not_shared_by_versions_sources_or_functions(clock: ManualClock) -> None:
    cache = ResultCache(clock.monotonic)
    cache.put(job(), succeeded(b"1", 0))
    others: list[dict[str, Any]] = [
        {"version": 2},
        {"running_version": 2},
        {"source": "mcp:x"},
        {"arguments_sha256": "b"},
    ]
    assert [changes for changes in (*others, {"cache_seconds": 0.0}) if cache.find(job(**changes)) is not None] == []
    cache.put(job("error"), ended_badly(Outcome.FAILED, "TOOL_ERROR", "no"))
    cache.put(job("short", cache_seconds=0.0), succeeded(b"1", 0))
    assert len(cache._kept) == 1, "errors are not cached"


def test_the_result_cache_evicts_the_least_recently_used(clock: ManualClock) -> None:
    cache = ResultCache(clock.monotonic, entries_max=3, bytes_max=10)
    for name in "abc":
        cache.put(job(name), succeeded(b"1", 0))
    cache.find(job("a"))
    cache.put(job("d"), succeeded(b"1", 0))
    assert [cache.find(job(name)) is not None for name in "ab"] == [True, False]
    for name, size in (("e", 9), ("f", 11)):
        cache.put(job(name), succeeded(b"x" * size, 0))
        assert (len(cache._kept), cache._bytes) == (2, 10)


async def test_a_timeout_error_raised_by_a_preview_is_passed_on() -> None:
    def preview() -> None:
        raise TimeoutError("of its own")

    async with PythonRunner(threads_max=1) as runner:
        with pytest.raises(TimeoutError, match="of its own"):
            await runner.answer("tool", preview)


async def test_a_function_that_raises_stop_iteration_fails_and_frees_its_slot() -> None:
    tool: Any = SimpleNamespace(bind=lambda *_: lambda: next(iter(())), is_async=False, marks_start=True)
    context: Any = None
    async with PythonRunner(threads_max=1) as runner:
        for _ in range(2):
            async with asyncio.timeout(PATIENCE_SECONDS):
                with pytest.raises(RuntimeError, match="StopIteration"):
                    await runner.start(tool, {}, context).result()
        assert runner.threads_busy == 0
