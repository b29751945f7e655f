from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from pawl.chassis.login_failures import ENTRIES_MAX, FailureKind, LoginFailures, Rate, kind_of, source_of
from pawl.chassis.metrics import Metrics
from tests.fakes.manual_clock import ManualClock

WRONG = (("authorization", "Bearer a-wrong-key-0123456789"),)
HERE = "10.0.0.1"


def failures(clock: ManualClock) -> tuple[LoginFailures, Metrics]:
    metrics = Metrics("test")
    return LoginFailures(metrics.rpc.login_failures, clock), metrics


@pytest.mark.parametrize(
    ("peer", "source"),
    [
        ("ipv4:10.0.0.1:5123", "10.0.0.1"),
        ("ipv6:[2001:db8:1:2:3:4:5:6]:5123", "2001:db8:1:2::/64"),
        ("ipv6:%5B2001:db8:1:2:ffff::1%5D:99", "2001:db8:1:2::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:99", "fe80::/64"),
        ("unix:/run/pawl", "unix"),
        ("unix:", "unix"),
        ("", ""),
        ("ipv4:nonsense", "ipv4"),
    ],
)
def test_a_source_is_an_address_without_its_port(peer: str, source: str) -> None:
    assert source_of(peer) == source


@pytest.mark.parametrize(
    ("metadata", "kind"),
    [
        ((), FailureKind.ABSENT),
        ((("pawl-user", "me"), ("trace-bin", b"\xff")), FailureKind.ABSENT),
        ((("authorization", ""),), FailureKind.MALFORMED),
        ((("authorization", "Basic abc"),), FailureKind.MALFORMED),
        ((("authorization", f"Bearer {'x' * 9000}"),), FailureKind.MALFORMED),
        (WRONG * 2, FailureKind.REPEATED),
        ((*WRONG, ("pawl-user", "a"), ("pawl-user", "b")), FailureKind.REPEATED),
        (WRONG, FailureKind.UNKNOWN),
    ],
)
def test_failures_are_of_a_few_kinds(metadata: tuple[tuple[str, str]], kind: FailureKind) -> None:
    assert kind_of(metadata) is kind


@given(st.lists(st.tuples(st.floats(0, 100), st.sampled_from("abc"))), st.floats(1, 10), st.floats(0, 5))
async def test_within_any_time_no_more_than_the_rate_passes(
    steps: list[tuple[float, str]], burst: float, per_second: float
) -> None:
    clock = ManualClock()
    rate = Rate(burst, per_second, clock)
    passed: dict[str, list[float]] = {"a": [], "b": [], "c": []}
    for seconds, name in steps:
        await clock.advance(seconds)
        could = rate.has(name)
        assert rate.spend(name) is could
        if could:
            passed[name].append(clock.monotonic())
    for times in passed.values():
        for first, begin in enumerate(times):
            for last in range(first, len(times)):
                assert last - first + 1 <= burst + (times[last] - begin) * per_second + 1e-6


def test_only_so_many_sources_are_remembered_the_latest() -> None:
    rate = Rate(1, 0, ManualClock())
    for number in range(2 * ENTRIES_MAX):
        assert rate.spend(f"source {number}")
    assert len(rate) == ENTRIES_MAX
    assert not rate.has(f"source {2 * ENTRIES_MAX - 1}")


async def test_beyond_a_rate_a_source_causes_no_look_and_no_line_but_one_a_minute() -> None:
    clock = ManualClock()
    failed, metrics = failures(clock)
    with capture_logs() as lines:
        for number in range(1000):
            shown = (("authorization", f"Bearer guess-number-{number:06}"),)
            failed.note(HERE, shown, "/m")
        told = len(lines)
        assert told < 50
        assert not failed.may_look(HERE, "Bearer another")
        assert failed.may_look("10.0.0.2", "Bearer another")
        failed.report()
        assert len(lines) == told
        await clock.advance(60)
        failed.report()
        failed.report()
    assert [line["event"] for line in lines] == ["login.failed"] * told + ["login.failures_throttled"]
    assert lines[-1]["count"] == 1000 - told
    assert failed.may_look(HERE, "Bearer another")
    assert metrics.registry.get_sample_value("pawl_test_login_failures_total", {"kind": "unknown"}) == 1000


async def test_a_key_that_many_sources_show_causes_no_looks_either() -> None:
    clock = ManualClock()
    failed, _ = failures(clock)
    for number in range(20):
        failed.note(f"10.0.1.{number}", WRONG, "/m")
    [(_, shown)] = WRONG
    assert not failed.may_look("10.0.2.1", shown)
    assert failed.may_look("10.0.2.1", "Bearer another")
    await clock.advance(10)
    assert failed.may_look("10.0.2.1", shown)


def test_one_key_that_is_tried_again_and_again_leaves_others_of_its_source_alone() -> None:
    failed, _ = failures(ManualClock())
    for _ in range(1000):
        failed.note(HERE, WRONG, "/m")
    assert failed.may_look(HERE, "Bearer another")


def test_the_log_has_no_secret() -> None:
    failed, _ = failures(ManualClock())
    with capture_logs() as lines:
        failed.note(HERE, WRONG, "/pawl.agent.v1.AgentService/StartRun")
    [line] = lines
    assert "a-wrong-key" not in str(line)
    assert (line["kind"], line["source"], line["method"]) == ("unknown", HERE, "/pawl.agent.v1.AgentService/StartRun")
