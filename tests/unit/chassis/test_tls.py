"""The names in certificates, and the files that they come from."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme

from pawl.chassis import tls
from pawl.chassis.start import StartError
from pawl.chassis.tls import Tls, services_of
from tests import certificates
from tests.certificates import Files
from tests.fakes.manual_clock import ManualClock

SPIFFE_ID = "spiffe://example.org/pawl/job-store"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def of(files: Files, clock: ManualClock) -> Tls:
    found = tls.of_service(files.certificate, files.key, files.authority, clock=clock)
    assert found is not None
    return found


@pytest.mark.parametrize(
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


async def test_a_certificate_counts_once_its_key_is_there_too(
    tmp_path: Path, authority: trustme.CA, clock: ManualClock
) -> None:
    """Whoever renews them cannot replace two files at once."""
    files = certificates.write(tmp_path, "agent-loop", authority)
    shown = of(files, clock)
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


async def test_an_authority_that_changes_alone_counts(
    tmp_path: Path, authority: trustme.CA, clock: ManualClock
) -> None:
    files = certificates.write(tmp_path, "agent-loop", authority)
    shown, seen = of(files, clock), tls.of_client(files.authority, clock)
    assert seen is not None
    both = files.authority.read_bytes() + trustme.CA().cert_pem.bytes()
    files.authority.write_bytes(both)
    await clock.advance(1)
    assert shown().authority == seen().authority == both
    files.authority.write_bytes(b"nonsense")
    await clock.advance(1)
    assert shown().authority == seen().authority == both


def test_files_that_cannot_be_used_are_named_at_the_start(
    tmp_path: Path, authority: trustme.CA, clock: ManualClock
) -> None:
    files = certificates.write(tmp_path, "agent-loop", authority)
    other = certificates.write(tmp_path, "notifier", authority)
    missing, nonsense = tmp_path / "missing", tmp_path / "nonsense"
    nonsense.write_text("nonsense")
    for certificate, key, ca, says in (
        (missing, files.key, None, f"PAWL_TLS_CERTIFICATE_FILE: cannot read {missing}"),
        (files.certificate, missing, None, f"cannot read {missing}"),
        (files.certificate, files.key, missing, f"cannot read {missing}"),
        (files.certificate, other.key, None, "PAWL_TLS_KEY_FILE are no certificate with its key"),
        (nonsense, files.key, None, "PAWL_TLS_KEY_FILE are no certificate with its key"),
        (files.certificate, files.key, nonsense, "PAWL_TLS_CA_FILE has no certificates"),
    ):
        with pytest.raises(StartError, match=says) as caught:
            tls.of_service(certificate, key, ca, clock=clock)
        assert "nonsense\n" not in str(caught.value)
    with pytest.raises(StartError, match="PAWL_TLS_CA_FILE has no certificates"):
        tls.of_client(nonsense, clock)
    with pytest.raises(StartError, match=f"PAWL_NATS_CA_FILE: cannot use {missing}"):
        tls.of_bus(missing, None, None)


@pytest.mark.parametrize(
    ("names", "is_called", "says"),
    [
        ([("DNS", "job-store"), ("DNS", "localhost")], True, ""),
        ([("DNS", "job-store")], False, ""),
        ([("URI", SPIFFE_ID), ("DNS", "job-store")], True, ""),
        ([("URI", SPIFFE_ID)], False, ""),
        ([("URI", SPIFFE_ID)], True, f"has not the DNS name `job-store`, only `{SPIFFE_ID}`"),
        ([("IP Address", "job-store")], True, "has not the DNS name `job-store`, only `job-store`"),
        ([], True, "has not the DNS name `job-store`, only none"),
        (
            [("URI", f"{SPIFFE_ID}/2"), ("DNS", "a")],
            False,
            (
                "has neither the DNS name `job-store` nor the URI `spiffe://ANY-DOMAIN/pawl/job-store`,"
                f" only `a`, `{SPIFFE_ID}/2`"
            ),
        ),
    ],
)
def test_whom_others_call_needs_its_dns_name_and_who_only_calls_either_of_two(
    names: list[tuple[str, str]], is_called: bool, says: str
) -> None:
    assert tls.name_missing(names, "job-store", is_called=is_called) == says


@pytest.mark.parametrize("is_called", [True, False])
def test_a_service_that_its_certificate_does_not_name_says_so_at_its_start(
    tmp_path: Path, authority: trustme.CA, clock: ManualClock, is_called: bool
) -> None:
    """Else the others just cannot reach it, or do not know its key, and no log of its own has why."""
    shown = of(certificates.write(tmp_path, "job-store", authority), clock)()
    tls.check_own(shown, "job-store", is_called=is_called)
    with pytest.raises(StartError, match=r"^PAWL_TLS_CERTIFICATE_FILE: .*`notifier`.*only `127.0.0.1`, `job-store`"):
        tls.check_own(shown, "notifier", is_called=is_called)


def test_a_certificate_of_another_authority_is_told_at_the_start(
    tmp_path: Path, authority: trustme.CA, clock: ManualClock
) -> None:
    files = certificates.write(tmp_path, "job-store", authority)
    files.authority.write_bytes(trustme.CA().cert_pem.bytes())
    with pytest.raises(StartError, match="PAWL_TLS_CERTIFICATE_FILE: is not of the authority in PAWL_TLS_CA_FILE"):
        tls.check_own(of(files, clock)(), "job-store", is_called=True)
    files.authority.write_bytes(files.authority.read_bytes() + authority.cert_pem.bytes())
    tls.check_own(of(files, clock)(), "job-store", is_called=True)


def test_a_certificate_that_is_renewed_too_late_stops_no_start(
    tmp_path: Path, authority: trustme.CA, clock: ManualClock
) -> None:
    """The new one counts as soon as its files are there; and without an authority nobody compares names."""
    expired = certificates.write(tmp_path, "job-store", authority, expired=True)
    tls.check_own(of(expired, clock)(), "job-store", is_called=True)
    other = certificates.write(tmp_path, "pawl.example", authority, names=("pawl.example",))
    shown = tls.of_service(other.certificate, other.key, None, clock=clock)
    assert shown is not None
    tls.check_own(shown(), "agent-loop", is_called=False)


def test_several_addresses_have_one_name() -> None:
    """gRPC compares a certificate with the host of an address only where there is one."""
    assert tls.server_name("pawl.example:7601", "agent-loop") is None
    assert tls.server_name("10.0.0.1:7601,10.0.0.2:7601", "agent-loop") == "agent-loop"
    assert tls.server_name("unix:/run/pawl", "agent-loop") == "agent-loop"
