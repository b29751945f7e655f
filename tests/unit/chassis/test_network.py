"""Certificates, HTTP pages, DNS lookups, and the choice of a replica."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trustme
from hypothesis import assume, given
from hypothesis import strategies as st

from pawl.chassis.process.start import StartError
from pawl.chassis.process.tasks import shield
from pawl.chassis.rpc import tls
from pawl.chassis.rpc.replicas import CALLS_MAX, ReplicaHealth, choose, key_of, preference
from pawl.chassis.rpc.tls import services_of
from pawl.job.v1 import ledger_pb2, schedules_pb2
from pawl.server.egress.addresses import Lookups
from pawl.server.process.http_server import HttpServer, Response, application
from pawl.tool.v1 import execution_pb2
from tests import certificates
from tests.fakes.manual_clock import ManualClock
from tests.tables import for_each


@for_each(
    ("names", "uris", "services"),
    [
        ([b"agent-loop", b"10-0-0-1.pods"], [], {"agent-loop", "10-0-0-1.pods"}),
        ([], [b"spiffe://example.org/pawl/agent-loop"], {"agent-loop"}),
        ([], [b"spiffe://example.org/pawl/agent-loop/2"], set()),
        ([], [b"spiffe://example.org/ns/pawl/agent-loop"], set()),
        ([], [b"https://example.org/pawl/agent-loop"], set()),
        ([], [b"spiffe:///pawl/agent-loop", b"\xff", b"spiffe://[/pawl/"], set()),
        ([], [], set()),
    ],
)
def test_a_certificate_names_services_by_dns_or_by_spiffe_id(
    names: list[bytes], uris: list[bytes], services: set[str]
) -> None:
    assert services_of({"peer_dns": names, "peer_uri": uris, "x509_common_name": [b"job-store"]}) == services


async def test_a_new_certificate_is_used_once_its_key_matches(
    tmp_path: Path, authority: trustme.CA, clock: ManualClock
) -> None:
    """A renewal cannot replace two files atomically."""
    files = certificates.write(tmp_path, "agent-loop", authority)
    shown = certificates.tls_of(files, clock)
    first = shown()
    key = files.key.read_bytes()
    certificates.write(tmp_path, "agent-loop", authority)
    new_key = files.key.read_bytes()
    files.key.write_bytes(key)
    await clock.advance(1)
    assert shown() is first
    files.key.write_bytes(new_key)
    await clock.advance(1)
    assert (shown().key, shown().certificate) == (new_key, files.certificate.read_bytes())


def test_unusable_tls_files_are_reported_at_start(tmp_path: Path, authority: trustme.CA, clock: ManualClock) -> None:
    files = certificates.write(tmp_path, "agent-loop", authority)
    other = certificates.write(tmp_path, "notifier", authority)
    missing, nonsense = tmp_path / "missing", tmp_path / "nonsense"
    nonsense.write_text("nonsense")
    for certificate, key, ca, says in (
        (missing, files.key, None, f"PAWL_TLS_CERTIFICATE_FILE: cannot read {missing}"),
        (files.certificate, missing, None, f"cannot read {missing}"),
        (files.certificate, files.key, missing, f"cannot read {missing}"),
        (files.certificate, other.key, None, "it does not match PAWL_TLS_KEY_FILE"),
        (nonsense, files.key, None, "it does not match PAWL_TLS_KEY_FILE"),
        (files.certificate, files.key, nonsense, "PAWL_TLS_CA_FILE has no PEM certificates"),
    ):
        with pytest.raises(StartError, match=says) as caught:
            tls.of_service(certificate, key, ca, clock=clock)
        assert "nonsense\n" not in str(caught.value)
    with pytest.raises(StartError, match="PAWL_TLS_CA_FILE has no PEM certificates"):
        tls.of_client(nonsense, clock)
    with pytest.raises(StartError, match=f"PAWL_TLS_CA_FILE: cannot use {missing}"):
        tls.of_bus(missing, None, None)


SPIFFE_ID = "spiffe://example.org/pawl/job-store"


def test_servers_need_a_dns_name_and_clients_any_identity() -> None:
    rows: list[tuple[list[tuple[str, str]], bool, str]] = [
        ([("DNS", "job-store"), ("DNS", "localhost")], True, ""),
        ([("DNS", "job-store")], False, ""),
        ([("URI", SPIFFE_ID), ("DNS", "job-store")], True, ""),
        ([("URI", SPIFFE_ID)], False, ""),
        ([("URI", SPIFFE_ID)], True, f"lacks the DNS name `job-store`; it has `{SPIFFE_ID}`"),
        ([("IP Address", "job-store")], True, "lacks the DNS name `job-store`; it has `job-store`"),
        ([], True, "lacks the DNS name `job-store`; it has none"),
        (
            [("URI", f"{SPIFFE_ID}/2"), ("DNS", "a")],
            False,
            (
                "has neither the DNS name `job-store` nor the URI `spiffe://ANY-DOMAIN/pawl/job-store`,"
                f" only `a`, `{SPIFFE_ID}/2`"
            ),
        ),
    ]
    for names, is_called, says in rows:
        assert tls.name_missing(names, "job-store", is_called=is_called) == says
    assert tls.server_name("pawl.example:7601", "agent-loop") is None, "gRPC compares the host of the address"
    assert tls.server_name("10.0.0.1:7601,10.0.0.2:7601", "agent-loop") == "agent-loop"


def test_a_certificate_for_another_service_is_reported_at_start(
    tmp_path: Path, authority: trustme.CA, clock: ManualClock
) -> None:
    """Otherwise calls to the service would fail without a reason in its own log."""
    files = certificates.write(tmp_path, "job-store", authority)
    shown = certificates.tls_of(files, clock)()
    for is_called in (True, False):
        tls.check_own(shown, "job-store", is_called=is_called)
        with pytest.raises(StartError, match=r"^PAWL_TLS_CERTIFICATE_FILE .*`notifier`.*`127.0.0.1`, `job-store`"):
            tls.check_own(shown, "notifier", is_called=is_called)
    expired = certificates.write(tmp_path, "late", authority, names=("job-store",), expired=True)
    tls.check_own(certificates.tls_of(expired, clock)(), "job-store", is_called=True)  # used as soon as its files exist
    alone = tls.of_service(files.certificate, files.key, None, clock=clock)
    assert alone is not None
    tls.check_own(alone(), "notifier", is_called=False)  # Without an authority names are not compared.
    files.authority.write_bytes(trustme.CA().cert_pem.bytes())
    with pytest.raises(StartError, match="PAWL_TLS_CERTIFICATE_FILE is not signed by the authority in"):
        tls.check_own(certificates.tls_of(files, clock)(), "job-store", is_called=True)
    files.authority.write_bytes(files.authority.read_bytes() + authority.cert_pem.bytes())
    tls.check_own(certificates.tls_of(files, clock)(), "job-store", is_called=True)


def fail() -> Response:
    raise RuntimeError("hunter2")


PAGES = {"/metrics": lambda: Response(body=b"up 1\n"), "/fail": fail}


async def ask(address: str, request: bytes) -> bytes:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    try:
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


async def test_pages_are_served_and_other_requests_get_an_error_status() -> None:
    async with HttpServer(application(PAGES), "127.0.0.1:0") as server:
        answer = await ask(server.address, b"GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n")
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert (b"content-length: 5" in head, body) == (True, b"up 1\n")
        for request, status in (
            (b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n", b"404"),
            (b"POST /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"405"),
            (b"nonsense\r\n\r\n", b"400"),
            (b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 9000, b"400"),
            (b"GET /fail HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"500"),
        ):
            answer = await ask(server.address, request)
            assert answer.startswith(b"HTTP/1.1 " + status), request
            assert b"hunter2" not in answer


async def test_a_port_in_use_gives_one_clear_error() -> None:
    async with HttpServer(application(PAGES), "127.0.0.1:0") as server:
        with pytest.raises(StartError, match="cannot listen on 127"):
            await HttpServer(application(PAGES), server.address).__aenter__()


class HangingNames:
    """A resolver that does not answer names starting with `hang` until the test releases it."""

    def __init__(self) -> None:
        self.answered = asyncio.Event()
        self.asked: Counter[str] = Counter()

    async def __call__(self, host: str, _: int) -> Sequence[str]:
        self.asked[host] += 1
        if host.startswith("hang"):
            await self.answered.wait()
        return ["127.0.0.1"]


async def looked_up(lookups: Lookups, store: str, host: str) -> Sequence[str]:
    return await shield(await lookups.start(store, host, 80))


async def test_hanging_lookups_of_one_store_leave_half_of_the_slots_to_others() -> None:
    names = HangingNames()
    lookups = Lookups(names, at_once_max=8)
    stores = {"acme": "hang.acme", "other": "hang.other", "third": "hang.third"}
    waiting = [asyncio.create_task(looked_up(lookups, *each)) for each in stores.items() for _ in range(20)]
    assert await asyncio.wait_for(looked_up(lookups, "fourth", "fine"), 60) == ["127.0.0.1"]
    assert names.asked == {"hang.acme": 4, "hang.other": 2, "hang.third": 1, "fine": 1}
    for each in waiting[1:]:
        each.cancel()
    names.answered.set()
    assert await asyncio.wait_for(waiting[0], 60) == ["127.0.0.1"]
    assert await asyncio.wait_for(looked_up(lookups, "acme", "fine"), 60) == ["127.0.0.1"]
    assert names.asked.total() == 9, "a cancelled lookup takes no slot"


names = st.integers(min_value=1, max_value=200).map("10.0.0.{}:7603".format)
health_states = st.builds(
    ReplicaHealth,
    name=names,
    is_connected=st.booleans(),
    is_unavailable=st.booleans(),
    is_busy=st.booleans(),
    calls=st.integers(min_value=0, max_value=2 * CALLS_MAX),
)
replicas = st.lists(health_states, min_size=1, max_size=6, unique_by=lambda replica: replica.name)
well = replicas.map(lambda many: [ReplicaHealth(name=one.name) for one in many])


@given(st.text(), replicas, st.randoms())
def test_preference_does_not_depend_on_the_order_of_the_replicas(
    key: str, known: list[ReplicaHealth], chance: Random
) -> None:
    mixed = list(known)
    chance.shuffle(mixed)
    found, other = (
        [many[at].name for at in preference(key, tuple(one.name for one in many))] for many in (known, mixed)
    )
    assert (found, sorted(found)) == (other, sorted(one.name for one in known))


@given(st.text(), well, st.integers(min_value=0, max_value=5))
def test_a_lost_replica_moves_only_its_own_stores(key: str, known: list[ReplicaHealth], gone: int) -> None:
    assume(len(known) > 1)
    at = choose(key, known)
    left = [one for number, one in enumerate(known) if number != gone % len(known)]
    if at != gone % len(known):
        assert left[choose(key, left)] == known[at]
    degraded = [replace(one, is_unavailable=number == gone % len(known)) for number, one in enumerate(known)]
    assert degraded[choose(key, degraded)].name == left[choose(key, left)].name


@given(st.text(), replicas)
def test_the_best_available_replica_is_chosen(key: str, known: list[ReplicaHealth]) -> None:
    at = known[choose(key, known)]
    reached = [one for one in known if one.is_connected and not one.is_unavailable]
    free = [one for one in reached if not one.is_busy and one.calls < CALLS_MAX]
    if free:
        assert at in free
    elif reached:
        assert at in reached
        assert at.calls == min(one.calls for one in reached if one.is_busy == at.is_busy)
        assert not at.is_busy or all(one.is_busy for one in reached)
    else:
        assert not at.is_unavailable or all(one.is_unavailable for one in known)
        # A silent replica may only be slow, but an unreachable replica cannot serve at all.
        assert at.is_connected or not at.is_unavailable or not any(one.is_connected for one in known)


@given(st.text(), well)
def test_small_load_differences_do_not_move_stores(key: str, known: list[ReplicaHealth]) -> None:
    at = choose(key, known)
    assert choose(key, [replace(one, calls=CALLS_MAX - 1) for one in known]) == at
    full = [replace(one, calls=CALLS_MAX if number == at else 0) for number, one in enumerate(known)]
    assert (choose(key, full) == at) == (len(known) == 1)


def test_a_call_is_routed_by_the_store_or_worker_in_its_request() -> None:
    due = schedules_pb2.DueSchedule(owner=schedules_pb2.ScheduleOwner(store_id="acme"))
    message = ledger_pb2.SubmitMessageRequest(store_id="acme")
    requests: list[tuple[Any, str]] = [
        (ledger_pb2.CommitRunRequest(store_id="acme"), "acme"),
        (execution_pb2.CheckCallsRequest(context=execution_pb2.CallContext(store_id="acme")), "acme"),
        (ledger_pb2.ClaimRunsRequest(worker_id="wrk_1"), "wrk_1"),
        (execution_pb2.CheckAnswerRequest(), ""),
        (schedules_pb2.FireScheduleRequest(due=due, refusal="no agent"), "acme"),
        (schedules_pb2.FireScheduleRequest(message=message), "acme"),
        (ledger_pb2.StartJobRequest(message=message), "acme"),
        (schedules_pb2.FireScheduleRequest(), ""),
    ]
    assert [key_of(request) for request, _ in requests] == [key for _, key in requests]
