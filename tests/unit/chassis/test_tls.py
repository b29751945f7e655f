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


def test_several_addresses_have_one_name() -> None:
    """gRPC compares a certificate with the host of an address only where there is one."""
    assert tls.server_name("pawl.example:7601", "agent-loop") is None
    assert tls.server_name("10.0.0.1:7601,10.0.0.2:7601", "agent-loop") == "agent-loop"
    assert tls.server_name("unix:/run/pawl", "agent-loop") == "agent-loop"
