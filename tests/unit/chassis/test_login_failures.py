from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from pawl.chassis.ids import KeyId
from pawl.chassis.login_failures import (
    ENTRIES_MAX,
    REPORTS_MAX,
    FailureKind,
    FailureReport,
    FailureSums,
    LoginFailures,
    LoginRefused,
    Rate,
    kind_of,
    source_of,
)
from pawl.chassis.metrics import Metrics
from tests.fakes.manual_clock import ManualClock

WRONG = (("authorization", "Bearer a-wrong-key-0123456789"),)
HERE = "10.0.0.1"


def failures(clock: ManualClock) -> tuple[LoginFailures, Metrics]:
    metrics = Metrics("test")
    return LoginFailures(metrics.rpc.login_failures, clock), metrics


def test_a_source_is_an_address_without_its_port() -> None:
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


def test_failures_are_of_a_few_kinds() -> None:
    kinds = {
        (): FailureKind.ABSENT,
        (("pawl-user", "me"), ("trace-bin", b"\xff")): FailureKind.ABSENT,
        (("authorization", ""),): FailureKind.MALFORMED,
        (("authorization", "Basic abc"),): FailureKind.MALFORMED,
        (("authorization", f"Bearer {'x' * 9000}"),): FailureKind.MALFORMED,
        WRONG * 2: FailureKind.REPEATED,
        (*WRONG, ("pawl-user", "a"), ("pawl-user", "b")): FailureKind.REPEATED,
        WRONG: FailureKind.UNKNOWN,
    }
    assert {metadata: kind_of(metadata) for metadata in kinds} == kinds  # type: ignore[arg-type]  # bytes, too


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


def test_why_a_key_is_refused_is_counted_and_summed_and_the_key_named() -> None:
    clock = ManualClock()
    metrics, sums = Metrics("test"), FailureSums(clock)
    failed = LoginFailures(metrics.rpc.login_failures, clock, sums)
    with capture_logs() as lines:
        failed.note(HERE, WRONG, "/m", LoginRefused(FailureKind.REVOKED, KeyId("key_1")))
        failed.note(HERE, (), "/m", LoginRefused(FailureKind.REVOKED, KeyId("key_1")))
        failed.note(HERE, WRONG, "/m")
    assert [(line["kind"], line.get("key_id")) for line in lines] == [
        ("revoked", "key_1"),
        ("absent", None),
        ("unknown", None),
    ]
    assert metrics.registry.get_sample_value("pawl_test_login_failures_total", {"kind": "revoked"}) == 1
    reports = sums.reports()
    assert [(report.sum.kind.value, report.sum.source, report.key_id) for report in reports] == [
        ("revoked", HERE, "key_1"),
        ("absent", HERE, ""),
        ("unknown", HERE, ""),
    ]
    assert "a-wrong-key" not in str(reports)


FAILURE = st.tuples(
    st.sampled_from(FailureKind),
    st.integers(0, 90).map(lambda number: f"10.0.0.{number}"),
    st.sampled_from(["", "", "", *(f"key_{number}" for number in range(30))]),
)
STEP = st.one_of(
    st.lists(FAILURE, min_size=1, max_size=200),
    st.floats(0, 1000),
    st.sampled_from(["hand over", "fail to hand over"]),
)


@given(st.lists(STEP, max_size=30))
async def test_sums_lose_nothing_count_nothing_twice_and_stay_few(steps: list[object]) -> None:
    clock = ManualClock()
    sums = FailureSums(clock)
    taken: dict[str, FailureReport] = {}
    added = dict.fromkeys(FailureKind, 0)
    for step in steps:
        if isinstance(step, list):
            for kind, source, key_id in step:
                sums.add(kind, source, key_id)
                added[kind] += 1
        elif isinstance(step, float):
            await clock.advance(step)
        else:
            reports = sums.reports()
            assert len(reports) <= REPORTS_MAX
            assert list(sums.reports()) == list(reports), "the same until they are taken"
            if step == "hand over":
                assert not taken.keys() & {report.report_id for report in reports}
                taken |= {report.report_id: report for report in reports}
                sums.taken()
        assert len(sums) <= 2 * REPORTS_MAX
        assert len(taken) <= REPORTS_MAX + clock.monotonic() * 0.1 + 1e-6
    while len(sums):
        await clock.advance(1000)
        taken |= {report.report_id: report for report in sums.reports()}
        sums.taken()
    for kind, count in added.items():
        assert sum(report.sum.count for report in taken.values() if report.sum.kind is kind) == count
    assert all(report.sum.first_time <= report.sum.last_time for report in taken.values())


def test_guesses_from_everywhere_hide_no_use_of_a_key_that_was_revoked() -> None:
    sums = FailureSums(ManualClock())
    for number in range(10_000):
        sums.add(FailureKind.UNKNOWN, f"10.0.{number // 250}.{number % 250}")
    sums.add(FailureKind.REVOKED, HERE, KeyId("key_1"))
    reports = sums.reports()
    assert ("key_1", 1) in [(report.key_id, report.sum.count) for report in reports]
    assert sum(report.sum.count for report in reports if not report.sum.source) > 9000
