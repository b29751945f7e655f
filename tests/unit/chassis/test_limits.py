"""Limits of calls: failed logins, arriving requests, open calls and retries."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from pawl.chassis.identity.auth import LoginRefused, Principal, service_principal
from pawl.chassis.ids import KeyId, StoreId, UserId
from pawl.chassis.rpc import limits as rpc_limits
from pawl.chassis.rpc.limits import AnonymousCalls, Arrivals
from pawl.chassis.rpc.retry import ANY, TRANSIENT, Retry, pause_seconds
from pawl.errors import (
    DeadlineExceeded,
    DependencyUnavailable,
    Internal,
    LeaseLost,
    Overloaded,
    PawlError,
)
from pawl.server.identity import login_failures
from pawl.server.identity.login_failures import LoginFailures, kind_of, source_of
from pawl.server.process.metrics import FirstValues, Metrics
from tests.fakes.manual_clock import ManualClock
from tests.tables import for_each

WRONG = (("authorization", "Bearer a-wrong-key-0123456789"),)
HERE = "10.0.0.1"


def failures(clock: ManualClock) -> tuple[LoginFailures, Metrics]:
    metrics = Metrics("test")
    return LoginFailures(metrics.rpc.login_failures, clock), metrics


def test_a_request_source_is_an_address_without_its_port() -> None:
    sources = {
        "ipv4:10.0.0.1:5123": "10.0.0.1",
        "ipv6:[2001:db8:1:2:3:4:5:6]:5123": "2001:db8:1:2::/64",
        "ipv6:%5B2001:db8:1:2:ffff::1%5D:99": "2001:db8:1:2::/64",
        "ipv6:%5Bfe80::1%25eth0%5D:99": "fe80::/64",
        "unix:/run/pawl": "unix",
        "unix:": "unix",
        "": "",
        "ipv4:nonsense": "ipv4",
    }
    assert {peer: source_of(peer) for peer in sources} == sources


def test_login_failures_are_counted_under_a_fixed_set_of_kinds() -> None:
    kinds = {
        (): "absent",
        (("pawl-user", "me"), ("trace-bin", b"\xff")): "absent",
        (("authorization", ""),): "malformed",
        (("authorization", "Basic abc"),): "malformed",
        (("authorization", f"Bearer {'x' * 9000}"),): "malformed",
        WRONG * 2: "repeated",
        (*WRONG, ("pawl-user", "a"), ("pawl-user", "b")): "repeated",
        WRONG: "unknown",
    }
    assert {metadata: kind_of(metadata) for metadata in kinds} == kinds


def test_counts_of_recent_sources_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login_failures, "ENTRIES_MAX", 3)
    failed, _ = failures(ManualClock())
    for number in [number for number in range(5) for _ in range(30)]:
        failed.note(f"source {number}", (), "/m")
    assert [failed.may_look_up(f"source {number}", "") for number in range(5)] == [True, True, False, False, False]


async def test_a_source_over_its_limit_does_not_cause_lookups_and_causes_few_log_lines() -> None:
    clock = ManualClock()
    failed, metrics = failures(clock)
    with capture_logs() as lines:
        for number in range(1000):
            failed.note(HERE, (("authorization", f"Bearer guess-number-{number:06}"),), "/m")
        lines_before = len(lines)
        assert lines_before < 50
        assert [failed.may_look_up(source, "Bearer another") for source in (HERE, "10.0.0.2")] == [False, True]
        failed.report()
        assert len(lines) == lines_before
        await clock.advance(60)
        for _ in range(2):
            failed.report()
    assert [line["event"] for line in lines] == ["login.failed"] * lines_before + ["login.failures_throttled"]
    assert lines[-1]["count"] == 1000 - lines_before
    assert failed.may_look_up(HERE, "Bearer another")
    assert metrics.registry.get_sample_value("pawl_test_login_failures_total", {"kind": "unknown"}) == 1000


def test_label_values_beyond_the_first_ones_are_other() -> None:
    """OPS-2: a value keeps its label, and each scope counts its values separately."""
    values = FirstValues(2)
    asked = [("a",), ("b",), ("c",), ("a",), ("a", "scope"), ("b",)]
    assert [values.label(*each) for each in asked] == ["a", "b", "other", "a", "other", "b"]
    scoped = FirstValues(2)
    assert [scoped.label("a", scope) for scope in ("x", "y", "z", "x")] == ["a", "a", "other", "a"]


def test_refusals_are_counted_by_reason_and_logged_with_the_key_id() -> None:
    failed, metrics = failures(ManualClock())
    with capture_logs() as lines:
        failed.note(HERE, WRONG, "/m", LoginRefused("revoked", KeyId("key_1")))
        failed.note(HERE, (), "/m", LoginRefused("revoked", KeyId("key_1")))
        failed.note(HERE, WRONG, "/m")
    assert [(line["kind"], line.get("key_id")) for line in lines] == [
        ("revoked", "key_1"),
        ("absent", None),
        ("unknown", None),
    ]
    assert metrics.registry.get_sample_value("pawl_test_login_failures_total", {"kind": "revoked"}) == 1
    assert "a-wrong-key" not in str(lines)


@dataclass
class Slow:
    asked: int = 0
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self) -> bytes:
        self.asked += 1
        await self.arrived.wait()
        return b"here"


def user(name: str, store_id: str = "acme") -> Principal:
    return Principal(store_id=StoreId(store_id), user_id=UserId(name))


async def turn_over() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_callers_requests_are_read_a_few_at_a_time() -> None:
    arrivals, slow, others = Arrivals(), Slow(), Slow()
    reading = [asyncio.ensure_future(arrivals.read(slow, user("ann"))) for _ in range(50)]
    await turn_over()
    few = slow.asked
    assert 0 < few < 50
    beside = [
        asyncio.ensure_future(arrivals.read(others, who)) for who in (user("bob"), service_principal("agent-loop"))
    ]
    await turn_over()
    assert (slow.asked, others.asked) == (few, 2)
    slow.arrived.set()
    others.arrived.set()
    assert set(await asyncio.gather(*reading, *beside)) == {b"here"}


async def test_a_request_that_does_not_arrive_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_limits, "_ARRIVAL_SECONDS", 0.01)
    with pytest.raises(DeadlineExceeded):
        await Arrivals().read(Slow(), user("ann"))


async def test_many_callers_in_one_store_do_not_block_another() -> None:
    arrivals, slow, others = Arrivals(), Slow(), Slow()
    reading = [asyncio.ensure_future(arrivals.read(slow, user(f"u{number}"))) for number in range(500)]
    await turn_over()
    assert 0 < slow.asked < 500
    beside = asyncio.ensure_future(arrivals.read(others, user("bob", "other")))
    await turn_over()
    assert others.asked == 1
    for task in reading[:400]:
        task.cancel()
    slow.arrived.set()
    others.arrived.set()
    await asyncio.gather(*reading, beside, return_exceptions=True)
    assert await arrivals.read(slow, user("ann")) == b"here"


class Ended:
    reason: PawlError | None = None

    def end(self, reason: PawlError) -> None:
        self.reason = reason


def test_on_a_full_server_the_source_with_the_most_calls_loses_calls_first() -> None:
    crowd, alone, many, late = AnonymousCalls(10), Ended(), [Ended() for _ in range(50)], Ended()
    crowd.enter(alone, "a")
    for call in many:
        crowd.enter(call, "b")
    crowd.enter(late, "c")
    assert (len(crowd), alone.reason, late.reason) == (10, None, None)
    assert [call for call in many if call.reason is None] == many[-8:]
    for call in (*many, alone, late):
        crowd.leave(call)
    assert len(crowd) == 0


def test_calls_without_a_key_are_limited_per_connection() -> None:
    crowd = AnonymousCalls(4000)
    for connection in "abcdefghij":
        calls = [Ended() for _ in range(400)]
        for call in calls:
            crowd.enter(call, connection)
        assert [call for call in calls if call.reason is None] == calls[-32:]
    assert len(crowd) == 320


@dataclass(slots=True)
class _Clock:
    time: float = 1000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds


@dataclass(slots=True)
class _Dependency:
    errors: Iterator[Exception]
    asked: int = 0

    async def ask(self) -> str:
        self.asked += 1
        for error in self.errors:
            raise error
        return "answer"


def _retry(clock: _Clock, **options: object) -> Retry:
    return Retry(clock, chance=lambda: 1.0, **options)  # type: ignore[arg-type]


@for_each("error", [DependencyUnavailable(), DeadlineExceeded(), Overloaded()])
async def test_an_unavailable_dependency_is_retried_without_limit(error: PawlError) -> None:
    clock, dependency = _Clock(), _Dependency(iter([error] * 500))
    assert await _retry(clock).until_answered(dependency.ask) == "answer"
    assert (dependency.asked, clock.time - 1000.0 > 3 * 180.0) == (501, True)


async def test_internal_errors_are_retried_until_a_time_limit() -> None:
    for error, transient in ((Internal(), TRANSIENT), (OSError(), ANY)):
        clock = _Clock()
        retry = _retry(clock, transient=transient, internal_seconds_max=60.0)
        with pytest.raises(type(error)):
            await retry.until_answered(_Dependency(repeat(error)).ask)
        assert 60.0 <= clock.time - 1000.0 <= 62.0
    clock = _Clock()
    errors = iter([*[Internal()] * 30, DependencyUnavailable(), *[Internal()] * 30])
    assert await _retry(clock, internal_seconds_max=60.0).until_answered(_Dependency(errors).ask) == "answer"
    assert clock.time - 1000.0 > 60.0


async def test_other_errors_are_raised_immediately() -> None:
    dependency = _Dependency(repeat(LeaseLost()))
    with pytest.raises(LeaseLost):
        await _retry(_Clock()).until_answered(dependency.ask)
    assert dependency.asked == 1


async def test_the_time_limit_applies_to_all_attempts_in_total() -> None:
    clock = _Clock()
    with pytest.raises(DependencyUnavailable):
        await _retry(clock).until_answered(_Dependency(repeat(DependencyUnavailable())).ask, seconds_max=30.0)
    assert 30.0 <= clock.time - 1000.0 <= 32.0


@given(st.integers(1, 10_000), st.floats(0, 1), st.floats(0, 1))
def test_retry_delays_grow_to_a_limit_and_are_never_zero(failures: int, chance: float, other: float) -> None:
    assert 0.025 <= pause_seconds(failures, chance) <= min(2.0, 2 * pause_seconds(failures + 1, other))
